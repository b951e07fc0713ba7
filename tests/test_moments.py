"""8-bit moments: codes by hand, nothing lost on average, what AdamW reaches in a quarter of it."""

import functools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
import virtual_devices
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from zest_jax.checkpoint import Checkpoints
from zest_jax.learning import moments
from zest_jax.learning.updates import UpdateSpec
from zest_jax.models import param_shapes
from zest_jax.parallel import plan_shardings

MU_RATIO, NU_RATIO = 2 ** (16 / 126), 2 ** (32 / 254)  # of neighbouring levels


# ------------------------------------------------------------------------- codes


def test_codes_by_hand():
    x = jnp.array([2.0, -1.0, 0.0, 2.0**-15, 2.0**-16])
    # Over the scale 2: 1, -0.5, 0, the smallest level 2^-16, and half of it. 0.5 lies between the
    # levels 119, 2^(-8 * 16 / 126) = 0.4945, and 120, 0.5401: at 0.120 of their distance.
    for dither, want in ((0.11, [127, -120, 0, 1, 1]), (0.13, [127, -119, 0, 1, 1])):
        code, scale = moments.encode_mu(x, jnp.full(5, dither))
        assert code.dtype == jnp.int8 and code.tolist() == want
        assert scale.tolist() == [2.0]
    code, _ = moments.encode_mu(x, jnp.full(5, 0.51))
    assert code[4] == 0
    value = moments.decode_mu(code, scale)
    np.testing.assert_allclose(value, [2, -2 * 2 ** (-8 * 16 / 126), 0, 2.0**-15, 0], rtol=1e-6)
    # The second moment of the same: nothing but 0 becomes 0.
    code, scale = moments.encode_nu(x**2 / 4 * 3, jnp.full(5, 0.999))
    assert code.dtype == jnp.uint8 and code.tolist() == [255, 239, 0, 1, 1]
    assert scale.tolist() == [3.0]
    assert moments.decode_nu(code, scale)[1] == pytest.approx(3 * 2 ** (-16 * 32 / 254), rel=1e-6)


def test_the_error_is_below_the_distance_of_two_levels():
    rng = np.random.default_rng(0)
    x = (rng.choice([-1, 1], (4, 256)) * np.exp2(rng.uniform(-16, 0, (4, 256)))).astype(np.float32)
    x[:, ::128] = 1.0  # the largest of every block
    for dither in (1e-5, 0.5, 1 - 1e-5):
        got = moments.decode_mu(*moments.encode_mu(x, jnp.full(x.shape, dither)))
        assert np.max(np.abs(got / x - 1)) < MU_RATIO - 1 + 1e-5
        squared = x.astype(np.float32) ** 2
        got = moments.decode_nu(*moments.encode_nu(squared, jnp.full(x.shape, dither)))
        assert np.max(np.abs(got / squared - 1)) < NU_RATIO - 1 + 1e-5


def test_rounding_is_right_on_average():
    dither = (jnp.arange(2**14) + 0.5)[:, None] / 2**14
    x = np.array([[1.0, 0.7, -0.3, 1e-3, -2e-5, 3e-6]], np.float32)
    mean = jax.vmap(lambda u: moments.decode_mu(*moments.encode_mu(x[0], u)))(
        jnp.broadcast_to(dither, (2**14, 6))
    ).mean(0)
    np.testing.assert_allclose(mean, x[0], rtol=1e-3)


@pytest.mark.parametrize(
    ("length", "block"),
    [(1, 1), (48, 48), (128, 128), (2048, 128), (1536, 64), (896, 128), (18944, 64), (300, 128)],
)
def test_blocks(length, block):
    assert moments.block_size(length) == block
    x = np.random.default_rng(0).normal(size=(2, length)).astype(np.float32)
    code, scale = moments.encode_mu(x, jnp.full(x.shape, 0.5))
    assert code.shape == x.shape and scale.shape == (2, -(-length // block))
    last = np.abs(x[:, (scale.shape[1] - 1) * block :]).max(1)
    np.testing.assert_array_equal(scale[:, -1], last)
    np.testing.assert_allclose(moments.decode_mu(code, scale), x, atol=0.1 * np.abs(x).max())


def test_dither_is_uniform_and_new_at_every_step_and_place():
    index = moments._index((3, 64, 128))
    assert index.reshape(-1).tolist() == list(range(3 * 64 * 128))
    drawn = [np.asarray(moments._hash(index ^ moments._hash(jnp.uint32(s)))) for s in (1, 2)]
    for part in (drawn[0] >> 16, drawn[0] & 0xFFFF, drawn[1] >> 16):
        u = part.reshape(-1) / 2**16
        assert np.mean(u) == pytest.approx(0.5, abs=0.01)
        assert np.histogram(u, 16, (0, 1))[0] == pytest.approx(len(u) / 16, rel=0.12)
    pairs = [(drawn[0], drawn[1]), (drawn[0][:, :-1], drawn[0][:, 1:])]
    pairs += [(drawn[0] >> 16, drawn[0] & 0xFFFF), (drawn[0][0], drawn[0][1])]
    for one, other in pairs:
        assert abs(np.corrcoef(one.reshape(-1), other.reshape(-1))[0, 1]) < 0.03


# ------------------------------------------------------------------------- the optimiser


def run(optimizer, weights, gradient, steps):
    """Weights and state after some steps on `gradient(weights, step)`."""

    @functools.partial(jax.jit, static_argnums=2)
    def walk(weights, state, steps):
        def one(n, carry):
            weights, state = carry
            moved, state = optimizer.update(gradient(weights, n), state, weights)
            return optax.apply_updates(weights, moved), state

        return jax.lax.fori_loop(0, steps, one, (weights, state))

    return walk(weights, optimizer.init(weights), steps)


def test_the_first_step_is_that_of_adamw():
    """Moments that begin at 0 have no error yet: decay, mask, schedule and all."""
    config = tiny.shape(40, qkv_bias=True)
    params = tiny.random_params(config, 0)
    grads = jax.tree.map(lambda x: jnp.sin(1e3 * x + 1), params)
    moved = []
    for kind in ("float32", "int8"):
        spec = UpdateSpec(0.1, weight_decay=0.5, max_grad_norm=1.0, moments=kind)
        optimizer = spec.optimizer()
        moved.append(jax.jit(optimizer.update)(grads, optimizer.init(params), params)[0])
    for one, other in zip(*map(jax.tree.leaves, moved), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)


def test_what_changes_slowly_is_followed_on_average():
    """A second moment that decays by 2 % a step, or a first one that rises by as little, would
    stay where it is if it were rounded to the nearest level."""
    n = 4096
    optimizer = moments.scale_by_adam_8bit(b1=0.98, b2=0.98)
    # In every block one element keeps its gradient; the others' falls to a tenth after 100 steps.
    largest = jnp.arange(n) % 128 == 0

    def gradient(weights, step):
        return {"w": jnp.where(largest | (step < 100), 1.0, 0.1)}

    _, state = run(optimizer, {"w": jnp.zeros(n)}, gradient, 250)
    m = np.asarray(moments.decode_mu(state.mu["w"], state.mu_scale["w"]))[~largest]
    v = np.asarray(moments.decode_nu(state.nu["w"], state.nu_scale["w"]))[~largest]
    left = 0.98**150 * (1 - 0.98**100)
    assert np.mean(m) == pytest.approx(left + 0.1 * (1 - 0.98**150), rel=0.02)
    assert np.mean(v) == pytest.approx(left + 0.01 * (1 - 0.98**150), rel=0.02)
    assert np.std(v) / np.mean(v) < 0.5


@pytest.mark.parametrize("b2", [0.98, 0.999])
def test_it_converges_as_adamw_does(b2):
    """A noisy two-layer regression whose inputs differ in size by four orders of magnitude."""
    rng = np.random.default_rng(0)
    size = np.exp2(rng.uniform(-14, 0, 96)).astype(np.float32)
    x = (rng.normal(size=(2048, 96)) * size).astype(np.float32)
    y = np.tanh(x / size @ rng.normal(size=(96, 8)) / 10).astype(np.float32)
    y += 0.1 * rng.normal(size=y.shape).astype(np.float32)
    start = {
        "a": jnp.asarray(rng.normal(size=(96, 300)) / size[:, None] / 10, jnp.float32),
        "b": jnp.asarray(rng.normal(size=(300, 8)) / 20, jnp.float32),
    }

    def loss(w, x, y):
        return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - y) ** 2)

    def gradient(w, step):
        at = (step * 64) % 2048
        rows = (jax.lax.dynamic_slice_in_dim(d, at, 64) for d in (x, y))
        return jax.grad(loss)(w, *rows)

    rate = optax.cosine_decay_schedule(1e-2, 200)
    options = {"b2": b2, "weight_decay": 0.01}
    want, _ = run(optax.adamw(rate, **options), start, gradient, 200)
    got, _ = run(moments.adamw_8bit(rate, **options), start, gradient, 200)
    before, reached, reached_8 = (float(loss(w, x, y)) for w in (start, want, got))
    print(f"loss {before:.4f} -> {reached:.5f} with AdamW, {reached_8:.5f} with 8 bits")
    assert reached < 0.2 * before
    assert reached_8 < 1.03 * reached


def test_about_two_bytes_a_parameter():
    config = tiny.shape(151_936, width=1536, layers=2, head_dim=128, heads=12, mlp_width=8960)
    shapes = param_shapes(config)
    count = sum(x.size for x in jax.tree.leaves(shapes))

    def size(kind):
        state = jax.eval_shape(UpdateSpec(1e-3, moments=kind).optimizer().init, shapes)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / count

    assert size("float32") == pytest.approx(8, abs=0.01)
    assert 2 < size("int8") < 2.3


def test_codes_and_scales_lie_as_their_parameter():
    config = tiny.shape(4096, width=1024, mlp_width=4096, heads=8, kv_heads=8, head_dim=64)
    shapes = param_shapes(config)
    mesh = AbstractMesh((1, 4, 2), ("data", "fsdp", "tensor"))
    state = jax.eval_shape(UpdateSpec(1e-3, moments="int8").init, shapes)
    places, notes = plan_shardings(state, mesh)
    (adam,) = [s for s in jax.tree.leaves(places, is_leaf=_is_adam) if _is_adam(s)]
    for name, want in (
        ("gate_DF", P(None, "fsdp", "tensor")),
        ("down_FD", P(None, "tensor", "fsdp")),
    ):
        for part in adam[1:]:
            assert part["blocks"][name].spec == want
    assert adam.mu_scale["embed_VD"].spec == P("tensor", "fsdp") and not notes
    assert adam.count.spec == P()


def _is_adam(x):
    return hasattr(x, "nu_scale")


def test_a_checkpoint_holds_them_bit_for_bit(tmp_path):
    params = tiny.random_params(tiny.shape(40), 0)
    spec = UpdateSpec(1e-3, moments="int8")
    state = spec.init(params)
    _, opt_state = jax.jit(spec.optimizer().update)(params, state.opt_state, params)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, opt_state, {})
        _, restored, _ = checkpoints.restore(state.opt_state)
    for one, other in zip(*map(jax.tree.leaves, (opt_state, restored)), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert {x.dtype.name for x in jax.tree.leaves(restored)} == {
        "int8", "uint8", "float32", "int32",
    }  # fmt: skip


PROGRAM = """
    import dataclasses
    import jax, jax.numpy as jnp, numpy as np
    from zest_jax.learning import updates
    from zest_jax.learning.packing import Item, PackSpec, pack
    from zest_jax.learning.updates import UpdateSpec
    from zest_jax.models import PolicyConfig, init_params
    from zest_jax.models.config import LoraSpec
    from zest_jax.models.lora import add_lora, fingerprint, merge_lora, split_lora
    from zest_jax.parallel import make_mesh, shard_params

    config = PolicyConfig(
        512, 256, 1, 8, 4, 16, 1024, tied=False, lora=LoraSpec(4, targets=("q", "o", "down"))
    )
    base = init_params(dataclasses.replace(config, lora=None), jax.random.key(0))
    params = add_lora(config, base, jax.random.key(1))

    def stir(x):  # B is no longer zero
        return x + 0.01 * jnp.cos(1e3 * x + jnp.arange(x.size).reshape(x.shape))

    params = jax.jit(lambda tree: jax.tree.map(stir, tree))(params)
    spec = UpdateSpec(1e-3, moments="int8")
    optimizer = spec.optimizer()

    @jax.jit
    def two_steps(params, grads):
        state = optimizer.init(params)
        _, state = optimizer.update(grads, state, params)
        return optimizer.update(jax.tree.map(lambda g: 0.3 * g, grads), state, params)

    rng = np.random.default_rng(0)
    ids, at, zeros = rng.integers(0, 512, (8, 15)), np.arange(2, 15), np.zeros(13, np.float32)
    batch = pack([Item(row, at, zeros) for row in ids], PackSpec(8, 16, 16, 1))
    step = jax.jit(updates.cloning_update, static_argnums=(0, 1))
    trained, frozen = split_lora(params)

    def some(params):
        kept = ("q_DHK", "gate_DF", "o_lora_a_HKA", "mlp_norm_D")
        return {"head_DV": params["head_DV"], "blocks": {k: params["blocks"][k] for k in kept}}

    want = two_steps(some(params), some(params))
    want_state, want_metrics = step(config, spec, spec.init(trained), batch, frozen)
    want_merged = merge_lora(config, params)[1]

    mesh = make_mesh(2, 2, 2)
    spread = shard_params(params, mesh)
    got = two_steps(some(spread), some(spread))
    codes = 0
    for x, y in zip(jax.tree.leaves(want[1]), jax.tree.leaves(got[1]), strict=True):
        if x.dtype in (jnp.int8, jnp.uint8):
            differ = np.mean(np.asarray(x) != np.asarray(y))
            assert differ < 1e-3, differ  # products fused otherwise may round otherwise
            codes += 1
    assert codes == 2 * 5
    trained, frozen = split_lora(spread)
    assert fingerprint(frozen) == fingerprint(split_lora(params)[1])
    with jax.set_mesh(mesh):
        state = jax.jit(spec.init)(trained)
        state, metrics = step(config, spec, state, batch, frozen)
    assert abs(metrics["loss"] - want_metrics["loss"]) < 1e-5
    assert abs(metrics["grad_norm"] - want_metrics["grad_norm"]) < 1e-5
    for x, y in zip(*map(jax.tree.leaves, (want_state.params, state.params)), strict=True):
        assert np.mean(np.abs(np.asarray(x) - np.asarray(y)) > 1e-5) < 1e-2
    merged = merge_lora(config, spread)[1]
    for x, y in zip(*map(jax.tree.leaves, (want_merged, merged)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    print("equal")
"""


@pytest.mark.slow
def test_eight_devices_round_as_one_does():
    """Codes, and a whole update of adapters with them, on a mesh of eight devices."""
    env = {**os.environ, "XLA_FLAGS": virtual_devices.flags(8)}
    env["PYTHONPATH"] = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "equal"
