"""Texts as vectors: BERT-style encoders (MiniLM, E5) and decoders read at their last token.

`Recipe` is the arithmetic, pure and usable inside any compiled step; `Encoder` adds parameters,
tokenizer and prefixes, and turns lists of strings into a matrix on the host.

Shape letters: B batch, L length, D width, N texts, E embedding.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zest_jax.errors import UserError
from zest_jax.models.bert import BertConfig, bind_bert, read_bert
from zest_jax.models.config import FAMILIES, PolicyConfig
from zest_jax.models.encoder_folders import is_text, read_settings
from zest_jax.models.hf import (
    local_folder,
    policy_misfits,
    read_config,
    read_policy,
    read_tokenizer,
)
from zest_jax.models.layouts import refuse
from zest_jax.models.policy import Params, bind
from zest_jax.models.tensor_files import open_tensors
from zest_jax.parallel.sharding import BATCH, batch_sharding

POOLINGS = ("mean", "cls", "last")
# Not float16: residual streams of decoders outgrow its range.
DTYPES = ("float32", "bfloat16")
Kind = Literal["query", "passage"]

_FULL_LENGTH = 512  # tokens up to which a batch has all its rows; longer texts come in fewer
_WINDOW = 256  # batches whose texts are sorted by length together


@dataclasses.dataclass(frozen=True)
class Recipe:
    """From token ids to vectors; static and hashable, the parameters apart.

    Attributes:
      network: the shape of the network, which also tells its kind.
      pooling: "mean" over the real tokens, "cls" (the first) or "last" (the last real one).
      normalize: divide every vector by its length.
      dimension: keep the first so many components, before the norm (Matryoshka, arXiv 2205.13147);
        0 keeps all.
    """

    network: BertConfig | PolicyConfig
    pooling: str
    normalize: bool = True
    dimension: int = 0

    def __post_init__(self):
        if self.pooling not in POOLINGS:
            raise UserError(f"pooling is one of {', '.join(POOLINGS)}, not {self.pooling!r}")
        if type(self.dimension) is not int or not 0 <= self.dimension <= self.network.width:
            raise UserError(
                f"dimension = {self.dimension!r} cannot be cut out of vectors of "
                f"{self.network.width} components; choose fewer, or 0 for all"
            )

    @property
    def size(self) -> int:
        """Components of a vector, E."""
        return self.dimension or self.network.width

    def encode(self, params: Params, ids_BL: jax.Array, length_B: jax.Array) -> jax.Array:
        """Vectors [B, E] float32 of the first length_B ids of each row; 0 for an empty row.

        Args:
          params: the network's parameters.
          ids_BL: token ids with prefix and special tokens, padded on the right with any id.
          length_B: tokens of each row.
        """
        if isinstance(self.network, BertConfig):
            hidden_BLD = bind_bert(self.network, params)(ids_BL, length_B)
        else:  # causal: what stands behind the last real token is not seen by it
            position_BL = jnp.broadcast_to(jnp.arange(ids_BL.shape[1]), ids_BL.shape)
            hidden_BLD = bind(self.network, params)(ids_BL, position_BL)
        vector_BE = pool(hidden_BLD, length_B, self.pooling)[:, : self.size]
        if self.normalize:
            norm_B1 = jnp.linalg.norm(vector_BE, axis=1, keepdims=True)
            vector_BE = vector_BE / jnp.maximum(norm_B1, 1e-12)
        return vector_BE


def pool(hidden_BLD: jax.Array, length_B: jax.Array, pooling: str) -> jax.Array:
    """One float32 vector [B, D] a row from its first length_B hidden states; 0 for an empty row."""
    if pooling == "mean":
        real_BL = jnp.arange(hidden_BLD.shape[1]) < length_B[:, None]
        sum_BD = jnp.sum(hidden_BLD * real_BL[..., None], axis=1, dtype=jnp.float32)
        return sum_BD / jnp.maximum(length_B, 1)[:, None]
    at_B = jnp.maximum(length_B - 1, 0) if pooling == "last" else jnp.zeros_like(length_B)
    chosen_BD = jnp.take_along_axis(hidden_BLD, at_B[:, None, None], axis=1)[:, 0]
    return chosen_BD.astype(jnp.float32) * (length_B > 0)[:, None]


@dataclasses.dataclass(frozen=True, eq=False)
class Encoder:
    """A recipe with its parameters and its tokenizer.

    Attributes:
      recipe: network, pooling, norm and cut.
      params: the network's parameters.
      tokenizer: a transformers tokenizer, which adds the model's own special tokens.
      query_prefix: text before a query.
      passage_prefix: text before a passage.
      max_length: most tokens of a text, prefix and special tokens included.
      mesh: where the parameters lie, None for one device.
    """

    recipe: Recipe
    params: Params
    tokenizer: Any
    query_prefix: str
    passage_prefix: str
    max_length: int
    mesh: Mesh | None = None

    @property
    def size(self) -> int:
        """Components of a vector, E."""
        return self.recipe.size

    def encode(self, params: Params, ids_BL: jax.Array, length_B: jax.Array) -> jax.Array:
        """See `Recipe.encode`; compiled, and usable inside another compiled step."""
        return _compiled(self.recipe, None)(params, ids_BL, length_B)

    def tokenize(self, texts: Sequence[str], kind: Kind) -> list[list[int]]:
        """Token ids of texts with prefix and special tokens, cut to `max_length`.

        Raises:
          UserError: another kind, or something that is no text.
        """
        return self._tokenize(texts, kind, 0)

    def _tokenize(self, texts: Sequence[str], kind: Kind, first: int) -> list[list[int]]:
        """Like `tokenize`; `first` is the number of the first text in an error."""
        if isinstance(texts, str):
            raise UserError("texts are encoded as a list of texts, not as one string")
        if kind not in ("query", "passage"):
            raise UserError(f"a text is encoded as 'query' or 'passage', not as {kind!r}")
        for number, text in enumerate(texts, first):
            if not isinstance(text, str):
                raise UserError(
                    f"text {number} is no string but {type(text).__name__}: {text!r:.50}"
                )
            if not is_text(text):
                raise UserError(
                    f"text {number} is no valid Unicode (it has half of a surrogate pair); decode "
                    "its bytes with errors='replace'"
                )
        prefix = self.query_prefix if kind == "query" else self.passage_prefix
        rows = self.tokenizer(
            [prefix + text for text in texts],
            truncation=True,
            max_length=self.max_length,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        return rows["input_ids"]

    def encode_texts(
        self, texts: Sequence[str], kind: Kind = "passage", *, batch_size: int = 64
    ) -> np.ndarray:
        """Vectors [N, E] float32 of texts, in their order.

        Texts are sorted by length and padded to one of a fixed list of lengths, so few programs are
        compiled and little padding is computed. With several processes each passes all the texts.

        Args:
          texts: the texts, without prefix.
          kind: which prefix stands before them, "query" or "passage".
          batch_size: rows of a batch; proportionally fewer of texts beyond 512 tokens.

        Raises:
          UserError: no list of valid texts, another kind, or a batch_size below 1.
        """
        if isinstance(texts, str | bytes | Mapping) or not hasattr(texts, "__getitem__"):
            what = "one string" if isinstance(texts, str) else type(texts).__name__
            raise UserError(f"encode_texts takes a list of texts, not {what}")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer):
            raise UserError(f"batch_size is a whole number of rows, not {batch_size!r}")
        if batch_size < 1:
            raise UserError(f"batch_size is at least 1, not {batch_size}")
        batch_size = int(batch_size)
        out_NE = np.empty((len(texts), self.size), np.float32)
        window = _WINDOW * batch_size
        for start in range(0, len(texts), window):
            rows = self._tokenize(texts[start : start + window], kind, start)
            # Longest first, so that the last batch, which may be short, is the cheapest one.
            order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
            pending = []
            while order:
                length = bucket(len(rows[order[0]]), self.max_length)
                full = max(1, batch_size * _FULL_LENGTH // max(length, _FULL_LENGTH))
                chosen, order = order[:full], order[full:]
                pending.append((chosen, self._batch([rows[i] for i in chosen], length, full)))
            for chosen, vector_BE in pending:
                out_NE[[start + i for i in chosen]] = np.asarray(vector_BE)[: len(chosen)]
        return out_NE

    def _batch(self, rows: list[list[int]], length: int, full: int) -> jax.Array:
        """Vectors of up to `full` rows, followed by those of the rows that pad the batch."""
        count = min(full, 1 << (len(rows) - 1).bit_length())  # a power of two, or a full batch
        if self.mesh is not None:
            count += -count % _row_parts(self.mesh)
        ids_BL = np.zeros((count, length), np.int32)
        length_B = np.zeros(count, np.int32)
        for b, row in enumerate(rows):
            ids_BL[b, : len(row)] = row
            length_B[b] = len(row)
        compiled = _compiled(self.recipe, self.mesh)
        if self.mesh is None:
            return compiled(self.params, ids_BL, length_B)
        split = batch_sharding(self.mesh)
        with jax.set_mesh(self.mesh):
            placed = (
                jax.make_array_from_callback(whole.shape, split, whole.__getitem__)
                for whole in (ids_BL, length_B)
            )
            return compiled(self.params, *placed)


def bucket(length: int, longest: int) -> int:
    """The length to which a row is padded: 16, 24, 32, 48, 64, 96, … and at most `longest`."""
    power = 16
    while power < length:
        if power * 3 // 2 >= length:
            return min(power * 3 // 2, longest)
        power *= 2
    return min(power, longest)


@functools.cache
def _compiled(recipe: Recipe, mesh: Mesh | None) -> Any:
    # Every process gets all the vectors.
    whole = None if mesh is None else NamedSharding(mesh, P())
    return jax.jit(recipe.encode, out_shardings=whole)


def _row_parts(mesh: Mesh) -> int:
    return int(np.prod([mesh.shape[axis] for axis in BATCH[0]]))


# -------------------------------------------------------------------------------------- loading


def load_encoder(
    folder_or_hub_id: str | Path,
    *,
    mesh: Mesh | None = None,
    dtype: str = "float32",
    pooling: str | None = None,
    normalize: bool | None = None,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
    dimension: int = 0,
) -> Encoder:
    """Reads a text encoder: a BERT-style one, or a Qwen2, Qwen3 or Llama-shaped decoder.

    What is not given is read from the files of sentence-transformers, where the folder has them.
    What these do not say either follows a rule: mean pooling for BERT and the last token for a
    decoder, unit vectors, and no prefixes, unless the folder's name is that of an E5 model
    ("query: ", "passage: ") or of Qwen3-Embedding (its web search instruction for queries; see
    `instruction` for others). The chosen settings are logged.

    Args:
      folder_or_hub_id: a local folder with config.json, safetensors and tokenizer, or an id of the
        Hugging Face hub.
      mesh: where to place the parameters; None for the default device.
      dtype: compute type, and type of the (frozen) parameters in memory: "float32" or "bfloat16".
      pooling: "mean", "cls" or "last".
      normalize: whether vectors have length 1.
      query_prefix: text before a query.
      passage_prefix: text before a passage.
      dimension: keep the first so many components (for models trained so); 0 keeps all.

    Raises:
      UserError: a model that is not supported, a pipeline that we would compute otherwise, weights
        that do not fit the config, no tokenizer of this model, or an argument of no possible value.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype is one of {', '.join(DTYPES)}, not {dtype!r}")
    if normalize is not None and not isinstance(normalize, bool):
        raise UserError(f"normalize is True, False or None, not {normalize!r}")
    for prefix in (query_prefix, passage_prefix):
        if prefix is not None and not is_text(prefix):
            raise UserError(f"a prefix is a text, not {prefix!r}")
    folder = local_folder(folder_or_hub_id)
    said = read_settings(folder, str(folder_or_hub_id))
    network, params = _read_network(said.weights, mesh, dtype)
    recipe = Recipe(
        network,
        _first(pooling, said.pooling, "mean" if isinstance(network, BertConfig) else "last"),
        _first(normalize, said.normalize, True),
        dimension,
    )
    tokenizer = read_tokenizer(said.weights, network.vocab_size)
    encoder = Encoder(
        recipe,
        params,
        tokenizer,
        _first(query_prefix, said.query_prefix, ""),
        _first(passage_prefix, said.passage_prefix, ""),
        _longest(tokenizer, said.max_length or network.max_length, network.max_length),
        mesh,
    )
    logging.info(
        "encoder %s: %s pooling, normalize %s, %d components, at most %d tokens, "
        "prefixes %r (queries) and %r (passages)",
        folder_or_hub_id,
        recipe.pooling,
        recipe.normalize,
        recipe.size,
        encoder.max_length,
        encoder.query_prefix,
        encoder.passage_prefix,
    )
    return encoder


def _longest(tokenizer: Any, *said: int) -> int:
    """Most tokens of a text: the least of what folder, tokenizer and network say."""
    most, special = tokenizer.model_max_length, tokenizer.num_special_tokens_to_add()
    if isinstance(most, bool) or not isinstance(most, int | float) or most != most // 1:
        raise UserError(
            f"tokenizer_config.json has model_max_length = {most!r}; it is a whole number"
        )
    longest = min(int(most), *said)
    if longest <= special:
        raise UserError(
            f"texts of this encoder have at most {longest} tokens, {special} of them special ones, "
            "which leaves none for the text; mend max_seq_length or model_max_length"
        )
    return longest


def _first(*values: Any) -> Any:
    return next(v for v in values if v is not None)


def _read_network(
    folder: Path, mesh: Mesh | None, dtype: str
) -> tuple[BertConfig | PolicyConfig, Params]:
    """Config and parameters of the network in a folder, of whichever kind it is."""
    hf = read_config(folder)
    family = str(hf.get("model_type"))
    if family == "bert":
        network = BertConfig.from_hf(hf, dtype)
        return network, read_bert(network, folder, mesh, dtype)
    if family in ("xlm-roberta", "roberta", "distilbert", "mpnet", "modernbert", "nomic_bert"):
        raise UserError(
            f"encoders of type {family} (as the multilingual E5 is) are not supported yet; "
            "use a BERT-style one (E5-small/base/large, MiniLM) or Qwen3-Embedding"
        )
    if family not in FAMILIES:
        raise UserError(
            f"model_type {family!r} is not supported as an encoder; supported are bert, "
            f"{', '.join(FAMILIES)}"
        )
    if hf.get("is_causal") is False or hf.get("use_bidirectional_attention"):
        raise UserError(
            f"{folder} is a decoder turned to attend in both directions, which is not supported; "
            "use Qwen3-Embedding or a BERT-style encoder"
        )
    # The head is never used: without it a tied and an untied model are the same.
    decoder = dataclasses.replace(PolicyConfig.from_hf(hf, dtype), tied=True)
    stored, problems = open_tensors(folder)
    files = {
        name if name.startswith(("model.", "lm_head.")) else f"model.{name}": tensor
        for name, tensor in stored.items()
    }
    files.pop("lm_head.weight", None)
    refuse(folder, problems + policy_misfits(decoder, files))
    return decoder, read_policy(decoder, files, mesh, dtype)
