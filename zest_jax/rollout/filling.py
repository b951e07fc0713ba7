"""Many new tokens at once: prompts, passages and corrections run through the policy into the cache.

Shape letters: S slots, C chunk, W slots of a block, N tokens of a block.
"""

import jax
import jax.numpy as jnp

from zest_jax.models.cache import Cache
from zest_jax.models.policy import Block, Policy
from zest_jax.rollout.state import RolloutSpec


def fill_cache(
    spec: RolloutSpec,
    policy: Policy,
    layers: list[Block],
    cache: Cache,
    chunk_SC: jax.Array,
    start_S: jax.Array,
    fill_S: jax.Array,
) -> Cache:
    """Runs fill_S tokens of each slot's chunk through the policy, block by block.

    Slots are taken in order of how many tokens they bring, and blocks without any are left out,
    so that the cost follows the new tokens and not the number of slots.
    """
    S, N = spec.slots, spec.block_tokens
    W = spec.block_slots if S % spec.block_slots == 0 else S
    order_S = jnp.argsort(-fill_S, stable=True)

    def block(i: jax.Array, cache: Cache) -> Cache:
        slot_W = jax.lax.dynamic_slice(order_S, (i * W,), (W,))
        ids_WC, start_W = chunk_SC[slot_W], start_S[slot_W]

        def part(j: jax.Array, rows: Cache) -> Cache:
            ids_WN = jax.lax.dynamic_slice(ids_WC, (0, j * N), (W, N))
            return policy.extend(layers, rows, ids_WN, start_W + j * N)[1]

        parts = -(-jnp.max(fill_S[slot_W]) // N)
        rows = jax.tree.map(lambda x: x[slot_W], cache)
        rows = jax.lax.fori_loop(0, parts, part, rows)
        return jax.tree.map(lambda x, row: x.at[slot_W].set(row, unique_indices=True), cache, rows)

    return jax.lax.fori_loop(0, -(-jnp.sum(fill_S > 0) // W), block, cache)
