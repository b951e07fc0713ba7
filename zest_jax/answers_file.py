"""A file of answers that an evaluation goes on with where an earlier start was stopped.

Beside `answers.jsonl` lies `answers.jsonl.settings.json`: what the answers depend on. A start with
the same settings reads what is there and asks the rest; one with others is refused, by the name of
the difference. Answers are appended batch by batch; a kill tears at most the last line, which is
cut off.
"""

import fcntl
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from zest_jax.errors import UserError
from zest_jax.evaluation import Answered
from zest_jax.files import check_writable
from zest_jax.workdir import append_jsonl, cut_torn_line, read_jsonl, write_atomically

Key = tuple[str, str, int]
_SHOWN = 3  # differences that an error names


def key_of(answer: Answered) -> Key:
    """What tells an answer from all others of its file: benchmark, id and sample."""
    return answer.benchmark, answer.id, answer.sample


class AnswersFile:
    """The answers of one evaluation, held by one process at a time.

    Args:
      path: of the file; it and its folder are made if they are missing.
      settings: what the answers depend on, as JSON.

    Attributes:
      answers: those that are there, by key. Episodes' texts stay in the file: of a large evaluation
        they are gigabytes.

    Raises:
      UserError: the file was begun with other settings, or holds something else, or another process
        writes it.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any]):
        self.path = Path(path)
        self.settings_path = self.path.with_name(f"{self.path.name}.settings.json")
        self.answers: dict[Key, Answered] = {}
        check_writable(self.path)
        self._file = self._lock()
        try:
            self._begin(dict(settings))
        except BaseException:
            self.close()
            raise

    def append(self, answers: Sequence[Answered]) -> None:
        """Adds answers; they are with the system on return."""
        append_jsonl(self.path, [a.to_json() for a in answers])
        self.answers |= {key_of(a): without_text(a) for a in answers}

    def close(self) -> None:
        """Lets another process have the file."""
        self._file.close()

    def __enter__(self) -> "AnswersFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> IO[str]:
        file = open(self.path, "a", encoding="utf-8")  # kept open: the lock lives with it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UserError(
                f"{self.path} is being written by another evaluation; wait for it, or name another "
                "--out."
            ) from None
        return file

    def _begin(self, settings: dict[str, Any]) -> None:
        cut_torn_line(self.path)
        if not self.path.stat().st_size:
            text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
            write_atomically(self.settings_path, text)
            return
        try:
            old = json.loads(self.settings_path.read_text("utf-8"))
        except (FileNotFoundError, ValueError):
            raise UserError(
                f"{self.path} holds answers whose settings are not known "
                f"({self.settings_path.name} is missing or damaged); name another --out, or remove "
                "the file."
            ) from None
        other = [n for n in sorted({*old, *settings}) if old.get(n) != settings.get(n)]
        if other:
            told = "; ".join(
                f"{n}: {old.get(n)!r}, now {settings.get(n)!r}" for n in other[:_SHOWN]
            )
            more = f"; and {len(other) - _SHOWN} more" if len(other) > _SHOWN else ""
            raise UserError(
                f"{self.path} was begun with other settings ({told}{more}); give the old ones to "
                "go on with it, or name another --out."
            )
        for number, record in enumerate(read_jsonl(self.path), 1):
            try:
                answer = Answered(**record)
            except TypeError:
                raise UserError(
                    f"{self.path}, line {number} is no answer of an evaluation; remove the line."
                ) from None
            self.answers.setdefault(key_of(answer), without_text(answer))


def without_text(answer: Answered) -> Answered:
    """The answer without its episode, which takes most of its room."""
    fields = {**vars(answer), "text": ""}
    return Answered(**fields)
