"""Many new tokens at once: prompts, passages and corrections run through the policy into the cache.

A prompt that several episodes share (a group's) goes through the policy once: the others copy its
keys and values, from the slot that has just been filled or from one that an earlier episode of the
group had.

Shape letters: S slots, C chunk, W slots of a block, N tokens of a block or episodes, P prompt
length.
"""

import dataclasses

import jax
import jax.numpy as jnp

from zest_jax.models.attention_tiles import Tiles, tile_tokens
from zest_jax.models.cache import Cache, copy_prefix
from zest_jax.models.config import PolicyConfig
from zest_jax.models.policy import Block, Policy
from zest_jax.rollout.state import RolloutSpec


@dataclasses.dataclass(frozen=True)
class Sharing:
    """Which slots that take a prompt need not run it through the policy.

    Attributes:
      held_S: True where a slot's cache held the same prompt before this pass.
      holder_S: such a slot.
      follows_S: True where another slot takes the same prompt in this pass, and runs it.
      leader_S: that slot.
    """

    held_S: jax.Array
    holder_S: jax.Array
    follows_S: jax.Array
    leader_S: jax.Array


def share_prompts(
    prompt_NP: jax.Array,
    prompt_length_N: jax.Array,
    before_S: jax.Array,
    episode_S: jax.Array,
    taken_S: jax.Array,
) -> Sharing:
    """Finds the slots that may copy a prompt; neighbours in the queue with equal ids share one.

    Args:
      prompt_NP: the queue.
      prompt_length_N: its lengths.
      before_S: episode that each slot had before this pass, N for none; its prompt's keys and
        values are in the slot's cache still.
      episode_S: episode that each slot has from now on.
      taken_S: slots that have just taken theirs.
    """
    N, S = len(prompt_length_N), len(taken_S)
    differs_N = jnp.any(prompt_NP[1:] != prompt_NP[:-1], axis=1)
    differs_N |= prompt_length_N[1:] != prompt_length_N[:-1]
    number_N = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(differs_N, dtype=jnp.int32)])
    before_S = jnp.where(before_S < N, number_N[jnp.minimum(before_S, N - 1)], -1)
    now_S = jnp.where(taken_S, number_N[jnp.minimum(episode_S, N - 1)], -2)
    same_SS = now_S[:, None] == before_S
    held_S = jnp.any(same_SS, axis=1)
    # Slots take episodes in order, so the first of equals is the first in the queue.
    leader_S = jnp.argmax(now_S[:, None] == now_S, axis=1)
    follows_S = taken_S & ~held_S & (leader_S != jnp.arange(S))
    return Sharing(held_S, jnp.argmax(same_SS, axis=1), follows_S, leader_S)


def copy_prompts(
    config: PolicyConfig,
    cache: Cache,
    source_S: jax.Array,
    into_S: jax.Array,
    length: int,
    axes: tuple[str, ...] = (),
) -> Cache:
    """`copy_prefix`, left out where no slot wants one (on any of the shards over `axes`)."""
    # A loop of one turn or none works in place, where a conditional may copy the cache.
    return jax.lax.fori_loop(
        0,
        _most(jnp.any(into_S).astype(jnp.int32), axes),
        lambda _, cache: copy_prefix(config, cache, source_S, into_S, length),
        cache,
    )


def fill_cache(
    spec: RolloutSpec,
    policy: Policy,
    layers: list[Block],
    cache: Cache,
    chunk_SC: jax.Array,
    start_S: jax.Array,
    fill_S: jax.Array,
    axes: tuple[str, ...] = (),
) -> Cache:
    """Runs fill_S tokens of each slot's chunk through the policy, block by block.

    Slots are taken in order of how many tokens they bring, and blocks without any are left out,
    so that the cost follows the new tokens and not the number of slots. With `axes`, shards make
    as many turns as the one with the most: what a slot without new tokens is given then is its own
    last token again, and rubbish behind it.
    """
    if policy.config.decoding == "pallas":
        return _fill_tiles(spec, policy, layers, cache, chunk_SC, start_S, fill_S, axes)
    S, N = spec.slots, spec.block_tokens
    W = spec.block_slots if S % spec.block_slots == 0 else S
    order_S = jnp.argsort(-fill_S, stable=True)

    def block(i: jax.Array, cache: Cache) -> Cache:
        slot_W = jax.lax.dynamic_slice(order_S, (i * W,), (W,))
        ids_WC, start_W = chunk_SC[slot_W], start_S[slot_W]

        def part(j: jax.Array, rows: Cache) -> Cache:
            ids_WN = jax.lax.dynamic_slice(ids_WC, (0, j * N), (W, N))
            return policy.extend(layers, rows, ids_WN, start_W + j * N)[1]

        parts = _most(-(-jnp.max(fill_S[slot_W]) // N), axes)
        rows = jax.tree.map(lambda x: x[slot_W], cache)
        rows = jax.lax.fori_loop(0, parts, part, rows)
        return jax.tree.map(lambda x, row: x.at[slot_W].set(row, unique_indices=True), cache, rows)

    return jax.lax.fori_loop(0, _most(-(-jnp.sum(fill_S > 0) // W), axes), block, cache)


def _fill_tiles(
    spec: RolloutSpec,
    policy: Policy,
    layers: list[Block],
    cache: Cache,
    chunk_SC: jax.Array,
    start_S: jax.Array,
    fill_S: jax.Array,
    axes: tuple[str, ...],
) -> Cache:
    """The same where a kernel reads the cache: tokens of all slots one after the other, so that
    every block but the last is full."""
    config, (S, C) = policy.config, chunk_SC.shape
    T = tile_tokens(config.heads, config.kv_heads)
    N = max(T, min(spec.packed_tokens, S * C))
    W = N // T
    tiles_S = -(-fill_S // T)
    end_S = jnp.cumsum(tiles_S)

    def block(i: jax.Array, cache: Cache) -> Cache:
        tile_W = i * W + jnp.arange(-(-N // T))
        slot_W = jnp.minimum(jnp.searchsorted(end_S, tile_W, side="right"), S - 1)
        first_W = (tile_W - (end_S - tiles_S)[slot_W]) * T
        count_W = jnp.clip(fill_S[slot_W] - first_W, 0, T)
        # Behind the last tile, and where what is left of the block is shorter than one.
        count_W = jnp.where((tile_W < end_S[-1]) & (tile_W < (i + 1) * W), count_W, 0)
        at_WT = jnp.minimum(first_W[:, None] + jnp.arange(T), C - 1)
        ids_N = chunk_SC[slot_W[:, None], at_WT].reshape(-1)[:N]
        tiles = Tiles(slot_W, start_S[slot_W] + first_W, count_W, T)
        return policy.extend_tiles(layers, cache, ids_N, tiles)

    return jax.lax.fori_loop(0, _most(-(-end_S[-1] // W), axes), block, cache)


def _most(turns: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.pmax(turns, axes) if axes else turns
