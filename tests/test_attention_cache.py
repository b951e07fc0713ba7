"""The kernels that read a cache, interpreted on the CPU, against plain XLA."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from zest_jax.models import backends, bind
from zest_jax.models.add_norm import add_and_norm
from zest_jax.models.attention import xla_attention
from zest_jax.models.attention_tiles import Tiles, tile_attention
from zest_jax.models.cache import copy_prefix, empty_cache, grow
from zest_jax.models.config import LoraSpec
from zest_jax.models.lora import add_lora
from zest_jax.models.policy import rms_norm


# Heads of SmolLM2 (three a group), and one query head for each key.
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 16)])
def test_kernels_agree_with_xla_for_slots_of_all_lengths(heads):
    H, J, K = heads
    config = tiny.shape(64, heads=H, kv_heads=J, head_dim=K)
    assert backends.worst_difference_cached(config) < 1e-5
    half = dataclasses.replace(config, dtype="bfloat16")
    assert 1e-4 < backends.worst_difference_cached(half) < backends.TOLERANCE


def test_tiles_of_several_slots_up_to_the_caches_end():
    S, H, J, K, M, T = 3, 9, 3, 16, 192, 10
    draw = np.random.default_rng(0).normal
    keys, values = (jnp.asarray(draw(size=(S, J, M, K)), jnp.float32) for _ in range(2))
    # Two tiles of slot 2, then one that is not full, an empty one, and the end of the cache.
    tiles = Tiles(*map(jnp.array, ([2, 2, 0, 1, 1], [60, 70, 0, 0, M - 9], [10, 5, 7, 0, 9])), T)
    query = jnp.asarray(draw(size=(5 * T - 1, H, K)), jnp.float32)
    slot_N, position_N = tiles.of_tokens(S, len(query))
    there = np.asarray(slot_N) < S
    assert there.sum() == 31
    want = xla_attention(
        query[there][:, None],
        keys.transpose(0, 2, 1, 3)[slot_N[there]],
        values.transpose(0, 2, 1, 3)[slot_N[there]],
        position_N[there][:, None],
        jnp.broadcast_to(jnp.arange(M), (31, M)),
    )[:, 0]
    got = tile_attention(query, keys, values, tiles, interpret=True)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[there], want, atol=1e-5)


@pytest.mark.parametrize("width", [48, 64])
def test_the_norm_of_a_sum_is_that_of_the_plain_functions(width):
    draw = np.random.default_rng(0).normal
    x, scale = (jnp.asarray(draw(size=shape), jnp.float32) for shape in ((3, width), width))
    added = jnp.asarray(draw(size=(3, width)), jnp.bfloat16)
    total, normed = add_and_norm(x, added, scale, 1e-5, interpret=True)
    np.testing.assert_array_equal(total, x + added.astype(jnp.float32))
    assert normed.dtype == jnp.bfloat16
    want = rms_norm(total, scale, 1e-5)
    np.testing.assert_allclose(normed.astype(jnp.float32), want, rtol=2**-8)


def test_a_kernel_that_errs_is_passed_over(monkeypatch):
    config = tiny.shape(64, dtype="bfloat16")
    assert backends._choose_decoding(config, "cudnn", "gpu")[0] == "pallas"
    monkeypatch.setattr(backends, "worst_difference_cached", lambda _: float("nan"))
    chosen, why = backends._choose_decoding(config, "cudnn", "gpu")
    assert chosen == "xla" and "differs from xla by nan" in why


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ({"qkv_bias": True, "qk_norm": False}, None),
        ({"qkv_bias": True, "qk_norm": True}, LoraSpec(rank=2, alpha=4.0)),
    ],
    ids=["whole", "adapters"],
)
def test_a_policy_decodes_the_same_with_either_reader(kind, lora):
    """Joined matrices, and biases, norms and rotation within the kernel."""
    config, params = tiny.policy(61, heads=6, kv_heads=2, head_dim=16, **kind)
    rng = np.random.default_rng(0)
    for name in ("q_bias_HK", "k_bias_JK", "v_bias_JK", "q_norm_K", "k_norm_K"):
        if name in params["blocks"]:
            noise = rng.normal(size=params["blocks"][name].shape)
            params["blocks"][name] += jnp.asarray(0.5 * noise, jnp.float32)
    if lora is not None:
        config = dataclasses.replace(config, lora=lora)
        params = add_lora(config, params, jax.random.key(0))
        params["blocks"] = {k: x + 0.1 if "lora_b" in k else x for k, x in params["blocks"].items()}
    ids = jnp.asarray(rng.integers(0, 61, (3, 12)))

    def run(decoding):
        one = dataclasses.replace(config, decoding=decoding)

        @jax.jit
        def all_hidden(params):
            policy = bind(one, params)
            layers, cache = policy.unstack(), empty_cache(one, 3, 64)
            hidden, cache = policy.extend(layers, cache, ids[:, :8], jnp.zeros(3, int))
            out = [hidden]
            for step in range(3):  # slots of different lengths
                start = jnp.array([8, 5, 2]) + step
                hidden, cache = policy.extend(layers, cache, ids[:, 8 + step, None], start)
                out.append(hidden)
            return jnp.concatenate(out, axis=1)

        return all_hidden(params)

    np.testing.assert_allclose(run("pallas"), run("xla"), atol=2e-5)


@pytest.mark.parametrize("decoding", ["xla", "pallas"])
def test_a_cache_grows_and_lends_prefixes(decoding):
    config = tiny.shape(64, decoding=decoding)
    cache = empty_cache(config, 3, 64)
    cache = jax.tree.map(lambda x: x + jnp.arange(3.0)[:, None, None, None], cache)
    axis = {"keys": 2 if decoding == "pallas" else 3, "values": 2}
    lent = copy_prefix(config, cache, jnp.array([2, 0, 0]), jnp.array([True, False, False]), 5)
    grown = grow(config, cache, 128)
    for name, along in axis.items():
        first = np.moveaxis(np.asarray(lent[name][1][0]), along - 1, 0)
        assert (first[:5] == 2).all() and (first[5:] == 0).all()
        np.testing.assert_array_equal(lent[name][1][1:], cache[name][1][1:])
        assert grown[name][0].shape[along] == 128
        np.testing.assert_array_equal(
            np.take(np.asarray(grown[name][0]), np.arange(64), axis=along), cache[name][0]
        )
        assert not np.take(np.asarray(grown[name][0]), np.arange(64, 128), axis=along).any()
