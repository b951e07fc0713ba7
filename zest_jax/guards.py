"""Warnings of a run that goes wrong while all its numbers are finite.

A rule watches one metric of a role over the last N steps in which it was measured (`guards.steps`)
and is followed by one sentence: what was seen, what usually causes it, which field to turn. The
same rule speaks of the same metric at most once in `guards.again` steps. Nothing is stopped.

What the rules remember follows from the metrics alone, so a resumed run, which reads them again,
warns as one that was never stopped. docs/guards.md has the table.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

ROLES = ("solver", "proposer")


@dataclasses.dataclass(frozen=True)
class Warned:
    """A warning that was given.

    Attributes:
      step: after which.
      rule: its name.
      key: the metric.
      figure: what the rule made of it, which is at its bound or beyond.
      bound: the config's.
      text: the sentence.
    """

    step: int
    rule: str
    key: str
    figure: float
    bound: float
    text: str


class Seen:
    """What is remembered of a metric: its first N values, its last N, its best mean over N."""

    def __init__(self, steps: int):
        self.first: list[float] = []
        self.last: collections.deque[float] = collections.deque(maxlen=steps)
        self.best = -math.inf
        self.count = 0

    def add(self, value: float) -> None:
        """One more value."""
        self.count += 1
        self.last.append(value)
        steps = self.last.maxlen or 0
        if len(self.first) < steps:
            self.first.append(value)
        if len(self.last) == steps:
            self.best = max(self.best, self.mean)

    @property
    def full(self) -> bool:
        """Whether there are N values."""
        return len(self.last) == self.last.maxlen

    @property
    def mean(self) -> float:
        """Of the last N."""
        return sum(self.last) / len(self.last)

    @property
    def growth(self) -> float:
        """The mean of the last N over that of the first N; 1 until they are apart."""
        first = sum(self.first) / len(self.first)
        apart = self.count >= 2 * (self.last.maxlen or 0)
        return self.mean / first if apart and first > 0 else 1.0

    @property
    def rest(self) -> float:
        """The mean of the last N over the best mean of any N; 1 where that is 0."""
        return self.mean / self.best if self.best > 0 else 1.0


@dataclasses.dataclass(frozen=True)
class Rule:
    """One thing that goes wrong.

    Attributes:
      name: of the rule.
      metric: what it watches, after the role.
      option: the field of `guards` with its bound; 0 turns the rule off.
      figure: of what was seen.
      says: what was seen; may hold {key}, {figure}, {bound}, {mean} and {steps}.
      cause: what usually causes it.
      turn: which fields to turn; may hold {role}.
      low: fires at the bound and below, not at it and above.
      within: the bound from the option, where it is not the option itself.
      roles: whose metric.
    """

    name: str
    metric: str
    option: str
    figure: Callable[[Seen], float]
    says: str
    cause: str
    turn: str
    low: bool = False
    within: Callable[[float], float] = float
    roles: tuple[str, ...] = ROLES


def _mean(seen: Seen) -> float:
    return seen.mean


RULES = (
    Rule(
        "constant_reward",
        "reward",
        "reward_spread",
        lambda seen: max(seen.last) - min(seen.last),
        "{key} has stayed at {mean:.3g} for {steps} steps",
        "no rollout differs from the others: all fail (answers are never well-formed, the task is "
        "too hard) or all succeed",
        "look at {role}.action_length, {role}.protocol and the reward's parts, or draw harder or "
        "easier questions",
        low=True,
    ),
    Rule(
        "kl",
        "kl",
        "kl",
        _mean,
        "{key} was {figure:.3g} over {steps} steps (bound {bound:g})",
        "an update moves the policy far from the one that sampled: too large a learning rate, or "
        "too many updates on one batch",
        "lower {role}.learning_rate, solver.updates_per_batch or {role}.clip_high",
    ),
    Rule(
        "kl_to_reference",
        "kl_to_reference",
        "kl_to_reference",
        _mean,
        "{key} was {figure:.3g} over {steps} steps (bound {bound:g})",
        "the policy leaves the one that it began as: the penalty is too weak for the learning "
        "rate, or the reward can be had without the task",
        "raise {role}.kl_weight or lower {role}.learning_rate, and read what is rewarded",
    ),
    Rule(
        "longer",
        "length",
        "length_ratio",
        lambda seen: seen.growth,
        "{key} has become {figure:.3g} times what it was at first, {mean:.0f} tokens (bound "
        "{bound:g})",
        "the policy writes on without coming to an end, often repeating itself, where nothing "
        "pays for an end",
        "lower {role}.learning_rate or {role}.action_length, or pay for the format",
    ),
    Rule(
        "shorter",
        "length",
        "length_ratio",
        lambda seen: seen.growth,
        "{key} has become {figure:.3g} times what it was at first, {mean:.0f} tokens (bound "
        "{bound:.3g})",
        "thought and searches are dropped, where a guess is paid as well",
        "lower {role}.learning_rate, raise {role}.kl_weight, or draw questions that cannot be "
        "guessed",
        low=True,
        within=lambda ratio: 1 / ratio,
    ),
    Rule(
        "valid",
        "valid",
        "valid_share",
        lambda seen: seen.rest,
        "{key} has fallen to {mean:.3g}, {figure:.3g} of its best (bound {bound:g})",
        "the policy forgets its format: too large a learning rate, or a reward that does not need "
        "it",
        "lower {role}.learning_rate, raise {role}.kl_weight, or pay for the format "
        "(reward.weights.format, solver.reward=search_r1_format)",
        low=True,
    ),
    Rule(
        "all_wrong",
        "groups_all_wrong",
        "same_groups",
        lambda seen: min(seen.last),
        "{key} was at least {figure:.3g} in {steps} steps (bound {bound:g})",
        "nearly no group has a right answer, and such groups teach nothing: the questions are too "
        "hard, or their answers wrong",
        "raise solver.group_size, solver.searches or retrieval.top_k, draw fewer hops "
        "(world.max_hops, source.hop_weights), or set fallback.enabled=True",
        roles=("solver",),
    ),
    Rule(
        "all_right",
        "groups_all_right",
        "same_groups",
        lambda seen: min(seen.last),
        "{key} was at least {figure:.3g} in {steps} steps (bound {bound:g})",
        "nearly every answer is right, and such groups teach nothing: the questions are too easy, "
        "or give their answers away (proposer/leakage)",
        "pay the proposer for difficulty (reward.weights.difficulty), draw more hops "
        "(source.hop_weights), or add the gates leakage and closed_book",
        roles=("solver",),
    ),
    Rule(
        "entropy",
        "entropy",
        "entropy",
        _mean,
        "{key} was {figure:.3g} nats over {steps} steps (bound {bound:g})",
        "the policy has settled on one way to write, so that the rollouts of a group are alike",
        "lower {role}.learning_rate, raise {role}.clip_high, {role}.temperature or "
        "{role}.kl_weight",
        low=True,
    ),
    Rule(
        "mismatch",
        "exp_abs_delta",
        "mismatch",
        _mean,
        "{key} was {figure:.4g} over {steps} steps (bound {bound:g})",
        "sampler and trainer give the same tokens other probabilities: rounding in a small "
        "compute type, another attention kernel, or several updates on one batch",
        "compare with policy.dtype=float32 and policy.attention=xla; lower "
        "solver.updates_per_batch",
    ),
    Rule(
        "hit_limit",
        "hit_limit",
        "hit_limit",
        _mean,
        "{key} was {figure:.3g} over {steps} steps (bound {bound:g})",
        "episodes are cut off before their answer, and the reward calls them wrong",
        "raise {role}.action_length, {role}.searches or {role}.observation_length",
    ),
)


class Guards:
    """Watches the metrics of a run.

    Args:
      options: the config's group `guards`.
      records: metrics of what was done before, in order; they are seen again in silence.
    """

    def __init__(self, options: Any, records: Iterable[Mapping[str, Any]] = ()):
        self.options = options
        self.told: list[Warned] = []
        self._seen: dict[str, Seen] = {}
        self._at: dict[tuple[str, str], int] = {}
        for record in records:
            self.see(record["step"], record)

    def see(self, step: int, record: Mapping[str, Any]) -> list[Warned]:
        """The warnings that a step's metrics give rise to; they are added to `told`."""
        new = []
        for role in ROLES:
            for rule in RULES:
                key = f"{role}/{rule.metric}"
                value = record.get(key)
                bound = float(self.options[rule.option])
                if role not in rule.roles or not bound or value is None:
                    continue
                if not math.isfinite(value):
                    continue
                seen = self._seen.setdefault(f"{rule.name} {key}", Seen(self.options.steps))
                seen.add(float(value))
                warned = self._judge(rule, role, seen, step)
                if warned is not None:
                    new.append(warned)
        self.told += new
        return new

    def _judge(self, rule: Rule, role: str, seen: Seen, step: int) -> Warned | None:
        if not seen.full:
            return None
        figure, bound = rule.figure(seen), rule.within(float(self.options[rule.option]))
        if figure > bound if rule.low else figure < bound:
            return None
        key = f"{role}/{rule.metric}"
        last = self._at.get((rule.name, key))
        if last is not None and step - last < self.options.again:
            return None
        self._at[rule.name, key] = step
        says = rule.says.format(
            key=key, figure=figure, bound=bound, mean=seen.mean, steps=self.options.steps
        )
        text = f"warning, step {step}: {says}; usually {rule.cause}. {_first(rule.turn, role)}."
        return Warned(step, rule.name, key, figure, bound, text)


def _first(turn: str, role: str) -> str:
    text = turn.format(role=role)
    return text[0].upper() + text[1:]
