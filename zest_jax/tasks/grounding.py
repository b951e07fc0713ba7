"""The passages of walks, and what a pool writes of them: filter (c) of Dr. Free.

A walk is kept when one of the passages of its source mentions the next entity; the first that does
is the source's passage. Of the other entities the first passage (the beginning of the article) is
taken. Where descriptions are given, an entity whose description and article hardly share a word
was aligned with the wrong article, and its walks are dropped.

Letters: h hops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from zest_jax.retrieval.interface import Passage as Found
from zest_jax.tasks.alignment import Alignment, PassageSource
from zest_jax.tasks.chain_pool import ChainRecord, EntityRecord, RelationRecord
from zest_jax.tasks.names import Bools, NameIndex, SurfaceRules, Tell, mentions, name_key
from zest_jax.tasks.types import Passage
from zest_jax.tasks.walks import Drawn, Graph
from zest_jax.tasks.wikidata import Ints, NameTable
from zest_jax.text import normalize_answer

_DESCRIBED = 30  # words of a description that are looked for


class Grounding:
    """Passages and names of the entities that walks came by.

    Args:
      graph: the graph.
      table: names of entities.
      index: which of them one entity bears alone.
      relation_labels: label of each relation row, "" without one.
      alignment: passages of entities.
      rules: what an alias must be like to be an answer or a mention.
      described: whether `compare` will be called, for which the beginning of every source's article
        is kept as well.
    """

    def __init__(
        self,
        graph: Graph,
        table: NameTable,
        index: NameIndex,
        relation_labels: Sequence[str],
        alignment: Alignment,
        rules: SurfaceRules,
        described: bool = False,
    ):
        self._graph, self._table, self._index = graph, table, index
        self._labels, self._alignment, self._rules = relation_labels, alignment, rules
        self._described = described
        self._name_rows = table.rows_of(graph.entities)
        self._first: dict[int, Passage] = {}
        self._mention: dict[tuple[int, int], Passage | None] = {}
        self._aliases: dict[int, tuple[str, ...]] = {}
        self._misaligned: set[int] = set()
        self._compared: dict[int, int] = {}  # rows by number

    def collect(self, source: PassageSource, walks: Iterable[Drawn], tell: Tell) -> None:
        """Reads the passages that walks need; those of earlier calls are not read again.

        Args:
          source: the corpus.
          walks: of any lengths.
          tell: called with the passages read, of `needed` of the same walks.
        """
        owner, heads, pending = self._open(walks)
        rows = np.array(sorted(owner.keys() | heads.keys()), np.int64)
        for row, passage in source.read(rows, tell):
            if row in owner:
                self._first[owner[row]] = _stored(passage)
            head = heads.get(row, -1)
            missing = pending.get(head)
            if missing:
                pending[head] = [t for t in missing if not self._mentioned(head, t, passage)]
        for head, missing in pending.items():
            for tail in missing:
                self._mention[head, tail] = None

    def needed(self, walks: Iterable[Drawn]) -> int:
        """How many passages `collect` would read."""
        owner, heads, _ = self._open(walks)
        return len(owner.keys() | heads.keys())

    def _open(
        self, walks: Iterable[Drawn]
    ) -> tuple[dict[int, int], dict[int, int], dict[int, list[int]]]:
        """What is not known yet: entities by the row of their first passage, heads by the rows of
        their passages, and the tails that are looked for by head."""
        first: set[int] = set()
        pairs: set[tuple[int, int]] = set()
        for drawn in walks:
            begin = 0 if self._described else 1
            first.update(np.unique(drawn.entities[:, begin:]).tolist())
            pairs.update((head, tail) for head, tail in drawn.entities[:, :2].tolist())
        passages_of = self._alignment.passages_of
        owner = {int(passages_of(entity)[0]): entity for entity in first - self._first.keys()}
        pending: dict[int, list[int]] = {}
        for head, tail in sorted(pairs - self._mention.keys()):
            pending.setdefault(head, []).append(tail)
        heads = {row: head for head in pending for row in passages_of(head).tolist()}
        return owner, heads, pending

    def _mentioned(self, head: int, tail: int, passage: Found) -> bool:
        # Its title may not have been read yet; a name of the same letters is among these.
        if not mentions(passage.text, self.aliases(tail)):
            return False
        self._mention[head, tail] = _stored(passage)
        return True

    def aliases(self, entity: int) -> tuple[str, ...]:
        """The names that an entity bears alone and that may be asked for."""
        if entity not in self._aliases:
            names = self._index.own(self._table, int(self._name_rows[entity]))
            self._aliases[entity] = tuple(name for name in names if self._rules.allow(name))
        return self._aliases[entity]

    # --------------------------------------------------------------------------- descriptions

    def undescribed(self, walks: Iterable[Drawn]) -> Ints:
        """Ascending numbers of entities that were not compared yet, of walks with a mention."""
        rows: set[int] = set()
        for drawn in walks:
            rows.update(np.unique(drawn.entities[self.mentioned(drawn)]).tolist())
        new = sorted(rows.difference(self._compared.values()))
        numbers = self._graph.entities[new]
        self._compared.update(zip(numbers.tolist(), new, strict=True))
        return numbers

    def compare(self, described: Iterable[tuple[int, str]], share: float) -> None:
        """Compares descriptions with the beginnings of articles.

        Args:
          described: numbers, as `undescribed` gave them, and descriptions.
          share: the share of a description's first words that the passage must hold.
        """
        for number, text in described:
            row = self._compared[number]
            words = set(normalize_answer(text).split()[:_DESCRIBED])
            article = self._first[row]
            there = set(normalize_answer(f"{article.title} {article.text}").split())
            if words and len(words & there) < share * len(words):
                self._misaligned.add(row)

    # -------------------------------------------------------------------------------- records

    def mentioned(self, drawn: Drawn) -> Bools:
        """Filter (c), [B] bool: whether a passage of the source mentions the next entity."""
        pairs = drawn.entities[:, :2].tolist()
        return np.array([self._mention[head, tail] is not None for head, tail in pairs], bool)

    def aligned(self, drawn: Drawn) -> Bools:
        """[B] bool: whether no description speaks against an entity of a walk."""
        wrong = np.isin(drawn.entities, sorted(self._misaligned))
        return np.asarray(~wrong.any(axis=1), bool)

    def record(self, nodes: Sequence[int], kinds: Sequence[int]) -> ChainRecord:
        """What a pool holds of a walk that passed `mentioned`."""
        head = self._mention[nodes[0], nodes[1]]
        assert head is not None
        passages = [head, *(self._first[node] for node in nodes[1:])]
        entities = tuple(
            self._entity(node, passage) for node, passage in zip(nodes, passages, strict=True)
        )
        relations = tuple(
            RelationRecord(f"P{self._graph.relations[kind]}", self._labels[kind]) for kind in kinds
        )
        return ChainRecord(entities, relations)

    def _entity(self, node: int, passage: Passage) -> EntityRecord:
        # The corpus's spelling of the name is the one that its readers know.
        label, key = passage.title.strip(), name_key(passage.title)
        aliases = tuple(name for name in self.aliases(node) if name_key(name) != key)
        return EntityRecord(f"Q{self._graph.entities[node]}", label, aliases, passage)


def _stored(passage: Found) -> Passage:
    return Passage(passage.id, passage.title, passage.text)
