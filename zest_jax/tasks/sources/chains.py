"""Chains of a world's own knowledge graph, 1 to `world.max_hops` hops in equal shares."""

from typing import Any

import numpy as np

from zest_jax.errors import UserError
from zest_jax.tasks.atlas import Atlas
from zest_jax.tasks.scripts import chain_words
from zest_jax.tasks.seeds import Seed
from zest_jax.tasks.sources.interface import SOURCES, Fits, share_of
from zest_jax.tasks.types import Chain
from zest_jax.tasks.world import World


class Chains:
    """Training chains of an atlas.

    Args:
      atlas: the world's facts.
      max_hops: longest chain.
      left_out: source ids that are never drawn.
    """

    def __init__(self, atlas: Atlas, max_hops: int, left_out: frozenset[str] = frozenset()):
        self.atlas, self.max_hops, self.left_out = atlas, max_hops, left_out

    def draw(self, count: int, rng: np.random.Generator, fits: Fits) -> list[Seed]:
        """See `SeedSource`."""
        seeds: list[Seed] = []
        for hops in range(1, self.max_hops + 1):
            share = share_of(hops, count, self.max_hops)
            found = self._fitting(hops, share, rng, fits)
            for _ in range(8):
                if len(found) >= share:
                    break
                found |= self._fitting(hops, 2 * (share - len(found)), rng, fits)
            if len(found) < share:
                raise UserError(
                    f"hardly a chain of {hops} hops fits proposer.prompt_length; raise it, lower "
                    "world.max_hops or shorten the passages."
                )
            seeds += list(found.values())[:share]
        return [seeds[i] for i in rng.permutation(len(seeds))]

    def _fitting(
        self, hops: int, count: int, rng: np.random.Generator, fits: Fits
    ) -> dict[str, Seed]:
        drawn = self.atlas.sample_chains(hops, count, rng, split="train")
        seeds = (chain_seed(chain, self.atlas) for chain in drawn)
        kept = (seed for seed in seeds if seed.source_id not in self.left_out)
        return {seed.id: seed for seed in kept if fits(seed)}


def chain_seed(chain: Chain, atlas: Atlas) -> Seed:
    """The seed of an atlas chain: its words, its passages, the names of its last entity."""
    passages = tuple(atlas.passage_of(entity) for entity in chain.entities)
    words = tuple(chain_words(chain, atlas))
    return Seed(
        id=chain.id,
        source_id=atlas.graph.entity_ids[chain.entities[0]],
        hops=chain.hops,
        fields={
            "chain": " | ".join(words),
            "passages": "".join(f"{passage.render()}\n" for passage in passages),
        },
        passages=passages,
        answers=atlas.graph.names(chain.entities[-1]),
        words=words,
        chain_id=chain.id,
        nodes=tuple(atlas.graph.names(entity) for entity in chain.entities),
    )


@SOURCES.register("chains")
def build(config: Any, world: World) -> Chains:
    """Raises: UserError: the world has no facts."""
    if world.atlas is None:
        raise UserError(
            "source.kind=chains walks through the facts of a world folder, and this run has an "
            "index only; build chains with zest_jax.build_chains and set source.kind=chain_pool."
        )
    return Chains(world.atlas, config.world.max_hops, world.evaluated_sources)
