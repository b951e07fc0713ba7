"""A sum with the residual and the RMS norm of it in one pass over a row, on NVIDIA GPUs.

XLA takes about twice as long for the few rows of a decoding step, where each norm is a launch or
two of its own. The same is done, rounded where `policy.Block` rounds.

Shape letters: S slots, D width.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

_WARPS = 8


def add_and_norm(
    x_SD: jax.Array,
    added_SD: jax.Array,
    scale_D: jax.Array,
    eps: float,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """x + added, and the RMS norm of that.

    Args:
      x_SD: the residual, float32.
      added_SD: what a product gave, in the compute type.
      scale_D: of the norm.
      eps: its epsilon.
      interpret: run it without a GPU, slowly.

    Returns:
      [S, D] float32, and [S, D] in the type of `added_SD`.
    """
    S, D = x_SD.shape

    def kernel(x_ref: Any, added_ref: Any, scale_ref: Any, sum_ref: Any, norm_ref: Any) -> None:
        at_D = jnp.arange(pl.next_power_of_2(D))
        there_D = at_D < D
        load = functools.partial(triton.load, mask=there_D, other=0.0)
        sum_D = load(x_ref.at[at_D]) + load(added_ref.at[at_D]).astype(jnp.float32)
        shrink = jax.lax.rsqrt(jnp.sum(sum_D * sum_D) / D + eps)
        normed_D = sum_D * shrink * load(scale_ref.at[at_D]).astype(jnp.float32)
        triton.store(sum_ref.at[at_D], sum_D, mask=there_D)
        triton.store(norm_ref.at[at_D], normed_D.astype(norm_ref.dtype), mask=there_D)

    row = pl.BlockSpec((None, D), lambda s: (s, 0))
    return pl.pallas_call(
        kernel,
        grid=(S,),
        in_specs=[row, row, pl.BlockSpec((D,), lambda s: (0,))],
        out_specs=[row, row],
        out_shape=[
            jax.ShapeDtypeStruct((S, D), jnp.float32),
            jax.ShapeDtypeStruct((S, D), added_SD.dtype),
        ],
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name="add_and_norm",
    )(x_SD, added_SD, scale_D)
