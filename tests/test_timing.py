"""Seconds of a step: parts, what was compiled, stragglers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zest_jax import metrics as metrics_lib
from zest_jax import timing
from zest_jax.metrics import Stopwatch
from zest_jax.timing import Covered, StepTimes, straggling


def test_a_step_is_what_lies_within_phases_of_training(monkeypatch):
    now = [50.0]
    for module in (metrics_lib, timing):
        monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    watch = Stopwatch({"solver": 1000.0, "evaluation": 500.0})
    times = StepTimes(watch)
    rollout, update = times.part("rollout", wait), times.part("update", wait)
    with watch("solver"):
        with watch("generation"):
            wait(100)
        rollout(3)
        with watch("teacher"):
            wait(4)
        update(5)
        rollout(1)
        wait(2)
        first = times.lap()
        with watch("checkpoint"):
            wait(30)
        update(7)
        second = times.lap()
    assert first["time/step"] == pytest.approx(15)
    assert first["time/rollout"] == pytest.approx(4) and first["time/update"] == pytest.approx(5)
    assert second["time/step"] == pytest.approx(7) and second["time/update"] == pytest.approx(7)
    assert second["time/rollout"] == 0
    # One process has nothing to be compared with.
    assert first.keys() == {f"time/{w}" for w in ("step", "rollout", "update", "compile")}


def test_a_part_that_fails_is_counted_too(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    times = StepTimes(Stopwatch())

    def fail():
        now[0] += 2
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        times.part("update", fail)()
    assert times.lap()["time/update"] == 2


def test_compiling_is_seen_where_it_happens_and_only_there():
    watch = Stopwatch()
    times = StepTimes(watch)
    step = jax.jit(lambda x: jnp.sin(x) @ x.T)
    x = np.ones((3, 5), np.float32)
    with watch("solver"):
        times.part("update", step)(x)
        first = times.lap()
        times.part("update", step)(x)
        second = times.lap()
    assert 0 < first["time/compile"] <= first["time/update"] <= first["time/step"]
    assert second["time/compile"] == 0


def test_spans_within_spans_are_counted_once():
    covered = Covered()
    covered.add(12.0, 1.0)  # 11 to 12
    covered.add(14.0, 1.0)  # 13 to 14
    covered.add(15.0, 5.0)  # 10 to 15, around both
    covered.add(18.0, 2.0)
    assert covered.take() == 7
    assert covered.take() == 0


def test_the_slowest_of_the_processes():
    assert straggling(np.array([1.0, 2.0, 6.0, 2.0])) == {
        "time/slowest_process": 6.0,
        "time/slowest_over_median": 3.0,
    }


def test_of_several_processes_the_time_until_the_update_is_compared(monkeypatch):
    now, told = [0.0], []
    for module in (metrics_lib, timing):
        monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.jax, "process_count", lambda: 2)

    def gathered(value):
        told.append(value)
        return np.array([value, 4 * value])

    monkeypatch.setattr(timing, "of_all_processes", gathered)

    def wait(seconds):
        now[0] += seconds

    watch = Stopwatch()
    times = StepTimes(watch)
    with watch("online"):
        times.part("rollout", wait)(1.0)
        wait(2)
        times.part("update", wait)(10.0)
        record = times.lap()
    assert told == [3.0]
    assert record["time/slowest_process"] == 12
    assert record["time/slowest_over_median"] == pytest.approx(12 / 7.5)
