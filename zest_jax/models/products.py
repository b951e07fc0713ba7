"""A matrix product whose result is float32 while both of its gradients stay in the inputs' type."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def matmul_float32(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b accumulated and returned in float32: [..., N, K] and [..., K, M] -> [..., N, M].

    With bfloat16 inputs autodiff would multiply a float32 cotangent by a bfloat16 operand, which no
    matrix unit does: XLA widens both and runs a product a tenth as fast. Here the cotangent is
    rounded to the inputs' type first, as in any bfloat16 training step. For float32 inputs nothing
    changes. Leading axes must be equal (no broadcasting).
    """
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _forward(a: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return matmul_float32(a, b), (a, b)


def _backward(
    kept: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    a, b = kept
    cotangent = cotangent.astype(a.dtype)
    return (
        jnp.matmul(cotangent, b.mT).astype(a.dtype),
        jnp.matmul(a.mT, cotangent).astype(b.dtype),
    )


matmul_float32.defvjp(_forward, _backward)
