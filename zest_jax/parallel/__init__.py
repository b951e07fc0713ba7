"""The mesh of devices, and where every parameter and batch lies on it."""

from zest_jax.parallel.mesh import AXES, make_mesh
from zest_jax.parallel.sharding import (
    batch_sharding,
    param_shardings,
    plan_shardings,
    shard_batch,
    shard_params,
)

__all__ = [
    "AXES",
    "batch_sharding",
    "make_mesh",
    "param_shardings",
    "plan_shardings",
    "shard_batch",
    "shard_params",
]
