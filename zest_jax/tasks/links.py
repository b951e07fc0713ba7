"""Facts of a corpus without a knowledge graph: articles that name each other.

A sentence of article X names the title of article Y after some words: "… directed by Stanley
Kubrick" in "2001: A Space Odyssey". The words before the name serve as a relation, and
`What is the name after "directed by" in the article on 2001: A Space Odyssey?` is a question whose
answer is known by construction. No label is used: titles and sentences are all there is.

What is taken as a link is deliberately strict, since a wrong one is a question without an answer:
names are compared letter by letter and case by case, the longest title wins, a name that goes on
("China Sea" after "China") is not one, and words that stand twice in an article point at nothing.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zest_jax.retrieval.interface import Passage

# Words that alone say nothing about how two names belong together.
_EMPTY = frozenset(
    """a about after against all also among an and any are as at be been before being between both
    but by during each first for from had has have he her his in into is it its more most no not of
    on one or other over she some than that the their them these they this those to two under very
    was were which who whom whose with""".split()
)
_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[A-Z])")
_CLAUSE_END = re.compile(r"[.,;:()\[\]\"“”–—]")
_NAME_START = re.compile(r"(?<!\w)[A-Z][\w'’\-]*")
# What may not follow a name: the rest of a longer one.
_GOES_ON = re.compile(r"\w|[-–]\w|(?:[’']s| of(?: the)?)? [A-Z]| \d")
_TITLE = re.compile(r"[A-Z][\w .,'’:&!\-]*[\w.!]")
_MOST_WORDS = 4
_LEAST_LETTERS = 4


@dataclass(frozen=True, order=True)
class Link:
    """A fact: the article `head` names the article `tail` after the words `relation`.

    Attributes:
      head: row of the passage that is read.
      relation: two to four words, as written.
      tail: row of the passage whose title is named.
    """

    head: int
    relation: str
    tail: int


def shorten(text: str, most: int) -> str:
    """The first whole sentences of a text, as many as fit in `most` characters; at least the first,
    which is cut after a word if it alone is longer."""
    kept = ""
    for sentence in _SENTENCE_END.split(" ".join(text.split())):
        longer = f"{kept} {sentence}".strip()
        if len(longer) > most:
            break
        kept = longer
    if kept or len(text) <= most:
        return kept
    return text[:most].rsplit(" ", 1)[0]


def nameable(passages: Sequence[Passage]) -> dict[str, int]:
    """Title -> row of the passages that can be told by their title in running text.

    Left out: titles of two passages, of fewer than four letters, that begin with no capital, and
    with brackets or other marks ("Mercury (planet)"), which running text does not spell.
    """
    counts = collections.Counter(passage.title for passage in passages)
    return {
        passage.title: row
        for row, passage in enumerate(passages)
        if counts[passage.title] == 1
        and len(passage.title) >= _LEAST_LETTERS
        and _TITLE.fullmatch(passage.title)
        and passage.text
    }


def find_links(passages: Sequence[Passage]) -> list[Link]:
    """All links between passages, in order; a head has at most one tail for a relation.

    Args:
      passages: by row; only those that `nameable` keeps are heads or tails.
    """
    titles = nameable(passages)
    by_word: dict[str, list[str]] = collections.defaultdict(list)
    for title in titles:
        by_word[_first_word(title)].append(title)
    for candidates in by_word.values():
        candidates.sort(key=len, reverse=True)
    links = []
    for row in titles.values():
        found: dict[str, set[int]] = collections.defaultdict(set)
        for relation, title in _mentions(passages[row], by_word):
            found[relation].add(titles[title])
        links += [
            Link(row, relation, tails.pop()) for relation, tails in found.items() if len(tails) == 1
        ]
    return sorted(links)


def _first_word(title: str) -> str:
    match = _NAME_START.match(title)
    return match.group() if match else title


def _mentions(passage: Passage, by_word: Mapping[str, Sequence[str]]) -> Iterable[tuple[str, str]]:
    """(words before, title) of every title that a passage names."""
    text, end = passage.text, 0
    for match in _NAME_START.finditer(text):
        start = match.start()
        if start < end:
            continue
        title = next((t for t in by_word.get(match.group(), ()) if _named(text, start, t)), None)
        if title is None:
            continue
        end = start + len(title)
        # A name within a name ("Kingdom of France" of "France") says what it is called, no more.
        if title in passage.title or passage.title in title:
            continue
        relation = words_before(text[:start])
        if relation and len(re.findall(rf"(?<!\w){re.escape(relation)}(?!\w)", text)) == 1:
            yield relation, title


def _named(text: str, start: int, title: str) -> bool:
    return text.startswith(title, start) and not _GOES_ON.match(text, start + len(title))


def words_before(text: str) -> str:
    """The relation that ends a text: its last words, back to one that says something.

    An article before the name is dropped; "" where a clause begins with the name, where a name
    stands right before it, and where four words say nothing.
    """
    words = _CLAUSE_END.split(text)[-1].split()
    while words and words[-1].lower() in ("the", "a", "an"):
        words.pop()
    taken: list[str] = []
    for word in reversed(words[-_MOST_WORDS:]):
        if not word[0].islower():
            return ""
        taken.insert(0, word)
        if word not in _EMPTY and len(word) >= _LEAST_LETTERS:
            return " ".join(taken) if len(taken) > 1 else ""
    return ""


def phrase(relation: str) -> str:
    """How a relation is asked for, with {} for the article's name."""
    return f'the name after "{relation}" in the article on {{}}'
