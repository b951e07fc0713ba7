"""SIGTERM and Ctrl-C: a run stops with everything saved, and goes on to the same numbers."""

import signal
import time

import numpy as np
import pytest
from test_bad_input import assert_sentence
from test_resume import arrays, in_solver_phase, records

from zest_jax import cli, stopping
from zest_jax.errors import Stopped, UserError
from zest_jax.stopping import Stopper

pytestmark = pytest.mark.slow


def stop_when(place, arguments, reached, number) -> tuple[int, str]:
    """Starts the run and sends the signal as soon as `reached()`: exit code and what was said."""
    with place.start(arguments) as process:
        try:
            deadline = time.monotonic() + 120
            while not reached():
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.002)
            process.send_signal(number)
            _, err = process.communicate(timeout=90)
        finally:
            process.kill()
    return process.returncode, err


def test_stopped_in_every_way(place, finished_run, tmp_path, monkeypatch):
    workdir = tmp_path / "run"
    # No update is saved but for a signal's sake.
    arguments = place.arguments(workdir, "--config.checkpoint.every=50")

    def begun():
        return (workdir / "checkpoints" / "1").exists()

    code, err = stop_when(place, arguments, begun, signal.SIGTERM)
    assert code == 0, err
    assert "stopped by SIGTERM " in err and "; everything is saved; resume with: " in err
    assert err.strip().endswith("--config.checkpoint.every=50")
    monkeypatch.setenv(stopping.PREEMPTED_EXIT, "75")
    code, err = stop_when(place, arguments, lambda: in_solver_phase(workdir), signal.SIGTERM)
    assert code == 75, err
    at = int(err.rpartition("at step ")[2].partition(";")[0])
    with place.start(arguments) as process:
        try:
            line = ""
            while "resumed" not in line:
                line = process.stderr.readline()
            assert f"resumed at step {at}" in line  # nothing is done twice
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=90)
        finally:
            process.kill()
    assert process.returncode == cli.EXIT_INTERRUPTED, err
    assert_sentence(err, "interrupted ", "everything is saved", "the same command")
    done = place.run(arguments)
    assert done.returncode == 0, done.stderr
    assert records(workdir) == records(finished_run)
    state, other = arrays(workdir)[0], arrays(finished_run)[0]
    assert state.keys() == other.keys()
    for name, value in state.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name, strict=True)


def test_a_signal_where_all_is_saved_ends_it_at_once():
    with Stopper() as stop:
        assert not stop.due()
        with pytest.raises(Stopped) as error, stop.saved(7):
            signal.raise_signal(signal.SIGTERM)
            pytest.fail("not reached")
    assert error.value.at_once and error.value.code == 0
    assert cli.explain(error.value) == (0, str(error.value))
    assert "stopped by SIGTERM at step 7; everything is saved" in str(error.value)


def test_a_signal_before_the_first_step_ends_it_at_once():
    with Stopper():
        with pytest.raises(Stopped, match="before the first step of this start") as error:
            signal.raise_signal(signal.SIGTERM)
    assert error.value.at_once and error.value.code == 0


def test_a_signal_elsewhere_waits_and_a_second_interrupt_does_not(capfd):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Stopper() as stop:
        assert not stop.due()
        signal.raise_signal(signal.SIGINT)
        assert stop.due()
        with pytest.raises(Stopped, match="interrupted at step 3; everything is saved") as error:
            stop.end(3)
        assert error.value.code == cli.EXIT_INTERRUPTED and not error.value.at_once
        with pytest.raises(Stopped), stop.saved(3):
            pytest.fail("not reached")
        for _ in range(500):
            if "press Ctrl-C again" in (said := capfd.readouterr().err):
                break
            time.sleep(0.01)
        assert "press Ctrl-C again to quit at once" in said
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_signal_waits_where_code_stands_no_exception():
    passed = []
    with Stopper() as stop:
        with pytest.raises(Stopped, match="before the first step of this start") as error:
            with stop.held():
                signal.raise_signal(signal.SIGTERM)
                passed.append("first")
        assert error.value.at_once
    with Stopper() as stop:
        assert not stop.due()
        with pytest.raises(KeyboardInterrupt), stop.held():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            passed.append("second")
    with Stopper() as stop:
        assert not stop.due()
        with stop.held():  # in a step, of which something may not be saved
            signal.raise_signal(signal.SIGTERM)
        assert stop.due()
    assert passed == ["first", "second"]


def test_an_exit_code_that_is_none(monkeypatch):
    monkeypatch.setenv(stopping.PREEMPTED_EXIT, "many")
    with pytest.raises(UserError, match="from 0 to 255"):
        Stopper()
