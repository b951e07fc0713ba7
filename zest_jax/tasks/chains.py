"""Chains for the proposer: random walks through a knowledge graph, and Dr. Free's three filters.

A chain is ``C = (e0, r1, e1, ..., rh, eh)``. It is kept when

(a) `acyclic`: no entity comes twice;
(b) `unambiguous`: every relation maps its head to one (or almost one) tail, and no entity bears a
    name that another entity bears too;
(c) `supported`: every entity has a passage, and a passage of e0 mentions e1.

Letters: B walks, E entities, T triples, h hops.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zest_jax.errors import UserError
from zest_jax.tasks.graph import KnowledgeGraph
from zest_jax.tasks.types import Chain, Passage

Bools = NDArray[np.bool_]

# More chains than this are never listed one by one; a graph that has them can be sampled blindly.
_LISTING_LIMIT = 4_000_000


def acyclic(entities: NDArray[np.integer]) -> Bools:
    """Filter (a): which walks visit no entity twice.

    Args:
      entities: [B, h + 1] entity rows.

    Returns:
      [B] bool.
    """
    ordered = np.sort(entities, axis=1)
    return ~np.any(ordered[:, 1:] == ordered[:, :-1], axis=1)


def unambiguous(graph: KnowledgeGraph, max_tails: int = 1) -> Bools:
    """Filter (b): which triples may stand in a chain.

    A triple passes when its (head, relation) has at most ``max_tails`` tails ("almost one" is at
    most 2; 1 is the safe default) and neither end bears a name of another entity. Names are
    compared without case, accents and marks.

    Returns:
      [T] bool.
    """
    # Triples are grouped by head and sorted by relation, so equal pairs are runs.
    heads, relations = graph.heads, graph.relations
    if not len(heads):
        return np.zeros(0, bool)
    begins = np.concatenate([[True], (heads[1:] != heads[:-1]) | (relations[1:] != relations[:-1])])
    run = np.cumsum(begins) - 1
    few = np.bincount(run)[run] <= max_tails
    clear = _clear_names(graph)
    return few & clear[heads] & clear[graph.tails]


def _clear_names(graph: KnowledgeGraph) -> Bools:
    owner: dict[str, int] = {}
    clear = np.ones(graph.entity_count, bool)
    for row in range(graph.entity_count):
        for name in {plain(name) for name in graph.names(row)}:
            first = owner.setdefault(name, row)
            if first != row or not name:
                clear[[first, row]] = False
    return clear


def supported(graph: KnowledgeGraph, passages: Sequence[Passage]) -> tuple[Bools, Bools]:
    """Filter (c): which entities have a passage, and which triples a passage of the head mentions.

    Returns:
      ([E] bool, [T] bool). A chain passes when all its entities and its first triple do.
    """
    covered = np.diff(graph.passage_offsets) > 0
    mentioned = np.zeros(graph.triple_count, bool)
    for head in np.flatnonzero(covered & (np.diff(graph.head_offsets) > 0)).tolist():
        text = " ".join(
            f"{plain(passages[row].title)} {plain(passages[row].text)}"
            for row in graph.passages_of(head)
        )
        text = f" {text} "
        for triple in range(graph.head_offsets[head], graph.head_offsets[head + 1]):
            names = graph.names(int(graph.tails[triple]))
            mentioned[triple] = any(f" {plain(name)} " in text for name in names)
    return covered, mentioned


def plain(text: str) -> str:
    """Text without case, accents and marks, words parted by one space, to look names up in."""
    text = "".join(
        char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char)
    )
    return " ".join(re.findall(r"\w+", text.lower()))


def sample_chains(
    graph: KnowledgeGraph,
    hops: int,
    count: int,
    rng: np.random.Generator,
    *,
    triples: Bools | None = None,
    first_triples: Bools | None = None,
    allowed: Bools | None = None,
    start: Bools | None = None,
) -> list[Chain]:
    """Draws different chains by random walk: a start at random, then an outgoing triple at random.

    The filters enter as masks, which are worked out once for a graph: ``triples`` from
    `unambiguous` (and the passages that `supported` found), ``first_triples`` from `supported`;
    `acyclic` is applied to the walks here. `Atlas.sample_chains` puts them together.

    Args:
      hops: number of relations, h >= 1.
      count: number of chains; no two of the result are the same.
      rng: the only source of chance; the same state gives the same chains.
      triples: [T] bool, triples that may be walked; those that are `unambiguous` without it.
      first_triples: [T] bool, those that may come first; all of ``triples`` without it.
      allowed: [E] bool, entities that may stand at any position; all without it.
      start: [E] bool, entities that may stand first; all of ``allowed`` without it. A start need
        not be ``allowed`` itself.

    Raises:
      UserError: the graph has fewer such chains than asked for.
    """
    if hops < 1 or count < 0:
        raise ValueError(f"Cannot draw {count} chains of {hops} hops.")
    steps = _steps(graph, hops, triples, first_triples, allowed, start)
    starts = np.flatnonzero(steps[0].counts)

    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    idle = 0
    while len(found) < count and len(starts) and idle < 8:
        before = len(found)
        entities, walked = _walk(graph, steps, starts, max(256, 2 * (count - before)), rng)
        good = acyclic(entities) & np.all(walked >= 0, axis=1)
        for nodes, path in zip(entities[good].tolist(), walked[good].tolist(), strict=True):
            if len(found) < count:
                found.setdefault(tuple(path), tuple(nodes))
        idle = 0 if len(found) - before > (count - before) // 50 else idle + 1
    if len(found) < count:
        _add_the_rest(graph, steps, starts, count, found, rng)
    return [_chain(graph, nodes, path) for path, nodes in found.items()]


def count_chains(
    graph: KnowledgeGraph,
    hops: int,
    *,
    triples: Bools | None = None,
    first_triples: Bools | None = None,
    allowed: Bools | None = None,
    start: Bools | None = None,
) -> int:
    """Number of chains that `sample_chains` chooses from, by listing them all."""
    steps = _steps(graph, hops, triples, first_triples, allowed, start)
    return len(_list_all(graph, steps, np.flatnonzero(steps[0].counts))[0])


def _steps(
    graph: KnowledgeGraph,
    hops: int,
    triples: Bools | None,
    first_triples: Bools | None,
    allowed: Bools | None,
    start: Bools | None,
) -> list[_Step]:
    triples = unambiguous(graph) if triples is None else triples
    allowed = np.ones(graph.entity_count, bool) if allowed is None else allowed
    start = allowed if start is None else start
    later = triples & allowed[graph.tails]
    first = later & start[graph.heads]
    if first_triples is not None:
        first = first & first_triples
    return [_Step(graph, first)] + [_Step(graph, later & allowed[graph.heads])] * (hops - 1)


class _Step:
    """The triples open to one step of a walk, grouped by head."""

    def __init__(self, graph: KnowledgeGraph, mask: Bools) -> None:
        self.triples = np.flatnonzero(mask)
        self.counts = np.bincount(graph.heads[self.triples], minlength=graph.entity_count)
        self.offsets = np.concatenate([[0], np.cumsum(self.counts)])[:-1]


def _walk(
    graph: KnowledgeGraph,
    steps: Sequence[_Step],
    starts: NDArray[np.integer],
    walks: int,
    rng: np.random.Generator,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[B, h + 1] entities and [B, h] triples; a walk that got stuck has triple -1."""
    place = starts[rng.integers(len(starts), size=walks)]
    entities, walked = [place], []
    alive = np.ones(walks, bool)
    for step in steps:
        counts = step.counts[place]
        alive = alive & (counts > 0)
        pick = step.offsets[place] + rng.integers(np.maximum(counts, 1))
        # A sentinel at the end keeps the look-up of a stuck walk in range.
        triple = np.where(alive, np.append(step.triples, -1)[np.where(alive, pick, -1)], -1)
        place = np.where(alive, graph.tails[triple], place)
        entities.append(place)
        walked.append(triple)
    return np.stack(entities, axis=1), np.stack(walked, axis=1)


def _list_all(
    graph: KnowledgeGraph, steps: Sequence[_Step], starts: NDArray[np.integer]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every acyclic walk: [B, h + 1] entities and [B, h] triples."""
    entities = starts[:, None].astype(np.int64)
    walked = np.zeros((len(starts), 0), np.int64)
    for step in steps:
        counts = step.counts[entities[:, -1]]
        if counts.sum() > _LISTING_LIMIT:
            raise ValueError("The graph has too many chains to list.")
        source = np.repeat(np.arange(len(entities)), counts)
        within = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
        triple = step.triples[step.offsets[entities[source, -1]] + within]
        entities = np.concatenate([entities[source], graph.tails[triple][:, None]], axis=1)
        walked = np.concatenate([walked[source], triple[:, None]], axis=1)
        keep = acyclic(entities)
        entities, walked = entities[keep], walked[keep]
    return entities, walked


def _add_the_rest(
    graph: KnowledgeGraph,
    steps: Sequence[_Step],
    starts: NDArray[np.integer],
    count: int,
    found: dict[tuple[int, ...], tuple[int, ...]],
    rng: np.random.Generator,
) -> None:
    """Fills up from the list of all chains when walks hardly find new ones any more."""
    entities, walked = _list_all(graph, steps, starts)
    if len(entities) < count:
        raise UserError(
            f"Only {len(entities)} chains of {len(steps)} hop(s) pass the filters, but {count} "
            "were asked for; ask for fewer, allow more entities or use a larger graph."
        )
    for row in rng.permutation(len(entities)):
        if len(found) == count:
            return
        found.setdefault(tuple(walked[row].tolist()), tuple(entities[row].tolist()))


def _chain(graph: KnowledgeGraph, nodes: tuple[int, ...], path: tuple[int, ...]) -> Chain:
    relations = tuple(int(graph.relations[triple]) for triple in path)
    parts = [graph.entity_ids[nodes[0]]]
    for relation, node in zip(relations, nodes[1:], strict=True):
        parts += [graph.relation_ids[relation], graph.entity_ids[node]]
    return Chain("|".join(parts), nodes, relations)
