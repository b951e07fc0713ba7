"""What every teacher offers: conversations in, one reply each out, and counts of everything.

A teacher is frozen: the same conversation has the same answer as far as its maker keeps that up.
A fault of the teacher (nobody there, too slow, a broken answer) is never an exception: it is a
reply without a text that names the failure. So a training step goes on, and the share that stayed
unanswered is told (`Counts.unanswered`) instead of passing for a verdict.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from zest_jax.errors import UserError


class Message(NamedTuple):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


Conversation = Sequence[Message]


def user(content: str, system: str = "") -> tuple[Message, ...]:
    """A conversation of one question, after a system message where there is one."""
    head = (Message("system", system),) if system else ()
    return (*head, Message("user", content))


class Failure(enum.StrEnum):
    """Why there is no answer."""

    UNREACHABLE = "unreachable"  # no connection, or one that broke
    TIMEOUT = "timeout"  # no complete answer in time
    BUSY = "busy"  # 429 to the last
    SERVER_ERROR = "server_error"  # 5xx to the last
    REFUSED = "refused"  # any other status: a wrong key, model or path
    BAD_ANSWER = "bad_answer"  # no JSON, or not of the expected shape
    EMPTY = "empty"  # well-formed, and no text in it
    OVER_LIMIT = "over_limit"  # the spending limit is reached; nothing was sent
    GIVEN_UP = "given_up"  # too many failures in a row; nothing was sent
    TOO_LONG = "too_long"  # the conversation does not fit the teacher
    NOT_RECORDED = "not_recorded"  # recorded answers hold none to this


@dataclasses.dataclass(frozen=True)
class Reply:
    """The answer to one conversation, or why there is none.

    Attributes:
      text: as the teacher wrote it; None without an answer.
      failure: why; None with an answer.
      detail: the failure in words, for people; never a key.
      finish: why the teacher ended: "stop", "length" where its text is cut off, "" if not told.
      cached: read from the cache: nothing was sent.
      tokens_in, tokens_out: of this answer as the teacher told them; 0 where it did not.
    """

    text: str | None
    failure: Failure | None = None
    detail: str = ""
    finish: str = ""
    cached: bool = False
    tokens_in: int = 0
    tokens_out: int = 0

    def __post_init__(self) -> None:
        if (self.text is None) == (self.failure is None):
            raise ValueError("a reply is either a text or a failure")

    @property
    def answered(self) -> bool:
        return self.failure is None


def failed(failure: Failure, detail: str = "") -> Reply:
    """A reply without an answer."""
    return Reply(None, failure, detail)


@dataclasses.dataclass
class Counts:
    """What a teacher was asked and what came of it, since it was made.

    ``asked = cached + repeated + answered + sum(failed)``.

    Attributes:
      asked: conversations given to `ask`.
      cached: answered from the cache.
      repeated: equal to another conversation of the same call, and given the same reply.
      answered: answered anew.
      failed: without an answer, by failure.
      cut_off: of the answers given anew, those that ended at their length limit.
      requests: sent over the network, repeats after a failure included.
      retries: of these, the repeats.
      tokens_in, tokens_out: as told by the teacher, or estimated where it does not tell.
    """

    asked: int = 0
    cached: int = 0
    repeated: int = 0
    answered: int = 0
    failed: Counter[str] = dataclasses.field(default_factory=Counter)
    cut_off: int = 0
    requests: int = 0
    retries: int = 0
    tokens_in: int = 0
    tokens_out: int = 0

    @property
    def unanswered(self) -> float:
        """Share of the conversations without an answer; 0 before the first."""
        return self.failed.total() / self.asked if self.asked else 0.0

    def since(self, earlier: Counts) -> Counts:
        """What has come since an earlier state of these counts (a `copy`), such as in one step."""
        told = {
            f.name: getattr(self, f.name) - getattr(earlier, f.name)
            for f in dataclasses.fields(self)
        }
        return Counts(**told)

    def copy(self) -> Counts:
        """These counts as they stand."""
        return dataclasses.replace(self, failed=Counter(self.failed))

    def to_json(self) -> dict[str, Any]:
        """As a record, the share included."""
        told = dataclasses.asdict(self)
        return told | {"failed": dict(sorted(self.failed.items())), "unanswered": self.unanswered}

    def to_metrics(self, prefix: str = "teacher") -> dict[str, float]:
        """As metric keys: teacher/asked, …, teacher/failed_timeout, teacher/unanswered."""
        told = self.to_json()
        kinds = {f"failed_{name}": count for name, count in told.pop("failed").items()}
        return {f"{prefix}/{name}": float(value) for name, value in (told | kinds).items()}

    def sentence(self) -> str:
        """For people, with the failures by kind."""
        told = (
            f"teacher: asked {self.asked:,}, answered {self.answered:,}, "
            f"from the cache {self.cached + self.repeated:,}"
        )
        if not self.failed:
            return told + "."
        kinds = ", ".join(f"{name} {count:,}" for name, count in sorted(self.failed.items()))
        return f"{told}, UNANSWERED {self.failed.total():,} ({self.unanswered:.1%}: {kinds})."


class Teacher(abc.ABC):
    """A frozen judge. Subclasses write `_answer` and `card`.

    Attributes:
      counts: see `Counts`; safe to read at any time.
    """

    def __init__(self) -> None:
        self.counts = Counts()
        self._lock = threading.Lock()

    def ask(self, conversations: Sequence[Conversation]) -> list[Reply]:
        """One reply for each conversation, in order. Never raises for a fault of the teacher.

        Raises:
          TypeError: not a list of conversations: a mistake of the caller's.
        """
        asked = [_checked(conversation) for conversation in conversations]
        first: dict[tuple[Message, ...], int] = {}
        place, again = [], []
        for conversation in asked:
            if conversation in first:
                again.append(first[conversation])
            place.append(first.setdefault(conversation, len(first)))
        replies = self._answer(list(first)) if first else []
        if len(replies) != len(first):
            raise ValueError(f"{len(first)} conversations have {len(replies)} replies")
        with self._lock:
            self.counts.asked += len(asked)
            # A repeated question without an answer has failed as often as it was asked.
            for reply in [*replies, *(replies[at] for at in again)]:
                if reply.failure is not None:
                    self.counts.failed[reply.failure.value] += 1
            self.counts.repeated += sum(replies[at].answered for at in again)
            self.counts.cached += sum(reply.cached for reply in replies)
            new = [reply for reply in replies if reply.answered and not reply.cached]
            self.counts.answered += len(new)
            self.counts.cut_off += sum(reply.finish == "length" for reply in new)
        return [replies[at] for at in place]

    @abc.abstractmethod
    def _answer(self, conversations: Sequence[Conversation]) -> list[Reply]:
        """Replies to conversations that differ, in order; failures as replies."""

    @property
    @abc.abstractmethod
    def card(self) -> dict[str, Any]:
        """Who answers and how, as JSON, for the provenance of an answer: kind, model, settings.
        Never a key."""

    def close(self) -> None:  # noqa: B027, most hold nothing
        """Gives back what it holds."""

    def __enter__(self) -> Teacher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_answered(counts: Counts, most: float, asked: int = 1) -> None:
    """Ends a run whose teacher is silent too often.

    Args:
      counts: of the teacher: since it was made, or of one step (`Counts.since`), which notices one
        that dies late.
      most: largest share of unanswered conversations; 1 never ends a run.
      asked: conversations before which nothing is concluded.

    Raises:
      UserError: more are unanswered; tells how many of which kind.
    """
    if counts.asked >= max(asked, 1) and counts.unanswered > most:
        raise UserError(
            f"the teacher left more than {most:.0%} of the conversations unanswered. "
            f"{counts.sentence()} See that it runs, then start again, or allow a larger share."
        )


def digest(value: Any) -> str:
    """SHA-256 of a value's canonical JSON, in hexadecimal."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def conversation_key(conversation: Conversation) -> str:
    """The digest of a conversation's roles and texts."""
    return digest([[m.role, m.content] for m in conversation])


def _checked(conversation: Any) -> tuple[Message, ...]:
    if isinstance(conversation, str):
        raise TypeError("a conversation is a list of messages, not a text; see interface.user")
    messages = tuple(Message(*message) for message in conversation)
    if not messages or not all(isinstance(m.content, str) for m in messages):
        raise TypeError("a conversation has one message or more, each of a role and a text")
    return messages
