"""EviBack's fallback over a step's rollouts, with judges written by hand."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from written import CONFIG

from zest_jax import preflight
from zest_jax.assembly import advantage_of
from zest_jax.config import load
from zest_jax.errors import UserError
from zest_jax.evaluation import well_formed
from zest_jax.fallback import EvidenceFallback
from zest_jax.rollout import trajectories
from zest_jax.rollout.protocols import PLAIN_SEARCH, find
from zest_jax.tasks.types import Passage, Task
from zest_jax.teachers.evidence import EvidenceTeacher, Rule, Stage, Status, Verdict
from zest_jax.teachers.interface import Failure
from zest_jax.teachers.recorded import ScriptedTeacher

CORPUS = [Passage("a", "Seine", "It rises at Source-Seine."), Passage("b", "Oise", "A river.")]
PARTS = SimpleNamespace(
    solver_sampler=SimpleNamespace(protocol=PLAIN_SEARCH),
    world=SimpleNamespace(passages=CORPUS),
    solver=SimpleNamespace(tokenizer=None),
)
SEARCH = "<search> Seine</search>"
TASKS = [Task("t0", "Where?", ("Source-Seine",)), Task("t1", "Who?", ("me",))]
G = 8


def episodes(searching):
    """Rollouts of which some have searched once and found the first passage."""
    out = trajectories.empty(len(searching), 8, 1, 2)
    out.searches_N[:] = searching
    out.rows_NTUR[np.asarray(searching) > 0, 0, 0, 0] = 0
    return out


def pay(judge, reward_N, *, searching=None, answers=None, turns=None, config=CONFIG, **more):
    n = len(reward_N)
    fallback = EvidenceFallback(config, PARTS, judge, **more)
    return fallback(
        TASKS[: n // G],
        episodes([1] * n if searching is None else searching),
        ["x"] * n if answers is None else answers,
        [[SEARCH, "<answer> x</answer>"]] * n if turns is None else turns,
        np.asarray(reward_N, float),
    )


def verdict(case, supported, f1):
    status = Status.SUPPORTED if supported else Status.INSUFFICIENT
    return Verdict(case.id, status, "", f1, Rule.B)


def test_the_published_values_of_an_all_zero_group():
    # evidence and a right answer, evidence alone twice, and five times nothing
    worth = [(True, 1.0), (True, 0.0), (True, 0.0), *[(False, 1.0)] * 5]
    seen = []

    def judge(cases):
        seen.extend(cases)
        return [verdict(case, *worth[n % G]) for n, case in enumerate(cases)]

    mixed = [0, 1, 0, 0, 0, 0, 0, 0]
    paid = pay(judge, [0] * G + mixed, answers=["Source", *["x"] * (2 * G - 1)])
    assert len(seen) == G, "nobody is asked about a group in which somebody is right"
    assert seen[0].question == "Where?" and seen[0].rounds[0].query == "Seine"
    assert seen[0].rounds[0].passages == (CORPUS[0],)
    np.testing.assert_allclose(paid.reward_N, [0.2, 0.1, 0.1, 0, 0, 0, 0, 0, *mixed])
    assert paid.scale_N.tolist() == [0.1] * G + [1.0] * G
    keys = np.repeat([0, 1], G).astype(np.int32)
    estimate = jax.jit(advantage_of(CONFIG, "solver"))
    advantage_N = np.asarray(estimate(paid.reward_N, keys, paid.scale_N))
    np.testing.assert_allclose(advantage_N[:G], [0.1984, 0.0661, 0.0661, *[-0.0661] * 5], atol=5e-5)
    np.testing.assert_allclose(advantage_N[G + 1], 7 / 8 / np.std(mixed, ddof=1), rtol=1e-4)
    assert paid.notes["teacher/all_zero_groups"] == 0.5 and paid.notes["teacher/asked"] == G
    assert paid.notes["teacher/groups_with_signal"] == 1, "one is paid apart, one was mixed"
    lines = json.loads(json.dumps(paid.lines))
    assert [line["id"] for line in lines] == [f"t{n // G}/{n}" for n in range(2 * G)]
    assert lines[0]["status"] == "supported_answer" and lines[0]["all_zero"]
    assert (lines[0]["reward"], lines[0]["scale"], lines[0]["em"]) == (0.2, 0.1, 0.0)
    assert lines[0]["actor_answer"] == "Source" and lines[0]["actor_f1"] == 0.0
    assert lines[0]["searches"] == 1 and lines[0]["duplicates"] == 0 and lines[0]["well_formed"]
    right = lines[G + 1]
    assert right["skip"] == "group_scored" and not right["all_zero"] and right["status"] is None
    assert (right["reward"], right["scale"], right["em"]) == (1.0, 1.0, 1.0)


def test_the_bonus_needs_grammar_and_an_answer_and_beta_does_not():
    turns = [[SEARCH, "<answer> x</answer>"]] * G
    turns[1] = [f"{SEARCH} and <search> more</search>", "no action at all"]
    answers = ["x"] * G
    answers[2] = None
    paid = pay(
        lambda cases: [verdict(case, True, 0.5) for case in cases],
        [0] * G,
        turns=turns,
        answers=answers,
    )
    np.testing.assert_allclose(paid.reward_N, [0.15, 0.1, 0.1, *[0.15] * 5])
    assert paid.notes["solver/well_formed"] == 7 / 8


def test_a_silent_teacher_pays_nothing_and_is_counted():
    teacher = ScriptedTeacher(lambda conversation: Failure.TIMEOUT)
    config = CONFIG.copy_and_resolve_references()
    judge = EvidenceTeacher(teacher).judge
    searching = [1] * 4 + [0] * 4
    said = []
    paid = pay(judge, [0] * G, searching=searching, config=config, teacher=teacher, say=said.append)
    (sentence,) = said
    assert "UNANSWERED 4 (100.0%: timeout 4)" in sentence
    assert paid.notes["teacher/failure_timeout"] == 4
    assert [line["left_out"] for line in paid.lines] == [True] * G
    assert paid.lines[0]["stage_a"]["failure"] == "timeout"
    assert paid.lines[7]["skip"] == "no_evidence"
    assert not paid.reward_N.any() and set(paid.scale_N) == {1.0}
    assert paid.notes["teacher/unanswered"] == 1 and paid.notes["teacher/asked"] == 4
    assert paid.notes["teacher/groups_left_out"] == 1
    config.teacher.most_unanswered = 0.5
    with pytest.raises(UserError, match="unanswered"):
        pay(judge, [0] * 2 * G, config=config, teacher=teacher)


def test_a_group_with_one_silence_is_left_at_its_zeros():
    silent = Stage(failure=Failure.TIMEOUT)

    def judge(cases):
        made = [verdict(case, True, 1.0) for case in cases]
        made[G + 2] = dataclasses.replace(verdict(cases[G + 2], False, 0), stage_a=silent)
        return made

    paid = pay(judge, [0] * 2 * G)
    assert (paid.reward_N[:G] == 0.2).all() and not paid.reward_N[G:].any()
    assert paid.notes["teacher/groups_left_out"] == 0.5
    assert paid.notes["teacher/groups_with_signal"] == 0, "all alike in either group"
    assert [line["left_out"] for line in paid.lines] == [False] * G + [True] * G


def test_nothing_is_asked_where_somebody_is_right_everywhere():
    paid = pay(lambda cases: [verdict(c, True, 1) for c in cases], [1] + [0] * 7)
    assert paid.reward_N.tolist() == [1] + [0] * 7 and set(paid.scale_N) == {1.0}


def advantages(score_N, scale_N, keys):
    config = load("configs/eviback.py")
    estimate = jax.jit(advantage_of(config, "solver"))
    return np.asarray(estimate(np.float32(score_N), np.int32(keys), np.float32(scale_N)))


def test_advantages_with_the_published_settings():
    """Lambda after normalisation, ddof 1, a group of one keeps its reward, equal scores give 0."""
    score = [0.2, 0.1, 0.1, 0, 0, 0, 0, 0]
    got = advantages(score + [0.2] * G + [1, 0, 0, 0, 0] + [1], [0.1] * 2 * G + [1] * 6,
                     [0] * G + [1] * G + [2] * 5 + [3])  # fmt: skip
    np.testing.assert_allclose(got[:G], [0.1984, 0.0661, 0.0661, *[-0.0661] * 5], atol=5e-5)
    assert not got[G : 2 * G].any(), "the bonus for everybody teaches nothing"
    np.testing.assert_allclose(got[2 * G : -1], [1.7889, *[-0.4472] * 4], atol=5e-5)
    assert got[-1] == 1


def test_the_published_settings_are_the_config_s():
    c = load("configs/eviback.py")
    assert (c.fallback.beta, c.fallback.gamma, c.fallback.lam) == (0.1, 0.1, 0.1)
    assert c.fallback.enabled and not load("configs/eviback.py:no_teacher").fallback.enabled
    assert (c.solver.group_size, c.solver.tasks_per_step, c.schedule.solver_steps) == (8, 64, 79)
    assert (c.solver.learning_rate, c.solver.temperature) == (1e-6, 0.7)
    assert (c.teacher.documents, c.teacher.max_tokens, c.teacher.answer_s) == (5, 512, 180)


@pytest.mark.parametrize("field, value", [("std", False), ("ddof", 0)])
def test_lambda_needs_the_normalisation_that_it_stands_behind(field, value):
    c = load("configs/eviback.py:atlas")
    c.solver.advantage[field] = value
    with pytest.raises(UserError, match="lambda acts after"):
        preflight.check_schedule(c)


def test_an_episode_is_as_well_formed_as_its_worst_turn():
    sampler = SimpleNamespace(protocol=find("eviback"))
    asks = '<tool_call>{"name": "search", "arguments": {"query": "a"}}</tool_call>'
    good, ends = f"<reason>so</reason>{asks}", "<think>so</think><answer>x</answer>"
    for turns, answer, right in [
        ([good, good, ends], "x", True),
        ([ends], "x", True),
        ([good, good], None, False),  # its last turn asks again: not finished
        ([asks, ends], "x", False),
        ([good, ends + "."], "x", False),
        ([good, "<think>so</think>", ends], "x", False),
        ([], None, False),
    ]:
        assert well_formed(sampler, [turns], [answer]) == [right], turns
