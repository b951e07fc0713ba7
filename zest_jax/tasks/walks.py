"""A knowledge graph of tens of millions of triples as flat arrays, and random walks through it.

How walks are drawn. Every step draws a triple with the weight ``n_r ** (power - 1)``, where n_r is
the number of usable triples of its relation: the first among all usable first triples, a later one
among those that leave the place. So a relation r is the first of a walk with a chance in proportion
to ``n_r ** power``: with power 1 relations come as often as in the graph, with 0 all equally often,
between them frequent ones lead without filling the pool. Within a relation all triples have equal
chances, and a head has hardly more than one triple of a usable relation, so that heads with many
triples do not lead either. `Caps` bound how often one entity may be a source or an answer.

Letters: E entities, R relations, T triples, B walks, h hops.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zest_jax.tasks.chains import acyclic
from zest_jax.tasks.wikidata import Ints, find

Bools = NDArray[np.bool_]
Longs = NDArray[np.int64]


@dataclass(frozen=True)
class Graph:
    """Triples grouped by head, sorted by relation and tail within; rows, not ids.

    Attributes:
      entities: [E] int32, ascending numbers of the entities' ids.
      relations: [R] int32, ascending numbers of the relations' ids.
      offsets: [E + 1] int64, where the triples of a head begin.
      relation: [T] int32, row of each triple's relation.
      tail: [T] int32, row of its tail.
      repeated: triples that came more than once.
    """

    entities: Ints
    relations: Ints
    offsets: Longs
    relation: Ints
    tail: Ints
    repeated: int

    @property
    def triples(self) -> int:
        """T."""
        return len(self.tail)

    def heads(self) -> Ints:
        """[T] int32, row of each triple's head; made anew at every call."""
        return np.repeat(np.arange(len(self.entities), dtype=np.int32), np.diff(self.offsets))


def build_graph(triples: Ints) -> Graph:
    """Sorts triples [3, T] of id numbers into the grouped form; a repeated one counts once.

    Needs about 40 bytes a triple while it works.
    """
    heads, kinds, tails = triples
    entities = np.unique(np.concatenate([np.unique(heads), np.unique(tails)]))
    relations = np.unique(kinds)
    E, R = len(entities), len(relations)
    key = find(entities, heads).astype(np.int64)
    key *= R
    key += find(relations, kinds)
    key *= E
    key += find(entities, tails)
    key.sort()
    fresh = np.ones(len(key), bool)
    fresh[1:] = key[1:] != key[:-1]
    repeated = len(key) - int(fresh.sum())
    if repeated:
        key = key[fresh]
    del fresh
    tail = (key % E).astype(np.int32)
    key //= E
    relation = (key % R).astype(np.int32)
    key //= R
    offsets = np.concatenate([[0], np.cumsum(np.bincount(key, minlength=E))]).astype(np.int64)
    return Graph(entities, relations, offsets, relation, tail, repeated)


def few_tails(graph: Graph, most: int) -> Bools:
    """Filter (b): the triples whose head and relation have at most ``most`` tails, [T] bool."""
    if not graph.triples:
        return np.zeros(0, bool)
    begins = np.ones(graph.triples, bool)
    begins[1:] = graph.relation[1:] != graph.relation[:-1]
    starts = graph.offsets[:-1]
    begins[starts[starts < graph.triples]] = True
    first = np.flatnonzero(begins)
    length = np.diff(np.append(first, graph.triples))
    return np.repeat(length <= most, length)


def held_out(entities: Ints, share: float) -> Bools:
    """Which entities are held out, [E] bool: by a hash of the id, so the same in every graph.

    The hash is the finaliser of splitmix64 of the number, read as a fraction of 2^64.
    """
    x = entities.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return x.astype(np.float64) / 2.0**64 < share


class Drawn(NamedTuple):
    """Walks of one length.

    Attributes:
      entities: [B, h + 1] int32 rows.
      relations: [B, h] int32 rows.
    """

    entities: Ints
    relations: Ints


@dataclass
class Caps:
    """How often one entity may be a source, or an answer, among the chains of one length; 0: any.

    Attributes:
      source: of a source.
      answer: of an answer.
    """

    source: int = 0
    answer: int = 0
    _sources: Counter[int] = field(default_factory=Counter)
    _answers: Counter[int] = field(default_factory=Counter)

    def admit(self, source: int, answer: int) -> bool:
        """Counts a chain, unless one of its ends has reached its cap."""
        if self.source and self._sources[source] >= self.source:
            return False
        if self.answer and self._answers[answer] >= self.answer:
            return False
        self._sources[source] += 1
        self._answers[answer] += 1
        return True


class Ways:
    """The part of a graph that is walked; walks of all lengths share it.

    Args:
      graph: the graph.
      usable: [T] bool, triples that may be walked.
      start: [E] bool, entities that may stand first.
      power: see the head of this file.
    """

    def __init__(self, graph: Graph, usable: Bools, start: Bools, power: float):
        heads = graph.heads()[usable]
        self._relation, self._tail = graph.relation[usable], graph.tail[usable]
        degree = np.bincount(heads, minlength=len(graph.entities))
        self._offsets = np.concatenate([[0], np.cumsum(degree)]).astype(np.int64)
        self._steps = _Weights(self._relation, power)
        self._firsts = np.flatnonzero(start[heads])
        self._first_heads = heads[self._firsts]
        self._first_steps = _Weights(self._relation[self._firsts], power)

    def __len__(self) -> int:
        """Triples that may come first."""
        return len(self._firsts)

    def walk(self, hops: int, size: int, rng: np.random.Generator) -> Drawn:
        """Draws ``size`` walks and gives those that do not end before their last step."""
        at = self._first_steps.among_all(size, rng)
        triple = self._firsts[at]
        place = self._tail[triple]
        nodes = [self._first_heads[at], place]
        kinds = [self._relation[triple]]
        for _ in range(hops - 1):
            begin, end = self._offsets[place], self._offsets[place + 1]
            going = end > begin
            nodes, kinds = [n[going] for n in nodes], [k[going] for k in kinds]
            triple = self._steps.between(begin[going], end[going], rng)
            place = self._tail[triple]
            nodes.append(place)
            kinds.append(self._relation[triple])
        return Drawn(np.stack(nodes, axis=1), np.stack(kinds, axis=1))


class Walker:
    """Draws walks of one length, again and again, never the same one twice.

    Args:
      ways: what is walked.
      hops: h.
      rng: the only source of chance.
      caps: of what is drawn.

    Attributes:
      counts: what became of the walks: "walks", "dead_end", "cycle", "repeated", "capped", "drawn".
      exhausted: whether new walks hardly turn up any more.
    """

    def __init__(self, ways: Ways, hops: int, rng: np.random.Generator, caps: Caps):
        self.hops, self._ways, self._rng, self._caps = hops, ways, rng, caps
        self._seen: set[bytes] = set()
        self.counts = dict.fromkeys(
            ("walks", "dead_end", "cycle", "repeated", "capped", "drawn"), 0
        )
        self.exhausted = not len(ways)

    def draw(self, count: int) -> Drawn:
        """Up to ``count`` more walks that pass filter (a); fewer where there are hardly more."""
        entities: list[Ints] = []
        relations: list[Ints] = []
        found = idle = 0
        while found < count and not self.exhausted:
            size = min(1 << 16, max(1024, 2 * (count - found)))
            nodes, kinds = self._ways.walk(self.hops, size, self._rng)
            self.counts["dead_end"] += size - len(nodes)
            fine = acyclic(nodes)
            self.counts["cycle"] += int((~fine).sum())
            self.counts["walks"] += size
            picked = self._admit(nodes[fine], kinds[fine], count - found)
            entities.append(nodes[fine][picked])
            relations.append(kinds[fine][picked])
            found += len(picked)
            idle = idle + 1 if len(picked) < size // 500 + 1 and found < count else 0
            self.exhausted = idle >= 8
        self.counts["drawn"] += found
        if not found:
            empty = np.zeros((0, self.hops + 1), np.int32)
            return Drawn(empty, empty[:, 1:])
        return Drawn(np.concatenate(entities), np.concatenate(relations))

    def _admit(self, nodes: Ints, kinds: Ints, most: int) -> list[int]:
        """Which walks are new and under the caps, at most so many."""
        picked: list[int] = []
        walks = np.ascontiguousarray(np.concatenate([nodes, kinds], axis=1))
        for i, (source, answer) in enumerate(nodes[:, [0, -1]].tolist()):
            if len(picked) == most:
                # The rest was walked, but is neither kept nor known.
                self.counts["walks"] -= len(nodes) - i
                break
            key = walks[i].tobytes()
            if key in self._seen:
                self.counts["repeated"] += 1
            elif not self._caps.admit(source, answer):
                self.counts["capped"] += 1
            else:
                self._seen.add(key)
                picked.append(i)
        return picked


class _Weights:
    """Triples to draw from by the weight of their relations.

    Args:
      relation: of each triple.
      power: see the head of this file.
    """

    def __init__(self, relation: Ints, power: float):
        often = np.maximum(np.bincount(relation), 1).astype(np.float64)
        weight = often ** (power - 1.0)
        # Sums of whole numbers are exact in any order; weights are made such, 2^20 for the largest
        # (a triple of a relation a million times as frequent keeps a weight of one).
        scaled = np.maximum(np.round(weight / weight.max(initial=1e-300) * 2.0**20), 1.0)
        self._sums = np.concatenate([[0], np.cumsum(scaled.astype(np.int64)[relation])])

    def among_all(self, size: int, rng: np.random.Generator) -> Longs:
        """Triples out of all of them."""
        draw = rng.integers(self._sums[-1], size=size)
        return np.searchsorted(self._sums, draw, "right") - 1

    def between(self, begin: Longs, end: Longs, rng: np.random.Generator) -> Longs:
        """One triple out of each range begin <= triple < end."""
        draw = rng.integers(self._sums[begin], self._sums[end])
        return np.searchsorted(self._sums, draw, "right") - 1
