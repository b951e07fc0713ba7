"""Names of entities: how they are compared, which belong to one entity alone, where they stand.

Names are held as 64-bit hashes: two of 20 million different names share one with a chance of about
1 in 100,000, and would then count as a name of several entities.

Letters: E entities of the graph, K names that one entity bears alone.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zest_jax.tasks.wikidata import Ints, NameTable, find
from zest_jax.text import contains_answer, normalize_answer

Hashes = NDArray[np.uint64]
Bools = NDArray[np.bool_]
Tell = Callable[[int], object]

_NO_NAME = b"\0" * 8


class _Keys(dict[int, int | None]):
    """Characters of a name as they are compared, worked out when first met."""

    def __missing__(self, point: int) -> int | None:
        char = chr(point)
        if 0x300 <= point < 0x370:  # accents; vowel signs of other scripts are letters
            kept: int | None = None
        else:
            kept = point if char.isalnum() or unicodedata.category(char)[0] == "M" else 32
        self[point] = kept
        return kept


_KEYS = _Keys()
_ASCII = bytes(
    ord(chr(point).lower()) if point < 128 and chr(point).isalnum() else 32 if point != 9 else 9
    for point in range(256)
)


def name_key(name: str) -> str:
    """A name without case, accents and punctuation, words parted by one space.

    "Jay-Z" and "jay z" are one name, "Köln" and "Koln" are; so are full-width and plain letters.
    Vowel signs of scripts that write them as marks are kept. A name without any letter or digit
    gives "".
    """
    plain = unicodedata.normalize("NFKD", name).casefold()
    return " ".join(plain.translate(_KEYS).split())


def row_keys(raw: bytes) -> list[bytes]:
    """`name_key` of the names of a row (with tabs between), UTF-8; blank names are left out."""
    if raw.isascii():
        plain = raw.translate(_ASCII).split(b"\t")
        given = raw.split(b"\t")
        return [b" ".join(p.split()) for p, g in zip(plain, given, strict=True) if g.strip()]
    names = raw.decode().split("\t")
    return [name_key(name).encode() for name in names if name.strip()]


def hash_key(key: bytes) -> bytes:
    """The 8 bytes that a name is known by; all zero for one without letter or digit."""
    return hashlib.blake2b(key, digest_size=8).digest() if key else _NO_NAME


_WORD = re.compile(r"[^\W_]+")
_MONTHS = (
    "january february march april may june july august september october november december "
    "jan feb mar apr jun jul aug sep sept oct nov dec"
)
_ERAS = "bc ad bce ce century millennium decade"
_DATE_WORDS = frozenset(f"{_MONTHS} {_ERAS} s st nd rd th of the".split())
_DATE_WORD = re.compile(r"\d+(st|nd|rd|th|s)?|[\d年月日世紀年代]+")


def is_number_or_date(name: str) -> bool:
    """Whether it is: "3.14", "12 May 1990", "1990s", "21st century", "1990年5月"."""
    words = _WORD.findall(name.casefold())
    return any(word[0].isnumeric() for word in words) and all(
        word in _DATE_WORDS or word.isnumeric() or _DATE_WORD.fullmatch(word) for word in words
    )


def written_length(name: str) -> int:
    """Letters and digits of a name; those of East Asian scripts, which hold more, count as two."""
    return sum(
        2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in name if char.isalnum()
    )


class SurfaceRules(NamedTuple):
    """What a name must be like to be asked for.

    Attributes:
      shortest: letters and digits that it needs, see `written_length`.
      numbers: whether numbers and dates may be.
    """

    shortest: int = 3
    numbers: bool = False

    def allow(self, name: str) -> bool:
        return written_length(name) >= self.shortest and (
            self.numbers or not is_number_or_date(name)
        )


@dataclass(frozen=True)
class NameIndex:
    """The names that exactly one entity bears.

    Attributes:
      keys: [K] hashes, ascending.
      owners: [K] int32, row of the entity in the graph; -1 for one outside of it.
      ranks: [K] uint16, which of the entity's names it is, 0 for the first.
      names: how many names there were, different ones of an entity.
      shared: how many were dropped since several entities bear them.
      unnamed: [E] bool, entities that have no row of names.
      alone: [E] bool, entities that have a name of their own.
    """

    keys: Hashes
    owners: Ints
    ranks: NDArray[np.uint16]
    names: int
    shared: int
    unnamed: Bools
    alone: Bools

    def own(self, table: NameTable, row: int) -> list[str]:
        """The names of a row of `table` that no other entity bears, each once."""
        names = table.names(row)
        keys = [name_key(name).encode() for name in names]
        found = find(self.keys, as_hashes(map(hash_key, keys))) >= 0
        by_key: dict[bytes, str] = {}
        for name, key, kept in zip(names, keys, found.tolist(), strict=True):
            if kept:
                by_key.setdefault(key, name)
        return list(by_key.values())


def as_hashes(digests: Iterable[bytes]) -> Hashes:
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64, copy=False)


def index_names(table: NameTable, entities: Ints, tell: Tell | None = None) -> NameIndex:
    """Finds the names that one entity bears alone, among all rows of the table.

    Args:
      table: names of entities; those outside the graph count as owners, too.
      entities: [E] ascending numbers of the graph's entities.
      tell: called with the rows that were read.
    """
    digests = bytearray()
    counts = array("i")
    for row in range(len(table)):
        keys = row_keys(table.raw(row))
        counts.append(len(keys))
        digests += b"".join(map(hash_key, keys))
        if tell is not None and row % 65_536 == 0:
            tell(row)
    if tell is not None:
        tell(len(table))
    count = np.frombuffer(counts, np.int32)
    key = np.frombuffer(digests, "<u8")
    owner = np.repeat(np.arange(len(table), dtype=np.int32), count)
    rank = np.arange(len(key)) - np.repeat(np.cumsum(count) - count, count)
    rank = np.minimum(rank, 65_535).astype(np.uint16)
    keep = key != 0
    order = np.argsort(key[keep], kind="stable")
    key, owner, rank = key[keep][order], owner[keep][order], rank[keep][order]
    first = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]])) if len(key) else order
    # Rows ascend within equal keys, so the ends of a run tell whether it has one owner.
    last = np.append(first[1:], len(key)) - 1
    single = owner[first] == owner[last] if len(key) else np.zeros(0, bool)
    kept = first[single]
    row_in_graph = find(entities, table.numbers)
    owners = row_in_graph[owner[kept]]
    unnamed = np.ones(len(entities), bool)
    unnamed[row_in_graph[row_in_graph >= 0]] = False
    alone = np.zeros(len(entities), bool)
    alone[owners[owners >= 0]] = True
    return NameIndex(
        key[kept], owners, rank[kept], len(first), int((~single).sum()), unnamed, alone
    )


# ------------------------------------------------------------------------------------ mentions

# Scripts that put no space between words: Thai, Lao, Myanmar, Khmer, kana and Chinese characters.
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")


def mentions(text: str, names: Sequence[str]) -> bool:
    """Whether a text has one of some names in it, as whole words (`text.contains_answer`).

    Where a name begins and ends in a script without spaces between words, it may stand anywhere.
    """
    if any(contains_answer(text, name) for name in names):
        return True
    for name in names:
        if name and _UNSPACED.match(name[0]) and _UNSPACED.match(name[-1]):
            if normalize_answer(name) in normalize_answer(text):
                return True
    return False


def named(text: str, names: Sequence[str]) -> bool:
    """Whether a text has one of some names in it, however it is written: as whole words, without
    regard to case, accents and any punctuation ("Paris's", "«Hamlet»"); in scripts without spaces,
    anywhere."""
    words = f" {name_key(text)} "
    keys = (name_key(name) for name in names)
    return any(key and f" {key} " in words for key in keys) or mentions(text, names)


def is_text(value: str) -> bool:
    """Whether a string can be written down: JSON may hold halves of characters, which cannot."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
