"""The questions of an evaluation: prepared benchmarks, files, or a run's own held-out ones."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zest_jax import datasets
from zest_jax.errors import UserError
from zest_jax.files import check_writable
from zest_jax.retrieval.interface import PassageRetriever
from zest_jax.tasks.types import Task


def read_questions(
    files: Sequence[str], benchmarks: Sequence[str], data_dir: str, limit: int = 0
) -> list[Task]:
    """The questions of files and of prepared benchmarks, each with its set in meta["benchmark"].

    A question whose hops nothing tells has hops 0.

    Args:
      files: JSON lines; a file's name is its benchmark unless its lines carry one.
      benchmarks: names of prepared sets.
      data_dir: where those are.
      limit: only so many questions of each, the first; 0 for all.

    Raises:
      UserError: no such file or benchmark, a broken line, a question without an answer, or two
        questions of a benchmark with one id.
    """
    tasks: list[Task] = []
    for name in files:
        # A name without a folder would be taken for that of a prepared set.
        path = name if "/" in name else f"./{name}"
        tasks += datasets.read(path, None, limit=limit)
    for name in benchmarks:
        tasks += datasets.read(name, data_dir or None, limit=limit)
    check_ids(tasks)
    return tasks


def check_ids(tasks: Sequence[Task]) -> None:
    """Refuses two questions of a benchmark with one id.

    Raises:
      UserError: which.
    """
    seen = set()
    for task in tasks:
        key = benchmark_of(task), task.id
        if key in seen:
            raise UserError(
                f"two questions of {key[0]} have the id {key[1]!r}; name each benchmark once, and "
                'give files of one name a "benchmark" in their lines.'
            )
        seen.add(key)


def benchmark_of(task: Task) -> str:
    """The set that a question is of."""
    return str(task.meta.get("benchmark", ""))


def of_world(tasks: Sequence[Task], name: str) -> list[Task]:
    """A world's held-out questions, as a benchmark of the world's name."""
    return [dataclasses.replace(task, meta={"benchmark": name} | dict(task.meta)) for task in tasks]


def digest(tasks: Sequence[Task]) -> str:
    """A checksum of the questions with their sets, ids, answers, hops and order."""
    sum_ = hashlib.sha256()
    for task in tasks:
        line = json.dumps([benchmark_of(task), task.id, task.question, task.answers, task.hops])
        sum_.update(line.encode())
    return sum_.hexdigest()[:16]


def check_evidence(tasks: Sequence[Task], retriever: Any, where: str) -> str:
    """Whether the gold passages that the tasks name are in what is searched.

    Args:
      tasks: some may name evidence.
      retriever: of text; or the passages of a run's world.
      where: what is searched, for people.

    Returns:
      A sentence if some are missing, else "".

    Raises:
      UserError: none is there: the questions are about another corpus.
    """
    gold = sorted({id for task in tasks for id in task.evidence})
    if not gold:
        return ""
    there = list(_there(gold, retriever))
    if not there or all(there):
        return ""
    missing = there.count(False)
    if missing == len(gold):
        raise UserError(
            f"{where} is of another corpus: it holds none of the {len(gold):,} passages that the "
            f"questions name as evidence ({gold[0]!r} is one); give the index of their corpus."
        )
    return (
        f"{missing:,} of the {len(gold):,} passages that the questions name as evidence are not in "
        f"{where}."
    )


def _there(gold: Sequence[str], retriever: Any) -> Iterator[bool]:
    """Whether each passage is there; nothing where that cannot be told, as of a server."""
    if isinstance(retriever, PassageRetriever):
        retriever = getattr(retriever, "_passages", None)
    if hasattr(retriever, "rows_of"):
        yield from (row >= 0 for row in retriever.rows_of(gold))
    elif isinstance(retriever, Sequence) and len(retriever):
        known = {passage.id for passage in retriever}
        yield from (id in known for id in gold)


def check_files(out: str, json_file: str, html: str) -> None:
    """Refuses places where a file cannot be written, before anything is answered.

    Raises:
      UserError: which.
    """
    for name in filter(None, (out, json_file, html)):
        if name != "-":
            check_writable(Path(name))
