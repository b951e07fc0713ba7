"""Teachers without a model: answers recorded before, or written by a function. For tests, and to
score a run again without asking anybody anew.

A recording is a file of JSON lines, `{"key": …, "text": …, "finish": …}`; the key is the digest of
the conversation (`interface.conversation_key`). Failures are not recorded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zest_jax.errors import UserError
from zest_jax.teachers.interface import (
    Conversation,
    Failure,
    Reply,
    Teacher,
    conversation_key,
    digest,
    failed,
)


class RecordedTeacher(Teacher):
    """Answers from a recording.

    Args:
      answers: texts, or failures, by the key of the conversation.
      name: of the recording, for provenance.
    """

    def __init__(self, answers: Mapping[str, str | Failure], name: str = "recorded") -> None:
        super().__init__()
        self._answers, self._name = dict(answers), name

    def _answer(self, conversations: Sequence[Conversation]) -> list[Reply]:
        none = Failure.NOT_RECORDED
        return [_reply(self._answers.get(conversation_key(c), none)) for c in conversations]

    @property
    def card(self) -> dict[str, Any]:
        told = {key: str(value) for key, value in self._answers.items()}
        return {"kind": "recorded", "name": self._name, "sha256": digest(told)}


class ScriptedTeacher(Teacher):
    """Answers by a function of the conversation: a text, or the failure to give one.

    Args:
      script: called once for each conversation, in order.
      name: for provenance.
    """

    def __init__(
        self, script: Callable[[Conversation], str | Failure], name: str = "scripted"
    ) -> None:
        super().__init__()
        self._script, self._name = script, name

    def _answer(self, conversations: Sequence[Conversation]) -> list[Reply]:
        return [_reply(self._script(conversation)) for conversation in conversations]

    @property
    def card(self) -> dict[str, Any]:
        return {"kind": "scripted", "name": self._name}


class RecordingTeacher(Teacher):
    """Asks another teacher, and adds every answer to a recording.

    Args:
      teacher: who is asked.
      path: the recording; it grows.
    """

    def __init__(self, teacher: Teacher, path: str | Path) -> None:
        super().__init__()
        self._teacher, self._path = teacher, Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def _answer(self, conversations: Sequence[Conversation]) -> list[Reply]:
        replies = self._teacher.ask(conversations)
        lines = [
            json.dumps({"key": conversation_key(c), "text": r.text, "finish": r.finish})
            for c, r in zip(conversations, replies, strict=True)
            if r.answered
        ]
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(line + "\n" for line in lines))
        return replies

    @property
    def card(self) -> dict[str, Any]:
        return self._teacher.card

    def close(self) -> None:
        self._teacher.close()


def read_recording(path: str | Path) -> RecordedTeacher:
    """A teacher of a recording's answers; of several answers to one conversation the last counts.

    Raises:
      UserError: no such file, or a line that is none of a recording.
    """
    answers: dict[str, str | Failure] = {}
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    record = json.loads(line)
                    key, text = record["key"], record["text"]
                except (ValueError, KeyError, TypeError):
                    raise UserError(
                        f"{path}, line {number}: expected a recorded answer with 'key' and 'text'."
                    ) from None
                if not isinstance(key, str) or not isinstance(text, str):
                    raise UserError(f"{path}, line {number}: 'key' and 'text' must be texts.")
                answers[key] = text
    except OSError:
        raise UserError(f"{path}: no such file of recorded answers.") from None
    return RecordedTeacher(answers, Path(path).name)


def _reply(answer: str | Failure) -> Reply:
    return failed(answer) if isinstance(answer, Failure) else Reply(answer)
