"""What a run must be after a fault. Reads workdirs as they lie on the disk, without JAX.

Every function returns problems as sentences; none is good.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

UPDATES = ("warm_start", "proposer", "solver", "online")  # phases whose records are steps
# In a report: what is of one start, and of one config (whose servers have ports of their own).
OF_ONE_START = ("wall_seconds", "seconds_of_this_start", "traces", "device", "config_hash")
# In metrics: how many episodes a process had at a time, which depends on how many there are.
OF_PROCESSES = ("decode_steps", "prefilled", "slot_utilisation", "slot_waiting")
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
KEPT = ("tasks", "rollouts", "evaluation")  # folders whose files are compared
SENTENCE = re.compile(r"^zest_jax: .*[.?]$|; resume with: ")


def lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file of JSON lines; a torn last one, and what is no JSON, is left out."""
    if not path.exists():
        return []
    text = path.read_text("utf-8", errors="replace")
    found = []
    for line in text.split("\n")[:-1]:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def untimed(record: dict[str, Any]) -> dict[str, Any]:
    """A metrics record without its time and without how long things took."""
    return {k: v for k, v in record.items() if k != "time" and not k.startswith("time/")}


def step_problems(records: list[dict[str, Any]], steps: int) -> list[str]:
    """Whether steps 1 to `steps` stand in the metrics, each once and in order."""
    seen = [r["step"] for r in records if r["phase"] in UPDATES]
    wanted = list(range(1, steps + 1))
    if seen == wanted:
        problems = []
    else:
        twice = sorted({s for s in seen if seen.count(s) > 1})
        lost = sorted(set(wanted) - set(seen))
        more = sorted(set(seen) - set(wanted))
        problems = [
            f"{name} steps {which}"
            for name, which in (("repeated", twice), ("missing", lost), ("unknown", more))
            if which
        ] or [f"steps out of order: {seen}"]
    others = [(r["step"], r["phase"]) for r in records if r["phase"] not in UPDATES]
    if len(set(others)) < len(others):
        problems.append(f"evaluations or generations told twice: {others}")
    return problems


def _close(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_close(a[k], b[k], tolerance) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_close(x, y, tolerance) for x, y in zip(a, b, strict=True))
    numbers = isinstance(a, int | float) and isinstance(b, int | float)
    if tolerance and numbers:
        return abs(a - b) <= tolerance * max(1.0, abs(a), abs(b))
    return a == b


def _text(path: Path) -> str:
    """A file without what may differ: where servers were, and whether a teacher's answer was kept
    by an earlier start, which must not ask for it twice."""
    text = ADDRESS.sub("http://server", path.read_text("utf-8"))
    return text.replace('"cached": true', '"cached": false')


def report_of(workdir: Path) -> dict[str, Any]:
    report = json.loads(_text(workdir / "report.json"))
    return {k: v for k, v in report.items() if k not in OF_ONE_START}


def checkpoints_of(workdir: Path) -> list[int]:
    """Numbers of the complete checkpoints, in order."""
    folder = workdir / "checkpoints"
    if not folder.exists():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def noted(workdir: Path, number: int) -> dict[str, Any]:
    """What a checkpoint says of itself: `host`, `score` and the `sums` of its arrays; empty where
    that cannot be read."""
    try:
        return json.loads((workdir / "checkpoints" / str(number) / "host" / "metadata").read_text())
    except (OSError, ValueError):
        return {}


def end_problems(workdir: Path, unhurt: Path, tolerance: float = 0.0) -> list[str]:
    """Whether a finished run has the numbers of the unhurt one.

    Args:
      workdir: of the run.
      unhurt: workdir of the same config's run without faults.
      tolerance: relative, of numbers in metrics and report; 0 compares files and arrays bit for
        bit.
    """
    if not (workdir / "report.json").exists():
        return ["there is no report"]
    problems = []
    mine, other = lines(workdir / "metrics.jsonl"), lines(unhurt / "metrics.jsonl")
    steps = max((r["step"] for r in other), default=0)
    problems += step_problems(mine, steps)
    if not problems:
        for a, b in zip(mine, other, strict=False):
            a, b = untimed(a), untimed(b)
            bad = [k for k in a.keys() | b.keys() if not _close(a.get(k), b.get(k), tolerance)]
            if tolerance:
                bad = [k for k in bad if not k.endswith(OF_PROCESSES)]
            if bad:
                key = sorted(bad)[0]
                problems.append(
                    f"step {b['step']}, {b['phase']}: {key} is {a.get(key)}, not {b.get(key)}"
                )
                break
        if len(mine) != len(other):
            problems.append(f"{len(mine)} metric records, not {len(other)}")
    if not _close(report_of(workdir), report_of(unhurt), tolerance):
        problems.append("report.json differs")
    if tolerance:
        return problems
    names = {
        p.relative_to(d) for d in (workdir, unhurt) for f in KEPT for p in (d / f).glob("[!.]*")
    }
    for name in sorted(names):
        pair = [d / name for d in (workdir, unhurt)]
        if not all(path.exists() for path in pair):
            problems.append(f"{name} is there in one of the two only")
        elif _text(pair[0]) != _text(pair[1]):
            problems.append(f"{name} differs")
    sums = [noted(d, max(checkpoints_of(d), default=0)).get("sums") for d in (workdir, unhurt)]
    if not sums[0] or sums[0] != sums[1]:
        problems.append("the arrays of the last checkpoint differ")
    return problems


@dataclasses.dataclass(frozen=True)
class Standing:
    """A run as a fault has left it.

    Attributes:
      checkpoints: number -> host state, of the complete ones that can be read.
      finished: the last step whose record is whole.
      answered: held-out files that are whole.
      tasks: name -> time of the last change, of files of generated questions.
    """

    checkpoints: dict[int, dict[str, Any]]
    finished: int
    answered: frozenset[str]
    tasks: dict[str, int]

    @property
    def newest(self) -> int | None:
        return max(self.checkpoints, default=None)

    @property
    def saved(self) -> int:
        """Step of the newest complete checkpoint; 0 without one."""
        return 0 if self.newest is None else self.checkpoints[self.newest].get("step", 0)


def standing(workdir: Path, heldout: int) -> Standing:
    """How a run stands that nobody is running; `heldout` questions are asked."""
    records = lines(workdir / "metrics.jsonl")
    answered = {
        path.stem
        for path in (workdir / "evaluation").glob("iteration_*.jsonl")
        if len(lines(path)) == 2 * heldout
    }
    return Standing(
        {n: noted(workdir, n).get("host", {}) for n in checkpoints_of(workdir)},
        max((r["step"] for r in records if r["phase"] in UPDATES), default=0),
        frozenset(answered),
        {path.name: path.stat().st_mtime_ns for path in (workdir / "tasks").glob("*.jsonl")},
    )


def lost_problems(now: Standing, allowed: int) -> list[str]:
    """Whether more finished steps are gone than may be."""
    lost = now.finished - now.saved
    if lost > allowed:
        return [f"{lost} finished steps were not in a checkpoint; at most {allowed} may be lost"]
    return []


RESUMED = re.compile(r"resumed at step (\d+)")
DAMAGED = re.compile(r"checkpoint (\d+) is damaged \((.*)\); going on from checkpoint (\d+)")


def resume_problems(before: Standing, said: str, hurt: frozenset[int] = frozenset()) -> list[str]:
    """Whether a start went on from the newest good checkpoint, and said so of every other.

    Args:
      before: the start.
      said: by it, as far as it came.
      hurt: numbers of the checkpoints that were damaged on purpose.
    """
    resumed = RESUMED.search(said)
    if resumed is None:
        return []  # it did not come so far
    if before.newest is None:
        return ["it resumed where there is no checkpoint"]
    told = {int(bad): int(good) for bad, _, good in DAMAGED.findall(said)}
    problems = [f"checkpoint {n} was called damaged and is not" for n in told if n not in hurt]
    good = before.newest if not told else min(told.values())
    passed = [n for n in before.checkpoints if n > good and n not in told]
    if passed:
        problems.append(f"checkpoints {passed} were passed over in silence")
    step = before.checkpoints.get(good, {}).get("step")
    if step is not None and int(resumed[1]) != step:
        problems.append(f"resumed at step {resumed[1]}; checkpoint {good} is of step {step}")
    return problems


def redone_problems(before: Standing, now: Standing, resumed_from: int | None) -> list[str]:
    """Whether finished evaluations or generated questions were made anew, between two standings.

    Args:
      before: a start.
      now: after it.
      resumed_from: number of the checkpoint that it went on from.
    """
    if resumed_from is None:
        return []
    host = before.checkpoints.get(resumed_from, {})
    if not host:
        return []
    problems = []
    iteration, solving = divmod(host["phase"], 2)  # proposer and solver phases in turns
    reached = iteration if solving and host["phase_step"] > 0 else iteration - 1
    for name, time in before.tasks.items():
        if int(name.split("_")[1].split(".")[0]) <= reached and now.tasks.get(name) != time:
            problems.append(f"tasks/{name} was written anew")
    # Seconds of evaluations grow only where questions were answered.
    later = now.checkpoints.get(now.newest or 0, {})
    if later:
        was, last = (int((h["evaluated"] or "_-1").split("_")[1]) for h in (host, later))
        asked = {f"iteration_{i}" for i in range(was + 1, last + 1)}
        kept = {n for n in before.answered if int(n.split("_")[1]) <= host["phase"] // 2}
        seconds = [h["seconds"].get("evaluation", 0.0) for h in (host, later)]
        if asked <= kept and seconds[1] > seconds[0]:
            problems.append("held-out questions were answered again")
    return problems


def sentence_problems(code: int, wanted: int, said: str, *words: str) -> list[str]:
    """Whether a program ended with the right exit code and one sentence of ours with these words,
    without a traceback."""
    problems = []
    if code != wanted:
        problems.append(f"exit code {code}, not {wanted}")
    if "Traceback" in said:
        problems.append("a traceback was printed")
    last = said.strip().splitlines()[-1:] or [""]
    if not SENTENCE.search(last[0]):
        problems.append(f"the last line is no sentence of ours: {last[0][:200]!r}")
    problems += [f"{word!r} is not in: {last[0][:300]}" for word in words if word not in last[0]]
    return problems
