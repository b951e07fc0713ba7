"""The papers' directions on the embedded world: do they come out at this scale?

    python -m benchmarks.directions --out=directions --jobs=8       all arms, three seeds
    python -m benchmarks.directions --out=trial --seeds=0 --short   a trial

Each arm is a config of this repository and a run of `zest_jax.train`; the runs go side by side in
processes of their own, on the CPU, and one that is finished is not done again. Then, from their
metrics, evaluations and questions:

- **difficulty**: 4 acc (1 - acc) against 1 - acc as ZEST-Search's proposer reward: the share of
  mixed groups that the solver gets, over the second half of the steps.
- **tool**: the tool-aware solver reward against exact match: searches a question and EM at the end.
- **gain**: Dr. Free's information gain against the difficulty reward: the share of the generated
  questions of several hops that a judge answers from the source alone, and from any one passage.
- **teacher**: EviBack with and without its teacher: the share of groups whose rewards differ.
- **labels**: Dr. Free, which sees no label, against Search-R1 with labels: EM after as many solver
  steps from the same policy.

Intervals are 95 %: over the seeds by Student's t (three seeds make it wide), over questions by
paired bootstrap of all seeds' questions, over judged questions by Newcombe's.
"""

import argparse
import concurrent.futures
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats

from benchmarks import harness
from zest_jax.statistics import paired_bootstrap_ci, wilson_ci

_ONLINE = ("--config.schedule.solver_steps=40",)
_PROPOSER = ("--config.schedule.proposer_steps=24",)
ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "zest": ("zest_search.py:atlas", _ONLINE),
    "zest_failure": ("zest_search.py:atlas,failure", _ONLINE),
    "zest_no_tool_cost": ("zest_search.py:atlas,no_tool_cost", _ONLINE),
    "dr_free": ("dr_free.py:atlas", _PROPOSER),
    "dr_free_difficulty": ("dr_free.py:atlas,difficulty", _PROPOSER),
    "search_r1": ("search_r1.py:atlas", ()),
    "eviback": ("eviback.py:atlas", ()),
    "eviback_no_teacher": ("eviback.py:atlas,no_teacher", ()),
}
AUDITED = ("dr_free", "dr_free_difficulty")
_SHORT = (
    "--config.schedule.solver_steps=2",
    "--config.schedule.proposer_steps=1",
    "--config.schedule.tasks=48",
)


def run(out: Path, arm: str, seed: int, short: bool, threads: int) -> float:
    """One run, and its audit where the arm has one; returns the seconds it took."""
    workdir, begin = out / f"{arm}_{seed}", time.perf_counter()
    config, overrides = ARMS[arm]
    more = _SHORT if short else ()
    train = ["zest_jax.train", f"--config=configs/{config}", f"--workdir={workdir}"]
    train += [*overrides, *more, f"--config.seed={seed}"]
    atlas = Path("zest_jax") / "assets" / "atlas"
    audit = ["zest_jax.audit", "--model=smoke_policy", f"--out={workdir}/audit.json"]
    audit += [f"--tasks={workdir}/tasks/iteration_0.jsonl", "--hops=2,3", "--per_hop=60"]
    audit += [f"--passages={atlas}/passages.jsonl"]
    pinned = f"--xla_cpu_multi_thread_eigen={'true' if threads > 1 else 'false'}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": pinned}
    commands = [] if (workdir / "report.json").exists() else [train]
    if arm in AUDITED and not (workdir / "audit.json").exists():
        commands.append(audit)
    for command in commands:
        log = out / f"{arm}_{seed}.log"
        with log.open("a") as file:
            done = subprocess.run(
                [sys.executable, "-m", *command], stdout=file, stderr=file, env=env, check=False
            )
        if done.returncode:
            raise RuntimeError(f"{arm}, seed {seed}: {command[0]} failed; see {log}")
    return time.perf_counter() - begin


def metrics(out: Path, arm: str, seed: int, key: str) -> float:
    """Mean of a metric over the second half of the solver's steps."""
    lines = (out / f"{arm}_{seed}" / "metrics.jsonl").read_text().splitlines()
    values = [record[key] for record in map(json.loads, lines) if key in record]
    return float(np.mean(values[len(values) // 2 :]))


def answers(out: Path, arm: str, seed: int) -> dict[str, dict[str, Any]]:
    """The last greedy evaluation of a run, by question id."""
    (last,) = sorted((out / f"{arm}_{seed}" / "evaluation").glob("iteration_*.jsonl"))[-1:]
    lines = map(json.loads, last.read_text("utf-8").splitlines())
    return {line["id"]: line for line in lines if line["mode"] == "greedy"}


def student(differences: Sequence[float]) -> tuple[float, float] | None:
    """Interval of the mean of a few differences; None of one."""
    n = len(differences)
    if n < 2:
        return None
    mean, error = float(np.mean(differences)), scipy.stats.sem(differences)
    low, high = scipy.stats.t.interval(0.95, n - 1, mean, error)
    return float(low), float(high)


def newcombe(hits_a: int, of_a: int, hits_b: int, of_b: int) -> tuple[float, float]:
    """Interval of p_b - p_a from Wilson's intervals of both (Newcombe 1998, method 10)."""
    a, b = hits_a / of_a, hits_b / of_b
    (low_a, high_a), (low_b, high_b) = wilson_ci(hits_a, of_a), wilson_ci(hits_b, of_b)
    d = b - a
    return d - math.hypot(b - low_b, high_a - a), d + math.hypot(high_b - b, a - low_a)


def by_steps(out: Path, seeds: Sequence[int], of: tuple[str, str], key: tuple[str, str]) -> dict:
    """A metric of training, arm against arm, seed by seed."""
    a, b = ([metrics(out, arm, s, k) for s in seeds] for arm, k in zip(of, key, strict=True))
    differences = [y - x for x, y in zip(a, b, strict=True)]
    return _row(np.mean(a), np.mean(b), student(differences), differences)


def by_questions(out: Path, seeds: Sequence[int], of: tuple[str, str], field: str) -> dict:
    """A figure of the last evaluation, arm against arm, question by question."""
    pairs, differences = [], []
    for seed in seeds:
        a, b = (answers(out, arm, seed) for arm in of)
        own = [(float(a[id][field]), float(b[id][field])) for id in a]
        pairs += own
        differences.append(float(np.mean([y - x for x, y in own])))
    a, b = np.array(pairs).T
    return _row(a.mean(), b.mean(), paired_bootstrap_ci(a, b), differences)


def by_audit(out: Path, seeds: Sequence[int], of: tuple[str, str], context: str) -> dict:
    """A share of the audit, arm against arm."""
    hits, asked, shares = [0, 0], [0, 0], [[], []]
    for side, arm in enumerate(of):
        for seed in seeds:
            rows = json.loads((out / f"{arm}_{seed}" / "audit.json").read_text())["rows"]
            (row,) = [r for r in rows if r["hops"] == "all" and r["context"] == context]
            hits[side] += round(row["share"] * row["tasks"])
            asked[side] += row["tasks"]
            shares[side].append(row["share"])
    interval = newcombe(hits[0], asked[0], hits[1], asked[1])
    differences = [y - x for x, y in zip(*shares, strict=True)]
    return _row(hits[0] / asked[0], hits[1] / asked[1], interval, differences)


def _row(a: float, b: float, interval: tuple[float, float] | None, differences: list) -> dict:
    return {
        "a": float(a),
        "b": float(b),
        "difference": float(b - a),
        "ci95": list(interval) if interval else None,
        "by_seed": differences,
    }


def compare(out: Path, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """All rows of the table: what is compared, a, b, b - a."""
    zest, mixed = ("zest_failure", "zest"), ("solver/groups_mixed",) * 2
    tool, gain = ("zest_no_tool_cost", "zest"), ("dr_free_difficulty", "dr_free")
    teacher, labels = ("eviback_no_teacher", "eviback"), ("search_r1", "dr_free")
    signal = ("solver/groups_mixed", "teacher/groups_with_signal")
    rows: list[tuple[str, str, tuple[str, str], dict]] = [
        ("difficulty", "mixed groups", zest, by_steps(out, seeds, zest, mixed)),
        ("tool", "searches", tool, by_questions(out, seeds, tool, "searches")),
        ("tool", "EM", tool, by_questions(out, seeds, tool, "em")),
    ]
    for context in ("source", "single", "closed_book", "one_shot", "needs_all", "full"):
        rows.append(("gain", f"answered: {context}", gain, by_audit(out, seeds, gain, context)))
    rows += [
        ("gain", "EM", gain, by_questions(out, seeds, gain, "em")),
        ("teacher", "groups with signal", teacher, by_steps(out, seeds, teacher, signal)),
        ("teacher", "EM", teacher, by_questions(out, seeds, teacher, "em")),
        ("labels", "EM", labels, by_questions(out, seeds, labels, "em")),
        ("labels", "searches", labels, by_questions(out, seeds, labels, "searches")),
    ]
    return [
        {"direction": name, "figure": figure, "a_is": of[0], "b_is": of[1], **row}
        for name, figure, of, row in rows
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table of Markdown."""
    lines = ["| direction | figure | a | b | b - a [95 %] | by seed |", "|---|---|---|---|---|---|"]
    for r in rows:
        interval = f" [{r['ci95'][0]:+.3f}, {r['ci95'][1]:+.3f}]" if r["ci95"] else ""
        seeds = ", ".join(f"{d:+.3f}" for d in r["by_seed"])
        lines.append(
            f"| {r['direction']} | {r['figure']} | {r['a_is']} {r['a']:.3f} | "
            f"{r['b_is']} {r['b']:.3f} | {r['difference']:+.3f}{interval} | {seeds} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("directions"), help="folder of the runs")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) // 2, 1))
    parser.add_argument("--short", action="store_true", help="a few steps, to try the program")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    seeds = [int(seed) for seed in given.seeds.split(",")]
    threads = max((os.cpu_count() or 1) // given.jobs, 1)
    todo = [(arm, seed) for seed in seeds for arm in ARMS]
    seconds: dict[str, float] = {}
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        under_way = {
            pool.submit(run, given.out, arm, seed, given.short, threads): f"{arm}_{seed}"
            for arm, seed in todo
        }
        for done in concurrent.futures.as_completed(under_way):
            seconds[under_way[done]] = done.result()
            print(f"{under_way[done]}: {done.result():.0f} s", flush=True)
    rows = compare(given.out, seeds)
    record = {"machine": harness.machine(), "seconds": seconds, "seeds": seeds, "rows": rows}
    (given.out / "directions.json").write_text(json.dumps(record, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
