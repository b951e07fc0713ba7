"""Where the arrays of a run lie: on one device, or on a mesh of all devices of all processes."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zest_jax.parallel.sharding import BATCH, param_shardings


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a run's arrays are placed.

    Attributes:
      mesh: the devices; None for one device, where everything is left as it is.
    """

    mesh: Mesh | None = None

    @property
    def shards(self) -> int:
        """Groups of devices that work on different rows."""
        if self.mesh is None:
            return 1
        return int(np.prod([self.mesh.shape[axis] for axis in BATCH[0]]))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Steps that are traced within see the mesh."""
        if self.mesh is None:
            yield
            return
        with jax.set_mesh(self.mesh):
            yield

    def params(self, tree: Any) -> Any:
        """Parameters, moments or whole states by the rules (`parallel/sharding.py`)."""
        return tree if self.mesh is None else _put(tree, param_shardings(tree, self.mesh))

    def whole(self, tree: Any) -> Any:
        """The same on every device."""
        if self.mesh is None:
            return tree
        place = NamedSharding(self.mesh, P())
        return _put(tree, jax.tree.map(lambda _: place, tree))

    def rows(self, tree: Any, axis: int = 0) -> Any:
        """Host arrays with one axis split over the groups of devices, which must divide it; those
        without that axis are whole."""
        if self.mesh is None:
            return tree
        split = NamedSharding(self.mesh, P(*[None] * axis, *BATCH))
        whole = NamedSharding(self.mesh, P())
        return _put(tree, jax.tree.map(lambda x: split if np.ndim(x) > axis else whole, tree))


def _put(tree: Any, places: Any) -> Any:
    """Places arrays that every process has whole, or that lie on devices already."""

    def one(x: Any, place: NamedSharding) -> jax.Array:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return jax.jit(lambda x: x, out_shardings=place)(x)
        if jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key):
            return jax.device_put(x, place)
        if jax.process_count() == 1:
            return jax.device_put(x, place)
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, place, lambda at: host[at])

    return jax.tree.map(one, tree, places)
