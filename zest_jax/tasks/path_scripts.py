"""Scripted stages of evidence-path-guided question writing: naming a target, writing from a path.

They are to `configs/zest_search.py:atlas` what `scripts.proposer_script` is to the smoke run: a
policy learns the form by imitation, and some scripts are flawed on purpose.
"""

from __future__ import annotations

import numpy as np

from zest_jax.rollout.protocols import PLAIN_PROPOSER
from zest_jax.rollout.protocols.plain import PLAIN_TARGET
from zest_jax.tasks.atlas import Atlas
from zest_jax.tasks.evidence_paths import sentences
from zest_jax.tasks.path_building import relation_words
from zest_jax.tasks.scripts import Segment, named_in, random_names, render
from zest_jax.tasks.templates import nested_question
from zest_jax.tasks.types import Chain


def target_script(
    chain: Chain, atlas: Atlas, rng: np.random.Generator, flawed: bool = False
) -> list[Segment]:
    """Names an entity of the kind that a reference question asks for.

    Args:
      chain: the walk whose nested question is the reference.
      flawed: names the entity that the reference begins with, or nothing ("unknown").
    """
    graph, kinds = atlas.graph, atlas.kinds
    reference = nested_question(chain, atlas, rng)
    alike = [
        e
        for e in np.flatnonzero(atlas.train).tolist()
        if kinds[e] == kinds[chain.entities[-1]] and e not in chain.entities
    ]
    answer = graph.labels[alike[int(rng.integers(len(alike)))]] if alike else "unknown"
    if flawed:
        answer = "unknown" if rng.random() < 0.5 else graph.labels[chain.entities[0]]
    return [
        (PLAIN_TARGET.prompt.format(question=reference), False),
        (f"<answer> {answer}</answer>", True),
    ]


def path_script(
    chain: Chain,
    atlas: Atlas,
    rng: np.random.Generator,
    rename: bool = False,
    flaw: str | None = None,
) -> list[Segment]:
    """Writes the question of a path: relations in the words of the sentences that hold them, and
    the documents of those sentences (a path of h hops has h, the answer's own is not among them).

    Args:
      chain: the walk that the path follows.
      rename: replace every entity that the episode names by a random string.
      flaw: "leak" names the answer in the question, "between" the entity before it (from two hops
        on), "no_think" leaves the thought out; None for a good question.
    """
    names = random_names(named_in(atlas, chain.entities), atlas, rng) if rename else {}
    labels = atlas.graph.labels

    def name(entity: int) -> str:
        return names.get(entity, labels[entity])

    words = [name(chain.entities[0])]
    for head, relation, tail in zip(
        chain.entities, chain.relations, chain.entities[1:], strict=False
    ):
        words += [_said(atlas, head, relation, tail), name(tail)]
    passages = "".join(f"{render(atlas, e, names)}\n" for e in chain.entities[:-1])
    first = chain.hops - 1 if flaw == "between" else 0
    question = nested_question(chain, atlas, rng, first_hop=first, names=names)
    answer = name(chain.entities[-1])
    if flaw == "leak":
        question = f"{question[:-1]}, {answer}?"
    thought = ", ".join([words[2 * first], *words[2 * first + 1 :: 2]])
    output = "" if flaw == "no_think" else f"<think> {thought}</think>"
    output += f"<question> {question}</question><answer> {answer}</answer>"
    prompt = PLAIN_PROPOSER.prompt.format(chain=" | ".join(words), passages=passages)
    return [(prompt, False), (output, True)]


def path_flaws(hops: int) -> tuple[str, ...]:
    """The flaws that a question of so many hops can have."""
    return ("leak", "no_think", "between") if hops > 1 else ("leak", "no_think")


def _said(atlas: Atlas, head: int, relation: int, tail: int) -> str:
    """The relation as a sentence of the head's passage says it; its label where none does."""
    graph = atlas.graph
    label = graph.relation_labels[relation]
    both = (*graph.names(head), *graph.names(tail))
    said = [
        relation_words(sentence, both)
        for sentence in sentences(atlas.passage_of(head).text)
        if graph.labels[tail] in sentence
    ]
    # Several sentences may name the tail; the one that shares the label's last word is meant.
    said = [words for words in said if set(words.split()) & set(label.lower().split())]
    return said[0] if said else label
