"""Opens whatever searches by text: the folder of an index of any kind, or a server's address.

Shape letters: N passages, E embedding size, B queries, k results.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from zest_jax.errors import UserError
from zest_jax.models import Encoder, load_encoder
from zest_jax.retrieval import bm25, partitioned_build, scann_index
from zest_jax.retrieval.bm25 import BM25Retriever
from zest_jax.retrieval.index_files import (
    IndexFolder,
    Manifest,
    StoredVectors,
    add_files,
    check_encoder,
    encoder_card,
    write_manifest,
)
from zest_jax.retrieval.interface import (
    Found,
    Passage,
    PassageRetriever,
    TextRetriever,
    read_passages,
)
from zest_jax.retrieval.partitioned import PartitionSettings
from zest_jax.retrieval.remote import RemoteRetriever
from zest_jax.retrieval.scann_index import ExactIndex, ScannIndex, ScannSettings
from zest_jax.retrieval.storage import check_files, held

# Folders within an index that hold what only one kind has.
BM25_FOLDER = "bm25"
SCANN_FOLDER = "scann"
PARTITIONED_FOLDER = "partitioned"


class QueryEncoder(Protocol):
    """What turns queries into vectors; `zest_jax.models.Encoder` does."""

    @property
    def size(self) -> int:
        """Components of a vector, E."""
        ...

    def encode_texts(self, texts: Sequence[str], kind: Any = ...) -> np.ndarray:
        """Vectors [B, E] float32 of texts of a kind, here "query"."""
        ...


class VectorIndex(Protocol):
    """What finds the rows of near vectors: `ExactIndex`, `ScannIndex`, `PartitionedIndex`."""

    @property
    def size(self) -> int:
        """Vectors, N."""
        ...

    @property
    def dimension(self) -> int:
        """Components, E."""
        ...

    def search(self, query_BE: np.ndarray, top_k: int) -> Found:
        """The best rows for each query."""
        ...


class VectorRetriever(TextRetriever):
    """Encodes queries and searches an index of vectors."""

    def __init__(
        self, encoder: QueryEncoder, index: VectorIndex, passages: Sequence[Passage] | None
    ) -> None:
        if encoder.size != index.dimension:
            raise UserError(
                f"the encoder gives vectors of {encoder.size} components, the index holds vectors "
                f"of {index.dimension}; use the encoder that the index was built with."
            )
        if passages is not None and len(passages) != index.size:
            raise UserError(
                f"the index has {index.size:,} vectors and {len(passages):,} passages; build it "
                "anew."
            )
        self._encoder, self._index, self._passages = encoder, index, passages

    def __len__(self) -> int:
        return self._index.size

    def search(self, queries: Sequence[str], top_k: int) -> Found:
        """See `TextRetriever`."""
        if not queries:
            return Found.nothing(0, top_k)
        # Half of a surrogate pair is no text to a tokenizer.
        clean = [query.encode("utf-8", "replace").decode() for query in queries]
        return self._index.search(self._encoder.encode_texts(clean, "query"), top_k)

    def passages(self, rows: np.ndarray) -> list[list[Passage]]:
        """See `TextRetriever`."""
        return read_passages(self._passages, rows)


def open_index(
    folder: str | Path, *, encoder: str | Path = "", dtype: str = "auto", check: bool = True
) -> BM25Retriever | VectorRetriever:
    """Opens an index by its kind, with its passages and its encoder.

    Args:
      folder: what `zest_jax.build_index` built.
      encoder: folder or hub id of the encoder, where it is not the one that the index names; it
        must be the same encoder.
      dtype: type that queries are encoded in; "auto" is float32 on a CPU and bfloat16 elsewhere.
      check: compare the checksums of vectors as they are loaded.

    Raises:
      UserError: no complete index, damaged or missing files, another encoder, or a kind that cannot
        be searched by text.
    """
    index = IndexFolder(folder)
    manifest, passages = index.manifest, index.passages()
    if manifest.kind == "bm25":
        return bm25.open_bm25(index.folder / BM25_FOLDER, passages)
    if manifest.kind not in ("exact", "scann", "partitioned"):
        raise UserError(
            f"{folder} is an index of kind {manifest.kind}, which is not opened here; kinds that "
            "are: bm25, exact, scann, partitioned."
        )
    found = encoder_of(index, encoder, dtype)
    if manifest.kind == "partitioned":
        own = [e for e in manifest.files if e.file.startswith(f"{PARTITIONED_FOLDER}/")]
        check_files(index.folder, own, content=check)
        built = partitioned_build.load(index.folder / PARTITIONED_FOLDER)
        return VectorRetriever(found, built, passages)
    if manifest.kind == "scann" and scann_index.import_scann() is not None:
        return VectorRetriever(found, scann_index.load(index.folder / SCANN_FOLDER), passages)
    if manifest.kind == "scann":
        scann_index.say_exact(manifest.passages)
    return VectorRetriever(found, on_device(index.vectors(), check=check), passages)


def add_scann(folder: str | Path, settings: ScannSettings | None = None) -> Manifest:
    """Makes an exact index one of ScaNN's; its vectors stay, for machines without scann.

    Args:
      folder: an index of kind exact, or of kind scann to be built anew.
      settings: None for the advised ones.

    Raises:
      UserError: an index without vectors, settings that do not fit, or no scann here.
    """
    if scann_index.import_scann() is None:
        raise UserError("scann is not installed here; pip install scann (Linux only).")
    with held(Path(folder)):
        index = IndexFolder(folder)
        vectors = index.vectors()
        vector_NE = np.empty(vectors.shape, np.float32)
        for first, block_RE in vectors.blocks():
            vector_NE[first : first + len(block_RE)] = block_RE
        built = scann_index.build(vector_NE, settings)
        assert isinstance(built, ScannIndex)
        del vector_NE
        make_exact(folder)
        target = index.folder / SCANN_FOLDER
        built.save(target)
        names = sorted(f"{SCANN_FOLDER}/{path.name}" for path in target.iterdir())
        told = {**_common(index.manifest), "scann": dataclasses.asdict(built.settings)}
        return add_files(folder, names, kind="scann", settings=told)


def add_partitioned(
    folder: str | Path, settings: PartitionSettings | None = None, tell: Any = None
) -> Manifest:
    """Makes an index of vectors a partitioned one (`partitioned.py`); its vectors stay.

    Args:
      folder: an index of kind exact, scann, or partitioned to be built anew.
      settings: None for the advised ones.
      tell: called with the number of vectors coded since the last call.

    Raises:
      UserError: an index without vectors, or settings that do not fit.
    """
    with held(Path(folder)):
        index = IndexFolder(folder)
        built = partitioned_build.build(index.vectors(), settings, tell)
        make_exact(folder)
        names = partitioned_build.save(built, index.folder / PARTITIONED_FOLDER)
        told = {**_common(index.manifest), "partitioned": dataclasses.asdict(built.settings)}
        names = [f"{PARTITIONED_FOLDER}/{name}" for name in names]
        return add_files(folder, names, kind="partitioned", settings=told)


def make_exact(folder: str | Path) -> Manifest:
    """Makes an index of vectors one of kind exact again, and removes what other kinds added.

    The manifest comes first: a process killed in between leaves an exact index.
    """
    index = IndexFolder(folder)
    index.vectors()
    own = (SCANN_FOLDER, PARTITIONED_FOLDER)
    kept = tuple(e for e in index.manifest.files if Path(e.file).parts[0] not in own)
    manifest = dataclasses.replace(
        index.manifest, kind="exact", files=kept, settings=_common(index.manifest)
    )
    write_manifest(folder, manifest)
    for name in own:
        if (index.folder / name).exists():
            shutil.rmtree(index.folder / name)
    return manifest


def _common(manifest: Manifest) -> dict[str, Any]:
    """What settings say of the vectors, whatever searches them."""
    return {k: v for k, v in manifest.settings.items() if k not in ("scann", "partitioned")}


def on_device(vectors: StoredVectors, *, check: bool = True) -> ExactIndex:
    """All vectors on the default device, for exact search; copied shard by shard."""
    index_NE = jnp.zeros(vectors.shape, vectors.dtype)
    for first, block_RE in vectors.blocks(check=check):
        index_NE = _write(index_NE, block_RE, first)
    return ExactIndex(index_NE)


@functools.partial(jax.jit, donate_argnums=0)
def _write(index_NE: jax.Array, block_RE: jax.Array, first: int) -> jax.Array:
    return jax.lax.dynamic_update_slice(index_NE, block_RE, (first, 0))


def encoder_of(index: IndexFolder, given: str | Path = "", dtype: str = "auto") -> Encoder:
    """The encoder of an index, set up as it was when the index was built.

    Args:
      index: the index.
      given, dtype: `encoder` and `dtype` of `open_index`.

    Raises:
      UserError: it cannot be loaded, or is another one.
    """
    folder, manifest = index.folder, index.manifest
    stored = manifest.encoder
    name = str(given or stored["name"])
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    how = {key: stored[key] for key in ("pooling", "normalize", "query_prefix", "passage_prefix")}
    try:
        encoder = load_encoder(name, dtype=dtype, dimension=manifest.dimension, **how)
    except UserError as error:
        if given:
            raise UserError(
                f"{folder} was built with the encoder {stored['name']} of {manifest.dimension} "
                f"components, and {given} does not fit it: {error}"
            ) from None
        why = str(error).rstrip(".")
        raise UserError(
            f"the encoder of {folder} cannot be loaded: {why}. A folder is found from where the "
            f"program is started, by the name that the index was built with ({name}); start it "
            "there, or say where the encoder is now: --encoder=FOLDER (in a config, "
            "retrieval.encoder)."
        ) from None
    check_encoder(folder, manifest, encoder_card(name, encoder))
    return encoder


def open_retriever(where: str | Path, **options: Any) -> PassageRetriever:
    """A client of the server at an address (http://…), or the index in a folder (`open_index`)."""
    if str(where).startswith(("http://", "https://")):
        return RemoteRetriever(str(where), **options)
    return open_index(where, **options)
