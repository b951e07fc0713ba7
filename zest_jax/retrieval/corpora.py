"""Reads the corpora that others publish: a stream of passages, whatever the format.

    corpus = open_corpus("wiki-18.jsonl.gz")
    for batch in corpus.batches():
        use(batch.passages)          # some thousands
        remember(batch.end)          # corpus.batches(batch.end) goes on from here

Formats, told by the name of a file and its first bytes, or given:
- jsonl: a JSON object a line; {"title", "text"} or {"contents"} as FlashRAG and Search-R1 write it
  (title in double quotes on the first line), and an "id" (or "_id").
- tsv: DPR's columns id, text, title, or columns named by a header; fields may be quoted as in CSV.
- parquet: columns of the names of jsonl; needs the package pyarrow.
- texts: a folder whose every file (.txt, .md) is a passage, titled by its name.
jsonl and tsv files may be gzipped. A folder of jsonl, tsv or parquet files is one corpus, read in
the order of their names.

A passage without an id gets "FILE:LINE". What cannot be read as a passage is left out, counted and
named; too much of it ends the reading. Memory does not grow with the corpus.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from zest_jax.errors import UserError
from zest_jax.retrieval.interface import Passage, from_contents

FORMATS = ("jsonl", "tsv", "parquet", "texts")
_SUFFIXES = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".tsv": "tsv",
    ".parquet": "parquet", ".txt": "texts", ".md": "texts",
}  # fmt: skip
_ID_NAMES = ("id", "_id")
_BLOCK = 1 << 22  # bytes read at a time
_LONGEST = 1 << 26  # bytes of a line; a longer one is no passage but a file of another kind
_ROWS = 4096  # rows of a parquet file, or small files of a folder, read at a time
_NAMED = 100  # malformed lines that are kept by name
_EARLY = 1000  # lines before the share of malformed ones is judged


class Malformed(NamedTuple):
    """A line that holds no passage: the file's name in the corpus, the line (from 1), and why."""

    file: str
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.why}"


@dataclasses.dataclass(frozen=True)
class Position:
    """How far a corpus was read; the start of what comes next.

    Attributes:
      file: files read to their end.
      offset: what was read of the next one: bytes (of its text, where it is gzipped), or rows of a
        parquet file.
      line: lines read of it.
      passages: passages read, of all files.
      malformed: malformed lines passed over, of all files.
    """

    file: int = 0
    offset: int = 0
    line: int = 0
    passages: int = 0
    malformed: int = 0


class Batch(NamedTuple):
    """Some passages in a row.

    Attributes:
      passages: in the order of the corpus.
      end: where the next batch begins.
      bytes_done: bytes read on disk, of `Corpus.total_bytes`.
    """

    passages: list[Passage]
    end: Position
    bytes_done: int


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much of a corpus may be malformed.

    Attributes:
      count: most malformed lines.
      share: largest share of them among all lines; judged after 1,000 lines, and at the end.
    """

    count: int = 100
    share: float = 0.01


class _Bad(Exception):
    """Why a line holds no passage."""


class Corpus:
    """A corpus, opened by `open_corpus`.

    Attributes:
      path: what was opened.
      format: one of `FORMATS`.
      files: its files in their order.
      total_bytes: their length on disk.
      malformed: the first 100 malformed lines that were met.
      malformed_total: how many there were, those before the start of the reading included.
    """

    def __init__(self, path: Path, format: str, files: Sequence[Path], limits: Limits):
        self.path, self.format, self.files, self._limits = path, format, files, limits
        self._sizes = [file.stat().st_size for file in files]
        self._before = [0, *itertools.accumulate(self._sizes)]
        self.total_bytes = self._before[-1]
        self.malformed: list[Malformed] = []
        self.malformed_total = 0

    @property
    def name(self) -> str:
        """What people call it: the name of its file or folder."""
        return self.path.name

    def identity(self) -> dict[str, Any]:
        """What a reading that goes on later must find unchanged: format, files and lengths."""
        names = zlib.crc32(
            "\n".join(f"{self._label(f)} {n}" for f, n in self._each()).encode("utf-8", "replace")
        )
        return {
            "name": self.name,
            "format": self.format,
            "files": len(self.files),
            "bytes": self.total_bytes,
            "names": f"{names:08x}",
        }

    def __iter__(self) -> Iterator[Passage]:
        for batch in self.batches():
            yield from batch.passages

    def batches(self, start: Position | None = None) -> Iterator[Batch]:
        """Reads on from a position (by default the beginning).

        Raises:
          UserError: a file that is cut short or no file of its format, too many malformed lines, or
            no passage at all.
        """
        start = start or Position()
        self.malformed, self.malformed_total = [], start.malformed
        read = {
            "jsonl": self._jsonl, "tsv": self._tsv, "parquet": self._parquet, "texts": self._texts
        }[self.format]  # fmt: skip
        end = start
        for batch in read(start):
            end = batch.end
            yield batch
        self._judge(end, final=True)
        if not end.passages:
            raise UserError(f"{self.path} holds no passage; check the file and --format.")

    # ------------------------------------------------------------------------------- formats

    def _jsonl(self, start: Position) -> Iterator[Batch]:
        yield from self._lines(start, lambda path: (False, parse_jsonl))

    def _tsv(self, start: Position) -> Iterator[Batch]:
        yield from self._lines(start, _tsv_parser)

    def _lines(
        self,
        start: Position,
        parser: Callable[[Path], tuple[bool, Callable[[bytes, str], Passage]]],
    ) -> Iterator[Batch]:
        """Batches of files of lines; `parser` tells of a file whether it has a header."""
        here = start
        for number in range(start.file, len(self.files)):
            path = self.files[number]
            header, parse = parser(path)
            label = self._label(path)
            for block, offset, done in _blocks(path, here.offset):
                passages: list[Passage] = []
                line, bad = here.line, here.malformed
                for raw in block:
                    line += 1
                    if line == 1:
                        raw = raw.removeprefix(b"\xef\xbb\xbf")
                        if header:
                            continue
                    if not raw or raw.isspace():
                        continue
                    try:
                        passages.append(parse(raw, f"{label}:{line}"))
                    except _Bad as problem:
                        bad += 1
                        self._note(label, line, str(problem))
                here = Position(number, offset, line, here.passages + len(passages), bad)
                self._judge(here)
                yield Batch(passages, here, self._before[number] + done)
            here = Position(number + 1, 0, 0, here.passages, here.malformed)
            yield Batch([], here, self._before[number + 1])

    def _parquet(self, start: Position) -> Iterator[Batch]:
        parquet = _pyarrow()
        here = start
        for number in range(start.file, len(self.files)):
            path = self.files[number]
            label = self._label(path)
            try:
                with parquet.ParquetFile(path) as file:
                    names = [str(name) for name in file.schema_arrow.names]
                    columns = [n for n in (*_ID_NAMES, "title", "text", "contents") if n in names]
                    if not {"text", "contents"} & set(columns):
                        raise UserError(
                            f"{path} has the columns {', '.join(names)}; a corpus needs 'text' or "
                            "'contents' (and may have 'id' and 'title')."
                        )
                    rows = max(1, file.metadata.num_rows)
                    for records in _parquet_rows(file, columns, here.offset):
                        passages: list[Passage] = []
                        line, bad = here.line, here.malformed
                        for record in records:
                            line += 1
                            try:
                                passages.append(to_passage(record, f"{label}:{line}"))
                            except _Bad as problem:
                                bad += 1
                                self._note(label, line, str(problem))
                        here = Position(number, line, line, here.passages + len(passages), bad)
                        self._judge(here)
                        done = self._sizes[number] * line // rows
                        yield Batch(passages, here, self._before[number] + done)
            except (OSError, ValueError) as error:  # pyarrow's own errors are these, too
                reason = str(error).splitlines()[0][:120]
                raise UserError(f"{path} cannot be read as parquet ({reason}).") from error
            here = Position(number + 1, 0, 0, here.passages, here.malformed)
            yield Batch([], here, self._before[number + 1])

    def _texts(self, start: Position) -> Iterator[Batch]:
        here, done = start, self._before[start.file]
        for first in range(start.file, len(self.files), _ROWS):
            passages: list[Passage] = []
            bad = here.malformed
            last = min(first + _ROWS, len(self.files))
            for number in range(first, last):
                path = self.files[number]
                done += self._sizes[number]
                label = self._label(path)
                try:
                    passages.append(_text_file(path, label, self._sizes[number]))
                except _Bad as problem:
                    bad += 1
                    self._note(label, 1, str(problem))
            here = Position(last, 0, 0, here.passages + len(passages), bad)
            self._judge(here)
            yield Batch(passages, here, done)

    # ------------------------------------------------------------------------------ accounting

    def _each(self) -> Iterator[tuple[Path, int]]:
        return zip(self.files, self._sizes, strict=True)

    def _label(self, path: Path) -> str:
        return path.name if self.path == path else path.relative_to(self.path).as_posix()

    def _note(self, file: str, line: int, why: str) -> None:
        self.malformed_total += 1
        if len(self.malformed) < _NAMED:
            self.malformed.append(Malformed(file, line, why))

    def _judge(self, here: Position, final: bool = False) -> None:
        bad, lines = here.malformed, here.malformed + here.passages
        share = bad / max(1, lines)
        too_many = bad > self._limits.count
        too_often = (final or lines >= _EARLY) and share > self._limits.share
        if too_many or too_often:
            shown = "; ".join(str(entry) for entry in self.malformed[:3])
            raise UserError(
                f"{self.path}: {bad:,} of {lines:,} lines ({share:.2%}) hold no passage, more than "
                f"{self._limits.count:,} or {self._limits.share:.2%} ({shown}); mend the file, or "
                "raise --max_malformed and --max_malformed_share."
            )


# ------------------------------------------------------------------------------------- opening


def open_corpus(
    path: str | Path, format: str | None = None, limits: Limits | None = None
) -> Corpus:
    """Finds out what a corpus is; nothing but the first bytes is read.

    Args:
      path: a file or a folder.
      format: one of `FORMATS`; None to find out.
      limits: how much of it may be malformed.

    Raises:
      UserError: nothing there, or a format that cannot be told or read.
    """
    path = Path(path).expanduser()
    if format is not None and format not in FORMATS:
        raise UserError(f"a corpus has the format {', '.join(FORMATS)}, not {format!r}.")
    if path.is_dir():
        format, files = _folder(path, format)
    elif path.is_file():
        format, files = format or sniff(path), [path]
        if format == "texts":
            raise UserError(
                f"{path} is one text file, which is no corpus; give the folder of all texts, or "
                "say --format=jsonl or --format=tsv."
            )
    else:
        raise UserError(f"{path} does not exist; give the file or folder of a corpus.")
    for file in files[:1] if format == "texts" else files:
        _refuse_foreign(file, format)
    if format == "parquet":
        _pyarrow()
    return Corpus(path, format, files, limits or Limits())


def _folder(path: Path, format: str | None) -> tuple[str, list[Path]]:
    """Format and files of a folder; hidden files and those of no known name do not count."""
    named: dict[str, list[Path]] = {}
    inside = (p for p in path.rglob("*") if p.is_file())
    for file in inside:
        if any(part.startswith(".") for part in file.relative_to(path).parts):
            continue
        kind = _SUFFIXES.get(_suffix(file))
        if kind is not None:
            named.setdefault(kind, []).append(file)
    if format is None:
        if len(named) != 1:
            kinds = ", ".join(f"{len(files)} of {kind}" for kind, files in sorted(named.items()))
            raise UserError(
                f"{path} holds {kinds or 'no file of a corpus'}; a corpus is a folder of files of "
                "one format (.jsonl, .tsv, .parquet, .txt, .md): say which with --format."
            )
        (format,) = named
    if not named.get(format):
        raise UserError(f"{path} holds no file of the format {format}.")
    return format, sorted(named[format], key=lambda file: file.relative_to(path).as_posix())


def _suffix(path: Path) -> str:
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def sniff(path: Path) -> str:
    """The format of a file, by its name and its first bytes.

    Raises:
      UserError: neither tells.
    """
    head = _head(path).removeprefix(b"\xef\xbb\xbf").lstrip(b" \r\n")
    by_name = _SUFFIXES.get(_suffix(path))
    if head.startswith(b"PAR1"):
        return "parquet"
    if by_name in ("jsonl", "tsv"):
        return by_name
    if head.startswith(b"{"):
        return "jsonl"
    if b"\t" in head.split(b"\n", 1)[0]:
        return "tsv"
    if by_name == "texts":
        return by_name
    raise UserError(
        f"{path} begins neither as jsonl nor as tsv nor as parquet; say what it is with --format."
    )


def _refuse_foreign(path: Path, format: str) -> None:
    """Raises a UserError for the usual confusions, before a million lines are malformed."""
    head = _head(path)
    if format != "parquet" and head.startswith(b"PAR1"):
        raise UserError(f"{path} is a parquet file, not {format}; leave --format out.")
    if format == "parquet" and not head.startswith(b"PAR1"):
        raise UserError(f"{path} is no parquet file.")
    if format == "jsonl" and head.lstrip().startswith(b"["):
        raise UserError(
            f"{path} is one JSON array, not an object a line; convert it, for example with "
            "jq -c '.[]'."
        )


def _head(path: Path) -> bytes:
    try:
        with _opened(path) as (text, _):
            return text.read(65_536)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return b""  # told when it is read, with the line


# ------------------------------------------------------------------------------------- parsing


def parse_jsonl(raw: bytes, fallback_id: str) -> Passage:
    """The passage of one line of JSON."""
    try:
        record = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise _Bad("not UTF-8") from None
    except (ValueError, RecursionError) as error:
        message = str(error).split(": line", 1)[0]
        raise _Bad(f"not JSON ({message})") from None
    if not isinstance(record, dict):
        raise _Bad("not a JSON object")
    passage = to_passage(record, fallback_id)
    if b"\\ud" in raw or b"\\uD" in raw:
        try:
            f"{passage.id}{passage.title}{passage.text}".encode()
        except UnicodeEncodeError:
            raise _Bad("half of a surrogate pair, which is no character") from None
    return passage


def to_passage(record: dict[str, Any], fallback_id: str) -> Passage:
    """The passage of a record by its field names; see the head of this file."""
    id = record.get("id")
    if id is None:
        id = record.get("_id")
    if id is None or id == "":
        id = fallback_id
    elif type(id) is int:
        id = str(id)
    elif type(id) is not str:
        raise _Bad(f"its id is neither text nor a whole number: {str(id)[:40]!r}")
    text = record.get("text")
    if text is None:
        contents = record.get("contents")
        if type(contents) is not str:
            wanted = "'text' or 'contents'"
            raise _Bad(f"no {wanted}" if contents is None else "its 'contents' is no text")
        passage = from_contents(id, contents)
    else:
        title = record.get("title")
        if type(text) is not str or not (title is None or type(title) is str):
            raise _Bad("its 'title' or 'text' is no text")
        passage = Passage(id, title or "", text)
    if not passage.text.strip() and not passage.title.strip():
        raise _Bad("neither title nor text")
    return passage


def _tsv_parser(path: Path) -> tuple[bool, Callable[[bytes, str], Passage]]:
    """Whether a file has a header, and how its lines are read."""
    first = _head(path).removeprefix(b"\xef\xbb\xbf").split(b"\n", 1)[0]
    cells = [_unquoted(cell) for cell in first.decode("utf-8", "replace").strip("\r").split("\t")]
    names = [cell.strip().lower() for cell in cells]
    header = bool({"text", "contents"} & set(names))
    if not header:
        plain = {2: ["id", "text"], 3: ["id", "text", "title"]}
        if len(names) not in plain:
            raise UserError(
                f"{path} has {len(names)} columns and no header; begin it with a line of their "
                "names (id, text, title)."
            )
        names = plain[len(names)]

    def parse(raw: bytes, fallback_id: str) -> Passage:
        try:
            line = raw.decode("utf-8").rstrip("\r")
        except UnicodeDecodeError:
            raise _Bad("not UTF-8") from None
        fields = line.split("\t")
        if len(fields) != len(names) and '"' in line:  # a tab within quotes
            try:
                fields = next(csv.reader([line], delimiter="\t", strict=True))
            except csv.Error as error:
                raise _Bad(f"its quotes do not match ({error})") from None
        if len(fields) != len(names):
            raise _Bad(f"{len(fields)} columns instead of {len(names)}")
        return to_passage(
            {n: _unquoted(x) for n, x in zip(names, fields, strict=True)}, fallback_id
        )

    return header, parse


def _unquoted(field: str) -> str:
    """A field without the quotes of CSV; quotes that are none of these are part of the text."""
    if len(field) >= 2 and field[0] == field[-1] == '"':
        inner = field[1:-1]
        if '"' not in inner:
            return inner
        if '"' not in inner.replace('""', ""):
            return inner.replace('""', '"')
    return field


def _text_file(path: Path, label: str, size: int) -> Passage:
    if size > _LONGEST:
        raise _Bad(f"longer than {_LONGEST >> 20} MB")
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _Bad("not UTF-8") from None
    if not text.strip():
        raise _Bad("empty")
    title = path.name.removesuffix(".gz")
    return Passage(label, title.removesuffix(Path(title).suffix), text)


def _pyarrow() -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise UserError("parquet files need the package pyarrow: pip install pyarrow.") from None
    return parquet


def _parquet_rows(file: Any, columns: list[str], skip: int) -> Iterator[list[dict[str, Any]]]:
    """Records of a parquet file after the first `skip`, group by group."""
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if skip >= rows:
            skip -= rows
            continue
        for batch in file.iter_batches(_ROWS, row_groups=[group], columns=columns):
            if skip >= batch.num_rows:
                skip -= batch.num_rows
                continue
            yield batch.slice(skip).to_pylist()
            skip = 0


# ------------------------------------------------------------------------------------- blocks


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """A file's text, and the file on disk that tells how far it is read."""
    with open(path, "rb") as raw:
        if raw.peek(2)[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=raw) as text:
                yield text, raw  # type: ignore[misc]
        else:
            yield raw, raw


def _blocks(path: Path, offset: int) -> Iterator[tuple[list[bytes], int, int]]:
    """Lines of a file from an offset on, some megabytes at a time.

    Yields:
      Lines without their ends, the offset behind them, and the bytes read on disk.
    """
    with _opened(path) as (text, raw):
        try:
            if text is raw:
                raw.seek(offset)
            else:  # its own seek goes by 8 KB
                left = offset
                while left and (skipped := len(text.read(min(left, _BLOCK)))):
                    left -= skipped
            rest = b""
            while data := text.read(_BLOCK):
                cut = data.rfind(b"\n")
                if cut < 0:
                    rest += data
                    if len(rest) > _LONGEST:
                        raise UserError(
                            f"{path} has no line end for {_LONGEST >> 20} MB: it is not a passage "
                            "a line; check --format."
                        )
                    continue
                block = rest + data[:cut]
                rest = data[cut + 1 :]
                offset += len(block) + 1
                yield block.split(b"\n"), offset, raw.tell()
            if rest:
                yield [rest], offset + len(rest), raw.tell()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(
                f"{path} is cut short or damaged after {offset:,} bytes of text ({error}); fetch "
                "it again."
            ) from error
