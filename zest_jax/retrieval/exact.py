"""Exact search: every score computed, chunk by chunk, with a running top-k.

Shape letters: N passages, E embedding size, S slots (queries), R retrieved.
"""

import jax
import jax.numpy as jnp


def exact_search(
    index_NE: jax.Array, query_SE: jax.Array, retrieved: int, chunk: int = 262_144
) -> tuple[jax.Array, jax.Array]:
    """The `retrieved` passages with the largest inner product, best first; recall 1.0.

    Scores are float32 whatever the index's type, and never exist for more than one chunk of
    passages at a time. Ties go to the lower row.

    Args:
      index_NE: passage vectors.
      query_SE: query vectors.
      retrieved: R, at most N.
      chunk: passages scored at a time.

    Returns:
      Row numbers [S, R] int32 and scores [S, R] float32.
    """
    N, E = index_NE.shape
    S = query_SE.shape[0]
    if retrieved > N:
        raise ValueError(f"{retrieved} passages asked for, the index has {N}")
    if N <= chunk:
        score_SR, row_SR = jax.lax.top_k(_scores(index_NE, query_SE), retrieved)
        return row_SR.astype(jnp.int32), score_SR

    whole = N // chunk

    def merge(best, index_CE, first_row):
        score_SC = _scores(index_CE, query_SE)
        top_SR, at_SR = jax.lax.top_k(score_SC, min(retrieved, index_CE.shape[0]))
        row_SX = jnp.concatenate([best[0], (first_row + at_SR).astype(jnp.int32)], axis=1)
        score_SX = jnp.concatenate([best[1], top_SR], axis=1)
        score_SR, pick_SR = jax.lax.top_k(score_SX, retrieved)
        return jnp.take_along_axis(row_SX, pick_SR, axis=1), score_SR

    def step(best, i):
        index_CE = jax.lax.dynamic_slice(index_NE, (i * chunk, 0), (chunk, E))
        return merge(best, index_CE, i * chunk), ()

    best = (jnp.zeros((S, retrieved), jnp.int32), jnp.full((S, retrieved), -jnp.inf))
    best, _ = jax.lax.scan(step, best, jnp.arange(whole))
    if whole * chunk < N:
        best = merge(best, index_NE[whole * chunk :], whole * chunk)
    return best


def _scores(index_NE: jax.Array, query_SE: jax.Array) -> jax.Array:
    return jnp.einsum(
        "SE,NE->SN",
        query_SE.astype(index_NE.dtype),
        index_NE,
        preferred_element_type=jnp.float32,
    )
