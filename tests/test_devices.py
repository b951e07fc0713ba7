"""One update on eight virtual devices, in a process of its own, against the same on one."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import virtual_devices

PROGRAM = """
    import json
    import jax, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    import tiny
    from zest_jax.learning.packing import Item, PackSpec, pack
    from zest_jax.learning.updates import UpdateSpec, policy_update
    from zest_jax.parallel import make_mesh, param_shardings
    from zest_jax.parallel.sharding import BATCH

    config, params = tiny.policy(64, heads=4, kv_heads=2, mlp_width=48)
    spec = UpdateSpec(learning_rate=1e-3, max_grad_norm=0.5)
    rng = np.random.default_rng(0)
    items = []
    for _ in range(40):
        ids = rng.integers(0, 64, rng.integers(4, 13)).astype(np.int32)
        targets = np.arange(2, len(ids))
        item = Item(ids, targets, np.zeros(len(targets), np.float32))
        logp = tiny.target_log_probs(config, params, item, 16) + 0.1 * rng.normal(size=len(targets))
        items.append(Item(ids, targets, logp.astype(np.float32)))
    batch = pack(items, PackSpec(rows=8, length=24, targets=24, micro_batches=4))
    advantage = rng.normal(size=40).astype(np.float32)
    step = jax.jit(policy_update, static_argnums=(0, 1))
    one, metrics_one = step(config, spec, spec.init(params), batch, advantage)

    def gap(a, b):
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return max(float(np.max(np.abs(np.asarray(x) - np.asarray(y)))) for x, y in pairs)

    moments = lambda state: [s for s in state.opt_state[1] if hasattr(s, "mu")][0]
    out = {"devices": len(jax.devices()), "micro_batches": int(batch.micro_batches)}
    for sizes in ((8, 1, 1), (2, 2, 2)):
        mesh = make_mesh(*sizes)
        state = spec.init(params)
        places = param_shardings(state, mesh)
        state = jax.device_put(state, places)
        # Rows are the second axis of a packed batch, behind the micro-batches.
        rows = NamedSharding(mesh, P(None, *BATCH))
        whole = NamedSharding(mesh, P())
        put = lambda x: jax.device_put(x, rows if np.ndim(x) else whole)
        with jax.set_mesh(mesh):
            sharded = jax.tree.map(put, batch)
            many, metrics = step(config, spec, state, sharded, jax.device_put(advantage, whole))
        out["x".join(map(str, sizes))] = {
            "params": gap(many.params, one.params),
            "gradient": gap(moments(many).mu, moments(one).mu) / (1 - spec.b1),
            "metrics": gap(metrics, metrics_one),
            "rows": sharded.ids_MRL.addressable_shards[0].data.shape[1],
            "gate": many.params["blocks"]["gate_DF"].addressable_shards[0].data.shape,
            "step": int(many.step),
        }
    out["moved"] = gap(one.params, params)
    out["norm"] = float(metrics_one["grad_norm"])
    print(json.dumps(out))
"""


@pytest.mark.slow
def test_eight_devices_give_the_update_of_one():
    root = Path(__file__).parents[1]
    env = {**os.environ, "XLA_FLAGS": virtual_devices.flags(8)}
    env["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    got = json.loads(done.stdout.splitlines()[-1])
    print(got)
    assert got["devices"] == 8 and got["micro_batches"] > 1
    assert got["norm"] > 0.6, "the clipping of the norm should be at work"
    assert got["moved"] > 9e-4
    for sizes, rows, gate in (
        ("8x1x1", 1, [2, 32, 48]),
        ("2x2x2", 2, [2, 16, 24]),
    ):
        result = got[sizes]
        assert (result["rows"], result["gate"], result["step"]) == (rows, gate, 1)
        assert result["gradient"] < 1e-6 and result["params"] < 1e-6, result
        assert result["metrics"] < 5e-6, result
