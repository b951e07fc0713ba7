"""Exact search on the device: every score computed, chunk by chunk, with a running top-k.

The vectors are an array of any float type, or 8-bit codes with a scale for every row (`Int8Rows`)
whose best candidates may be scored again with the vectors themselves; both may be split by rows
over the devices of a mesh. On a TPU `recall_target` chooses `approx_max_k` in place of a sort.

Shape letters: N vectors, E embedding size, S slots (queries), R retrieved, K candidates, C chunk.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zest_jax.errors import UserError
from zest_jax.retrieval import exact_triton
from zest_jax.retrieval.interface import Found

CHUNK = 262_144


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Int8Rows:
    """Vectors in 8 bits a component, x ~ code * scale; the scale is the row's largest / 127.

    Attributes:
      code_NE: int8, -127 to 127.
      scale_N: float32.
    """

    code_NE: jax.Array
    scale_N: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, E)."""
        return self.code_NE.shape


Vectors = jax.Array | Int8Rows


def quantise_rows(vector_NE: jax.Array) -> Int8Rows:
    """Vectors as 8-bit codes; rows of zeros stay zeros. Jittable."""
    vector_NE = vector_NE.astype(jnp.float32)
    scale_N = jnp.max(jnp.abs(vector_NE), axis=1) / 127
    code_NE = jnp.round(vector_NE / jnp.where(scale_N > 0, scale_N, 1)[:, None])
    return Int8Rows(code_NE.astype(jnp.int8), scale_N)


def exact_search(
    index_NE: Vectors,
    query_SE: jax.Array,
    retrieved: int,
    chunk: int = CHUNK,
    *,
    recall_target: float | None = None,
    valid: jax.Array | int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The `retrieved` passages with the largest inner product, best first; recall 1.0.

    Scores are float32 whatever the index's type, and never exist for more than one chunk of
    passages at a time. Ties go to the lower row.

    Args:
      index_NE: passage vectors.
      query_SE: query vectors.
      retrieved: R, at most N.
      chunk: passages scored at a time.
      recall_target: None for a recall of 1; else the expected share of the best passages that
        each chunk's `jax.lax.approx_max_k` keeps. A gain on TPUs only.
      valid: the rows from this one on are padding: never found, and where too few are left the
        row is -1 and the score -inf. May be traced.

    Returns:
      Row numbers [S, R] int32 and scores [S, R] float32.
    """
    N = index_NE.shape[0]
    S = query_SE.shape[0]
    if retrieved > N:
        raise ValueError(f"{retrieved} passages asked for, the index has {N}")

    def best_of(part_CE: Vectors, first_row: Any) -> tuple[jax.Array, jax.Array]:
        score_SC = _scores(part_CE, query_SE)
        C = score_SC.shape[1]
        if valid is not None:
            score_SC = jnp.where(first_row + jnp.arange(C) < valid, score_SC, -jnp.inf)
        count = min(retrieved, C)
        if recall_target is None:
            score_SR, at_SR = jax.lax.top_k(score_SC, count)
        else:
            score_SR, at_SR = jax.lax.approx_max_k(score_SC, count, recall_target=recall_target)
        return (first_row + at_SR).astype(jnp.int32), score_SR

    def merge(best: Any, part_CE: Vectors, first_row: Any) -> tuple[jax.Array, jax.Array]:
        row_SR, score_SR = best_of(part_CE, first_row)
        row_SX = jnp.concatenate([best[0], row_SR], axis=1)
        score_SX = jnp.concatenate([best[1], score_SR], axis=1)
        score_SR, pick_SR = jax.lax.top_k(score_SX, retrieved)
        return jnp.take_along_axis(row_SX, pick_SR, axis=1), score_SR

    if N <= chunk:
        best = best_of(index_NE, 0)
    else:
        whole = N // chunk

        def step(best: Any, i: jax.Array) -> tuple[Any, tuple[()]]:
            part_CE = jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk), index_NE
            )
            return merge(best, part_CE, i * chunk), ()

        best = (jnp.zeros((S, retrieved), jnp.int32), jnp.full((S, retrieved), -jnp.inf))
        best, _ = jax.lax.scan(step, best, jnp.arange(whole))
        if whole * chunk < N:
            rest = jax.tree.map(lambda x: x[whole * chunk :], index_NE)
            best = merge(best, rest, whole * chunk)
    if valid is None:
        return best
    return jnp.where(best[1] > -jnp.inf, best[0], -1), best[1]


def fused(index_NE: Vectors) -> bool:
    """Whether `fused_search` takes these vectors here: on an NVIDIA GPU whose kernel passed its
    test, of 16 or 8 bits, and enough of them."""
    small = isinstance(index_NE, Int8Rows) or index_NE.dtype in (jnp.bfloat16, jnp.float16)
    return small and exact_triton.fits(*index_NE.shape) and exact_triton.usable()[0]


def fused_search(
    index_NE: Vectors,
    query_SE: jax.Array,
    retrieved: int,
    exact_NE: jax.Array | None = None,
    *,
    valid: jax.Array | int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`exact_search` by the kernel of `exact_triton`, on NVIDIA GPUs; jittable.

    Args:
      index_NE, query_SE, retrieved, valid: as of `exact_search`.
      exact_NE: what candidates of 8-bit codes are scored with again; None for the codes.
      interpret: try the kernel on any machine, slowly.
    """
    if isinstance(index_NE, Int8Rows):
        codes, scales = index_NE.code_NE, index_NE.scale_N
        row_SK = exact_triton.candidates(
            codes, query_SE, retrieved, scales, valid, interpret=interpret
        )
        return rescore(index_NE if exact_NE is None else exact_NE, query_SE, row_SK, retrieved)
    row_SK = exact_triton.candidates(
        index_NE, query_SE, retrieved, valid=valid, interpret=interpret
    )
    return rescore(index_NE, query_SE.astype(index_NE.dtype), row_SK, retrieved)


def rescore(
    vector_NE: Vectors, query_SE: jax.Array, row_SK: jax.Array, top_k: int
) -> tuple[jax.Array, jax.Array]:
    """The best of some candidates by their scores in float32; ties go to the lower row.

    Args:
      vector_NE: the vectors to score with.
      query_SE: queries.
      row_SK: candidates of every query, each once; -1 where there is none.
      top_k: R, at most K.

    Returns:
      Rows [S, R] int32 and scores [S, R] float32; -1 and -inf where there is none.
    """
    row_SK = jnp.sort(row_SK, axis=1)
    at_SK = jnp.maximum(row_SK, 0)
    query_SE = query_SE.astype(jnp.float32)
    # A product and a sum rather than a matrix product: one pass that reads the rows as stored.
    if isinstance(vector_NE, Int8Rows):
        part_SKE = vector_NE.code_NE[at_SK].astype(jnp.float32)
        score_SK = jnp.sum(part_SKE * query_SE[:, None], axis=-1) * vector_NE.scale_N[at_SK]
    else:
        part_SKE = vector_NE[at_SK].astype(jnp.float32)
        score_SK = jnp.sum(part_SKE * query_SE[:, None], axis=-1)
    return best_candidates(row_SK, score_SK, top_k)


def best_candidates(
    row_SK: jax.Array, score_SK: jax.Array, top_k: int
) -> tuple[jax.Array, jax.Array]:
    """The best of candidates whose scores are known; rows of -1 are none, ties go to the first."""
    score_SR, pick_SR = jax.lax.top_k(jnp.where(row_SK >= 0, score_SK, -jnp.inf), top_k)
    return jnp.take_along_axis(row_SK, pick_SR, axis=1), score_SR


def _scores(index_NE: Vectors, query_SE: jax.Array) -> jax.Array:
    if isinstance(index_NE, Int8Rows):
        # 8-bit codes are exact in bfloat16; a CPU has no fast product of it.
        compute = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        score_SN = _product(query_SE.astype(compute), index_NE.code_NE.astype(compute))
        return score_SN * index_NE.scale_N
    return _product(query_SE.astype(index_NE.dtype), index_NE)


def _product(query_SE: jax.Array, index_NE: jax.Array) -> jax.Array:
    return jnp.einsum("SE,NE->SN", query_SE, index_NE, preferred_element_type=jnp.float32)


# ---------------------------------------------------------------------------------------- sharded


def shard_rows(vector_NE: Any, mesh: Mesh, axes: tuple[str, ...] | None = None) -> jax.Array:
    """Splits rows over the devices of a mesh, filled up with zeros to equal shares.

    Args:
      vector_NE: vectors, or anything with a shape [N, …] and a dtype that gives rows when sliced.
      mesh: the devices.
      axes: axes of the mesh to split over; None for all.
    """
    axes = axes or tuple(mesh.axis_names)
    devices = int(np.prod([mesh.shape[axis] for axis in axes]))
    N, *rest = vector_NE.shape
    rows = -(-N // devices) * devices

    def part(at: Any) -> np.ndarray:
        first, last, _ = at[0].indices(rows)
        block_RE = np.zeros((last - first, *rest), vector_NE.dtype)
        given = np.asarray(vector_NE[first : min(last, N)])
        block_RE[: len(given)] = given
        return block_RE

    return jax.make_array_from_callback((rows, *rest), NamedSharding(mesh, P(axes)), part)


def sharded_search(
    index_NE: Any,
    query_SE: jax.Array,
    retrieved: int,
    mesh: Mesh,
    *,
    axes: tuple[str, ...] | None = None,
    size: int | None = None,
    search: Any = exact_search,
) -> tuple[jax.Array, jax.Array]:
    """`exact_search` of vectors that are split by rows over the devices of a mesh; jittable.

    Every device finds the best of its own rows; only those travel. Ties go to the lower row.

    Args:
      index_NE: vectors, or a tuple of them, split as `shard_rows` does.
      query_SE: the same queries on every device.
      retrieved: R.
      mesh: the devices.
      axes: the axes that rows are split over, in the order of rows; None for all of the mesh.
      size: N without padding; None where there is no padding.
      search: called as `search(part, query_SE, R, valid=rows)`.

    Returns:
      Row numbers [S, R] int32, -1 where there is none, and scores [S, R] float32.
    """
    axes = axes or tuple(mesh.axis_names)
    whole = P()
    size = jax.tree.leaves(index_NE)[0].shape[0] if size is None else size

    def on_device(part_NE: Any, query_SE: jax.Array) -> tuple[jax.Array, jax.Array]:
        N = jax.tree.leaves(part_NE)[0].shape[0]
        first = jax.lax.axis_index(axes).astype(jnp.int32) * N
        row_SR, score_SR = search(
            part_NE, query_SE, min(retrieved, N), valid=jnp.clip(size - first, 0, N)
        )
        row_SR = jnp.where(row_SR >= 0, row_SR + first, -1)
        # Devices stand in the order of their rows, so the first of equal scores is the lower row.
        row_SX = jax.lax.all_gather(row_SR, axes, axis=1, tiled=True)
        score_SX = jax.lax.all_gather(score_SR, axes, axis=1, tiled=True)
        return best_candidates(row_SX, score_SX, retrieved)

    split = jax.tree.map(lambda _: P(axes), index_NE)
    # What has been gathered is the same everywhere, which the check cannot tell.
    run = jax.shard_map(
        on_device, mesh=mesh, in_specs=(split, whole), out_specs=(whole, whole), check_vma=False
    )
    return run(index_NE, query_SE)


# ------------------------------------------------------------------------------------------ index


class DeviceIndex(Protocol):
    """An index that is a tree of arrays: an argument of a compiled step, never closed over."""

    @property
    def size(self) -> int:
        """Vectors, N."""
        ...

    @property
    def dimension(self) -> int:
        """Components, E."""
        ...

    def search_in_jit(self, query_BE: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
        """Rows [B, k] int32 and scores [B, k] float32; -1 and -inf where there is none."""
        ...


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["index_NE", "exact_NE"],
    meta_fields=["reorder", "recall_target", "mesh", "axes", "vectors"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class ExactIndex:
    """Exact search on the device behind the interface of `ScannIndex`.

    Attributes:
      index_NE: the vectors, of a float type or in 8 bits.
      exact_NE: what the best candidates are scored again with; None for no second scoring.
      reorder: how many candidates are.
      recall_target: see `exact_search`.
      mesh: the devices that the rows are split over (`shard_rows`); None for one device.
      axes: the axes of the mesh that they are split over; () for all.
      vectors: N without the padding of a split; 0 for all rows.
    """

    index_NE: Vectors
    exact_NE: jax.Array | None = None
    reorder: int = 200
    recall_target: float | None = None
    mesh: Mesh | None = None
    axes: tuple[str, ...] = ()
    vectors: int = 0

    @property
    def size(self) -> int:
        """Vectors, N."""
        return self.vectors or self.index_NE.shape[0]

    @property
    def dimension(self) -> int:
        """Components, E."""
        return self.index_NE.shape[1]

    def search(self, query_BE: np.ndarray, top_k: int) -> Found:
        """See `ScannIndex.search`; compiled for powers of two of queries and of results."""
        return search_from_host(self, query_BE, top_k)

    def search_in_jit(self, query_BE: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
        """See `ScannIndex.search_in_jit`."""
        return guarded(self, query_BE, top_k, self._search)

    def _search(self, query_BE: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
        both = self.index_NE if self.exact_NE is None else (self.index_NE, self.exact_NE)
        if self.mesh is None:
            return self._part(both, query_BE, top_k)
        search = functools.partial(
            sharded_search, mesh=self.mesh, axes=self.axes or None, size=self.size
        )
        return search(both, query_BE, top_k, search=self._part)

    def search_rows(
        self, query_BE: jax.Array, top_k: int, valid: jax.Array | int | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Searches the rows that are held here, as `exact_search` does; for whoever holds a share
        of an index."""
        both = self.index_NE if self.exact_NE is None else (self.index_NE, self.exact_NE)
        return self._part(both, query_BE, top_k, valid)

    def _part(
        self, part: Any, query_BE: jax.Array, top_k: int, valid: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """Searches the rows of one device."""
        index, exact = (part, None) if self.exact_NE is None else part
        if self.recall_target is None and fused(index):
            return fused_search(index, query_BE, top_k, exact, valid=valid)
        options: dict[str, Any] = {"recall_target": self.recall_target, "valid": valid}
        if self.exact_NE is None:
            return exact_search(part, query_BE, top_k, **options)
        index_NE, exact_NE = part
        count = min(max(self.reorder, top_k), index_NE.shape[0])
        row_BK, _ = exact_search(index_NE, query_BE, count, **options)
        return rescore(exact_NE, query_BE, row_BK, top_k)


def guarded(
    index: DeviceIndex, query_BE: jax.Array, top_k: int, search: Any
) -> tuple[jax.Array, jax.Array]:
    """Calls `search(queries, k)` with what an index can take, and fills up what it gives.

    Queries that are not finite find nothing, nor is more found than there is; the queries'
    gradient is cut.

    Raises:
      UserError: queries of another width.
    """
    if query_BE.ndim != 2 or query_BE.shape[1] != index.dimension:
        raise UserError(
            f"queries have shape {query_BE.shape}, the index has vectors of {index.dimension} "
            "components; use the encoder that the index was built with."
        )
    query_BE = jax.lax.stop_gradient(query_BE)
    good_B = jnp.isfinite(query_BE).all(axis=1, keepdims=True)
    row_Bk, score_Bk = search(jnp.where(good_B, query_BE, 0), min(top_k, index.size))
    row_Bk = jnp.where(good_B, row_Bk, -1)
    score_Bk = jnp.where(good_B, score_Bk, -jnp.inf)
    more = ((0, 0), (0, top_k - row_Bk.shape[1]))
    return (
        jnp.pad(row_Bk, more, constant_values=-1),
        jnp.pad(score_Bk, more, constant_values=-jnp.inf),
    )


def search_from_host(index: DeviceIndex, query_BE: np.ndarray, top_k: int) -> Found:
    """`search_in_jit` for numpy; compiled for powers of two of queries and of results."""
    query_BE = np.asarray(query_BE, np.float32)
    B = len(query_BE)
    if not B:
        return Found.nothing(0, top_k)
    padded = np.zeros((1 << (B - 1).bit_length(), query_BE.shape[1]), np.float32)
    padded[:B] = query_BE
    place = jax.tree.leaves(index)[0].sharding
    search = _compiled(place.mesh if isinstance(place, NamedSharding) else None)
    row_Bk, score_Bk = search(index, padded, top_k=1 << (top_k - 1).bit_length())
    return Found(np.asarray(row_Bk)[:B, :top_k], np.asarray(score_Bk)[:B, :top_k])


@functools.cache
def _compiled(mesh: Mesh | None) -> Any:
    def search(index: DeviceIndex, query_BE: jax.Array, top_k: int) -> Any:
        return index.search_in_jit(query_BE, top_k)

    # Every process gets all of it.
    whole = None if mesh is None else NamedSharding(mesh, P())
    return jax.jit(search, static_argnames="top_k", out_shardings=whole)
