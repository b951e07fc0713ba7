"""Metrics: one JSON line a step, the same to TensorBoard, and the seconds of every phase.

A record is {"step", "phase", "time", KEY: number, …}. Steps count all updates of a run upwards;
keys are "WHO/WHAT" or "WHO/WHAT_WHICH" ("proposer/reward_hop2"); WORKSPACE.md lists them.

Numbers that are not finite: in a metric that an update depends on (its name after the slash is
"loss", "grad_norm" or "kl", or ends in "_loss", "_grad_norm" or "_kl") they stop the run, after the
record is written, and so does a count of what was not finite (a name that begins with "not_finite")
above 0; anywhere else (a mean over nothing, say) they are written as null.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from zest_jax import workdir as workdir_lib
from zest_jax.errors import UserError
from zest_jax.parallel import hosts

GUARDED = ("loss", "grad_norm", "kl")


class NonFiniteError(FloatingPointError):
    """An update's loss, gradient or divergence is no longer a number."""


class MetricsWriter:
    """Writes metrics.jsonl and tensorboard/ of a workdir.

    Args:
      workdir: the run's folder.
      resume_step: the step of the checkpoint that was restored. What was written for later steps is
        dropped, here and in TensorBoard. None on a fresh start, which drops everything.
      resume_count: `count` at that checkpoint: what was written at the same step but after it (an
        evaluation, say) is dropped too, for it will be written again.

    Raises:
      UserError: records from before the checkpoint are gone.
    """

    def __init__(
        self,
        workdir: workdir_lib.Workdir,
        resume_step: int | None = None,
        resume_count: int | None = None,
    ):
        last = -1 if resume_step is None else resume_step
        self._path = workdir.metrics_jsonl
        self._path.parent.mkdir(parents=True, exist_ok=True)
        old = list(workdir_lib.read_jsonl(self._path))
        kept = [record for record in old[:resume_count] if record["step"] <= last]
        # Processes that write a folder of their own, which is thrown away, have no older records.
        if len(kept) < (resume_count or 0) and hosts.is_first():
            raise UserError(
                f"{self._path} holds {len(kept)} of the {resume_count} records that were written "
                "before the checkpoint: bring a copy of it back, or begin in another workdir."
            )
        workdir_lib.write_jsonl(self._path, kept)
        self.count = len(kept)  # of records in the file
        self._file = open(self._path, "a", encoding="utf-8")
        self._board = _Board(workdir.tensorboard, last + 1)

    def write(self, step: int, phase: str, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the metrics of a step; the line is with the system on return.

        Args:
          step: counts the run's updates; never falls.
          phase: "warm_start", "proposer", "generate", "solver" or "eval".
          scalars: key -> number (Python, NumPy or a JAX scalar).

        Returns:
          The record as written.

        Raises:
          NonFiniteError: see `not_finite`.
        """
        numbers = {key: float(value) for key, value in scalars.items()}
        finite = {key: x if math.isfinite(x) else None for key, x in numbers.items()}
        record = {"step": int(step), "phase": phase, "time": round(time.time(), 3), **finite}
        self._file.write(workdir_lib.dump_line(record))
        self._file.flush()
        self.count += 1
        self._board.write(step, {key: x for key, x in finite.items() if x is not None})
        bad = not_finite(numbers)
        if bad:
            self.sync()
            raise NonFiniteError(f"step {step}, phase {phase}: {told(bad)}")
        return record

    def sync(self) -> None:
        """Hands everything to the disk; call it before a checkpoint of the same step."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._board.flush()

    def close(self) -> None:
        self.sync()
        self._file.close()
        self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Board:
    """TensorBoard events, written by the calling thread.

    tensorboardX's own writer is a thread behind a short queue: where the disk is full the thread
    dies, and with it, silently, whoever waits for room in the queue.

    Args:
      folder: where the event files are.
      purge: points of this step and later ones, from earlier starts, are no longer shown.
    """

    def __init__(self, folder: Path, purge: int):
        folder.mkdir(parents=True, exist_ok=True)
        # A name of its own: two starts may fall into one second.
        self._file = EventsWriter(str(folder / "events"), f".{os.getpid()}")
        start = SessionLog(status=SessionLog.START)
        self._file.write_event(Event(wall_time=time.time(), step=purge, session_log=start))
        self._file.flush()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        for key, value in scalars.items():
            event = Event(wall_time=time.time(), step=step, summary=summary.scalar(key, value))
            self._file.write_event(event)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records by step, in the order written; a step and phase written twice count once.

    That happens where a run died between a checkpoint and the metrics that follow it at the same
    step: the later record is taken.
    """
    latest: dict[tuple[int, str], dict[str, Any]] = {}
    for record in workdir_lib.read_jsonl(path):
        latest[record["step"], record["phase"]] = record
    return sorted(latest.values(), key=lambda record: record["step"])


class Stopwatch:
    """Seconds by phase, over all starts of a run.

        watch = Stopwatch(host_state["seconds"])
        with watch("solver"):
            …
        host_state["seconds"] = watch.seconds

    `seconds` belongs in the checkpoint: work that a kill threw away is then not counted, and the
    sum is the time of the work that the result rests on. Phases may nest; a phase's seconds are
    its own, without those of the phases inside it.
    """

    def __init__(self, seconds: Mapping[str, float] | None = None):
        self._done: dict[str, float] = dict(seconds or {})
        self._running: list[str] = []
        self._since = 0.0

    def add(self, phase: str, seconds: float) -> None:
        """Counts time that was spent before the watch was there."""
        self._done[phase] = self._done.get(phase, 0.0) + seconds

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase up to now, running phases included."""
        self._settle()
        return dict(self._done)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._settle()
        self._running.append(phase)
        try:
            yield
        finally:
            self._settle()
            self._running.pop()

    def _settle(self) -> None:
        """Gives the time since the last look to the innermost running phase."""
        now = time.perf_counter()
        if self._running:
            phase = self._running[-1]
            self._done[phase] = self._done.get(phase, 0.0) + now - self._since
        self._since = now


def not_finite(scalars: Mapping[str, Any]) -> dict[str, float]:
    """Those of the metrics that stop a run: guarded ones that are no number, and counts above 0 of
    what was none."""
    numbers = {key: float(value) for key, value in scalars.items()}
    return {
        key: x
        for key, x in numbers.items()
        if (_counts(key) and x != 0) or (_guarded(key) and not math.isfinite(x))
    }


def told(metrics: Mapping[str, float]) -> str:
    """Metrics and their values in a line."""
    return ", ".join(f"{key} = {x:g}" for key, x in metrics.items())


def _counts(key: str) -> bool:
    return key.rsplit("/", 1)[-1].startswith("not_finite")


def _guarded(key: str) -> bool:
    name = key.rsplit("/", 1)[-1]
    return name in GUARDED or name.endswith(tuple(f"_{each}" for each in GUARDED))
