"""EviBack's fallback over a step's rollouts, with judges written by hand."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from written import CONFIG

from zest_jax.assembly import advantage_of
from zest_jax.errors import UserError
from zest_jax.fallback import EvidenceFallback
from zest_jax.rollout import trajectories
from zest_jax.rollout.protocols import PLAIN_SEARCH
from zest_jax.tasks.types import Passage, Task
from zest_jax.teachers.evidence import EvidenceTeacher, Rule, Stage, Status, Verdict
from zest_jax.teachers.interface import Failure
from zest_jax.teachers.recorded import ScriptedTeacher

CORPUS = [Passage("a", "Seine", "It rises at Source-Seine."), Passage("b", "Oise", "A river.")]
PARTS = SimpleNamespace(
    solver_sampler=SimpleNamespace(protocol=PLAIN_SEARCH),
    world=SimpleNamespace(passages=CORPUS),
    tokenizer=None,
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
    assert [line["left_out"] for line in paid.lines] == [False] * G + [True] * G


def test_nothing_is_asked_where_somebody_is_right_everywhere():
    paid = pay(lambda cases: [verdict(c, True, 1) for c in cases], [1] + [0] * 7)
    assert paid.reward_N.tolist() == [1] + [0] * 7 and set(paid.scale_N) == {1.0}
