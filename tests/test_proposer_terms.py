"""The proposer's reward as a weighted sum of terms, against the papers' values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from written import CONFIG

from zest_jax.errors import UserError
from zest_jax.rewards.difficulty import CURVES
from zest_jax.rewards.terms import (
    NEEDS_DIFFICULTY,
    NEEDS_LIKELIHOOD,
    TERMS,
    Signals,
    needs,
    proposer_reward,
)

B, C = 4, 7
LOGLIK = np.full((B, C), -9.0, np.float32)
LOGLIK[:, 0] = [-1, -1, -1, -1]  # full
LOGLIK[:, 2] = [-2, -0.5, -2, -2]  # source


def signals(**more):
    base = dict(
        format_B=np.array([1, 1, 0.75, 1], np.float32),
        passed_B=np.array([True, True, False, True]),
        hops_B=np.full(B, 2, np.int32),
        probed_B=np.array([True, True, False, False]),
        difficulty_B=np.array([1.0, 0.25, 9.0, 9.0], np.float32),
        valid_BC=np.ones((B, C), bool),
    )
    return Signals(**(base | more))


def options(invalid=0.0, without=(), **weights):
    chosen = CONFIG.reward.copy_and_resolve_references()
    with chosen.unlocked():
        chosen.weights = dict(format=0.0, information_gain=0.0, difficulty=0.0) | weights
    chosen.update(invalid=invalid, without=without)
    return chosen


def reward(chosen, **more):
    got = jax.jit(lambda s, x: proposer_reward(s, x, chosen))(signals(**more), LOGLIK)
    return {name: np.asarray(value, float).round(4).tolist() for name, value in got.items()}


def test_dr_free():
    got = reward(options(format=0.2, information_gain=1.0))
    # gain 1 nat: 3 tanh(1/3) = 0.9645; a shortcut that is better than the chain pays nothing; a
    # refused proposal has its format score alone
    assert got["gain"] == [1.0, -0.5, 1.0, 1.0]
    assert got["reward"] == [1.1645, 0.2, 0.15, 1.1645]
    assert got["term_format"] == [0.2, 0.2, 0.15, 0.2]
    without = reward(options(format=0.2, information_gain=1.0, without=("source",)))
    assert without["gain"] == [8.0] * B


def test_dr_zero_and_both():
    # 0.5 + (5 - k) / 4 at k = 1: 1.5, the published value of a perfect proposal
    assert reward(options(format=0.5, difficulty=1.0))["reward"] == [1.5, 0.75, 0.375, 0.5]
    both = reward(options(format=0.2, information_gain=1.0, difficulty=1.0))
    assert both["reward"] == [2.1645, 0.45, 0.15, 1.1645]


def test_what_is_refused_may_be_punished():
    assert reward(options(difficulty=1.0, invalid=-0.1))["reward"] == [1.0, 0.25, -0.1, 0.0]


def test_terms_of_weight_0_are_left_out_with_what_they_need():
    ssp = options(difficulty=1.0)
    assert needs(ssp, NEEDS_DIFFICULTY) and not needs(ssp, NEEDS_LIKELIHOOD)
    assert set(reward(ssp)) == {"reward", "gain", "term_difficulty"}
    with pytest.raises(UserError, match=r"no reward term 'spice'; there are format"):
        reward(options(spice=1.0))


def test_a_term_of_ones_own():
    @TERMS.register("short_for_this_test")
    def short(s, loglik_BC, chosen):
        return 1.0 / s.more["words_B"]

    got = reward(options(short_for_this_test=2.0), more={"words_B": np.array([1.0, 2, 4, 8])})
    assert got["reward"] == [2.0, 1.0, 0.5, 0.25]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("dr_zero", [0, 1, 0.75, 0.5, 0.25, 0]),
        ("intermediate", [0, 0.64, 0.96, 0.96, 0.64, 0]),
        ("failure", [1, 0.8, 0.6, 0.4, 0.2, 0]),
        ("solvable_failure", [0, 0.8, 0.6, 0.4, 0.2, 0]),
        ("uncertainty", [0, 0.2, 0.4, 0.4, 0.2, 0]),
        ("always", [1] * 6),
    ],
)
def test_curves_by_name(name, values):
    np.testing.assert_allclose(CURVES.find(name)(np.arange(6.0), 5, 0.0), values, atol=1e-9)


def test_the_moving_bell_moves():
    early, late = (CURVES.find("moving_bell")(np.arange(6.0), 5, p) for p in (0.0, 1.0))
    np.testing.assert_allclose(early, [0, 0.0039, 0.1353, 0.8007, 0.8007, 0.1353], atol=5e-5)
    np.testing.assert_allclose(late, [0.4111, 1, 0.4111, 0.0286, 0.0003, 0], atol=5e-5)


def test_signals_are_a_pytree():
    doubled = jax.tree.map(lambda x: jnp.asarray(x) * 2, dataclasses.replace(signals()))
    assert doubled.format_B.tolist() == [2, 2, 1.5, 2]
