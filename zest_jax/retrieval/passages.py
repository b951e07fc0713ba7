"""The passages of an index on disk: their texts by row, and their token ids for a policy.

Both are flat files and the ends of every row in them, mapped into memory and read as they are used:
21 million passages open in milliseconds. `write_passages` and `tokenise` build them in a stream and
go on where a killed process stopped.

    passages/ids.bin, titles.bin, texts.bin      UTF-8, one row behind the other
    passages/ids.end, titles.end, texts.end      where each row ends, int64
    passages/id_hashes.bin, id_rows.bin          hashes of all ids, sorted, and their rows
    passages/passages.json                       how many, checksums, what was odd
    tokens/KEY/ids.bin, ids.end, tokens.json     the same for token ids

Shape letters: N passages, P passage length, M rows read at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from zest_jax.errors import UserError
from zest_jax.retrieval.corpora import Corpus, Position
from zest_jax.retrieval.interface import Passage
from zest_jax.retrieval.room import require_room
from zest_jax.retrieval.storage import (
    FileEntry,
    GrowingFiles,
    check_files,
    list_files,
    mapped,
    read_json,
    write_json,
)

FORMAT = 1
PASSAGES = "passages.json"
TOKENS = "tokens.json"
# How a passage is shown where no protocol says otherwise: that of the plain protocols.
TEMPLATE = " {title}: {text}"

_COLUMNS = ("ids", "titles", "texts")
_NOTE = "unfinished.json"
_CHECKPOINT = 200_000  # passages between two checkpoints
_BATCH = 4096  # passages tokenised at a time
_EXAMPLES = 10  # duplicates that are named
_BLOCK = 1 << 16  # rows padded at a time

Tell = Callable[[int, int], object]


# --------------------------------------------------------------------------------------- texts


class PassageTexts(Sequence[Passage]):
    """The stored passages of an index: a sequence of `Passage`, read from disk as it is used.

    Args:
      folder: as written by `write_passages`.

    Attributes:
      fingerprint: tells this corpus (its ids, titles and texts in their order) from any other.
      report: what was met while reading: malformed lines and duplicates.

    Raises:
      UserError: no such folder, one of another version, or one with missing or cut files.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        stored = read_json(self.folder / PASSAGES, "store of passages")
        _check_format(self.folder, stored)
        self.files = tuple(FileEntry(*entry) for entry in stored["files"])
        check_files(self.folder, self.files, content=False)
        self.fingerprint: str = stored["fingerprint"]
        self.report: dict[str, Any] = stored["report"]
        self._length: int = stored["passages"]
        self._bytes = {c: mapped(self.folder / f"{c}.bin", np.uint8) for c in _COLUMNS}
        self._ends = {c: mapped(self.folder / f"{c}.end", "<i8") for c in _COLUMNS}

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, row: int) -> Passage: ...
    @overload
    def __getitem__(self, row: slice) -> list[Passage]: ...
    def __getitem__(self, row: int | slice) -> Passage | list[Passage]:
        if isinstance(row, slice):
            first, last, step = row.indices(self._length)
            if step != 1:
                return [self[i] for i in range(first, last, step)]
            return self._read(first, max(first, last))
        at = row + self._length if row < 0 else row
        if not 0 <= at < self._length:
            raise IndexError(f"row {row} of {self._length} passages")
        return self._read(at, at + 1)[0]

    def __iter__(self) -> Iterator[Passage]:
        for first in range(0, self._length, _BATCH):
            yield from self[first : first + _BATCH]

    def rows_of(self, ids: Sequence[str]) -> np.ndarray:
        """The row of each id [len(ids)] int64, -1 where there is none; the first of equal ids."""
        hashes = mapped(self.folder / "id_hashes.bin", "<u8")
        rows = mapped(self.folder / "id_rows.bin", "<u4")
        found = np.full(len(ids), -1, np.int64)
        for i, id in enumerate(ids):
            wanted = np.frombuffer(_hash(id.encode()), "<u8")[0]
            at = int(np.searchsorted(hashes, wanted))
            while at < len(hashes) and hashes[at] == wanted:
                if self[int(rows[at])].id == id:
                    found[i] = rows[at]
                    break
                at += 1
        return found

    def check(self) -> None:
        """Compares all files with their checksums; a UserError names the first bad one."""
        check_files(self.folder, self.files, content=True)

    def _read(self, first: int, last: int) -> list[Passage]:
        columns = []
        for column in _COLUMNS:
            ends = self._ends[column]
            base = int(ends[first - 1]) if first else 0
            cuts = (ends[first:last] - base).tolist()
            data = self._bytes[column][base : base + (cuts[-1] if cuts else 0)].tobytes()
            columns.append(
                [
                    str(data[a:b], "utf-8")
                    for a, b in zip([0, *cuts[:-1]] if cuts else [], cuts, strict=True)
                ]
            )
        return list(map(Passage, *columns))


def write_passages(corpus: Corpus, folder: str | Path, tell: Tell | None = None) -> PassageTexts:
    """Stores a corpus; goes on where an earlier process stopped, and is done at once if it is done.

    Memory does not grow with the corpus while it is read; sorting the ids at the end takes about
    32 bytes a passage.

    Args:
      corpus: what `open_corpus` opened.
      folder: where to write.
      tell: called with the bytes read of the corpus, and with the passages stored.

    Raises:
      UserError: the corpus cannot be read, or the folder holds (the beginning of) another one.
    """
    folder = Path(folder)
    source = corpus.identity()
    if (folder / PASSAGES).exists():
        stored = read_json(folder / PASSAGES, "store of passages")
        if stored["source"] != source:
            raise UserError(
                f"{folder} holds the passages of {stored['source']['name']}, and {source['name']} "
                "is another corpus or has changed since; name another folder."
            )
        return PassageTexts(folder)
    files = _growing(folder, source)
    try:
        done = files.done or {"position": {}, "named": []}
        position, named = Position(**done["position"]), done["named"]
        saved = position.passages
        for batch in corpus.batches(position):
            _append(files, batch.passages)
            position = batch.end
            if position.passages - saved >= _CHECKPOINT:
                saved = position.passages
                known = [*named, *map(str, corpus.malformed)][:100]
                files.checkpoint({"position": dataclasses.asdict(position), "named": known})
            if tell is not None:
                tell(batch.bytes_done, position.passages)
        named = [*named, *map(str, corpus.malformed)][:100]
        # So that a kill while sorting does not cost the reading.
        files.checkpoint({"position": dataclasses.asdict(position), "named": named})
    finally:
        files.close()
    return _finish(files, folder, source, {"malformed": position.malformed, "named": named})


def store_passages(passages: Iterable[Passage], folder: str | Path) -> PassageTexts:
    """Stores passages that are at hand; not resumable.

    Raises:
      UserError: the folder holds passages already.
    """
    folder = Path(folder)
    if (folder / PASSAGES).exists():
        raise UserError(f"{folder} holds passages already; name another folder.")
    source = {"name": "passages at hand"}
    (folder / _NOTE).unlink(missing_ok=True)
    files = _growing(folder, source)
    try:
        batch: list[Passage] = []
        for passage in passages:
            batch.append(passage)
            if len(batch) == _BATCH:
                _append(files, batch)
                batch = []
        _append(files, batch)
        files.checkpoint(None)
    finally:
        files.close()
    return _finish(files, folder, source, {"malformed": 0, "named": []})


def _growing(folder: Path, source: dict[str, Any]) -> GrowingFiles:
    names = [f"{c}.{end}" for c in _COLUMNS for end in ("bin", "end")]
    return GrowingFiles(folder, [*names, "ids.hash", "texts.hash"], _NOTE, source)


def _append(files: GrowingFiles, passages: list[Passage]) -> None:
    columns = [[getattr(p, c[:-1]).encode() for p in passages] for c in _COLUMNS]
    for column, rows in zip(_COLUMNS, columns, strict=True):
        _append_rows(files, column, b"".join(rows), [len(row) for row in rows])
    files.append("ids.hash", b"".join(map(_hash, columns[0])))
    both = zip(columns[1], columns[2], strict=True)
    files.append("texts.hash", b"".join([_hash(b"\n".join(pair)) for pair in both]))


def _append_rows(
    files: GrowingFiles, column: str, data: bytes | np.ndarray, lengths: list[int], size: int = 1
) -> None:
    """Rows of `lengths` items of `size` bytes each, and their ends counted in items."""
    ends = np.cumsum(np.array(lengths, "<i8")) + files.length(f"{column}.bin") // size
    files.append(f"{column}.bin", data)
    files.append(f"{column}.end", ends.astype("<i8"))


def _finish(
    files: GrowingFiles, folder: Path, source: dict[str, Any], report: dict[str, Any]
) -> PassageTexts:
    """Sorts the hashes, writes the manifest and opens the store."""
    hash_N = np.fromfile(folder / "ids.hash", "<u8")
    order_N = np.argsort(hash_N, kind="stable").astype("<u4")
    hash_N[order_N].tofile(folder / "id_hashes.bin")
    order_N.tofile(folder / "id_rows.bin")
    duplicates = {"ids": _equal(hash_N, order_N)}
    del order_N
    N = len(hash_N)
    hash_N = np.fromfile(folder / "texts.hash", "<u8")
    duplicates["texts"] = _equal(hash_N, np.argsort(hash_N, kind="stable"))
    del hash_N
    content = list_files(folder, [f"{c}.{end}" for c in _COLUMNS for end in ("bin", "end")])
    lookup = list_files(folder, ["id_hashes.bin", "id_rows.bin"])
    stored = {
        "format": FORMAT,
        "passages": N,
        "fingerprint": hashlib.sha256("".join(e.sha256 for e in content).encode()).hexdigest(),
        "source": source,
        "report": report,
        "files": [*content, *lookup],
    }
    ids, count = mapped(folder / "ids.bin", np.uint8), mapped(folder / "ids.end", "<i8")

    def id_of(row: int) -> str:
        return ids[int(count[row - 1]) if row else 0 : int(count[row])].tobytes().decode()

    for what, (total, pairs) in duplicates.items():
        report[f"duplicate_{what}"] = total
        report[f"duplicate_{what}_named"] = [[id_of(a), a, id_of(b), b] for a, b in pairs]
    write_json(folder / PASSAGES, stored)
    files.forget()
    for name in ("ids.hash", "texts.hash"):
        (folder / name).unlink(missing_ok=True)
    return PassageTexts(folder)


def _equal(hash_N: np.ndarray, order_N: np.ndarray) -> tuple[int, list[tuple[int, int]]]:
    """How many rows repeat an earlier one by their 64-bit hashes, and the first such pairs.

    Two of 21 million different texts share a hash with a chance of one in 80,000.
    """
    at = np.flatnonzero(hash_N[order_N[1:]] == hash_N[order_N[:-1]])
    pairs = sorted((int(order_N[i + 1]), int(order_N[i])) for i in at[: 100 * _EXAMPLES])
    return len(at), [(first, second) for second, first in pairs[:_EXAMPLES]]


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def _check_format(folder: Path, stored: dict[str, Any]) -> None:
    if stored.get("format") != FORMAT:
        raise UserError(
            f"{folder} has the format {stored.get('format')}, this version reads {FORMAT}; build "
            "it anew."
        )


# -------------------------------------------------------------------------------------- tokens


def tokenizer_card(tokenizer: Any) -> dict[str, Any]:
    """Name, size and fingerprint of a transformers tokenizer.

    The fingerprint covers all that decides ids: vocabulary, merges, normaliser and added tokens;
    not the name, the chat template or settings of truncation and padding.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        for setting in ("truncation", "padding"):
            content.pop(setting, None)
    else:
        content = {"vocabulary": tokenizer.get_vocab(), "class": type(tokenizer).__name__}
    text = json.dumps(content, sort_keys=True)
    return {
        "name": str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__),
        "size": len(tokenizer),
        "fingerprint": hashlib.sha256(text.encode()).hexdigest(),
    }


class TokenisedPassages:
    """Token ids of every passage as a policy reads it, mapped into memory.

    Args:
      folder: as written by `tokenise`.
      tokenizer: the policy's, to be compared with the one that wrote the ids; None to trust it.

    Attributes:
      template: how a passage was shown.
      tokenizer: name, size and fingerprint of the tokenizer.
      corpus: fingerprint of the passages.
      longest: tokens of the longest passage.

    Raises:
      UserError: no such folder, cut files, or ids of another tokenizer.
    """

    def __init__(self, folder: str | Path, tokenizer: Any = None):
        self.folder = Path(folder)
        stored = read_json(self.folder / TOKENS, "store of tokenised passages")
        _check_format(self.folder, stored)
        self.tokenizer: dict[str, Any] = stored["tokenizer"]
        self.template: str = stored["template"]
        self.corpus: str = stored["corpus"]
        self.longest: int = stored["longest"]
        if tokenizer is not None:
            check_tokenizer(self.folder, self.tokenizer, tokenizer_card(tokenizer))
        self.files = tuple(FileEntry(*entry) for entry in stored["files"])
        check_files(self.folder, self.files, content=False)
        self._ids = mapped(self.folder / "ids.bin", stored["dtype"])
        self._ends = mapped(self.folder / "ids.end", "<i8")

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, row: int) -> np.ndarray:
        """The ids of a passage."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} passages")
        return self._ids[int(self._ends[row - 1]) if row else 0 : int(self._ends[row])]

    @property
    def dtype(self) -> np.dtype:
        """That of padded ids: uint16 for small vocabularies, else int32."""
        return np.dtype(np.uint16 if self._ids.dtype.itemsize == 2 else np.int32)

    def rows(self, row_M: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids [M, length] of some passages, cut or padded with zeros, and their lengths [M] int32.

        Rows outside the corpus (-1 above all) are empty passages.
        """
        row_M = np.asarray(row_M, np.int64)
        inside_M = (row_M >= 0) & (row_M < len(self))
        row_M = np.where(inside_M, row_M, 0)
        start_M = np.where(row_M > 0, self._ends[np.maximum(row_M - 1, 0)], 0)
        length_M = np.minimum(self._ends[row_M] - start_M, length) * inside_M
        within_MP = np.arange(length) < length_M[:, None]
        out_MP = np.zeros((len(row_M), length), self.dtype)
        at_MP = start_M[:, None] + np.arange(length)
        out_MP[within_MP] = self._ids[at_MP[within_MP]]
        return out_MP, length_M.astype(np.int32)

    def lengths(self, rows: slice = slice(None)) -> np.ndarray:
        """Tokens of neighbouring passages [M], int32; of all of them without an argument."""
        first, last, _ = rows.indices(len(self))
        before = int(self._ends[first - 1]) if first else 0
        return np.diff(self._ends[first:last], prepend=before).astype(np.int32)

    def padded(
        self, length: int = 0, sharding: jax.sharding.Sharding | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """All ids [N, P] on the device, cut or padded with zeros, and all lengths [N] int32.

        Args:
          length: P; 0 for the length of the longest passage.
          sharding: of the ids, where they are split over several devices.

        Raises:
          UserError: the device has no room for them.
        """
        P = length or self.longest
        shape = (len(self), P)
        require_room(
            f"the tokens of {self.folder}, {P} a passage,", shape, self.dtype, sharding,
            "cut passages shorter, or leave them in host memory (HostPassageStore)",
        )  # fmt: skip
        length_N = np.minimum(self.lengths(), P)
        if sharding is not None:

            def part(index: Any) -> np.ndarray:
                rows = np.arange(*index[0].indices(len(self)))
                return self.rows(rows, P)[0][:, index[1]]

            ids_NP: jax.Array = jax.make_array_from_callback(shape, sharding, part)
        else:
            ids_NP = jnp.zeros(shape, self.dtype)
            for first in range(0, len(self), _BLOCK):
                # The last block ends with the array, since all must have one shape.
                first = max(0, min(first, len(self) - _BLOCK))
                rows = np.arange(first, min(first + _BLOCK, len(self)))
                ids_NP = _write_rows(ids_NP, self.rows(rows, P)[0], first)
        return ids_NP, jnp.asarray(length_N)

    def check(self) -> None:
        """Compares all files with their checksums; a UserError names the first bad one."""
        check_files(self.folder, self.files, content=True)


def tokens_key(card: dict[str, Any], template: str, longest: int = 0) -> str:
    """The name of the folder for these passages: one for every tokenizer and way to show them."""
    text = json.dumps([card["fingerprint"], template, longest])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_tokenizer(folder: Path, stored: dict[str, Any], given: dict[str, Any]) -> None:
    """Raises a UserError with both names if passages were tokenised by another tokenizer."""
    if stored["fingerprint"] != given["fingerprint"]:
        raise UserError(
            f"{folder} was tokenised with {_tokenizer_name(stored)}, the policy has "
            f"{_tokenizer_name(given)}; tokenise the passages again with that: "
            "python -m zest_jax.build_index --tokenizer=FOLDER."
        )


def _tokenizer_name(card: dict[str, Any]) -> str:
    return f"{card['name']} ({card['size']:,} tokens, {card['fingerprint'][:8]})"


def tokenise(
    passages: PassageTexts,
    tokenizer: Any,
    folder: str | Path,
    *,
    template: str = TEMPLATE,
    write: Callable[[str, str], str] | None = None,
    longest: int = 0,
    tell: Tell | None = None,
) -> TokenisedPassages:
    """Stores the token ids of all passages; goes on where an earlier process stopped.

    The tokenizer spreads a batch over the machine's cores by itself.

    Args:
      passages: the stored texts.
      tokenizer: the policy's, a transformers tokenizer.
      folder: where to write; `tokens_key` names one.
      template: text of a passage, with `{title}` and `{text}`; or the name of another way to write
        one, with `write`.
      write: title and text to the text of a passage, where the template does not say it.
      longest: tokens after which a passage is cut; 0 keeps all.
      tell: called with the passages done and all passages.

    Raises:
      UserError: the folder holds ids of another tokenizer, template or corpus.
    """
    folder = Path(folder)
    card = tokenizer_card(tokenizer)
    source = {
        "tokenizer": card["fingerprint"],
        "template": template,
        "longest": longest,
        "corpus": passages.fingerprint,
    }
    if (folder / TOKENS).exists():
        earlier = TokenisedPassages(folder, tokenizer)
        if (earlier.template, earlier.corpus) != (template, passages.fingerprint):
            raise UserError(
                f"{folder} holds other passages, or the same ones shown as {earlier.template!r} "
                f"instead of {template!r}; name another folder."
            )
        return earlier
    if write is None:
        write = functools.partial(_filled, template)
    # By the largest id, not the number of tokens: some vocabularies have gaps.
    dtype = np.dtype("<u2" if max(tokenizer.get_vocab().values()) < 1 << 16 else "<u4")
    files = GrowingFiles(folder, ["ids.bin", "ids.end"], _NOTE, source)
    try:
        done, most = files.done or (0, 0)
        saved = done
        while done < len(passages):
            batch = passages[done : done + _BATCH]
            rows = _ids(tokenizer, [write(p.title, p.text) for p in batch])
            if longest:
                rows = [row[:longest] for row in rows]
            lengths = [len(row) for row in rows]
            flat = np.fromiter((i for row in rows for i in row), dtype, sum(lengths))
            _append_rows(files, "ids", flat, lengths, dtype.itemsize)
            done, most = done + len(rows), max(most, *lengths)
            if done - saved >= _CHECKPOINT:
                saved = done
                files.checkpoint([done, most])
            if tell is not None:
                tell(done, len(passages))
        files.checkpoint([done, most])
    finally:
        files.close()
    stored = {
        "format": FORMAT,
        "passages": done,
        "tokenizer": card,
        "template": template,
        "cut": longest,
        "longest": most,
        "dtype": dtype.str,
        "corpus": passages.fingerprint,
        "files": list_files(folder, ["ids.bin", "ids.end"]),
    }
    write_json(folder / TOKENS, stored)
    files.forget()
    return TokenisedPassages(folder)


def _filled(template: str, title: str, text: str) -> str:
    return template.format(title=title, text=text)


def _ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """As everywhere in the project: without special tokens around, those that a passage spells out
    as plain text (none may end the turn that shows it), long texts without a word."""
    return tokenizer(
        texts,
        add_special_tokens=False,
        split_special_tokens=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )["input_ids"]


@functools.partial(jax.jit, donate_argnums=0)
def _write_rows(ids_NP: jax.Array, part_MP: jax.Array, first: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(ids_NP, part_MP, (first, 0))
