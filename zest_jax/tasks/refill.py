"""Refill rules by name (`refill.kind`): what takes the place of refused proposals.

A rule returns as many tasks as are wanted, or fewer. A batch has a fixed shape whatever its number
of tasks, so that a slot without one is what other systems call a dummy row with a mask.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zest_jax.registry import Registry
from zest_jax.tasks.types import Task, task_from_record, task_to_line


@dataclasses.dataclass
class Pool:
    """Questions of earlier steps, with the success rate that the solver had on them.

    Duplicates of a question are kept out, unlike in the published code.
    """

    tasks: dict[str, tuple[Task, float]] = dataclasses.field(default_factory=dict)

    def add(self, task: Task, success: float) -> None:
        self.tasks[task.question] = (task, success)

    def usable(self, most_success: float) -> list[Task]:
        return [task for task, success in self.tasks.values() if success <= most_success]

    def to_json(self) -> list[list[Any]]:
        return [[task_to_line(task), success] for task, success in self.tasks.values()]

    @classmethod
    def from_json(cls, lines: Sequence[Sequence[Any]]) -> "Pool":
        pool = cls()
        for line, success in lines:
            pool.add(task_from_record(json.loads(line), "the replay pool"), float(success))
        return pool


@dataclasses.dataclass(frozen=True)
class Shelf:
    """Where a rule takes tasks from.

    Attributes:
      options: the config's group `refill`.
      more: proposes anew for so many seeds, the n-th time in the step; returns accepted tasks.
      pool: questions of earlier steps.
      labelled: labelled questions for the rule `seed`.
      rng: the only source of chance.
    """

    options: Any
    more: Callable[[int, int], list[Task]]
    pool: Pool
    labelled: Sequence[Task]
    rng: np.random.Generator


Refill = Callable[[int, Shelf], list[Task]]

REFILLS: Registry[Refill] = Registry("refill rule", "refill.kind")


@REFILLS.register("none")
def none(missing: int, shelf: Shelf) -> list[Task]:
    """Nothing: the step has fewer questions."""
    return []


# The same by construction: every batch is padded to its fixed shape and the padding is masked.
REFILLS.register("dummy")(none)


@REFILLS.register("resample")
def resample(missing: int, shelf: Shelf) -> list[Task]:
    """New proposals for the empty slots, `refill.rounds` times at most."""
    tasks: list[Task] = []
    for attempt in range(shelf.options.rounds):
        if len(tasks) == missing:
            break
        tasks += shelf.more(missing - len(tasks), attempt)
    return tasks


@REFILLS.register("replay")
def replay(missing: int, shelf: Shelf) -> list[Task]:
    """Questions of the last steps, drawn at random among those that are hard enough (SSP).

    The pool is emptied every `refill.period` steps: old questions were written for an older solver.
    """
    usable = shelf.pool.usable(shelf.options.most_success)
    order = shelf.rng.permutation(len(usable))[:missing]
    return [usable[i] for i in order]


@REFILLS.register("seed")
def seed(missing: int, shelf: Shelf) -> list[Task]:
    """Labelled questions, which give the proposer no signal (CoEvoKG's fallback)."""
    order = shelf.rng.permutation(len(shelf.labelled))[:missing]
    return [shelf.labelled[i] for i in order]
