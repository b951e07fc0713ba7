"""Attention's entry point, the bounds that kernels are told, and the choice of a back end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zest_jax.errors import UserError
from zest_jax.models import PolicyConfig, backends
from zest_jax.models.attention import attention
from zest_jax.models.attention_cudnn import segment_bounds
from zest_jax.models.backends import choose_attention, self_test
from zest_jax.models.products import matmul_float32

CONFIG = PolicyConfig(64, 32, 1, 4, 2, 8, 32)


def heads(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def reference(q, k, v, segment):
    """One query at a time, in float64."""
    B, L, H, K = q.shape
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for b in range(B):
        for h in range(H):
            j = h * k.shape[2] // H
            for at in range(L):
                seen = [m for m in range(at + 1) if segment[b][m] == segment[b][at]]
                score = np.array([q[b, at, h] @ k[b, m, j] for m in seen]) / K**0.5
                weight = np.exp(score - score.max())
                out[b, at, h] = weight / weight.sum() @ v[b, seen, j]
    return out


def test_xla_against_one_query_at_a_time():
    segment = np.array([[1, 1, 2, 2, 2, 3, 0, 0], [1] * 8])
    q, k, v = heads(2, 8, 4, 8), heads(2, 8, 2, 8, seed=1), heads(2, 8, 2, 8, seed=2)
    at = jnp.broadcast_to(jnp.arange(8), (2, 8))
    got = attention(
        *(q, k, v),
        query_position_BL=at,
        key_position_BM=at,
        query_segment_BL=jnp.asarray(segment),
        key_segment_BM=jnp.asarray(segment),
    )
    np.testing.assert_allclose(got, reference(q, k, v, segment), atol=1e-6)


def test_bounds_of_segments():
    segment_BL = jnp.array([[1, 1, 2, 3, 3, 0], [1, 1, 1, 1, 1, 1], [0] * 6])
    length_BS, start_BS = segment_bounds(segment_BL, 3)
    assert length_BS.tolist() == [[2, 1, 2], [6, -1, -1], [-1, -1, -1]]
    assert start_BS.tolist() == [[0, 2, 3, -1], [0, -1, -1, -1], [-1] * 4]


@pytest.mark.parametrize(
    ("backend", "message"), [("cudnn", "not over a cache"), ("flash", "unknown attention")]
)
def test_kernels_take_whole_sequences_only(backend, message):
    q, k = heads(1, 1, 4, 8), heads(1, 3, 2, 8)
    if backend == "flash":
        k = heads(1, 1, 2, 8)
    at = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match=message):
        attention(q, k, k, query_position_BL=at, key_position_BM=at, backend=backend)


def test_a_cpu_gets_xla_and_is_told_why():
    config, message = choose_attention(CONFIG)
    assert config.attention == "xla" and "no kernel for cpu" in message
    assert choose_attention(CONFIG, "xla")[0].attention == "xla"


def test_a_back_end_asked_for_by_name_is_not_replaced():
    with pytest.raises(UserError, match="cudnn attention back end cannot be used here: it is not"):
        choose_attention(CONFIG, "cudnn")
    with pytest.raises(UserError, match="take auto or one of xla, cudnn, splash"):
        choose_attention(CONFIG, "flash")


def wrong_kernel(kind):
    """The XLA path under another name, with a fault."""

    def run(q, k, v, *, query_segment_BL, backend, **rest):
        if backend == "xla":
            return attention(q, k, v, query_segment_BL=query_segment_BL, **rest)
        if kind == "blind to segments":
            rest |= {"key_segment_BM": None}
        if kind == "fails":
            raise RuntimeError("no such symbol\nand a page of trace")
        out = attention(q, k, v, query_segment_BL=query_segment_BL, **rest)
        if kind == "nan":
            return out / jnp.where(jnp.arange(out.shape[1]) == 7, 0.0, 1.0)[:, None, None]
        if kind == "wrong gradient":
            return out + (v - jax.lax.stop_gradient(v)).mean() * 0.5
        return out

    return run


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("right", ""),
        ("blind to segments", "differs from xla"),
        ("nan", "differs from xla by nan"),
        ("wrong gradient", "differs from xla"),
        ("fails", "RuntimeError: no such symbol"),
    ],
)
def test_the_self_test_finds_a_wrong_kernel(monkeypatch, kind, told):
    monkeypatch.setattr(backends, "attention", wrong_kernel(kind))
    said = self_test(CONFIG, "cudnn")
    assert said.startswith("it differs" if "differs" in told else told) and told in said
    assert "\n" not in said and (told or said == "")


def test_a_kernel_that_fails_its_test_is_passed_over(monkeypatch):
    monkeypatch.setattr(backends, "attention", wrong_kernel("nan"))
    monkeypatch.setattr(backends, "KERNELS", {"cpu": "splash"})
    config, message = choose_attention(CONFIG)
    assert config.attention == "xla" and "splash was passed over: it differs" in message
    with pytest.raises(UserError, match="splash attention back end cannot be used here"):
        choose_attention(CONFIG, "splash")


def test_a_product_in_float32_with_gradients_in_the_inputs_type():
    a, b = heads(2, 3, 5, dtype=jnp.bfloat16), heads(2, 5, 4, seed=1, dtype=jnp.bfloat16)
    slope = heads(2, 3, 4, seed=2)
    out, back = jax.vjp(matmul_float32, a, b)
    by_a, by_b = back(slope)
    assert out.dtype == jnp.float32 and by_a.dtype == by_b.dtype == jnp.bfloat16
    a64, b64, s64 = (np.asarray(x, np.float64) for x in (a, b, slope))
    np.testing.assert_allclose(out, a64 @ b64, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        np.asarray(by_a, np.float64), s64 @ b64.swapaxes(1, 2), rtol=0.03, atol=0.05
    )
    np.testing.assert_allclose(
        np.asarray(by_b, np.float64), a64.swapaxes(1, 2) @ s64, rtol=0.03, atol=0.05
    )
