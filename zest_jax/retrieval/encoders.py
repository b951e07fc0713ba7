"""Encoders that read the token ids that a policy wrote, within a compiled step.

`BagEncoder` and `TokenEncoder` read them as they are, so that a query never becomes text;
`TextEncoder` has another vocabulary, and the host rewrites the ids of a query in it.

Shape letters: V vocabulary, E embedding size, S slots (queries), Q query length, N passages, P
passage length, X and Y tokens before and behind a query, L length of a query in other ids.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zest_jax.errors import UserError
from zest_jax.models import Encoder
from zest_jax.models.encoders import Recipe
from zest_jax.models.policy import Params
from zest_jax.retrieval.blocks import in_blocks

BLOCK = 16
"""Queries that go through a network at a time: of many slots few search in a pass."""
_EXACT = 16_384  # tokens up to which a table of V x V is sensible (1 GiB)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BagEncoder:
    """An IDF-weighted bag of token ids; no weights to download.

    A text's vector is u(text) = normalise(sum over its tokens of idf[token] * projection[token]).
    A passage is (u(title), text_weight * u(text)), a query (u(query), u(query)), so that their
    inner product is cos(title) + text_weight * cos(text): a name asked for outright finds its own
    page, any other wording the pages that speak of it. On the atlas, both together
    find the page of every entity by its name, the text alone that of 44 %.

    Attributes:
      table_VE: idf[token] * projection[token]; the projection is the identity (E = V, exact) or
        random signs / sqrt(E).
      text_weight: weight of the text's cosine beside the title's.
    """

    table_VE: jax.Array
    text_weight: float = dataclasses.field(default=0.3, metadata={"static": True})

    @classmethod
    def fit(
        cls,
        text_ids: list[list[int]],
        vocab_size: int,
        *,
        dimension: int = 0,
        text_weight: float = 0.3,
        seed: int = 0,
    ) -> "BagEncoder":
        """Counts document frequencies: idf = log((1 + N) / (1 + df)), and draws the projection.

        Args:
          text_ids: token ids of every passage (title and text).
          vocab_size: V.
          dimension: E; 0 keeps one dimension per token, which is exact and fine for a small V.
          text_weight: see the class.
          seed: of the random signs.

        Raises:
          UserError: one dimension per token of a vocabulary so large that the table would not fit.
        """
        if not dimension and vocab_size > _EXACT:
            raise UserError(
                f"retrieval.dimension=0 keeps a dimension for each of {vocab_size:,} tokens, a "
                f"table of {4 * vocab_size**2 / 2**30:.0f} GiB; set retrieval.dimension=256."
            )
        df_V = np.zeros(vocab_size)
        for ids in text_ids:
            df_V[np.unique(ids)] += 1
        idf_V = np.log((1 + len(text_ids)) / (1 + df_V))
        if dimension:
            signs = np.random.default_rng(seed).choice([-1.0, 1.0], (vocab_size, dimension))
            table = idf_V[:, None] * signs / dimension**0.5
        else:
            table = np.diag(idf_V)
        return cls(jnp.asarray(table, jnp.float32), text_weight)

    def encode(self, ids_SQ: jax.Array, length_S: jax.Array) -> jax.Array:
        """Unit vectors [S, E] of the first length_S ids of each row; a zero vector for an empty
        row."""
        mask_SQ = jnp.arange(ids_SQ.shape[1]) < length_S[:, None]
        sum_SE = jnp.einsum("SQE,SQ->SE", self.table_VE[ids_SQ], mask_SQ.astype(jnp.float32))
        return sum_SE / jnp.maximum(jnp.linalg.norm(sum_SE, axis=1, keepdims=True), 1e-9)

    def encode_queries(self, ids_SQ: jax.Array, length_S: jax.Array) -> jax.Array:
        """Query vectors [S, 2E]."""
        u_SE = self.encode(ids_SQ, length_S)
        return jnp.concatenate([u_SE, u_SE], axis=1)

    def encode_passages(
        self, titles: list[list[int]], texts: list[list[int]], batch: int = 1024
    ) -> jax.Array:
        """Passage vectors [N, 2E] from token ids, in batches of fixed shape."""
        halves = []
        for ragged, weight in ((titles, 1.0), (texts, self.text_weight)):
            ids_NP, length_N = pad_ragged(ragged)
            encode = jax.jit(BagEncoder.encode)
            parts = []
            for at in range(0, len(ragged), batch):
                ids, length = ids_NP[at : at + batch], length_N[at : at + batch]
                short = batch - len(ids) if len(ragged) > batch else 0
                part = encode(self, np.pad(ids, ((0, short), (0, 0))), np.pad(length, (0, short)))
                parts.append(weight * part[: len(ids)])
            halves.append(jnp.concatenate(parts))
        return jnp.concatenate(halves, axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenEncoder:
    """A text encoder with the policy's own vocabulary (Qwen3-Embedding beside a Qwen policy), fed
    with the ids that the policy wrote.

    The ids are those that were sampled, which need not be the ones that the encoder's tokenizer
    would give the same text; where they are, the vectors are `Encoder.encode_texts`'s.

    Attributes:
      params: the encoder's parameters.
      before_X: ids that stand before a query: special tokens and the instruction.
      after_Y: ids behind it.
      recipe: network, pooling, norm and cut.
    """

    params: Params
    before_X: jax.Array
    after_Y: jax.Array
    recipe: Recipe = dataclasses.field(metadata={"static": True})

    @classmethod
    def build(cls, encoder: Encoder, tokenizer: Any) -> "TokenEncoder":
        """From an encoder and the policy's tokenizer.

        Raises:
          UserError: a token of the policy's has another id in the encoder, or none.
        """
        theirs, special = encoder.tokenizer.get_vocab(), set(tokenizer.all_special_tokens)
        for token, number in tokenizer.get_vocab().items():
            # What only one of them adds (tags of turns, say) is no part of a query.
            added = token in special or number in tokenizer.added_tokens_decoder
            if theirs.get(token, None if added else -1) not in (number, None):
                raise UserError(
                    f"the encoder reads other ids than the policy writes (token {token!r} is "
                    f"{number} to the policy and {theirs.get(token, 'unknown')} to the encoder); "
                    "take an encoder of the policy's family, or drive the rollout from the host."
                )
        # Two texts of one token each, between what stands around every query.
        one, two = encoder.tokenize([" a", " b"], "query")
        differs = [i for i, (x, y) in enumerate(zip(one, two, strict=True)) if x != y]
        before_X, after_Y = (
            jnp.asarray(part, jnp.int32) for part in (one[: differs[0]], one[differs[-1] + 1 :])
        )
        return cls(encoder.params, before_X, after_Y, encoder.recipe)

    def encode_queries(self, ids_SQ: jax.Array, length_S: jax.Array) -> jax.Array:
        """Query vectors [S, E] float32 of the first length_S ids of each row; 0 for an empty row.

        Jittable.
        """
        S, X, Y = len(ids_SQ), len(self.before_X), len(self.after_Y)
        rows = jnp.concatenate(
            [jnp.broadcast_to(self.before_X, (S, X)), ids_SQ, jnp.zeros((S, Y), ids_SQ.dtype)],
            axis=1,
        )
        end_SY = X + length_S[:, None] + jnp.arange(Y)
        rows = rows.at[jnp.arange(S)[:, None], end_SY].set(self.after_Y)
        return _encode(self.recipe, self.params, rows, jnp.where(length_S > 0, X + length_S + Y, 0))


class Rewriter:
    """Turns ids that a policy wrote into the ids of an encoder, on the host.

    Args:
      encoder: whose ids.
      read: the text of a policy's ids.
      length: most ids of a query with what stands around it, L; more are cut, as the encoder's
        tokenizer cuts.
    """

    def __init__(self, encoder: Encoder, read: Callable[[Sequence[int]], str], length: int):
        self._encoder = dataclasses.replace(encoder, params={}, max_length=length)
        self._read, self.length = read, length

    def __call__(self, ids_SQ: Any, length_S: Any) -> tuple[np.ndarray, np.ndarray]:
        """Ids [S, L] and lengths [S], int32; no length where nothing was asked."""
        ids_SQ, length_S = np.asarray(ids_SQ), np.asarray(length_S)
        out_SL = np.zeros((len(ids_SQ), self.length), np.int32)
        count_S = np.zeros(len(ids_SQ), np.int32)
        asked = np.flatnonzero(length_S > 0)
        texts = [self._read(ids_SQ[s, : length_S[s]].tolist()).strip() for s in asked]
        rows = self._encoder.tokenize(texts, "query") if texts else []
        for s, ids in zip(asked, rows, strict=True):
            out_SL[s, : len(ids)] = ids
            count_S[s] = len(ids)
        return out_SL, count_S


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TextEncoder:
    """A text encoder of another vocabulary (E5 beside a Qwen policy): the host rewrites the
    queries, the network runs on the device.

    Attributes:
      params: the encoder's parameters.
      recipe: network, pooling, norm and cut.
      rewriter: see there.
    """

    params: Params
    recipe: Recipe = dataclasses.field(metadata={"static": True})
    rewriter: Rewriter = dataclasses.field(metadata={"static": True})

    @classmethod
    def build(
        cls, encoder: Encoder, read: Callable[[Sequence[int]], str], query_length: int
    ) -> "TextEncoder":
        """From an encoder, the text of a policy's ids, and the most ids of a query, Q.

        A query may have twice as many ids in the encoder's vocabulary, beside its prefix.
        """
        around = len(encoder.tokenize([""], "query")[0])
        length = min(encoder.max_length, around + 2 * query_length)
        return cls(encoder.params, encoder.recipe, Rewriter(encoder, read, length))

    def encode_queries(self, ids_SQ: jax.Array, length_S: jax.Array) -> jax.Array:
        """Query vectors [S, E] float32 of the first length_S ids of each row; 0 for an empty row.

        Jittable; one call of the host.
        """
        S, L = len(ids_SQ), self.rewriter.length
        shapes = (jax.ShapeDtypeStruct((S, L), jnp.int32), jax.ShapeDtypeStruct((S,), jnp.int32))
        ids_SL, count_S = jax.pure_callback(self.rewriter, shapes, ids_SQ, length_S)
        return _encode(self.recipe, self.params, ids_SL, count_S)


def _encode(recipe: Recipe, params: Params, ids_SL: jax.Array, length_S: jax.Array) -> jax.Array:
    """`Recipe.encode` of the rows with a length, `BLOCK` at a time; 0 for the others."""
    return in_blocks(
        length_S > 0,
        lambda slot_W: recipe.encode(params, ids_SL[slot_W], length_S[slot_W]),
        jnp.zeros((len(ids_SL), recipe.size), jnp.float32),
        BLOCK,
    )


def pad_ragged(rows: list[list[int]], width: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Right-pads lists of ids with zeros to [N, width or the longest], and their lengths [N]."""
    length_N = np.array([len(r) for r in rows], np.int32)
    out = np.zeros((len(rows), width or int(length_N.max(initial=1))), np.int32)
    for row, ids in zip(out, rows, strict=True):
        row[: len(ids)] = ids
    return out, length_N
