"""Every reward with numbers worked by hand (published ones where there are any)."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zest_jax.rewards import difficulty, fallback, format, outcome, tool_cost, waypoint
from zest_jax.rewards import information_gain as ig

# ------------------------------------------------------------------ outcome


def test_outcome():
    got = outcome.outcome(["Paris", "the city of Paris", None, " "], ["Paris", "City of Light"])
    assert got.y_G.tolist() == [1, 0, 0, 0]
    # {city, of, paris} with {city, of, light}: shared 2, 2 * 2 / 6
    np.testing.assert_allclose(got.f1_G, [1, 2 / 3, 0, 0])
    assert got.answered_G.tolist() == [True, True, False, False]
    assert got.accuracy == 0.25


def test_group_kind():
    kinds = [outcome.group_kind(np.array(y)) for y in ([0.0, 0.0], [1.0, 1.0], [1.0, 0.0])]
    assert kinds == ["all_wrong", "all_right", "mixed"]
    assert outcome.group_kind(np.array([0.3, 0.9])) == "all_wrong"  # partial credit is no success


# ------------------------------------------------------------------ format: Search-R1

GOOD = (
    "<think> capital</think><search> France</search>\n<information> France: …</information>\n"
    "<think> done</think><answer> Paris</answer>\n"
)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (GOOD, ""),
        ("<think>x</think><answer>y</answer>", ""),
        ("Well. " + GOOD, "text outside tags before the first tag"),
        (GOOD + "bye", "text outside tags after </answer>"),
        ("<answer> Paris</answer>", "<answer> after start"),
        (GOOD.replace("<think> done</think>", ""), "<answer> after </information>"),
        (GOOD + "<answer>z</answer>", "<answer> after </answer>"),
        ("<think>a</think><think>b</think><answer>y</answer>", "<think> after </think>"),
        ("<think>a <search>b</search></think>", "<search> inside <think>"),
        ("<think>a</search>", "</search> closes nothing"),
        ("<think>a</think><search>q</search>", "ends without <answer>"),
        ("<think>a</think><answer>Par", "<answer> is never closed"),
        ("", "ends without <answer>"),
    ],
)
def test_valid_sequence(response, reason):
    assert format.valid_sequence(response) == (reason == "", reason)


def test_valid_sequence_of_other_tag_names():
    response = "<reason>a</reason><tool_call>b</tool_call><tool_response>c</tool_response>"
    response += "<reason>d</reason><answer>e</answer>"
    names = ("reason", "tool_call", "tool_response", "answer")
    assert format.valid_sequence(response, names) == (True, "")
    assert not format.valid_sequence(response)[0]


@pytest.mark.parametrize(
    ("correct", "answered", "valid", "retrieved", "score"),
    [
        (True, True, True, False, 1.0),
        (True, True, False, True, 0.8),
        (False, True, True, False, 0.2),
        (False, True, True, True, 0.3),
        (False, True, False, True, 0.1),
        (False, False, True, False, 0.2),
        (False, False, False, True, 0.0),
    ],
)
def test_search_r1_table(correct, answered, valid, retrieved, score):
    got = format.search_r1_reward(correct, answered, valid, retrieved, retrieval_score=0.1)
    assert got == pytest.approx(score)


# ------------------------------------------------------------------ format: Dr. Free, Dr. Zero


@pytest.mark.parametrize(
    ("question", "answer", "think", "parts"),
    [
        ("What is the river of Paris?", "The Seine", "Paris, river", (True, True, True, True)),
        ("Is it the Seine?", "seine", "x", (True, False, True, True)),
        ("What is the river of Paris?", "Rhone", " ", (True, True, False, False)),
        ("Does the Rhone flow?", "Rhone", "x", (True, False, True, False)),  # its own answer leaks
        ("Where is the Sequana?", "Seine", "x", (True, False, True, True)),  # an alias leaks
        ("What is it?", None, "x", (False, False, True, False)),
        ("", "Seine", None, (False, False, False, False)),
    ],
)
def test_dr_free_format(question, answer, think, parts):
    got = format.dr_free_format(question, answer, think, ["Seine", "Sequana"])
    assert (got.parseable, got.no_leak, got.think, got.target) == parts
    assert got.score == sum(parts) / 4


def dr_zero(question="Who wrote it?", answer="Ann Lee", **kwargs):
    defaults = {
        "hops": 3,
        "turns": ["<think>a</think><tool_call>b</tool_call>", " <think>c</think>done"],
        "evidence": "It was written by Ann Lee.",
        "calls": 2,
        "responses": 2,
    }
    return format.dr_zero_format(question, answer, **(defaults | kwargs))


def test_dr_zero_format():
    assert dr_zero().score == 1.0
    assert dr_zero(calls=0, responses=0).score == 0.75
    assert dr_zero(calls=1, responses=1).tool == pytest.approx(2 / 3)
    assert dr_zero(calls=9, responses=9).tool == 1.0
    assert dr_zero(calls=2, responses=1).tool == 0.0
    assert dr_zero(hops=1, calls=0, responses=0).tool == 1.0
    assert dr_zero(turns=["<think>a</think>", "no"]).think == 0.5
    assert dr_zero(turns=[]).think == 0.0
    assert dr_zero(answer="yes").answer == 1.0
    assert dr_zero(answer="Bob").answer == 0.0
    assert dr_zero(answer="was written by Ann Lee It").answer == 0.0
    assert dr_zero(answer="w1 w2 w3 w4 w5 w6", evidence="w1 w2 w3 w4 w5 w6").answer == 0.5
    assert dr_zero(answer=" ".join("abcdefghijkl"), evidence=" ".join("abcdefghijkl")).answer == 0.0
    for broken in ({"question": None}, {"answer": " "}, {"question": "Did Ann Lee write it?"}):
        assert dr_zero(**broken).score == 0.0


def test_dr_zero_reward():
    k1 = difficulty.dr_zero(1, 5)
    assert format.dr_zero_reward(dr_zero().score, float(k1)) == 1.5
    assert format.dr_zero_reward(dr_zero(calls=0, responses=0).score, float(k1)) == 1.375
    assert format.dr_zero_reward(dr_zero(question=None).score, float(k1)) == 0.0


# ------------------------------------------------------------------ difficulty


def test_difficulty_curves():
    k = np.arange(6)
    np.testing.assert_allclose(difficulty.dr_zero(k, 5), [0, 1, 0.75, 0.5, 0.25, 0])
    np.testing.assert_allclose(difficulty.intermediate(k / 5), [0, 0.64, 0.96, 0.96, 0.64, 0])
    np.testing.assert_allclose(difficulty.failure(k / 5), [1, 0.8, 0.6, 0.4, 0.2, 0])
    np.testing.assert_allclose(difficulty.solvable_failure(k / 5), [0, 0.8, 0.6, 0.4, 0.2, 0])
    np.testing.assert_allclose(difficulty.uncertainty(np.array([0.3, 0.7, 1.0])), [0.3, 0.3, 0])
    spice = difficulty.spice(np.arange(5) / 8)
    np.testing.assert_allclose(spice, [0.0439, 0.3720, 0.8226, 0.9879, 1], atol=5e-5)
    with pytest.raises(ValueError, match="at least 2"):
        difficulty.dr_zero(0, 1)


def test_moving_bell():
    acc = np.arange(6) / 5
    early = [0.0000, 0.0039, 0.1353, 0.8007, 0.8007, 0.1353]
    late = [0.4111, 1, 0.4111, 0.0286, 0.0003, 0.0000]
    np.testing.assert_allclose(difficulty.moving_bell(acc, 0.7), early, atol=5e-5)
    np.testing.assert_allclose(difficulty.moving_bell(acc, 0.2), late, atol=5e-5)
    targets = [difficulty.bell_target(p) for p in (-1.0, 0.0, 0.5, 1.0, 2.0)]
    assert targets == pytest.approx([0.7, 0.7, 0.45, 0.2, 0.2])


def test_depth():
    got = difficulty.depth(np.array([1, 3, 5, 8, 10, 40]))
    np.testing.assert_allclose(got, [0.28, 0.44, 0.6, 0.84, 1, 1])


# ------------------------------------------------------------------ tool cost


def tool_aware(y, searches, **kwargs):
    return tool_cost.tool_aware_reward(np.array(y, float), np.array(searches), **kwargs)


def test_tool_cost_t1():
    # m* = 1 and M = 3 among right rollouts (the wrong one's 9 does not count): extra 0, 1, 2 of 2
    got = tool_aware([1, 1, 1, 0], [1, 2, 3, 9], cost=0.4)
    np.testing.assert_allclose(got, [1, 0.8, 0.6, 0])
    # a limit of 5: extra 0, 1, 2 of 4
    got = tool_aware([1, 1, 1, 0], [1, 2, 3, 9], cost=0.4, most=5)
    np.testing.assert_allclose(got, [1, 0.9, 0.8, 0])
    # equal counts cost nothing; needed searches cost nothing
    assert tool_aware([1, 1, 0], [4, 4, 0], cost=0.9).tolist() == [1, 1, 0]


def test_tool_cost_t2():
    got = tool_aware([1, 1, 0, 1], [0, 2, 1, 9], form="T2", cost=0.5, scale=4)
    np.testing.assert_allclose(got, [1, 0.75, 0, 0.5])


def test_tool_cost_t3():
    # m* = 0: m = 0 -> cos 0 = 1; m = 1, c = 1 -> cos(pi / 3) = 1/2
    np.testing.assert_allclose(tool_aware([1, 1, 0], [0, 1, 0], form="T3", cost=1.0), [1, 0.5, 0])
    # m* = 1: m = 1 -> f = 1, sin(pi/2) = 1; m = 3 -> f = 6/4, sin(3 pi / 4)
    got = tool_aware([1, 1], [1, 3], form="T3", cost=1.0)
    np.testing.assert_allclose(got, [1, math.sqrt(0.5)])


@pytest.mark.parametrize("form", ["T1", "T2", "T3"])
def test_tool_cost_keeps_right_above_wrong(form):
    assert not tool_aware([0, 0], [0, 3], form=form).any()
    got = tool_aware([1, 1, 1, 0, 0], [2, 5, 1, 0, 9], form=form, cost=0.9)
    assert got[:3].min() > 0 and not got[3:].any()
    assert got[2] == got.max() == 1.0 and got[1] == got[:3].min()


def test_tool_cost_refuses_bad_settings():
    for kwargs in ({"cost": 1.0}, {"cost": -0.1}, {"form": "T3", "cost": 0.0}, {"form": "T4"}):
        with pytest.raises((ValueError, TypeError)):
            tool_aware([1.0], [1], **kwargs)


# ------------------------------------------------------------------ waypoints, fallback

PATH = (("France",), ("Paris", "Lutetia"), ("Seine", "Sequana"), ("Normandy",))


def test_waypoints():
    assert waypoint.waypoints(PATH) == (("Paris", "Lutetia"), ("Seine", "Sequana"))
    # an intermediate entity that shares a name with the answer earns nothing
    assert waypoint.waypoints(PATH, answers=["the Sequana"]) == (("Paris", "Lutetia"),)
    assert waypoint.waypoints(PATH[:2]) == ()


def test_waypoint_reward():
    entities = waypoint.waypoints(PATH)
    assert waypoint.waypoint_reward(True, entities, []) == 1.0
    assert waypoint.waypoint_reward(False, entities, ["Lutetia: a city"]) == pytest.approx(0.15)
    both = ["Paris", "on the Seine."]
    assert waypoint.waypoint_reward(False, entities, both) == pytest.approx(0.3)
    assert waypoint.waypoint_reward(False, entities, ["Parisian France Normandy"]) == 0.0
    assert waypoint.waypoint_reward(False, (), both) == 0.0
    with pytest.raises(ValueError, match="alpha"):
        waypoint.waypoint_reward(False, entities, both, alpha=1.0)


def test_fallback():
    supported = np.array([True, True, True, False])
    f1 = np.array([1.0, 0.5, 1.0, 1.0])
    allowed = np.array([True, True, False, True])
    got = fallback.fallback_scores(np.zeros(4), supported, f1, allowed)
    # .1 + .1;  .1 + .05;  .1 (ungrammatical: no bonus);  nothing without support
    np.testing.assert_allclose(got.score_G, [0.2, 0.15, 0.1, 0.0])
    assert (got.scale, got.used) == (0.1, True)
    one_right = np.array([0.0, 1.0, 0.0, 0.0])
    assert not fallback.needs_teacher(one_right)
    got = fallback.fallback_scores(one_right, supported, f1, allowed)
    assert (got.score_G.tolist(), got.scale, got.used) == ([0, 1, 0, 0], 1.0, False)


# ------------------------------------------------------------------ information gain


def test_answer_log_likelihood():
    logp = jnp.array(
        [[-9.0, -1.0, -3.0, jnp.nan], [-2.0, jnp.nan, jnp.nan, jnp.nan], [jnp.nan] * 4]
    )
    mask = jnp.array([[0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    got = ig.answer_log_likelihood(logp, mask)
    assert got.tolist() == [-2.0, -2.0, 0.0]
    deep = ig.answer_log_likelihood(jnp.stack([logp, logp]), jnp.stack([mask, mask]))
    assert deep.shape == (2, 3)


#                 FULL  NONE  SRC   1SHOT HOP1  HOP2  HOP3
LOGLIK = np.array(
    [
        [-9.0, -4.0, 9.0, -1.0, 9.0, 9.0, 9.0],  # one hop: -1 - (-4) = 3
        [-1.0, -5.0, -3.0, -4.0, -2.5, -6.0, 9.0],  # two hops: -1 - (-2.5) = 1.5, by hop 1
        [-1.0, -5.0, -3.0, -4.0, -2.5, -6.0, -0.5],  # three hops: -1 - (-.5) = -.5, by hop 3
        [-0.2, -0.7, -3.0, -4.0, -2.5, -6.0, 9.0],  # two hops: .5, known by heart
    ],
    np.float32,
)
HOPS = np.array([1, 2, 3, 2])
VALID = np.arange(7) < ig.HOP_1 + HOPS[:, None]


def gain(loglik=LOGLIK, valid=VALID, **kwargs):
    return ig.information_gain(jnp.array(loglik), jnp.array(HOPS), jnp.array(valid), **kwargs)


class InformationGain(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_gain(self):
        got = self.variant(ig.information_gain)(
            jnp.array(LOGLIK), jnp.array(HOPS), jnp.array(VALID)
        )
        np.testing.assert_allclose(got, [3.0, 1.5, -0.5, 0.5], rtol=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    def test_reward(self):
        # format .75 or an ungrounded answer: format part only. Delta 3, .5 -> 2.2848, .4954
        fmt, grounded = jnp.array([1.0, 0.75, 1.0, 1.0]), jnp.array([True, True, False, True])
        delta = jnp.array([3.0, jnp.nan, 2.0, 0.5])
        got = self.variant(ig.dr_free_reward)(fmt, grounded, delta)
        np.testing.assert_allclose(got, [2.4848, 0.15, 0.2, 0.6954], atol=5e-5)


def test_strongest_shortcut():
    got = ig.strongest_shortcut(jnp.array(LOGLIK), jnp.array(HOPS), jnp.array(VALID))
    assert got.tolist() == [ig.NONE, ig.HOP_1, ig.HOP_1 + 2, ig.NONE]
    assert ig.context_names(3)[got[2]] == "hop_3"


@pytest.mark.parametrize(
    ("without", "expected"),
    [
        # row 1: next best after hops is the source, -3; row 2 the same; row 3: none stays, -.7
        (("hop",), [3.0, 2.0, 2.0, 0.5]),
        (("source",), [3.0, 1.5, -0.5, 0.5]),
        (("hop", "source"), [3.0, 3.0, 3.0, 0.5]),
        # row 3 without closed-book: -.2 - (-2.5); one hop keeps its only comparison
        (("none",), [3.0, 1.5, -0.5, 2.3]),
        (("one_shot", "source", "hop"), [3.0, 4.0, 4.0, 0.5]),
    ],
)
def test_shortcut_ablation(without, expected):
    np.testing.assert_allclose(gain(without=without), expected, rtol=1e-5)


def test_shortcut_ablation_refuses_nonsense():
    with pytest.raises(ValueError, match="no shortcut"):
        gain(without=ig.SHORTCUTS)
    with pytest.raises((ValueError, TypeError)):
        gain(without=("full",))
    with pytest.raises((ValueError, TypeError)):
        gain(valid=VALID[:, :5])


def test_missing_contexts():
    valid = VALID.copy()
    valid[0, ig.ONE_SHOT] = False  # no evidence for the one-hop row
    valid[1, ig.HOP_1] = False  # the strongest shortcut of row 1 is missing: the source is next
    valid[2, ig.FULL] = False  # no evidence
    valid[3, ig.NONE :] = False  # nothing to compare with
    loglik = np.where(valid, LOGLIK, np.nan)
    np.testing.assert_allclose(gain(loglik, valid), [0.0, 2.0, 0.0, 0.0])
    got = ig.strongest_shortcut(jnp.array(loglik), jnp.array(HOPS), jnp.array(valid))
    assert got.tolist() == [ig.NONE, ig.SOURCE, ig.HOP_1 + 2, -1]


def test_squash():
    delta = jnp.array([0.1, 0.5, 1.0, 2.0, 3.0, 6.0, -1.0, 0.0])
    form_a = [0.1000, 0.4954, 0.9645, 1.7483, 2.2848, 2.8921, 0, 0]
    np.testing.assert_allclose(ig.squash(delta), form_a, atol=5e-5)
    form_b = ig.squash(jnp.array([0.5, 1.0, 3.0, -2.0]), form="b")
    np.testing.assert_allclose(form_b, [1.386, 2.285, 2.985, 0], atol=5e-4)
    with pytest.raises((ValueError, TypeError)):
        ig.squash(delta, form="c")


_compiled_gain = jax.jit(ig.information_gain)


@settings(max_examples=40, deadline=None)
@given(
    # Multiples of 2^-10: their differences are exact, and none is so small that XLA makes it 0.
    st.lists(st.integers(-20 * 1024, 0).map(lambda i: i / 1024), min_size=14, max_size=14),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_gain_never_exceeds_any_single_margin(values, hops):
    """Adding a shortcut to B can only lower the gain, and columns beyond h never count."""
    loglik = np.array(values, np.float32).reshape(2, 7)
    valid = jnp.arange(7) < ig.HOP_1 + jnp.array(hops)[:, None]
    got = np.asarray(_compiled_gain(jnp.array(loglik), jnp.array(hops), valid))
    for row, h in enumerate(hops):
        if h == 1:
            assert got[row] == loglik[row, ig.ONE_SHOT] - loglik[row, ig.NONE]
        else:
            margins = loglik[row, ig.FULL] - loglik[row, ig.NONE : ig.HOP_1 + h]
            assert got[row] == margins.min()
