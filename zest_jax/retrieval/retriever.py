"""A retriever that lives on the device: encoder, index and passage store in one pytree.

Shape letters: S slots, U queries of an action, B all of them, Q query length, R retrieved,
N passages, E embedding size, C observation length.
"""

import dataclasses
from collections.abc import Sequence

import jax

from zest_jax.retrieval.encoders import BagEncoder, TextEncoder, TokenEncoder
from zest_jax.retrieval.exact import DeviceIndex, ExactIndex
from zest_jax.retrieval.layout import Layout
from zest_jax.retrieval.store import PassageStore


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Retriever:
    """Everything the compiled rollout needs to answer a query.

    Attributes:
      encoder: turns query token ids into vectors.
      index: finds the rows of near vectors (`ExactIndex`, `PartitionedIndex`), on one device or on
        all of a mesh.
      store: the passages' token ids.
      retrieved: passages per search, R.
    """

    encoder: BagEncoder | TokenEncoder | TextEncoder
    index: DeviceIndex
    store: PassageStore
    retrieved: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def build(
        cls,
        tokenizer,
        titles: Sequence[str],
        texts: Sequence[str],
        *,
        layout: Layout,
        retrieved: int,
        observation_length: int,
        queries: int = 1,
        text_weight: float = 0.3,
        dimension: int = 0,
        vocab_size: int = 0,
    ) -> "Retriever":
        """Tokenises every passage once, fits the bag encoder and embeds the passages.

        Args:
          tokenizer: the policy's; the encoder reads its ids.
          titles: a title per passage.
          texts: a text per passage.
          layout: how the protocol shows passages.
          retrieved: R.
          observation_length: tokens an observation may have, C.
          queries: most queries of one action, U.
          text_weight: see BagEncoder.
          dimension: see BagEncoder.fit.
          vocab_size: rows of the policy's head, where more than the tokenizer's.
        """

        def ids(items: list[str]) -> list[list[int]]:
            return tokenizer(items, add_special_tokens=False)["input_ids"] if items else []

        title_ids = ids([" " + t for t in titles])
        text_ids = ids([" " + t for t in texts])
        both = [a + b for a, b in zip(title_ids, text_ids, strict=True)]
        encoder = BagEncoder.fit(
            both,
            max(vocab_size, len(tokenizer)),
            dimension=dimension,
            text_weight=text_weight,
        )
        store = passage_store(
            tokenizer, titles, texts, layout, retrieved, queries, observation_length
        )
        index = ExactIndex(encoder.encode_passages(title_ids, text_ids))
        return cls(encoder, index, store, retrieved)

    def shown_as(self, store: PassageStore) -> "Retriever":
        """The same encoder and index, with passages shown as another protocol shows them."""
        return dataclasses.replace(self, store=store)

    def search(self, query_SUQ: jax.Array, length_SU: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Passage rows [S, U, R] and scores [S, U, R] for queries given as token ids; jittable."""
        S, U, Q = query_SUQ.shape
        vectors_BE = self.encoder.encode_queries(
            query_SUQ.reshape(S * U, Q), length_SU.reshape(S * U)
        )
        rows_BR, scores_BR = self.index.search_in_jit(vectors_BE, self.retrieved)
        return rows_BR.reshape(S, U, -1), scores_BR.reshape(S, U, -1)

    def observe(
        self, row_SUR: jax.Array, asked_S: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Token ids [S, C] and lengths [S] of the observation that shows these passages (see
        `PassageStore.observe`); jittable."""
        return self.store.observe(row_SUR, asked_S)


def passage_store(
    tokenizer,
    titles: Sequence[str],
    texts: Sequence[str],
    layout: Layout,
    retrieved: int,
    queries: int,
    observation_length: int,
) -> PassageStore:
    """Every passage tokenised as a protocol shows it; arguments as of `Retriever.build`."""

    def ids(items: list[str], **more: bool) -> list[list[int]]:
        if not items:
            return []
        return tokenizer(items, add_special_tokens=False, **more)["input_ids"]

    frame = layout.frame(ids, queries, retrieved)
    shown = [layout.write(t, x) for t, x in zip(titles, texts, strict=True)]
    # A passage that spells out a special token must not end the turn that shows it.
    shown_ids = ids(shown, split_special_tokens=True)
    return PassageStore.build(shown_ids, frame, observation_length)
