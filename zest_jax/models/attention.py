"""The one entry point for attention, and its back end that runs everywhere.

Who may look at whom is told by positions and segments, never by a mask tensor, so that kernels
which take lengths can stand behind the same signature.

Shape letters: B batch, L query length, M key length, H query heads, J key/value heads, K head size,
Q query heads per key/value head (H = J * Q).
"""

import jax
import jax.numpy as jnp

from zest_jax.models.attention_cudnn import cudnn_attention
from zest_jax.models.attention_splash import splash_attention
from zest_jax.models.products import matmul_float32

# Most segments of a row, where nobody knows better (a kernel wants a fixed number of them).
MOST_SEGMENTS = 32
BACKENDS = ("xla", "cudnn", "splash")


def attention(
    query_BLHK: jax.Array,
    key_BMJK: jax.Array,
    value_BMJK: jax.Array,
    *,
    query_position_BL: jax.Array,
    key_position_BM: jax.Array,
    query_segment_BL: jax.Array | None = None,
    key_segment_BM: jax.Array | None = None,
    backend: str = "xla",
    most_segments: int = MOST_SEGMENTS,
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
      query_segment_BL: segment of each query (packed sequences), counted from 1, each a run of
        neighbours, 0 for padding (whose output is of no use); None where a row is one sequence.
      key_segment_BM: segment of each key.
      backend: "xla" takes anything. The kernels "cudnn" and "splash" take whole sequences only: the
        keys are the queries' own tokens, and positions count up along a segment.
      most_segments: at least the segments of any row; cuDNN is the faster the fewer it may meet.

    Returns:
      [B, L, H, K] in the type of the queries.

    Raises:
      ValueError: an unknown back end, or a kernel asked for queries that are not their own keys.
    """
    if backend == "xla":
        return xla_attention(
            query_BLHK,
            key_BMJK,
            value_BMJK,
            query_position_BL,
            key_position_BM,
            query_segment_BL,
            key_segment_BM,
        )
    if query_BLHK.shape[1] != key_BMJK.shape[1]:
        raise ValueError(f"the {backend} back end attends over whole sequences, not over a cache")
    if backend == "cudnn":
        return cudnn_attention(query_BLHK, key_BMJK, value_BMJK, query_segment_BL, most_segments)
    if backend == "splash":
        return splash_attention(query_BLHK, key_BMJK, value_BMJK, query_segment_BL)
    raise ValueError(f"unknown attention back end {backend!r}; there are {', '.join(BACKENDS)}")


def xla_attention(
    query_BLHK: jax.Array,
    key_BMJK: jax.Array,
    value_BMJK: jax.Array,
    query_position_BL: jax.Array,
    key_position_BM: jax.Array,
    query_segment_BL: jax.Array | None = None,
    key_segment_BM: jax.Array | None = None,
) -> jax.Array:
    """See `attention`: two matrix products and a softmax, with all scores in memory."""
    B, L, H, K = query_BLHK.shape
    J = key_BMJK.shape[2]
    Q = H // J
    # Products of plain matrices: written as an einsum over B and J, XLA turns the operands around,
    # which costs a factor of two to four on a CPU.
    query_BJQLK = query_BLHK.reshape(B, L, J, Q, K).transpose(0, 2, 3, 1, 4)
    score = matmul_float32(
        query_BJQLK.reshape(B, J, Q * L, K),
        key_BMJK.transpose(0, 2, 3, 1),
    )
    score_BJQLM = score.reshape(B, J, Q, L, -1) * (K**-0.5)
    seen_BLM = key_position_BM[:, None, :] <= query_position_BL[:, :, None]
    if query_segment_BL is not None and key_segment_BM is not None:
        seen_BLM &= key_segment_BM[:, None, :] == query_segment_BL[:, :, None]
    score_BJQLM = jnp.where(seen_BLM[:, None, None], score_BJQLM, jnp.finfo(jnp.float32).min)
    weight_BJQLM = jax.nn.softmax(score_BJQLM, axis=-1).astype(value_BMJK.dtype)
    out = jnp.matmul(weight_BJQLM.reshape(B, J, Q * L, -1), value_BMJK.transpose(0, 2, 1, 3))
    return out.reshape(B, J, Q, L, K).transpose(0, 3, 1, 2, 4).reshape(B, L, H, K)
