"""ScaNN's search as arrays on the device: a tree of leaves, 4-bit codes, an exact reorder.

A query visits the leaves whose centres it likes best, scores what is in them by looking up, for
every two blocks of components, what the byte of a code contributes (`score_ah`), and scores the
best candidates again with the vectors themselves. Everything is an array, and one jittable function
searches, so that it runs inside a compiled rollout.

Shapes are fixed though leaves differ in size: leaves lie in blocks of a fixed number of rows, each
filled up to whole blocks, and a search goes through the blocks of its own leaves, as many at a time
as fit, until the longest list of the batch is done. The filling costs about half a block a leaf
(`PartitionedIndex.padding` tells the share).

With SOAR every vector stands in two leaves. Where a query visits both, the second copy is passed
over, so nothing is found twice.

Shape letters: N vectors, E embedding size, S queries, L leaves, V visited leaves, G blocks of rows,
W rows of a block, M blocks of components, D components of one, C centres (16), P bytes of a code,
K candidates, B queries and k results in the interface of all indexes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zest_jax.errors import UserError
from zest_jax.retrieval.exact import (
    Vectors,
    best_candidates,
    exact_search,
    guarded,
    rescore,
    search_from_host,
)
from zest_jax.retrieval.interface import Found
from zest_jax.retrieval.scann_index import ScannSettings

REORDER_TYPES = ("bfloat16", "int8", "int4")
# Steps between the 16 levels of the 4-bit remainder, in root mean squares: the least squared error
# on what codes leave, whose tails are longer than those of a normal distribution (there 0.335).
LEVEL = 0.385


@dataclasses.dataclass(frozen=True)
class PartitionSettings(ScannSettings):
    """ScaNN's settings, and what is decided for the device.

    `dimensions_per_block` of 0 scores by brute force and wants no tree.

    Attributes:
      spherical: k-means with centres of length 1.
      reorder_type: what the best candidates are scored again with: "bfloat16" or "int8" vectors,
        or "int4": what a vector's code leaves of it, in 4 bits a component.
      seed: of all training.
    """

    spherical: bool = False
    reorder_type: str = "bfloat16"
    seed: int = 0

    def check(self, vectors: int) -> None:
        """Raises a UserError for settings that cannot be."""
        super().check(vectors)
        if self.reorder_type not in REORDER_TYPES:
            raise UserError(
                f"reorder_type must be one of {', '.join(REORDER_TYPES)}, not "
                f"{self.reorder_type!r}."
            )
        if not self.dimensions_per_block and (self.num_leaves or self.reorder_type == "int4"):
            raise UserError(
                "a tree and an int4 reorder need codes; set dimensions_per_block (ScaNN advises "
                "2), or num_leaves=0 and another reorder_type for brute force."
            )
        if self.soar_lambda is not None and self.num_leaves < 2:
            raise UserError("soar_lambda needs at least 2 leaves; set num_leaves, or leave it out.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Remainder:
    """What codes leave of their vectors, in 4 bits a component.

    Attributes:
      code_NX: two components a byte, X = ceil(E / 2); level - 7.5 steps.
      step_N: bfloat16.
      place_N: where the vector's first copy stands: block * W + row in the block.
    """

    code_NX: jax.Array
    step_N: jax.Array
    place_N: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        *("centre_LE", "first_L", "blocks_L", "leaf_G", "row_GW", "code_GPW"),
        *("first_leaf_GW", "codebook_MCD", "vectors"),
    ],
    meta_fields=["settings", "size", "dimension"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class PartitionedIndex:
    """The index; larger inner products are better. See the head of the file.

    Attributes:
      centre_LE: centres of the leaves; without a tree one leaf at the origin.
      first_L: the first block of every leaf.
      blocks_L: how many it has.
      leaf_G: the leaf of a block.
      row_GW: rows of the corpus, -1 where a block is filled up.
      code_GPW: packed codes of the residuals.
      first_leaf_GW: with SOAR, the first leaf of a second copy and -1 for a first one; else None.
      codebook_MCD: centres of the codes.
      vectors: what the best candidates are scored with again; None for no reorder.
      settings: what it was built with.
      size: N.
      dimension: E.
    """

    centre_LE: jax.Array
    first_L: jax.Array
    blocks_L: jax.Array
    leaf_G: jax.Array
    row_GW: jax.Array
    code_GPW: jax.Array
    first_leaf_GW: jax.Array | None
    codebook_MCD: jax.Array
    vectors: Vectors | Remainder | None
    settings: PartitionSettings
    size: int
    dimension: int

    @property
    def copies(self) -> int:
        """Leaves that a vector stands in."""
        return 1 if self.first_leaf_GW is None else 2

    @property
    def padding(self) -> float:
        """Rows that blocks are filled up with, as a share of the rows that hold something."""
        return self.row_GW.size / (self.size * self.copies) - 1 if self.row_GW.size else 0.0

    @property
    def bytes_per_vector(self) -> float:
        """All arrays, per vector."""
        return sum(x.nbytes for x in jax.tree.leaves(self)) / self.size

    def search(
        self, query_BE: np.ndarray, top_k: int, *, num_leaves_to_search: int | None = None
    ) -> Found:
        """See `ScannIndex.search`; compiled for powers of two of queries and of results."""
        return search_from_host(self._visiting(num_leaves_to_search), query_BE, top_k)

    def search_in_jit(
        self, query_BE: jax.Array, top_k: int, *, num_leaves_to_search: int | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """See `ScannIndex.search_in_jit`; nothing here waits for the host."""
        index = self._visiting(num_leaves_to_search)
        return guarded(index, query_BE, top_k, functools.partial(search, index))

    def _visiting(self, leaves: int | None) -> PartitionedIndex:
        if not leaves:
            return self
        settings = dataclasses.replace(self.settings, num_leaves_to_search=leaves)
        settings.check(self.size)
        return dataclasses.replace(self, settings=settings)


# ----------------------------------------------------------------------------------------- search


def search(index: PartitionedIndex, query_SE: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """The best vectors among those in the leaves that a query visits; jittable.

    Args:
      index: the index.
      query_SE: finite queries.
      top_k: k, at most N.

    Returns:
      Rows [S, k] int32 and scores [S, k] float32; -1 and -inf where the leaves hold too few.
    """
    s = index.settings
    query_SE = query_SE.astype(jnp.float32)
    if not s.dimensions_per_block:
        assert index.vectors is not None and not isinstance(index.vectors, Remainder)
        return exact_search(index.vectors, query_SE, top_k)
    count = min(max(s.reorder, top_k), index.size)
    row_SK, score_SK = score_ah(index, query_SE, count)
    if index.vectors is None:
        return row_SK[:, :top_k], score_SK[:, :top_k]
    if isinstance(index.vectors, Remainder):
        return _rescore_remainder(index, index.vectors, query_SE, row_SK, top_k)
    return rescore(index.vectors, query_SE, row_SK, top_k)


def score_ah(
    index: PartitionedIndex, query_SE: jax.Array, candidates: int
) -> tuple[jax.Array, jax.Array]:
    """The best candidates of the visited leaves by their codes: rows and scores [S, K]."""
    S = query_SE.shape[0]
    W = index.row_GW.shape[1]
    V = max(1, index.settings.num_leaves_to_search)
    centre_score_SL = query_SE @ index.centre_LE.T
    centre_score_SV, leaf_SV = jax.lax.top_k(centre_score_SL, V)
    blocks_SV = index.blocks_L[leaf_SV]
    end_SV = jnp.cumsum(blocks_SV, axis=1)
    begin_SV = index.first_L[leaf_SV] - (end_SV - blocks_SV)  # block = begin + place in the list
    table_SPX = _tables(index.codebook_MCD, query_SE)
    visited_SL = jnp.zeros(centre_score_SL.shape, bool)
    if index.first_leaf_GW is not None:
        visited_SL = visited_SL.at[jnp.arange(S)[:, None], leaf_SV].set(True)
    # Blocks of each query that are scored at a time: what a CPU keeps in its caches, or keeps a
    # GPU busy, and no more than an average list has.
    at_once = 1 << (17 if jax.default_backend() == "cpu" else 20)
    average = -(-len(index.leaf_G) * V // len(index.centre_LE))
    step = max(1, min(average, at_once // max(1, S * W)))

    def body(carry: Any) -> Any:
        done, row_SK, score_SK = carry
        place_T = done + jnp.arange(step)
        # The leaf of a place in a query's list of blocks, by counting the leaves that end before.
        nth_ST = jnp.sum(end_SV[:, None] <= place_T[:, None], axis=-1)
        valid_ST = nth_ST < V
        nth_ST = jnp.minimum(nth_ST, V - 1)
        block_ST = jnp.take_along_axis(begin_SV, nth_ST, axis=1) + place_T
        block_ST = jnp.where(valid_ST, block_ST, 0)
        code_STPW = index.code_GPW[block_ST].astype(jnp.int32)
        part_STPW = jnp.take_along_axis(table_SPX[:, None], code_STPW, axis=-1, mode="clip")
        score_STW = jnp.sum(part_STPW, axis=2)
        score_STW += jnp.take_along_axis(centre_score_SV, nth_ST, axis=1)[..., None]
        row_STW = index.row_GW[block_ST]
        real_STW = (row_STW >= 0) & valid_ST[..., None]
        if index.first_leaf_GW is not None:
            other_STW = index.first_leaf_GW[block_ST]
            seen_SX = jnp.take_along_axis(
                visited_SL, jnp.maximum(other_STW, 0).reshape(S, -1), axis=1
            )
            real_STW &= (other_STW < 0) | ~seen_SX.reshape(other_STW.shape)
        score_SX = jnp.where(real_STW, score_STW, -jnp.inf).reshape(S, -1)
        row_SX = jnp.where(real_STW, row_STW, -1).reshape(S, -1)
        score_SX = jnp.concatenate([score_SK, score_SX], axis=1)
        row_SX = jnp.concatenate([row_SK, row_SX], axis=1)
        row_SK, score_SK = best_candidates(row_SX, score_SX, candidates)
        return done + step, row_SK, score_SK

    start = (
        jnp.int32(0),
        jnp.full((S, candidates), -1, jnp.int32),
        jnp.full((S, candidates), -jnp.inf),
    )
    longest = jnp.max(end_SV[:, -1], initial=0)
    _, row_SK, score_SK = jax.lax.while_loop(lambda x: x[0] < longest, body, start)
    return row_SK, score_SK


def _tables(codebook_MCD: jax.Array, query_SE: jax.Array) -> jax.Array:
    """What every byte of a code adds to the score [S, P, 256]: two blocks' inner products."""
    M, C, D = codebook_MCD.shape
    S, E = query_SE.shape
    query_SMD = jnp.pad(query_SE, ((0, 0), (0, M * D - E))).reshape(S, M, D)
    table_SMC = jnp.einsum("SMD,MCD->SMC", query_SMD, codebook_MCD)
    if M % 2:
        table_SMC = jnp.pad(table_SMC, ((0, 0), (0, 1), (0, 0)))
    low_SPC, high_SPC = table_SMC[:, 0::2], table_SMC[:, 1::2]
    return (high_SPC[..., :, None] + low_SPC[..., None, :]).reshape(S, -1, C * C)


def _rescore_remainder(
    index: PartitionedIndex, left: Remainder, query_SE: jax.Array, row_SK: jax.Array, top_k: int
) -> tuple[jax.Array, jax.Array]:
    """`rescore` with centre, code and remainder put together again."""
    row_SK = jnp.sort(row_SK, axis=1)
    at_SK = jnp.maximum(row_SK, 0)
    S, K = row_SK.shape
    W = index.row_GW.shape[1]
    block_SK, row_in_SK = left.place_N[at_SK] // W, left.place_N[at_SK] % W
    code_SKP = index.code_GPW[block_SK, :, row_in_SK].astype(jnp.int32)
    table_SPX = _tables(index.codebook_MCD, query_SE)
    score_SKP = jnp.take_along_axis(table_SPX[:, None], code_SKP[..., None], axis=-1, mode="clip")
    score_SK = jnp.sum(score_SKP[..., 0], axis=-1)
    centre_score_SL = query_SE @ index.centre_LE.T
    score_SK += jnp.take_along_axis(centre_score_SL, index.leaf_G[block_SK], axis=1)
    byte_SKX = left.code_NX[at_SK]
    E = query_SE.shape[1]
    query_SXT = jnp.pad(query_SE, ((0, 0), (0, E % 2))).reshape(S, 1, -1, 2)
    rest_SK = jnp.sum(
        ((byte_SKX & 15).astype(jnp.float32) - 7.5) * query_SXT[..., 0]
        + ((byte_SKX >> 4).astype(jnp.float32) - 7.5) * query_SXT[..., 1],
        axis=-1,
    )
    score_SK += rest_SK * left.step_N[at_SK].astype(jnp.float32)
    return best_candidates(row_SK, score_SK, top_k)
