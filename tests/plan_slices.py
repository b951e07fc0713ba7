"""Plans of a small run on small slices, in one process: one at a time may hold the TPU compiler.

    ZEST_TPU_ALL=1 has every step on every chip.

    python tests/plan_slices.py FOLDER        FOLDER/v5e-4.json, …, and an exit code for each

A run of one layer: what is compiled is as large as the smoke config's but for that.
"""

import contextlib
import dataclasses
import io
import json
import os
import sys
from pathlib import Path

from zest_jax import chips, plan

SOLVER = "--steps=solver_rollout,solver_update,advantages"
SPLIT = ("--config.mesh.fsdp=2", "--config.mesh.tensor=2")
# The proposer's steps on one of them, to save time.
SLICES = {"v5e-4": (SOLVER,), "v5p-8": SPLIT, "v6e-4": (SOLVER, *SPLIT)}
FLAGS = [
    "--config=configs/smoke.py",
    "--config.policy.folder=",
    "--config.policy.layers=1",
    "--quick",
]
# So little that the solver's update does not fit with all that its backward pass keeps.
TOO_SMALL = 60e6


def run(*arguments: str) -> dict:
    """The exit code of a plan and what it said."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = plan.entry(["plan", *FLAGS, *arguments])
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def main(folder: Path) -> None:
    """See the head of the file."""
    for name, more in SLICES.items():
        if os.environ.get("ZEST_TPU_ALL"):
            more = tuple(flag for flag in more if flag != SOLVER)
        done = run(f"--topology={name}", f"--json={folder / name}.json", *more)
        print(json.dumps({"name": name} | done), flush=True)
    small = dataclasses.replace(chips.CHIPS["v5e"], memory=TOO_SMALL)
    chips.CHIPS["v5e"] = small
    done = run("--topology=v5e-4", "--steps=solver_update", "--config.training.rows=32")
    print(json.dumps({"name": "too small"} | done), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
