"""The policy's ways through its layers agree: all tokens, few tokens, any remat policy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zest_jax.models import PolicyConfig, bind, init_params

CONFIG = PolicyConfig(60, 32, 3, 4, 2, 8, 48, qkv_bias=True, qk_norm=False)
B, L = 3, 24


def packed():
    """Rows of two sequences and padding, of one, and of three."""
    sizes = ((10, 9), (L,), (3, 1, 20))
    segment_BL, position_BL = np.zeros((B, L), np.int32), np.zeros((B, L), np.int32)
    for b, row in enumerate(sizes):
        at = 0
        for number, size in enumerate(row, 1):
            segment_BL[b, at : at + size] = number
            position_BL[b, at : at + size] = np.arange(size)
            at += size
    ids_BL = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (B, L))
    return ids_BL, position_BL, segment_BL


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_what_the_backward_pass_keeps_changes_no_gradient(remat):
    params = init_params(CONFIG, jax.random.key(2))
    ids, position, segment = packed()

    def loss(params, remat):
        hidden = bind(CONFIG, params)(ids, position, segment, remat=remat)
        return jnp.sum(jnp.sin(hidden) * (segment > 0)[..., None])

    grad = jax.jit(jax.grad(loss), static_argnums=1)
    want, got = grad(params, "none"), grad(params, remat)
    for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(g, w, atol=1e-4 * np.abs(w).max() + 1e-6)


def test_the_residual_stream_is_float32_whatever_the_compute_type():
    """So that the sum of many layers is not rounded at each of them."""
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    params = init_params(config, jax.random.key(3))
    ids, position, segment = packed()
    jaxpr = jax.make_jaxpr(lambda p: bind(config, p)(ids, position, segment))(params)
    scans = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    (scan,) = scans
    carried = scan.outvars[: scan.params["num_carry"]]
    assert {v.aval.dtype for v in carried} == {jnp.dtype("float32")}
    assert jaxpr.out_avals[0].dtype == jnp.bfloat16
