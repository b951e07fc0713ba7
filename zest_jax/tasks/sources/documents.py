"""A passage of the corpus and a number of hops, for proposers that search on from there (Dr. Zero).

Hops are drawn with the weights `source.hop_weights` (published: 4:3:2:1).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from zest_jax.errors import UserError
from zest_jax.tasks.seeds import Seed
from zest_jax.tasks.sources.interface import SOURCES, Fits, hop_counts, too_few
from zest_jax.tasks.types import Passage
from zest_jax.tasks.world import World


class Documents:
    """Passages by row.

    Args:
      passages: the corpus.
      rows: those that may be drawn; None for all.
      sources: source id of each row; a row's passage id where None.
      hop_weights: weight of 1, 2, … hops.
      most_characters: what a document is cut to.
      left_out: source ids that are never drawn.
    """

    def __init__(
        self,
        passages: Sequence[Passage],
        rows: np.ndarray | None,
        sources: Sequence[str] | None,
        hop_weights: tuple[float, ...],
        most_characters: int,
        left_out: frozenset[str] = frozenset(),
    ):
        self.passages, self.rows, self.sources = passages, rows, sources
        self.hop_weights, self.most_characters = hop_weights, most_characters
        self.left_out = left_out

    def draw(self, count: int, rng: np.random.Generator, fits: Fits) -> list[Seed]:
        """See `SeedSource`; a document may come again with another number of hops."""
        hops = hop_counts(count, self.hop_weights, rng)
        seeds: list[Seed] = []
        there = len(self.passages) if self.rows is None else len(self.rows)
        tried = 0
        while len(seeds) < count:
            if tried > 20 * count + 100:
                raise too_few("documents", count, len(seeds))
            tried += 1
            at = int(rng.integers(there))
            row = at if self.rows is None else int(self.rows[at])
            seed = self._seed(row, int(hops[len(seeds)]))
            if seed.source_id not in self.left_out and fits(seed):
                seeds.append(seed)
        return seeds

    def _seed(self, row: int, hops: int) -> Seed:
        passage = self.passages[row]
        source = passage.id if self.sources is None else self.sources[row]
        text = passage.text[: self.most_characters]
        return Seed(
            id=f"{passage.id}#{hops}",
            source_id=source,
            hops=hops,
            fields={
                "hops": str(hops),
                "searches": str(hops - 1),
                "title": passage.title,
                "text": text,
            },
            passages=(Passage(passage.id, passage.title, text),),
            words=(passage.title, f"{hops} hops"),
        )


@SOURCES.register("documents")
def build(config: Any, world: World) -> Documents:
    """Raises: UserError: the corpus cannot be read by row."""
    if not len(world.passages):
        raise UserError(
            "source.kind=documents draws passages, and a retrieval server has none to draw from; "
            "give an index folder (retrieval.index)."
        )
    rows, sources = None, None
    if world.atlas is not None:
        graph, training = world.atlas.graph, np.flatnonzero(world.atlas.train)
        of = {int(row): e for e in training.tolist() for row in graph.passages_of(e)}
        rows = np.array(sorted(of), np.int64)
        sources = [""] * len(world.passages)
        for row, entity in of.items():
            sources[row] = graph.entity_ids[entity]
    return Documents(
        world.passages,
        rows,
        sources,
        tuple(config.source.hop_weights),
        config.source.most_characters,
        world.evaluated_sources,
    )
