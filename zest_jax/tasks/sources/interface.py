"""What a task source is."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from zest_jax.errors import UserError
from zest_jax.registry import Registry
from zest_jax.tasks.seeds import Seed
from zest_jax.tasks.types import Task
from zest_jax.tasks.world import World

Fits = Callable[[Seed], bool]
"""Whether a seed's prompt is short enough for the proposer."""


@runtime_checkable
class SeedSource(Protocol):
    """Gives a proposer things to ask about."""

    def draw(self, count: int, rng: np.random.Generator, fits: Fits) -> list[Seed]:
        """So many seeds, all different as far as the source goes, in mixed order.

        Raises:
          UserError: there are too few, or too few that fit.
        """
        ...


@runtime_checkable
class TaskSource(Protocol):
    """Gives a solver questions that are labelled already."""

    def tasks(self) -> list[Task]:
        """All of them, in a fixed order."""
        ...


SOURCES: Registry[Callable[[Any, World], SeedSource | TaskSource]] = Registry(
    "task source", "source.kind"
)
"""Builders of a config and a world."""


def hop_counts(count: int, weights: tuple[float, ...], rng: np.random.Generator) -> np.ndarray:
    """Hop counts (from 1) of `count` seeds, drawn with these weights. int64 [count]."""
    shares = np.asarray(weights, np.float64)
    return 1 + rng.choice(len(shares), size=count, p=shares / shares.sum())


def share_of(hops: int, count: int, max_hops: int) -> int:
    """Seeds of one hop count where `count` are spread evenly over 1 .. `max_hops`."""
    return count * hops // max_hops - count * (hops - 1) // max_hops


def too_few(what: str, wanted: int, there: int) -> UserError:
    """The error of a source that runs dry."""
    return UserError(
        f"the source has {there} {what} that fit, and {wanted} are asked for; raise "
        "proposer.prompt_length, lower what a step draws, or give a larger source."
    )
