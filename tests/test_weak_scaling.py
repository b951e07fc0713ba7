"""No exchange between devices grows with the rollouts that each of them has: read from the compiled
programs of 1, 2, 4 and 8 virtual devices (`weak_scaling.py`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import virtual_devices

from zest_jax.hlo import COLLECTIVES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exchanges():
    """By number of devices and then by amount of work: the exchanges of each step."""
    root = Path(__file__).parents[1]
    env = {**os.environ, "XLA_FLAGS": virtual_devices.flags(8)}
    env["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "tests")])
    command = [sys.executable, str(root / "tests" / "weak_scaling.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3_000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {each.pop("devices"): each for each in found}


def shapes(found):
    """Operation, shapes, runs and enclosing loops: all but the place in the source."""
    return sorted(entry[:4] for entry in found)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("step", ["solver_rollout", "solver_update"])
def test_twice_the_rollouts_on_a_device_exchange_the_same(exchanges, devices, step):
    """Twice the slots and the prompts, and twice the sequences of an update, in rows as before."""
    once, twice = (exchanges[devices][work][step] for work in ("once", "twice"))
    assert shapes(once) == shapes(twice)
    if devices > 1:
        assert once and {entry[0] for entry in once} <= set(COLLECTIVES)


def test_of_more_rows_at_a_time_only_the_looked_up_embeddings_travel(exchanges):
    """Where `fsdp` splits the embedding, devices send each other the ids and parts of the vectors
    of a micro-batch's rows: cheaper than to gather the table, but more the more rows it has.
    Gradients and weights are as before, and without `fsdp` everything is."""
    for devices, travels in ((2, False), (4, True)):
        once, more = (exchanges[devices][work]["solver_update"] for work in ("once", "rows"))
        before = shapes(once)
        grown = [entry for entry in more if entry[:4] not in before]
        assert bool(grown) == travels
        for operation, arrays, *_ in grown:
            ids = operation == "all-gather" and arrays[0].startswith("s32")
            assert ids or operation == "all-to-all", grown
