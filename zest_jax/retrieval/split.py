"""An exact index and its passages shared out over devices, as each of them sees it from within.

In a rollout of which every device runs its own part (`rollout/side_by_side.py`) an index of many
million passages is on no device whole. Each holds some of the rows. Devices search together, in
blocks of so many slots each: their queries go to all, every device looks through its own rows, the
best of them go back to who asked, and whoever holds the passages sends their token ids. What
travels at a time depends on the block and on the number of devices, not on how many episodes a
device has under way.

Shape letters: S slots, U queries of an action, Q query length, W slots of a block, X devices,
R retrieved, N passages of a device, E embedding size, P passage length, C observation length.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zest_jax.retrieval.blocks import in_blocks
from zest_jax.retrieval.exact import ExactIndex, best_candidates, guarded, shard_rows
from zest_jax.retrieval.retriever import Retriever
from zest_jax.retrieval.store import PassageStore, observation

BLOCK = 32
"""Slots of a device that search at a time."""


def may_split(retriever: Any) -> bool:
    """Whether a retriever's index and passages can be shared out; others are whole everywhere."""
    return (
        isinstance(retriever, Retriever)
        and isinstance(retriever.index, ExactIndex)
        and isinstance(retriever.store, PassageStore)
    )


def split_retriever(
    retriever: Retriever, mesh: Mesh, axes: tuple[str, ...], placed: dict[int, jax.Array]
) -> Retriever:
    """Places a retriever on a mesh, rows shared out over some of its axes, all else whole.

    Args:
      retriever: one for which `may_split`.
      mesh: the devices.
      axes: axes of the mesh, in the order of the rows.
      placed: arrays that were placed before, by `id`; those are taken, and new ones are added.

    Returns:
      The retriever, its rows filled up with zeros to equal shares.
    """
    index, store = retriever.index, retriever.store
    assert isinstance(index, ExactIndex)
    rows = functools.partial(_rows_on, mesh=mesh, axes=axes, placed=placed)
    whole = functools.partial(whole_on, mesh=mesh, placed=placed)
    index = dataclasses.replace(
        index,
        index_NE=jax.tree.map(rows, index.index_NE),
        exact_NE=jax.tree.map(rows, index.exact_NE),
        vectors=index.size,
    )
    store = dataclasses.replace(
        store,
        ids_NP=rows(store.ids_NP),
        length_N=rows(store.length_N),
        frame=jax.tree.map(whole, store.frame),
    )
    encoder = jax.tree.map(whole, retriever.encoder)
    return dataclasses.replace(retriever, encoder=encoder, index=index, store=store)


def split_specs(retriever: Retriever, axes: tuple[str, ...]) -> Retriever:
    """For `jax.shard_map`: how each array of a placed retriever is split."""
    whole = jax.tree.map(lambda _: P(), retriever)
    rows = functools.partial(jax.tree.map, lambda _: P(axes))
    index, store = retriever.index, retriever.store
    assert isinstance(index, ExactIndex)
    return dataclasses.replace(
        whole,
        index=dataclasses.replace(
            whole.index, index_NE=rows(index.index_NE), exact_NE=rows(index.exact_NE)
        ),
        store=dataclasses.replace(
            whole.store, ids_NP=rows(store.ids_NP), length_N=rows(store.length_N)
        ),
    )


@dataclasses.dataclass(frozen=True)
class SplitRetriever:
    """A device's share of a retriever, within `jax.shard_map` over `axes`; a `Searcher`.

    All devices must call it the same number of times. A slot whose queries have no length asks
    nothing, and finds nothing.

    Attributes:
      own: the retriever with this device's rows.
      axes: the axes that rows are split over.
      block: slots that search at a time, W.
    """

    own: Retriever
    axes: tuple[str, ...]
    block: int = BLOCK

    @property
    def retrieved(self) -> int:
        return self.own.retrieved

    def search(self, query_SUQ: jax.Array, length_SU: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rows [S, U, R], -1 where nothing was asked or found, and scores [S, U, R]."""
        S, U, Q = query_SUQ.shape
        R, index = self.retrieved, self.own.index
        vectors_BE = self.own.encoder.encode_queries(
            query_SUQ.reshape(S * U, Q), length_SU.reshape(S * U)
        )
        vector_SUE = vectors_BE.reshape(S, U, -1)

        def search(slot_W: jax.Array) -> tuple[jax.Array, jax.Array]:
            query_BE = vector_SUE[slot_W].reshape(len(slot_W) * U, -1)
            row_BR, score_BR = guarded(index, query_BE, R, self._search_all)
            return row_BR.reshape(-1, U, R), score_BR.reshape(-1, U, R)

        empty = (jnp.full((S, U, R), -1, jnp.int32), jnp.full((S, U, R), -jnp.inf, jnp.float32))
        return in_blocks(jnp.any(length_SU > 0, axis=1), search, empty, self.block, self.axes)

    def observe(
        self, row_SUR: jax.Array, asked_S: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """See `PassageStore.observe`."""
        store = self.own.store
        S, U, R = row_SUR.shape
        N, longest = store.ids_NP.shape

        def read(slot_W: jax.Array) -> tuple[jax.Array, jax.Array]:
            row_XURW = jax.lax.all_gather(row_SUR[slot_W], self.axes, tiled=True)
            at = row_XURW - jax.lax.axis_index(self.axes).astype(jnp.int32) * N
            mine = (at >= 0) & (at < N) & (row_XURW >= 0)
            at = jnp.clip(at, 0, N - 1)
            # One device holds each row, so that a sum brings it.
            ids = jnp.where(mine[..., None], store.ids_NP[at].astype(jnp.int32), 0)
            length = jnp.where(mine, store.length_N[at].astype(jnp.int32), 0)
            back = functools.partial(jax.lax.psum_scatter, axis_name=self.axes, tiled=True)
            return back(ids), back(length)

        empty = (jnp.zeros((S, U, R, longest), jnp.int32), jnp.zeros((S, U, R), jnp.int32))
        shown_S = jnp.any(row_SUR >= 0, axis=(1, 2))
        ids_SURP, length_SUR = in_blocks(shown_S, read, empty, self.block, self.axes)
        return observation(ids_SURP, length_SUR, asked_S, store.frame, store.size)

    def _search_all(self, query_BE: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
        """The best rows of all devices for this device's queries; `top_k` at most all rows."""
        index: Any = self.own.index
        N, X = index.index_NE.shape[0], jax.lax.axis_size(self.axes)
        first = jax.lax.axis_index(self.axes).astype(jnp.int32) * N
        all_BE = jax.lax.all_gather(query_BE, self.axes, tiled=True)
        row_BR, score_BR = index.search_rows(
            all_BE, min(top_k, N), jnp.clip(index.size - first, 0, N)
        )
        row_BR = jnp.where(row_BR >= 0, row_BR + first, -1)

        def back(x_BR: jax.Array) -> jax.Array:
            """What all devices found for this device's queries, side by side."""
            x_XBR = jax.lax.all_to_all(x_BR.reshape(X, -1, x_BR.shape[1]), self.axes, 0, 0)
            return jnp.moveaxis(x_XBR, 0, 1).reshape(len(query_BE), -1)

        # Devices stand in the order of their rows, so the first of equal scores is the lower row.
        return best_candidates(back(row_BR), back(score_BR), top_k)


def _rows_on(x: Any, mesh: Mesh, axes: tuple[str, ...], placed: dict[int, jax.Array]) -> jax.Array:
    """Any array [N, …] split by rows, filled up with zeros to equal shares."""
    if getattr(x, "sharding", None) == NamedSharding(mesh, P(axes)):
        return x
    if id(x) not in placed:
        placed[id(x)] = shard_rows(x, mesh, axes)
    return placed[id(x)]


def whole_on(x: Any, mesh: Mesh, placed: dict[int, jax.Array]) -> jax.Array:
    """An array that every device of a mesh has whole."""
    if getattr(x, "sharding", None) == NamedSharding(mesh, P()):
        return x
    if id(x) not in placed:
        host = np.asarray(x)
        placed[id(x)] = jax.make_array_from_callback(
            host.shape, NamedSharding(mesh, P()), lambda at: host[at]
        )
    return placed[id(x)]
