"""Evidence paths out of retrieved documents: by their sentences, or as a proposer wrote them."""

import dataclasses
import json
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zest_jax.tasks.evidence_paths import (
    Aliases,
    Edge,
    EvidencePath,
    PathCase,
    PathRules,
    check_path,
    content_words,
    sentences,
)
from zest_jax.tasks.names import is_text, name_key, named
from zest_jax.tasks.types import Passage

_RELATION_WORDS = 4


@dataclasses.dataclass(frozen=True)
class Built:
    """What came of a target's documents.

    Attributes:
      path: the first valid path, None where there is none.
      reason: why there is none; "" where there is one.
      tried: verdicts of the candidates by reason ("" for the valid one).
    """

    path: EvidencePath | None
    reason: str
    tried: Counter[str]


def choose(
    candidates: Iterator[PathCase] | Sequence[PathCase], left_out: Container[str] = ()
) -> Built:
    """The first candidate that meets all criteria; where none does, the commonest refusal.

    Args:
      candidates: the better ones first.
      left_out: documents and entities that no path may start from, since the evaluation does.
    """
    tried: Counter[str] = Counter()
    for case in candidates:
        reason = check_path(case).reason
        if not reason:
            first = case.path.edges[0]
            if first.document in left_out or case.aliases.id_of(first.head) in left_out:
                reason = "start is of the evaluation"
        tried[reason] += 1
        if not reason:
            return Built(case.path, "", tried)
    reason = tried.most_common(1)[0][0] if tried else "no path"
    return Built(None, reason, tried)


def linked_paths(
    answer: str,
    hops: int,
    documents: Mapping[str, Passage],
    aliases: Aliases,
    rules: PathRules,
    rng: np.random.Generator,
    most: int = 64,
) -> Iterator[PathCase]:
    """Candidate paths of so many hops and, after them, of fewer, longest first.

    A sentence that names X in the document titled Y is an edge Y -> X; its relation is what the
    sentence says beside the two names. Paths are walked backwards from the answer. They are
    candidates and no more: a walk that comes back to where it was is left to the criteria.

    Args:
      answer: the target.
      hops: edges wanted.
      documents: retrieved documents by id.
      aliases: which names are of one entity.
      rules: of the criteria.
      rng: orders what is equally good.
      most: candidates tried of each length.
    """
    into: dict[str, list[Edge]] = {}

    def edges_into(name: str) -> list[Edge]:
        key = aliases.id_of(name)
        if key not in into:
            found = list(_edges(name, documents.values(), aliases))
            into[key] = [found[i] for i in rng.permutation(len(found))]
        return into[key]

    def walk(path: tuple[Edge, ...], left: int) -> Iterator[tuple[Edge, ...]]:
        if not left:
            yield path
            return
        for edge in edges_into(path[0].head if path else answer):
            yield from walk((edge, *path), left - 1)

    for length in range(hops, 0, -1):
        for number, edges in enumerate(walk((), length)):
            if number == most:
                break
            yield PathCase(EvidencePath(edges), answer, documents, aliases, rules)


def _edges(name: str, documents: Iterator[Passage] | Any, aliases: Aliases) -> Iterator[Edge]:
    known = aliases.names_of(name)
    for document in documents:
        for sentence in sentences(document.text):
            if named(sentence, known):
                relation = relation_words(sentence, (*known, *aliases.names_of(document.title)))
                yield Edge(document.title, relation, known[0], sentence, document.id)


def relation_words(sentence: str, left_out: Sequence[str]) -> str:
    """The first words of a sentence that say something, without those of some names."""
    dropped = {word for name in left_out for word in name_key(name).split()}
    kept = [word for word in content_words(sentence) if word not in dropped]
    return " ".join(kept[:_RELATION_WORDS])


def written_path(output: str) -> EvidencePath | None:
    """The path of a proposer's JSON object, None where it is none.

    {"edges": [{"head": …, "relation": …, "tail": …, "sentence": …, "document": …}, …]}, with the
    document's id as it was shown; every value is a text.
    """
    try:
        given = json.loads(output)
    except (ValueError, RecursionError):
        return None
    edges = given.get("edges") if isinstance(given, dict) else None
    if not isinstance(edges, list):
        return None
    fields = [field.name for field in dataclasses.fields(Edge)]
    read = []
    for edge in edges:
        values = [edge.get(name) for name in fields] if isinstance(edge, dict) else [None]
        if not all(isinstance(value, str) and is_text(value) for value in values):
            return None
        read.append(Edge(*values))
    return EvidencePath(tuple(read))
