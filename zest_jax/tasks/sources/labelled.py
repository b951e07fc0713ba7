"""Questions that come with their answers (Search-R1): a file, or templates over a world's facts."""

from typing import Any

import numpy as np

from zest_jax.errors import UserError
from zest_jax.tasks.sources.interface import SOURCES, share_of
from zest_jax.tasks.templates import chain_task, reveals_answer
from zest_jax.tasks.types import Task, read_tasks
from zest_jax.tasks.world import World


class Labelled:
    """A fixed list of tasks."""

    def __init__(self, tasks: list[Task]):
        self._tasks = tasks

    def tasks(self) -> list[Task]:
        """See `TaskSource`."""
        return self._tasks


def without_evaluated(tasks: list[Task], world: World) -> list[Task]:
    """The tasks that share neither source nor question with the evaluation."""
    return [
        task
        for task in tasks
        if task.source_id not in world.evaluated_sources and not world.evaluates(task.question)
    ]


def template_tasks(world: World, count: int, max_hops: int, seed: int) -> list[Task]:
    """Nested questions of training chains, evenly over the hops; none reveals its answer."""
    atlas = world.atlas
    assert atlas is not None
    rng = np.random.default_rng([seed, *b"labelled"])
    tasks: dict[str, Task] = {}
    for hops in range(1, max_hops + 1):
        share = share_of(hops, count, max_hops)
        for chain in atlas.sample_chains(hops, share, rng, split="train"):
            task = chain_task(chain, atlas, rng, f"labelled-{chain.id}")
            if not reveals_answer(task):
                tasks.setdefault(task.question, task)
    return list(tasks.values())


@SOURCES.register("labelled")
def build(config: Any, world: World) -> Labelled:
    """The file `source.file` in FlashRAG's format, else templates over the world's facts.

    Raises:
      UserError: there is neither, or nothing is left beside the evaluation.
    """
    if config.source.file:
        tasks = list(read_tasks(config.source.file))
    elif world.atlas is not None:
        tasks = template_tasks(world, config.schedule.tasks, config.world.max_hops, config.seed)
    else:
        raise UserError("source.kind=labelled needs a file of questions: set source.file.")
    kept = without_evaluated(tasks, world)
    if not kept:
        raise UserError("every question of the source belongs to the evaluation as well.")
    return Labelled(kept)
