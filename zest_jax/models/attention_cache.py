"""Attention over a cache on NVIDIA GPUs, which reads only the part of it that is valid.

Two Pallas (Triton) kernels: one for a decoding step, which also writes the step's key and value in
place, and one for a chunk of new tokens that the cache already holds. Each program of the grid
takes one slot's tokens and the query heads of one key/value head, and walks the cache block by
block with a running softmax, up to the slot's own length.

Shape letters: S slots, C chunk, H query heads, J key/value heads, G query heads per key/value head
(H = J * G), R query rows of a program, K head size, M cache length.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

# Cache positions that a program takes at a time; a cache's length is a multiple of it.
BLOCK = 64
_LOW = -1e30
_LEAST_ROWS = 16  # of a matrix product on tensor cores
_CHUNK_ROWS = 64


def decode_attention(
    query_SHK: jax.Array,
    key_SJK: jax.Array,
    value_SJK: jax.Array,
    keys_SJMK: jax.Array,
    values_SJMK: jax.Array,
    start_S: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token a slot: softmax(q k / sqrt(K)) v over positions 0 .. start_S, its own the last.

    Args:
      query_SHK: rotated queries.
      key_SJK: the tokens' own rotated keys.
      value_SJK: their values.
      keys_SJMK: the cache; M is a multiple of `BLOCK`.
      values_SJMK: the cache.
      start_S: tokens of each slot already in the cache, below M.
      interpret: run it without a GPU, slowly.

    Returns:
      [S, H, K] in the type of the queries; and the cache with the token written at start_S.
    """
    S, H, K = query_SHK.shape
    J, M = keys_SJMK.shape[1:3]
    G = H // J
    R = max(_LEAST_ROWS, pl.next_power_of_2(G))
    query_SJRK = jnp.pad(query_SHK.reshape(S, J, G, K), ((0, 0), (0, 0), (0, R - G), (0, 0)))
    row = pl.BlockSpec((None, None, 1, K), lambda s, j: (s, j, 0, 0))
    cache = pl.BlockSpec((None, None, M, K), lambda s, j: (s, j, 0, 0))
    queries = pl.BlockSpec((None, None, R, K), lambda s, j: (s, j, 0, 0))
    out_SJRK, keys_SJMK, values_SJMK = pl.pallas_call(
        functools.partial(_decode, scale=K**-0.5),
        grid=(S, J),
        in_specs=[pl.BlockSpec((None,), lambda s, j: (s,)), queries, row, row, cache, cache],
        out_specs=[queries, cache, cache],
        out_shape=[
            jax.ShapeDtypeStruct((S, J, R, K), query_SHK.dtype),
            jax.ShapeDtypeStruct(keys_SJMK.shape, keys_SJMK.dtype),
            jax.ShapeDtypeStruct(values_SJMK.shape, values_SJMK.dtype),
        ],
        input_output_aliases={4: 1, 5: 2},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="decode_attention",
    )(
        start_S.astype(jnp.int32),
        query_SJRK,
        key_SJK[:, :, None].astype(keys_SJMK.dtype),
        value_SJK[:, :, None].astype(values_SJMK.dtype),
        keys_SJMK,
        values_SJMK,
    )
    return out_SJRK[:, :, :G].reshape(S, H, K), keys_SJMK, values_SJMK


def chunk_attention(
    query_SCHK: jax.Array,
    keys_SJMK: jax.Array,
    values_SJMK: jax.Array,
    start_S: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Tokens start_S .. start_S + C - 1 of each slot, whose keys and values the cache holds.

    Args:
      query_SCHK: rotated queries; C is a power of two, or a multiple of `_CHUNK_ROWS`.
      keys_SJMK: the cache; M is a multiple of `BLOCK` and at least max(start_S) + C.
      values_SJMK: the cache.
      start_S: position of each slot's first query.
      interpret: run it without a GPU, slowly.

    Returns:
      [S, C, H, K] in the type of the queries.
    """
    S, C, H, K = query_SCHK.shape
    J, M = keys_SJMK.shape[1:3]
    G = H // J
    padded_G = pl.next_power_of_2(G)
    tokens = min(C, max(1, _CHUNK_ROWS // padded_G))
    if padded_G * tokens < _LEAST_ROWS:
        padded_G = _LEAST_ROWS // tokens
    if C % tokens:
        raise ValueError(f"a chunk of {C} tokens is not a multiple of {tokens}")
    R = tokens * padded_G
    query_SJCGK = query_SCHK.reshape(S, C, J, G, K).transpose(0, 2, 1, 3, 4)
    query_SJCGK = jnp.pad(query_SJCGK, (*((0, 0),) * 3, (0, padded_G - G), (0, 0)))
    cache = pl.BlockSpec((None, None, M, K), lambda s, j, c: (s, j, 0, 0))
    queries = pl.BlockSpec((None, None, R, K), lambda s, j, c: (s, j, c, 0))
    out = pl.pallas_call(
        functools.partial(_chunk, scale=K**-0.5, tokens=tokens),
        grid=(S, J, C // tokens),
        in_specs=[pl.BlockSpec((None,), lambda s, j, c: (s,)), queries, cache, cache],
        out_specs=queries,
        out_shape=jax.ShapeDtypeStruct((S, J, C * padded_G, K), query_SCHK.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="chunk_attention",
    )(
        start_S.astype(jnp.int32),
        query_SJCGK.reshape(S, J, C * padded_G, K),
        keys_SJMK,
        values_SJMK,
    )
    out_SJCGK = out.reshape(S, J, C, padded_G, K)[:, :, :, :G]
    return out_SJCGK.transpose(0, 2, 1, 3, 4).reshape(S, C, H, K)


def _decode(
    start_ref: Any,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    keys_ref: Any,
    values_ref: Any,
    out_ref: Any,
    keys_out_ref: Any,
    values_out_ref: Any,
    *,
    scale: float,
) -> None:
    start = start_ref[...]
    query_RK, key_1K, value_1K = query_ref[...], key_ref[...], value_ref[...]
    # The token's own key first, from registers: the softmax never starts from nothing, and the
    # cache's row for it, which is being written, is not read.
    own_RK = query_RK.astype(jnp.float32) * key_1K.astype(jnp.float32)
    high_R = jnp.sum(own_RK, axis=1) * scale
    whole_R = jnp.ones_like(high_R)
    out_RK = jnp.zeros(query_RK.shape, jnp.float32) + value_1K.astype(jnp.float32)
    keys_out_ref[pl.ds(start, 1), :] = key_1K
    values_out_ref[pl.ds(start, 1), :] = value_1K

    def step(i: jax.Array, carry: Any) -> Any:
        seen_1M = (i * BLOCK + jnp.arange(BLOCK))[None, :] < start
        return _accumulate(query_RK, keys_ref, values_ref, i, seen_1M, scale, carry)

    high_R, whole_R, out_RK = jax.lax.fori_loop(
        0, (start + BLOCK - 1) // BLOCK, step, (high_R, whole_R, out_RK)
    )
    out_ref[...] = (out_RK / whole_R[:, None]).astype(out_ref.dtype)


def _chunk(
    start_ref: Any,
    query_ref: Any,
    keys_ref: Any,
    values_ref: Any,
    out_ref: Any,
    *,
    scale: float,
    tokens: int,
) -> None:
    query_RK = query_ref[...]
    rows = query_RK.shape[0]
    first = start_ref[...] + pl.program_id(2) * tokens
    position_R1 = first + (jnp.arange(rows) // (rows // tokens))[:, None]

    def step(i: jax.Array, carry: Any) -> Any:
        seen_RM = (i * BLOCK + jnp.arange(BLOCK))[None, :] <= position_R1
        return _accumulate(query_RK, keys_ref, values_ref, i, seen_RM, scale, carry)

    # Every query sees position 0, which lies in the first block.
    start = (
        jnp.full((rows,), _LOW, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros(query_RK.shape, jnp.float32),
    )
    blocks = (first + tokens + BLOCK - 1) // BLOCK
    _, whole_R, out_RK = jax.lax.fori_loop(0, blocks, step, start)
    out_ref[...] = (out_RK / whole_R[:, None]).astype(out_ref.dtype)


def _accumulate(
    query_RK: jax.Array,
    keys_ref: Any,
    values_ref: Any,
    block: jax.Array,
    seen: jax.Array,
    scale: float,
    carry: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One block of the running softmax: its highest score, its sum and its weighted values."""
    high_R, whole_R, out_RK = carry
    at = pl.ds(block * BLOCK, BLOCK)
    keys_MK, values_MK = keys_ref[at, :], values_ref[at, :]
    score_RM = scale * jax.lax.dot_general(
        query_RK, keys_MK, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    score_RM = jnp.where(seen, score_RM, _LOW)
    new_high_R = jnp.maximum(high_R, jnp.max(score_RM, axis=1))
    shrink_R = jnp.exp(high_R - new_high_R)
    weight_RM = jnp.exp(score_RM - new_high_R[:, None])
    added_RK = jax.lax.dot_general(
        weight_RM.astype(values_MK.dtype),
        values_MK,
        (((1,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return (
        new_high_R,
        whole_R * shrink_R + jnp.sum(weight_RM, axis=1),
        out_RK * shrink_R[:, None] + added_RK,
    )
