"""The mesh of devices, and where every parameter and batch lies on it."""

from zest_jax.parallel.mesh import AXES, make_mesh
from zest_jax.parallel.placement import Placement
from zest_jax.parallel.sharding import (
    batch_sharding,
    keep_rows_split,
    param_shardings,
    plan_shardings,
    shard_batch,
    shard_params,
)

__all__ = [
    "AXES",
    "Placement",
    "batch_sharding",
    "keep_rows_split",
    "make_mesh",
    "param_shardings",
    "plan_shardings",
    "shard_batch",
    "shard_params",
]
