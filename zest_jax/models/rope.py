"""The rotary position embedding, with the stretches that published checkpoints use.

Shape letters: B batch, L length, H heads, K head size, I frequencies (K / 2).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from zest_jax.models.config import RopeScaling


def rotary(
    position_BL: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [B, L, 1, K/2] of the rotary embedding, frequencies theta^(-2i/K).

    Args:
      position_BL: position of each token within its own sequence.
      head_dim: size of a head, K.
      theta: base of the frequencies.
      scaling: the checkpoint's stretch, or None.
    """
    frequency_I, factor = frequencies(head_dim, theta, scaling)
    angle = position_BL[:, :, None, None].astype(jnp.float32) * frequency_I
    if factor == 1.0:
        return jnp.cos(angle), jnp.sin(angle)
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(x_BLHK: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + K/2) of each head, the layout of Hugging Face's checkpoints."""
    a, b = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BLHK.dtype)


@functools.cache
def frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[np.ndarray, float]:
    """Angle per position of each pair of dimensions, and the factor on cosines and sines.

    Computed on the host in float32, in the order of operations of transformers: at positions of
    tens of thousands one rounding more in a frequency is visible in the logits.

    Returns:
      float32 [I], and 1.0 except for YaRN.
    """
    exponent_I = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # torch's power is correctly rounded almost everywhere, numpy's float32 one is not.
    base_I = np.power(float(theta), exponent_I.astype(np.float64)).astype(np.float32)
    plain_I = np.float32(1.0) / base_I
    if scaling is None:
        return plain_I, 1.0
    if scaling.kind == "linear":
        return plain_I / np.float32(scaling.factor), 1.0
    if scaling.kind == "llama3":
        return _llama3(plain_I, scaling), 1.0
    if scaling.kind == "yarn":
        attention = scaling.attention_factor
        if not attention:
            attention = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1.0 else 1.0
        return _yarn(base_I, head_dim, theta, scaling), attention
    raise ValueError(f"unknown rotary scaling {scaling.kind!r}")


def _llama3(plain_I: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Wavelengths beyond original_length / low_freq_factor are stretched, those below
    original_length / high_freq_factor kept, and those between mixed (Llama 3.1's rule)."""
    length, low, high = scaling.original_length, scaling.low_freq_factor, scaling.high_freq_factor
    # torch divides a number by a tensor through the reciprocal: two roundings.
    wave_I = np.float32(1) / plain_I * np.float32(2 * math.pi)
    stretched_I = plain_I / np.float32(scaling.factor)
    turns_I = np.float32(1) / wave_I * np.float32(length)
    keep_I = (turns_I - np.float32(low)) / np.float32(high - low)
    mixed_I = (1 - keep_I) * plain_I / np.float32(scaling.factor) + keep_I * plain_I
    between_I = np.where(wave_I > length / low, stretched_I, mixed_I)
    return np.where(wave_I < length / high, plain_I, between_I).astype(np.float32)


def _yarn(base_I: np.ndarray, head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """YaRN's ramp (Peng et al., 2023) over the dimensions that turn beta_fast .. beta_slow times
    within original_length: kept below it, stretched beyond it."""

    def dimension(turns: float) -> float:
        turn_length = scaling.original_length / (turns * 2 * math.pi)
        return head_dim * math.log(turn_length) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # transformers' guard against 0 / 0
    index_I = np.arange(head_dim // 2, dtype=np.float32)
    ramp_I = np.clip((index_I - np.float32(low)) / np.float32(high - low), 0, 1)
    keep_I = np.float32(1) - ramp_I
    plain_I = np.float32(1) / base_I
    stretched_I = np.float32(1) / (np.float32(scaling.factor) * base_I)
    return (stretched_I * (1 - keep_I) + plain_I * keep_I).astype(np.float32)
