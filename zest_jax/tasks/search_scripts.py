"""Scripted episodes of proposers that search: from a document onwards, or from an answer backwards.

They are to `configs/dr_zero.py:atlas` and `configs/ssp.py:atlas` what `scripts.proposer_script` is
to the smoke run: a policy learns the form by imitation, and some scripts are flawed on purpose.
"""

from __future__ import annotations

import numpy as np

from zest_jax.rollout.protocols import PLAIN_BACKWARD, PLAIN_DOCUMENT
from zest_jax.tasks.atlas import Atlas
from zest_jax.tasks.scripts import Segment, named_in, random_names, render
from zest_jax.tasks.templates import nested_question
from zest_jax.tasks.types import Chain


def document_script(
    chain: Chain, atlas: Atlas, rng: np.random.Generator, rename: bool = False, flawed: bool = False
) -> list[Segment]:
    """Reads the source's passage, searches for each entity between, and asks for the last one.

    Args:
      chain: the walk whose nested question is asked; a chain of h hops takes h - 1 searches.
      rename: replace every entity that the episode names by a random string.
      flawed: asks for the first hop, which the document answers, without any search (which is what
        Dr. Zero's proposers were found to do); a question of one hop names its answer.
    """
    names = random_names(named_in(atlas, chain.entities), atlas, rng) if rename else {}
    labels, relations = atlas.graph.labels, atlas.graph.relation_labels

    def name(entity: int) -> str:
        return names.get(entity, labels[entity])

    title, _, text = render(atlas, chain.entities[0], names).strip().partition(": ")
    prompt = PLAIN_DOCUMENT.prompt.format(hops=chain.hops, title=title, text=text)
    segments: list[Segment] = [(prompt, False)]
    asked = chain
    if flawed and chain.hops > 1:
        asked = Chain(chain.id, chain.entities[:2], chain.relations[:1])
    question = nested_question(asked, atlas, rng, names=names)
    answer = name(asked.entities[-1])
    if flawed and chain.hops == 1:
        question = f"{question[:-1]}, {answer}?"
    for relation, entity in zip(asked.relations, asked.entities[1:-1], strict=False):
        segments.append(
            (f"<think> {relations[relation]}</think><search> {name(entity)}</search>", True)
        )
        segments.append((f"<information>{render(atlas, entity, names)}</information>", False))
    thought = ", ".join([name(chain.entities[0]), *(relations[r] for r in asked.relations)])
    segments.append(
        (
            f"<think> {thought}</think><question> {question}</question><answer> {answer}</answer>",
            True,
        )
    )
    return segments


def backward_chain(atlas: Atlas, searches: int, rng: np.random.Generator) -> Chain | None:
    """A chain that can be found from its answer: every passage names the entity before it.

    Args:
      searches: passages that are read, the answer's own first; the chain has one hop less.

    Returns:
      None where a walk from a random entity of the training split gets stuck.
    """
    graph, training = atlas.graph, np.flatnonzero(atlas.train)
    walk, relations = [int(training[rng.integers(len(training))])], []
    for _ in range(searches - 1):
        here = walk[-1]
        steps = [
            (before, relation)
            for _, before in graph.facts(here)
            if before not in walk and atlas.train[before]
            for relation, tail in graph.facts(before)
            if tail == here and sum(r == relation for r, _ in graph.facts(before)) == 1
        ]
        if not steps:
            return None
        before, relation = steps[int(rng.integers(len(steps)))]
        walk.append(before)
        relations.append(relation)
    entities, relations = tuple(walk[::-1]), relations[::-1]
    ids = [graph.entity_ids[entities[0]]]
    for relation, entity in zip(relations, entities[1:], strict=True):
        ids += [graph.relation_ids[relation], graph.entity_ids[entity]]
    return Chain("|".join(ids), entities, tuple(relations))


def backward_script(
    chain: Chain, atlas: Atlas, rng: np.random.Generator, rename: bool = False, flawed: bool = False
) -> list[Segment]:
    """Searches from the answer back to the first entity, and asks from there.

    Args:
      chain: of `backward_chain`.
      rename: replace every entity that the episode names by a random string.
      flawed: searches for the answer only, and asks a question that names it.
    """
    names = random_names(named_in(atlas, chain.entities), atlas, rng) if rename else {}
    labels, relations = atlas.graph.labels, atlas.graph.relation_labels

    def name(entity: int) -> str:
        return names.get(entity, labels[entity])

    answer = name(chain.entities[-1])
    prompt = PLAIN_BACKWARD.prompt.format(answer=answer, searches=chain.hops + 1)
    segments: list[Segment] = [(prompt, False)]
    read = chain.entities[:0:-1] if not flawed else chain.entities[-1:]
    read = (*read, *chain.entities[:1]) if not flawed else read
    thoughts = ["answer", *(relations[r] for r in chain.relations[::-1])]
    for thought, entity in zip(thoughts, read, strict=False):
        segments.append((f"<think> {thought}</think><search> {name(entity)}</search>", True))
        segments.append((f"<information>{render(atlas, entity, names)}</information>", False))
    question = nested_question(chain, atlas, rng, names=names)
    if flawed:
        question = f"{question[:-1]}, {answer}?"
    thought = ", ".join([name(chain.entities[0]), *(relations[r] for r in chain.relations)])
    segments.append((f"<think> {thought}</think><question> {question}</question>", True))
    return segments
