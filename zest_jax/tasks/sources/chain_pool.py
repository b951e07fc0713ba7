"""Chains of a pool (`zest_jax.build_chains`), 1 to `world.max_hops` hops in equal shares."""

from typing import Any

import numpy as np

from zest_jax.errors import UserError
from zest_jax.tasks.chain_pool import ChainPool, ChainRecord
from zest_jax.tasks.seeds import Seed
from zest_jax.tasks.sources.interface import SOURCES, Fits, share_of, too_few
from zest_jax.tasks.world import World


class PooledChains:
    """Chains of a pool.

    Args:
      pool: open.
      max_hops: longest chain that is drawn.
      left_out: source ids that are never drawn.
    """

    def __init__(self, pool: ChainPool, max_hops: int, left_out: frozenset[str] = frozenset()):
        self.pool, self.max_hops, self.left_out = pool, max_hops, left_out

    def draw(self, count: int, rng: np.random.Generator, fits: Fits) -> list[Seed]:
        """See `SeedSource`."""
        seeds: list[Seed] = []
        for hops in range(1, self.max_hops + 1):
            share = share_of(hops, count, self.max_hops)
            found: dict[str, Seed] = {}
            for _ in range(8):
                wanted = min(2 * (share - len(found)), self.pool.count(hops) - len(found))
                if len(found) >= share or wanted <= 0:
                    break
                for chain in self.pool.sample(hops, wanted, rng, exclude=found.keys()):
                    seed = pooled_seed(chain)
                    if seed.source_id not in self.left_out and fits(seed):
                        found[seed.id] = seed
            if len(found) < share:
                raise too_few(f"chains of {hops} hop(s)", share, len(found))
            seeds += list(found.values())[:share]
        return [seeds[i] for i in rng.permutation(len(seeds))]


def pooled_seed(chain: ChainRecord) -> Seed:
    """The seed of a pool's chain: its words, its passages, the names of its last entity."""
    words = [chain.source.label]
    for relation, entity in zip(chain.relations, chain.entities[1:], strict=True):
        words += [relation.label, entity.label]
    return Seed(
        id=chain.id,
        source_id=chain.source.id,
        hops=chain.hops,
        fields={
            "chain": " | ".join(words),
            "passages": "".join(f"{passage.render()}\n" for passage in chain.passages),
        },
        passages=chain.passages,
        answers=chain.answer.names,
        words=tuple(words),
        chain_id=chain.id,
        nodes=tuple(entity.names for entity in chain.entities),
    )


@SOURCES.register("chain_pool")
def build(config: Any, world: World) -> PooledChains:
    """Raises: UserError: there is no pool, or a broken one."""
    if not config.source.file:
        raise UserError(
            "source.kind=chain_pool needs a pool of chains: make one with zest_jax.build_chains "
            "and set source.file."
        )
    pool = ChainPool.open(config.source.file)
    for hops in range(1, config.world.max_hops + 1) if config.schedule.iterations else ():
        if not pool.count(hops):
            raise UserError(
                f"{config.source.file} has no chain of {hops} hop(s); lower world.max_hops="
                f"{config.world.max_hops}, or build chains of that length (build_chains --hops)."
            )
    return PooledChains(pool, config.world.max_hops, world.evaluated_sources)
