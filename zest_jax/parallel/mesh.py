"""One mesh with named axes for every program.

- `data`: the batch is split, parameters are replicated (between hosts or slices with slow links).
- `fsdp`: the batch is split, and so are parameters and moments, gathered layer by layer as used.
- `tensor`: heads, feed-forward and vocabulary are split, activations are exchanged in every layer.
"""

import math
from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from zest_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")


def make_mesh(
    data: int = 1, fsdp: int = -1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh of axes (data, fsdp, tensor) over all devices, laid out for the machine's links.

    The axis types are Auto: the compiler places the collectives. (`jax.make_mesh` alone gives
    Explicit axes, under which a product over a sharded dimension is an error.)

    Args:
      data: size of the data axis.
      fsdp: size of the fsdp axis.
      tensor: size of the tensor axis. One of the three may be -1: whatever devices are left.
      devices: the devices to use; all of them if None.

    Raises:
      UserError: the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    free = [name for name, size in sizes.items() if size == -1]
    bad = [f"{name}={size}" for name, size in sizes.items() if size != -1 and size < 1]
    if bad or len(free) > 1:
        raise UserError(
            f"mesh sizes must be positive, and at most one of them -1 (the rest); got {sizes}"
        )
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free and len(devices) % fixed == 0:
        sizes[free[0]] = len(devices) // fixed
    if math.prod(sizes.values()) != len(devices):
        raise UserError(
            f"a mesh of data={data} x fsdp={fsdp} x tensor={tensor} does not fit {len(devices)} "
            "devices; choose sizes whose product is that number, or set one of them to -1"
        )
    # Not `jax.make_mesh`: on a TPU slice it refuses sizes that split one of the machine's own axes.
    placed = mesh_utils.create_device_mesh(
        tuple(sizes.values()), devices, allow_split_physical_axes=True
    )
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))
