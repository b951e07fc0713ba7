"""Scripted episodes for behaviour cloning, right ones and flawed ones.

An episode is a list of segments ``(text, trained)``; their concatenation is the whole episode. What
the policy would have to produce itself is trained, prompts and retrieved passages are not.

Names may be replaced by random strings, the same everywhere in an episode. A policy that has only
seen real names learns facts by heart; one that meets names it cannot know has to copy them from the
passage, and that is what carries over to entities held out.

Flawed scripts leave reinforcement learning something to mend: a warm start on right scripts only
ends where sampling shows no difference between good and bad behaviour.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from zest_jax.rollout.protocols import PLAIN_PROPOSER
from zest_jax.tasks.atlas import Atlas
from zest_jax.tasks.templates import nested_question
from zest_jax.tasks.types import Chain

Segment = tuple[str, bool]
Names = Mapping[int, str]

SOLVER_FLAWS = ("early_answer", "wrong_field", "relation_query")
PROPOSER_FLAWS = ("shortcut", "leak", "wrong_answer", "no_think")

_MAX_PARTS = 6


# ── Prompts, shared with the programs that sample ──────────────────────────────────────────────


def solver_prompt(question: str) -> str:
    """The solver's prompt: ``"Q: " + question + newline``."""
    return f"Q: {question}\n"


def proposer_prompt(
    chain: Chain,
    atlas: Atlas,
    names: Names | None = None,
    template: str = PLAIN_PROPOSER.prompt,
) -> str:
    """The proposer's prompt: the chain in one line, then the passage of each entity."""
    parts = chain_words(chain, atlas, names)
    passages = "".join(f"{render(atlas, entity, names)}\n" for entity in chain.entities)
    return template.format(chain=" | ".join(parts), passages=passages)


def chain_words(chain: Chain, atlas: Atlas, names: Names | None = None) -> list[str]:
    """Entity, relation, entity, … of a chain in words, names replaced where ``names`` has them."""
    names, labels = names or {}, atlas.graph.labels
    words = [names.get(chain.entities[0], labels[chain.entities[0]])]
    for relation, entity in zip(chain.relations, chain.entities[1:], strict=True):
        words += [atlas.graph.relation_labels[relation], names.get(entity, labels[entity])]
    return words


def render(atlas: Atlas, entity: int, names: Names | None = None) -> str:
    """An entity's passage as the policy reads it, names replaced where ``names`` has them."""
    if not names:
        return atlas.passage_of(entity).render()
    labels = atlas.graph.labels
    return "".join(
        part if isinstance(part, str) else names.get(part, labels[part])
        for part in atlas.pieces[entity]
    )


# ── Solver ─────────────────────────────────────────────────────────────────────────────────────


def solver_script(
    chain: Chain,
    atlas: Atlas,
    rng: np.random.Generator,
    rename: bool = False,
    flaw: str | None = None,
) -> list[Segment]:
    """Searches along a chain, then answers.

    Flaws (each still ends in an answer, and a wrong one):
      early_answer: gives up after the first search and answers the entity reached by it; a 1-hop
        question is answered without any search.
      wrong_field: reads a wrong relation of the right passage at one hop and follows it.
      relation_query: searches a relation's words at one hop; a passage drawn at random comes back,
        and the rest follows from it.

    Args:
      chain: the walk whose nested question is asked.
      rename: replace every entity that the episode names by a random string.
      flaw: one of `SOLVER_FLAWS`, or None for a right script.
    """
    if flaw is not None and flaw not in SOLVER_FLAWS:
        raise ValueError(f"No solver flaw '{flaw}'; there are {', '.join(SOLVER_FLAWS)}.")
    steps, answer = _plan(chain, atlas, rng, flaw)
    names: dict[int, str] = {}
    if rename:
        shown = [passage for _, _, passage in steps] + list(chain.entities)
        names = random_names(named_in(atlas, shown), atlas, rng)
    labels = atlas.graph.labels
    question = nested_question(chain, atlas, rng, names=names)
    segments: list[Segment] = [(solver_prompt(question), False)]
    for thought, query, passage in steps:
        shown_query = query if isinstance(query, str) else names.get(query, labels[query])
        segments.append((f"<think> {thought}</think><search> {shown_query}</search>", True))
        segments.append((f"<information>{render(atlas, passage, names)}</information>", False))
    shown_answer = names.get(answer, labels[answer])
    segments.append((f"<think> done</think><answer> {shown_answer}</answer>", True))
    return segments


# A search: what is thought, what is asked for (an entity, or words), whose passage comes back.
_Search = tuple[str, int | str, int]


def _plan(
    chain: Chain, atlas: Atlas, rng: np.random.Generator, flaw: str | None
) -> tuple[list[_Search], int]:
    right = chain.entities[-1]
    if flaw == "wrong_field" or flaw == "relation_query":
        # A detour can lead back to the right answer by chance; then it is no flaw.
        for _ in range(8):
            steps, answer = _detour(chain, atlas, rng, flaw)
            if answer != right:
                return steps, answer
        flaw = "early_answer"
    labels = atlas.graph.relation_labels
    stop = chain.hops
    if flaw == "early_answer":
        stop = min(1, chain.hops - 1)
    steps = [
        (labels[chain.relations[hop]], chain.entities[hop], chain.entities[hop])
        for hop in range(stop)
    ]
    return steps, chain.entities[stop]


def _detour(
    chain: Chain, atlas: Atlas, rng: np.random.Generator, flaw: str
) -> tuple[list[_Search], int]:
    labels = atlas.graph.relation_labels
    turn = int(rng.integers(chain.hops))
    place = chain.entities[0]
    steps: list[_Search] = []
    for hop, relation in enumerate(chain.relations):
        if hop != turn:
            steps.append((labels[relation], place, place))
            place = _follow(atlas, place, relation, rng)
        elif flaw == "relation_query":
            other = int(rng.integers(atlas.graph.entity_count))
            steps.append((labels[relation], labels[relation], other))
            place = _follow(atlas, other, relation, rng)
        else:
            facts = [(r, t) for r, t in atlas.graph.facts(place) if t != chain.entities[hop + 1]]
            # Without another field to read there is nothing to go wrong at this hop.
            wrong, tail = facts[int(rng.integers(len(facts)))] if facts else (
                relation, chain.entities[hop + 1])  # fmt: skip
            # Half of them misread the passage, the other half already look for the wrong thing.
            thought = relation if rng.random() < 0.5 else wrong
            steps.append((labels[thought], place, place))
            place = tail
    return steps, place


def _follow(atlas: Atlas, entity: int, relation: int, rng: np.random.Generator) -> int:
    """The entity that a reader of the passage takes: the relation's tail, else any."""
    facts = atlas.graph.facts(entity)
    tails = [tail for rel, tail in facts if rel == relation] or [tail for _, tail in facts]
    if not tails:
        return entity
    return tails[0] if len(tails) == 1 else tails[int(rng.integers(len(tails)))]


def reading_script(
    chain: Chain, atlas: Atlas, rng: np.random.Generator, rename: bool = False
) -> list[Segment]:
    """The question, the chain's passages in one go, and the answer; only the answer is trained.

    It teaches what likelihood scoring measures: the answer's probability given
    passages. So that "the title of the last passage" is no way to the answer, half of the scripts
    leave out the answer's own passage, and half shuffle the passages.
    """
    names = random_names(named_in(atlas, chain.entities), atlas, rng) if rename else {}
    order = list(chain.entities if rng.random() < 0.5 else chain.entities[:-1])
    if rng.random() < 0.5:
        order = [order[i] for i in rng.permutation(len(order))]
    question = nested_question(chain, atlas, rng, names=names)
    context = "".join(
        f"<information>{render(atlas, entity, names)}</information>" for entity in order
    )
    answer = names.get(chain.entities[-1], atlas.graph.labels[chain.entities[-1]])
    return [
        (f"{solver_prompt(question)}{context}<answer>", False),
        (f" {answer}</answer>", True),
    ]


# ── Proposer ───────────────────────────────────────────────────────────────────────────────────


def proposer_script(
    chain: Chain,
    atlas: Atlas,
    rng: np.random.Generator,
    rename: bool = False,
    flaw: str | None = None,
) -> list[Segment]:
    """Writes the question of a chain.

    Flaws:
      shortcut: asks for the last hop only, from e_{h-1}; needs two hops or more.
      leak: the answer's name stands in the question.
      wrong_answer: gives another entity of the chain as the answer.
      no_think: leaves out the thought.
    """
    if flaw is not None and flaw not in PROPOSER_FLAWS:
        raise ValueError(f"No proposer flaw '{flaw}'; there are {', '.join(PROPOSER_FLAWS)}.")
    if flaw == "shortcut" and chain.hops < 2:
        raise ValueError("A question of one hop has no shorter form; take another flaw.")
    names = random_names(named_in(atlas, chain.entities), atlas, rng) if rename else {}
    labels = atlas.graph.labels
    first = chain.hops - 1 if flaw == "shortcut" else 0
    question = nested_question(chain, atlas, rng, first_hop=first, names=names)
    answer = chain.entities[-1]
    if flaw == "leak":
        question = f"{question[:-1]}, {names.get(answer, labels[answer])}?"
    if flaw == "wrong_answer":
        answer = chain.entities[int(rng.integers(chain.hops))]
    source = chain.entities[first]
    relations = [atlas.graph.relation_labels[relation] for relation in chain.relations[first:]]
    thought = ", ".join([names.get(source, labels[source]), *relations])
    output = "" if flaw == "no_think" else f"<think> {thought}</think>"
    output += f"<question> {question}</question>"
    output += f"<answer> {names.get(answer, labels[answer])}</answer>"
    return [(proposer_prompt(chain, atlas, names), False), (output, True)]


def proposer_flaws(hops: int) -> tuple[str, ...]:
    """The flaws that a question of so many hops can have."""
    return PROPOSER_FLAWS if hops > 1 else PROPOSER_FLAWS[1:]


# ── Names ──────────────────────────────────────────────────────────────────────────────────────


def random_names(entities: Iterable[int], atlas: Atlas, rng: np.random.Generator) -> dict[int, str]:
    """A random name for each entity, all different: 1 to 6 pieces of the atlas vocabulary.

    The first piece begins a word with a capital; of the others about one in eight begins a second
    word. Encoded again, a name may take fewer tokens than the pieces it was put together from.
    """
    heads, tails = atlas.name_pieces
    order = list(dict.fromkeys(entities))
    names: dict[int, str] = {}
    used: set[str] = set()
    while order:
        draws = rng.integers(0, 1 << 30, size=(len(order), 2 * _MAX_PARTS + 1)).tolist()
        again = []
        for entity, row in zip(order, draws, strict=True):
            name = heads[row[1] % len(heads)]
            for part in range(1, 1 + row[0] % _MAX_PARTS):
                if row[_MAX_PARTS + part] % 8 == 0:
                    name = f"{name} {heads[row[1 + part] % len(heads)]}"
                else:
                    name += tails[row[1 + part] % len(tails)]
            if name in used:
                again.append(entity)
            else:
                used.add(name)
                names[entity] = name
        order = again
    return names


def named_in(atlas: Atlas, passages: Iterable[int]) -> list[int]:
    """Every entity that these entities' passages name, in order and with repetition."""
    return [
        part for entity in passages for part in atlas.pieces[entity] if not isinstance(part, str)
    ]
