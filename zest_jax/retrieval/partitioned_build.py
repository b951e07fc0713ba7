"""Builds a partitioned index from vectors, and stores it.

Vectors are read twice, block by block: a sample to train on, then all of them. What exists at once
on the device is the sample, one chunk, and what the index keeps.

Shape letters: see partitioned.py; Q assigned copies, R rows of a chunk.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from zest_jax.errors import UserError
from zest_jax.retrieval import partition_training as training
from zest_jax.retrieval.exact import Int8Rows, quantise_rows
from zest_jax.retrieval.partitioned import (
    LEVEL,
    PartitionedIndex,
    PartitionSettings,
    Remainder,
)
from zest_jax.retrieval.storage import read_json, write_json, writing

SETTINGS = "settings.json"
_FORMAT = 1
_CODE_SAMPLE = 16_384  # vectors that codes are trained on: 1,024 for each of 16 centres
_CHUNK = 32_768


class VectorSource(Protocol):
    """Vectors that need not be in memory; `StoredVectors` of an index folder is one."""

    shape: tuple[int, int]

    def rows(self, row_R: np.ndarray) -> np.ndarray:
        """Copies of some vectors [R, E]."""
        ...

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """First row and vectors [R, E] of consecutive parts that make up the whole."""
        ...


class ArrayVectors:
    """An array as a `VectorSource`."""

    def __init__(self, vector_NE: np.ndarray):
        self.shape = vector_NE.shape
        self._vector_NE = vector_NE

    def rows(self, row_R: np.ndarray) -> np.ndarray:
        """See `VectorSource`."""
        return np.asarray(self._vector_NE[row_R])

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """See `VectorSource`."""
        yield 0, self._vector_NE


def build(
    vectors: np.ndarray | VectorSource,
    settings: PartitionSettings | None = None,
    tell: Callable[[int], None] | None = None,
) -> PartitionedIndex:
    """An index of vectors, on the default device.

    Args:
      vectors: of any float type; inner products are searched.
      settings: None for what ScaNN's authors advise (`ScannSettings.for_size`).
      tell: called with the number of vectors coded since the last call.

    Raises:
      UserError: no vectors, vectors that are not finite, or settings that do not fit them.
    """
    if isinstance(vectors, np.ndarray | jax.Array):
        if vectors.ndim != 2 or not vectors.size:
            raise UserError(f"an index needs vectors, not an array of shape {vectors.shape}.")
        vectors = ArrayVectors(np.asarray(vectors))
    N, E = vectors.shape
    s = settings or PartitionSettings.for_size(N)
    assert isinstance(s, PartitionSettings)
    s.check(N)
    s = dataclasses.replace(s, num_leaves=s.num_leaves if s.num_leaves > 1 else 0)
    if not s.dimensions_per_block:
        return _brute_force(vectors, dataclasses.replace(s, reorder=0), tell)
    sample_RE = jnp.asarray(_sample(vectors, s))
    if s.num_leaves:
        centre_LE = training.train_leaves(
            sample_RE, s.num_leaves, spherical=s.spherical, seed=s.seed
        )
    else:
        centre_LE = jnp.zeros((1, E))
    few_RE = sample_RE[:_CODE_SAMPLE]
    leaf_R = training.assign(few_RE, centre_LE, None, s.spherical)[:, 0]
    codebook_MCD = training.train_codebook(
        few_RE - centre_LE[leaf_R],
        few_RE,
        -(-E // s.dimensions_per_block),
        s.dimensions_per_block,
        s.anisotropic_quantization_threshold,
        seed=s.seed,
    )
    return _fill(vectors, s, centre_LE, codebook_MCD, tell)


def _sample(vectors: VectorSource, s: PartitionSettings) -> np.ndarray:
    """Vectors to train on, in random order."""
    N = vectors.shape[0]
    count = min(N, max(s.training_sample_size, s.num_leaves))
    row_R = np.random.default_rng(s.seed).choice(N, count, replace=False)
    order_R = np.argsort(row_R)
    sample_RE = np.empty((count, vectors.shape[1]), np.float32)
    sample_RE[order_R] = vectors.rows(row_R[order_R])
    if not np.isfinite(sample_RE).all():
        bad = int(row_R[np.argmin(np.isfinite(sample_RE).all(axis=1))])
        raise UserError(f"the vector of row {bad} is not finite.")
    return sample_RE


def _chunks(vectors: VectorSource) -> Iterator[tuple[int, np.ndarray, int]]:
    """First row, vectors [R, E] float32 and how many of them are real; R is the same for all."""
    size = min(_CHUNK, vectors.shape[0])
    for first, block_RE in vectors.blocks():
        for at in range(0, len(block_RE), size):
            given_RE = np.asarray(block_RE[at : at + size], np.float32)
            bad_R = ~np.isfinite(given_RE).all(axis=1)
            if bad_R.any():
                raise UserError(
                    f"the vector of row {first + at + int(bad_R.argmax())} is not finite."
                )
            count = len(given_RE)
            given_RE = np.pad(given_RE, ((0, size - count), (0, 0)))
            yield first + at, given_RE, count


def _brute_force(
    vectors: VectorSource, s: PartitionSettings, tell: Callable[[int], None] | None
) -> PartitionedIndex:
    N, E = vectors.shape
    kept = _Kept(N, E, s.reorder_type)
    for first, vector_RE, count in _chunks(vectors):
        kept.add(first, vector_RE, count)
        if tell:
            tell(count)
    none = jnp.zeros((0, 0), jnp.int32)
    return PartitionedIndex(
        jnp.zeros((0, E)), none[0:0, 0:0].reshape(0), none.reshape(0), none.reshape(0), none,
        jnp.zeros((0, 0, 0), jnp.uint8), None, jnp.zeros((0, training.CENTRES, 1)),
        kept.finish(), s, N, E,
    )  # fmt: skip


def _fill(
    vectors: VectorSource,
    s: PartitionSettings,
    centre_LE: jax.Array,
    codebook_MCD: jax.Array,
    tell: Callable[[int], None] | None,
) -> PartitionedIndex:
    """Assigns and codes all vectors, and lays them out in blocks."""
    N, E = vectors.shape
    L, A = len(centre_LE), 1 if s.soar_lambda is None else 2
    P = -(-codebook_MCD.shape[0] // 2)
    leaf_NA = np.empty((N, A), np.int32)
    code_NAP = np.empty((N, A, P), np.uint8)
    kept = _Kept(N, E, s.reorder_type) if s.reorder else None
    for first, vector_RE, count in _chunks(vectors):
        leaf_RA, code_ARP, left = _encode(
            jnp.asarray(vector_RE), centre_LE, codebook_MCD, s, bool(kept and kept.remainder)
        )
        rows = slice(first, first + count)
        leaf_NA[rows] = np.asarray(leaf_RA)[:count]
        code_NAP[rows] = np.asarray(code_ARP).transpose(1, 0, 2)[:count]
        if kept:
            kept.add(first, vector_RE, count, left)
        if tell:
            tell(count)
    leaf_Q = leaf_NA.reshape(-1)
    W = block_rows(N * A / L)
    count_L = np.bincount(leaf_Q, minlength=L)
    blocks_L = -(-count_L // W)
    first_L = np.cumsum(blocks_L) - blocks_L
    G = int(blocks_L.sum())
    # Copies by leaf, in the order of rows; the n-th of a leaf has its place in the n-th row of it.
    order_Q = np.argsort(leaf_Q, kind="stable")
    leaf_Q = leaf_Q[order_Q]
    nth_Q = np.arange(len(leaf_Q)) - (np.cumsum(count_L) - count_L)[leaf_Q]
    place_Q = first_L[leaf_Q] * W + nth_Q
    row_X = np.full(G * W, -1, np.int32)
    row_X[place_Q] = order_Q // A
    code_XP = np.zeros((G * W, P), np.uint8)
    code_XP[place_Q] = code_NAP.reshape(-1, P)[order_Q]
    del code_NAP
    first_leaf_GW = None
    if A == 2:
        first_leaf_X = np.full(G * W, -1, np.int32)
        second_Q = order_Q % 2 == 1
        first_leaf_X[place_Q[second_Q]] = leaf_NA[order_Q[second_Q] // 2, 0]
        first_leaf_GW = jnp.asarray(first_leaf_X.reshape(G, W))
    store = kept.finish() if kept else None
    if isinstance(store, Remainder):
        place_N = np.empty(N, np.int32)
        first_Q = order_Q % A == 0
        place_N[order_Q[first_Q] // A] = place_Q[first_Q]
        store = dataclasses.replace(store, place_N=jnp.asarray(place_N))
    return PartitionedIndex(
        centre_LE=centre_LE,
        first_L=jnp.asarray(first_L, jnp.int32),
        blocks_L=jnp.asarray(blocks_L, jnp.int32),
        leaf_G=jnp.asarray(np.repeat(np.arange(L), blocks_L), jnp.int32),
        row_GW=jnp.asarray(row_X.reshape(G, W)),
        code_GPW=jnp.asarray(code_XP.reshape(G, W, P).transpose(0, 2, 1)),
        first_leaf_GW=first_leaf_GW,
        codebook_MCD=codebook_MCD,
        vectors=store,
        settings=s,
        size=N,
        dimension=E,
    )


def block_rows(leaf_rows: float) -> int:
    """Rows of a block: a power of two near an eighth of a leaf's, from 16 to 128.

    Half a block is lost a leaf on average, so about a sixteenth of the rows.
    """
    return int(np.clip(1 << max(0, round(np.log2(max(leaf_rows, 1) / 8))), 16, 128))


@functools.partial(jax.jit, static_argnames=("s", "remainder"))
def _encode(
    vector_RE: jax.Array,
    centre_LE: jax.Array,
    codebook_MCD: jax.Array,
    s: PartitionSettings,
    remainder: bool,
) -> Any:
    """Leaves [R, A] and packed codes [A, R, P] of a chunk, and what the first codes leave of it."""
    leaf_RA = training.assign(vector_RE, centre_LE, s.soar_lambda, s.spherical)
    codes, left = [], None
    for a in range(leaf_RA.shape[1]):
        residual_RE = vector_RE - centre_LE[leaf_RA[:, a]]
        code_MR = training.encode(
            residual_RE, vector_RE, codebook_MCD, s.anisotropic_quantization_threshold
        )
        code_PR = training.pack_codes(code_MR)
        codes.append(code_PR.T)
        if remainder and a == 0:
            decoded_RE = training.decode(code_PR, codebook_MCD)[:, : vector_RE.shape[1]]
            left = quantise_remainder(residual_RE - decoded_RE)
    return leaf_RA, jnp.stack(codes), left


def quantise_remainder(left_RE: jax.Array) -> tuple[jax.Array, jax.Array]:
    """4-bit levels of what is left, two a byte [R, X] uint8, and the step of every row [R] bfloat16
    (of which the levels are multiples: what it is rounded by costs nothing)."""
    step_R = (LEVEL * jnp.sqrt(jnp.mean(left_RE**2, axis=1))).astype(jnp.bfloat16)
    step_R1 = jnp.where(step_R > 0, step_R, 1).astype(jnp.float32)[:, None]
    level_RE = jnp.floor(left_RE / step_R1) + 8
    level_RE = jnp.clip(level_RE, 0, 15).astype(jnp.uint8)
    level_RE = jnp.pad(level_RE, ((0, 0), (0, left_RE.shape[1] % 2)))
    return level_RE[:, 0::2] | (level_RE[:, 1::2] << 4), step_R


class _Kept:
    """Collects on the device what the best candidates are scored with again."""

    def __init__(self, N: int, E: int, kind: str):
        self.kind = kind
        self.remainder = kind == "int4"
        if kind == "bfloat16":
            self.parts = [jnp.zeros((N, E), jnp.bfloat16)]
        elif kind == "int8":
            self.parts = [jnp.zeros((N, E), jnp.int8), jnp.zeros(N)]
        else:
            codes_NX = jnp.zeros((N, -(-E // 2)), jnp.uint8)
            self.parts = [codes_NX, jnp.zeros(N, jnp.bfloat16)]

    def add(self, first: int, vector_RE: np.ndarray, count: int, left: Any = None) -> None:
        """Takes the real rows of a chunk."""
        given_RE = jnp.asarray(vector_RE[:count])
        if self.kind == "bfloat16":
            given: Any = [given_RE.astype(jnp.bfloat16)]
        elif self.kind == "int8":
            rows = quantise_rows(given_RE)
            given = [rows.code_NE, rows.scale_N]
        else:
            given = [part[:count] for part in left]
        self.parts = [_write(x, part, first) for x, part in zip(self.parts, given, strict=True)]

    def finish(self) -> Any:
        """The vectors as the index holds them."""
        if self.kind == "bfloat16":
            return self.parts[0]
        if self.kind == "int8":
            return Int8Rows(*self.parts)
        code_NX, step_N = self.parts
        return Remainder(code_NX, step_N, place_N=jnp.zeros(0, jnp.int32))


@functools.partial(jax.jit, donate_argnums=0)
def _write(whole: jax.Array, part: jax.Array, first: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part, first, 0)


# ---------------------------------------------------------------------------------------- storage


def save(index: PartitionedIndex, folder: str | Path) -> list[str]:
    """Writes the arrays of an index; checksums are those of the manifest that lists the files.

    Returns:
      The names of the files, relative to the folder; the settings come last.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        f.name: getattr(index, f.name)
        for f in dataclasses.fields(index)
        if f.name not in ("settings", "size", "dimension", "vectors")
    }
    kept = index.vectors
    if isinstance(kept, Int8Rows | Remainder):
        arrays |= {f"vectors_{f.name}": getattr(kept, f.name) for f in dataclasses.fields(kept)}
    elif kept is not None:
        arrays["vectors"] = kept
    names = []
    for name, array in arrays.items():
        if array is None:
            continue
        stored = np.asarray(array)
        if stored.dtype == ml_dtypes.bfloat16:
            stored = stored.view(np.uint16)
        with writing(folder / f"{name}.npy") as file:
            np.save(file, stored)
        names.append(f"{name}.npy")
    told = {
        "format": _FORMAT,
        "size": index.size,
        "dimension": index.dimension,
        "settings": dataclasses.asdict(index.settings),
    }
    write_json(folder / SETTINGS, told)
    return [*names, SETTINGS]


def load(folder: str | Path) -> PartitionedIndex:
    """Opens an index written by `save`, on the default device.

    Raises:
      UserError: no such index, one of another version, or a damaged one.
    """
    folder = Path(folder)
    told = read_json(folder / SETTINGS, "partitioned index")
    if told.get("format") != _FORMAT:
        raise UserError(
            f"{folder} is an index of format {told.get('format')}, this version reads {_FORMAT}; "
            "build it anew."
        )

    def array(name: str) -> jax.Array:
        try:
            stored = np.load(folder / f"{name}.npy", mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise UserError(
                f"{folder / name}.npy cannot be read ({error}); copy the index again, or build it "
                "anew."
            ) from None
        if stored.dtype == np.uint16:
            stored = stored.view(ml_dtypes.bfloat16)
        return jnp.asarray(stored)

    try:
        settings = PartitionSettings(**told["settings"])
        fields = {
            f.name: array(f.name)
            for f in dataclasses.fields(PartitionedIndex)
            if f.name not in ("settings", "size", "dimension", "vectors", "first_leaf_GW")
        }
        soar = settings.soar_lambda is not None
        size, dimension = told["size"], told["dimension"]
    except (KeyError, TypeError) as error:
        raise UserError(f"{folder / SETTINGS} is damaged ({error}); build it anew.") from None
    vectors: Any = None
    if settings.reorder or not settings.dimensions_per_block:
        kind = {"int8": Int8Rows, "int4": Remainder}.get(settings.reorder_type)
        if kind is None:
            vectors = array("vectors")
        else:
            vectors = kind(*(array(f"vectors_{f.name}") for f in dataclasses.fields(kind)))
    return PartitionedIndex(
        **fields,
        first_leaf_GW=array("first_leaf_GW") if soar else None,
        vectors=vectors,
        settings=settings,
        size=size,
        dimension=dimension,
    )
