"""One rollout on many devices: every one works through its own share of the prompts.

Each shard is an `Engine` of its own, with its own slots, cache and queue, so that devices exchange
nothing while they write. They meet where one of them searches a shared index
(`retrieval/split.py`), and to learn whether all are done. Devices that share a policy's heads
(the mesh's tensor axis) belong to one shard.

Shape letters: N episodes, P prompt length, X shards.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from zest_jax.models.policy import Params
from zest_jax.parallel.sharding import BATCH, for_decoding
from zest_jax.retrieval.split import (
    SplitRetriever,
    may_split,
    split_retriever,
    split_specs,
    whole_on,
)
from zest_jax.rollout.engine import Engine
from zest_jax.rollout.sampling import Draws

AXES: tuple[str, ...] = BATCH[0]
"""The axes of the mesh whose devices have episodes of their own."""


def shards_of(mesh: Mesh) -> int:
    """Shares of the episodes on a mesh, X."""
    return int(np.prod([mesh.shape[axis] for axis in AXES]))


def share_engine(engine: Engine, mesh: Mesh) -> Engine:
    """The engine of one shard: its share of the slots."""
    slots = -(-engine.spec.slots // shards_of(mesh))
    spec = dataclasses.replace(engine.spec, slots=slots)
    return dataclasses.replace(engine, spec=spec, axes=AXES, lockstep=mesh.shape["tensor"] > 1)


def place_retriever(retriever: Any, mesh: Mesh, placed: dict[int, jax.Array] | None = None) -> Any:
    """A retriever on the mesh: shared out by rows where it can be, whole on every device else.

    Args:
      retriever: what answers searches.
      mesh: the devices.
      placed: arrays that were placed before, by `id`: those are not placed a second time.
    """
    placed = {} if placed is None else placed
    if may_split(retriever):
        return split_retriever(retriever, mesh, AXES, placed)
    return jax.tree.map(functools.partial(whole_on, mesh=mesh, placed=placed), retriever)


def rollout_on(engine: Engine, mesh: Mesh) -> Callable[..., Any]:
    """`Engine.rollout` over a mesh, to be jitted and called within `jax.set_mesh(mesh)`.

    Args:
      engine: from `share_engine`.
      mesh: the devices.

    Returns:
      A function of (params, table, retriever, prompt_NP, prompt_length_N, draws, count_X): the
      rows of each shard stand together, of which the first count_X[x] are prompts; draws must have
      streams. It returns trajectories of the same rows, and counters with an axis X.
    """

    # Compiled steps may ask the host where all axes are manual only.
    manual = AXES if mesh.shape["tensor"] > 1 else tuple(mesh.axis_names)

    def rollout(
        params: Params,
        table: Any,
        retriever: Any,
        prompt_NP: jax.Array,
        prompt_length_N: jax.Array,
        draws: Draws,
        count_X: jax.Array,
    ) -> tuple[Any, dict[str, jax.Array]]:
        split = may_split(retriever)
        whole = functools.partial(jax.tree.map, lambda _: P())
        rows = P(AXES)
        specs: Any = (P(), P(), rows)  # of the draws

        def shard(params, table, retriever, prompt_NP, prompt_length_N, draws, count_1):  # type: ignore[no-untyped-def]
            if split:
                retriever = SplitRetriever(retriever, AXES)
            out, counters = engine.rollout(
                params, table, retriever, prompt_NP, prompt_length_N, draws, count_1[0]
            )
            return out, {name: jnp.asarray(value)[None] for name, value in counters.items()}

        return jax.shard_map(
            shard,
            mesh=mesh,
            in_specs=(
                whole(params),
                whole(table),
                split_specs(retriever, AXES) if split else whole(retriever),
                rows,
                rows,
                Draws(*specs),
                rows,
            ),
            out_specs=(rows, rows),
            axis_names=frozenset(manual),
            check_vma=False,
        )(
            for_decoding(params, engine.config.dtype),
            table,
            retriever,
            prompt_NP,
            prompt_length_N,
            draws,
            count_X,
        )

    return rollout


def deal(count: int, shards: int) -> np.ndarray:
    """How many of `count` neighbouring episodes each shard gets: int32 [X], as even as can be."""
    return np.array([len(part) for part in np.array_split(np.arange(count), shards)], np.int32)
