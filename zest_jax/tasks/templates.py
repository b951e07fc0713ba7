"""Questions written by template: the phrases of a chain's relations, nested into one another."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from zest_jax.tasks import chains
from zest_jax.tasks.atlas import Atlas
from zest_jax.tasks.types import Chain, Task


def nested_question(
    chain: Chain,
    atlas: Atlas,
    rng: np.random.Generator,
    *,
    first_hop: int = 0,
    names: Mapping[int, str] | None = None,
) -> str:
    """``What is {phrase(rh, ... phrase(r1, e0))}?``, each phrase drawn at random.

    Args:
      first_hop: hops left out at the start; the question then begins at that entity.
      names: entity row -> name to use in place of its label.
    """
    entity = chain.entities[first_hop]
    text = (names or {}).get(entity, atlas.graph.labels[entity])
    for relation in chain.relations[first_hop:]:
        phrases = atlas.phrases[relation]
        text = phrases[int(rng.integers(len(phrases)))].replace("{}", text)
    return f"What is {text}?"


def chain_task(chain: Chain, atlas: Atlas, rng: np.random.Generator, task_id: str) -> Task:
    """The task of a chain: its nested question, answered by the names of its last entity."""
    graph = atlas.graph
    return Task(
        id=task_id,
        question=nested_question(chain, atlas, rng),
        answers=graph.names(chain.entities[-1]),
        hops=chain.hops,
        source_id=graph.entity_ids[chain.entities[0]],
        evidence=tuple(atlas.passage_of(entity).id for entity in chain.entities),
        chain_id=chain.id,
    )


def reveals_answer(task: Task) -> bool:
    """Whether an answer stands in the question, whole words, without regard to case or marks."""
    question = f" {chains.plain(task.question)} "
    return any(f" {chains.plain(answer)} " in question for answer in task.answers)
