"""A knowledge graph as flat arrays, so that the same code holds 5 thousand or 20 million triples.

Triples are grouped by head (compressed sparse rows): those of entity ``e`` stand at
``head_offsets[e]:head_offsets[e + 1]`` of ``relations`` and ``tails``, sorted by relation and tail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zest_jax.errors import UserError
from zest_jax.tasks.types import Passage, read_records

Ints = NDArray[np.int32]
Offsets = NDArray[np.int64]


@dataclass(frozen=True)
class KnowledgeGraph:
    """Entities, relations and triples; numbers are rows of these tables.

    Attributes:
      entity_ids: [E] ids as in the files, e.g. Wikidata's Q numbers.
      labels: [E] names as written in text.
      aliases: [E] other names, without the label.
      relation_ids: [R] ids of the relations.
      relation_labels: [R] one to three plain words.
      head_offsets: [E + 1] int64, where an entity's triples begin.
      relations: [T] int32, relation of each triple, grouped by head.
      tails: [T] int32, tail of each triple.
      passage_offsets: [E + 1] int64, where an entity's passages begin in `passage_rows`.
      passage_rows: [P] int32, rows of the passage table that are about the entity.
    """

    entity_ids: Sequence[str]
    labels: Sequence[str]
    aliases: Sequence[tuple[str, ...]]
    relation_ids: Sequence[str]
    relation_labels: Sequence[str]
    head_offsets: Offsets
    relations: Ints
    tails: Ints
    passage_offsets: Offsets
    passage_rows: Ints

    @property
    def entity_count(self) -> int:
        """E."""
        return len(self.labels)

    @property
    def triple_count(self) -> int:
        """T."""
        return len(self.tails)

    @cached_property
    def heads(self) -> Ints:
        """[T] int32, head of each triple; made when first asked for."""
        counts = np.diff(self.head_offsets)
        return np.repeat(np.arange(self.entity_count, dtype=np.int32), counts)

    @cached_property
    def row_of(self) -> dict[str, int]:
        """Entity id -> row."""
        return {key: row for row, key in enumerate(self.entity_ids)}

    def facts(self, entity: int) -> list[tuple[int, int]]:
        """All (relation, tail) of an entity."""
        part = slice(self.head_offsets[entity], self.head_offsets[entity + 1])
        return list(zip(self.relations[part].tolist(), self.tails[part].tolist(), strict=True))

    def tails_of(self, entity: int, relation: int) -> list[int]:
        """All tails of (entity, relation)."""
        return [tail for rel, tail in self.facts(entity) if rel == relation]

    def passages_of(self, entity: int) -> Ints:
        """Rows of the passages about an entity."""
        return self.passage_rows[self.passage_offsets[entity] : self.passage_offsets[entity + 1]]

    def names(self, entity: int) -> tuple[str, ...]:
        """Label and aliases, the label first."""
        return (self.labels[entity], *self.aliases[entity])

    @classmethod
    def from_triples(
        cls,
        entities: Sequence[tuple[str, str, tuple[str, ...]]],
        relations: Sequence[tuple[str, str]],
        triples: NDArray[np.integer] | Sequence[tuple[int, int, int]],
        passages_by_entity: Sequence[Sequence[int]],
    ) -> KnowledgeGraph:
        """Sorts triples of rows into the grouped form; a repeated triple counts once.

        Args:
          entities: (id, label, aliases) by row.
          relations: (id, label) by row.
          triples: [T, 3] of head, relation and tail rows.
          passages_by_entity: rows of each entity's passages.
        """
        table = np.asarray(triples, dtype=np.int64).reshape(-1, 3)
        table = table[np.lexsort((table[:, 2], table[:, 1], table[:, 0]))]
        if len(table):
            fresh = np.concatenate([[True], np.any(np.diff(table, axis=0) != 0, axis=1)])
            table = table[fresh]
        return cls(
            entity_ids=[row[0] for row in entities],
            labels=[row[1] for row in entities],
            aliases=[row[2] for row in entities],
            relation_ids=[row[0] for row in relations],
            relation_labels=[row[1] for row in relations],
            head_offsets=_offsets(np.bincount(table[:, 0], minlength=len(entities))),
            relations=table[:, 1].astype(np.int32),
            tails=table[:, 2].astype(np.int32),
            passage_offsets=_offsets(np.array([len(rows) for rows in passages_by_entity])),
            passage_rows=np.array(
                [row for rows in passages_by_entity for row in rows], dtype=np.int32
            ),
        )

    @classmethod
    def from_files(
        cls,
        entities: str | Path,
        relations: str | Path,
        triples: str | Path,
        passages: Iterable[Passage],
    ) -> KnowledgeGraph:
        """Reads a graph; a passage belongs to the entity whose id it has or whose title it bears.

        Args:
          entities: JSON lines {"id", "label", "aliases"?}.
          relations: JSON lines {"id", "label"}.
          triples: lines ``head id TAB relation id TAB tail id``.
          passages: the corpus in its order; row numbers of it are kept per entity.

        Raises:
          UserError: a file is missing, empty or malformed, or a triple names an unknown id (file,
            line and what was expected).
        """
        entity_rows = [
            _entity(record, where) for record, where in read_records(entities, "entities")
        ]
        relation_rows = [
            (_text(record, "id", where), _text(record, "label", where))
            for record, where in read_records(relations, "relations")
        ]
        row_of = _index([row[0] for row in entity_rows], entities)
        relation_row_of = _index([row[0] for row in relation_rows], relations)
        table = _read_triples(Path(triples), row_of, relation_row_of)
        by_title: dict[str, int] = {}
        for row, (_, label, _aliases) in enumerate(entity_rows):
            # A title that two entities bear says nothing; -1 marks it.
            by_title[label] = -1 if label in by_title else row
        owned: list[list[int]] = [[] for _ in entity_rows]
        for number, passage in enumerate(passages):
            owner = row_of.get(passage.id, by_title.get(passage.title, -1))
            if owner >= 0:
                owned[owner].append(number)
        return cls.from_triples(entity_rows, relation_rows, table, owned)


def _offsets(counts: NDArray[np.integer]) -> Offsets:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _text(record: dict, name: str, where: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value:
        raise UserError(f"{where}: the field '{name}' (a text) is missing.")
    return value


def _entity(record: dict, where: str) -> tuple[str, str, tuple[str, ...]]:
    aliases = record.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise UserError(f"{where}: the field 'aliases' must be a list of texts.")
    return _text(record, "id", where), _text(record, "label", where), tuple(aliases)


def _index(ids: list[str], path: str | Path) -> dict[str, int]:
    index = {key: row for row, key in enumerate(ids)}
    if len(index) != len(ids):
        twice = Counter(ids).most_common(1)[0][0]
        raise UserError(f"{path}: the id '{twice}' comes twice; ids must be unique.")
    return index


def _read_triples(
    path: Path, entities: dict[str, int], relations: dict[str, int]
) -> NDArray[np.int64]:
    rows: list[int] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                parts = line.rstrip("\r\n").split("\t")
                if len(parts) != 3:
                    raise UserError(
                        f"{path}, line {number}: expected head, relation and tail ids with tabs "
                        f"between, found {len(parts)} field(s)."
                    )
                try:
                    rows += (entities[parts[0]], relations[parts[1]], entities[parts[2]])
                except KeyError as error:
                    raise UserError(
                        f"{path}, line {number}: the id {error} is in neither the entity nor the "
                        "relation file."
                    ) from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected a table of triples.") from None
    if not rows:
        raise UserError(f"{path}: the file is empty; expected at least one triple.")
    return np.array(rows, dtype=np.int64).reshape(-1, 3)
