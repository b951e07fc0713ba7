"""Group advantages: hand-worked values, masks, keys, and one trace for all."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zest_jax.learning.advantages import GRPO, HRPO, REINFORCE, group_advantages

# Compiled once per setting: the rules below are tried on many small batches.
compiled = jax.jit(
    group_advantages,
    static_argnames=("baseline", "std", "ddof", "eps", "eps_inside", "singleton"),
)


def advantages(rewards, groups=None, **kwargs):
    groups = [0] * len(rewards) if groups is None else groups
    return np.asarray(compiled(jnp.array(rewards), jnp.array(groups), **kwargs))


class HandWorked(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_grpo_one_right_of_five(self):
        # mean .2; sample variance .8/4 = .2; .8/sqrt(.2) = 1.7889, -.2/sqrt(.2) = -.4472
        got = self.variant(GRPO)(jnp.array([1.0, 0, 0, 0, 0]), jnp.zeros(5, int))
        np.testing.assert_allclose(got, [1.7889] + [-0.4472] * 4, atol=5e-5)

    @chex.variants(with_jit=True, without_jit=True)
    def test_grpo_two_right_of_five(self):
        # mean .4; variance (2*.36 + 3*.16)/4 = .3; .6/sqrt(.3) = 1.0954, -.4/sqrt(.3) = -.7303
        got = self.variant(GRPO)(jnp.array([1.0, 1, 0, 0, 0]), jnp.zeros(5, int))
        np.testing.assert_allclose(got, [1.0954] * 2 + [-0.7303] * 3, atol=5e-5)

    @chex.variants(with_jit=True, without_jit=True)
    def test_eviback_scale_after_normalisation(self):
        score = jnp.array([0.2, 0.1, 0.1, 0, 0, 0, 0, 0])
        got = self.variant(GRPO)(score, jnp.zeros(8, int))
        expected = np.array([1.9843, 0.6614, 0.6614] + [-0.6614] * 5)
        np.testing.assert_allclose(got, expected, atol=5e-5)
        scaled = self.variant(GRPO)(score, jnp.zeros(8, int), jnp.full(8, 0.1))
        np.testing.assert_allclose(scaled, [0.1984, 0.0661, 0.0661] + [-0.0661] * 5, atol=5e-5)
        # The same factor before normalisation does nothing: the reason for the scale.
        np.testing.assert_allclose(self.variant(GRPO)(0.1 * score, jnp.zeros(8, int)), got, 1e-3)

    @chex.variants(with_jit=True, without_jit=True)
    def test_groups_do_not_mix(self):
        reward = jnp.array([1.0, 5.0, 0.0, 7.0, 0.0])
        got = self.variant(GRPO)(reward, jnp.array([-9, 1_000_000, -9, 1_000_000, -9]))
        # group -9: [1,0,0], mean 1/3, variance (4/9+1/9+1/9)/2 = 1/3; group 1e6: [5,7], std sqrt 2
        r3, r2 = np.sqrt(1 / 3), np.sqrt(2)
        expected = [2 / 3 / r3, -1 / r2, -1 / 3 / r3, 1 / r2, -1 / 3 / r3]
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_singleton_rule():
    assert advantages([1.0], singleton="raw").tolist() == [1.0]
    assert advantages([1.0], singleton="zero").tolist() == [0.0]
    assert advantages([0.3, 0.9], [1, 2], singleton="raw") == pytest.approx([0.3, 0.9])
    # A group left with one valid row is a group of one.
    got = advantages([0.5, 9.0], valid_B=jnp.array([True, False]), singleton="raw")
    assert got.tolist() == [0.5, 0.0]


def test_std_ddof_and_place_of_eps():
    # [0, 2]: deviations -1, 1; population variance 1, sample variance 2
    assert advantages([0.0, 2.0], std=False).tolist() == [-1.0, 1.0]
    assert advantages([0.0, 2.0], ddof=0, eps=0.25) == pytest.approx([-0.8, 0.8])
    assert advantages([0.0, 2.0], ddof=0, eps=3.0, eps_inside=True) == pytest.approx([-0.5, 0.5])
    assert advantages([0.0, 2.0], eps=7.0, eps_inside=True) == pytest.approx([-1 / 3, 1 / 3])


def test_no_baseline():
    rewards, groups = jnp.array([0.2, 0.7, 0.7]), jnp.array([0, 1, 1])
    np.testing.assert_allclose(jax.jit(REINFORCE)(rewards, groups), rewards)
    # divided by the spread around the mean (sample std of [0, 2] is sqrt 2), not shifted
    assert advantages([0.0, 2.0], baseline="none", eps=0.0) == pytest.approx([0, np.sqrt(2)])


def test_equal_rewards_give_exact_zero():
    # 0.1 summed three times is not 0.3 in float32: the naive formula gives noise / eps.
    for spec in (GRPO, HRPO, dataclasses.replace(HRPO, eps_inside=True)):
        got = jax.jit(spec)(jnp.full(7, 0.1), jnp.array([0, 0, 0, 0, 1, 1, 1]))
        assert np.asarray(got).tolist() == [0.0] * 7


def test_masked_rows_are_zero_and_leave_no_trace():
    rewards, groups = [1.0, np.nan, 0.0, np.inf, 0.0], [3, 3, 3, 3, 3]
    valid = jnp.array([True, False, True, False, True])
    scale = jnp.array([2.0, np.nan, 2.0, 1.0, 2.0])
    got = advantages(rewards, groups, valid_B=valid, post_scale_B=scale)
    alone = 2 * advantages([1.0, 0.0, 0.0])
    np.testing.assert_allclose(got[[0, 2, 4]], alone, rtol=1e-6)
    assert got[1] == got[3] == 0.0
    assert not advantages(rewards, groups, valid_B=jnp.zeros(5, bool)).any()


def test_no_gradient_and_one_trace():
    def total(reward):
        return GRPO(reward, jnp.zeros(3, int)).sum()

    assert not jax.jit(jax.grad(total))(jnp.array([1.0, 0.0, 0.5])).any()
    counted = jax.jit(chex.assert_max_traces(lambda r, g: GRPO(r, g), n=1))
    for groups in ([0, 0, 0, 0], [1, 2, 1, 2], [7, 8, 9, 10]):
        counted(jnp.arange(4.0), jnp.array(groups))


def test_wrong_shapes_and_names_are_refused():  # by the type checker or the function
    with pytest.raises((ValueError, TypeError)):
        group_advantages(jnp.zeros(3), jnp.zeros(2, int))
    with pytest.raises((ValueError, TypeError)):
        group_advantages(jnp.zeros(3), jnp.zeros(3, int), baseline="median")


_rows = st.lists(
    st.tuples(st.sampled_from([0.0, 0.2, 0.5, 1.0]), st.integers(0, 2), st.booleans()),
    min_size=6,
    max_size=6,  # one size, so that jax compiles once
)


@settings(max_examples=50, deadline=None)
@given(_rows)
def test_matches_a_plain_loop(rows):
    rewards, groups, valid = map(np.array, zip(*rows, strict=True))
    expected = np.zeros(6)
    for key in range(3):
        members = np.flatnonzero((groups == key) & valid)
        if len(members) > 1:
            values = rewards[members]
            expected[members] = (values - values.mean()) / (values.std(ddof=1) + 1e-6)
            if np.ptp(values) == 0:
                expected[members] = 0.0
    got = advantages(rewards, groups, valid_B=jnp.array(valid))
    np.testing.assert_allclose(got, expected, atol=2e-5)
