"""Answers of a solver to a set of tasks, each scored; and their means as a run logs them.

Figures by benchmark with intervals stand in `scores`, comparisons of two sets of answers in
`behaviour`.
"""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zest_jax.errors import UserError
from zest_jax.models.policy import Params
from zest_jax.parallel import hosts
from zest_jax.rollout.sampler import Sampler
from zest_jax.rollout.trajectories import Finish, Trajectories
from zest_jax.statistics import bootstrap_ci, paired_bootstrap_ci
from zest_jax.tasks.episodes import turns_of
from zest_jax.tasks.types import Task
from zest_jax.text import cover_exact_match, exact_match, token_f1
from zest_jax.workdir import read_jsonl, write_jsonl


@dataclasses.dataclass(frozen=True)
class Answered:
    """One answered question.

    Attributes:
      id: the task's.
      question: as asked.
      golden_answers: accepted answers.
      hops: of the task; 0 where its file does not tell.
      answer: what the solver answered; None without a complete answer.
      em: exact match, 0 or 1.
      f1: token F1.
      searches: searches made.
      valid: a complete answer was given.
      text: the whole episode after the prompt.
      queries: queries of its searches. This and what follows is None in older files.
      duplicates: of these, the repeats of an earlier query of the episode.
      finish: why the episode ended: the name of a `Finish` in small letters.
      well_formed: valid, and every turn keeps to the protocol's grammar.
      cover_em: an accepted answer stands inside the answer, 0 or 1 (`text.cover_exact_match`, by
        characters, as published scorers do).
      tokens: of the whole episode, prompt and passages among them.
      written: of these, the policy's own.
      benchmark: the set that the question is of; "" where none is told.
      sample: number of this answer among several to the same question, from 0.
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
    queries: int | None = None
    duplicates: int | None = None
    finish: str | None = None
    well_formed: bool | None = None
    cover_em: float | None = None
    tokens: int | None = None
    written: int | None = None
    benchmark: str = ""
    sample: int = 0

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def answer_tasks(
    sampler: Sampler,
    params: Params,
    tasks: Sequence[Task],
    key: jax.Array,
    temperature: float,
    samples: Sequence[int] | None = None,
) -> list[Answered]:
    """Lets a solver answer every task once.

    Args:
      sampler: of the solver's protocol.
      params: the solver's, all of them.
      tasks: the questions, in any order.
      key: of all draws.
      temperature: 0 is greedy.
      samples: number of each answer among those to its question. Its draws then follow from the
        question and that number, in whatever call it stands; without it, from its place.
    """
    encode = sampler.tokenizer
    prompts = encode(
        [sampler.protocol.prompt.format(question=task.question) for task in tasks],
        add_special_tokens=False,
    )["input_ids"]
    if samples is None:
        episodes = sampler(params, prompts, key, temperature)
    else:
        streams = [stream_of(task, n) for task, n in zip(tasks, samples, strict=True)]
        episodes = sampler(params, prompts, key, temperature, streams)

    def read(rows: Sequence[int]) -> list[Answered]:
        of = slice(rows[0], rows[-1] + 1)
        part = jax.tree.map(lambda x: x[of], episodes)
        return _answered(sampler, tasks[of], part, None if samples is None else samples[of])

    return hosts.share(range(len(tasks)), read)


def _answered(
    sampler: Sampler,
    tasks: Sequence[Task],
    episodes: Trajectories,
    samples: Sequence[int] | None,
) -> list[Answered]:
    """What the episodes of some tasks say, scored."""
    written_N = np.asarray(episodes.mask_NL).sum(axis=1)
    answers, spoken = sampler.answers(episodes), words_of(episodes, sampler)
    formed = well_formed(sampler, spoken, answers)
    out = []
    for n, (task, answer, text) in enumerate(
        zip(tasks, answers, sampler.texts(episodes), strict=True)
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
                queries=int(episodes.asked_N[n]),
                duplicates=int(episodes.duplicates_N[n]),
                finish=Finish(int(episodes.finish_N[n])).name.lower(),
                well_formed=formed[n],
                cover_em=float(cover_exact_match(answer, task.answers, word_boundary=False)),
                tokens=int(episodes.length_N[n]),
                written=int(written_N[n]),
                benchmark=str(task.meta.get("benchmark", "")),
                sample=0 if samples is None else samples[n],
            )
        )
    return out


def stream_of(task: Task, sample: int) -> int:
    """The number, below 2^32, that an answer's draws follow from: a checksum of set, id and sample.

    The samples of one question never share a number: a CRC tells apart what differs in four bytes.
    """
    name = f"{task.meta.get('benchmark', '')}\0{task.id}\0".encode("utf-8", "replace")
    return zlib.crc32(name + sample.to_bytes(4, "big"))


def words_of(episodes: Trajectories, sampler: Sampler) -> list[tuple[str, ...]]:
    """The policy's words of every turn of every episode, without the tokens that end a turn."""
    tokenizer = sampler.tokenizer
    ends = [*sampler.protocol.special, str(tokenizer.eos_token or "")]
    out = turns_of(episodes, tokenizer)
    for mark in filter(None, ends):
        out = [tuple(turn.replace(mark, "") for turn in turns) for turns in out]
    return out


def well_formed(
    sampler: Sampler, words: Sequence[Sequence[str]], answers: Sequence[str | None]
) -> list[bool]:
    """Of each episode: it has a complete answer, and each turn keeps to the protocol's grammar."""
    return [
        answer is not None and all(map(sampler.protocol.well_formed, turns))
        for turns, answer in zip(words, answers, strict=True)
    ]


def summarise(answered: Sequence[Answered], draws: int = 10_000) -> dict[str, Any]:
    """Means over all questions, with the exact match's 95 % interval, and by hop."""
    em = np.array([a.em for a in answered])
    summary = _means(answered)
    summary["em_ci95"] = list(bootstrap_ci(em, draws=draws))
    summary["by_hop"] = {
        str(hops): _means([a for a in answered if a.hops == hops])
        for hops in sorted({a.hops for a in answered if a.hops})
    }
    return summary


def flat_metrics(summary: dict[str, Any], prefix: str = "eval") -> dict[str, float]:
    """The summary as metric keys: eval/em, eval/em_hop2, …"""
    keep = ("em", "f1", "searches", "valid", "zero_search")
    out = {f"{prefix}/{name}": summary[name] for name in keep}
    for hops, means in summary["by_hop"].items():
        out |= {f"{prefix}/{name}_hop{hops}": means[name] for name in ("em", "searches")}
    return out


def both_ways(
    path: Path, count: int, answer: Callable[[str, float], list[Answered]] | None
) -> dict[str, list[Answered]]:
    """Greedy and sampled answers, from the file that an earlier start has left or else made now.

    Args:
      path: the file; written whole.
      count: questions.
      answer: called with "greedy" or "sampled" and a temperature where the file has none; None to
        read only.

    Raises:
      UserError: there is nothing to read, and `answer` is None.
    """
    written, answered = hosts.told(lambda: list(read_jsonl(path))), {}
    for mode, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        done = [r for r in written if r["mode"] == mode]
        if len(done) == count:
            fields = [{k: v for k, v in r.items() if k != "mode"} for r in done]
            answered[mode] = [Answered(**f) for f in fields]
        elif answer is None:
            raise UserError(f"{path} is gone or cut; the run cannot be reported without it.")
        else:
            answered[mode] = answer(mode, temperature)
    write_jsonl(path, [a.to_json() | {"mode": m} for m, group in answered.items() for a in group])
    return answered


def heldout(
    before: tuple[dict[str, Any], Sequence[Answered]],
    after: tuple[dict[str, Any], Sequence[Answered]],
    draws: int,
) -> dict[str, Any]:
    """How a run's solver answers the held-out questions, before and after it.

    Args:
      before: the summary (`summarise`) and the answers that it is of.
      after: likewise, of the same questions in the same order.
      draws: of the bootstrap.
    """
    em_before, em_after = (np.array([a.em for a in answers]) for _, answers in (before, after))
    return {
        "before": before[0],
        "after": after[0],
        "gain": float(np.mean(em_after - em_before)),
        "gain_ci95": list(paired_bootstrap_ci(em_before, em_after, draws=draws)),
    }


def gain_sentence(heldout: dict[str, Any]) -> str:
    """The change of exact match, of what `heldout` gives."""
    (low, high), gain = heldout["gain_ci95"], heldout["gain"]
    return (
        f"held-out EM {heldout['before']['em']:.3f} -> {heldout['after']['em']:.3f} "
        f"(gain {gain:+.3f}, 95 % from {low:+.3f} to {high:+.3f})"
    )


def _means(answered: Sequence[Answered]) -> dict[str, Any]:
    return {
        "count": len(answered),
        "em": float(np.mean([a.em for a in answered])),
        "f1": float(np.mean([a.f1 for a in answered])),
        "searches": float(np.mean([a.searches for a in answered])),
        "valid": float(np.mean([a.valid for a in answered])),
        "zero_search": float(np.mean([a.searches == 0 for a in answered])),
    }
