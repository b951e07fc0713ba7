"""Attention on NVIDIA GPUs through cuDNN's flash kernels, with lengths and never with a mask.

A mask tensor costs memory that grows with the square of the length, and with one the kernel's
gradient has been seen to give NaN. Packed rows are told by the offsets of their segments.

Shape letters: B batch, L length, H query heads, J key/value heads, K head size, S segments of a
row.
"""

import functools

import jax
import jax.numpy as jnp


def cudnn_attention(
    query_BLHK: jax.Array,
    key_BLJK: jax.Array,
    value_BLJK: jax.Array,
    segment_BL: jax.Array | None,
    most_segments: int,
) -> jax.Array:
    """See `attention.attention`; bfloat16 or float16 only.

    Args:
      query_BLHK: rotated queries.
      key_BLJK: rotated keys of the same tokens.
      value_BLJK: values.
      segment_BL: segments counted from 1, each a run of neighbours, 0 for padding; None where a row
        is one sequence.
      most_segments: at least the segments of any row.

    Returns:
      [B, L, H, K] in the type of the queries; 0 at padding.
    """
    scale = query_BLHK.shape[-1] ** -0.5
    plain = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, scale=scale, implementation="cudnn"
    )
    if segment_BL is None:
        return plain(query_BLHK, key_BLJK, value_BLJK)
    # The kernel leaves what lies outside of all segments unwritten, in the output and in the
    # gradients: 0 in their place, both ways.
    kept_BL11 = (segment_BL > 0)[:, :, None, None]
    query_BLHK, key_BLJK, value_BLJK = (
        jnp.where(kept_BL11, x, 0) for x in (query_BLHK, key_BLJK, value_BLJK)
    )
    if most_segments == 1:
        length_B = jnp.sum(segment_BL > 0, axis=1, dtype=jnp.int32)
        lengths = {"query_seq_lengths": length_B, "key_value_seq_lengths": length_B}
        return jnp.where(kept_BL11, plain(query_BLHK, key_BLJK, value_BLJK, **lengths), 0)
    # The packed form is not in jax.nn yet, which calls this same function for the plain one.
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    length_BS, offset_BS = segment_bounds(segment_BL, most_segments)
    # JAX scales the keys' offsets by the number of query heads, which is right only where the two
    # numbers are equal.
    repeats = query_BLHK.shape[2] // key_BLJK.shape[2]
    key_BLHK, value_BLHK = (jnp.repeat(x, repeats, axis=2) for x in (key_BLJK, value_BLJK))
    out_BLHK = dot_product_attention(
        query_BLHK,
        key_BLHK,
        value_BLHK,
        q_seqlen=length_BS,
        kv_seqlen=length_BS,
        q_offsets=offset_BS,
        kv_offsets=offset_BS,
        scale=scale,
        mask_type=MaskType.PADDING_CAUSAL,
    )
    return jnp.where(kept_BL11, out_BLHK, 0)


def segment_bounds(segment_BL: jax.Array, most_segments: int) -> tuple[jax.Array, jax.Array]:
    """Lengths [B, S] and starts [B, S + 1] of the segments of each row, int32, -1 for none.

    Segments stand one after the other from the row's start, padding only after them.
    """
    number_S = jnp.arange(1, most_segments + 1)
    length_BS = jnp.sum(segment_BL[:, :, None] == number_S, axis=1, dtype=jnp.int32)
    start_BS = jnp.cumsum(length_BS, axis=1, dtype=jnp.int32) - length_BS
    there_BS = length_BS > 0
    start_BS = jnp.where(there_BS, start_BS, -1)
    return (
        jnp.where(there_BS, length_BS, -1),
        jnp.pad(start_BS, ((0, 0), (0, 1)), constant_values=-1),
    )
