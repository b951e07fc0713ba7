"""What is to be done, what was done, and how it went."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .processes import HungError

HELDOUT = 4  # held-out questions of the runs

# Shares of the kinds in a campaign.
SHARES = {
    "kill": 30,
    "kill_while_saving": 18,
    "sigterm": 16,
    "ctrl_c": 8,
    "ctrl_c_twice": 8,
    "disk_full": 14,
    "checkpoint_truncated": 23,
    "checkpoint_corrupt": 23,
    "checkpoint_file_gone": 12,
    "half_written": 18,
    "metrics_cut": 5,
    "all_checkpoints_damaged": 5,
    "own_task_line": 3,
    "bad_task_line": 9,
    "retriever_down": 5,
    "retriever_slow": 4,
    "retriever_flapping": 5,
    "teacher_down": 5,
    "teacher_slow": 4,
    "teacher_half": 5,
    "lost_process": 5,
}


@dataclasses.dataclass
class Fault:
    """One injected fault.

    Attributes:
      kind: of `SHARES`.
      story: the row of starts that it is part of.
      detail: what was done, when.
      said: whether it stopped with the right message; None where no message was due.
      numbers: whether the run ended with the unhurt run's numbers; None where it has no end.
      problems: what was wrong.
    """

    kind: str
    story: str
    detail: str = ""
    said: bool | None = None
    numbers: bool | None = None
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def wrong(self) -> bool:
        return bool(self.problems) or (self.said is not True and self.numbers is not True)

    def judge_said(self, problems: Sequence[str]) -> None:
        self.said = not problems
        self.problems += problems


class Campaign:
    """The faults that are still to be injected, and those that were; shared by several threads.

    Args:
      todo: how many of each kind.
      seed: of everything drawn, but for moments that depend on the machine.
      folder: where all is written.
      place: world and compiled programs.
      keep: whether workdirs of right runs are kept, too.
    """

    def __init__(self, todo: dict[str, int], seed: int, folder: Path, place: Any, keep: bool):
        self.todo, self.seed, self.folder, self.place, self.keep = todo, seed, folder, place, keep
        self.faults: list[Fault] = []
        self.broken: list[str] = []  # stories that failed as such
        self.mount: tuple[str, ...] = ()
        self.deadline = float("inf")
        self._lock = threading.Lock()
        self._rng = random.Random(seed)
        self._numbers: Counter[str] = Counter()

    def take(self, kinds: Sequence[str]) -> str | None:
        """One of the kinds that is still to be injected, at random."""
        with self._lock:
            left = [kind for kind in kinds for _ in range(self.todo.get(kind, 0))]
            if not left or time.monotonic() > self.deadline:
                return None
            kind = self._rng.choice(left)
            self.todo[kind] -= 1
            return kind

    def give_back(self, kind: str | None) -> None:
        """It could not be injected."""
        if kind:
            with self._lock:
                self.todo[kind] += 1

    def wants(self, kinds: Sequence[str]) -> bool:
        with self._lock:
            return time.monotonic() < self.deadline and any(self.todo.get(k, 0) for k in kinds)

    def name(self, story: str) -> str:
        with self._lock:
            self._numbers[story] += 1
            return f"{story}-{self._numbers[story]}"

    def work(self, story: str, kinds: Sequence[str], tell: Callable[..., list[Fault]]) -> None:
        """Tells stories until there is no fault of the kinds left."""
        fruitless = 0
        while self.wants(kinds) and fruitless < 10:
            name = self.name(story)
            rng = random.Random(f"{self.seed} {name}")
            begun = time.monotonic()
            try:
                faults = tell(self, name, rng)
            except Exception:
                with self._lock:
                    self.broken.append(f"{name}: {traceback.format_exc()}")
                print(f"{name} broke:\n{traceback.format_exc()}", flush=True)
                fruitless += 1
                continue
            fruitless = 0 if faults else fruitless + 1
            with self._lock:
                self.faults += faults
                wrong = [fault for fault in faults if fault.wrong]
                left = sum(self.todo.values())
            kinds_of = ", ".join(fault.kind for fault in faults)
            print(
                f"{name}: {len(faults)} faults ({kinds_of}) in {time.monotonic() - begun:.0f} s, "
                f"{len(wrong)} wrong; {left} to go",
                flush=True,
            )
            for fault in wrong:
                problems = "; ".join(fault.problems) or "neither numbers nor message"
                print(f"  WRONG {fault.kind} ({fault.detail}): {problems}", flush=True)


def plan(total: int, kinds: Sequence[str]) -> dict[str, int]:
    """How many faults of each kind, by their shares: `total`, or one of each if that is more."""
    shares = {kind: SHARES[kind] for kind in kinds}
    whole = sum(shares.values())
    todo = dict.fromkeys(shares, 1)
    while sum(todo.values()) < total:  # to the kind that is furthest behind
        todo[max(todo, key=lambda kind: shares[kind] * total / whole - todo[kind])] += 1
    return todo


def table(faults: Sequence[Fault]) -> tuple[list[str], list[dict[str, Any]]]:
    """The rows by kind, as lines and as records."""
    rows = []
    for kind in [*SHARES, "all"]:
        of = [fault for fault in faults if kind in (fault.kind, "all")]
        if of:
            row = {
                "kind": kind,
                "injected": len(of),
                "same_numbers": sum(f.numbers is True for f in of),
                "right_message": sum(f.said is True for f in of),
                "wrong": sum(f.wrong for f in of),
            }
            rows.append(row)
    heads = ("kind", "injected", "ended with the same numbers", "stopped with the right message",
             "wrong")  # fmt: skip
    shown = ["| " + " | ".join(heads) + " |", "| --- | --- | --- | --- | --- |"]
    shown += ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in rows]
    return shown, rows


__all__ = ["HELDOUT", "SHARES", "Campaign", "Fault", "HungError", "plan", "table"]
