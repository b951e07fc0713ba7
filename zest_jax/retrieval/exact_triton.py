"""Exact search on NVIDIA GPUs whose scores never reach memory.

A Pallas (Triton) kernel multiplies a block of vectors with all queries and writes only the largest
score of the block for each query. The R best vectors lie in the R blocks with the largest maxima,
so that the rest is small: find those blocks, score their vectors again, take the best.

Of N x E vectors and S queries a plain product writes N x S scores, which takes longer than reading
the vectors; this writes an N / BLOCK-th of it.

Shape letters: N vectors, E components, S queries, G blocks of vectors, R retrieved, K candidates.
"""

import dataclasses
import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton


@dataclasses.dataclass(frozen=True)
class Tile:
    """How the product is cut.

    Attributes:
      vectors: of a block, whose maximum is kept.
      queries: of a program, at most; fewer queries take the next power of two.
      components: multiplied at a time.
      warps, stages: of the compiler.
    """

    vectors: int = 128
    queries: int = 256
    components: int = 64
    warps: int = 8
    stages: int = 3


FEW = Tile(vectors=128, queries=16, components=128, warps=4, stages=4)
MANY = Tile(queries=128, warps=4)
MANY_INT8 = Tile(queries=128, components=128, warps=4)
LEAST_VECTORS = 65_536  # fewer are as fast in a plain product
_SPARE = 2  # blocks beyond R: the kernel's sums and those of the second scoring round apart
_SPARE_INT8 = 5
_SUPER = 64  # blocks of a second level, so that no long row is sorted
_LEAST_QUERIES = 16  # of a matrix product on tensor cores


def fits(vectors: int, components: int) -> bool:
    """Whether the kernel takes an index of this shape."""
    return vectors >= LEAST_VECTORS and components % 128 == 0


def block_maxima(
    vector_NE: jax.Array,
    query_SE: jax.Array,
    scale_N: jax.Array | None = None,
    valid: jax.Array | int | None = None,
    *,
    tile: Tile = MANY,
    interpret: bool = False,
) -> jax.Array:
    """The largest score of every whole block of `tile.vectors` vectors, [N // BLOCK, S] float32.

    Args:
      vector_NE: bfloat16 or float16, or int8 codes.
      query_SE: of the same type; S is a multiple of the tile's queries.
      scale_N: of int8 codes, multiplied to a vector's scores.
      valid: rows from this one on are -inf; None for all valid.
    """
    (N, E), S = vector_NE.shape, query_SE.shape[0]
    B, Q = tile.vectors, tile.queries
    G, parts = N // B, S // Q
    whole_int = vector_NE.dtype == jnp.int8
    arguments = [jnp.full(1, N if valid is None else valid, jnp.int32), vector_NE, query_SE]
    # One axis, since the second of a launch has no room for as many blocks; queries run first, so
    # that a block of vectors is read from memory once.
    specs = [
        pl.BlockSpec((1,), lambda i: (0,)),
        pl.BlockSpec((B, E), lambda i: (i // parts, 0)),
        pl.BlockSpec((Q, E), lambda i: (i % parts, 0)),
    ]
    if scale_N is not None:
        arguments.append(scale_N)
        specs.append(pl.BlockSpec((B,), lambda i: (i // parts,)))

    def kernel(*refs: Any) -> None:
        valid_ref, vector_ref, query_ref, *scales, out_ref = refs

        def step(i: Any, total_BQ: jax.Array) -> jax.Array:
            at = pl.ds(i * tile.components, tile.components)
            product_BQ = jax.lax.dot_general(
                vector_ref[:, at],
                query_ref[:, at],
                (((1,), (1,)), ((), ())),
                preferred_element_type=jnp.int32 if whole_int else jnp.float32,
            )
            return total_BQ + product_BQ

        zeros = jnp.zeros((B, Q), jnp.int32 if whole_int else jnp.float32)
        score_BQ = jax.lax.fori_loop(0, E // tile.components, step, zeros).astype(jnp.float32)
        if scales:
            score_BQ *= scales[0][...][:, None]
        row_B1 = (pl.program_id(0) // parts) * B + jax.lax.broadcasted_iota(jnp.int32, (B, 1), 0)
        score_BQ = jnp.where(row_B1 < valid_ref[0], score_BQ, -jnp.inf)
        out_ref[0, :] = jnp.max(score_BQ, axis=0)

    return pl.pallas_call(
        kernel,
        grid=(G * parts,),
        in_specs=specs,
        out_specs=pl.BlockSpec((1, Q), lambda i: (i // parts, i % parts)),
        out_shape=jax.ShapeDtypeStruct((G, S), jnp.float32),
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
    )(*arguments)


def best_blocks(maxima_GS: jax.Array, count: int) -> jax.Array:
    """The blocks with the largest maxima, [S, count] int32 in rising order; jittable.

    Ties go to the lower block. Two levels, both exact: the best blocks lie in the best groups of
    blocks.
    """
    G, S = maxima_GS.shape
    count = min(count, G)
    groups = -(-G // _SUPER)
    padded_GS = jnp.pad(maxima_GS, ((0, groups * _SUPER - G), (0, 0)), constant_values=-jnp.inf)
    level_HXS = padded_GS.reshape(groups, _SUPER, S)
    _, group_SC = jax.lax.top_k(jnp.max(level_HXS, axis=1).T, min(count, groups))
    group_SC = jnp.sort(group_SC, axis=1)
    within_SCX = level_HXS[group_SC, :, jnp.arange(S)[:, None]]
    block_SCX = group_SC[..., None] * _SUPER + jnp.arange(_SUPER)
    flat_SY = within_SCX.reshape(S, -1)
    _, pick_SK = jax.lax.top_k(flat_SY, count)
    block_SK = jnp.take_along_axis(block_SCX.reshape(S, -1), pick_SK, axis=1)
    return jnp.sort(block_SK, axis=1).astype(jnp.int32)


def candidates(
    vector_NE: jax.Array,
    query_SE: jax.Array,
    top_k: int,
    scale_N: jax.Array | None = None,
    valid: jax.Array | int | None = None,
    *,
    tile: Tile | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Rows [S, K] int32 among which the `top_k` best are, in rising order; -1 is none. Jittable.

    Of 8-bit codes queries are rounded to 8 bits as well, and more blocks are kept.

    Args: as of `block_maxima`; `query_SE` of any float type and number.
    """
    N, S = vector_NE.shape[0], query_SE.shape[0]
    whole_int = scale_N is not None
    if tile is None:
        tile = FEW if S <= FEW.queries else MANY_INT8 if whole_int else MANY
    queries = min(tile.queries, max(_LEAST_QUERIES, pl.next_power_of_2(S)))
    tile = dataclasses.replace(tile, queries=queries)
    if whole_int:
        largest_S1 = jnp.max(jnp.abs(query_SE), axis=1, keepdims=True).astype(jnp.float32)
        query_SE = jnp.round(127 * query_SE / jnp.where(largest_S1 > 0, largest_S1, 1.0))
    query_SE = query_SE.astype(vector_NE.dtype)
    padded_SE = jnp.pad(query_SE, ((0, -S % queries), (0, 0)))
    maxima_GS = block_maxima(vector_NE, padded_SE, scale_N, valid, tile=tile, interpret=interpret)[
        :, :S
    ]
    count = top_k + (_SPARE_INT8 if whole_int else _SPARE)
    block_SK = best_blocks(maxima_GS, count)
    B = tile.vectors
    row_SKB = block_SK[..., None] * B + jnp.arange(B)
    row_SK = row_SKB.reshape(S, -1)
    # The rows behind the last whole block are candidates of every query.
    rest = jnp.arange(N // B * B, N, dtype=jnp.int32)
    row_SK = jnp.concatenate([row_SK, jnp.broadcast_to(rest, (S, len(rest)))], axis=1)
    if valid is None:
        return row_SK
    return jnp.where(row_SK < valid, row_SK, -1)


@functools.cache
def usable() -> tuple[bool, str]:
    """Whether the kernel may be used in this process, and why: it is tried against a product.

    What was chosen is logged once.
    """
    if jax.default_backend() != "gpu":
        return False, f"exact search: a product in XLA (there is no kernel for a {_back_end()})"
    try:
        # A caller may be being traced, which is a matter of its thread: the test has its own.
        with ThreadPoolExecutor(1) as other:
            wrong = other.submit(_worst).result()
    except Exception as error:  # whatever the compiler of this machine says
        return _told(False, f"a product in XLA (the kernel did not run: {error})"[:300])
    if wrong:
        return _told(False, f"a product in XLA (the kernel missed {wrong} of the best vectors)")
    return _told(True, "the fused kernel (it found the best vectors in its test)")


def _back_end() -> str:
    return jax.default_backend().upper()


def _told(good: bool, what: str) -> tuple[bool, str]:
    message = f"exact search: {what}"
    logging.getLogger("zest_jax").log(logging.INFO if good else logging.WARNING, message)
    return good, message


def _worst() -> int:
    """Best vectors that the kernel's candidates lack, over types and numbers of queries."""
    from zest_jax.retrieval.exact import quantise_rows

    key_v, key_q = jax.random.split(jax.random.key(0))
    vector_NE = jax.random.normal(key_v, (2048 + 57, 128), jnp.bfloat16)
    missing = 0
    for S in (1, 40):
        query_SE = jax.random.normal(key_q, (S, 128), jnp.bfloat16)
        score_SN = query_SE.astype(jnp.float32) @ vector_NE.astype(jnp.float32).T
        _, best_SR = jax.lax.top_k(score_SN, 3)
        codes = quantise_rows(vector_NE)
        for given in ((vector_NE, None), (codes.code_NE, codes.scale_N)):
            row_SK = jax.jit(lambda v, q, s: candidates(v, q, 3, s))(given[0], query_SE, given[1])
            missing += int(jnp.sum(~(best_SR[..., None] == row_SK[:, None]).any(-1)))
    return missing
