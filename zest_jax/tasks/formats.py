"""Format scores by name: what a config calls `proposer.format`."""

import dataclasses
from collections.abc import Callable
from typing import Any

from zest_jax import text
from zest_jax.registry import Registry
from zest_jax.rewards.format import dr_free_format, dr_zero_format
from zest_jax.tasks.seeds import Written

# A score in [0, 1] and its parts by name, of a written proposal and the config's group `gates`.
Format = Callable[[Written, Any], tuple[float, dict[str, float]]]

FORMATS: Registry[Format] = Registry("format score", "proposer.format")


@FORMATS.register("dr_free")
def dr_free(written: Written, options: Any) -> tuple[float, dict[str, float]]:
    """Dr. Free's four equal parts: pair readable, no leak, a thought, the target as answer."""
    parsed = written.parsed
    parts = dr_free_format(parsed.question, parsed.answer, parsed.think, written.seed.answers)
    return parts.score, _numbers(parts)


@FORMATS.register("dr_zero")
def dr_zero(written: Written, options: Any) -> tuple[float, dict[str, float]]:
    """Dr. Zero's integrity times the mean of 1, thoughts, searches and a short grounded answer.

    With `gates.substring_match` (the published code) answers are looked for without regard to word
    boundaries; without it, as whole words.
    """
    parsed = written.parsed
    evidence = "\n".join(
        f"{passage.title}\n{passage.text}" for part in written.evidence for passage in part
    )
    parts = dr_zero_format(
        parsed.question,
        next(iter(written.answers), None),
        hops=written.seed.hops,
        turns=written.turns,
        evidence=evidence,
        calls=written.calls,
        responses=written.searches,
    )
    if not options.substring_match:
        names = written.answers
        leaks = text.contains_any(parsed.question or "", names)
        known = text.normalize_answer(next(iter(names), "")) in ("yes", "no")
        grounded = known or text.contains_any(evidence, names)
        parts = dataclasses.replace(
            parts,
            integrity=bool(parsed.question and names) and not leaks,
            answer=_shortness(names) if grounded else 0.0,
        )
    return parts.score, _numbers(parts)


@FORMATS.register("pair")
def pair(written: Written, options: Any) -> tuple[float, dict[str, float]]:
    """1 where question and answer can be read, else 0."""
    score = float(written.parsed.parseable)
    return score, {"pair": score}


def _shortness(answers: tuple[str, ...]) -> float:
    words = len(text.normalize_answer(next(iter(answers), "")).split())
    return 0.0 if words == 0 else 1.0 if words <= 5 else 0.5 if words <= 10 else 0.0


def _numbers(parts: Any) -> dict[str, float]:
    return {name: float(value) for name, value in dataclasses.asdict(parts).items()}
