"""Approximate search with the package ScaNN, on the host but inside a compiled step.

ScaNN has no wheel for some systems; there `build` and `load` give the exact search on the device
in its place, and say so in the log.

Shape letters: N vectors, E embedding size, B queries, k results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zest_jax.errors import UserError
from zest_jax.retrieval.exact import ExactIndex
from zest_jax.retrieval.interface import Found

_SETTINGS = "zest_scann.json"
_FORMAT = 1
_PICKLE = "scann_docids.pkl"
_PARALLEL = 64  # queries from which threads are worth it, and the fewest for a thread is half


def import_scann() -> Any | None:
    """The module scann, or None where there is none.

    scann imports TensorFlow if it finds one, and fails if that is not the very release that it
    was built for. It needs none, so none is shown to it.
    """
    if "scann" in sys.modules:
        return sys.modules["scann"]
    had, tensorflow = "tensorflow" in sys.modules, sys.modules.get("tensorflow")
    sys.modules["tensorflow"] = None  # type: ignore[assignment]
    try:
        import scann
    except ImportError:
        return None
    finally:
        if had:
            sys.modules["tensorflow"] = tensorflow  # type: ignore[assignment]
        else:
            sys.modules.pop("tensorflow", None)
    return scann


@dataclasses.dataclass(frozen=True)
class ScannSettings:
    """How an index is built and searched, under the names of ScaNN's own builder.

    Attributes:
      num_leaves: leaves of the k-means tree; 0 for no tree.
      num_leaves_to_search: leaves that a query visits.
      training_sample_size: vectors that tree and codes are trained on, at most.
      dimensions_per_block: components that share a code of `score_ah`; 0 scores by brute force.
      anisotropic_quantization_threshold: how much of a vector's error along itself weighs more.
      reorder: best candidates scored again exactly; 0 for none.
      soar_lambda: weight of SOAR's second assignment to a leaf; None for one assignment.
    """

    num_leaves: int = 0
    num_leaves_to_search: int = 0
    training_sample_size: int = 100_000
    dimensions_per_block: int = 2
    anisotropic_quantization_threshold: float = 0.2
    reorder: int = 200
    soar_lambda: float | None = None

    @classmethod
    def for_size(cls, vectors: int) -> ScannSettings:
        """What ScaNN's authors advise: brute force below 20,000 vectors, codes without a tree up
        to 100,000, and beyond a tree of about sqrt(N) leaves.

        A tenth of the leaves is searched: recall@3 1.00 of 100,000 clustered vectors.
        """
        if vectors < 20_000:
            return cls(dimensions_per_block=0, reorder=0)
        if vectors <= 100_000:
            return cls()
        leaves = round(vectors**0.5)
        return cls(
            num_leaves=leaves,
            num_leaves_to_search=max(1, leaves // 10),
            training_sample_size=min(vectors, max(100_000, 50 * leaves)),
        )

    def check(self, vectors: int) -> None:
        """Raises a UserError for what ScaNN would refuse or misread."""
        if self.num_leaves and not 1 <= self.num_leaves_to_search <= self.num_leaves:
            raise UserError(
                f"num_leaves_to_search must be from 1 to num_leaves={self.num_leaves}, not "
                f"{self.num_leaves_to_search}."
            )
        if self.num_leaves > vectors:
            raise UserError(
                f"num_leaves={self.num_leaves} is more than the {vectors} vectors; lower it, or "
                "set 0 for no tree."
            )
        if self.soar_lambda is not None and not self.num_leaves:
            raise UserError("soar_lambda needs a tree; set num_leaves, or leave it out.")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[],
    meta_fields=["searcher", "settings", "size", "dimension"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class ScannIndex:
    """An index of ScaNN's; larger inner products are better.

    Attributes:
      searcher: ScaNN's own object.
      settings: what it was built with.
      size: vectors, N.
      dimension: components, E.
    """

    searcher: Any
    settings: ScannSettings
    size: int
    dimension: int

    def search(
        self, query_BE: np.ndarray, top_k: int, *, num_leaves_to_search: int | None = None
    ) -> Found:
        """The best rows of each query, -1 where fewer are found or the query is not finite.

        Args:
          query_BE: queries; any float type.
          top_k: k.
          num_leaves_to_search: another number of leaves for this search.
        """
        query_BE = np.ascontiguousarray(query_BE, np.float32)
        if query_BE.ndim != 2 or query_BE.shape[1] != self.dimension:
            raise UserError(
                f"queries have shape {query_BE.shape}, the index has vectors of {self.dimension} "
                "components; use the encoder that the index was built with."
            )
        found = Found.nothing(len(query_BE), top_k)
        good = np.flatnonzero(np.isfinite(query_BE).all(axis=1))
        if not len(good):
            return found  # ScaNN refuses an empty batch
        s = self.settings
        options: dict[str, Any] = {"final_num_neighbors": min(top_k, self.size)}
        if s.reorder:
            options["pre_reorder_num_neighbors"] = min(max(s.reorder, top_k), self.size)
        if s.num_leaves:
            options["leaves_to_search"] = num_leaves_to_search or s.num_leaves_to_search
        if len(good) >= _PARALLEL:
            share = -(-len(good) // (os.cpu_count() or 1))
            options["batch_size"] = max(share, _PARALLEL // 2)
            row_Bk, score_Bk = self.searcher.search_batched_parallel(query_BE[good], **options)
        else:
            row_Bk, score_Bk = self.searcher.search_batched(query_BE[good], **options)
        # Where the leaves that were searched hold too few, ScaNN fills up with row 0 and NaN.
        missing = np.isnan(score_Bk)
        found.rows[good, : row_Bk.shape[1]] = np.where(missing, -1, row_Bk.astype(np.int32))
        found.scores[good, : row_Bk.shape[1]] = np.where(missing, -np.inf, score_Bk)
        return found

    def search_in_jit(self, query_BE: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
        """`search` for use in a compiled step: rows [B, k] int32 and scores [B, k] float32.

        The queries' gradient is cut. The step waits for the host, which costs 0.1 ms for a
        query and under 1 ms for 256 beyond the search itself.
        """
        B = query_BE.shape[0]
        shapes = (
            jax.ShapeDtypeStruct((B, top_k), jnp.int32),
            jax.ShapeDtypeStruct((B, top_k), jnp.float32),
        )
        if query_BE.ndim != 2 or query_BE.shape[1] != self.dimension:
            raise UserError(
                f"queries have shape {query_BE.shape}, the index has vectors of {self.dimension} "
                "components; use the encoder that the index was built with."
            )

        def on_host(query_BE):
            # JAX hands over its own kind of array; no operation of JAX may run in here.
            return tuple(self.search(np.asarray(query_BE, np.float32), top_k))

        return jax.pure_callback(
            on_host, shapes, jax.lax.stop_gradient(query_BE), vmap_method="sequential"
        )

    def save(self, folder: str | Path) -> None:
        """Writes the index; its folder may be moved.

        No ids are written, least of all as ScaNN would, in a pickle: rows are those of the
        corpus, whose passages stand beside the index.

        Raises:
          UserError: the folder exists.
        """
        folder = Path(folder)
        if folder.exists():
            raise UserError(f"{folder} exists already; remove it or name another folder.")
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            with _quiet():
                self.searcher.serialize(str(work), relative_path=True)
            told = {
                "format": _FORMAT,
                "vectors": self.size,
                "dimension": self.dimension,
                "settings": dataclasses.asdict(self.settings),
            }
            (work / _SETTINGS).write_text(json.dumps(told, indent=1), "utf-8")
            work.chmod(0o755)
            work.rename(folder)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise


def build(vector_NE: np.ndarray, settings: ScannSettings | None = None) -> ScannIndex | ExactIndex:
    """An index of vectors, in memory.

    Args:
      vector_NE: the vectors, of any float type; inner products are searched.
      settings: None for the advised ones.

    Raises:
      UserError: no vectors, vectors that are not finite, or settings that do not fit them.
    """
    vector_NE = np.ascontiguousarray(vector_NE, np.float32)
    if vector_NE.ndim != 2 or not vector_NE.size:
        raise UserError(f"an index needs vectors, not an array of shape {vector_NE.shape}.")
    for at in range(0, len(vector_NE), 65_536):
        bad = ~np.isfinite(vector_NE[at : at + 65_536]).all(axis=1)
        if bad.any():
            raise UserError(f"the vector of row {at + int(bad.argmax())} is not finite.")
    N, E = vector_NE.shape
    s = settings or ScannSettings.for_size(N)
    s.check(N)
    scann = import_scann()
    if scann is None:
        say_exact(N)
        return ExactIndex(jnp.asarray(vector_NE))
    builder = scann.scann_ops_pybind.builder(vector_NE, 10, "dot_product")
    if s.num_leaves:
        builder = builder.tree(
            num_leaves=s.num_leaves,
            num_leaves_to_search=s.num_leaves_to_search,
            training_sample_size=min(s.training_sample_size, N),
            soar_lambda=s.soar_lambda,
        )
    if s.dimensions_per_block:
        builder = builder.score_ah(
            s.dimensions_per_block,
            anisotropic_quantization_threshold=s.anisotropic_quantization_threshold,
            training_sample_size=min(s.training_sample_size, N),
        )
    else:
        builder = builder.score_brute_force()
    # Brute force scores exactly as it is.
    if s.reorder and s.dimensions_per_block:
        builder = builder.reorder(s.reorder)
    else:
        s = dataclasses.replace(s, reorder=0)
    with _quiet():
        return ScannIndex(builder.build(), s, N, E)


def load(folder: str | Path) -> ScannIndex | ExactIndex:
    """Opens an index written by `ScannIndex.save`.

    Raises:
      UserError: no such index, one of another version, a damaged one, or one that keeps no exact
        vectors where scann is missing.
    """
    folder = Path(folder)
    try:
        told = json.loads((folder / _SETTINGS).read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} is no ScaNN index of ours: it has no {_SETTINGS}.") from None
    if told["format"] != _FORMAT:
        raise UserError(
            f"{folder} is an index of format {told['format']}, this version reads {_FORMAT}; "
            "build it anew."
        )
    if (folder / _PICKLE).exists():
        raise UserError(
            f"{folder} holds a {_PICKLE}, which we never write and which could run any program "
            "when it is read; remove that file."
        )
    scann = import_scann()
    if scann is not None:
        try:
            with _quiet():
                searcher = scann.scann_ops_pybind.load_searcher(str(folder))
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(f"{folder} is damaged ({_line(error)}); build it anew.") from None
        return ScannIndex(
            searcher, ScannSettings(**told["settings"]), told["vectors"], told["dimension"]
        )
    if not (folder / "dataset.npy").exists():
        raise UserError(
            f"scann is not installed here, and {folder} keeps codes only (reorder=0), so exact "
            "search is not possible either; build it anew with reorder."
        )
    say_exact(told["vectors"])
    return ExactIndex(jnp.asarray(np.load(folder / "dataset.npy", mmap_mode="r")))


def say_exact(vectors: int) -> None:
    logging.warning(
        "scann is not installed (it has wheels for Linux only): the %d vectors are searched "
        "exactly on %s instead, with results at least as good",
        vectors,
        jax.default_backend(),
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what ScaNN's C++ writes to standard error; shown if the block fails.

    No setting of its log silences it. What other threads write meanwhile is kept as well, so this
    is for building and loading only.
    """
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(before, 2)
            kept.seek(0)
            sys.stderr.write(kept.read().decode("utf-8", "replace"))
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
