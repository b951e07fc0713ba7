"""Scores of a solver on a set of tasks: exact match, F1, searches, valid answers, by hop."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from zest_jax.models.policy import Params
from zest_jax.rollout.sampler import Sampler
from zest_jax.statistics import bootstrap_ci
from zest_jax.tasks.types import Task
from zest_jax.text import exact_match, token_f1


@dataclasses.dataclass(frozen=True)
class Answered:
    """One answered question.

    Attributes:
      id: the task's.
      question: as asked.
      golden_answers: accepted answers.
      hops: of the task.
      answer: what the solver answered; None without a complete answer.
      em: exact match, 0 or 1.
      f1: token F1.
      searches: searches made.
      valid: a complete answer was given.
      text: the whole episode after the prompt.
    """

    id: str
    question: str
    golden_answers: list[str]
    hops: int
    answer: str | None
    em: float
    f1: float
    searches: int
    valid: bool
    text: str

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def answer_tasks(
    sampler: Sampler, params: Params, tasks: Sequence[Task], key: jax.Array, temperature: float
) -> list[Answered]:
    """Lets a solver answer every task once."""
    encode = sampler.tokenizer
    prompts = encode(
        [sampler.protocol.prompt.format(question=task.question) for task in tasks],
        add_special_tokens=False,
    )["input_ids"]
    episodes = sampler(params, prompts, key, temperature)
    out = []
    for n, (task, answer, text) in enumerate(
        zip(tasks, sampler.answers(episodes), sampler.texts(episodes), strict=True)
    ):
        out.append(
            Answered(
                id=task.id,
                question=task.question,
                golden_answers=list(task.answers),
                hops=task.hops,
                answer=answer,
                em=float(exact_match(answer, task.answers)),
                f1=float(token_f1(answer, task.answers)),
                searches=int(episodes.searches_N[n]),
                valid=answer is not None,
                text=text,
            )
        )
    return out


def summarise(answered: Sequence[Answered], draws: int = 10_000) -> dict[str, Any]:
    """Means over all questions, with the exact match's 95 % interval, and by hop."""
    em = np.array([a.em for a in answered])
    summary = _means(answered)
    summary["em_ci95"] = list(bootstrap_ci(em, draws=draws))
    summary["by_hop"] = {
        str(hops): _means([a for a in answered if a.hops == hops])
        for hops in sorted({a.hops for a in answered})
    }
    return summary


def flat_metrics(summary: dict[str, Any], prefix: str = "eval") -> dict[str, float]:
    """The summary as metric keys: eval/em, eval/em_hop2, …"""
    keep = ("em", "f1", "searches", "valid", "zero_search")
    out = {f"{prefix}/{name}": summary[name] for name in keep}
    for hops, means in summary["by_hop"].items():
        out |= {f"{prefix}/{name}_hop{hops}": means[name] for name in ("em", "searches")}
    return out


def _means(answered: Sequence[Answered]) -> dict[str, Any]:
    return {
        "count": len(answered),
        "em": float(np.mean([a.em for a in answered])),
        "f1": float(np.mean([a.f1 for a in answered])),
        "searches": float(np.mean([a.searches for a in answered])),
        "valid": float(np.mean([a.valid for a in answered])),
        "zero_search": float(np.mean([a.searches == 0 for a in answered])),
    }
