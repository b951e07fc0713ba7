"""Figures of answered questions: by benchmark, on average, by hop, with bootstrap intervals.

A question may be answered several times; its figure is then the mean over its answers, and two more
tell what several tries are worth: pass@k and the majority's answer.

Shape letters: B questions.
"""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zest_jax.behaviour import FIGURES, check_counts
from zest_jax.errors import UserError
from zest_jax.evaluation import Answered
from zest_jax.statistics import mean_of_means_ci
from zest_jax.text import exact_match, majority

# Figures with an interval; the others are means only.
WITH_INTERVAL = ("em", "f1", "cover_em", "majority")

Question = tuple[Answered, ...]
"""All answers to one question."""


def pass_at_k(samples: int, right: int, k: int) -> float:
    r"""The chance that at least one of k answers is right, from more answers than that.

    .. math::
        1 - \binom{n - c}{k} / \binom{n}{k}

    the share of the draws of k out of the n answers that hold one of the c right ones: unbiased,
    where 1 - (1 - c/n)^k is not.

    Args:
      samples: answers to the question, n.
      right: of these, c.
      k: 1 to n.

    Source: Chen et al. 2021 (arXiv 2107.03374), equation 1.
    """
    if not (0 <= right <= samples and 1 <= k <= samples):
        raise ValueError(f"expected 0 <= c <= n and 1 <= k <= n, got n={samples}, {right=}, {k=}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def by_question(answered: Sequence[Answered]) -> list[Question]:
    """The answers to each question together, by the number of their sample.

    Raises:
      UserError: questions that were answered differently often.
    """
    groups: dict[tuple[str, str, str], list[Answered]] = {}
    for a in answered:
        groups.setdefault((a.benchmark, a.id, a.question), []).append(a)
    check_counts(groups.values())
    return [tuple(sorted(group, key=lambda a: a.sample)) for group in groups.values()]


def score(answered: Sequence[Answered], draws: int = 10_000) -> dict[str, Any]:
    """The figures of a set of answers, as JSON.

    Args:
      answered: as many answers to each question as to any other.
      draws: of the bootstrap.

    Returns:
      "questions", "samples" (answers to each); "benchmarks": {name: row}; "average": the unweighted
      mean of the benchmarks' rows; "by_hop": {hops: row} over the questions that tell, {} where
      none does; "finish": episodes by the reason of their end. A row has "count" (questions) and
      each figure of `behaviour.FIGURES` (None where a file is too old to tell), those of
      `WITH_INTERVAL` with "NAME_ci95"; and for several samples "majority" and "pass": {k: share},
      with "pass_ci95": {k: interval}. Intervals are over the choice of questions.

    Raises:
      UserError: there is no answer, or not as many to each question.
    """
    if not answered:
        raise UserError("there is no answer to score.")
    questions = by_question(answered)
    sets: dict[str, list[Question]] = {}
    hops: dict[int, list[Question]] = {}
    for question in questions:
        sets.setdefault(question[0].benchmark, []).append(question)
        if question[0].hops:
            hops.setdefault(question[0].hops, []).append(question)
    return {
        "questions": len(questions),
        "samples": len(questions[0]),
        "benchmarks": {name: row([chosen], draws) for name, chosen in sets.items()},
        "average": row(list(sets.values()), draws),
        "by_hop": {str(n): row([hops[n]], draws) for n in sorted(hops)},
        "finish": dict(
            sorted(collections.Counter(a.finish or "not told" for a in answered).items())
        ),
    }


def row(sets: Sequence[Sequence[Question]], draws: int = 10_000) -> dict[str, Any]:
    r"""The figures of a set of questions; of several sets, the unweighted mean of theirs.

    .. math::
        \frac{1}{D} \sum_d \frac{1}{B_d} \sum_{b \in d} x_b
    """
    out: dict[str, Any] = {"count": sum(map(len, sets))}
    columns: list[Mapping[str, np.ndarray | None]] = [_figures(questions) for questions in sets]
    for name in columns[0]:
        values = [column[name] for column in columns if column[name] is not None]
        told = len(values) == len(sets)
        out[name] = float(np.mean([v.mean() for v in values])) if told else None  # type: ignore
        if name in WITH_INTERVAL and told:
            out[f"{name}_ci95"] = list(mean_of_means_ci(values, draws))  # type: ignore[arg-type]
    samples = len(sets[0][0])
    if samples > 1:
        out["pass"], out["pass_ci95"] = {}, {}
        for k in ks(samples):
            shares = [[_passed(question, k) for question in questions] for questions in sets]
            out["pass"][str(k)] = float(np.mean([np.mean(share) for share in shares]))
            out["pass_ci95"][str(k)] = list(mean_of_means_ci(shares, draws))
    return out


def ks(samples: int) -> list[int]:
    """The k of which pass@k is told: 1, 2, 4, … and all of the samples."""
    powers = [2**n for n in range(samples.bit_length()) if 2**n < samples]
    return [*powers, samples]


def _passed(question: Question, k: int) -> float:
    return pass_at_k(len(question), sum(a.em >= 1 for a in question), k)


def _figures(questions: Sequence[Question]) -> dict[str, np.ndarray | None]:
    """Every figure of each question [B], None where an answer does not tell it."""
    out: dict[str, np.ndarray | None] = {}
    for figure in FIGURES:
        values = [[figure.value(a) for a in question] for question in questions]
        untold = any(v is None for each in values for v in each)
        out[figure.name] = None if untold else np.asarray(values, np.float64).mean(axis=1)
    if len(questions[0]) > 1:
        out["majority"] = np.array(
            [exact_match(majority([a.answer for a in q]), q[0].golden_answers) for q in questions],
            np.float64,
        )
    return out
