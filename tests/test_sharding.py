"""Mesh and sharding rules, on eight virtual devices in a process of their own."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import virtual_devices
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from zest_jax.errors import UserError
from zest_jax.models import PolicyConfig, param_shapes
from zest_jax.parallel import make_mesh, plan_shardings
from zest_jax.parallel.sharding import RULES

CONFIG = PolicyConfig(
    vocab_size=64, width=32, layers=2, heads=4, kv_heads=2, head_dim=16, mlp_width=48, qkv_bias=True
)


def test_every_parameter_has_a_rule_of_its_own_rank():
    untied = PolicyConfig(**{**vars(CONFIG), "tied": False})
    for path, leaf in jax.tree_util.tree_leaves_with_path(param_shapes(untied)):
        rule = RULES[path[-1].key]
        rank = leaf.ndim - (len(path) > 1)
        assert len(rule) in (0, rank), path


def test_axes_that_do_not_divide_are_dropped_with_a_reason():
    mesh = AbstractMesh((1, 2, 4), ("data", "fsdp", "tensor"))
    shardings, notes = plan_shardings(param_shapes(CONFIG), mesh)
    assert shardings["blocks"]["q_DHK"].spec == P(None, "fsdp", "tensor", None)
    assert shardings["blocks"]["k_DJK"].spec == P(None, "fsdp", None, None)  # 2 heads on 4 devices
    assert shardings["embed_VD"].spec == P("tensor", "fsdp")
    assert len(notes) == 4  # keys, values, and their biases
    assert any("k_DJK" in n and "tensor=4" in n and "(2, 32, 2, 16)" in n for n in notes)


def test_moments_follow_their_parameter_and_scalars_are_replicated():
    mesh = AbstractMesh((1, 2, 2), ("data", "fsdp", "tensor"))
    state = {
        "mu": {"blocks": {"down_FD": jax.ShapeDtypeStruct((2, 48, 32), jnp.float32)}},
        "count": jax.ShapeDtypeStruct((), jnp.int32),
    }
    shardings, notes = plan_shardings(state, mesh)
    assert shardings["mu"]["blocks"]["down_FD"].spec == P(None, "tensor", "fsdp")
    assert shardings["count"].spec == P() and not notes


def test_a_parameter_without_a_rule_is_an_error():
    mesh = AbstractMesh((1, 1, 1), ("data", "fsdp", "tensor"))
    with pytest.raises(ValueError, match="no sharding rule"):
        plan_shardings({"router_DE": jax.ShapeDtypeStruct((4, 4), jnp.float32)}, mesh)


@pytest.mark.parametrize("sizes", [{"data": 3}, {"fsdp": 2}, {"data": -1}, {"tensor": 0}])
def test_a_mesh_that_does_not_fit_is_a_user_error(sizes):
    with pytest.raises(UserError):
        make_mesh(**sizes, devices=jax.devices()[:1] * 8 if "data" in sizes else None)


PROGRAM = """
    import json, sys
    import jax, jax.numpy as jnp, numpy as np
    from zest_jax.errors import UserError
    from zest_jax.models import PolicyConfig, bind, init_params, load_pretrained, param_shapes
    from zest_jax.models import save_pretrained
    from zest_jax.models.cache import empty_cache
    from zest_jax.parallel import batch_sharding, make_mesh, param_shardings, shard_batch
    from zest_jax.parallel import shard_params

    folder = sys.argv[1]
    config = PolicyConfig(64, 32, 2, 4, 2, 16, 48, qkv_bias=True, qk_norm=False, tied=False)
    key = jax.random.key(0)
    one = init_params(config, key)
    ids = np.asarray(jax.random.randint(key, (8, 12), 0, 64))
    position = np.broadcast_to(np.arange(12), ids.shape)

    def loss(params, ids, position):
        policy = bind(config, params)
        logits = policy.logits(policy(ids, position))
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], -1)
        return picked.mean(), logits

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, want), want_grad = step(one, ids, position)

    @jax.jit
    def sample(params, prompt):
        policy = bind(config, params)
        layers = policy.unstack()
        hidden, cache = policy.extend(layers, empty_cache(config, 8, 32), prompt, jnp.zeros(8, int))

        def draw(carry, at):
            cache, hidden = carry
            token = jax.random.categorical(jax.random.fold_in(key, at), policy.logits(hidden))
            hidden, cache = policy.extend(layers, cache, token[:, None], jnp.full(8, 12 + at))
            return (cache, hidden[:, 0]), token

        return jax.lax.scan(draw, (cache, hidden[:, -1]), jnp.arange(16))[1]

    want_sampled = sample(one, ids)
    save_pretrained(config, one, folder, max_shard_size=20_000)
    worst = {"init": 0.0, "logits": 0.0, "gradient": 0.0, "loaded": 0.0}

    def gap(a, b):
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return max(float(np.max(np.abs(np.asarray(x) - np.asarray(y)))) for x, y in pairs)

    for sizes in ((2, 2, 2), (1, 8, 1), (1, 2, 4)):
        mesh = make_mesh(*sizes)
        places = param_shardings(one, mesh)
        if sizes == (2, 2, 2):
            made = jax.jit(lambda k: init_params(config, k), out_shardings=places)(key)
            worst["init"] = gap(made, one)
        loaded_config, loaded = load_pretrained(folder, mesh=mesh)
        assert loaded_config == config
        for leaf, place in zip(jax.tree.leaves(loaded), jax.tree.leaves(places), strict=True):
            assert leaf.sharding == place
        worst["loaded"] = max(worst["loaded"], gap(loaded, one))
        params = shard_params(one, mesh)
        batch = shard_batch({"ids": ids, "position": position}, mesh)
        assert batch["ids"].sharding == batch_sharding(mesh)
        with jax.set_mesh(mesh):
            (_, logits), grad = step(params, batch["ids"], batch["position"])
            if sizes == (2, 2, 2):
                same_ids = bool((sample(params, batch["ids"]) == want_sampled).all())
        worst["logits"] = max(worst["logits"], gap(logits, want))
        worst["gradient"] = max(worst["gradient"], gap(grad, want_grad))
        save_pretrained(config, params, folder + "/again")
        _, again = load_pretrained(folder + "/again")
        assert gap(again, one) == 0.0

    # Compiled only: with weights split over fsdp no device may hold activations of all rows.
    config = PolicyConfig(512, 256, 2, 8, 2, 32, 1024)
    mesh = make_mesh(1, 8, 1)
    shapes = param_shapes(config)
    places = param_shardings(shapes, mesh)
    put = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    rows = put(jnp.zeros((16, 256), int), batch_sharding(mesh))
    mean = jax.value_and_grad(lambda params, ids, position: loss(params, ids, position)[0])
    with jax.set_mesh(mesh):
        lowered = jax.jit(mean).lower(jax.tree.map(put, shapes, places), rows, rows)
    split_rows = "f32[16,256," not in lowered.compile().as_text()

    split = {s.data.shape for s in shard_params(one, make_mesh(2, 2, 2))["blocks"]["gate_DF"]
             .addressable_shards}
    try:
        shard_batch({"ids": ids[:6]}, make_mesh(8, 1, 1))
        refused = False
    except UserError:
        refused = True
    print(json.dumps({"worst": worst, "split": sorted(split), "refused": refused,
                      "same_ids": same_ids, "split_rows": split_rows}))
"""


@pytest.mark.slow
def test_eight_devices_give_what_one_gives(tmp_path):
    # What is compiled is read, so it is compiled as in a run, not as fast as in the suite.
    flags = virtual_devices.flags(8).replace("--xla_cpu_use_fusion_emitters=false", "")
    env = {**os.environ, "XLA_FLAGS": flags}
    env["PYTHONPATH"] = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    got = json.loads(done.stdout.splitlines()[-1])
    print(got)
    assert got["worst"]["loaded"] == 0.0
    assert got["worst"]["init"] <= 1e-7  # the same draws, summed nowhere
    assert got["worst"]["logits"] <= 1e-5 and got["worst"]["gradient"] <= 1e-6, got
    assert got["split"] == [[2, 16, 24]]  # [layers, D / 2, F / 2]
    assert got["refused"] and got["same_ids"] and got["split_rows"]
