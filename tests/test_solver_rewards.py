"""Solver rewards by name, on a group written by hand; options that mean nothing."""

import dataclasses

import numpy as np
import pytest
from written import CONFIG

from zest_jax import preflight
from zest_jax.errors import UserError
from zest_jax.rewards.outcome import outcome
from zest_jax.rewards.solver import SOLVER_REWARDS, Group

# Right after one search, right after three, wrong, and nothing at all.
ANSWERS = ["Seine", "the Seine", "river Loire", None]
WELL = "<think>a</think><search>b</search><information>c</information><think>d</think>"
GROUP = Group(
    answers=("Seine",),
    outcome=outcome(ANSWERS, ["Seine"]),
    texts=(
        f"{WELL}<answer>Seine</answer>",
        "<answer>the Seine</answer>",
        f"{WELL}<answer>river Loire</answer>",
        "<think>a",
    ),
    observations=("Paris lies on the Seine.", "", "", ""),
    queries=("France", "France\nParis", "capital, Paris", "London"),
    searches_G=np.array([1, 3, 2, 0]),
    well_formed_G=np.array([True, False, True, False]),
    path=(("France",), ("Paris", "Lutetia"), ("Seine",)),
    most_searches=5,
)


def pay(name, **options):
    chosen = CONFIG.solver_reward.copy_and_resolve_references()
    chosen.update(options)
    return np.asarray(SOLVER_REWARDS.find(name)(GROUP, chosen)).round(4).tolist()


def test_by_hand():
    assert pay("exact_match") == [1, 1, 0, 0]
    assert pay("strict_exact_match") == [1, 0, 0, 0]
    assert pay("f1") == [1, 1, 0, 0]
    assert pay("search_r1_format") == [1, 0.8, 0.2, 0]
    # the fewest searches of a right rollout: 1; the most of one: 3
    assert pay("tool_aware") == [1, 0.7, 0, 0]
    # two more than needed, of the four that the turn limit leaves
    assert pay("tool_aware", tool_limit=True) == [1, 0.85, 0, 0]
    assert pay("tool_aware", tool_form="T2", tool_scale=8) == [1, 0.925, 0, 0]
    # Paris is the only waypoint: the third rollout searched for it
    assert pay("waypoint") == [1, 1, 0.3, 0]
    assert pay("waypoint", waypoint_alpha=0.5) == [1, 1, 0.5, 0]


def test_without_a_chain_there_is_no_waypoint():
    bare = dataclasses.replace(GROUP, path=())
    got = SOLVER_REWARDS.find("waypoint")(bare, CONFIG.solver_reward)
    assert got.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("solver_reward.tool_cost", 1.5, "in \\[0, 1\\)"),
        ("solver_reward.tool_scale", 0, "above 0"),
        ("solver_reward.waypoint_alpha", 1.0, "below 1"),
        ("solver_reward.structure_score", -0.1, "in \\[0, 1\\]"),
        ("reward.tau", 0.0, "above 0"),
        ("solver.kl_weight", -1.0, "0 or more"),
        ("proposer.advantage.eps", float("nan"), "0 or more"),
        ("fallback.lam", -0.5, "0 or more"),
        ("probe.temperature", 0.0, "above 0"),
    ],
)
def test_options_that_mean_nothing(field, value, words):
    config = CONFIG.copy_and_resolve_references()
    config.update_from_flattened_dict({field: value})
    with pytest.raises(UserError, match=f"{field.replace('.', '[.]')}.*{words}"):
        preflight.check_options(config)
    preflight.check_options(CONFIG)


def test_t3_has_a_smoothing_constant_in_place_of_a_share():
    config = CONFIG.copy_and_resolve_references()
    config.solver_reward.update(tool_form="T3", tool_cost=2.0)
    preflight.check_options(config)
    config.solver_reward.tool_cost = 0.0
    with pytest.raises(UserError, match="above 0 for T3"):
        preflight.check_options(config)
