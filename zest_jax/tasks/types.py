"""The records that tasks are made of, and their line formats.

A *task* is a question with its answers, a *passage* a piece of text to retrieve, a *chain* a walk
through a knowledge graph. Tasks and passages travel as JSON lines under the field
names of FlashRAG's data sets, so that files made elsewhere can be read as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from zest_jax.errors import UserError
from zest_jax.retrieval.interface import Passage


@dataclass(frozen=True)
class Task:
    """A question whose answers are known.

    Attributes:
      id: unique within its file.
      question: the question as asked, with its question mark.
      answers: every accepted answer, the preferred one first.
      hops: number of relations between the source entity and the answer, at least 1; 0 of a
        benchmark's question of which nothing tells it.
      source_id: entity (or document) that the question starts from; splits go by it.
      evidence: passage ids in hop order, from the source to the answer.
      iteration: iteration of self-play that wrote it, -1 for tasks that no run wrote.
      chain_id: id of the chain it was written for, "" without one.
      meta: anything else of the line; kept when written back.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    hops: int = 1
    source_id: str = ""
    evidence: tuple[str, ...] = ()
    iteration: int = -1
    chain_id: str = ""
    meta: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Chain:
    """A walk ``C = (e0, r1, e1, ..., rh, eh)``; numbers are rows of the graph.

    Attributes:
      id: e.g. ``"Q142|P36|Q90"``, unique for the walk.
      entities: h + 1 entity rows, the source first and the answer last.
      relations: h relation rows.
    """

    id: str
    entities: tuple[int, ...]
    relations: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.relations or len(self.entities) != len(self.relations) + 1:
            raise ValueError(
                f"A chain of {len(self.relations)} relations cannot have "
                f"{len(self.entities)} entities."
            )

    @property
    def hops(self) -> int:
        """Number of relations, h."""
        return len(self.relations)


_TASK_FIELDS = {
    "id", "question", "golden_answers", "hops", "source_id", "evidence", "iteration", "chain_id",
}  # fmt: skip


def task_to_line(task: Task) -> str:
    """One JSON line, without the newline; the fields of ``meta`` stand beside the others."""
    record: dict[str, Any] = {
        "id": task.id,
        "question": task.question,
        "golden_answers": list(task.answers),
        "hops": task.hops,
        "source_id": task.source_id,
        "evidence": list(task.evidence),
        "iteration": task.iteration,
        "chain_id": task.chain_id,
    }
    clash = _TASK_FIELDS & task.meta.keys()
    if clash:
        raise ValueError(f"The meta of task {task.id} overrides its own fields {sorted(clash)}.")
    return json.dumps(record | task.meta, ensure_ascii=False)


def task_from_record(record: dict[str, Any], where: str) -> Task:
    """The task of a parsed line; ``where`` names file and line for the error.

    Raises:
      UserError: a field is missing or of the wrong type.
    """
    question = _field(record, "question", str, where)
    answers = _field(record, "golden_answers", list, where)
    if not answers or not all(isinstance(answer, str) and answer for answer in answers):
        raise UserError(f"{where}: 'golden_answers' must be a list of one or more texts.")
    evidence = _field(record, "evidence", list, where, default=[])
    if not all(isinstance(item, str) for item in evidence):
        raise UserError(f"{where}: 'evidence' must be a list of passage ids.")
    hops = _field(record, "hops", int, where, default=1)
    if hops < 1:
        raise UserError(f"{where}: 'hops' must be 1 or more, not {hops}.")
    if hops > _MOST_HOPS:
        raise UserError(f"{where}: 'hops' must be {_MOST_HOPS} at the most, not {hops}.")
    return Task(
        id=_field(record, "id", str, where),
        question=question,
        answers=tuple(answers),
        hops=hops,
        source_id=_field(record, "source_id", str, where, default=""),
        evidence=tuple(evidence),
        iteration=_field(record, "iteration", int, where, default=-1),
        chain_id=_field(record, "chain_id", str, where, default=""),
        meta={key: value for key, value in record.items() if key not in _TASK_FIELDS},
    )


def passage_from_record(record: dict[str, Any], where: str) -> Passage:
    """The passage of a parsed line; ``where`` names file and line for the error.

    Raises:
      UserError: a field is missing or of the wrong type.
    """
    return Passage(
        id=_field(record, "id", str, where),
        title=_field(record, "title", str, where),
        text=_field(record, "text", str, where),
    )


def read_tasks(path: str | Path) -> Iterator[Task]:
    """Streams the tasks of a JSON-lines file.

    Raises:
      UserError: the file is missing or empty, a line is not a JSON object, lacks a field or holds
        a wrong type (file, line number and what was expected), or an id comes twice.
    """
    yield from _unique((task_from_record(r, w), w) for r, w in read_records(path, "tasks"))


def read_passages(path: str | Path) -> Iterator[Passage]:
    """Streams the passages of a JSON-lines file; raises like `read_tasks`."""
    yield from _unique((passage_from_record(r, w), w) for r, w in read_records(path, "passages"))


def write_tasks(path: str | Path, tasks: Iterable[Task]) -> int:
    """Writes tasks as JSON lines and returns how many there were."""
    count = 0
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        for task in tasks:
            file.write(task_to_line(task) + "\n")
            count += 1
    return count


def read_records(path: str | Path, what: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Streams ``(object, "file, line n")`` of a JSON-lines file; blank lines are skipped.

    Raises:
      UserError: the file is missing, is not UTF-8, has a line that is not a JSON object, or holds
        no record at all.
    """
    path = Path(path)
    count = number = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise UserError(
                        f"{where}: expected one JSON object a line, but it is not JSON "
                        f"({error.msg} at column {error.colno})."
                    ) from None
                if not isinstance(record, dict):
                    raise UserError(f"{where}: expected a JSON object, found {_json_name(record)}.")
                count += 1
                yield record, where
    except UnicodeDecodeError:
        raise UserError(f"{path}, after line {number}: expected UTF-8 text.") from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected a JSON-lines file of {what}.") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; expected a JSON-lines file of {what}.") from None
    if not count:
        raise UserError(f"{path}: the file is empty; expected at least one line of {what}.")


__all__ = [
    "Chain",
    "Passage",
    "Task",
    "passage_from_record",
    "read_passages",
    "read_records",
    "read_tasks",
    "task_from_record",
    "task_to_line",
    "write_tasks",
]

_REQUIRED = object()
_MOST_HOPS = 1000  # more is a mistake
_NAMES = {str: "a text", int: "a whole number", list: "a list"}


def _field(
    record: dict[str, Any], name: str, kind: type, where: str, default: Any = _REQUIRED
) -> Any:
    value = record.get(name, default)
    if value is _REQUIRED:
        raise UserError(f"{where}: the field '{name}' ({_NAMES[kind]}) is missing.")
    # bool is a subclass of int, and true is no number of hops.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise UserError(
            f"{where}: the field '{name}' must be {_NAMES[kind]}, found {_json_name(value)}."
        )
    return value


def _json_name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")


_Item = TypeVar("_Item", Task, Passage)


def _unique(items: Iterable[tuple[_Item, str]]) -> Iterator[_Item]:
    seen: set[str] = set()
    for item, where in items:
        if item.id in seen:
            raise UserError(f"{where}: the id '{item.id}' was used on an earlier line.")
        seen.add(item.id)
        yield item
