"""Attention of one token a slot on NVIDIA GPUs, which reads only the valid part of the cache.

A Pallas (Triton) kernel for a decoding step, which also writes the step's key and value in place;
many tokens at once are `attention_tiles`'. Each program of the grid takes one slot's token and the
query heads of one key/value head, and walks the cache block by block with a running softmax, up to
the slot's own length.

Shape letters: S slots, H query heads, J key/value heads, G query heads per key/value head
(H = J * G), R query heads of a program, K head size, M cache length or positions of a block, B
heads of a product (H + 2 J), X its components.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

BLOCK = 32  # cache positions taken at a time; a cache's length is a multiple of it
_WARPS, _STAGES = 4, 3
_LOW = -1e30
_LEAST_COLUMNS = 16  # of a matrix product on tensor cores


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
    K = keys_ref.shape[1]
    G = heads // kv_heads
    R = max(_LEAST_COLUMNS, pl.next_power_of_2(G))
    j, start = pl.program_id(1), given["start"][...]
    dtype = keys_ref.dtype
    at_K = jnp.arange(K)
    other_K = (at_K + K // 2) % K  # the other component of each pair

    def biased(row: jax.Array, at: jax.Array) -> jax.Array:
        x = given["product"][row, at]
        if "bias" in given:
            x = x + given["bias"][row, at].astype(x.dtype)
        return x

    def rotated(row: jax.Array, at: jax.Array, other: jax.Array, norm: int) -> jax.Array:
        """Heads in these rows as `rope.rotate` and `rms_norm` make them, components first."""
        x, y = (biased(row, i).astype(jnp.float32) for i in (at, other))
        if "norms" in given:
            shrink = jax.lax.rsqrt(jnp.sum(x * x, axis=0, keepdims=True) / K + norm_eps)
            x, y = (
                (z * shrink * given["norms"][norm, i].astype(jnp.float32)).astype(dtype)
                for z, i in ((x, at), (y, other))
            )
            x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        pair = at % (K // 2)
        sine = jnp.where(at < K // 2, -1.0, 1.0) * given["sin"][pair]
        return (x * given["cos"][pair] + y * sine).astype(dtype)

    # Heads behind the group's own are computed like its last and never stored.
    row_1R = (j * G + jnp.minimum(jnp.arange(R), G - 1))[None, :]
    query_KR = rotated(row_1R, at_K[:, None], other_K[:, None], 0)
    key_K = rotated(heads + j, at_K, other_K, 1)
    value_K = biased(heads + kv_heads + j, at_K)
    keys_out_ref[start, at_K] = key_K
    values_out_ref[start, at_K] = value_K

    # The token's own key first, from registers: the softmax never starts from nothing, and the
    # cache's row for it, which is being written, is not read.
    scale = K**-0.5 * math.log2(math.e)  # powers of two, which the hardware has
    own_R = jnp.sum(query_KR.astype(jnp.float32) * key_K.astype(jnp.float32)[:, None], axis=0)
    at_M1 = jnp.arange(BLOCK)[:, None]
    carry = (
        own_R * scale,
        jnp.where(at_M1 == 0, 1.0, jnp.zeros((BLOCK, R), jnp.float32)),
        jnp.zeros((K, R), jnp.float32) + value_K.astype(jnp.float32)[:, None],
    )

    # Keys are the rows of the products, which fills the matrix units as a few heads would not.
    # Weights are summed place by place, over the places once behind the loop.
    def step(i: jax.Array, carry: Any) -> Any:
        high_R, whole_MR, out_KR = carry
        at_M = pl.ds(i * BLOCK, BLOCK)
        score_MR = scale * _product(keys_ref[at_M, :], query_KR, (1, 0))
        score_MR = jnp.where(i * BLOCK + at_M1 < start, score_MR, _LOW)
        new_high_R = jnp.maximum(high_R, jnp.max(score_MR, axis=0))
        shrink_1R = jnp.exp2(high_R - new_high_R)[None, :]
        weight_MR = jnp.exp2(score_MR - new_high_R[None, :])
        added_KR = _product(values_ref[at_M, :], weight_MR.astype(dtype), (0, 0))
        return new_high_R, whole_MR * shrink_1R + weight_MR, out_KR * shrink_1R + added_KR

    _, whole_MR, out_KR = jax.lax.fori_loop(0, (start + BLOCK - 1) // BLOCK, step, carry)
    out_KR = out_KR / jnp.sum(whole_MR, axis=0)[None, :]
    triton.store(
        out_ref.at[(j * G + jnp.arange(R))[None, :], at_K[:, None]],
        out_KR.astype(dtype),
        mask=jnp.broadcast_to((jnp.arange(R) < G)[None, :], (K, R)),
    )


def _product(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """A product over these axes of two matrices, in float32."""
    axes = ((contracted[:1], contracted[1:]), ((), ()))
    return jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)
