"""Low-rank adapters as parameters: added, told apart from their base, and merged into it.

The arithmetic is in `policy.Block`. Parameters of a policy with adapters are one nested dict; what
is trained and checkpointed is the part whose names hold `_lora_`, and the rest is frozen and may be
shared by several roles. `split_lora` and `join` only rearrange dicts; no array is copied.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from zest_jax.models.config import MATRICES, PolicyConfig
from zest_jax.models.policy import Params, init_params


def add_lora(config: PolicyConfig, params: Params, key: jax.Array) -> Params:
    """Parameters of a base model with fresh adapters beside them: A normal, B zero.

    A has the variance 1 / (size of what it contracts), so that x A is about as large as x. With
    B = 0 the model is the base exactly.

    Args:
      config: the policy's shape, with `lora`.
      params: the base, without adapters; any type.
      key: draws A.

    Returns:
      The same arrays and the float32 adapters.

    Raises:
      ValueError: there are adapters already.
    """
    # Compiled, so that the base's own random weights are never made.
    draw = jax.jit(lambda key: split_lora(init_params(config, key))[0])
    return join(params, draw(key))


def split_lora(params: Params) -> tuple[Params, Params]:
    """(adapters, everything else), two nested dicts over the same arrays."""
    adapters: Params = {}
    frozen: Params = {}
    for name, value in params.items():
        if isinstance(value, dict):
            inner, outer = split_lora(value)
            adapters |= {name: inner} if inner else {}
            frozen |= {name: outer} if outer else {}
        else:
            (adapters if "_lora_" in name else frozen)[name] = value
    return adapters, frozen


def join(frozen: Params | None, trained: Params) -> Params:
    """The nested dict with the leaves of both; `trained` itself where nothing is frozen.

    Raises:
      ValueError: a leaf that is in both.
    """
    if frozen is None:
        return trained
    out = dict(frozen)
    for name, value in trained.items():
        if name not in out:
            out[name] = value
        elif isinstance(value, dict) and isinstance(out[name], dict):
            out[name] = join(out[name], value)
        else:
            raise ValueError(f"parameter {name} is both frozen and trained")
    return out


def merge_lora(config: PolicyConfig, params: Params) -> tuple[PolicyConfig, Params]:
    """The same model without adapters: W + (alpha / rank) A B, computed and given in float32.

    Args:
      config: the policy's shape, with or without `lora`.
      params: base and adapters.

    Returns:
      The shape without `lora` and its parameters: new arrays for the matrices that had adapters,
      the given ones for all others.
    """
    if config.lora is None:
        return config, params
    adapters, frozen = split_lora(params)
    merged = dict(frozen["blocks"])
    for target in config.lora.targets:
        ins, outs = MATRICES[target]
        a, b = (adapters["blocks"][name] for name in config.lora.names(target))
        name = f"{target}_{ins}{outs}"
        merged[name] = _merged(merged[name], a, b, config.lora.scale)
    return dataclasses.replace(config, lora=None), frozen | {"blocks": merged}


def fingerprint(params: Params) -> int:
    """A number that other values of the same shapes hardly share: a sum of hashed bits.

    Checkpoints of a run with adapters do not hold the base; this tells whether the one that is
    loaded later is still the same. Sums of integers are exact, so no device or mesh changes it.
    """
    total = 0
    for number, leaf in enumerate(jax.tree.leaves(params)):
        total += (2 * number + 1) * int(_hash_sum(leaf))
    return total % 2**32


@jax.jit
def _hash_sum(x: jax.Array) -> jax.Array:
    unsigned: Any = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    # Multiplied and folded: in a plain sum, a change of every element by a power of 2 could cancel.
    place = jnp.arange(x.size, dtype=jnp.uint32).reshape(x.shape)
    mixed = bits + place * jnp.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x7FEB352D)
    return jnp.sum(mixed ^ (mixed >> 15), dtype=jnp.uint32)


@functools.partial(jax.jit, static_argnums=3)
def _merged(weight: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """Of all layers at once: [layers, X…, Y…], [layers, X…, A], [layers, A, Y…]."""
    layers, rank = a.shape[0], a.shape[-1]
    flat_a, flat_b = a.reshape(layers, -1, rank), b.reshape(layers, rank, -1)
    # Accelerators would multiply float32 in fewer bits unless told.
    product = jnp.matmul(
        flat_a.astype(jnp.float32), flat_b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    return weight.astype(jnp.float32) + scale * product.reshape(weight.shape)
