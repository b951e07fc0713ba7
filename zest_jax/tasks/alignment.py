"""Aligns the entities of a knowledge graph with the passages of a corpus.

An entity belongs to the passages whose title is one of its names (`names.name_key`). A name that
several entities bear says nothing and is dropped; so is a title that the corpus writes in several
ways, since these may be several articles. Of an entity whose names are titles of several articles
the name that its row has first counts.

Letters: E entities of the graph, N passages, W titles that are names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zest_jax.files import writing
from zest_jax.retrieval.corpora import Corpus, Position
from zest_jax.retrieval.interface import Passage
from zest_jax.retrieval.passages import PassageTexts
from zest_jax.retrieval.storage import mapped
from zest_jax.tasks.names import (
    Bools,
    Hashes,
    NameIndex,
    SurfaceRules,
    Tell,
    as_hashes,
    hash_key,
    name_key,
)
from zest_jax.tasks.wikidata import Ints, find

_MEGABYTE = 1_000_000
_ROWS = 4096  # passages of a store read at a time


# ------------------------------------------------------------------------------------- corpora


class PassageSource(Protocol):
    """A corpus that is read twice: all titles, then some passages.

    Attributes:
      size: what `titles` counts up to.
      unit: what it counts.
    """

    size: int
    unit: str

    def titles(self, tell: Tell) -> Iterator[list[str]]:
        """All titles in their order; `tell` is called with how far they are read, of `size`."""
        ...

    def read(self, rows: NDArray[np.int64], tell: Tell) -> Iterator[tuple[int, Passage]]:
        """The passages of ascending rows; `tell` is called with those read."""
        ...

    def identity(self) -> dict[str, Any]:
        """What tells it from another corpus without reading it."""
        ...

    def about(self) -> dict[str, Any]:
        """Name, format, passages and fingerprint; to be called after `titles` or `restore`."""
        ...

    def state(self) -> dict[str, Any]:
        """What `titles` found out, as JSON."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Takes the place of `titles`."""
        ...


class CorpusFile:
    """A corpus as `open_corpus` reads it; every reading goes through all of it.

    Attributes:
      malformed: the first malformed lines.
    """

    def __init__(self, corpus: Corpus):
        self._corpus = corpus
        self.size, self.unit = -(-corpus.total_bytes // _MEGABYTE), "MB"
        self._starts: list[Position] = []  # of the batches
        self._passages, self._fingerprint = 0, ""
        self.malformed: list[str] = []

    def titles(self, tell: Tell) -> Iterator[list[str]]:
        self._starts = []
        fingerprint = _Fingerprint()
        start = Position()
        for batch in self._corpus.batches():
            self._starts.append(start)
            start = batch.end
            fingerprint.add(batch.passages)
            done = batch.bytes_done
            tell(self.size if done == self._corpus.total_bytes else done // _MEGABYTE)
            yield [passage.title for passage in batch.passages]
        self._passages, self._fingerprint = start.passages, fingerprint.value()
        self.malformed = [str(entry) for entry in self._corpus.malformed]

    def read(self, rows: NDArray[np.int64], tell: Tell) -> Iterator[tuple[int, Passage]]:
        if not len(rows):
            return
        # Nothing needs to be read before the batch of the first row.
        firsts = np.array([start.passages for start in self._starts])
        start = self._starts[int(np.searchsorted(firsts, rows[0], "right")) - 1]
        at = 0
        for batch in self._corpus.batches(start):
            first = batch.end.passages - len(batch.passages)
            upto = int(np.searchsorted(rows, batch.end.passages))
            for row in rows[at:upto].tolist():
                yield row, batch.passages[row - first]
            at = upto
            tell(at)
            if at == len(rows):
                return

    def identity(self) -> dict[str, Any]:
        return self._corpus.identity()

    def about(self) -> dict[str, Any]:
        return {
            "name": self._corpus.name,
            "format": self._corpus.format,
            "passages": self._passages,
            "fingerprint": self._fingerprint,
        }

    def state(self) -> dict[str, Any]:
        starts = [dataclasses.astuple(start) for start in self._starts]
        return {"about": self.about(), "starts": starts, "malformed": self.malformed}

    def restore(self, state: dict[str, Any]) -> None:
        self._passages = state["about"]["passages"]
        self._fingerprint = state["about"]["fingerprint"]
        self._starts = [Position(*start) for start in state["starts"]]
        self.malformed = state["malformed"]


class PassageStore:
    """The stored passages of an index; only what is asked for is read."""

    def __init__(self, folder: Path, name: str):
        self._texts, self._name = PassageTexts(folder), name
        self.size, self.unit = len(self._texts), "passages"
        self._titles = mapped(folder / "titles.bin", np.uint8)
        self._ends = mapped(folder / "titles.end", "<i8")

    def titles(self, tell: Tell) -> Iterator[list[str]]:
        begin = 0
        for first in range(0, len(self._texts), _ROWS):
            ends = self._ends[first : first + _ROWS]
            data = self._titles[begin : int(ends[-1])].tobytes()
            cuts = (ends - begin).tolist()
            begin = int(ends[-1])
            tell(first + len(ends))
            yield [str(data[a:b], "utf-8") for a, b in zip([0, *cuts[:-1]], cuts, strict=True)]

    def read(self, rows: NDArray[np.int64], tell: Tell) -> Iterator[tuple[int, Passage]]:
        for at, row in enumerate(rows.tolist()):
            yield row, self._texts[row]
            if at % 1024 == 0:
                tell(at)
        tell(len(rows))

    def identity(self) -> dict[str, Any]:
        return self.about()

    def about(self) -> dict[str, Any]:
        return {
            "name": self._name,
            "format": "index",
            "passages": len(self._texts),
            "fingerprint": self._texts.fingerprint,
        }

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


class _Fingerprint:
    """What `PassageTexts.fingerprint` of the same passages is, without storing them."""

    def __init__(self) -> None:
        self.passages = 0
        self._content = [hashlib.sha256() for _ in range(3)]
        self._ends = [hashlib.sha256() for _ in range(3)]
        self._lengths = [0, 0, 0]

    def add(self, passages: Sequence[Passage]) -> None:
        if not passages:
            return
        self.passages += len(passages)
        columns = (
            [p.id.encode() for p in passages],
            [p.title.encode() for p in passages],
            [p.text.encode() for p in passages],
        )
        for i, column in enumerate(columns):
            self._content[i].update(b"".join(column))
            ends = np.cumsum(np.fromiter(map(len, column), np.int64)) + self._lengths[i]
            self._ends[i].update(ends.astype("<i8").tobytes())
            self._lengths[i] = int(ends[-1])

    def value(self) -> str:
        pairs = zip(self._content, self._ends, strict=True)
        digests = [digest.hexdigest() for pair in pairs for digest in pair]
        return hashlib.sha256("".join(digests).encode()).hexdigest()


# ----------------------------------------------------------------------------------- alignment


@dataclass(frozen=True)
class Alignment:
    """Which passages are about which entity.

    Attributes:
      offsets: [E + 1] int64, where an entity's passages begin in `rows`.
      rows: int32, rows of the corpus, ascending within an entity.
      poor: [E] bool, entities whose title is a date, a number or too short to be asked for.
      counts: what became of passages and titles, for the funnel.
    """

    offsets: NDArray[np.int64]
    rows: Ints
    poor: Bools
    counts: dict[str, int]

    @property
    def aligned(self) -> Bools:
        """[E] bool, entities that have a passage."""
        return np.diff(self.offsets) > 0

    def passages_of(self, entity: int) -> Ints:
        """The rows of an entity's passages."""
        return self.rows[self.offsets[entity] : self.offsets[entity + 1]]

    def save(self, path: Path, key: dict[str, Any], source: PassageSource) -> None:
        """Writes what reading all titles of ``source`` gave; ``key`` tells from which inputs."""
        note = json.dumps({"key": key, "counts": self.counts, "source": source.state()})
        with writing(path) as file:
            np.savez(
                file, note=np.array(note), offsets=self.offsets, rows=self.rows, poor=self.poor
            )

    @classmethod
    def load(cls, path: Path, key: dict[str, Any], source: PassageSource) -> Alignment | None:
        """What `save` wrote of the same inputs; None where there is nothing, or of others."""
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
                note = json.loads(str(stored["note"]))
                if note["key"] != json.loads(json.dumps(key)):
                    return None
                loaded = cls(stored["offsets"], stored["rows"], stored["poor"], note["counts"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, OSError, zipfile.BadZipFile):  # damaged: read anew
            return None
        source.restore(note["source"])
        return loaded


def align(
    source: PassageSource,
    index: NameIndex,
    entities: int,
    rules: SurfaceRules,
    tell: Tell,
) -> Alignment:
    """Reads the titles of a corpus and gives every entity its passages.

    Args:
      source: the corpus.
      index: names that one entity bears alone.
      entities: E.
      rules: what the name of an entity must be like to be asked for.
      tell: see `PassageSource.titles`.
    """
    name_N: list[Ints] = []  # the index's row of each passage's title, -1 where it is no name
    met: list[tuple[Ints, Hashes, Bools]] = []
    for titles in source.titles(tell):
        if not titles:
            continue
        different: list[str] = []
        place = np.empty(len(titles), np.int32)
        last = None
        for i, title in enumerate(titles):  # the passages of an article stand together
            if title != last:
                different.append(title)
                last = title
            place[i] = len(different) - 1
        keys = as_hashes(hash_key(name_key(title).encode()) for title in different)
        name = find(index.keys, keys)
        name[name >= 0] = np.where(index.owners[name[name >= 0]] >= 0, name[name >= 0], -1)
        name_N.append(name[place])
        hits = np.flatnonzero(name >= 0).tolist()
        met.append(
            (
                name[hits],
                as_hashes(hash_key(different[i].encode()) for i in hits),
                np.array([not rules.allow(different[i]) for i in hits], bool),
            )
        )
    name_of = np.concatenate(name_N)
    del name_N
    name_W, title_W, poor_W = (np.concatenate(column) for column in zip(*met, strict=True))
    return _settle(name_of, name_W, title_W, poor_W, index, entities)


def _settle(
    name_of: Ints, name_W: Ints, title_W: Hashes, poor_W: Bools, index: NameIndex, entities: int
) -> Alignment:
    """Drops titles written in several ways, then takes every entity's first name that is one."""
    order = np.lexsort((title_W, name_W))
    name_W, title_W, poor_W = name_W[order], title_W[order], poor_W[order]
    fresh = np.ones(len(name_W), bool)
    fresh[1:] = (name_W[1:] != name_W[:-1]) | (title_W[1:] != title_W[:-1])
    name_W, poor_W = name_W[fresh], poor_W[fresh]
    names, first, ways = np.unique(name_W, return_index=True, return_counts=True)
    clash = ways > 1
    names, poor_W = names[~clash], poor_W[first][~clash]

    owner, rank = index.owners[names], index.ranks[names]
    order = np.lexsort((rank, owner))
    names, owner, poor_W = names[order], owner[order], poor_W[order]
    best = np.ones(len(owner), bool)
    best[1:] = owner[1:] != owner[:-1]
    name_E = np.full(entities, -1, np.int32)
    name_E[owner[best]] = names[best]
    poor = np.zeros(entities, bool)
    poor[owner[best]] = poor_W[best]

    row = np.flatnonzero(name_of >= 0)
    entity = index.owners[name_of[row]]
    chosen = name_E[entity] == name_of[row]
    matched = len(row)
    row, entity = row[chosen], entity[chosen]
    order = np.argsort(entity, kind="stable")
    counts = np.bincount(entity, minlength=entities)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return Alignment(
        offsets,
        row[order].astype(np.int32),
        poor,
        {
            "passages": len(name_of),
            "titled": matched,
            "of_entities": len(row),
            "titles_written_differently": int(clash.sum()),
            "titles_of_a_later_name": int((~best).sum()),
        },
    )
