"""Looks for better prompts of the evidence teacher, and freezes the best as a file (E2E-APE).

    python -m zest_jax.teachers.optimize_prompt --cases=cases.jsonl --workdir=runs/ape \\
        --teacher=http://127.0.0.1:8000/v1 --teacher_model=zai-org/GLM-4.7-Flash \\
        --controller=https://HOST/v1 --controller_model=NAME --controller_key_variable=OTHER_KEY

The teacher is the model that will judge, the controller the one that labels cases and writes
prompts. Each is an address of OpenAI's kind, a policy's folder or a recording. Every answer of an
address is cached in the workdir, so that the same command goes on where it was stopped.

Writes prompts.json (for `read_prompts`) and report.json: the partition, labels, every candidate
with its scores, and the hold-out's, which decided nothing.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from zest_jax import cli
from zest_jax.errors import UserError
from zest_jax.files import writing
from zest_jax.progress import Progress
from zest_jax.teachers import ape
from zest_jax.teachers.ape import AXES, Labelled, Measure
from zest_jax.teachers.endpoint import KEY_VARIABLE, EndpointSettings
from zest_jax.teachers.evidence import EvidenceSettings, Status, Verdict
from zest_jax.teachers.interface import Teacher, digest
from zest_jax.teachers.opening import open_teacher
from zest_jax.teachers.prompts import DEFAULT, Prompts, read_prompts

_MOST_UNANSWERED = 0.05  # share of the cases beyond which a score says nothing


@dataclasses.dataclass(frozen=True)
class Search:
    """How the search goes.

    Attributes:
      rounds: of candidates, at most.
      axes: names of `ape.AXES`; one candidate each in every round.
      shown: mistakes that the controller sees.
      seed: which mistakes.
    """

    rounds: int = 3
    axes: tuple[str, ...] = tuple(AXES)
    shown: int = 12
    seed: int = 260715


@dataclasses.dataclass(frozen=True)
class Tried:
    """A candidate: its axis and round, its prompts or why there are none, its development scores
    or None where the teacher was silent too often."""

    round: int
    axis: str
    prompts: Prompts | None
    scores: Measure | None
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "axis": self.axis,
            "version": self.prompts.version if self.prompts else None,
            "calls": self.prompts.calls if self.prompts else None,
            "scores": dataclasses.asdict(self.scores) if self.scores else None,
            "problem": self.problem,
        }


def scores_of(
    teacher: Teacher, prompts: Prompts, cases: Sequence[Labelled], settings: EvidenceSettings
) -> tuple[Measure | None, list[Verdict]]:
    """Scores of prompts, None where too much stayed unanswered to tell; and the verdicts."""
    verdicts = ape.judge(teacher, prompts, cases, settings)
    scores = ape.measure(cases, verdicts)
    heard = scores.unanswered <= _MOST_UNANSWERED * (scores.cases + scores.unanswered)
    return scores if heard else None, verdicts


def search(
    start: Prompts,
    cases: Sequence[Labelled],
    teacher: Teacher,
    controller: Teacher,
    settings: EvidenceSettings,
    plan: Search,
    progress: Progress,
) -> tuple[Prompts, list[Tried], str]:
    """Rounds of candidates on the development cases, each from the best so far.

    Returns:
      The best prompts, everything that was tried, and why the search ended.

    Raises:
      UserError: the teacher is silent on the prompts that the search starts from.
    """
    best = start
    scores, verdicts = scores_of(teacher, start, cases, settings)
    if scores is None:
        raise UserError(f"the first prompts cannot be measured. {teacher.counts.sentence()}")
    tried = [Tried(0, "start", start, scores)]
    progress.say(f"start: {_told(scores)}")
    for number in range(1, plan.rounds + 1):
        if scores.reached:
            return best, tried, "precision and recall of the class are above 0.98"
        wrong = ape.mistakes(cases, verdicts, plan.shown, plan.seed + number)
        replies = controller.ask([ape.asks_for(axis, best, scores, wrong) for axis in plan.axes])
        winner = None
        for axis, reply in zip(plan.axes, replies, strict=True):
            candidate = ape.read_candidate(reply, f"{start.name}+{number}.{axis}", axis)
            if isinstance(candidate, str):
                tried.append(Tried(number, axis, None, None, candidate))
                progress.say(f"round {number}, {axis}: no candidate, {candidate}")
                continue
            own, said = scores_of(teacher, candidate, cases, settings)
            problem = "" if own else "the teacher was silent too often"
            tried.append(Tried(number, axis, candidate, own, problem))
            progress.say(f"round {number}, {axis}: {_told(own) if own else problem}")
            if own and own.objective > (winner[1] if winner else scores).objective:
                winner = candidate, own, said
        if winner is None:
            return best, tried, f"no candidate of round {number} was better"
        best, scores, verdicts = winner
    return best, tried, f"{plan.rounds} rounds are over"


def _told(scores: Measure) -> str:
    return (
        f"objective {scores.objective:.4f} (F1 of insufficient {scores.insufficient_f1:.4f}, "
        f"coverage {scores.coverage:.4f}, broken replies {scores.breaches})"
    )


def hold_out(
    teacher: Teacher,
    prompts: tuple[Prompts, Prompts],
    cases: Sequence[Labelled],
    settings: EvidenceSettings,
) -> dict[str, Any]:
    """The hold-out's scores with the prompts before and after, the interval of the gain over the
    cases that were answered with both, and the labels that no case has: the objective needs both.
    """
    told: dict[str, Any] = {}
    verdicts = []
    for name, each in zip(("before", "after"), prompts, strict=True):
        scores, said = scores_of(teacher, each, cases, settings)
        told[name] = dataclasses.asdict(scores) if scores else None
        verdicts.append(said)
    told["lacks"] = [
        str(status)
        for status in (Status.INSUFFICIENT, Status.SUPPORTED)
        if not any(case.label == status for case in cases)
    ]
    both = [
        (case, before, after)
        for case, before, after in zip(cases, *verdicts, strict=True)
        if case.label and not before.unanswered and not after.unanswered
    ]
    if both:
        before = ape.outcomes((case, verdict) for case, verdict, _ in both)
        after = ape.outcomes((case, verdict) for case, _, verdict in both)
        told["gain_ci95"] = list(ape.gain_interval(before, after))
    return told


def main(config: Any, workdir: str | None, values: flags.FlagValues) -> None:
    if config is not None:
        raise UserError("this program has no config; say --cases, --teacher and --controller.")
    if not values.cases:
        raise UserError("no --cases is given; say which file of cases.")
    plan = Search(values.rounds, read_axes(values.axes), values.shown, values.seed)
    if plan.rounds < 1 or values.holdout_per_layer < 1:
        raise UserError("--rounds and --holdout_per_layer are 1 or more.")
    start = read_prompts(values.prompts) if values.prompts else DEFAULT
    cases = ape.read_cases(values.cases)
    folder = Path(workdir or "")
    settings = EvidenceSettings(documents=values.documents)
    with (
        Progress() as progress,
        _open("teacher", values, folder) as teacher,
        _open("controller", values, folder) as controller,
    ):
        development, held = ape.partition(cases, values.holdout_per_layer, values.seed)
        progress.say(f"{len(development):,} cases of development, {len(held):,} held out")
        labelled = {each.case.id: each for each in ape.label([*development, *held], controller)}
        development = [labelled[each.case.id] for each in development]
        held = [labelled[each.case.id] for each in held]
        check_labels(development, controller)
        best, tried, why = search(start, development, teacher, controller, settings, plan, progress)
        progress.say(f"the search ends: {why}")
        told = hold_out(teacher, (start, best), held, settings)
        if told["lacks"]:
            progress.say(
                f"no case of the hold-out is labelled {' or '.join(told['lacks'])}, so its "
                "objective says little; hold more out."
            )
        best.write(folder / "prompts.json")
        report = {
            "prompts": {"name": best.name, "version": best.version, "from": start.version},
            "ended": why,
            "tried": [each.to_json() for each in tried],
            "hold_out": told,
            "cases": {
                "file": Path(values.cases).name,
                "sha256": digest([dataclasses.asdict(each.case) for each in cases]),
                "development": _side(development),
                "hold_out": _side(held),
            },
            "teacher": teacher.card | {"counts": teacher.counts.to_json()},
            "controller": controller.card | {"counts": controller.counts.to_json()},
        }
    with writing(folder / "report.json") as file:
        file.write((json.dumps(report, ensure_ascii=False, indent=1) + "\n").encode())
    print(json.dumps({"prompts": report["prompts"], "ended": why, "hold_out": told}, indent=1))


def check_labels(cases: Sequence[Labelled], controller: Teacher) -> None:
    """Refuses development cases whose objective would be empty.

    Raises:
      UserError: no case is labelled insufficient, or none supported.
    """
    for status in (Status.INSUFFICIENT, Status.SUPPORTED):
        if not any(each.label == status for each in cases):
            raise UserError(
                f"no case of development is labelled {status}, and the objective needs some. "
                f"Of the controller: {controller.counts.sentence()}"
            )


def read_axes(text: str) -> tuple[str, ...]:
    """The names of --axes.

    Raises:
      UserError: an unknown one.
    """
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [name for name in names if name not in AXES]
    if unknown or not names:
        raise UserError(f"--axes takes some of {', '.join(AXES)}, not {text!r}.")
    return names


def _side(cases: Sequence[Labelled]) -> dict[str, Any]:
    ids = [each.case.id for each in cases]
    labels = Counter(str(each.label or "in doubt") for each in cases)
    return {"count": len(ids), "sha256": digest(ids), "labels": dict(sorted(labels.items()))}


def _open(role: str, values: flags.FlagValues, folder: Path) -> Teacher:
    where, model = getattr(values, role), getattr(values, f"{role}_model")
    if not where:
        raise UserError(f"no --{role} is given; say an address (http://…), a folder, a recording.")
    settings = EndpointSettings(
        max_tokens=getattr(values, f"{role}_tokens"),
        connections=values.connections,
        most_requests=values.most_requests,
        most_tokens=values.most_tokens,
        key_variable=getattr(values, f"{role}_key_variable"),
    )
    place = folder / role
    return open_teacher(where, model, settings, cache=place, ledger=place / "spent.jsonl")


def define(values: flags.FlagValues) -> None:
    def text(name: str, default: str, help: str) -> None:
        flags.DEFINE_string(name, default, help, values)

    def number(name: str, default: int, help: str) -> None:
        flags.DEFINE_integer(name, default, help, flag_values=values)

    text("cases", "", "JSON lines with id, question, golden_answers, rounds; layer, label")
    for role, tokens, does in (
        ("teacher", 512, "judges"),
        ("controller", 8192, "labels cases and writes prompts"),
    ):
        text(role, "", f"who {does}: an address (http://…), a policy's folder, a recording")
        text(f"{role}_model", "", f"the {role}'s name at its address")
        text(f"{role}_key_variable", KEY_VARIABLE, f"environment variable of the {role}'s key")
        number(f"{role}_tokens", tokens, f"tokens of one reply of the {role}")
    text("prompts", "", "file of prompts to start from; the shipped ones if not given")
    number("rounds", 3, "rounds of candidates, at most")
    text("axes", ",".join(AXES), "what a candidate may change")
    number("shown", 12, "mistakes that the controller sees")
    number("holdout_per_layer", 32, "cases of each layer that are held out")
    number("seed", 260715, "of the partition, and of the mistakes that are shown")
    number("documents", 5, "documents shown of each search")
    number("connections", 8, "requests at the same time")
    number("most_requests", 0, "the limit on requests, of each of the two; 0 for none")
    number("most_tokens", 0, "the limit on tokens, of each of the two; 0 for none")


entry = cli.program(main, define=define, needs_config=False)

if __name__ == "__main__":
    sys.exit(entry())
