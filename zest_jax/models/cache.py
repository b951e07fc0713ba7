"""The keys and values that decoding keeps, and attention over them.

Two layouts, each the one that its reader is fast with. For XLA keys lie as [S, J, K, M], so that
both matrix products run along rows; for the Pallas kernels as [S, J, M, K], like the values, so
that a token is one row. The kernels read to each slot's own length and no further; XLA reads the
whole cache, so that whoever decodes with it lets the cache grow in steps (`grow`).

Shape letters: S slots, C chunk, H query heads, J key/value heads, K head size, M cache length.
"""

import jax
import jax.numpy as jnp

from zest_jax.models.attention import xla_attention
from zest_jax.models.attention_tiles import BLOCK, Tiles, tile_attention, tile_tokens
from zest_jax.models.config import PolicyConfig

Cache = dict[str, list[jax.Array]]
# A layer's keys and values, as the cache holds them.
Layer = tuple[jax.Array, jax.Array]

DECODING = ("xla", "pallas")


def empty_cache(config: PolicyConfig, slots: int, length: int) -> Cache:
    """A zero cache for `slots` sequences of at most `length` tokens (rounded up)."""
    S, J, K = slots, config.kv_heads, config.head_dim
    M = padded_length(config, length)
    keys = (S, J, M, K) if config.decoding == "pallas" else (S, J, K, M)
    shapes = {"keys": keys, "values": (S, J, M, K)}
    return {
        name: [jnp.zeros(shape, config.dtype) for _ in range(config.layers)]
        for name, shape in shapes.items()
    }


def padded_length(config: PolicyConfig, length: int) -> int:
    """Positions of a cache for `length` tokens: whole blocks of its reader."""
    step = BLOCK if config.decoding == "pallas" else 1
    return -(-length // step) * step


def grow(config: PolicyConfig, cache: Cache, length: int) -> Cache:
    """The same cache with room for `length` tokens, zeros behind what it held."""

    def pad(x: jax.Array, axis: int) -> jax.Array:
        more = padded_length(config, length) - x.shape[axis]
        return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)])

    keys_axis = 2 if config.decoding == "pallas" else 3
    return {
        "keys": [pad(x, keys_axis) for x in cache["keys"]],
        "values": [pad(x, 2) for x in cache["values"]],
    }


def copy_prefix(
    config: PolicyConfig, cache: Cache, source_S: jax.Array, into_S: jax.Array, length: int
) -> Cache:
    """The first `length` positions of other slots, put into those slots where `into_S` holds.

    Args:
      config: of the policy.
      cache: the cache.
      source_S: slot to take them from.
      into_S: which slots they are put into; the others stay as they are.
      length: positions, at most the cache's.
    """
    slots = len(source_S)
    # Out of bounds for slots that stay, where a scatter drops the update.
    into_S = jnp.where(into_S, jnp.arange(slots), slots)

    def copy(x: jax.Array, axis: int) -> jax.Array:
        part = jax.lax.slice_in_dim(x, 0, length, axis=axis)[source_S]
        where = (into_S, *[slice(None)] * (axis - 1), slice(0, length))
        return x.at[where].set(part, mode="drop", unique_indices=True)

    keys_axis = 2 if config.decoding == "pallas" else 3
    return {
        "keys": [copy(x, keys_axis) for x in cache["keys"]],
        "values": [copy(x, 2) for x in cache["values"]],
    }


def cached_attention(
    config: PolicyConfig,
    query_SCHK: jax.Array,
    key_SCJK: jax.Array,
    value_SCJK: jax.Array,
    layer: Layer,
    start_S: jax.Array,
) -> tuple[jax.Array, Layer]:
    """Writes a chunk into a layer of the cache and lets it attend to all up to itself.

    Args:
      config: of the policy; `decoding` says who reads.
      query_SCHK: rotated queries of the chunk.
      key_SCJK: its rotated keys.
      value_SCJK: its values.
      layer: the cache of this layer; M at least max(start_S) + C.
      start_S: tokens of each slot already in the cache.

    Returns:
      [S, C, H, K] in the type of the queries, and the layer with the chunk written.
    """
    S, C = query_SCHK.shape[:2]
    if config.decoding == "pallas":
        return _attend_in_tiles(config, (query_SCHK, key_SCJK, value_SCJK), layer, start_S)
    keys_SJKM = _write_columns(layer[0], key_SCJK, start_S)
    values_SJMK = _write_rows(layer[1], value_SCJK, start_S)
    out_SCHK = xla_attention(
        query_SCHK,
        keys_SJKM.transpose(0, 3, 1, 2),
        values_SJMK.transpose(0, 2, 1, 3),
        start_S[:, None] + jnp.arange(C),
        jnp.broadcast_to(jnp.arange(keys_SJKM.shape[3]), (S, keys_SJKM.shape[3])),
    )
    return out_SCHK, (keys_SJKM, values_SJMK)


def tiled_attention(
    query_NHK: jax.Array,
    key_NJK: jax.Array,
    value_NJK: jax.Array,
    layer: Layer,
    tiles: Tiles,
) -> tuple[jax.Array, Layer]:
    """The same for tokens of several slots that come in tiles, in the kernels' layout.

    Args:
      query_NHK: rotated queries.
      key_NJK: their rotated keys.
      value_NJK: their values.
      layer: the cache of this layer.
      tiles: whose the tokens are.

    Returns:
      [N, H, K] in the type of the queries, and the layer with the tokens written.
    """
    slot_N, position_N = tiles.of_tokens(len(layer[0]), len(query_NHK))

    def write(cache_SJMK: jax.Array, new_NJK: jax.Array) -> jax.Array:
        # Padding is out of bounds, where a scatter drops it.
        return cache_SJMK.at[slot_N, :, position_N].set(new_NJK, mode="drop", unique_indices=True)

    keys_SJMK, values_SJMK = map(write, layer, (key_NJK, value_NJK))
    interpret = jax.default_backend() == "cpu"
    out_NHK = tile_attention(query_NHK, keys_SJMK, values_SJMK, tiles, interpret=interpret)
    return out_NHK, (keys_SJMK, values_SJMK)


def _attend_in_tiles(
    config: PolicyConfig, chunk: tuple[jax.Array, ...], layer: Layer, start_S: jax.Array
) -> tuple[jax.Array, Layer]:
    """`tiled_attention` for slots that all have as many tokens: queries, keys and values."""
    S, C = chunk[0].shape[:2]
    T = min(C, tile_tokens(config.heads, config.kv_heads))
    tiles = -(-C // T)
    first_X = jnp.arange(tiles) * T
    padding = ((0, 0), (0, tiles * T - C), (0, 0), (0, 0))
    query_NHK, key_NJK, value_NJK = (jnp.pad(x, padding).reshape(-1, *x.shape[2:]) for x in chunk)
    out_NHK, layer = tiled_attention(
        query_NHK,
        key_NJK,
        value_NJK,
        layer,
        Tiles(
            jnp.repeat(jnp.arange(S), tiles),
            (start_S[:, None] + first_X).reshape(-1),
            jnp.tile(jnp.minimum(C - first_X, T), S),
            T,
        ),
    )
    return out_NHK.reshape(S, tiles * T, *out_NHK.shape[1:])[:, :C], layer


def _write_columns(cache_SJKM: jax.Array, chunk_SCJK: jax.Array, start_S: jax.Array) -> jax.Array:
    """Writes each slot's chunk at its own start."""
    # Slice by slice, not by indices into a flat cache: slots and heads may lie on several devices.
    update = jax.vmap(lambda row, chunk, at: jax.lax.dynamic_update_slice(row, chunk, (0, 0, at)))
    return update(cache_SJKM, chunk_SCJK.transpose(0, 2, 3, 1), start_S)


def _write_rows(cache_SJMK: jax.Array, chunk_SCJK: jax.Array, start_S: jax.Array) -> jax.Array:
    """Writes each slot's chunk at its own start."""
    update = jax.vmap(lambda row, chunk, at: jax.lax.dynamic_update_slice(row, chunk, (0, at, 0)))
    return update(cache_SJMK, chunk_SCJK.transpose(0, 2, 1, 3), start_S)
