"""How much of the gold evidence of a task file an index finds: recall@k with bootstrap intervals.

    python -m zest_jax.evaluate_retrieval --index=wiki-18 --tasks=tasks.jsonl --top_k=1,3,10
    python -m zest_jax.evaluate_retrieval --index=http://127.0.0.1:8000 --tasks=tasks.jsonl

The query is the task's question; `evidence` of a task lists the ids of its gold passages. A
question of several hops rarely names the passages of its later hops, so recall is told by hops too.

Tasks without evidence are left out, and counted. The index may be of any kind, or a server's
address.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from zest_jax import cli
from zest_jax.errors import UserError
from zest_jax.files import writing
from zest_jax.progress import Progress
from zest_jax.retrieval.interface import PassageRetriever
from zest_jax.statistics import bootstrap_ci
from zest_jax.tasks.types import Task, read_tasks


def find(
    retriever: PassageRetriever, tasks: Sequence[Task], top_k: int, batch: int, bar: Any
) -> list[list[str]]:
    """The ids of the passages found for every task's question, best first."""
    found = []
    for at in range(0, len(tasks), batch):
        part = tasks[at : at + batch]
        answers = retriever.search_passages([task.question for task in part], top_k)
        found += [[passage.id for passage, _ in answer] for answer in answers]
        bar.advance(len(part))
    return found


def recalls(tasks: Sequence[Task], found: Sequence[Sequence[str]], k: int) -> np.ndarray:
    """The share of every task's evidence among the first k passages found for it."""
    shares = []
    for task, ids in zip(tasks, found, strict=True):
        gold = set(task.evidence)
        shares.append(len(gold.intersection(ids[:k])) / len(gold))
    return np.asarray(shares)


def summary(
    tasks: Sequence[Task], found: Sequence[Sequence[str]], top_k: Sequence[int]
) -> list[dict[str, Any]]:
    """Rows of the table: over all tasks first, then by hops where there are several."""
    hops = sorted({task.hops for task in tasks})
    rows = []
    for name in ["all", *(hops if len(hops) > 1 else [])]:
        chosen = [i for i, task in enumerate(tasks) if name in ("all", task.hops)]
        for k in top_k:
            share = recalls([tasks[i] for i in chosen], [found[i] for i in chosen], k)
            low, high = bootstrap_ci(share)
            rows.append(
                {
                    "hops": name,
                    "tasks": len(chosen),
                    "k": k,
                    "recall": float(share.mean()),
                    "low": low,
                    "high": high,
                    "whole": float((share == 1).mean()),
                }
            )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as plain text."""
    lines = [f"{'hops':>5} {'tasks':>7} {'k':>4}  {'recall':>6}  95 % interval   all found"]
    for r in rows:
        lines.append(
            f"{r['hops']:>5} {r['tasks']:>7,} {r['k']:>4}  {r['recall']:>6.3f}  "
            f"{r['low']:.3f} - {r['high']:.3f}   {r['whole']:>9.3f}"
        )
    return "\n".join(lines)


def read_top_k(text: str) -> list[int]:
    """The numbers of --top_k in order.

    Raises:
      UserError: not numbers of 1 or more.
    """
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = [0]
    if numbers[0] < 1:
        raise UserError(f"--top_k takes numbers of 1 or more with commas between, not {text!r}.")
    return numbers


def read_evidence(path: str, progress: Progress) -> list[Task]:
    """The tasks that have evidence.

    Raises:
      UserError: the file cannot be read, or no task has any.
    """
    every = list(read_tasks(path))
    tasks = [task for task in every if task.evidence]
    if not tasks:
        raise UserError(
            f"{path}: none of its {len(every):,} tasks has evidence; recall needs the ids of the "
            'gold passages of each task, as "evidence": ["p1", "p2"].'
        )
    if len(tasks) < len(every):
        progress.say(f"{len(every) - len(tasks):,} of {len(every):,} tasks have no evidence.")
    return tasks


def check_evidence(retriever: PassageRetriever, tasks: Sequence[Task], where: str) -> int:
    """How many gold passages an index does not hold, where it can tell.

    Raises:
      UserError: it holds none of them: the tasks are about another corpus.
    """
    texts: Any = getattr(retriever, "_passages", None)
    if not hasattr(texts, "rows_of"):
        return 0
    gold = sorted({id for task in tasks for id in task.evidence})
    missing = [id for id, row in zip(gold, texts.rows_of(gold), strict=True) if row < 0]
    if len(missing) == len(gold):
        raise UserError(
            f"{where} holds none of the {len(gold):,} gold passages of the tasks ({gold[0]!r} is "
            "one); give the index of the corpus that they were written about."
        )
    return len(missing)


def main(config: Any, workdir: str | None, values: flags.FlagValues) -> None:
    if config is not None or workdir:
        raise UserError("this program has no config and no workdir; say --index and --tasks.")
    for name in ("index", "tasks"):
        if not getattr(values, name):
            raise UserError(f"no --{name} is given; say --index=wiki-18 --tasks=tasks.jsonl.")
    if values.batch_size < 1:
        raise UserError("--batch_size must be at least 1.")
    top_k = read_top_k(values.top_k)
    with Progress() as progress:
        tasks = read_evidence(values.tasks, progress)
        from zest_jax.retrieval.open_index import open_retriever

        options = {"encoder": values.encoder} if values.encoder else {}
        retriever = open_retriever(values.index, **options)
        missing = check_evidence(retriever, tasks, values.index)
        if missing:
            progress.say(f"{missing:,} gold passages are not in the index; they count as missed.")
        with progress.phase("searching", len(tasks)) as bar:
            found = find(retriever, tasks, top_k[-1], values.batch_size, bar)
    rows = summary(tasks, found, top_k)
    print(table(rows))
    if values.out:
        told = {
            "index": str(values.index),
            "tasks": Path(values.tasks).name,
            "gold_passages_missing": missing,
            "rows": rows,
        }
        with writing(Path(values.out)) as file:
            file.write((json.dumps(told, indent=1) + "\n").encode())


def define(values: flags.FlagValues) -> None:
    def text(name: str, default: str, help: str) -> None:
        flags.DEFINE_string(name, default, help, values)

    text("index", "", "folder of an index of any kind, or the address of a server")
    text("tasks", "", "JSON lines with question and evidence (ids of the gold passages)")
    text("top_k", "1,3,10", "numbers of passages to look among")
    text("encoder", "", "folder or hub id of the index's encoder, where it has moved")
    text("out", "", "JSON file to write")
    flags.DEFINE_integer("batch_size", 256, "questions searched at a time", flag_values=values)


entry = cli.program(
    main,
    define=define,
    needs_config=False,
    needs_workdir=False,
    memory_hint="use a smaller --batch_size",
)

if __name__ == "__main__":
    sys.exit(entry())
