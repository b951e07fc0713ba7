"""Seconds of a training step: its parts, what was compiled in it, the slowest of the processes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from zest_jax.metrics import Stopwatch

# What a run does between its steps.
BETWEEN = ("start", "generation", "evaluation", "checkpoint")

_COMPILING = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


class StepTimes:
    """What each step took, for its metrics.

        times = StepTimes(watch)
        update = times.part("update", update)
        while …:
            …
            record |= times.lap()

    A step's seconds are those of the stopwatch but for what a run does between steps, so that the
    first step of a phase is as long as the others, but for what it compiles.

    Args:
      watch: the run's.
    """

    def __init__(self, watch: Stopwatch):
        self._watch, self._compiling = watch, _compiling()
        self._parts = {"rollout": 0.0, "update": 0.0}
        self._before = self._steps()
        self._compiling.take()

    def part(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its seconds counted as that part; it returns when its arrays are there."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return jax.block_until_ready(function(*args, **kwargs))
            finally:
                self._parts[name] += time.perf_counter() - begun

        return timed

    def lap(self) -> dict[str, float]:
        """The step that ends now: `time/step`, `time/rollout`, `time/update` and `time/compile` in
        seconds (what was compiled within a part is in that part, too).

        With several processes also `time/slowest_process`, the most seconds that one of them took
        until it joined the update, in which all wait for one another, and
        `time/slowest_over_median`, those over the median process's. Every process must call it.
        """
        now = self._steps()
        step, self._before = now - self._before, now
        parts, self._parts = self._parts, dict.fromkeys(self._parts, 0.0)
        record = {"time/step": step, "time/compile": self._compiling.take()}
        record |= {f"time/{name}": seconds for name, seconds in parts.items()}
        if jax.process_count() > 1:
            record |= straggling(of_all_processes(step - parts["update"]))
        return record

    def _steps(self) -> float:
        return sum(s for phase, s in self._watch.seconds.items() if phase not in BETWEEN)


def straggling(seconds_P: np.ndarray) -> dict[str, float]:
    """The slowest of the processes (P), and how it compares with the median one."""
    slowest, median = float(np.max(seconds_P)), float(np.median(seconds_P))
    return {
        "time/slowest_process": slowest,
        "time/slowest_over_median": slowest / max(median, 1e-9),
    }


def of_all_processes(value: float) -> np.ndarray:
    """The value of every process, in their order; every process must call it."""
    return np.asarray(multihost_utils.process_allgather(np.float32(value)))


class Covered:
    """Seconds that are covered by spans which may lie within one another.

    Tracing one function traces those that it calls, and each of them is reported on its own, the
    innermost first.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def add(self, end: float, seconds: float) -> None:
        """A span that ended at a time of `time.perf_counter`; none ends before an earlier one."""
        begin = end - seconds
        while self._spans and self._spans[-1][0] >= begin:
            self._spans.pop()
        self._spans.append((begin, end))

    def take(self) -> float:
        """Seconds since the last call of this."""
        spans, self._spans = self._spans, []
        return sum(end - begin for begin, end in spans)


@functools.cache
def _compiling() -> Covered:
    """The time in which this process traces and compiles; listening once is enough for it."""
    covered = Covered()

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event in _COMPILING:
            covered.add(time.perf_counter(), duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return covered
