"""The folder of an index: what lies where, a manifest with checksums, and who may use it.

    index.json                   the manifest, written last: without it there is no index
    building.json                instead of it while the index is being built
    passages/                    texts by row (passages.py)
    tokens/KEY/                  token ids by row for a policy's tokenizer (passages.py)
    vectors/shard-00000.npy ...  vectors of the passages in the order of the corpus
    bm25/                        the files of a BM25 index

All paths within are relative, so a folder can be moved. Lengths of files are compared when a folder
is opened, checksums when a shard is read whole. bfloat16 is stored as the uint16 of its bits, since
`.npy` has no word for it.

Shape letters: N passages, E embedding, R rows of a shard.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from zest_jax.errors import UserError
from zest_jax.models.encoder_folders import read_settings
from zest_jax.models.encoders import Encoder
from zest_jax.models.hf import local_folder
from zest_jax.retrieval.passages import (
    TOKENS,
    PassageTexts,
    TokenisedPassages,
    check_tokenizer,
    tokenizer_card,
)
from zest_jax.retrieval.storage import (
    FileEntry,
    check_files,
    list_files,
    read_json,
    sha256_of,
    write_json,
    writing,
)

FORMAT = 1
MANIFEST = "index.json"
BUILDING = "building.json"
KINDS = ("exact", "bm25", "scann", "partitioned")
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


class Shard(NamedTuple):
    """A file of vectors in a manifest: path, rows, sha256 and length."""

    file: str
    rows: int
    sha256: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What an index is.

    Attributes:
      kind: one of `KINDS`.
      passages: N.
      dimension: E, 0 for BM25.
      dtype: of stored vectors, "" for BM25.
      encoder: of queries and passages, see `encoder_card`; {"name": "bm25"} for BM25.
      corpus: {"name", "fingerprint"}.
      shards: files of vectors, in the order of the corpus.
      files: other files that belong to this kind, relative to the index.
      settings: what else the kind has to remember.
    """

    kind: str
    passages: int
    dimension: int
    dtype: str
    encoder: dict[str, Any]
    corpus: dict[str, Any]
    shards: tuple[Shard, ...] = ()
    files: tuple[FileEntry, ...] = ()
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As it is stored."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name, kind in (("shards", Shard), ("files", FileEntry)):
            fields[name] = [kind(*entry)._asdict() for entry in fields[name]]
        return {"format": FORMAT, **fields}

    @classmethod
    def from_json(cls, path: Path, stored: dict[str, Any]) -> Manifest:
        """The manifest that `to_json` wrote.

        Raises:
          UserError: of another version, or not what we write.
        """
        if stored.get("format") != FORMAT:
            raise UserError(
                f"{path} has the format {stored.get('format')}, this version reads {FORMAT}; "
                "build the index anew."
            )
        try:
            fields = {f.name: stored[f.name] for f in dataclasses.fields(cls)}
            fields["shards"] = tuple(Shard(**entry) for entry in fields["shards"])
            fields["files"] = tuple(FileEntry(**entry) for entry in fields["files"])
        except (KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error}); build the index anew.") from None
        return cls(**fields)


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of an index.

    Raises:
      UserError: no index there, an unfinished one, or one of another version.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).exists() and (folder / BUILDING).exists():
        raise UserError(
            f"the index {folder} is not complete; run the command that builds it once more."
        )
    path = folder / MANIFEST
    return Manifest.from_json(path, read_json(path, "index"))


def write_manifest(folder: str | Path, manifest: Manifest) -> None:
    """Makes the folder an index; every file it lists must be there."""
    if manifest.kind not in KINDS:
        raise ValueError(f"kind {manifest.kind!r} is none of {KINDS}")
    write_json(Path(folder) / MANIFEST, manifest.to_json())
    (Path(folder) / BUILDING).unlink(missing_ok=True)


def add_files(folder: str | Path, names: Sequence[str], **changes: Any) -> Manifest:
    """Lists more files in the manifest of an index, and changes other fields of it.

    Args:
      folder: the index.
      names: files that were written beside what was there, relative to the index.
      **changes: fields of `Manifest`.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    kept = [entry for entry in manifest.files if entry.file not in set(names)]
    files = (*kept, *list_files(folder, names))
    manifest = dataclasses.replace(manifest, files=files, **changes)
    write_manifest(folder, manifest)
    return manifest


# ---------------------------------------------------------------------------------------- shards


def shard_name(number: int) -> str:
    """The file of a shard, relative to the index."""
    return f"vectors/shard-{number:05d}.npy"


def write_shard(folder: Path, number: int, vector_RE: np.ndarray, dtype: str) -> Shard:
    """Stores vectors; the file appears only whole.

    Raises:
      UserError: a vector that is not finite, or is not any more in this type.
    """
    with np.errstate(over="ignore"):  # told below, with the row
        stored_RE = vector_RE.astype(DTYPES[dtype])
    bad = np.flatnonzero(~np.isfinite(stored_RE.astype(np.float32)).all(axis=1))
    if len(bad):
        raise UserError(
            f"row {bad[0]:,} of shard {number} is not finite in {dtype} ({len(bad):,} such rows); "
            "store float32, or mend the vectors."
        )
    if dtype == "bfloat16":
        stored_RE = stored_RE.view(np.uint16)
    name = shard_name(number)
    with writing(folder / name) as file:
        np.save(file, stored_RE)
    path = folder / name
    return Shard(name, len(vector_RE), sha256_of(path), path.stat().st_size)


class StoredVectors:
    """The vectors of an index, shard by shard.

    Attributes:
      shape: (N, E).
      dtype: of the vectors, ml_dtypes.bfloat16 among them.
    """

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder = folder
        self.shards = manifest.shards
        self.shape = (manifest.passages, manifest.dimension)
        self.dtype = DTYPES[manifest.dtype]
        self._checked: set[int] = set()
        self._first = np.concatenate([[0], np.cumsum([s.rows for s in self.shards])]).astype(int)

    def __len__(self) -> int:
        return self.shape[0]

    def shard(self, number: int, *, check: bool = True) -> np.ndarray:
        """The vectors [R, E] of a shard, mapped into memory.

        Args:
          number: which.
          check: compare its checksum first, which reads it whole.

        Raises:
          UserError: it is missing, cut short or changed.
        """
        entry = self.shards[number]
        files = (FileEntry(entry.file, entry.bytes, entry.sha256),)
        check_files(self.folder, files, content=check)
        stored = np.load(self.folder / entry.file, mmap_mode="r")
        if stored.shape != (entry.rows, self.shape[1]):
            raise UserError(
                f"{self.folder / entry.file} has the shape {stored.shape} instead of "
                f"{(entry.rows, self.shape[1])}; build the index anew."
            )
        return stored.view(self.dtype)

    def blocks(self, *, check: bool = True) -> Iterator[tuple[int, np.ndarray]]:
        """First row and vectors of every shard in turn; see `shard`."""
        for number in range(len(self.shards)):
            yield int(self._first[number]), self.shard(number, check=check)

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Copies of neighbouring vectors [R, E]; the checksums of their shards are compared."""
        first, last, step = rows.indices(len(self))
        if step != 1:
            raise ValueError("vectors are read in their order, without gaps")
        out_RE = np.empty((max(last - first, 0), self.shape[1]), self.dtype)
        for number, shard in enumerate(self.shards):
            begin = max(first, int(self._first[number]))
            end = min(last, int(self._first[number]) + shard.rows)
            if begin < end:
                part = self.shard(number, check=number not in self._checked)
                self._checked.add(number)
                at = int(self._first[number])
                out_RE[begin - first : end - first] = part[begin - at : end - at]
        return out_RE

    def rows(self, row_R: np.ndarray) -> np.ndarray:
        """Copies of some vectors [R, E], read without checksums."""
        row_R = np.asarray(row_R)
        out_RE = np.empty((len(row_R), self.shape[1]), self.dtype)
        number_R = np.searchsorted(self._first, row_R, side="right") - 1
        for number in np.unique(number_R):
            chosen = number_R == number
            shard = self.shard(int(number), check=False)
            out_RE[chosen] = shard[row_R[chosen] - self._first[number]]
        return out_RE


# --------------------------------------------------------------------------------------- opening


class IndexFolder:
    """An index on disk.

    Args:
      folder: what was built.
      encoder: the encoder of the queries, to be compared with that of the passages.
      encoder_name: how it was loaded (a folder or a hub id).
      check: compare all checksums now, which reads everything.

    Attributes:
      manifest: what it is.

    Raises:
      UserError: no complete index, missing, cut or (with `check`) changed files, or one that was
        built for another encoder or dimension.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        encoder: Encoder | None = None,
        encoder_name: str | Path = "",
        check: bool = False,
    ):
        self.folder = Path(folder).expanduser()
        self.manifest = read_manifest(self.folder)
        if encoder is not None:
            check_encoder(self.folder, self.manifest, encoder_card(encoder_name, encoder))
        shards = [FileEntry(s.file, s.bytes, s.sha256) for s in self.manifest.shards]
        check_files(self.folder, [*shards, *self.manifest.files], content=check)
        if check:
            self.passages().check()

    def passages(self) -> PassageTexts:
        """The texts by row.

        Raises:
          UserError: they are not those that the index was built over.
        """
        passages = PassageTexts(self.folder / "passages")
        if passages.fingerprint != self.manifest.corpus["fingerprint"]:
            raise UserError(
                f"{passages.folder} are other passages than those that the index was built over "
                f"({self.manifest.corpus['name']}); copy the whole index again."
            )
        return passages

    def vectors(self) -> StoredVectors:
        """The vectors by shard.

        Raises:
          UserError: this kind of index has none.
        """
        if not self.manifest.shards:
            raise UserError(f"{self.folder} is an index of kind {self.manifest.kind}: no vectors.")
        return StoredVectors(self.folder, self.manifest)

    def tokens(self, tokenizer: Any, template: str | None = None) -> TokenisedPassages:
        """The token ids by row for a policy.

        Args:
          tokenizer: the policy's.
          template: how passages are to be shown; None for whatever was stored.

        Raises:
          UserError: the passages were tokenised for another tokenizer, for another template, or not
            at all.
        """
        stored = [
            TokenisedPassages(path.parent)
            for path in sorted((self.folder / "tokens").glob(f"*/{TOKENS}"))
        ]
        given = tokenizer_card(tokenizer)
        fitting = [s for s in stored if s.tokenizer["fingerprint"] == given["fingerprint"]]
        if not stored:
            raise UserError(
                f"the passages of {self.folder} were not tokenised; run python -m "
                f"zest_jax.build_index --index={self.folder} --tokenizer={given['name']}."
            )
        if not fitting:
            check_tokenizer(stored[0].folder, stored[0].tokenizer, given)
        chosen = [s for s in fitting if template in (None, s.template)]
        if not chosen:
            raise UserError(
                f"the passages of {self.folder} were tokenised to be shown as "
                f"{fitting[0].template!r}, not as {template!r}; tokenise them again with that "
                "--protocol."
            )
        if chosen[0].corpus != self.manifest.corpus["fingerprint"]:
            raise UserError(f"{chosen[0].folder} belongs to another corpus; remove it.")
        return chosen[0]


# --------------------------------------------------------------------------------------- encoders


def encoder_card(name: str | Path, encoder: Encoder, form: str = "") -> dict[str, Any]:
    """Who an encoder is: its name, its size, how it makes vectors, and a fingerprint of all that.

    The fingerprint covers weights, tokenizer and what is put around texts, and not the name, the
    device or the type that is computed in.

    Args:
      name: the folder or hub id that it was loaded from.
      encoder: what `load_encoder` returned.
      form: how title and text of a passage are put together, not part of the fingerprint.
    """
    folder = read_settings(local_folder(name), str(name)).weights
    recipe = encoder.recipe
    how = {
        "pooling": recipe.pooling,
        "normalize": recipe.normalize,
        "dimension": encoder.size,
        "query_prefix": encoder.query_prefix,
        "passage_prefix": encoder.passage_prefix,
        "max_length": encoder.max_length,
    }
    digest = hashlib.sha256(json.dumps(how, sort_keys=True).encode())
    named = ("config.json", "tokenizer.json", "vocab.txt", "tokenizer.model")
    files = [*sorted(folder.glob("*.safetensors")), *(folder / n for n in named)]
    for path in files:
        if path.is_file():
            digest.update(sha256_of(path).encode())
    return {"name": str(name), "fingerprint": digest.hexdigest(), **how, "form": form}


def check_encoder(folder: Path, manifest: Manifest, card: dict[str, Any]) -> None:
    """Raises a UserError with both names where queries of this encoder do not fit the index."""
    stored = manifest.encoder
    if stored.get("fingerprint") == card["fingerprint"]:
        return
    if manifest.dimension != card["dimension"]:
        raise UserError(
            f"{folder} has vectors of {manifest.dimension} components by {stored['name']}, but "
            f"{card['name']} makes {card['dimension']}; search with {stored['name']}, or build "
            f"the index anew with {card['name']}."
        )
    different = [k for k in card if k not in ("name", "fingerprint", "form")]
    different = [k for k in different if stored.get(k) != card[k]]
    told = "; ".join(f"{k} {stored.get(k)!r} against {card[k]!r}" for k in different)
    raise UserError(
        f"{folder} was built with the encoder {stored['name']}, not with {card['name']} "
        f"({told or 'other weights or another tokenizer'}); search with {stored['name']}, or build "
        f"the index anew with {card['name']}."
    )
