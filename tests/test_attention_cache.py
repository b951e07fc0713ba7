"""The kernels that read a cache, interpreted on the CPU, against plain XLA."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from zest_jax.models import backends, bind
from zest_jax.models.attention import xla_attention
from zest_jax.models.attention_cache import chunk_attention
from zest_jax.models.cache import copy_prefix, empty_cache, grow
from zest_jax.models.config import LoraSpec
from zest_jax.models.lora import add_lora


# Heads of SmolLM2 (three a group), and one query head for each key.
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 16)])
def test_kernels_agree_with_xla_for_slots_of_all_lengths(heads):
    H, J, K = heads
    config = tiny.shape(64, heads=H, kv_heads=J, head_dim=K)
    assert backends.worst_difference_cached(config) < 1e-5
    half = dataclasses.replace(config, dtype="bfloat16")
    assert 1e-4 < backends.worst_difference_cached(half) < backends.TOLERANCE


@pytest.mark.parametrize("chunk", [5, 96])
def test_a_chunk_of_any_length_up_to_the_caches_end(chunk):
    S, H, J, K, M = 3, 9, 3, 16, 128
    draw = np.random.default_rng(0).normal
    keys, values = (jnp.asarray(draw(size=(S, J, M, K)), jnp.float32) for _ in range(2))
    query = jnp.asarray(draw(size=(S, chunk, H, K)), jnp.float32)
    start = jnp.array([0, 20, M - chunk])
    want = xla_attention(
        query,
        keys.transpose(0, 2, 1, 3),
        values.transpose(0, 2, 1, 3),
        start[:, None] + jnp.arange(chunk),
        jnp.broadcast_to(jnp.arange(M), (S, M)),
    )
    got = chunk_attention(query, keys, values, start, interpret=True)
    np.testing.assert_allclose(got, want, atol=1e-5)


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
