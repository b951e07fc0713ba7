"""Reads Wikidata5M's files as they are distributed, as streams, into flat arrays.

- triples: ``Q42 TAB P31 TAB Q5`` a line;
- names: ``Q42 TAB name TAB name …`` for entities, ``P31 TAB name …`` for relations;
- descriptions: ``Q42 TAB text``.

Files may be plain, gzipped, or members of a .tar.gz. Ids are kept as their numbers (int32). A line
that is none of these is left out, counted and named with file and line; too many end the reading.

Letters: T triples, N rows of names.
"""

from __future__ import annotations

import gzip
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zest_jax.errors import UserError
from zest_jax.retrieval.corpora import Limits, Malformed

Ints = NDArray[np.int32]
Tell = Callable[[int], object]  # called with the bytes read on disk, of this file

BLOCK = 1 << 22  # bytes of text read at a time
_LONGEST = 1 << 26  # bytes of a line; a longer one belongs to a file of another kind
_DIGITS = 9  # of an id; more do not fit into 32 bits, and Wikidata has none
_NAMED = 20  # malformed lines that are kept by name
_EARLY = 1000  # lines before the share of malformed ones is judged
_TRIPLE = re.compile(rb"Q([1-9]\d{0,8})\tP([1-9]\d{0,8})\tQ([1-9]\d{0,8})")
_SHAPE = np.frombuffer(b"Q\tP\tQ\n", np.uint8)


class Tally:
    """Counts the lines that could not be read.

    Args:
      what: what a line should hold, for people ("a triple").
      limits: how many may be malformed.

    Attributes:
      lines: lines that could be read.
      malformed: how many could not.
      named: the first of them.
    """

    def __init__(self, what: str, limits: Limits | None = None):
        self.what, self._limits = what, limits or Limits()
        self.lines = self.malformed = 0
        self.named: list[Malformed] = []

    def note(self, file: str, line: int, why: str) -> None:
        """Counts a malformed line."""
        self.malformed += 1
        if len(self.named) < _NAMED:
            self.named.append(Malformed(file, line, why))

    def judge(self, path: Path, final: bool = False) -> None:
        """Raises a UserError where too many lines are malformed, or none is left."""
        lines = self.lines + self.malformed
        share = self.malformed / max(1, lines)
        too_often = (final or lines >= _EARLY) and share > self._limits.share
        if self.malformed > self._limits.count or too_often:
            shown = "; ".join(map(str, self.named[:3]))
            raise UserError(
                f"{path}: {self.malformed:,} of {lines:,} lines ({share:.2%}) are not "
                f"{self.what}, more than {self._limits.count:,} or {self._limits.share:.2%} "
                f"({shown}); mend the file, or raise --max_malformed and --max_malformed_share."
            )
        if final and not self.lines:
            raise UserError(f"{path} holds no line that is {self.what}; check the file.")


class Block(NamedTuple):
    """Some whole lines of a file.

    Attributes:
      file: name of the file, or of the archive and its member.
      line: number of the first line, from 1.
      data: the lines, each with its newline.
      done: bytes read on disk.
    """

    file: str
    line: int
    data: bytes
    done: int


def blocks(path: Path, member: str = "") -> Iterator[Block]:
    """Streams the lines of a file some megabytes at a time; line ends are made newlines.

    Args:
      path: plain, gzipped, or an archive (.tar, .tar.gz, .tgz) of which every file counts that ends
        in .txt or .tsv and whose name contains ``member``.
      member: see there.

    Raises:
      UserError: there is no such file or member, or it is cut short or damaged.
    """
    try:
        with ExitStack() as stack:
            raw = stack.enter_context(open(path, "rb"))
            if not path.name.endswith((".tar", ".tar.gz", ".tgz")):
                zipped = raw.peek(2)[:2] == b"\x1f\x8b"
                text = stack.enter_context(gzip.GzipFile(fileobj=raw)) if zipped else raw
                yield from _blocks(text, path.name, raw)  # type: ignore[arg-type]
                return
            found = 0
            archive = stack.enter_context(tarfile.open(fileobj=raw, mode="r|*"))
            for entry in archive:
                name = Path(entry.name).name
                if not entry.isfile() or name.startswith(".") or member not in name:
                    continue
                if not name.endswith((".txt", ".tsv")):
                    continue
                found += 1
                file = archive.extractfile(entry)
                assert file is not None
                yield from _blocks(file, f"{path.name}:{name}", raw)
            if not found:
                what = f"a name with '{member}' in it" if member else "the ending .txt"
                raise UserError(f"{path} has no file of {what}; give the archive as distributed.")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give a file of Wikidata5M.") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder; give a file of Wikidata5M.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
        raise UserError(f"{path} is cut short or damaged ({error}); fetch it again.") from error


def _blocks(text: IO[bytes], label: str, raw: IO[bytes]) -> Iterator[Block]:
    rest, line = b"", 1
    while data := text.read(BLOCK):
        cut = data.rfind(b"\n") + 1
        if not cut:
            rest += data
            if len(rest) > _LONGEST:
                raise UserError(f"{label} has no line end for {_LONGEST >> 20} MB: no text file.")
            continue
        block = _clean(rest + data[:cut], first=line == 1)
        rest = data[cut:]
        yield Block(label, line, block, raw.tell())
        line += block.count(b"\n")
    if rest:
        yield Block(label, line, _clean(rest + b"\n", first=line == 1), raw.tell())


def _clean(block: bytes, first: bool) -> bytes:
    if first:
        block = block.removeprefix(b"\xef\xbb\xbf")
    return block.replace(b"\r\n", b"\n") if b"\r" in block else block


# ------------------------------------------------------------------------------------- triples


def read_triples(
    paths: Sequence[Path], limits: Limits | None = None, tell: Tell | None = None
) -> tuple[Ints, Tally]:
    """Heads, relations and tails of all triples.

    Args:
      paths: files, read one behind the other; of an archive all members.
      limits: how many lines may be malformed.
      tell: called with the bytes read on disk of all files so far.

    Returns:
      [3, T] int32 numbers of ids, as the files have them, and what was met.

    Raises:
      UserError: a file cannot be read, or holds too much of something else.
    """
    tally = Tally("a triple", limits)
    parts: list[Ints] = []
    before = 0
    for path in paths:
        for block in blocks(path):
            part = _triples(block.data)
            if part is None:
                part = _triples_by_line(block, tally)
            tally.lines += part.shape[1]
            parts.append(part)
            tally.judge(path)
            if tell is not None:
                tell(before + block.done)
        before += path.stat().st_size
    tally.judge(paths[-1], final=True)
    return np.concatenate(parts, axis=1), tally


def _triples(data: bytes) -> Ints | None:
    """The triples [3, T] of lines that are all well formed; None where one is not."""
    char = np.frombuffer(data, np.uint8)
    mark = np.flatnonzero((char - 48).astype(np.uint8) > 9)  # all but digits
    if len(mark) % 6 or not np.array_equal(
        char[mark].reshape(-1, 6), np.broadcast_to(_SHAPE, (len(mark) // 6, 6))
    ):
        return None
    at = mark.reshape(-1, 6)
    begins = at[:, 0::2] + 1  # of the three numbers
    ends = at[:, 1::2]
    lengths = ends - begins
    adjacent = (at[:, 2] == at[:, 1] + 1) & (at[:, 4] == at[:, 3] + 1)
    first = np.concatenate([[0], at[:-1, 5] + 1])
    sound = (
        np.all(adjacent)
        and np.array_equal(at[:, 0], first)
        and lengths.min(initial=1) >= 1
        and lengths.max(initial=1) <= _DIGITS
        and np.all(char[begins] != 48)
    )
    return _numbers(char, begins, ends).T if sound else None


def _triples_by_line(block: Block, tally: Tally) -> Ints:
    rows: list[tuple[int, int, int]] = []
    for number, line in enumerate(block.data.split(b"\n")[:-1], start=block.line):
        match = _TRIPLE.fullmatch(line)
        if match:
            head, relation, tail = match.groups()
            rows.append((int(head), int(relation), int(tail)))
        elif line.strip():
            tally.note(block.file, number, f"not 'Q… TAB P… TAB Q…': {_shown(line)}")
    return np.array(rows, np.int32).reshape(-1, 3).T


def _numbers(char: NDArray[np.uint8], begins: NDArray, ends: NDArray) -> Ints:
    """The numbers whose digits stand from `begins` to `ends`; at least one digit each."""
    value = np.zeros(begins.shape, np.int32)
    longest = int((ends - begins).max(initial=0))
    for step in range(longest):
        at = begins + step
        more = at < ends
        digit = char[np.where(more, at, 0)].astype(np.int32) - 48
        value = np.where(more, value * 10 + digit, value)
    return value


def _shown(line: bytes) -> str:
    return repr(line[:60].decode("utf-8", "replace"))


# --------------------------------------------------------------------------------------- names


@dataclass(frozen=True)
class NameTable:
    """The names of entities or relations, as they are in the file, in memory.

    Attributes:
      numbers: [N] int32, numbers of the ids, ascending.
      repeated: rows that were left out since their id had one already.
      blocks: the file's text.
      block: [N] int32, the block that a row is in.
      begin: [N] int32, where its first name begins there.
      end: [N] int32, the end of its last name.
    """

    numbers: Ints
    repeated: int
    blocks: list[bytes]
    block: Ints
    begin: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.numbers)

    def raw(self, row: int) -> bytes:
        """The names of a row with tabs between, UTF-8."""
        return self.blocks[self.block[row]][self.begin[row] : self.end[row]]

    def names(self, row: int) -> tuple[str, ...]:
        """The names of a row, without outer white space; never a blank one."""
        names = (name.strip() for name in self.raw(row).decode().split("\t"))
        return tuple(name for name in names if name)

    def rows_of(self, numbers: NDArray[np.integer]) -> Ints:
        """The row of each number, -1 where it has no name."""
        return find(self.numbers, numbers)


def find(ordered: NDArray, values: NDArray) -> Ints:
    """Where each value stands in an ascending array without repetitions, -1 where it does not."""
    if not len(ordered):
        return np.full(len(values), -1, np.int32)
    at = np.searchsorted(ordered, values)
    at[at == len(ordered)] = 0
    return np.where(ordered[at] == values, at, -1).astype(np.int32)


def read_names(
    path: Path, letter: str, limits: Limits | None = None, tell: Tell | None = None
) -> tuple[NameTable, Tally]:
    """The names of entities (letter "Q") or relations ("P").

    Of an archive the members with "entity" or "relation" in their names. Where an id comes twice,
    its first row counts.

    Raises:
      UserError: the file cannot be read, or holds too much of something else.
    """
    tally = Tally(f"an id {letter}… and names with tabs between", limits)
    texts: list[bytes] = []
    parts: list[tuple[Ints, Ints, Ints, Ints]] = []
    for block in blocks(path, {"Q": "entity", "P": "relation"}[letter]):
        numbers, begin, end = _rows(block, letter, tally)
        parts.append((numbers, np.full(len(numbers), len(texts), np.int32), begin, end))
        texts.append(block.data)
        tally.judge(path)
        if tell is not None:
            tell(block.done)
    tally.judge(path, final=True)
    numbers, which, begin, end = (np.concatenate(column) for column in zip(*parts, strict=True))
    unique, first = np.unique(numbers, return_index=True)  # the first row of each id
    repeated = len(numbers) - len(unique)
    return NameTable(unique, repeated, texts, which[first], begin[first], end[first]), tally


def read_descriptions(
    path: Path, wanted: Ints, limits: Limits | None = None, tell: Tell | None = None
) -> Iterator[tuple[int, str]]:
    """Streams (number, text) of the descriptions of entities; memory does not grow.

    Args:
      path: rows ``Q… TAB text``.
      wanted: ascending numbers of the entities to tell.
      limits: how many lines may be malformed.
      tell: called with the bytes read on disk.

    Raises:
      UserError: the file cannot be read, or holds too much of something else.
    """
    tally = Tally("an id Q… and a text with a tab between", limits)
    for block in blocks(path):
        numbers, begin, end = _rows(block, "Q", tally)
        for row in np.flatnonzero(find(wanted, numbers) >= 0).tolist():
            yield int(numbers[row]), block.data[begin[row] : end[row]].decode().strip()
        tally.judge(path)
        if tell is not None:
            tell(block.done)
    tally.judge(path, final=True)


def _rows(block: Block, letter: str, tally: Tally) -> tuple[Ints, Ints, Ints]:
    """Numbers of the ids of lines ``Q… TAB rest``, and where the rest begins and ends."""
    char = np.frombuffer(block.data, np.uint8)
    ends = np.flatnonzero(char == 10)
    begins = np.concatenate([[0], ends[:-1] + 1])
    tabs = np.append(np.flatnonzero(char == 9), len(char))
    tab = tabs[np.searchsorted(tabs, begins)]
    digits = np.append(0, np.cumsum((char - 48).astype(np.uint8) <= 9, dtype=np.int32))
    length = tab - begins - 1
    cut = np.minimum(tab, len(char) - 1)
    is_id = (
        (tab < ends)
        & (char[begins] == ord(letter))
        & (length >= 1)
        & (length <= _DIGITS)
        & (digits[cut] - digits[begins + 1] == length)
        & (char[np.minimum(begins + 1, len(char) - 1)] != 48)
    )
    sound = is_id & (ends > tab + 1)
    bad = np.flatnonzero(~sound).tolist()
    try:
        block.data.decode()
    except UnicodeDecodeError:
        for row in np.flatnonzero(sound).tolist():
            try:
                block.data[begins[row] : ends[row]].decode()
            except UnicodeDecodeError:
                sound[row] = False
                bad.append(row)
    for row in sorted(bad):
        line = block.data[begins[row] : ends[row]]
        if line.strip():
            why = "not UTF-8" if is_id[row] and ends[row] > tab[row] + 1 else "no id and name"
            tally.note(block.file, block.line + row, f"{why}: {_shown(line)}")
    begins, tab, ends = begins[sound], tab[sound], ends[sound]
    tally.lines += len(begins)
    numbers = _numbers(char, begins + 1, tab)
    return numbers, (tab + 1).astype(np.int32), ends.astype(np.int32)
