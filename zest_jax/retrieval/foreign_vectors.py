"""Vectors that others computed: `.npy` files, and flat indexes of FAISS, read without faiss.

Shape letters: N vectors, E embedding.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zest_jax.errors import UserError

# What faiss writes before the vectors of a flat index, all little-endian: four letters of its kind,
# dimension (int32), vectors (int64), two unused int64, whether it is trained (a byte), the metric
# (int32) and, for metrics above 1, their argument (float32); then the number of float32 (uint64).
_HEADER = struct.Struct("<4siqqqBi")
_COUNT = struct.Struct("<Q")
_FLAT = {b"IxFI", b"IxF2", b"IxFl"}
_METRICS = {0: "inner product", 1: "L2"}
_OTHERS = {
    b"IxMp": "an index with ids of its own (IndexIDMap)",
    b"IxM2": "an index with ids of its own (IndexIDMap2)",
    b"IwFl": "an inverted-file index (IVF)",
    b"IwPQ": "an inverted-file index with product quantisation",
    b"IHNf": "a graph index (HNSW)",
    b"IxPT": "an index behind a transform",
    b"IxSQ": "an index of quantised vectors",
    b"IxPq": "an index of quantised vectors",
}


class ForeignVectors(NamedTuple):
    """Vectors made elsewhere.

    Attributes:
      vector_NE: mapped into memory; of any floating type.
      metric: "inner product" or "L2" where the file says it, else "".
    """

    vector_NE: np.ndarray
    metric: str


def open_vectors(path: str | Path) -> ForeignVectors:
    """Opens a file of vectors; none of them is read yet.

    Args:
      path: a `.npy` of shape [N, E], or a FAISS index of the kinds IndexFlatIP and IndexFlatL2.

    Raises:
      UserError: no such file, another kind, or one that is cut short.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserError(f"{path} does not exist; give a .npy file or a FAISS flat index.")
    with open(path, "rb") as file:
        start = file.read(6)
    if start == b"\x93NUMPY":
        return ForeignVectors(_npy(path), "")
    if start[:4] in _FLAT:
        return _flat(path)
    if start[:4] in _OTHERS:
        raise UserError(
            f"{path} is {_OTHERS[start[:4]]}, which does not hold the vectors in the order of the "
            "corpus; give a flat index (IndexFlatIP, IndexFlatL2) or a .npy file."
        )
    raise UserError(f"{path} is neither a .npy file nor a FAISS flat index.")


def _npy(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"{path} cannot be read ({error}); is it complete?") from error
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.floating):
        raise UserError(
            f"{path} holds {array.dtype} of shape {array.shape}; expected floats [passages, "
            "components]."
        )
    return array


def _flat(path: Path) -> ForeignVectors:
    with open(path, "rb") as file:
        head = file.read(_HEADER.size + 4 + _COUNT.size)
    size = path.stat().st_size
    if len(head) < _HEADER.size + _COUNT.size:
        raise UserError(f"{path} is cut short: {size} bytes are no FAISS index.")
    kind, E, N, _, _, _, metric = _HEADER.unpack_from(head)
    at = _HEADER.size + (4 if metric > 1 else 0)
    (count,) = _COUNT.unpack_from(head, at)
    offset = at + _COUNT.size
    if metric not in _METRICS or E <= 0 or N < 0 or count != N * E:
        raise UserError(
            f"{path} says {kind.decode()}, {N:,} vectors of {E} components, metric {metric} and "
            f"{count:,} numbers: no flat index by inner product or L2 that we know."
        )
    if size < offset + 4 * count:
        raise UserError(
            f"{path} is cut short: {N:,} x {E} vectors take {offset + 4 * count:,} bytes, it has "
            f"{size:,}; join all its parts (cat part_* > {path.name})."
        )
    if not count:
        return ForeignVectors(np.empty((N, E), np.float32), _METRICS[metric])
    flat = np.memmap(path, "<f4", mode="r", offset=offset, shape=(N, E))
    return ForeignVectors(flat, _METRICS[metric])
