"""Attention of many new tokens over a cache that holds them, on NVIDIA GPUs.

New tokens of several slots come one after the other, in tiles: a tile is up to `tile_tokens`
neighbours of one slot, so that a block of tokens is full whatever slots they are of. A Pallas
(Triton) kernel takes one tile's tokens and the query heads of one key/value head, and walks that
slot's cache block by block with a running softmax, no further than the tile's last token.

Shape letters: N tokens, W tiles, T tokens of a tile, S slots, H query heads, J key/value heads,
G query heads per key/value head (H = J * G), R query rows of a program, K head size, M cache
length.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

BLOCK = 64  # cache positions taken at a time; a cache's length is a multiple of it
_ROWS = 128  # queries of a program, heads of a group counted
_WARPS, _STAGES = 8, 3
_LOW = -1e30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Whose the tokens are: tile w holds tokens w T to w T + count_W[w] - 1, then padding.

    Attributes:
      slot_W: slot of each tile.
      start_W: position of its first token.
      count_W: its tokens, 0 to T.
      tokens: T.
    """

    slot_W: jax.Array
    start_W: jax.Array
    count_W: jax.Array
    tokens: int = dataclasses.field(metadata={"static": True})

    def of_tokens(self, slots: int, number: int) -> tuple[jax.Array, jax.Array]:
        """Slot and position of each of `number` tokens; slot `slots`, where there is none, for
        padding."""
        place_WT = jnp.arange(self.tokens)
        there_WT = place_WT < self.count_W[:, None]
        slot_WT = jnp.where(there_WT, self.slot_W[:, None], slots)
        position_WT = self.start_W[:, None] + place_WT
        return slot_WT.reshape(-1)[:number], position_WT.reshape(-1)[:number]


def tile_tokens(heads: int, kv_heads: int) -> int:
    """Tokens that a tile may have."""
    return max(1, _ROWS // (heads // kv_heads))


def tile_attention(
    query_NHK: jax.Array,
    keys_SJMK: jax.Array,
    values_SJMK: jax.Array,
    tiles: Tiles,
    *,
    interpret: bool = False,
) -> jax.Array:
    """softmax(q k / sqrt(K)) v of every token over its slot's cache up to itself.

    Args:
      query_NHK: rotated queries; N is at most the tiles' tokens, and more than all but the last's.
      keys_SJMK: the cache, with the tokens written; M is a multiple of `BLOCK`.
      values_SJMK: the cache.
      tiles: whose the tokens are.
      interpret: run it without a GPU, slowly.

    Returns:
      [N, H, K] in the type of the queries; rubbish for padding.
    """
    N, H, K = query_NHK.shape
    J = keys_SJMK.shape[1]
    R = max(16, pl.next_power_of_2(tiles.tokens * (H // J)))
    one = pl.BlockSpec((None,), lambda w, j: (w,))
    queries = pl.BlockSpec((N, H, K), lambda w, j: (0, 0, 0))
    cache = pl.BlockSpec(keys_SJMK.shape, lambda w, j: (0, 0, 0, 0))
    return pl.pallas_call(
        functools.partial(_attend, tokens=tiles.tokens, group=H // J, rows=R),
        grid=(len(tiles.slot_W), J),
        in_specs=[one, one, one, queries, cache, cache],
        out_specs=queries,
        out_shape=jax.ShapeDtypeStruct(query_NHK.shape, query_NHK.dtype),
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=interpret,
        name="tile_attention",
    )(
        tiles.slot_W.astype(jnp.int32),
        tiles.start_W.astype(jnp.int32),
        tiles.count_W.astype(jnp.int32),
        query_NHK,
        keys_SJMK,
        values_SJMK,
    )


def _attend(
    slot_ref: Any,
    start_ref: Any,
    count_ref: Any,
    query_ref: Any,
    keys_ref: Any,
    values_ref: Any,
    out_ref: Any,
    *,
    tokens: int,
    group: int,
    rows: int,
) -> None:
    N, _, K = query_ref.shape
    w, j = pl.program_id(0), pl.program_id(1)
    slot, start, count = slot_ref[...], start_ref[...], count_ref[...]
    row_R = jnp.arange(rows)
    # Rows behind the tile's own are computed, and written, like those of its last token.
    place_R = jnp.minimum(row_R // group, jnp.minimum(tokens, N - w * tokens) - 1)
    at = (
        (w * tokens + place_R)[:, None],
        (j * group + row_R % group)[:, None],
        jnp.arange(K)[None, :],
    )
    query_RK = query_ref[at]
    position_R1 = (start + place_R)[:, None]
    # Softmax in powers of two, which the hardware has.
    scale = K**-0.5 * math.log2(math.e)

    def step(seen: bool, i: jax.Array, carry: Any) -> Any:
        high_R, whole_R, out_RK = carry
        at_M = pl.ds(i * BLOCK, BLOCK)
        score_RM = scale * jax.lax.dot_general(
            query_RK,
            keys_ref[slot, j, at_M, :],
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        if not seen:
            key_1M = (i * BLOCK + jnp.arange(BLOCK))[None, :]
            score_RM = jnp.where(key_1M <= position_R1, score_RM, _LOW)
        new_high_R = jnp.maximum(high_R, jnp.max(score_RM, axis=1))
        shrink_R = jnp.exp2(high_R - new_high_R)
        weight_RM = jnp.exp2(score_RM - new_high_R[:, None])
        added_RK = jax.lax.dot_general(
            weight_RM.astype(values_ref.dtype),
            values_ref[slot, j, at_M, :],
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return (
            new_high_R,
            whole_R * shrink_R + jnp.sum(weight_RM, axis=1),
            out_RK * shrink_R[:, None] + added_RK,
        )

    # Every token sees position 0, which lies in the first block. A tile without tokens reads none.
    carry = (
        jnp.full((rows,), _LOW, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, K), jnp.float32),
    )
    blocks = jnp.where(count > 0, (start + count + BLOCK - 1) // BLOCK, 0)
    whole_blocks = jnp.minimum((start + 1) // BLOCK, blocks)  # all tokens see all of them
    carry = jax.lax.fori_loop(0, whole_blocks, functools.partial(step, True), carry)
    carry = jax.lax.fori_loop(whole_blocks, blocks, functools.partial(step, False), carry)
    _, whole_R, out_RK = carry
    out_RK = out_RK / jnp.maximum(whole_R, 1e-30)[:, None]
    out_ref[at] = out_RK.astype(out_ref.dtype)
