"""Work on the slots that ask for it alone, so many at a time, within a compiled step.

Shape letters: S slots, W slots of a block.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def in_blocks(
    asks_S: jax.Array,
    work: Callable[[jax.Array], Any],
    empty: Any,
    block: int,
    axes: tuple[str, ...] = (),
) -> Any:
    """`work(slots)` for the slots that ask, W at a time; jittable.

    Args:
      asks_S: which slots ask.
      work: given the numbers of W slots [W], returns arrays [W, …]. The last block is filled up
        with slots whose results are dropped.
      empty: arrays [S, …] like `work`'s: what the other slots have.
      block: W, at most S.
      axes: within `jax.shard_map`, axes whose devices all take as many turns, since `work` has
        them exchange something; () where it does not.
    """
    S = len(asks_S)
    W = min(block, S)
    order_S = jnp.argsort(~asks_S, stable=True).astype(jnp.int32)
    order_S = jnp.pad(order_S, (0, -S % W), constant_values=S)
    asks_S = jnp.pad(asks_S, (0, 1))
    turns = -(-jnp.sum(asks_S, dtype=jnp.int32) // W)
    if axes:
        turns = jax.lax.pmax(turns, axes)

    def turn(i: jax.Array, out: Any) -> Any:
        slot_W = jax.lax.dynamic_slice(order_S, (i * W,), (W,))
        done = work(jnp.minimum(slot_W, S - 1))
        at_W = jnp.where(asks_S[slot_W], slot_W, S)  # out of bounds, where it is dropped
        return jax.tree.map(lambda x, new: x.at[at_W].set(new, mode="drop"), out, done)

    return jax.lax.fori_loop(0, turns, turn, empty)
