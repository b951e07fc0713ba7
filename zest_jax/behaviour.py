"""How a solver behaves before and after: the same questions, answered twice, side by side.

Each measure is one number a question, so that its difference has a paired bootstrap interval.
"Rescued" is a question that was answered wrong and is now right (exact match), "regressed" the
reverse. This is EviBack's behaviour report (arXiv 2607.23955, section 4); the paper's numbers are
valid answers, searches, repeated queries, and 593 rescued against 140 regressed questions.

A question may have several answers on a side (samples): a measure is then their mean, and the
question is right if the majority's answer is. Draws of the bootstrap are of questions.
"""

import collections
import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zest_jax.errors import UserError
from zest_jax.evaluation import Answered
from zest_jax.rollout.trajectories import Finish
from zest_jax.statistics import paired_bootstrap_cis
from zest_jax.text import cover_exact_match, exact_match, majority
from zest_jax.workdir import read_jsonl

# Ends that a limit of the episode forced, not the solver.
FORCED = frozenset(f.name.lower() for f in (Finish.OUT_OF_TURNS, Finish.TOO_LONG))

_SHOWN = 3  # questions that a sentence names


@dataclasses.dataclass(frozen=True)
class Figure:
    """A measure of behaviour.

    Attributes:
      name: key in files.
      title: for people.
      value: of one answer; None where its file is too old to tell.
    """

    name: str
    title: str
    value: Callable[[Answered], float | None]


FIGURES = (
    Figure("em", "exact match", lambda a: a.em),
    Figure("f1", "F1", lambda a: a.f1),
    Figure("cover_em", "cover-EM", lambda a: _covered(a)),
    Figure("valid", "valid answers", lambda a: a.valid),
    Figure("well_formed", "well-formed episodes", lambda a: a.well_formed),
    Figure("searches", "searches a question", lambda a: a.searches),
    Figure("zero_search", "answered without a search", lambda a: a.searches == 0),
    Figure("duplicate_queries", "repeated queries a question", lambda a: a.duplicates),
    Figure(
        "repeating",
        "questions with a repeated query",
        lambda a: None if a.duplicates is None else a.duplicates > 0,
    ),
    Figure(
        "forced_stops",
        "ended by a limit",
        lambda a: None if a.finish is None else a.finish in FORCED,
    ),
    Figure("tokens", "tokens an episode", lambda a: a.tokens),
    Figure("written", "of these, written by the policy", lambda a: a.written),
)

Answers = tuple[Answered, ...]
"""The answers to one question, by the number of their sample."""

Pair = tuple[Answers, Answers]


def _covered(answer: Answered) -> float:
    if answer.cover_em is not None:
        return answer.cover_em
    golds = answer.golden_answers
    return float(cover_exact_match(answer.answer, golds, word_boundary=False))


def compare(
    before: Sequence[Answered], after: Sequence[Answered], draws: int = 10_000
) -> dict[str, Any]:
    """The behaviour report of two sets of answers, as JSON.

    Args:
      before, after: answers to the same questions, in any order.
      draws: of the bootstrap.

    Returns:
      "count"; "figures": {name: {"title", "before", "after", "difference", "ci95"}}, the numbers
      None where one side does not tell; "by_hop": {hops: {"count", name: [before, after]}}, and
      "by_benchmark" likewise, {} where neither side names any;
      "finish": {"before", "after"} with the number of episodes by the reason of their end;
      "rescued" and "regressed": {"count", "questions": [{"id", "question", "golden_answers",
      "before", "after"}]}.

    Raises:
      UserError: the questions, or their accepted answers, are not the same.
    """
    pairs = paired(before, after)
    told: dict[str, Any] = {
        "count": len(pairs),
        "figures": _figures(pairs, draws),
        "by_hop": {
            str(hops): _both([p for p in pairs if _hops(p) == hops])
            for hops in sorted(set(map(_hops, pairs)) - {0})
        },
        "by_benchmark": {
            name: _both([p for p in pairs if _benchmark(p) == name])
            for name in dict.fromkeys(map(_benchmark, pairs))
            if name
        },
        "finish": {
            name: _finishes([answer for pair in pairs for answer in pair[side]])
            for side, name in enumerate(("before", "after"))
        },
    }
    for name, gain in (("rescued", 1), ("regressed", -1)):
        changed = [_change(a, b) for a, b in pairs if _right(b) - _right(a) == gain]
        told[name] = {"count": len(changed), "questions": changed}
    return told


def paired(before: Sequence[Answered], after: Sequence[Answered]) -> list[Pair]:
    """The answers to each question on both sides, in the order of `before`.

    Raises:
      UserError: the questions, or their accepted answers, are not the same.
    """
    if not before or not after:
        raise UserError("there is no answer to compare; give files of evaluated questions.")
    of_before, of_after = _by_question(before), _by_question(after)
    check_counts(of_before.values())
    check_counts(of_after.values())
    shared = of_before.keys() & of_after.keys()
    if of_before.keys() != of_after.keys():
        raise UserError(
            f"the two sides answer different questions: {len(of_before):,} and "
            f"{len(of_after):,}, of which {len(shared):,} are the same; evaluate both "
            "on the same file (--tasks)."
        )
    other = [
        key for key in of_before
        if set(of_before[key][0].golden_answers) != set(of_after[key][0].golden_answers)
    ]  # fmt: skip
    if other:
        named = ", ".join(repr(key[0]) for key in other[:_SHOWN])
        raise UserError(
            f"{len(other):,} questions have other accepted answers on the two sides ({named}"
            f"{', …' if len(other) > _SHOWN else ''}); evaluate both on the same file (--tasks)."
        )
    return [(answers, of_after[key]) for key, answers in of_before.items()]


def check_counts(questions: Iterable[Sequence[Answered]]) -> None:
    """Refuses questions that were answered differently often.

    Raises:
      UserError: how often.
    """
    counts = {len(answers) for answers in questions}
    if len(counts) > 1:
        raise UserError(
            f"some questions have {min(counts)} answers and some {max(counts)}; let the evaluation "
            "come to its end first."
        )


def check_same(
    answers: Sequence[Answered], questions: Sequence[tuple[str, str, Sequence[str]]]
) -> None:
    """Refuses to compare answers with questions that are about to be asked, where they differ.

    Args:
      answers: of an earlier evaluation.
      questions: id, question and accepted answers of each.

    Raises:
      UserError: see `paired`.
    """
    coming = [
        Answered(id, question, list(golds), 0, None, 0.0, 0.0, 0, False, "")
        for id, question, golds in questions
    ]
    paired(answers, coming)


def read_answers(path: str | Path, mode: str = "greedy") -> list[Answered]:
    """The answers of an evaluation.

    Args:
      path: a file of `zest_jax.evaluate --out` or of a run's `evaluation/`, or the run's folder,
        of which the latest evaluation counts.
      mode: "greedy" or "sampled", of a run's file, which holds both.

    Raises:
      UserError: no such file, or one that holds something else.
    """
    path = Path(path)
    if path.is_dir():
        path = _latest(path)
    if not path.exists():
        raise UserError(f"{path}: no such file of evaluated questions, and no folder of a run.")
    out = []
    for number, record in enumerate(read_jsonl(path), 1):
        try:
            if record.pop("mode", mode) == mode:
                out.append(Answered(**record))
        except (TypeError, AttributeError):
            raise UserError(
                f"{path}, line {number} is no answer of an evaluation; write the file with "
                "python -m zest_jax.evaluate --out=FILE."
            ) from None
    if not out:
        raise UserError(f"{path} holds no {mode} answer.")
    _check_whole(path, len(out))
    return out


def _check_whole(path: Path, count: int) -> None:
    """Refuses a file of `zest_jax.evaluate` that has not come to its end."""
    try:
        settings = json.loads(path.with_name(f"{path.name}.settings.json").read_text("utf-8"))
        wanted = settings["questions"] * settings["samples"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # a run's own evaluation, or a copy without its settings
    if count < wanted:
        raise UserError(
            f"{path} has {count:,} of {wanted:,} answers; let its evaluation come to its end first."
        )


def _latest(folder: Path) -> Path:
    files = [p for p in (folder / "evaluation").glob("iteration_*.jsonl")]
    numbered = [(int(p.stem.partition("_")[2]), p) for p in files if p.stem[10:].isdigit()]
    if not numbered:
        raise UserError(f"{folder} holds no evaluation of a run; let it end, or name a file.")
    return max(numbered)[1]


def _by_question(answers: Sequence[Answered]) -> dict[tuple[str, str, int], Answers]:
    """Answers by id, question and occurrence: ids of several data sets may be the same."""
    seen: collections.Counter[tuple[str, str, int]] = collections.Counter()
    out: dict[tuple[str, str, int], list[Answered]] = {}
    for answer in answers:
        same = answer.id, answer.question, answer.sample
        out.setdefault((answer.id, answer.question, seen[same]), []).append(answer)
        seen[same] += 1
    return {key: tuple(sorted(group, key=lambda a: a.sample)) for key, group in out.items()}


def _hops(pair: Pair) -> int:
    return pair[0][0].hops or pair[1][0].hops


def _benchmark(pair: Pair) -> str:
    return pair[0][0].benchmark or pair[1][0].benchmark


def _right(answers: Answers) -> bool:
    if len(answers) == 1:
        return answers[0].em >= 1
    return exact_match(_majority(answers), answers[0].golden_answers)


def _values(figure: Figure, questions: Sequence[Answers]) -> np.ndarray | None:
    values = [[figure.value(answer) for answer in answers] for answers in questions]
    if any(v is None for each in values for v in each):
        return None
    return np.array([np.mean(np.array(each, np.float64)) for each in values])


def _figures(pairs: Sequence[Pair], draws: int) -> dict[str, Any]:
    told: dict[str, Any] = {}
    whole = {}  # figures that both sides tell
    for f in FIGURES:
        before, after = (_values(f, [pair[side] for pair in pairs]) for side in (0, 1))
        told[f.name] = {
            "title": f.title,
            "before": None if before is None else float(before.mean()),
            "after": None if after is None else float(after.mean()),
            "difference": None,
            "ci95": None,
        }
        if before is not None and after is not None:
            told[f.name]["difference"] = float((after - before).mean())
            whole[f.name] = before, after
    before_BF, after_BF = (np.stack([v[side] for v in whole.values()], axis=1) for side in (0, 1))
    intervals = paired_bootstrap_cis(before_BF, after_BF, draws=draws)
    for name, interval in zip(whole, intervals.tolist(), strict=True):
        told[name]["ci95"] = interval
    return told


def _both(pairs: Sequence[Pair]) -> dict[str, Any]:
    told: dict[str, Any] = {"count": len(pairs)}
    for figure in FIGURES:
        sides = [_values(figure, [pair[side] for pair in pairs]) for side in (0, 1)]
        told[figure.name] = [None if v is None else float(v.mean()) for v in sides]
    return told


def _finishes(answers: Sequence[Answered]) -> dict[str, int]:
    return dict(sorted(collections.Counter(a.finish or "not told" for a in answers).items()))


def _change(before: Answers, after: Answers) -> dict[str, Any]:
    first = before[0]
    return {
        "id": first.id,
        "question": first.question,
        "golden_answers": first.golden_answers,
        "before": _majority(before),
        "after": _majority(after),
    }


def _majority(answers: Answers) -> str | None:
    return majority([a.answer for a in answers]) if len(answers) > 1 else answers[0].answer
