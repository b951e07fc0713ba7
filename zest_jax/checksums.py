"""A number for every array, the same on any devices, by which a changed bit is noticed.

The sum, modulo 2^32, of an array's words, each times an odd weight that its position gives. Integer
sums that wrap round do not depend on their order, so the number doesn't depend on how the array is
spread over devices. A single wrong word always changes the sum (odd weights have an inverse); of
larger damage one in 2^32 is missed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Odd, its bits in no pattern: neighbours' weights have nothing in common.
_SPREAD = np.uint32(0x9E3779B1)


def checksums(tree: Any) -> dict[str, int]:
    """Path of every array of a tree -> its checksum.

    One compiled program per set of devices, whatever the number of arrays; arrays that are kept in
    host memory go through the device one at a time. Blocks until the numbers are there. With
    several processes all of them must call it, and all get the same numbers.

    Args:
      tree: JAX arrays of any real type, or of random keys.

    Returns:
      By `jax.tree_util.keystr`.
    """
    groups: dict[frozenset[jax.Device], dict[str, jax.Array]] = {}
    sums: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        if _elsewhere(leaf):
            near = jax.device_put(leaf, leaf.sharding.with_memory_kind(_near(leaf)))
            sums[name] = _sums([near])[0]
        else:
            groups.setdefault(frozenset(leaf.sharding.device_set), {})[name] = leaf
    for group in groups.values():
        sums |= zip(group, _sums(list(group.values())), strict=True)
    return {name: int(value) for name, value in jax.device_get(sums).items()}


def _near(leaf: jax.Array) -> str:
    """The kind of memory that computations on the leaf's devices read."""
    device: Any = next(iter(leaf.sharding.device_set))
    return device.default_memory().kind


def _elsewhere(leaf: jax.Array) -> bool:
    return leaf.sharding.memory_kind not in (None, _near(leaf))


@jax.jit
def _sums(leaves: Iterable[jax.Array]) -> list[jax.Array]:
    return [_sum(leaf) for leaf in leaves]


def _sum(leaf: jax.Array) -> jax.Array:
    words = _words(leaf)
    position: Any = jnp.uint32(0)
    for axis, size in enumerate(words.shape):
        position = position * np.uint32(size % 2**32) + jax.lax.broadcasted_iota(
            jnp.uint32, words.shape, axis
        )
    return jnp.sum(words * (position * _SPREAD | np.uint32(1)), dtype=jnp.uint32)


def _words(leaf: jax.Array) -> jax.Array:
    """The bits of an array as uint32, one word for each number (two for one of 64 bits)."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    bits = {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(leaf, bits).astype(jnp.uint32)
