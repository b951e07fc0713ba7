"""Matrix products of few rows on NVIDIA GPUs, for a decoding step.

A product of 128 rows takes as long as its weights take to be read, if all of the chip reads them.
cuBLAS gives each part of a small result to one multiprocessor, which leaves half of them idle; the
Pallas (Triton) kernels here split the sum as well (`split_product`) and leave the parts to whoever
reads the result: the sum with the residual and the norm behind it (`add_and_norm`), or attention's
kernel. `gated_product` joins both products of a SwiGLU with what is done to them.

All sum in float32 and round where `policy.Block` rounds: only the order of the sums is another.

Shape letters: S slots, D width, X and Y what a matrix contracts and makes, P parts of a sum,
F feed-forward width.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

_MOST_ROWS = 256  # of one program


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one program of the grid takes, and how.

    Attributes:
      columns: of the result (of each of the two matrices of `gated_product`).
      inner: components contracted at a time.
      parts: of the sum.
      warps: of the program.
      stages: loads under way.
    """

    columns: int
    inner: int = 64
    parts: int = 1
    warps: int = 4
    stages: int = 4


def split_product(
    x_SX: jax.Array, weight_XY: jax.Array, tile: Tile, *, interpret: bool = False
) -> jax.Array:
    """x @ weight as parts [P, S, Y] (float32), whose sum over the first axis is the product.

    Args:
      x_SX: rows; S is a power of two, or a multiple of one that is at least 16.
      weight_XY: of the same type; Y is a multiple of the tile's columns, X of its parts times its
        inner components.
      tile: sizes.
      interpret: run it without a GPU, slowly.
    """
    (S, X), Y = x_SX.shape, weight_XY.shape[1]
    R, P = _rows(S), tile.parts
    part = X // P

    def kernel(x_ref: Any, weight_ref: Any, out_ref: Any) -> None:
        def step(i: jax.Array, total_RC: jax.Array) -> jax.Array:
            at = pl.ds(i * tile.inner, tile.inner)
            return total_RC + _dot(x_ref[:, at], weight_ref[at, :])

        zeros = jnp.zeros((R, tile.columns), jnp.float32)
        out_ref[...] = jax.lax.fori_loop(0, part // tile.inner, step, zeros)

    return pl.pallas_call(
        kernel,
        grid=(P, Y // tile.columns, S // R),
        in_specs=[
            pl.BlockSpec((R, part), lambda p, c, r: (r, p)),
            pl.BlockSpec((part, tile.columns), lambda p, c, r: (p, c)),
        ],
        out_specs=pl.BlockSpec((None, R, tile.columns), lambda p, c, r: (p, r, c)),
        out_shape=jax.ShapeDtypeStruct((P, S, Y), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="split_product",
    )(x_SX, weight_XY)


def gated_product(
    x_SX: jax.Array, gate_up_XY: jax.Array, tile: Tile, *, interpret: bool = False
) -> jax.Array:
    """silu(x @ gate) * (x @ up), [S, F] in the type of x.

    Args:
      x_SX: rows, as of `split_product`.
      gate_up_XY: both matrices side by side, Y = 2 F.
      tile: sizes.
      interpret: run it without a GPU, slowly.
    """
    (S, X), F = x_SX.shape, gate_up_XY.shape[1] // 2
    R, dtype = _rows(S), x_SX.dtype
    behind = F // tile.columns

    def kernel(x_ref: Any, gate_ref: Any, up_ref: Any, out_ref: Any) -> None:
        def step(i: jax.Array, totals: Any) -> Any:
            at = pl.ds(i * tile.inner, tile.inner)
            x_RI = x_ref[:, at]
            return tuple(
                total + _dot(x_RI, ref[at, :])
                for total, ref in zip(totals, (gate_ref, up_ref), strict=True)
            )

        zeros = jnp.zeros((R, tile.columns), jnp.float32)
        gate, up = jax.lax.fori_loop(0, X // tile.inner, step, (zeros, zeros))
        gate, up = (x.astype(dtype).astype(jnp.float32) for x in (gate, up))
        out_ref[...] = (gate / (1 + jnp.exp(-gate)) * up).astype(dtype)

    return pl.pallas_call(
        kernel,
        grid=(F // tile.columns, S // R),
        in_specs=[
            pl.BlockSpec((R, X), lambda c, r: (r, 0)),
            pl.BlockSpec((X, tile.columns), lambda c, r: (0, c)),
            pl.BlockSpec((X, tile.columns), lambda c, r: (0, behind + c)),
        ],
        out_specs=pl.BlockSpec((R, tile.columns), lambda c, r: (r, c)),
        out_shape=jax.ShapeDtypeStruct((S, F), dtype),
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="gated_product",
    )(x_SX, gate_up_XY, gate_up_XY)


def add_and_norm(
    x_SD: jax.Array,
    part_PSD: jax.Array,
    scale_D: jax.Array,
    eps: float,
    dtype: Any,
    *,
    warps: int = 4,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The residual with a product's parts added, and its RMS norm.

    Args:
      x_SD: the residual, float32.
      part_PSD: parts of a product, which is rounded to `dtype` before it is added.
      scale_D: of the norm.
      eps: its epsilon.
      dtype: of what is normed.
      warps: of a program, which takes one row.
      interpret: run it without a GPU, slowly.

    Returns:
      [S, D] float32, and [S, D] of `dtype`.
    """
    P, S, D = part_PSD.shape

    def kernel(x_ref: Any, part_ref: Any, scale_ref: Any, sum_ref: Any, norm_ref: Any) -> None:
        at_D = jnp.arange(pl.next_power_of_2(D))
        there_D = at_D < D
        load = functools.partial(triton.load, mask=there_D, other=0.0)
        whole_D = load(part_ref.at[0, at_D])
        for p in range(1, P):
            whole_D += load(part_ref.at[p, at_D])
        new_D = load(x_ref.at[at_D]) + whole_D.astype(dtype).astype(jnp.float32)
        triton.store(sum_ref.at[at_D], new_D, mask=there_D)
        shrink = jax.lax.rsqrt(jnp.sum(new_D * new_D) / D + eps)
        normed_D = new_D * shrink * load(scale_ref.at[at_D]).astype(jnp.float32)
        triton.store(norm_ref.at[at_D], normed_D.astype(dtype), mask=there_D)

    row = pl.BlockSpec((None, D), lambda s: (s, 0))
    return pl.pallas_call(
        kernel,
        grid=(S,),
        in_specs=[
            row,
            pl.BlockSpec((P, None, D), lambda s: (0, s, 0)),
            pl.BlockSpec((D,), lambda s: (0,)),
        ],
        out_specs=[row, row],
        out_shape=[jax.ShapeDtypeStruct((S, D), jnp.float32), jax.ShapeDtypeStruct((S, D), dtype)],
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="add_and_norm",
    )(x_SD, part_PSD, scale_D)


def _rows(slots: int) -> int:
    """Rows of a program: the largest power of two that divides them, up to `_MOST_ROWS`."""
    return min(slots & -slots, _MOST_ROWS)


def _dot(x_RI: jax.Array, weight_IC: jax.Array) -> jax.Array:
    return jax.lax.dot_general(
        x_RI, weight_IC, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
