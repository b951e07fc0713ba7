"""Attention on TPUs through the splash kernel."""

import jax


def splash_attention(
    query_BLHK: jax.Array,
    key_BLJK: jax.Array,
    value_BLJK: jax.Array,
    segment_BL: jax.Array | None,
) -> jax.Array:
    raise NotImplementedError
