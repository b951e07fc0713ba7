"""Solver rewards by name (`solver.reward`): from a whole group of rollouts to r of each.

A reward sees its group, since some measure a rollout by its neighbours. Correctness y is not
theirs to change: it is kept beside r, and difficulty, pass rates and group kinds read y only.

Shape letters: G group (rollouts of one question).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from zest_jax.registry import Registry
from zest_jax.rewards.format import search_r1_reward, valid_sequence
from zest_jax.rewards.outcome import Outcome
from zest_jax.rewards.tool_cost import tool_aware_reward
from zest_jax.rewards.waypoint import waypoint_reward, waypoints
from zest_jax.text import normalize_answer, tags


@dataclasses.dataclass(frozen=True)
class Group:
    """The rollouts of one question.

    Attributes:
      answers: accepted names of the right answer.
      outcome: y, F1 and whether anything was answered.
      texts: everything after the prompt, of each rollout.
      observations: what its searches brought, of each rollout.
      queries: what it searched for, of each rollout, one a line.
      searches_G: searches of each rollout. int [G].
      well_formed_G: every turn of the rollout keeps to its protocol's grammar. bool [G].
      path: names of each entity of the chain behind the question, in order; () where unknown.
      most_searches: searches that a rollout may make.
    """

    answers: tuple[str, ...]
    outcome: Outcome
    texts: tuple[str, ...]
    observations: tuple[str, ...]
    queries: tuple[str, ...]
    searches_G: np.ndarray
    well_formed_G: np.ndarray
    path: tuple[tuple[str, ...], ...] = ()
    most_searches: int = 0


# A group and the config's group `solver_reward`: r of each rollout, float [G].
SolverReward = Callable[[Group, Any], np.ndarray]

SOLVER_REWARDS: Registry[SolverReward] = Registry("solver reward", "solver.reward")


@SOLVER_REWARDS.register("exact_match")
def exact_match(group: Group, options: Any) -> np.ndarray:
    """r = y."""
    return group.outcome.y_G


@SOLVER_REWARDS.register("strict_exact_match")
def strict_exact_match(group: Group, options: Any) -> np.ndarray:
    """r = y where the rollout is well-formed, else 0 (EviBack's actor reward)."""
    return group.outcome.y_G * group.well_formed_G


@SOLVER_REWARDS.register("f1")
def f1(group: Group, options: Any) -> np.ndarray:
    """r = token F1 of the answer."""
    return group.outcome.f1_G


@SOLVER_REWARDS.register("search_r1_format")
def search_r1_format(group: Group, options: Any) -> np.ndarray:
    """Search-R1's table of correctness by format (`format.search_r1_reward`)."""
    rewards = []
    # Found as the published code finds it: anywhere in the block, within a word too.
    golds = [key for answer in group.answers if (key := normalize_answer(answer))]
    for y, text in zip(group.outcome.y_G, group.texts, strict=True):
        valid, _ = valid_sequence(text)
        blocks = [normalize_answer(block) for block in tags(text, "information")]
        retrieved = any(gold in block for block in blocks for gold in golds)
        rewards.append(
            search_r1_reward(
                bool(y >= 1),
                bool(tags(text, "answer")),
                valid,
                retrieved,
                structure_score=options.structure_score,
                answer_score=options.answer_score,
                retrieval_score=options.retrieval_score,
            )
        )
    return np.array(rewards)


@SOLVER_REWARDS.register("tool_aware")
def tool_aware(group: Group, options: Any) -> np.ndarray:
    """Right answers with fewer redundant searches earn more (ZEST-Search)."""
    return tool_aware_reward(
        group.outcome.y_G,
        group.searches_G,
        form=options.tool_form,
        cost=options.tool_cost,
        most=group.most_searches if options.tool_limit else None,
        scale=options.tool_scale,
    )


@SOLVER_REWARDS.register("waypoint")
def waypoint(group: Group, options: Any) -> np.ndarray:
    """Partial credit for reaching entities of the chain (KG Paths); a task without one has none."""
    entities = waypoints(group.path, group.answers)
    return np.array(
        [
            waypoint_reward(bool(y >= 1), entities, seen, options.waypoint_alpha)
            for y, *seen in zip(group.outcome.y_G, group.observations, group.queries, strict=True)
        ]
    )
