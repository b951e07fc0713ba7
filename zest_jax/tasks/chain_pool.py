"""A pool of chains on disk: made once of a knowledge graph and a corpus, drawn from by a run.

    pool = ChainPool.open("pools/wikidata5m")
    chains = pool.sample(hops=2, count=64, rng=rng, exclude=used)

The folder:
- pool.json: the manifest, written last; format, counts by hops, seed, settings, corpus, checksums.
- chains.jsonl: one chain a line, with names and passages, so that nothing else is needed; chains
  of one hop first, then of two, ….
- offsets_1.npy, offsets_2.npy, …: int64 [n + 1], the byte at which each chain of so many hops
  begins, and the end of the last.

Letters: n chains of some number of hops.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zest_jax.errors import UserError
from zest_jax.files import writing
from zest_jax.retrieval.storage import FileEntry, list_files, mapped, sha256_of, write_json
from zest_jax.tasks.types import Passage

MANIFEST = "pool.json"
CHAINS = "chains.jsonl"
FORMAT = "zest_jax chain pool"
VERSION = 1


@dataclass(frozen=True)
class EntityRecord:
    """An entity of a chain.

    Attributes:
      id: as in the graph, e.g. "Q142".
      label: its name.
      aliases: other names that only this entity bears, without the label.
      passage: the passage about it; of a source, one that mentions the next entity.
    """

    id: str
    label: str
    aliases: tuple[str, ...]
    passage: Passage

    @property
    def names(self) -> tuple[str, ...]:
        """Label and aliases, the label first."""
        return (self.label, *self.aliases)


@dataclass(frozen=True)
class RelationRecord:
    """A relation of a chain: its id, e.g. "P36", and its label, e.g. "capital"."""

    id: str
    label: str


@dataclass(frozen=True)
class ChainRecord:
    """A chain ``(e0, r1, e1, ..., rh, eh)`` with everything that is asked of it.

    Attributes:
      entities: h + 1 entities, the source first and the answer last.
      relations: h relations.
    """

    entities: tuple[EntityRecord, ...]
    relations: tuple[RelationRecord, ...]

    @property
    def id(self) -> str:
        """Ids of entities and relations in turn: "Q142|P36|Q90"."""
        parts = [self.entities[0].id]
        for relation, entity in zip(self.relations, self.entities[1:], strict=True):
            parts += [relation.id, entity.id]
        return "|".join(parts)

    @property
    def hops(self) -> int:
        """Number of relations, h."""
        return len(self.relations)

    @property
    def source(self) -> EntityRecord:
        """e0, which the question starts from."""
        return self.entities[0]

    @property
    def answer(self) -> EntityRecord:
        """eh, which the question asks for."""
        return self.entities[-1]

    @property
    def passages(self) -> tuple[Passage, ...]:
        """The entities' passages, in hop order."""
        return tuple(entity.passage for entity in self.entities)


class ChainPool:
    """A pool of chains, read through a memory map; made by `open`.

    Attributes:
      folder: where it lies.
      manifest: pool.json as it is.
    """

    def __init__(
        self,
        folder: Path,
        manifest: dict[str, Any],
        data: np.ndarray,
        offsets: dict[int, NDArray[np.int64]],
    ):
        self.folder, self.manifest = folder, manifest
        self._data, self._offsets = data, offsets
        self._first_line: dict[int, int] = {}
        line = 1
        for hops, offset in sorted(offsets.items()):
            self._first_line[hops] = line
            line += len(offset) - 1

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = True) -> ChainPool:
        """Opens a pool.

        Args:
          folder: of the pool.
          verify: read the files whole and compare their checksums (about a second for 100,000
            chains); False compares their lengths.

        Raises:
          UserError: there is no pool, or it is incomplete, damaged or of a later version.
        """
        folder = Path(folder).expanduser()
        manifest = _read_manifest(folder)
        for entry in _entries(folder, manifest):
            _check_file(folder, entry, verify)
        data = mapped(folder / CHAINS, np.uint8)
        offsets = {}
        begin = 0
        for key, count in sorted(manifest["counts"].items(), key=lambda item: int(item[0])):
            path = folder / offsets_name(int(key))
            offset = _read_offsets(path)
            sound = len(offset) == count + 1 and offset[0] == begin and np.all(np.diff(offset) > 1)
            if not sound or offset[-1] > len(data):
                raise UserError(
                    f"{path} does not fit {CHAINS} and the {count:,} chains of {MANIFEST}; build "
                    "the pool anew."
                )
            offsets[int(key)] = offset
            begin = int(offset[-1])
        if begin != len(data):
            raise UserError(f"{folder / CHAINS} goes on after its last chain; build the pool anew.")
        return cls(folder, manifest, data, offsets)

    def __len__(self) -> int:
        return sum(self.count(hops) for hops in self._offsets)

    @property
    def name(self) -> str:
        """What people call it: the name of its folder."""
        return self.folder.resolve().name

    @property
    def hops(self) -> tuple[int, ...]:
        """The numbers of hops that there are chains of, ascending."""
        return tuple(sorted(hops for hops in self._offsets if self.count(hops)))

    @property
    def corpus(self) -> dict[str, Any]:
        """Name, format, length and fingerprint of the corpus that the passages are of."""
        return self.manifest["corpus"]

    def count(self, hops: int) -> int:
        """Number of chains of so many hops; 0 where the pool has none."""
        return len(self._offsets[hops]) - 1 if hops in self._offsets else 0

    def record(self, hops: int, i: int) -> ChainRecord:
        """Chain i of those of so many hops, 0 <= i < count(hops).

        Raises:
          UserError: the line is damaged (file and line).
        """
        if not 0 <= i < self.count(hops):
            raise IndexError(f"no chain {i} of {hops} hops; there are {self.count(hops)}")
        begin, end = self._offsets[hops][i : i + 2].tolist()
        where = f"{self.folder / CHAINS}, line {self._first_line[hops] + i}"
        return chain_from_line(bytes(self._data[begin:end]), where, hops)

    def records(self, hops: int) -> Iterator[ChainRecord]:
        """All chains of so many hops, in their order."""
        for i in range(self.count(hops)):
            yield self.record(hops, i)

    def sample(
        self, hops: int, count: int, rng: np.random.Generator, exclude: Collection[str] = ()
    ) -> list[ChainRecord]:
        """Draws different chains with equal chances.

        Args:
          hops: their length.
          count: how many.
          rng: the only source of chance.
          exclude: ids of chains, or of source entities, that may not come.

        Raises:
          UserError: the pool has fewer such chains, or a line is damaged.
        """
        found: list[ChainRecord] = []
        for i in rng.permutation(self.count(hops)).tolist():
            if len(found) == count:
                break
            chain = self.record(hops, i)
            if chain.id not in exclude and chain.source.id not in exclude:
                found.append(chain)
        if len(found) < count:
            without = ", those used or held out not counted" if exclude else ""
            raise UserError(
                f"{self.folder} has {len(found):,} chains of {hops} hop(s){without}, but {count:,} "
                "were asked for; build a larger pool or ask for fewer."
            )
        return found


# ------------------------------------------------------------------------------------- writing


def write_pool(
    folder: str | Path, chains: Iterable[ChainRecord], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Writes a pool, every file whole and the manifest last.

    A pool that is there is replaced; from the first byte on it counts as incomplete, so that a kill
    leaves no mixture.

    Args:
      folder: where; made if it is missing.
      chains: those of one hop first, then of two, …; no two with one id.
      about: what the manifest says besides: "seed", "settings", "corpus", ….

    Returns:
      The manifest.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    for old in folder.glob("offsets_*.npy"):
        old.unlink()
    begins: dict[int, list[int]] = {}
    seen: set[str] = set()
    at = last = 0
    with writing(folder / CHAINS) as file:
        for chain in chains:
            if chain.hops < last or chain.id in seen:
                raise ValueError(f"chain {chain.id} comes twice, or after longer ones")
            seen.add(chain.id)
            last = chain.hops
            line = chain_to_line(chain).encode() + b"\n"
            begins.setdefault(chain.hops, []).append(at)
            file.write(line)
            at += len(line)
    names = [CHAINS]
    lengths = sorted(begins)
    ends = [*(begins[hops][0] for hops in lengths[1:]), at]
    for hops, end in zip(lengths, ends, strict=False):  # no chain at all leaves one end over
        names.append(offsets_name(hops))
        with writing(folder / names[-1]) as file:
            np.save(file, np.array([*begins[hops], end], np.int64))
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "chains": len(seen),
        "counts": {str(hops): len(begins[hops]) for hops in lengths},
        **about,
        "files": [entry._asdict() for entry in list_files(folder, names)],
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def offsets_name(hops: int) -> str:
    """File of the offsets of chains of so many hops."""
    return f"offsets_{hops}.npy"


def chain_to_line(chain: ChainRecord) -> str:
    """One JSON line, without the newline."""
    entities = [
        {
            "id": entity.id,
            "label": entity.label,
            "aliases": list(entity.aliases),
            "passage": {
                "id": entity.passage.id,
                "title": entity.passage.title,
                "text": entity.passage.text,
            },
        }
        for entity in chain.entities
    ]
    relations = [{"id": relation.id, "label": relation.label} for relation in chain.relations]
    record = {"id": chain.id, "hops": chain.hops, "entities": entities, "relations": relations}
    return json.dumps(record, ensure_ascii=False)


# ------------------------------------------------------------------------------------- reading


def chain_from_line(line: bytes, where: str, hops: int) -> ChainRecord:
    """The chain of a line; ``where`` names file and line for the error.

    Raises:
      UserError: the line is no chain of so many hops.
    """
    try:
        record = json.loads(line.decode("utf-8"))
        entities = tuple(
            EntityRecord(
                _text(entity["id"]),
                _text(entity["label"]),
                tuple(_text(alias) for alias in _list(entity["aliases"])),
                Passage(
                    _text(entity["passage"]["id"]),
                    _text(entity["passage"]["title"], may_be_empty=True),
                    _text(entity["passage"]["text"], may_be_empty=True),
                ),
            )
            for entity in _list(record["entities"])
        )
        relations = tuple(
            RelationRecord(_text(relation["id"]), _text(relation["label"]))
            for relation in _list(record["relations"])
        )
    except UnicodeDecodeError:
        raise _damaged(where, "it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _damaged(where, f"it is not JSON: {error.msg} at column {error.colno}") from None
    except KeyError as error:
        raise _damaged(where, f"the field {error} is missing") from None
    except (TypeError, ValueError) as error:
        raise _damaged(where, str(error)) from None
    if len(relations) != hops or len(entities) != hops + 1:
        found = f"{len(entities)} entities and {len(relations)} relations"
        raise _damaged(where, f"{found} are no chain of {hops} hop(s)")
    chain = ChainRecord(entities, relations)
    if record.get("id") != chain.id or record.get("hops") != hops:
        raise _damaged(where, f"its id or hops are not those of {chain.id}")
    return chain


def _damaged(where: str, why: str) -> UserError:
    return UserError(f"{where}: no chain of a pool ({why}); build the pool anew.")


def _text(value: Any, may_be_empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or may_be_empty):
        raise ValueError("a text was expected")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("a list was expected")
    return value


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{folder} is no complete chain pool: it has no {MANIFEST}; build it with "
            "zest_jax.build_chains."
        ) from None
    except ValueError:
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{path} is damaged or of something else than a chain pool.")
    if manifest.get("version") != VERSION:
        raise UserError(
            f"{path} is of version {manifest.get('version')}, this program reads {VERSION}; build "
            "the pool anew."
        )
    counts = manifest.get("counts")
    if not isinstance(counts, dict) or not all(
        key.isdecimal() and type(count) is int and count >= 0 for key, count in counts.items()
    ):
        raise UserError(f"{path} is damaged: its 'counts' are no numbers by hops; build it anew.")
    return {"corpus": {}, **manifest}


def _entries(folder: Path, manifest: dict[str, Any]) -> list[FileEntry]:
    try:
        entries = [FileEntry(**entry) for entry in manifest["files"]]
    except (KeyError, TypeError):
        entries = []
    wanted = {CHAINS, *(offsets_name(int(hops)) for hops in manifest["counts"])}
    if {entry.file for entry in entries} != wanted:
        raise UserError(
            f"{folder / MANIFEST} is damaged: its 'files' are not {', '.join(sorted(wanted))}; "
            "build the pool anew."
        )
    return entries


def _check_file(folder: Path, entry: FileEntry, content: bool) -> None:
    path = folder / entry.file
    if not path.is_file():
        raise UserError(f"{path} is missing; copy the pool again, or build it anew.")
    size = path.stat().st_size
    if size != entry.bytes:
        raise UserError(
            f"{path} has {size:,} bytes instead of {entry.bytes:,}: it was "
            f"{'cut short' if size < entry.bytes else 'changed'}; copy the pool again, or build it "
            "anew."
        )
    if content and sha256_of(path) != entry.sha256:
        raise UserError(
            f"{path} is damaged: its sha256 is not the one in {MANIFEST}; copy the pool again, or "
            "build it anew."
        )


def _read_offsets(path: Path) -> NDArray[np.int64]:
    try:
        offset = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError):
        offset = np.zeros(0)
    if offset.dtype != np.int64 or offset.ndim != 1 or not len(offset):
        raise UserError(f"{path} is damaged: it holds no row of offsets; build the pool anew.")
    return offset
