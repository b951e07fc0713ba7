"""An index folder laid on the devices of a run, to be searched within its compiled rollout.

Vectors and passages of an exact index are shared out by rows over some axes of a mesh, each process
reading only the rows of its own devices; a partitioned index and an encoder lie whole on every one.

Shape letters: N passages, E embedding size, P passage length.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zest_jax.errors import UserError
from zest_jax.models import Encoder
from zest_jax.parallel import hosts
from zest_jax.retrieval import open_index, partitioned_build
from zest_jax.retrieval.encoders import TextEncoder, TokenEncoder
from zest_jax.retrieval.exact import DeviceIndex, ExactIndex, shard_rows
from zest_jax.retrieval.index_files import IndexFolder
from zest_jax.retrieval.layout import Layout
from zest_jax.retrieval.open_index import VectorRetriever
from zest_jax.retrieval.passages import PassageTexts, TokenisedPassages
from zest_jax.retrieval.retriever import Retriever
from zest_jax.retrieval.room import require_room
from zest_jax.retrieval.split import whole_on
from zest_jax.retrieval.storage import check_files
from zest_jax.retrieval.store import FramePieces, PassageStore, passage_room

KINDS = ("exact", "partitioned")
"""Kinds of index whose search is compiled."""
_BLOCK = 1 << 16  # passages read at a time
_ADVICE = (
    "share the index over more devices, build it of smaller vectors, or serve it from another "
    "machine (zest_jax.serve_retriever) and give that address"
)


class DeviceFolder:
    """An index folder on the devices.

    Args:
      folder: what `zest_jax.build_index` built, of a kind of `KINDS`.
      mesh: the devices; None for one.
      axes: the axes of the mesh that rows are shared out over.
      encoder: where its encoder lies, if that has moved.

    Attributes:
      passages: the texts by row.
      index: the vectors.
      encoder: the encoder, whole on every device.

    Raises:
      UserError: as `open_index`, or a device has no room for its share.
    """

    def __init__(
        self,
        folder: str | Path,
        mesh: Mesh | None = None,
        axes: tuple[str, ...] = (),
        encoder: str | Path = "",
    ):
        self._folder = IndexFolder(folder)
        self._mesh, self._axes = mesh, axes
        # Only an exact index is shared out; of others all lies whole on every device.
        self._split = mesh is not None and self._folder.manifest.kind == "exact"
        self._placed: dict[int, jax.Array] = {}
        self._stores: dict[tuple[str, int], tuple[jax.Array, jax.Array]] = {}
        self.passages: PassageTexts = self._folder.passages()
        found = open_index.encoder_of(self._folder, encoder)
        self.encoder: Encoder = dataclasses.replace(
            found, params=jax.tree.map(self._whole, found.params), mesh=mesh
        )
        self.index: DeviceIndex = self._vectors()

    def by_text(self) -> VectorRetriever:
        """The same index asked by text; with several processes all of them must ask together."""
        index: Any = self.index
        return VectorRetriever(self.encoder, index, self.passages)

    def retriever(
        self,
        tokenizer: Any,
        read: Callable[[Sequence[int]], str],
        query_length: int,
        store: PassageStore,
    ) -> Retriever:
        """What a compiled rollout searches with.

        Args:
          tokenizer: the policy's.
          read: the text of its ids.
          query_length: most ids of a query.
          store: from `store`.
        """
        query_encoder: TokenEncoder | TextEncoder
        if reads_ids_of(self.encoder, tokenizer):
            query_encoder = TokenEncoder.build(self.encoder, tokenizer)
        else:
            query_encoder = TextEncoder.build(self.encoder, read, query_length)
        return Retriever(query_encoder, self.index, store, store.frame.retrieved)

    def store(
        self, tokenizer: Any, layout: Layout, retrieved: int, queries: int, size: int
    ) -> PassageStore:
        """The passages as a policy is shown them.

        Args:
          tokenizer: the policy's.
          layout: how its protocol shows passages.
          retrieved: passages of a query, R.
          queries: most queries of one action, U.
          size: tokens that an observation may have, C.

        Raises:
          UserError: they were not tokenised so, a device has no room for them, or an observation
            has none for so many.
        """

        def encode(texts: list[str]) -> list[list[int]]:
            return tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []

        frame = layout.frame(encode, queries, retrieved)
        tokens = self._folder.tokens(tokenizer, layout.stored)
        longest = min(passage_room(frame, size), tokens.longest)
        key = (str(tokens.folder), longest)
        if key not in self._stores:
            self._stores[key] = self._ids(tokens, longest)
        ids_NP, length_N = self._stores[key]
        return PassageStore(ids_NP, length_N, FramePieces.build(frame), size)

    def _vectors(self) -> DeviceIndex:
        manifest, where = self._folder.manifest, self._folder.folder
        if manifest.kind == "partitioned":
            own = [e for e in manifest.files if e.file.startswith(open_index.PARTITIONED_FOLDER)]
            check_files(where, own, content=True)
            size = sum(entry.bytes for entry in own)
            require_room(f"the vectors of {where}", (size,), np.uint8, None, _ADVICE)
            built = hosts.alone(
                lambda: partitioned_build.load(where / open_index.PARTITIONED_FOLDER)
            )
            return jax.tree.map(self._whole, built)
        vectors = self._folder.vectors()
        require_room(
            f"the vectors of {where}",
            *(self._shared(vectors.shape), vectors.dtype, self._sharding(), _ADVICE),
        )
        if self._mesh is None:
            return open_index.on_device(vectors)
        rows = shard_rows(vectors, self._mesh, self._axes)
        return ExactIndex(rows, mesh=self._mesh, axes=self._axes, vectors=len(vectors))

    def _ids(self, tokens: TokenisedPassages, longest: int) -> tuple[jax.Array, jax.Array]:
        if not self._split:
            ids_NP, length_N = hosts.alone(lambda: tokens.padded(longest))
            return self._whole(ids_NP), self._whole(length_N)
        given = _Padded(tokens, longest)
        require_room(
            f"the tokens of {tokens.folder}, {longest} a passage,",
            *(self._shared(given.shape), given.dtype, self._sharding(), _ADVICE),
        )
        assert self._mesh is not None
        share = functools.partial(shard_rows, mesh=self._mesh, axes=self._axes)
        return share(given), share(np.minimum(tokens.lengths(), longest))

    def _sharding(self) -> NamedSharding | None:
        return None if self._mesh is None else NamedSharding(self._mesh, P(self._axes))

    def _shared(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape whose rows are filled up to equal shares."""
        if self._mesh is None:
            return shape
        shares = int(np.prod([self._mesh.shape[axis] for axis in self._axes]))
        return (-(-shape[0] // shares) * shares, *shape[1:])

    def _whole(self, x: jax.Array) -> jax.Array:
        return x if self._mesh is None else whole_on(x, self._mesh, self._placed)


def why_not(folder: str | Path, wanted: Sequence[tuple[Any, Layout]]) -> str:
    """Why an index folder cannot be searched within a compiled rollout; "" if it can.

    Args:
      folder: the index.
      wanted: tokenizers of policies with the layouts that they are shown passages in.

    Raises:
      UserError: it is no index, or is damaged.
    """
    index = IndexFolder(folder)
    if index.manifest.kind not in KINDS:
        return f"an index of kind {index.manifest.kind} is searched on the host"
    try:
        for tokenizer, layout in wanted:
            index.tokens(tokenizer, layout.stored)
    except UserError as error:
        return str(error).rstrip(".")
    return ""


def reads_ids_of(encoder: Encoder, tokenizer: Any) -> bool:
    """Whether an encoder has the vocabulary of a policy."""
    try:
        TokenEncoder.build(dataclasses.replace(encoder, params={}), tokenizer)
    except UserError:
        return False
    return True


class _Padded:
    """Padded ids of passages as an array [N, P] that is read as it is sliced."""

    def __init__(self, tokens: TokenisedPassages, longest: int):
        self._tokens = tokens
        self.shape, self.dtype = (len(tokens), longest), tokens.dtype

    def __getitem__(self, rows: slice) -> np.ndarray:
        first, last, _ = rows.indices(self.shape[0])
        out_MP = np.empty((max(last - first, 0), self.shape[1]), self.dtype)
        for at in range(first, last, _BLOCK):
            block = np.arange(at, min(at + _BLOCK, last))
            out_MP[block - first] = self._tokens.rows(block, self.shape[1])[0]
        return out_MP
