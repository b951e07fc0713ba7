"""How passages are shown: a protocol's templates, and the pieces of ids made of them beforehand."""

import dataclasses
import json
from collections.abc import Callable, Sequence

Results = Sequence[Sequence[tuple[str, str]]]
"""What the queries of one action found: for each query its passages, (title, text) each."""


@dataclasses.dataclass(frozen=True)
class Frame:
    """Token ids of everything that stands around the passages of an observation.

    Attributes:
      starts: before the passages of each of the U queries; the first begins the observation.
      heads: before each of a query's R passages.
      ending: after the passages of a query.
      closing: the observation's end.
    """

    starts: Sequence[Sequence[int]]
    heads: Sequence[Sequence[int]]
    ending: Sequence[int]
    closing: Sequence[int]

    @property
    def length(self) -> int:
        """Tokens of the whole frame, with all queries and passages there."""
        per_query = sum(map(len, self.heads)) + len(self.ending)
        return sum(map(len, self.starts)) + len(self.starts) * per_query + len(self.closing)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Templates; a doubled brace stands for one.

    Attributes:
      passage: one passage, from `{title}` and `{text}`; `{rank}`, before the title, counts the
        passages of a query from 1.
      between_passages: between two passages of a query.
      result: what one query found, `{passages}` standing for its passages.
      between_results: between the results of two queries.
      observation: the whole, `{passages}` standing for the results.
      escape: titles and texts are written as inside a JSON string.
    """

    passage: str = " {title}: {text}"
    between_passages: str = ""
    result: str = "{passages}"
    between_results: str = ""
    observation: str = "<information>{passages}</information>"
    escape: bool = False

    @property
    def body(self) -> str:
        """The passage's template from the title on: what is tokenised once for each passage."""
        return self.passage if "{rank}" not in self.passage else self._split_rank()[1]

    @property
    def stored(self) -> str:
        """Tells how `write` writes a passage from any other way: the name of stored ids."""
        return f"{self.body} in JSON" if self.escape else self.body

    def write(self, title: str, text: str) -> str:
        """A passage from its title on."""
        return self.body.format(title=self._word(title), text=self._word(text))

    def show(self, results: Results) -> str:
        """The text of the observation that shows these results (none: an empty one)."""
        written = []
        for passages in results or [[]]:
            shown = [self._head(r) + self.write(*each) for r, each in enumerate(passages)]
            before, after = _split(self.result)
            written.append(before + "".join(shown) + after)
        before, after = _split(self.observation)
        return before + self.between_results.join(written) + after

    def frame(
        self, encode: Callable[[list[str]], list[list[int]]], queries: int, retrieved: int
    ) -> Frame:
        """The ids around the passages of U queries with R passages each.

        Every piece is tokenised apart, and never again with what stands beside it.
        """
        before, after = _split(self.observation)
        start, end = _split(self.result)
        starts = [before + start, *[self.between_results + start] * (queries - 1)]
        heads = [self._head(r) for r in range(retrieved)]
        # With a single query its end and the observation's belong together.
        ending, closing = (end + after, "") if queries == 1 else (end, after)
        ids = encode([*starts, *heads, ending, closing])
        return Frame(ids[:queries], ids[queries:-2], ids[-2], ids[-1])

    def _head(self, r: int) -> str:
        rank = self._split_rank()[0].format(rank=r + 1) if "{rank}" in self.passage else ""
        return (self.between_passages if r else "") + rank

    def _split_rank(self) -> tuple[str, str]:
        head, body = self.passage.split("{title}")
        if "{rank}" in body:
            raise ValueError("{rank} must stand before {title} in a passage's template")
        return head, "{title}" + body

    def _word(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)[1:-1] if self.escape else text


def _split(template: str) -> tuple[str, str]:
    before, after = template.split("{passages}")
    return before.format(), after.format()
