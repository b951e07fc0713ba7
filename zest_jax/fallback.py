"""EviBack in a run: a frozen teacher pays the groups in which nobody is right.

Only all-zero groups are asked about, and only rollouts with evidence; rewards and scale are
`rewards.fallback.fallback_scores`. A teacher that does not answer gives no reward and is counted.

Shape letters: N rollouts, G rollouts of one question.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zest_jax import assembly
from zest_jax.players import policy_folder
from zest_jax.rewards.fallback import fallback_scores, needs_teacher
from zest_jax.rollout.trajectories import Trajectories
from zest_jax.tasks.episodes import found_by
from zest_jax.tasks.types import Task
from zest_jax.teachers.endpoint import EndpointSettings, EndpointTeacher
from zest_jax.teachers.evidence import (
    Case,
    EvidenceSettings,
    EvidenceTeacher,
    Round,
    Rule,
    Skip,
    Status,
    Verdict,
    arrays,
    skipped,
    step_metrics,
)
from zest_jax.teachers.interface import Teacher, check_answered
from zest_jax.teachers.local import load_local
from zest_jax.teachers.prompts import DEFAULT, read_prompts
from zest_jax.teachers.recorded import read_recording
from zest_jax.text import contains_any, token_f1

Judge = Callable[[Sequence[Case]], list[Verdict]]


@dataclasses.dataclass(frozen=True)
class Paid:
    """The rewards of a step after the fallback.

    Attributes:
      reward_N: as before where somebody in the group was right, else the fallback's.
      scale_N: 1, or lambda in a group that the fallback paid.
      notes: metrics.
      lines: where each rollout's reward comes from, as JSON: the verdict or why there is none, the
        rollout's own exact match, F1, grammar, searches and repeated queries, its reward and scale.
    """

    reward_N: np.ndarray
    scale_N: np.ndarray
    notes: dict[str, float]
    lines: list[dict[str, Any]]


class EvidenceFallback:
    """Asks a judge about all-zero groups.

    Args:
      config: the run's.
      parts: for the protocol, the corpus and the tokenizer.
      judge: verdicts of cases, in order.
      teacher: whose silence is counted; None where the judge is no teacher that can be silent.
      say: is told of a silent teacher, once a step.
    """

    def __init__(
        self,
        config: Any,
        parts: assembly.Parts,
        judge: Judge,
        teacher: Teacher | None = None,
        say: Callable[[str], None] | None = None,
    ):
        self.config, self.parts, self.judge = config, parts, judge
        self.teacher, self.say = teacher, say

    def __call__(
        self,
        tasks: Sequence[Task],
        episodes: Trajectories,
        answers: Sequence[str | None],
        turns: Sequence[Sequence[str]],
        reward_N: np.ndarray,
    ) -> Paid:
        """Pays a step's rollouts.

        Args:
          tasks: the questions; a question's rollouts are neighbours.
          episodes: on the host.
          answers: of each rollout.
          turns: the policy's words by turn, of each rollout.
          reward_N: exact match, already 0 where a rollout is ill-formed.

        A group of which the teacher leaves a rollout unanswered keeps its zeros.

        Raises:
          UserError: more of the step stayed unanswered than `teacher.most_unanswered` allows.
        """
        f, group = self.config.fallback, len(answers) // max(len(tasks), 1)
        protocol = self.parts.solver_sampler.protocol
        formed = [all(map(protocol.well_formed, words)) for words in turns]
        open_ = [
            g for g in range(len(tasks)) if needs_teacher(reward_N[g * group : (g + 1) * group])
        ]
        cases = [
            self._case(tasks[g], episodes, n, turns[n])
            for g in open_
            for n in range(g * group, (g + 1) * group)
        ]
        before = None if self.teacher is None else self.teacher.counts.copy()
        verdicts = self.judge(cases)
        if self.teacher is not None and before is not None:
            # Of this step alone: a teacher that dies late must not hide behind its good days.
            now = self.teacher.counts.since(before)
            if now.failed and self.say is not None:
                self.say(now.sentence())
            check_answered(now, self.config.teacher.most_unanswered, asked=8)
        em_N = np.array(reward_N, np.float64)
        reward_N, scale_N = em_N.copy(), np.ones(len(reward_N))
        for at, g in enumerate(open_):
            of = slice(g * group, (g + 1) * group)
            own = verdicts[at * group : (at + 1) * group]
            if any(verdict.unanswered for verdict in own):
                continue  # a rollout must not be paid less because nobody answered about it
            supported_G, f1_G = arrays(own)
            allowed_G = np.array(
                [formed[n] and bool((answers[n] or "").strip()) for n in range(of.start, of.stop)]
            )
            scores = fallback_scores(
                reward_N[of], supported_G, f1_G, allowed_G, beta=f.beta, gamma=f.gamma, lam=f.lam
            )
            reward_N[of], scale_N[of] = scores.score_G, scores.scale
        judged = dict(zip(open_, _groups(verdicts, group), strict=True))
        lines = self._lines(tasks, episodes, answers, judged)
        for n, line in enumerate(lines):
            line |= {"em": float(em_N[n]), "well_formed": formed[n]}
            line |= {"reward": float(reward_N[n]), "scale": float(scale_N[n])}
        notes = self._notes(verdicts, len(open_), len(tasks), formed)
        paid_GG = reward_N.reshape(len(tasks), -1)
        notes["teacher/groups_with_signal"] = float(np.mean(np.ptp(paid_GG, axis=1) > 0))
        return Paid(reward_N, scale_N, notes, lines)

    def _lines(
        self,
        tasks: Sequence[Task],
        episodes: Trajectories,
        answers: Sequence[str | None],
        judged: dict[int, Sequence[Verdict]],
    ) -> list[dict[str, Any]]:
        """Provenance of each rollout, without its reward."""
        out, group = [], len(answers) // max(len(tasks), 1)
        for n, answer in enumerate(answers):
            task, own = tasks[n // group], judged.get(n // group)
            verdict = own[n % group] if own else skipped(f"{task.id}/{n}", Skip.GROUP_SCORED)
            actor = {
                "question": task.question,
                "actor_answer": answer,
                "actor_f1": float(token_f1(answer, task.answers)),
                "searches": int(episodes.searches_N[n]),
                "duplicates": int(episodes.duplicates_N[n]),
                "all_zero": own is not None,
                "left_out": own is not None and any(v.unanswered for v in own),
            }
            out.append(verdict.to_json() | actor)
        return out

    def _case(self, task: Task, episodes: Trajectories, n: int, turns: Sequence[str]) -> Case:
        protocol, corpus = self.parts.solver_sampler.protocol, self.parts.world.passages
        asked = [protocol.queries(turn) for turn in turns]
        queries = [" ; ".join(q) for q in asked if q is not None]
        rounds = []
        for search in range(int(episodes.searches_N[n])):
            found = found_by(episodes, n, search, corpus, self.parts.solver.tokenizer)
            query = queries[search] if search < len(queries) else ""
            rounds.append(Round(query, found))
        return Case(task.question, task.answers, tuple(rounds), f"{task.id}/{n}")

    def _left_out(self, verdicts: Sequence[Verdict], open_: int) -> int:
        """All-zero groups that stay unpaid since some verdict of theirs is missing."""
        parts = _groups(verdicts, len(verdicts) // max(open_, 1))
        return sum(any(verdict.unanswered for verdict in part) for part in parts)

    def _notes(
        self, verdicts: Sequence[Verdict], open_: int, groups: int, formed: Sequence[bool]
    ) -> dict[str, float]:
        return step_metrics(verdicts) | {
            "teacher/all_zero_groups": open_ / max(groups, 1),
            "teacher/groups_left_out": self._left_out(verdicts, open_) / max(groups, 1),
            "solver/well_formed": float(np.mean(formed)),
        }


def _groups(verdicts: Sequence[Verdict], group: int) -> list[Sequence[Verdict]]:
    return [verdicts[at : at + group] for at in range(0, len(verdicts), max(group, 1))]


def build_fallback(
    config: Any, parts: assembly.Parts, workdir: Path, say: Callable[[str], None] | None = None
) -> EvidenceFallback:
    """The fallback that a config names; what its teacher answers is cached in `teacher/`.

    Raises:
      UserError: the teacher's place is missing or wrong.
    """
    t = config.teacher
    if t.kind == "reader":
        return EvidenceFallback(config, parts, ReaderJudge(config, parts))
    teacher: Teacher
    if t.kind == "local":
        teacher = load_local(policy_folder(t.where), max_tokens=t.max_tokens)
    elif t.kind == "recorded":
        teacher = read_recording(t.where)
    else:
        settings = EndpointSettings(
            max_tokens=t.max_tokens,
            answer_s=t.answer_s,
            retries=t.retries,
            connections=t.connections,
            most_requests=t.most_requests,
            most_tokens=t.most_tokens,
            key_variable=t.key_variable,
        )
        teacher = EndpointTeacher(
            t.where,
            t.model,
            settings,
            cache=workdir / "teacher",
            ledger=workdir / "teacher" / "spent.json",
        )
    prompts = read_prompts(t.prompts) if t.prompts else DEFAULT
    judge = EvidenceTeacher(teacher, prompts, EvidenceSettings(documents=t.documents))
    return EvidenceFallback(config, parts, judge.judge, teacher, say)


class ReaderJudge:
    """The policy that training began with, as a judge, for policies too small to be instructed.

    It answers the question from the evidence; the evidence supports what stands in it literally,
    and else is insufficient. This is ours; it lets the whole method run without an endpoint.
    """

    def __init__(self, config: Any, parts: assembly.Parts):
        if parts.reader is None:
            raise ValueError("no reader was built")
        self.documents, self._reader = config.teacher.documents, parts.reader
        # A copy: what the run trains is given away to its updates.
        self._params = jax.tree.map(lambda x: x.copy(), parts.solver.whole(parts.solver.params))

    def __call__(self, cases: Sequence[Case]) -> list[Verdict]:
        asked = [case for case in cases if case.passages]
        shown = [[p for each in c.rounds for p in each.passages[: self.documents]] for c in asked]
        found = iter(
            self._reader(self._params, jax.random.key(0), [c.question for c in asked], shown)
        )
        out = []
        for case in cases:
            if not case.passages:
                out.append(skipped(case.id, Skip.NO_EVIDENCE))
                continue
            answer = next(found)
            texts = [f"{p.title}: {p.text}" for p in case.passages]
            there = answer is not None and any(contains_any(text, [answer]) for text in texts)
            out.append(
                Verdict(
                    id=case.id,
                    status=Status.SUPPORTED if there else Status.INSUFFICIENT,
                    answer=answer or "" if there else "",
                    f1=float(token_f1(answer, case.references)) if there else 0.0,
                    rule=Rule.B if there else Rule.A_INSUFFICIENT,
                    versions={"judge": "reader-1"},
                )
            )
        return out
