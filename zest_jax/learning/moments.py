"""AdamW whose moments take 8 bits each instead of 32: two bytes and a little per parameter, not 8.

**Codes.** A moment is stored in blocks along its last axis, each with a float32 scale, the block's
largest magnitude. A value divided by its scale is one of a row of levels that grow by a constant
factor, and 0:

    first moment:  0 and +-2^-16 .. 1 in 126 equal ratios (of 9.2 %), an int8 with its sign
    second moment: 0 and 2^-32 .. 1 in 254 equal ratios (of 9.1 %), a uint8

Equal ratios, since Adam divides one moment by the root of the other: what counts is how well small
values are kept, of weights whose gradients are thousands of times smaller than their neighbours'.
Evenly spaced levels would take those to 0, in the second moment with a division by epsilon as the
result. The range of the second moment is that of the first one squared (so a code of its square
root would be the same code). A second moment below it takes the smallest level: such a weight moves
less than it would, never more.

**Rounding** is stochastic: up with the probability that makes the expected value exact. A decay of
0.98 changes a value by much less than the distance of two levels; rounded to the nearest one it
would be lost at every step, moments would never shrink, and small gradients that point the same way
would never add up. Rounded at random they do so on average. The randomness is a hash of the step
and the element's index: the same on every mesh, and after a resumption.

The arithmetic is float32, layer by layer where leaves are stacked, and the step itself is taken
with the moments as they are before they are rounded. A step that does not apply (`applies`, as the
updates say it of one that is not finite) leaves codes, scales and count as they were.

Dettmers et al. (2022), "8-bit optimizers via block-wise quantization", use blocks of another size,
a code that mixes both spacings, and the nearest level.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

MU_TOP, MU_OCTAVES = 127, 16.0  # codes -127 .. 127; the smallest level is 2^-16 of the scale
NU_TOP, NU_OCTAVES = 255, 32.0
_BLOCKS = (128, 64, 32)


class Adam8BitState(NamedTuple):
    """Trees like the parameters: codes of their very shapes, and scales whose last axis counts
    blocks (so that the sharding rules of a parameter hold for both).

    Attributes:
      count: steps made.
      mu, mu_scale: int8 codes and float32 scales of the first moment.
      nu, nu_scale: uint8 codes and float32 scales of the second moment.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: Any
    mu_scale: Any
    nu: Any
    nu_scale: Any


def adamw_8bit(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Callable[[Any], Any] | None = None,
) -> optax.GradientTransformation:
    """`optax.adamw` with the moments of `scale_by_adam_8bit`; the arguments are the same."""
    return optax.chain(
        scale_by_adam_8bit(b1, b2, eps),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def scale_by_adam_8bit(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    """Adam's direction, m / (sqrt(v) + eps) with both corrected for their start at 0.

    Kingma and Ba (2015), algorithm 1; between steps m and v are kept in 8 bits, see above. Where
    `applies`, an extra argument of `update`, is False, the state comes back as it is.
    """

    def init(params: Any) -> Adam8BitState:
        def codes(dtype: Any) -> Any:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), params)

        def scales() -> Any:
            return jax.tree.map(lambda x: jnp.zeros(_scale_shape(x.shape), jnp.float32), params)

        zero = jnp.zeros((), jnp.int32)
        return Adam8BitState(zero, codes(jnp.int8), scales(), codes(jnp.uint8), scales())

    def update(
        grads: Any,
        state: Adam8BitState,
        params: Any = None,
        *,
        applies: jax.Array | bool = True,
        **_: Any,
    ) -> tuple[Any, Adam8BitState]:
        del params
        count = optax.safe_increment(state.count)
        correction_1, correction_2 = 1 - b1**count, 1 - b2**count

        def one(grad: jax.Array, *stored_and_salt: jax.Array) -> tuple[jax.Array, ...]:
            mu, mu_scale, nu, nu_scale, salt = stored_and_salt
            g = grad.astype(jnp.float32)
            m = b1 * decode_mu(mu, mu_scale) + (1 - b1) * g
            v = b2 * decode_nu(nu, nu_scale) + (1 - b2) * g * g
            step = (m / correction_1) / (jnp.sqrt(v / correction_2) + eps)
            bits = _hash(_index(grad.shape) ^ salt)
            # 16 bits for each rounding, in the middles of their intervals.
            dither_m = ((bits >> 16).astype(jnp.float32) + 0.5) / 2**16
            dither_v = ((bits & 0xFFFF).astype(jnp.float32) + 0.5) / 2**16
            new = (*encode_mu(m, dither_m), *encode_nu(v, dither_v))
            old = (mu, mu_scale, nu, nu_scale)
            kept = (jnp.where(applies, n, o) for n, o in zip(new, old, strict=True))
            return step.astype(grad.dtype), *kept

        leaves, tree = jax.tree.flatten(grads)
        stored = [jax.tree.leaves(part) for part in state[1:]]
        results = []
        for number, args in enumerate(zip(leaves, *stored, strict=True)):
            salt = _hash(_hash(count.astype(jnp.uint32)) + jnp.uint32(number))
            if args[0].ndim < 3:
                results.append(one(*args, salt))
                continue
            results.append(_layer_by_layer(one, args, salt))
        steps, *parts = (jax.tree.unflatten(tree, part) for part in zip(*results, strict=True))
        return steps, Adam8BitState(jnp.where(applies, count, state.count), *parts)

    return optax.GradientTransformationExtraArgs(init, update)


def _layer_by_layer(
    one: Callable[..., tuple[jax.Array, ...]], stacked: tuple[jax.Array, ...], salt: jax.Array
) -> tuple[jax.Array, ...]:
    """What `one` makes of every layer of a stacked leaf, each written where it was read: neither
    float32 moments nor a second copy of gradient or codes ever exist for more than a layer."""

    def layer(n: jax.Array, buffers: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        inputs = [x[n] for x in buffers]
        outputs = one(*inputs, _hash(salt + n.astype(jnp.uint32)))
        return tuple(x.at[n].set(new) for x, new in zip(buffers, outputs, strict=True))

    return jax.lax.fori_loop(0, stacked[0].shape[0], layer, stacked)


# ------------------------------------------------------------------------- codes


def encode_mu(x: jax.Array, dither: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 codes of the shape of x, and a scale per block; `dither` is uniform in (0, 1)."""
    ratio, scale = _split(x)
    code = jnp.sign(ratio) * _level_of(jnp.abs(ratio), dither, MU_TOP, MU_OCTAVES)
    return code.astype(jnp.int8), scale


def decode_mu(code: jax.Array, scale: jax.Array) -> jax.Array:
    """The float32 values behind `encode_mu`'s codes."""
    signed = code.astype(jnp.float32)
    value = jnp.sign(signed) * _level(jnp.abs(signed), MU_TOP, MU_OCTAVES)
    return value * _spread(scale, code.shape)


def encode_nu(x: jax.Array, dither: jax.Array) -> tuple[jax.Array, jax.Array]:
    """uint8 codes and scales of values >= 0, of which only 0 itself becomes 0."""
    ratio, scale = _split(x)
    code = _level_of(ratio, dither, NU_TOP, NU_OCTAVES)
    return jnp.maximum(code, (ratio > 0).astype(jnp.float32)).astype(jnp.uint8), scale


def decode_nu(code: jax.Array, scale: jax.Array) -> jax.Array:
    """The float32 values behind `encode_nu`'s codes."""
    value = _level(code.astype(jnp.float32), NU_TOP, NU_OCTAVES)
    return value * _spread(scale, code.shape)


def block_size(length: int) -> int:
    """Elements that share a scale along an axis: at most 128.

    Blocks shall not straddle the shards of a split axis, so a smaller block is taken where that
    makes their number a multiple of 8. What no block divides is padded while it is computed with.
    """
    if length <= _BLOCKS[0]:
        return max(length, 1)
    for shards in (8, 1):
        for block in _BLOCKS:
            if length % (block * shards) == 0:
                return block
    return _BLOCKS[0]


def _scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], -(-shape[-1] // block_size(shape[-1]))) if shape else ()


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Values over their block's largest magnitude, and those magnitudes."""
    size = jnp.abs(x)
    if x.ndim:
        length, block = x.shape[-1], block_size(x.shape[-1])
        count = -(-length // block)
        if count * block != length:
            size = jnp.pad(size, [(0, 0)] * (x.ndim - 1) + [(0, count * block - length)])
        size = jnp.max(size.reshape(*x.shape[:-1], count, block), axis=-1)
    size = jnp.where(size < jnp.finfo(jnp.float32).tiny, 0.0, size)  # no division by subnormals
    return x / _spread(jnp.where(size > 0, size, 1.0), x.shape), size


def _spread(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Each block's scale for each of its elements."""
    if not shape:
        return scale
    wide = jnp.broadcast_to(scale[..., None], (*scale.shape, block_size(shape[-1])))
    return wide.reshape(*scale.shape[:-1], -1)[..., : shape[-1]]


def _level(code: jax.Array, top: int, octaves: float) -> jax.Array:
    """Code 0 is 0, code 1 is 2^-octaves, code `top` is 1, with equal ratios between."""
    return jnp.where(code == 0, 0.0, jnp.exp2((code - top) * (octaves / (top - 1))))


def _level_of(ratio: jax.Array, dither: jax.Array, top: int, octaves: float) -> jax.Array:
    """The code, as float32, of one of the two levels around a ratio in [0, 1]: the upper one with
    the probability that makes the expected level the ratio itself."""
    place = top + jnp.log2(jnp.maximum(ratio, 2.0**-126)) * ((top - 1) / octaves)
    lower = jnp.clip(jnp.floor(place), 0, top - 1)
    below, above = _level(lower, top, octaves), _level(lower + 1, top, octaves)
    return lower + (dither * (above - below) < ratio - below)


# ------------------------------------------------------------------------- dither


def _index(shape: tuple[int, ...]) -> jax.Array:
    """The number of every element in row-major order, modulo 2^32."""
    total, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        along = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        total, stride = total + along * jnp.uint32(stride % 2**32), stride * shape[axis]
    return total


def _hash(x: jax.Array) -> jax.Array:
    """32 bits that look random, from 32 bits: a bijection of xors, shifts and products (C.
    Wellons, "lowbias32"). It costs an accelerator next to nothing, unlike a counter of `jax.random`
    for every element."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
