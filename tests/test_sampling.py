"""Sampling: truncations against transformers' rules and by hand, draws against the distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zest_jax.rollout.sampling import Draws, Truncation, invert, sample, truncate


def sorted_truncation(p, top_k, top_p, min_p):
    """The same rules with a sort, one row in float64, as libraries write them."""
    p = p.astype(np.float64)
    if top_k:
        p = np.where(p >= np.sort(p)[::-1][min(top_k, len(p)) - 1], p, 0)
    if top_p < 1:
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        least = p[order][before < top_p * p.sum()].min()
        p = np.where(p >= least, p, 0)
    return np.where(p >= min_p * p.max(), p, 0)


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [
        (Truncation(top_k=2), [0.5, 0.25, 0, 0]),
        (Truncation(top_k=9), [0.5, 0.25, 0.15, 0.1]),
        (Truncation(top_p=0.5), [0.5, 0, 0, 0]),
        (Truncation(top_p=0.51), [0.5, 0.25, 0, 0]),
        (Truncation(top_p=0.8), [0.5, 0.25, 0.15, 0]),
        (Truncation(min_p=0.3), [0.5, 0.25, 0.15, 0]),
        # Of the two that top-k leaves the first holds two thirds of the mass.
        (Truncation(top_k=2, top_p=0.6), [0.5, 0, 0, 0]),
        (Truncation(top_k=3, top_p=0.99, min_p=0.4), [0.5, 0.25, 0, 0]),
    ],
    ids=str,
)
def test_truncations_by_hand(truncation, kept):
    shuffle = np.array([2, 0, 3, 1])
    p = jnp.asarray(np.array([0.5, 0.25, 0.15, 0.1])[shuffle], jnp.float32)
    got = jax.jit(truncate, static_argnums=1)(p[None], truncation)[0]
    np.testing.assert_allclose(got, np.array(kept)[shuffle], rtol=1e-6)


def test_ties_with_the_last_one_kept_are_kept():
    p = jnp.array([[0.25, 0.25, 0.25, 0.25]])
    assert (truncate(p, Truncation(top_k=2)) > 0).all()


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 12),
    st.floats(0.05, 1.0, exclude_max=False),
    st.floats(0.0, 0.9),
    st.floats(0.1, 6.0),
)
@settings(max_examples=60, deadline=None)
def test_truncation_agrees_with_sorting(seed, top_k, top_p, min_p, spread):
    rng = np.random.default_rng(seed)
    p = np.asarray(jax.nn.softmax(jnp.asarray(spread * rng.normal(size=(3, 40)), jnp.float32)))
    got = truncate(jnp.asarray(p), Truncation(top_k, top_p, min_p))
    for row, kept in zip(p, np.asarray(got), strict=True):
        want = sorted_truncation(row, top_k, top_p, min_p)
        # A mass within rounding of the limit may fall on either side of it.
        differ = (want > 0) != (kept > 0)
        assert differ.sum() <= 1
        if differ.any():
            mass = np.sort(row.astype(np.float64))[::-1].cumsum()
            assert np.abs(mass - top_p * mass[-1]).min() < 1e-5 or row[differ][0] == pytest.approx(
                min_p * row.max(), rel=1e-5
            )


@pytest.mark.parametrize("size", [1, 5, 512, 513, 1700])
def test_inversion_finds_the_token_of_the_cumulated_weights(size):
    rng = np.random.default_rng(size)
    weight = rng.random((64, size)) * (rng.random((64, size)) < 0.3)
    weight[:, -1] += 1e-3
    u = rng.random(64)
    got, whole = jax.jit(invert)(jnp.asarray(weight, jnp.float32), jnp.asarray(u, jnp.float32))
    np.testing.assert_allclose(whole, weight.sum(1), rtol=1e-5)
    for row, at, x in zip(weight, np.asarray(got), u, strict=True):
        end = row.cumsum()
        assert row[at] > 0
        assert end[at] - row[at] - 1e-4 <= x * end[-1] <= end[at] + 1e-4


def test_the_ends_of_the_unit_interval_fall_on_tokens_that_may_be_drawn():
    weight = jnp.array([[0.0, 0.3, 0.0, 0.7, 0.0]] * 2)
    got, _ = invert(weight, jnp.array([0.0, np.nextafter(np.float32(1), np.float32(0))]))
    assert got.tolist() == [1, 3]


def test_weights_that_are_no_numbers_give_a_token_all_the_same():
    """The step that reads its log-probability stops the run; the sampler must not crash before."""
    logits = jnp.full((2, 700), jnp.nan)
    draws = Draws(jax.random.key(0), jnp.float32(1.0))
    token, logp, _ = sample(logits, draws, jnp.zeros(2), jnp.zeros(2))
    assert ((token >= 0) & (token < 700)).all() and jnp.isnan(logp).all()


def test_draws_follow_the_truncated_distribution_and_say_so():
    logits = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.06, 0.04]))
    n = 4000
    draws = Draws(jax.random.key(0), jnp.float32(1.0))
    token, logp, drawn_logp = jax.jit(sample, static_argnums=4)(
        jnp.broadcast_to(logits, (n, 5)),
        draws,
        jnp.arange(n),
        jnp.zeros(n, jnp.int32),
        Truncation(top_p=0.85),
    )
    kept = np.array([0.4, 0.3, 0.2, 0, 0]) / 0.9
    share = np.bincount(token, minlength=5) / n
    assert np.abs(share - kept).max() < 4 * np.sqrt(0.25 / n)
    np.testing.assert_allclose(logp, logits[token], rtol=1e-5)
    np.testing.assert_allclose(drawn_logp, np.log(kept[np.asarray(token)]), rtol=1e-4)


def test_greedy_and_temperature():
    logits = jnp.array([[1.0, 3.0, 2.0]])
    cold = Draws(jax.random.key(1), jnp.float32(0.0))
    token, logp, drawn = sample(logits, cold, jnp.zeros(1), jnp.zeros(1), Truncation(top_k=1))
    assert token.tolist() == [1]
    np.testing.assert_allclose(logp, jax.nn.log_softmax(logits)[0, 1:2])
    np.testing.assert_allclose(drawn, logp)
    warm = Draws(jax.random.key(1), jnp.float32(2.0))
    token, logp, _ = sample(logits, warm, jnp.zeros(1), jnp.zeros(1))
    np.testing.assert_allclose(logp, jax.nn.log_softmax(logits / 2)[0, token])


@pytest.mark.parametrize("wrong", [{"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": 1.0}])
def test_a_truncation_that_keeps_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match="a truncation needs"):
        Truncation(**wrong)
