"""What devices exchange in a rollout and in an update, for one and for two shares of work a device.

    python tests/weak_scaling.py        one JSON line for each number of virtual devices

A program of its own, since the devices must be there before JAX is imported.
"""

import json

import jax

from configs import common
from zest_jax import hlo, memory_plan
from zest_jax.parallel import make_mesh
from zest_jax.steps import Corpus, Described, called, describe

# The smallest policy that a mesh of eight can share, and an index of more than one block a device.
SMALL = {
    "policy.width": 32,
    "policy.layers": 1,
    "policy.heads": 4,
    "policy.kv_heads": 2,
    "policy.head_dim": 8,
    "policy.mlp_width": 64,
    "solver.prompt_length": 8,
    "solver.action_length": 8,
    "solver.observation_length": 80,
    "solver.searches": 1,
    "solver.group_size": 8,
    "schedule.kind": "labelled",
    "training.remat": "full",
}
# A device's slots, more than search at a time (`retrieval.split.BLOCK`), and rows.
SLOTS, ROWS = 64, 2
MESHES = {1: (1, 1), 2: (2, 1), 4: (1, 4), 8: (2, 4)}


def exchanged(mesh: jax.sharding.Mesh, times: int, rows: int, names: list[str]) -> dict[str, list]:
    """The exchanges of some steps, by name; `times` the rollouts a device, so many rows of it."""
    work = {
        "solver.slots": SLOTS * mesh.size * times,
        "solver.tasks_per_step": 2 * SLOTS * mesh.size * times // SMALL["solver.group_size"],
        "training.rows": rows * mesh.size,
    }
    config = memory_plan.changed(common.get_config(), SMALL | work)
    described = called(describe(config, Described(mesh), Corpus(1_000, 32, 16), "cpu").steps)
    out = {}
    for name in names:
        text = described[name].lower(mesh).compile().as_text()
        out[name] = sorted([*c.shape, c.where] for c in hlo.collectives(text))
    return out


def main() -> None:
    """See the head of the file."""
    both = ["solver_rollout", "solver_update"]
    for devices, sizes in MESHES.items():
        mesh = make_mesh(*sizes, 1, devices=jax.devices()[:devices])
        found = {"once": exchanged(mesh, 1, ROWS, both), "twice": exchanged(mesh, 2, ROWS, both)}
        if devices in (2, 4):
            found["rows"] = exchanged(mesh, 1, 2 * ROWS, both[1:])
        print(json.dumps({"devices": devices} | found), flush=True)


if __name__ == "__main__":
    main()
