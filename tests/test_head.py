"""The head in chunks: against the plain softmax it stands for, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zest_jax.learning.head import head_log_probs

R, X, D, V = 3, 10, 8, 17


def plain(hidden_RXD, weight, target_RX, tied, temperature):
    z_RXV = hidden_RXD @ (weight.T if tied else weight) / temperature
    logp_RXV = jax.nn.log_softmax(z_RXV)
    entropy_RX = -jnp.sum(jnp.exp(logp_RXV) * logp_RXV, -1)
    return jnp.take_along_axis(logp_RXV, target_RX[..., None], -1)[..., 0], entropy_RX


def inputs(tied, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    hidden_RXD = jnp.asarray(rng.normal(size=(R, X, D)), dtype)
    weight = jnp.asarray(rng.normal(size=(V, D) if tied else (D, V)), jnp.float32)
    return hidden_RXD, weight, jnp.asarray(rng.integers(0, V, (R, X)))


def test_by_hand():
    """Two tokens with logits 0 and ln 3: probabilities 1/4 and 3/4."""
    hidden = jnp.ones((1, 1, 1))
    weight = jnp.array([[0.0, np.log(3.0)]])
    logp, entropy = head_log_probs(hidden, weight, jnp.array([[1]]), tied=False)
    np.testing.assert_allclose(logp, np.log(0.75), rtol=1e-6)
    np.testing.assert_allclose(entropy, 0.25 * np.log(4) + 0.75 * np.log(4 / 3), rtol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [1, 9, 12, 30, 4096])
def test_values_and_gradients_are_the_plain_ones(tied, chunk):
    hidden, weight, target = inputs(tied)
    weigh = np.random.default_rng(1).normal(size=(2, R, X))

    def loss(scores):
        return sum(jnp.sum(w * s) for w, s in zip(weigh, scores, strict=True))

    def ours(h, w):
        return loss(head_log_probs(h, w, target, tied=tied, temperature=0.7, chunk=chunk))

    def theirs(h, w):
        return loss(plain(h, w, target, tied, 0.7))

    got, got_grads = jax.jit(jax.value_and_grad(ours, (0, 1)))(hidden, weight)
    want, want_grads = jax.value_and_grad(theirs, (0, 1))(hidden, weight)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for g, w in zip(got_grads, want_grads, strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-4, atol=2e-5)


def test_no_array_holds_the_logits_of_all_targets():
    hidden, weight, target = inputs(True)

    def loss(h, w):
        return jnp.sum(head_log_probs(h, w, target, tied=True, chunk=6)[0])

    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(hidden, weight).compile()
    sizes = {np.prod([int(n) for n in s.split(",")]) for s in _shapes(compiled.as_text()) if s}
    assert R * X * V not in sizes and R * 2 * V in sizes


def _shapes(text):
    import re

    return set(re.findall(r"f32\[([\d,]+)\]", text))


def test_bfloat16_hidden_states_keep_a_float32_weight_gradient():
    hidden, weight, target = inputs(True, jnp.bfloat16)

    def loss(h, w):
        return jnp.sum(head_log_probs(h, w, target, tied=True, chunk=6)[0])

    by_hidden, by_weight = jax.grad(loss, (0, 1))(hidden, weight)
    assert by_hidden.dtype == jnp.bfloat16 and by_weight.dtype == jnp.float32
    exact = jax.grad(lambda w: jnp.sum(plain(hidden.astype(jnp.float32), w, target, True, 1.0)[0]))
    want = exact(weight)
    assert np.linalg.norm(by_weight - want) < 0.01 * np.linalg.norm(want)
