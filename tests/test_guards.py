"""Warnings: each at its bound and not below, once in so many steps, the same after a resumption."""

import json

import pytest
from ml_collections import ConfigDict

from configs import common
from zest_jax import preflight
from zest_jax.errors import UserError
from zest_jax.guards import RULES, Guards

STEPS, AGAIN = 4, 10


def options(**bounds):
    """The group `guards` with every warning off but those of the bounds."""
    out = ConfigDict({rule.option: 0.0 for rule in RULES})
    out.update({"steps": STEPS, "again": AGAIN} | bounds)
    return out


def warned(given, key, values):
    """(step, rule, figure) of what a row of values gives rise to."""
    guards = Guards(given)
    for step, value in enumerate(values, 1):
        guards.see(step, {key: value, "solver/loss": 1.0})
    return [(w.step, w.rule, pytest.approx(w.figure)) for w in guards.told]


# Option, bound, metric, values that reach the bound in the last step, the last one that does not,
# rule, figure.
CASES = [
    ("reward_spread", 0.5, "solver/reward", [9, 1.0, 1.25, 1.5, 1.0], 1.75, "constant_reward", 0.5),
    ("kl", 0.25, "proposer/kl", [0, 0.25, 0.25, 0.25, 0.25], 0.2, "kl", 0.25),
    ("kl_to_reference", 2, "solver/kl_to_reference", [0, 2, 2, 2, 2], 1.9, "kl_to_reference", 2),
    ("length_ratio", 2, "solver/length", [8] * 4 + [16, 16, 16, 16], 15, "longer", 2),
    ("length_ratio", 2, "proposer/length", [8] * 4 + [4, 4, 4, 4], 5, "shorter", 0.5),
    ("valid_share", 0.5, "solver/valid", [0.2, *[0.8] * 4, 0.4, 0.4, 0.4, 0.4], 0.5, "valid", 0.5),
    ("same_groups", 0.75, "solver/groups_all_wrong", [0.5, 1, 1, 1, 0.75], 0.7, "all_wrong", 0.75),
    ("same_groups", 0.75, "solver/groups_all_right", [0.5, 1, 1, 1, 0.75], 0.7, "all_right", 0.75),
    ("entropy", 0.5, "proposer/entropy", [2, 0.5, 0.5, 0.5, 0.5], 0.6, "entropy", 0.5),
    ("mismatch", 1.5, "solver/exp_abs_delta", [1, 1.5, 1.5, 1.5, 1.5], 1.4, "mismatch", 1.5),
    ("hit_limit", 0.5, "solver/hit_limit", [0, 0.5, 0.5, 0.5, 0.5], 0.4, "hit_limit", 0.5),
]


@pytest.mark.parametrize(("option", "bound", "key", "at", "short", "rule", "figure"), CASES)
def test_fires_at_its_bound_and_not_before(option, bound, key, at, short, rule, figure):
    given = options(**{option: float(bound)})
    assert warned(given, key, at) == [(len(at), rule, figure)]
    assert warned(given, key, [*at[:-1], short]) == []
    assert warned(options(), key, at) == []  # a bound of 0 is no bound


def test_every_rule_has_its_case_and_a_sentence_that_can_be_acted_on():
    assert {rule.name for rule in RULES} == {case[5] for case in CASES}
    fields = common.get_config()
    for option, bound, key, at, _, rule, _ in CASES:
        guards = Guards(options(**{option: float(bound)}))
        for step, value in enumerate(at, 1):
            guards.see(step, {key: value})
        (warning,) = guards.told
        assert warning.text.startswith(f"warning, step {len(at)}: {key} "), warning.text
        assert "usually" in warning.text and "{" not in warning.text
        # Whatever looks like a field of the config is one.
        words = [w.strip(".,();:").partition("=")[0] for w in warning.text.split()]
        named = [w for w in words if w.count(".") and w.partition(".")[0] in fields]
        assert named, (rule, warning.text)
        for name in named:
            group = fields
            for part in name.split("."):
                assert part in group, name
                group = group[part]


def test_not_twice_within_so_many_steps():
    given = options(hit_limit=0.5)
    steps = [step for step, _, _ in warned(given, "solver/hit_limit", [1.0] * 25)]
    assert steps == [STEPS, STEPS + AGAIN, STEPS + 2 * AGAIN]
    # Roles warn on their own.
    guards = Guards(given)
    for step in range(1, STEPS + 1):
        guards.see(step, {"solver/hit_limit": 1.0, "proposer/hit_limit": 1.0})
    assert [w.key for w in guards.told] == ["solver/hit_limit", "proposer/hit_limit"]


def test_a_resumed_run_warns_as_one_that_was_never_stopped():
    given = options(reward_spread=0.01, valid_share=0.5, length_ratio=1.5)
    records = [
        {
            "step": step,
            "solver/reward": 0.1 * (step < 7),
            "solver/valid": 0.9 / step,
            "solver/length": 10.0 * step,
        }
        for step in range(1, 31)
    ]
    whole = Guards(given)
    said = [whole.see(record["step"], record) for record in records]
    assert {w.rule for w in whole.told} == {"constant_reward", "valid", "longer"}
    for cut in (1, 5, 8, 13, 29):
        # As they come back from the file.
        before = json.loads(json.dumps(records[:cut]))
        resumed = Guards(given, before)
        assert resumed.told == [w for each in said[:cut] for w in each]
        assert [resumed.see(r["step"], r) for r in records[cut:]] == said[cut:]


def test_what_was_not_measured_is_no_step():
    values = [1.0, None, 1.0, float("nan"), 1.0, 1.0]
    assert warned(options(hit_limit=0.5), "solver/hit_limit", values) == [(6, "hit_limit", 1.0)]


def test_a_start_at_zero_is_no_growth_and_no_fall():
    given = options(length_ratio=2.0, valid_share=0.5)
    for key in ("solver/length", "solver/valid"):
        assert warned(given, key, [0.0] * 4 + [5.0] * 4) == []
        assert warned(given, key, [0.0] * 12) == []


def test_the_defaults_say_nothing_of_a_run_that_goes_well():
    guards = Guards(common.get_config().guards)
    for step in range(1, 200):
        noise = (step * 37 % 11) / 100
        guards.see(
            step,
            {
                "solver/reward": 0.3 + step / 1000 + noise,
                "solver/kl": 0.001,
                "solver/length": 120 + 100 * noise,
                "solver/valid": 0.9 + noise / 2,
                "solver/groups_all_wrong": 0.3,
                "solver/groups_all_right": 0.2,
                "solver/entropy": 0.4 - step / 1000,
                "solver/exp_abs_delta": 1.01,
                "solver/hit_limit": 0.05 + noise,
            },
        )
    assert guards.told == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 1),
        ("again", 0),
        ("kl", -0.1),
        ("entropy", -1.0),
        ("length_ratio", 1.0),
        ("length_ratio", 0.5),
        ("mismatch", 1.0),
        ("valid_share", 1.0),
        ("same_groups", 1.5),
        ("hit_limit", -0.5),
    ],
)
def test_bounds_that_mean_nothing_are_refused(field, value):
    guards = common.get_config().guards
    preflight.check_guards(guards)
    guards[field] = value
    with pytest.raises(UserError, match=f"guards.{field}={value} must be "):
        preflight.check_guards(guards)
