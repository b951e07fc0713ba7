"""Answers to write questions for, backwards (SSP): from a file, or the entities of a world.

A line of the file has `ground_truth` (or `answer`, or `golden_answers`), and may have an `id`,
`aliases` and `search_turns`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zest_jax.errors import UserError
from zest_jax.tasks.seeds import Seed
from zest_jax.tasks.sources.interface import SOURCES, Fits, hop_counts, too_few
from zest_jax.tasks.types import read_records
from zest_jax.tasks.world import World


class Answers:
    """A fixed set of answers.

    Args:
      answers: (id, accepted names, searches asked for or 0) of each.
      hop_weights: weights of 1, 2, … searches where an answer asks for none of its own.
    """

    def __init__(
        self, answers: Sequence[tuple[str, tuple[str, ...], int]], hop_weights: tuple[float, ...]
    ):
        self.answers, self.hop_weights = answers, hop_weights

    def draw(self, count: int, rng: np.random.Generator, fits: Fits) -> list[Seed]:
        """See `SeedSource`; answers are all different as long as there are enough."""
        hops = hop_counts(count, self.hop_weights, rng)
        seeds: list[Seed] = []
        order: list[int] = []
        for _ in range(4 * count + len(self.answers)):
            if len(seeds) == count:
                return seeds
            order = order or rng.permutation(len(self.answers)).tolist()
            seed = self._seed(order.pop(), int(hops[len(seeds)]))
            if fits(seed):
                seeds.append(seed)
        if len(seeds) == count:
            return seeds
        raise too_few("answers", count, len(seeds))

    def _seed(self, at: int, hops: int) -> Seed:
        name, accepted, searches = self.answers[at]
        hops = searches or hops
        return Seed(
            id=f"{name}#{hops}",
            source_id=name,
            hops=hops,
            fields={"answer": accepted[0], "searches": str(hops), "hops": str(hops)},
            answers=accepted,
            words=(accepted[0], f"{hops} searches"),
        )


def read_answers(path: str | Path) -> list[tuple[str, tuple[str, ...], int]]:
    """The answers of a JSON-lines file.

    Raises:
      UserError: file, line and what was expected.
    """
    answers = []
    for number, (record, where) in enumerate(read_records(path, "answers")):
        given = record.get("ground_truth", record.get("answer", record.get("golden_answers")))
        names = [given] if isinstance(given, str) else given
        aliases = record.get("aliases", [])
        names = [*names, *aliases] if isinstance(names, list) and isinstance(aliases, list) else []
        if not names or not all(isinstance(name, str) and name.strip() for name in names):
            raise UserError(
                f"{where}: 'ground_truth' must be the answer, a text (or a list of its names)."
            )
        searches = record.get("search_turns", 0)
        if not isinstance(searches, int) or isinstance(searches, bool) or searches < 0:
            raise UserError(f"{where}: 'search_turns' must be a whole number of searches.")
        answers.append((str(record.get("id", number)), tuple(names), searches))
    return answers


@SOURCES.register("answers")
def build(config: Any, world: World) -> Answers:
    """The file `source.file`, else the training entities of the world that a fact leads to.

    Raises:
      UserError: there is neither.
    """
    if config.source.file:
        answers = read_answers(config.source.file)
    elif world.atlas is not None:
        graph, training = world.atlas.graph, world.atlas.train
        tails = np.unique(graph.tails[training[graph.heads] & training[graph.tails]])
        answers = [(graph.entity_ids[e], graph.names(e), 0) for e in tails.tolist()]
    else:
        raise UserError("source.kind=answers needs a file of answers: set source.file.")
    most = config.proposer.searches
    for name, _, searches in answers:
        if searches > most:
            raise UserError(
                f"{config.source.file}: the answer {name} asks for {searches} searches, and a "
                f"proposal may have proposer.searches={most}; raise it or lower 'search_turns'."
            )
    kept = [answer for answer in answers if answer[0] not in world.evaluated_sources]
    if not kept:
        raise UserError("every answer of the source belongs to a question of the evaluation.")
    return Answers(kept, tuple(config.source.hop_weights))
