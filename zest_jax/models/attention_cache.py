"""Attention over a cache on NVIDIA GPUs, which reads only the part of it that is valid.

Two Pallas (Triton) kernels: one for a decoding step, which also writes the step's key and value in
place, and one for a chunk of new tokens that the cache already holds. Each program of the grid
takes one slot's tokens and the query heads of one key/value head, and walks the cache block by
block with a running softmax, up to the slot's own length.

Shape letters: S slots, C chunk, H query heads, J key/value heads, G query heads per key/value head
(H = J * G), R query rows of a program, K head size, I pairs of a head
(K / 2), M cache length, B heads of a product (H + 2 J), X its components.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

# Cache positions that a program takes at a time; a cache's length is a multiple of it.
BLOCK = 64
_WARPS, _STAGES = 4, 3
_LOW = -1e30
_LEAST_ROWS = 16  # of a matrix product on tensor cores
_CHUNK_ROWS = 64


@dataclasses.dataclass(frozen=True)
class HeadRule:
    """What is done to a head's query and key between their product and attention.

    Attributes:
      heads: query heads, H.
      bias_X: added to the product [(H + 2 J) K], or None.
      norms_2K: scales of the RMS norms of query and key (Qwen3), or None.
      norm_eps: their epsilon.
    """

    heads: int
    bias_X: jax.Array | None = None
    norms_2K: jax.Array | None = None
    norm_eps: float = 1e-6


def decode_attention(
    product_SX: jax.Array,
    rule: HeadRule,
    rope: tuple[jax.Array, jax.Array],
    keys_SJMK: jax.Array,
    values_SJMK: jax.Array,
    start_S: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token a slot: softmax(q k / sqrt(K)) v over positions 0 .. start_S, its own the last.

    Biases, norms and rotation of query and key are done in the kernel, rounded to the compute type
    where the layer rounds them elsewhere (`policy.Block`).

    Args:
      product_SX: the token's queries, keys and values as the projections give them, one after the
        other.
      rule: what makes queries and keys of them.
      rope: cosines and sines [S, K / 2] of the tokens' positions, float32.
      keys_SJMK: the cache of rotated keys; M is a multiple of `BLOCK`.
      values_SJMK: the cache of values.
      start_S: tokens of each slot already in the cache, below M.
      interpret: run it without a GPU, slowly.

    Returns:
      [S, H K] in the type of the product; and the cache with the token written at start_S.
    """
    S, J, M, K = keys_SJMK.shape
    H = rule.heads
    B = H + 2 * J
    inputs = {"start": start_S.astype(jnp.int32), "product": product_SX.reshape(S, B, K)}
    inputs |= {"cos": rope[0], "sin": rope[1]}
    specs = {
        "start": pl.BlockSpec((None,), lambda s, j: (s,)),
        "product": pl.BlockSpec((None, B, K), lambda s, j: (s, 0, 0)),
        "cos": pl.BlockSpec((None, K // 2), lambda s, j: (s, 0)),
        "sin": pl.BlockSpec((None, K // 2), lambda s, j: (s, 0)),
    }
    if rule.bias_X is not None:
        inputs["bias"] = rule.bias_X.reshape(B, K)
        specs["bias"] = pl.BlockSpec((B, K), lambda s, j: (0, 0))
    if rule.norms_2K is not None:
        inputs["norms"] = rule.norms_2K
        specs["norms"] = pl.BlockSpec((2, K), lambda s, j: (0, 0))
    cache = pl.BlockSpec((None, None, M, K), lambda s, j: (s, j, 0, 0))
    given = len(inputs)

    def kernel(*refs: Any) -> None:
        named = dict(zip(inputs, refs[:given], strict=True))
        _decode(named, *refs[given:], heads=H, kv_heads=J, norm_eps=rule.norm_eps)

    out_SHK, keys_SJMK, values_SJMK = pl.pallas_call(
        kernel,
        grid=(S, J),
        in_specs=[*specs.values(), cache, cache],
        out_specs=[pl.BlockSpec((None, H, K), lambda s, j: (s, 0, 0)), cache, cache],
        out_shape=[
            jax.ShapeDtypeStruct((S, H, K), product_SX.dtype),
            jax.ShapeDtypeStruct(keys_SJMK.shape, keys_SJMK.dtype),
            jax.ShapeDtypeStruct(values_SJMK.shape, values_SJMK.dtype),
        ],
        input_output_aliases={given: 1, given + 1: 2},
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=interpret,
        name="decode_attention",
    )(*inputs.values(), keys_SJMK, values_SJMK)
    return out_SHK.reshape(S, H * K), keys_SJMK, values_SJMK


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
      query_SCHK: rotated queries.
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
    tokens = min(pl.next_power_of_2(C), max(1, _CHUNK_ROWS // padded_G))
    padded_G = max(padded_G, _LEAST_ROWS // tokens)
    padded_C = -(-C // tokens) * tokens
    R = tokens * padded_G
    query_SJCGK = query_SCHK.reshape(S, C, J, G, K).transpose(0, 2, 1, 3, 4)
    padding = ((0, 0), (0, 0), (0, padded_C - C), (0, padded_G - G), (0, 0))
    query_SJCGK = jnp.pad(query_SJCGK, padding)
    cache = pl.BlockSpec((None, None, M, K), lambda s, j, c: (s, j, 0, 0))
    queries = pl.BlockSpec((None, None, R, K), lambda s, j, c: (s, j, c, 0))
    out = pl.pallas_call(
        functools.partial(_chunk, scale=K**-0.5, tokens=tokens),
        grid=(S, J, padded_C // tokens),
        in_specs=[pl.BlockSpec((None,), lambda s, j, c: (s,)), queries, cache, cache],
        out_specs=queries,
        out_shape=jax.ShapeDtypeStruct((S, J, padded_C * padded_G, K), query_SCHK.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="chunk_attention",
    )(
        start_S.astype(jnp.int32),
        query_SJCGK.reshape(S, J, padded_C * padded_G, K),
        keys_SJMK,
        values_SJMK,
    )
    out_SJCGK = out.reshape(S, J, padded_C, padded_G, K)[:, :, :C, :G]
    return out_SJCGK.transpose(0, 2, 1, 3, 4).reshape(S, C, H, K)


def _decode(
    given: dict[str, Any],
    keys_ref: Any,
    values_ref: Any,
    out_ref: Any,
    keys_out_ref: Any,
    values_out_ref: Any,
    *,
    heads: int,
    kv_heads: int,
    norm_eps: float,
) -> None:
    M, K = keys_ref.shape
    G = heads // kv_heads
    R = max(_LEAST_ROWS, pl.next_power_of_2(G))
    j, start = pl.program_id(1), given["start"][...]
    dtype = keys_ref.dtype
    first_half, second_half = jnp.arange(K // 2)[None, :], (K // 2 + jnp.arange(K // 2))[None, :]
    cos_1I, sin_1I = given["cos"][...][None, :], given["sin"][...][None, :]

    def biased(row_R1: jax.Array, at_1I: jax.Array) -> jax.Array:
        x = given["product"][row_R1, at_1I]
        if "bias" in given:
            x = x + given["bias"][row_R1, at_1I].astype(x.dtype)
        return x

    def rotated(row_R1: jax.Array, norm: int) -> tuple[jax.Array, jax.Array]:
        """Both halves of the heads in these rows, as `rope.rotate` and `rms_norm` make them."""
        halves = [biased(row_R1, at).astype(jnp.float32) for at in (first_half, second_half)]
        if "norms" in given:
            square_R = sum(jnp.sum(x * x, axis=1) for x in halves) / K
            shrink_R1 = jax.lax.rsqrt(square_R + norm_eps)[:, None]
            number = jnp.full((1, 1), norm)
            scales = [
                given["norms"][number, at].astype(jnp.float32) for at in (first_half, second_half)
            ]
            halves = [
                (x * shrink_R1 * scale).astype(dtype).astype(jnp.float32)
                for x, scale in zip(halves, scales, strict=True)
            ]
        a, b = halves
        return (
            (a * cos_1I - b * sin_1I).astype(dtype),
            (b * cos_1I + a * sin_1I).astype(dtype),
        )

    # Rows behind the group's own are computed like its last and never stored.
    row_R1 = (j * G + jnp.minimum(jnp.arange(R), G - 1))[:, None]
    queries = rotated(row_R1, 0)
    own_keys = rotated(jnp.full((1, 1), heads + j), 1)
    value_1K = biased(jnp.full((1, 1), heads + kv_heads + j), jnp.arange(K)[None, :]).astype(dtype)
    keys_out_ref[pl.ds(start, 1), pl.ds(0, K // 2)] = own_keys[0]
    keys_out_ref[pl.ds(start, 1), pl.ds(K // 2, K // 2)] = own_keys[1]
    values_out_ref[pl.ds(start, 1), :] = value_1K

    # The token's own key first, from registers: the softmax never starts from nothing, and the
    # cache's row for it, which is being written, is not read.
    own_R = sum(
        jnp.sum(q.astype(jnp.float32) * k.astype(jnp.float32), axis=1)
        for q, k in zip(queries, own_keys, strict=True)
    )
    scale = K**-0.5
    carry = (
        own_R * scale,
        jnp.ones((R,), jnp.float32),
        jnp.zeros((R, K), jnp.float32) + value_1K.astype(jnp.float32),
    )

    def step(i: jax.Array, carry: Any) -> Any:
        at = pl.ds(i * BLOCK, BLOCK)
        score_RM = sum(
            _outer(q, keys_ref[at, pl.ds(h * (K // 2), K // 2)]) for h, q in enumerate(queries)
        )
        seen_1M = (i * BLOCK + jnp.arange(BLOCK))[None, :] < start
        return _accumulate(scale * score_RM, values_ref[at, :], seen_1M, carry)

    _, whole_R, out_RK = jax.lax.fori_loop(0, (start + BLOCK - 1) // BLOCK, step, carry)
    triton.store(
        out_ref.at[(j * G + jnp.arange(R))[:, None], jnp.arange(K)[None, :]],
        (out_RK / whole_R[:, None]).astype(out_ref.dtype),
        mask=jnp.broadcast_to((jnp.arange(R) < G)[:, None], (R, K)),
    )


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
        at = pl.ds(i * BLOCK, BLOCK)
        score_RM = scale * _outer(query_RK, keys_ref[at, :])
        return _accumulate(score_RM, values_ref[at, :], seen_RM, carry)

    # Every query sees position 0, which lies in the first block.
    start = (
        jnp.full((rows,), _LOW, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros(query_RK.shape, jnp.float32),
    )
    # Queries that pad the chunk may stand behind the cache's end.
    blocks = jnp.minimum((first + tokens + BLOCK - 1) // BLOCK, keys_ref.shape[0] // BLOCK)
    _, whole_R, out_RK = jax.lax.fori_loop(0, blocks, step, start)
    out_ref[...] = (out_RK / whole_R[:, None]).astype(out_ref.dtype)


def _outer(query_RK: jax.Array, keys_MK: jax.Array) -> jax.Array:
    return jax.lax.dot_general(
        query_RK, keys_MK, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def _accumulate(
    score_RM: jax.Array,
    values_MK: jax.Array,
    seen: jax.Array,
    carry: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One block of the running softmax: its highest score, its sum and its weighted values."""
    high_R, whole_R, out_RK = carry
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
