"""What every retriever of text offers, whatever stands behind it.

`PassageRetriever` is the least: queries in, passages with scores out. A retriever that holds its
corpus (`TextRetriever`) also tells the rows of what it found, so that scores can be counted and
passages read later; a remote server tells no rows, and is a `PassageRetriever` only.

Shape letters: B queries, k results asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from zest_jax.errors import UserError


@dataclass(frozen=True, slots=True)
class Passage:
    """A titled piece of text.

    Attributes:
      id: as in its corpus.
      title: "" where the corpus has none.
      text: the text without its title.
    """

    id: str
    title: str
    text: str

    def render(self) -> str:
        """The text that a policy reads without a protocol: a space (which names need), the title
        and the text."""
        return f" {self.title}: {self.text}"


class Found(NamedTuple):
    """The outcome of a search, best first.

    Attributes:
      rows: rows of the corpus [B, k] int32; -1 where there is none.
      scores: their scores [B, k] float32; -inf where there is none.
    """

    rows: np.ndarray
    scores: np.ndarray

    @classmethod
    def nothing(cls, queries: int, top_k: int) -> Found:
        """Empty answers to so many queries, to be filled in."""
        shape = (queries, top_k)
        return cls(np.full(shape, -1, np.int32), np.full(shape, -np.inf, np.float32))


@runtime_checkable
class PassageRetriever(Protocol):
    """Finds passages for queries given as text."""

    def search_passages(
        self, queries: Sequence[str], top_k: int
    ) -> list[list[tuple[Passage, float]]]:
        """The passages found for each query with their scores, best first; at most `top_k`."""
        ...


@runtime_checkable
class TextRetriever(PassageRetriever, Protocol):
    """A retriever that holds its corpus and knows it by row.

    Classes that derive from it write `search` and `passages`; the rest follows.
    """

    def search(self, queries: Sequence[str], top_k: int) -> Found:
        """The `top_k` rows for each query, -1 where fewer are found."""
        ...

    def passages(self, rows: np.ndarray) -> list[list[Passage]]:
        """The passages of rows [B, k]; rows of -1 are left out, the order is kept."""
        ...

    def search_passages(
        self, queries: Sequence[str], top_k: int
    ) -> list[list[tuple[Passage, float]]]:
        """See `PassageRetriever`."""
        found = self.search(queries, top_k)
        return [
            list(zip(passages, scores[rows >= 0].tolist(), strict=True))
            for passages, rows, scores in zip(
                self.passages(found.rows), found.rows, found.scores, strict=True
            )
        ]


def to_contents(passage: Passage) -> str:
    """A passage as the `contents` of FlashRAG's corpora and of Search-R1's server.

    The title stands in double quotes on the first line, the text on the rest.
    """
    title = " ".join(passage.title.split("\n"))
    return f'"{title}"\n{passage.text}'


def from_contents(id: str, contents: str) -> Passage:
    """The passage behind `contents`, the inverse of `to_contents`.

    A first line in double quotes is the title. So is a first line without quotes where more lines
    follow, as Search-R1 reads it; a single line without quotes is text without a title.
    """
    first, newline, rest = contents.partition("\n")
    if len(first) >= 2 and first[0] == first[-1] == '"':
        return Passage(id, first[1:-1], rest)
    return Passage(id, first, rest) if newline else Passage(id, "", first)


def read_passages(passages: Sequence[Passage] | None, rows: np.ndarray) -> list[list[Passage]]:
    """The passages of rows [B, k], each row read once; rows of -1 are left out.

    Args:
      passages: the corpus by row; None where an index was opened without it.
      rows: rows of the corpus, or -1.

    Raises:
      UserError: there is no corpus.
    """
    if passages is None:
        raise UserError("this index was opened without its passages; open its folder as a whole.")
    # Neighbouring rows lie side by side on disk: they are read in order.
    read = {row: passages[row] for row in np.unique(rows).tolist() if row >= 0}
    return [[read[row] for row in line if row >= 0] for line in rows.tolist()]
