"""Targets: the answers that a proposer names for reference questions, before any question is
written.

A target is of the kind that the reference asks for. It has to be readable and the name of an
entity (`entity_filter`), and documents that are about something else have to name it
(`supporting`).
"""

import dataclasses
import json
import re
from collections.abc import Sequence

from zest_jax.tasks.evidence_paths import Aliases
from zest_jax.tasks.gates import PASS, Verdict, leaks_answer
from zest_jax.tasks.names import is_number_or_date, is_text, name_key, named
from zest_jax.tasks.types import Passage
from zest_jax.text import last_tag

# Words that stand for an answer without naming anything.
_NO_NAMES = frozenset("yes no true false unknown none he she it they this that".split()) | {"n a"}
_TALK = re.compile(r"\b(answer|know|none of|yes it|no it)\b")


@dataclasses.dataclass(frozen=True)
class Target:
    """A target as it was read.

    Attributes:
      answer: its name.
      kind: what it is said to be; "" where nothing is said.
    """

    answer: str
    kind: str = ""


def read_target(output: str) -> Target | None:
    """The target between <answer> and </answer>: a name, or {"answer": …, "type": …}.

    None where it is neither: no complete tag, a broken object, a value that is no text.
    """
    body = last_tag(output, "answer")
    if body is None:
        return None
    if not body.startswith("{"):
        return None if any(mark in body for mark in "<>{}") else Target(body)
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return None
    answer, kind = given.get("answer"), given.get("type", "")
    if not isinstance(answer, str) or not isinstance(kind, str) or not is_text(answer + kind):
        return None
    return Target(answer.strip(), kind.strip())


def entity_filter(
    target: Target | None, reference: str, aliases: Aliases, *, most_words: int, known_only: bool
) -> Verdict:
    """Format and entity filter: the target is a name, not too long, and not the reference's own.

    Args:
      target: as read; None is refused.
      reference: the question that it was named for.
      aliases: known entities.
      most_words: of a name.
      known_only: refuses names of no known entity.
    """
    if target is None:
        return Verdict(False, "target unreadable")
    key = name_key(target.answer)
    if not any(char.isalpha() for char in key) or key in _NO_NAMES or _TALK.search(key):
        return Verdict(False, "target names nothing")
    if is_number_or_date(target.answer):
        return Verdict(False, "target is a number or date")
    if len(key.split()) > most_words:
        return Verdict(False, "target too long")
    # "iPhone" and "van Gogh" are names; a word in small letters is one where it is known as one.
    if target.answer.islower() and not aliases.known(target.answer):
        return Verdict(False, "target is no name")
    if leaks_answer(reference, aliases.names_of(target.answer)):
        return Verdict(False, "target in its reference")
    if known_only and not aliases.known(target.answer):
        return Verdict(False, "target is no known entity")
    return PASS


def supporting(
    answer: str, documents: Sequence[Passage], aliases: Aliases, least: int = 1
) -> tuple[Verdict, tuple[Passage, ...]]:
    """Retrieval support: documents about something else whose text names the target.

    Args:
      answer: the target.
      documents: that a search for it brought, best first.
      aliases: which names are of one entity.
      least: documents that have to name it.

    Returns:
      The verdict and those documents.
    """
    known, own = aliases.names_of(answer), aliases.id_of(answer)
    found = tuple(
        document
        for document in documents
        if aliases.id_of(document.title) != own and named(document.text, known)
    )
    if len(found) >= max(least, 1):
        return PASS, found
    return Verdict(False, "nothing retrieved" if not documents else "no document names it"), found
