"""Evidence paths: facts that lead from an entity to an answer, each held by a sentence of a source.

A path is valid under six conditions, all of them required (ZEST-Search): `CRITERIA`, in the paper's
order. What the paper calls lexical constraints on relations it does not list; `PathRules` has ours.
"""

import dataclasses
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

from zest_jax.tasks.gates import PASS, Verdict
from zest_jax.tasks.names import name_key, named
from zest_jax.tasks.types import Passage

# Words that say nothing of what a relation is.
_EMPTY = frozenset(
    "a an and are as at be been by for from had has have he her his in into is it its of on or she "
    "than that the their them there these they this to was were which who whose with".split()
)
GENERIC = (
    "associated with",
    "connected to",
    "connected with",
    "linked to",
    "linked with",
    "mentions",
    "related to",
    "relates to",
    "relation",
    "same as",
)


class Aliases:
    """Which names are of one entity.

    Names are compared as `names.name_key` has them: without case, accents and punctuation.

    Args:
      entities: (id, names) of each entity; a name that two of them bear is of neither.
    """

    def __init__(self, entities: Iterable[tuple[str, Iterable[str]]] = ()):
        self._ids: dict[str, str] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        shared = set()
        for entity, names in entities:
            self._names[entity] = tuple(names)
            for key in {name_key(name) for name in self._names[entity]} - {""}:
                if self._ids.setdefault(key, entity) != entity:
                    shared.add(key)
        for key in shared:
            del self._ids[key]

    def id_of(self, name: str) -> str:
        """The entity of a name; for a name that is of no known one, the name's own key."""
        key = name_key(name)
        return self._ids.get(key, f"name:{key}")

    def names_of(self, name: str) -> tuple[str, ...]:
        """The name itself, and the other names of its entity."""
        return (name, *(n for n in self._names.get(self.id_of(name), ()) if n != name))

    def known(self, name: str) -> bool:
        """Whether the name is of a known entity."""
        return name_key(name) in self._ids


@dataclasses.dataclass(frozen=True)
class Edge:
    """One fact.

    Attributes:
      head, tail: names of the entities.
      relation: a few words.
      sentence: that holds it, as it stands in its document.
      document: id of that document (`Passage.id`).
    """

    head: str
    relation: str
    tail: str
    sentence: str
    document: str


@dataclasses.dataclass(frozen=True)
class EvidencePath:
    """Facts in the order of the question; the last one's tail is the answer."""

    edges: tuple[Edge, ...]

    @property
    def hops(self) -> int:
        return len(self.edges)

    @property
    def start(self) -> str:
        """Name of the entity that the question begins with."""
        return self.edges[0].head

    @property
    def between(self) -> tuple[str, ...]:
        """Names of the entities between start and answer."""
        return tuple(edge.tail for edge in self.edges[:-1])

    @property
    def words(self) -> tuple[str, ...]:
        """Entity, relation, entity, … as people read it."""
        return (self.start, *(part for edge in self.edges for part in (edge.relation, edge.tail)))


@dataclasses.dataclass(frozen=True)
class PathRules:
    """What the criteria leave open.

    Attributes:
      max_hops: most edges.
      title_is_subject: a document's title stands for the head in its sentences, which say "it".
      relation_words: most words of a relation.
      stem: letters by which words of a relation and its sentence are compared; 0 compares whole
        words.
      generic: relations that say nothing.
    """

    max_hops: int = 3
    title_is_subject: bool = False
    relation_words: int = 8
    stem: int = 5
    generic: tuple[str, ...] = GENERIC


@dataclasses.dataclass(frozen=True)
class PathCase:
    """What a path is judged by.

    Attributes:
      path: the path.
      answer: the target that it has to end at.
      documents: the retrieved documents by id.
      aliases: which names are of one entity.
      rules: see `PathRules`.
    """

    path: EvidencePath
    answer: str
    documents: Mapping[str, Passage]
    aliases: Aliases = dataclasses.field(default_factory=Aliases)
    rules: PathRules = PathRules()

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Entity ids of the edges' ends, head and tail of each in turn."""
        ends = [name for edge in self.path.edges for name in (edge.head, edge.tail)]
        return tuple(self.aliases.id_of(name) for name in ends)


Criterion = Callable[[PathCase], Verdict]


def endpoint(case: PathCase) -> Verdict:
    """The last node is the target answer."""
    ends = case.nodes and case.nodes[-1] == case.aliases.id_of(case.answer)
    return PASS if ends else Verdict(False, "path ends elsewhere")


def continuity(case: PathCase) -> Verdict:
    """Neighbouring edges share the entity: the tail of one is the head of the next."""
    tails, heads = case.nodes[1:-1:2], case.nodes[2::2]
    return PASS if tails == heads else Verdict(False, "edges do not join")


def acyclicity(case: PathCase) -> Verdict:
    """No entity comes twice, by whatever name. Where edges do not join, ends of each count."""
    tails, heads = case.nodes[1::2], case.nodes[::2]
    visited = [*heads[:1], *tails]
    clear = len(set(visited)) == len(visited) and all(
        head != tail for head, tail in zip(heads, tails, strict=True)
    )
    return PASS if clear else Verdict(False, "entity comes twice")


def grounding(case: PathCase) -> Verdict:
    """Every sentence stands in its source document, word for word.

    Runs of white space count as one space, and composed and decomposed letters as the same. It is
    one whole sentence as `sentences` cuts them: a part of one would be held by nothing, several
    (or a whole document) would hold anything, and one put together from two documents stands in
    neither.
    """
    for edge in case.path.edges:
        document = case.documents.get(edge.document)
        if document is None:
            return Verdict(False, "document was not retrieved")
        if _spaced(edge.sentence) not in map(_spaced, sentences(document.text)):
            return Verdict(False, "sentence not in its document")
    return PASS


def entity_support(case: PathCase) -> Verdict:
    """The sentence of an edge names both of its ends, by any of their names."""
    for edge in case.path.edges:
        told = edge.sentence
        document = case.documents.get(edge.document)
        if case.rules.title_is_subject and document is not None:
            if case.aliases.id_of(document.title) == case.aliases.id_of(edge.head):
                told = f"{document.title}: {told}"
        for end in (edge.head, edge.tail):
            if not named(told, case.aliases.names_of(end)):
                return Verdict(False, "sentence lacks an entity")
    return PASS


def relation_validity(case: PathCase) -> Verdict:
    """A relation is a few words, says something, names neither end, and a word of it stands in the
    sentence."""
    rules = case.rules
    generic = {name_key(phrase) for phrase in rules.generic}
    for edge in case.path.edges:
        key = name_key(edge.relation)
        words = content_words(edge.relation)
        if not words or key in generic:
            return Verdict(False, "relation says nothing")
        if len(key.split()) > rules.relation_words:
            return Verdict(False, "relation too long")
        ends = (*case.aliases.names_of(edge.head), *case.aliases.names_of(edge.tail))
        if named(edge.relation, ends):
            return Verdict(False, "relation names an entity")
        cut = rules.stem or None
        said = {word[:cut] for word in content_words(edge.sentence)}
        if not any(word[:cut] in said for word in words):
            # Scripts without spaces between words have no words to compare.
            if not named(edge.sentence, (edge.relation,)):
                return Verdict(False, "relation not in sentence")
    return PASS


CRITERIA: dict[str, Criterion] = {
    "endpoint": endpoint,
    "continuity": continuity,
    "acyclicity": acyclicity,
    "grounding": grounding,
    "entity_support": entity_support,
    "relation_validity": relation_validity,
}


def check_path(case: PathCase) -> Verdict:
    """All criteria in order, after the number of edges; the first refusal decides."""
    if not case.path.edges:
        return Verdict(False, "no path")
    if case.path.hops > case.rules.max_hops:
        return Verdict(False, "too many hops")
    for criterion in CRITERIA.values():
        verdict = criterion(case)
        if not verdict:
            return verdict
    return PASS


def content_words(phrase: str) -> list[str]:
    """Words of a phrase that say something, as `names.name_key` has them."""
    return [word for word in name_key(phrase).split() if word not in _EMPTY]


# A sentence ends at a mark that white space and the beginning of another follow, or at a full stop
# of a script without spaces.
_END = re.compile(r"(?<=[.!?])[\"'»”’)\]]*\s+(?=[\"'«“‘(\[]?[^\W_a-z])|(?<=[。！？])|\n{2,}")


def sentences(text: str) -> list[str]:
    """The sentences of a text, as they stand in it; abbreviations may cut one short."""
    parts, begin = [], 0
    for end in _END.finditer(text):
        parts.append(text[begin : end.start() + len(end.group().rstrip())])
        begin = end.end()
    return [part.strip() for part in (*parts, text[begin:]) if part.strip()]


def _spaced(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())
