"""Several processes are of one mind: about checkpoints, errors and when to stop."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_processes import free_port
from tiny_run import ROOT

from zest_jax.errors import EXIT_LOST


def start(what: str, folder: Path) -> list[subprocess.Popen]:
    """Two processes of `agreeing.py`."""
    variables = {"ZEST_COORDINATOR": f"127.0.0.1:{free_port()}", "ZEST_PROCESSES": "2"}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.agreeing", what, str(folder)],
            cwd=ROOT,
            env=os.environ | variables | {"ZEST_PROCESS": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (0, 1)
    ]


def end(both: list[subprocess.Popen]) -> tuple[list[int], list[str], list[str]]:
    """Exit codes, and what was said on stdout and stderr."""
    try:
        said = [process.communicate(timeout=60) for process in both]
    except subprocess.TimeoutExpired:
        for process in both:
            process.kill()
        said = [process.communicate() for process in both]
    return [p.returncode for p in both], [out for out, _ in said], [err for _, err in said]


def test_a_checkpoint_that_one_cannot_read_is_used_by_none(tmp_path):
    codes, out, err = end(start("damaged", tmp_path))
    assert codes == [0, 0], err
    for said in out:
        assert "\n1 [" in said and "going on from checkpoint 1" in said
    assert "process 1 cannot read it: OSError: [Errno 5]" in out[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2", "damaged-2"]


def test_what_is_no_damage_on_one_ends_both(tmp_path):
    codes, _, err = end(start("denied", tmp_path))
    assert codes == [1, 1], err
    assert "process 1 cannot read it: PermissionError" in err[0]
    assert "PermissionError: [Errno 13]" in err[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


def test_an_error_of_one_is_told_by_the_other(tmp_path):
    codes, _, err = end(start("full", tmp_path))
    assert codes == [4, EXIT_LOST], err
    assert "the disk is full" in err[0] and "Traceback" not in err[0]
    assert re.search(r"is gone \(process 0: the disk is full; .*\); everything up to", err[1]), err


def test_a_mistake_that_all_find_is_each_ones_own(tmp_path):
    codes, _, err = end(start("refused", tmp_path))
    assert codes == [2, 2] and all("there is no world; name one." in said for said in err), err


@pytest.mark.parametrize("told", [(0, 1), (1,)])
def test_sigterm_stops_both_at_the_same_step(tmp_path, told):
    both = start("trains", tmp_path)
    while not (tmp_path / "begun").exists() and both[0].poll() is None:
        time.sleep(0.05)
    for number in told:
        both[number].send_signal(signal.SIGTERM)
    codes, _, err = end(both)
    assert codes == [0, 0], err
    steps = [re.search(r"stopped by SIGTERM at step (\d+); everything is saved", e) for e in err]
    assert all(steps) and steps[0][1] == steps[1][1]
