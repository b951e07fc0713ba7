"""The one entry point for attention.

Who may look at whom is told by positions and segments, never by a mask tensor, so that kernels
which take lengths can stand behind the same signature.

Shape letters: B batch, L query length, M key length, H query heads, J key/value heads, K head size,
Q query heads per key/value head (H = J * Q).
"""

import jax
import jax.numpy as jnp


def attention(
    query_BLHK: jax.Array,
    key_BMJK: jax.Array,
    value_BMJK: jax.Array,
    *,
    query_position_BL: jax.Array,
    key_position_BM: jax.Array,
    query_segment_BL: jax.Array | None = None,
    key_segment_BM: jax.Array | None = None,
) -> jax.Array:
    """Causal grouped-query attention, softmax(q k / sqrt(K)) v, over positions and segments.

    A query sees a key if the key's position is not after its own and, where segments are given,
    both lie in the same segment. Scores and softmax are float32 whatever the compute type.

    Args:
      query_BLHK: rotated queries.
      key_BMJK: rotated keys (the sequence itself, or a cache).
      value_BMJK: values.
      query_position_BL: position of each query within its sequence.
      key_position_BM: position of each key; a cache passes its slot numbers, so that slots past the
        current length are after every query and are never seen.
      query_segment_BL: segment of each query (packed sequences); None where a row is one sequence.
      key_segment_BM: segment of each key.

    Returns:
      [B, L, H, K] in the type of the queries.
    """
    B, L, H, K = query_BLHK.shape
    J = key_BMJK.shape[2]
    query_BLJQK = query_BLHK.reshape(B, L, J, H // J, K)
    score_BJQLM = jnp.einsum(
        "BLJQK,BMJK->BJQLM", query_BLJQK, key_BMJK, preferred_element_type=jnp.float32
    ) * (K**-0.5)
    seen_BLM = key_position_BM[:, None, :] <= query_position_BL[:, :, None]
    if query_segment_BL is not None and key_segment_BM is not None:
        seen_BLM &= key_segment_BM[:, None, :] == query_segment_BL[:, :, None]
    score_BJQLM = jnp.where(seen_BLM[:, None, None], score_BJQLM, jnp.finfo(jnp.float32).min)
    weight_BJQLM = jax.nn.softmax(score_BJQLM, axis=-1).astype(value_BMJK.dtype)
    out_BLJQK = jnp.einsum("BJQLM,BMJK->BLJQK", weight_BJQLM, value_BMJK)
    return out_BLJQK.reshape(B, L, H, K)
