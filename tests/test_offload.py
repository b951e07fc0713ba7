"""Moments of the role that waits lie in pinned host memory, and come back the same."""

import jax
import numpy as np
import pytest

from zest_jax.learning.updates import UpdateSpec
from zest_jax.offload import PINNED, Idle


def states():
    params = {"embed_VD": jax.numpy.arange(12.0).reshape(4, 3)}
    spec = UpdateSpec(learning_rate=1e-3)
    return {"solver": spec.init(params), "proposer": spec.init(params), "anchor": params}


def kinds(state) -> set[str]:
    """Where the moments of a role lie."""
    return {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state) if x.ndim}


def test_roles_take_turns():
    idle = Idle(["solver", "proposer"], enabled=True)
    state = idle.bind(states())
    before = jax.device_get(state)
    usual = kinds(state["solver"])
    assert usual and PINNED not in usual
    idle.wake(state, "solver")
    assert kinds(state["solver"]) == usual and kinds(state["proposer"]) == {PINNED}
    idle.wake(state, "proposer")
    assert kinds(state["solver"]) == {PINNED} and kinds(state["proposer"]) == usual
    # Parameters are read by the other role's rollouts, and stay.
    assert state["solver"].params["embed_VD"].sharding.memory_kind in usual
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(
    ("roles", "enabled"), [(["solver", "proposer"], False), (["solver"], True)]
)
def test_nothing_moves(roles, enabled):
    state = states()
    idle = Idle(roles, enabled)
    assert idle.bind(state) is state
    moments = state["proposer"].opt_state
    idle.wake(state, "solver")
    assert state["proposer"].opt_state is moments
