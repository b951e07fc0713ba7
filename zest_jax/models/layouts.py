"""From the stored tensors of a model folder to parameters, for any network described by a table.

A folder stores each layer's matrices as [out, in] with heads flattened; ours are stacked over
layers with heads as dimensions of their own. A parameter's name ends in one letter per dimension,
and the table gives the letters of the stored tensor, so both ways are views and copies of one
tensor: a value is never computed with, only moved (and cast, where the types differ).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from zest_jax.errors import UserError
from zest_jax.models.tensor_files import Stored
from zest_jax.parallel.sharding import param_shardings

_LISTED = 12  # names in an error before it says "and … more"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Names and shapes of a network's tensors in a folder.

    Attributes:
      outer: our name -> stored name and letters, a space between the groups that it flattens.
      layer: the same for the parameters of a layer, stored under `prefix`, a number and a dot.
      prefix: what stands before the number of a layer, like "model.layers.".
      layers: how many there are.
      sizes: what each letter stands for.
    """

    outer: Mapping[str, tuple[str, str]]
    layer: Mapping[str, tuple[str, str]]
    prefix: str
    layers: int
    sizes: Mapping[str, int]

    def numbers(self, path: tuple[Any, ...]) -> range:
        """The layers of which a parameter holds a tensor each (path: as of a tree's leaf)."""
        return range(self.layers if len(path) > 1 else 1)

    def stored_name(self, path: tuple[Any, ...], layer: int) -> tuple[str, str]:
        """Stored name and letters of a parameter, ("embed_VD",) or ("blocks", "q_DHK")."""
        key = path[-1].key
        if len(path) == 1:
            return self.outer[key]
        name, letters = self.layer[key]
        return f"{self.prefix}{layer}.{name}", letters

    def stored_shape(self, letters: str) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[a] for a in group) for group in letters.split())

    def view(self, files: Mapping[str, Stored], path: tuple[Any, ...], layer: int) -> np.ndarray:
        """The stored tensor seen in our layout, without a copy."""
        name, letters = self.stored_name(path, layer)
        flat = letters.replace(" ", "")
        ours = path[-1].key.rsplit("_", 1)[1]
        view = files[name].view().reshape([self.sizes[a] for a in flat])
        return view.transpose([flat.index(a) for a in ours])


def to_stored(array: np.ndarray, key: str, letters: str) -> np.ndarray:
    """Our layout -> the stored one."""
    ours = key.rsplit("_", 1)[1]
    flat = letters.replace(" ", "")
    sizes = dict(zip(ours, array.shape, strict=True))
    shape = [math.prod(sizes[a] for a in group) for group in letters.split()]
    return array.transpose([ours.index(a) for a in flat]).reshape(shape)


def misfits(
    layout: Layout, shapes: Any, files: Mapping[str, Stored], ignored: Callable[[str], bool]
) -> list[str]:
    """What is missing, too much or of the wrong shape, a sentence each.

    Args:
      layout: the network's tensors.
      shapes: its parameters as `jax.ShapeDtypeStruct`s.
      files: the stored tensors.
      ignored: which stored names may stand there beside those of the network.
    """
    problems, expected = [], set()
    for path, _ in jax.tree_util.tree_leaves_with_path(shapes):
        for layer in layout.numbers(path):
            name, letters = layout.stored_name(path, layer)
            expected.add(name)
            want = layout.stored_shape(letters)
            if name not in files:
                problems.append(f"{name} {list(want)} is missing")
            elif files[name].shape != want:
                got = list(files[name].shape)
                problems.append(f"{name} has shape {got} instead of {list(want)}")
    strangers = [n for n in files if n not in expected and not ignored(n)]
    return problems + [f"{name} is unexpected" for name in strangers]


def refuse(folder: Path, problems: list[str]) -> None:
    """Raises a UserError that names the problems of a folder's weights, if there are any."""
    if problems:
        rest = f", and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise UserError(
            f"the weights in {folder} do not fit its config.json: "
            f"{'; '.join(problems[:_LISTED])}{rest}; fetch or export the model again"
        )


def read_params(
    layout: Layout,
    shapes: Any,
    files: Mapping[str, Stored],
    mesh: Mesh | None = None,
    param_dtype: str = "float32",
) -> Any:
    """Copies the parameters out of mapped files, one stacked parameter at a time.

    Each process and device gets only the shards that the rules give it.

    Args:
      layout: the network's tensors, which `misfits` has found to be there.
      shapes: the parameters as `jax.ShapeDtypeStruct`s.
      files: the stored tensors.
      mesh: where to place the parameters; None for the default device.
      param_dtype: type of the parameters in memory.
    """
    target = np.dtype(jnp.dtype(param_dtype))
    shardings = param_shardings(shapes, mesh) if mesh is not None else None

    def read(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct, sharding: Any = None) -> jax.Array:
        views = [layout.view(files, path, i) for i in layout.numbers(path)]
        stacked = len(path) > 1

        @functools.cache
        def part(index: tuple[tuple[int, int, int], ...]) -> np.ndarray:
            """The values under slices given as (start, stop, step)."""
            cuts = tuple(slice(*cut) for cut in index)
            if not stacked:
                return views[0][cuts].astype(target, order="C")
            chosen = views[cuts[0]]
            out = np.empty((len(chosen), *chosen[0][cuts[1:]].shape), target)
            for i, view in enumerate(chosen):
                out[i] = view[cuts[1:]]
            return out

        def callback(index: tuple[slice, ...] | None) -> np.ndarray:
            # Replicas share one copy (slices are hashable only from Python 3.12 on).
            cuts = index or (slice(None),) * len(shape.shape)
            return part(tuple(c.indices(n) for c, n in zip(cuts, shape.shape, strict=True)))

        if sharding is None:
            return jnp.asarray(callback(None))
        return jax.make_array_from_callback(shape.shape, sharding, callback)

    trees = (shapes,) if shardings is None else (shapes, shardings)
    return jax.tree_util.tree_map_with_path(read, *trees)
