"""Killed at any moment and started again, a run ends with the same numbers. With real processes."""

import functools
import json
import shutil
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_run
from ml_collections import ConfigDict

from zest_jax import assembly
from zest_jax.checkpoint import Checkpoints
from zest_jax.tracing import TraceCounter
from zest_jax.workdir import read_jsonl

pytestmark = pytest.mark.slow


def phases(workdir: Path) -> list[str]:
    """Phases of the records so far."""
    return [record["phase"] for record in read_jsonl(workdir / "metrics.jsonl")]


def in_proposer_phase(workdir: Path) -> bool:
    return "proposer" in phases(workdir)


def generated(workdir: Path) -> bool:
    return (workdir / "tasks" / "iteration_0.jsonl").exists()


def in_solver_phase(workdir: Path) -> bool:
    return phases(workdir).count("solver") >= 2


def evaluated(workdir: Path) -> bool:
    return (workdir / "evaluation" / "iteration_1.jsonl").exists()


def kill_when(place, workdir: Path, reached, arguments: list[str]) -> None:
    """Starts the run and kills it with SIGKILL as soon as `reached(workdir)`."""
    with place.start(arguments) as process:
        try:
            deadline = time.monotonic() + 120
            while not reached(workdir):
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.002)
        finally:
            process.kill()
    assert not (workdir / "report.json").exists()


def saving(workdir: Path) -> bool:
    """A checkpoint of a later update is being written: its temporary folder is there."""
    unfinished = (workdir / "checkpoints").glob("*.orbax-checkpoint-tmp*")
    return any(int(path.name.partition(".")[0]) > 2 for path in unfinished)


def numbers(workdir: Path) -> dict:
    """The report but for what is of one start: seconds, and which programs it traced."""
    report = json.loads((workdir / "report.json").read_text("utf-8"))
    for name in ("wall_seconds", "seconds_of_this_start", "traces"):
        report.pop(name)
    return report


def records(workdir: Path) -> list[dict]:
    return [tiny_run.untimed(record) for record in read_jsonl(workdir / "metrics.jsonl")]


@functools.cache
def arrays(workdir: Path) -> tuple[dict[str, np.ndarray], dict]:
    """The newest checkpoint of a finished run."""
    config = ConfigDict(json.loads((workdir / "config.json").read_text("utf-8")))
    parts = assembly.build(config, TraceCounter())
    checkpoints = Checkpoints(workdir / "checkpoints")
    step, state, host = checkpoints.restore(assembly.initial_state(config, parts))
    checkpoints.close()
    leaves = jax.tree_util.tree_leaves_with_path(state)
    host.pop("seconds")
    return {jax.tree_util.keystr(p): np.asarray(x) for p, x in leaves}, host | {"saved": step}


def assert_same_run(workdir: Path, other: Path) -> None:
    assert numbers(workdir) == numbers(other)
    assert records(workdir) == records(other)
    kept = [
        path.relative_to(other)
        for folder in ("tasks", "rollouts", "evaluation")
        for path in sorted((other / folder).iterdir())
    ]
    assert len(kept) == 7
    for name in kept:
        assert (workdir / name).read_bytes() == (other / name).read_bytes(), name
    state, host = arrays(workdir)
    state_of_other, host_of_other = arrays(other)
    assert host == host_of_other
    assert state.keys() == state_of_other.keys()
    for name, value in state.items():
        np.testing.assert_array_equal(value, state_of_other[name], err_msg=name, strict=True)


@pytest.mark.timeout(480)
def test_killed_again_and_again(place, finished_run, tmp_path):
    workdir = tmp_path / "killed"
    arguments = place.arguments(workdir)
    for reached in (in_proposer_phase, saving, generated, in_solver_phase, evaluated):
        kill_when(place, workdir, reached, arguments)
    done = place.run(arguments)
    assert done.returncode == 0, done.stderr
    assert "resumed at step" in done.stderr
    assert_same_run(workdir, finished_run)


def test_a_finished_run_started_again_stays_as_it_is(place, finished_run, tmp_path):
    workdir = tmp_path / "again"
    shutil.copytree(finished_run, workdir)
    done = place.run(place.arguments(workdir))
    assert done.returncode == 0, done.stderr
    assert_same_run(workdir, finished_run)
