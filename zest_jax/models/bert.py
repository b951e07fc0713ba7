"""A BERT-style encoder (MiniLM, E5): its config, network and weights.

Post-layer-norm blocks, learned absolute positions, attention in both directions over the real
tokens of a row. Source: Devlin et al., 2018 (arXiv 1810.04805); parameters as in `policy`, a plain
nested dict with the blocks stacked.

Shape letters: B batch, L length, M key length, V vocabulary, T token types, D width, H heads,
K head size, F feed-forward width.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from zest_jax.errors import UserError
from zest_jax.models.layouts import Layout, misfits, read_params, refuse
from zest_jax.models.policy import Params
from zest_jax.models.products import matmul_float32
from zest_jax.models.tensor_files import open_tensors
from zest_jax.parallel.sharding import keep_rows_split

_OUTER = {
    "embed_VD": ("embeddings.word_embeddings.weight", "V D"),
    "position_LD": ("embeddings.position_embeddings.weight", "L D"),
    "token_type_TD": ("embeddings.token_type_embeddings.weight", "T D"),
    "embed_norm_D": ("embeddings.LayerNorm.weight", "D"),
    "embed_norm_bias_D": ("embeddings.LayerNorm.bias", "D"),
}
_LAYER = {
    "q_DHK": ("attention.self.query.weight", "HK D"),
    "q_bias_HK": ("attention.self.query.bias", "HK"),
    "k_DHK": ("attention.self.key.weight", "HK D"),
    "k_bias_HK": ("attention.self.key.bias", "HK"),
    "v_DHK": ("attention.self.value.weight", "HK D"),
    "v_bias_HK": ("attention.self.value.bias", "HK"),
    "o_HKD": ("attention.output.dense.weight", "D HK"),
    "o_bias_D": ("attention.output.dense.bias", "D"),
    "attention_norm_D": ("attention.output.LayerNorm.weight", "D"),
    "attention_norm_bias_D": ("attention.output.LayerNorm.bias", "D"),
    "up_DF": ("intermediate.dense.weight", "F D"),
    "up_bias_F": ("intermediate.dense.bias", "F"),
    "down_FD": ("output.dense.weight", "D F"),
    "down_bias_D": ("output.dense.bias", "D"),
    "mlp_norm_D": ("output.LayerNorm.weight", "D"),
    "mlp_norm_bias_D": ("output.LayerNorm.bias", "D"),
}
# What folders store beside the encoder: a buffer of 0, 1, 2, …, and heads that embeddings skip.
_UNUSED = ("embeddings.position_ids", "pooler.", "cls.")
_PREFIX = "bert."  # of the tensors' names where the folder holds a model with a head


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Everything that fixes a BERT-style encoder's parameters and arithmetic.

    Attributes:
      vocab_size: rows of the embedding, V.
      width: residual width, D.
      layers: number of blocks.
      heads: attention heads, H; the head size K is D / H.
      mlp_width: hidden width of the feed-forward, F.
      max_length: rows of the table of positions.
      token_types: rows of the table of token types, T; texts are all of type 0.
      norm_eps: epsilon of every layer norm.
      dtype: compute type; sums over tokens, norms and softmax are float32 whatever it is.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    mlp_width: int
    max_length: int = 512
    token_types: int = 2
    norm_eps: float = 1e-12
    dtype: str = "float32"

    def __post_init__(self):
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is not a multiple of heads={self.heads}")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], dtype: str = "float32") -> "BertConfig":
        """Reads a config.json of transformers.

        Args:
          hf: the parsed config.json.
          dtype: compute type.

        Raises:
          UserError: a model that this network would compute otherwise, or a field that is missing
            or has no possible value.
        """
        family = hf.get("model_type")
        if family != "bert":
            raise UserError(f"model_type {family!r} is no BERT-style encoder, which has 'bert'")
        # (field, values that this network computes, what they mean)
        plain = (
            ("hidden_act", ("gelu", None), "an exact GELU"),
            ("position_embedding_type", ("absolute", None), "absolute position embeddings"),
            ("is_decoder", (False, None), "attention in both directions"),
            ("add_cross_attention", (False, None), "no cross-attention"),
            ("quantization_config", (None,), "unquantised weights"),
        )
        for field, allowed, meaning in plain:
            if hf.get(field) not in allowed:
                raise UserError(
                    f"config.json has {field} = {hf[field]!r}, which is not supported: "
                    f"only BERT models with {meaning} can be loaded"
                )
        width, heads = _count(hf, "hidden_size"), _count(hf, "num_attention_heads")
        if width % heads:
            raise UserError(
                f"config.json has hidden_size = {width}, which is not a multiple of its "
                f"num_attention_heads = {heads}"
            )
        eps = hf.get("layer_norm_eps", 1e-12)
        if type(eps) not in (int, float) or not 0 < eps < 1:
            raise UserError(f"config.json has layer_norm_eps = {eps!r}; it is between 0 and 1")
        return cls(
            vocab_size=_count(hf, "vocab_size"),
            width=width,
            layers=_count(hf, "num_hidden_layers"),
            heads=heads,
            mlp_width=_count(hf, "intermediate_size"),
            max_length=_count(hf, "max_position_embeddings", 512),
            token_types=_count(hf, "type_vocab_size", 2),
            norm_eps=float(eps),
            dtype=dtype,
        )


def _count(hf: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """A whole number from 1 on out of a config.json."""
    value = hf.get(field, default)
    if field not in hf and default is None:
        raise UserError(f"config.json has no field {field!r}: it is not a complete BERT config")
    if type(value) is not int or value < 1:  # bool is a kind of int
        raise UserError(f"config.json has {field} = {value!r}; it is a whole number from 1 on")
    return value


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """(x - mean) / sqrt(variance + eps) * scale + bias over the last axis, in float32."""
    x32 = x.astype(jnp.float32)
    x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return y * scale.astype(jnp.float32) + bias.astype(jnp.float32)


def attention_both_ways(
    query_BLHK: jax.Array, key_BMHK: jax.Array, value_BMHK: jax.Array, length_B: jax.Array
) -> jax.Array:
    """softmax(q k / sqrt(K)) v over the first length_B keys of each row; [B, L, H, K].

    Scores and softmax are float32 whatever the compute type. Which keys are seen is the same for
    all queries and heads of a row, so the comparison with the length is one row of M, not L of
    them. A row of length 0 gives numbers of no use, but numbers.
    """
    score_BHLM = matmul_float32(query_BLHK.transpose(0, 2, 1, 3), key_BMHK.transpose(0, 2, 3, 1))
    seen_BM = jnp.arange(key_BMHK.shape[1]) < length_B[:, None]
    score_BHLM = score_BHLM * query_BLHK.shape[-1] ** -0.5
    score_BHLM = jnp.where(seen_BM[:, None, None], score_BHLM, jnp.finfo(jnp.float32).min)
    weight_BHLM = jax.nn.softmax(score_BHLM, axis=-1).astype(value_BMHK.dtype)
    return jnp.matmul(weight_BHLM, value_BMHK.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)


class BertBlock(nnx.Module):
    """One post-norm layer: attention in both directions, then a GELU feed-forward."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.config = config
        D, H, K, F = config.width, config.heads, config.head_dim, config.mlp_width

        def normal(*shape: int) -> nnx.Param:
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, jnp.float32))

        self.q_DHK, self.k_DHK, self.v_DHK = (normal(D, H, K) for _ in range(3))
        self.q_bias_HK = nnx.Param(jnp.zeros((H, K)))
        self.k_bias_HK = nnx.Param(jnp.zeros((H, K)))
        self.v_bias_HK = nnx.Param(jnp.zeros((H, K)))
        self.o_HKD = normal(H, K, D)
        self.o_bias_D = nnx.Param(jnp.zeros((D,)))
        self.attention_norm_D = nnx.Param(jnp.ones((D,)))
        self.attention_norm_bias_D = nnx.Param(jnp.zeros((D,)))
        self.up_DF = normal(D, F)
        self.up_bias_F = nnx.Param(jnp.zeros((F,)))
        self.down_FD = normal(F, D)
        self.down_bias_D = nnx.Param(jnp.zeros((D,)))
        self.mlp_norm_D = nnx.Param(jnp.ones((D,)))
        self.mlp_norm_bias_D = nnx.Param(jnp.zeros((D,)))

    def __call__(self, x_BLD: jax.Array, length_B: jax.Array) -> jax.Array:
        c = self.config
        B, L, D = x_BLD.shape

        # Products of plain matrices over flat tokens, as in the policy's block.
        def dense(x_BLX: jax.Array, weight: nnx.Param, bias: nnx.Param) -> jax.Array:
            flat = x_BLX.reshape(B * L, -1)
            matrix = weight[...].astype(flat.dtype).reshape(flat.shape[-1], -1)
            return (flat @ matrix + bias[...].astype(flat.dtype).reshape(-1)).reshape(B, L, -1)

        def norm(x_BLD: jax.Array, scale: nnx.Param, bias: nnx.Param) -> jax.Array:
            return layer_norm(x_BLD, scale[...], bias[...], c.norm_eps).astype(x_BLD.dtype)

        q_BLHK, k_BLHK, v_BLHK = (
            dense(x_BLD, weight, bias).reshape(B, L, c.heads, c.head_dim)
            for weight, bias in (
                (self.q_DHK, self.q_bias_HK),
                (self.k_DHK, self.k_bias_HK),
                (self.v_DHK, self.v_bias_HK),
            )
        )
        out_BLHK = attention_both_ways(q_BLHK, k_BLHK, v_BLHK, length_B)
        h_BLD = dense(out_BLHK.reshape(B, L, D), self.o_HKD, self.o_bias_D)
        x_BLD = norm(x_BLD + h_BLD, self.attention_norm_D, self.attention_norm_bias_D)
        h_BLF = jax.nn.gelu(dense(x_BLD, self.up_DF, self.up_bias_F), approximate=False)
        h_BLD = dense(h_BLF, self.down_FD, self.down_bias_D)
        return norm(x_BLD + h_BLD, self.mlp_norm_D, self.mlp_norm_bias_D)


class Bert(nnx.Module):
    """A BERT-style encoder with its layers stacked along a leading axis."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.config = config
        c = config

        def table(rows: int) -> nnx.Param:
            shape = (rows, c.width)
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, jnp.float32))

        self.embed_VD = table(c.vocab_size)
        self.position_LD = table(c.max_length)
        self.token_type_TD = table(c.token_types)
        self.embed_norm_D = nnx.Param(jnp.ones((c.width,)))
        self.embed_norm_bias_D = nnx.Param(jnp.zeros((c.width,)))

        @nnx.split_rngs(splits=c.layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stacked(rngs: nnx.Rngs) -> BertBlock:
            return BertBlock(c, rngs=rngs)

        self.blocks = stacked(rngs)

    def __call__(self, ids_BL: jax.Array, length_B: jax.Array) -> jax.Array:
        """Hidden states [B, L, D] of the last layer.

        Args:
          ids_BL: token ids, padded on the right with any id.
          length_B: real tokens of each row; what stands behind them is not seen by them, and its
            own hidden states are of no use.

        Raises:
          ValueError: rows longer than the table of positions.
        """
        c = self.config
        L = ids_BL.shape[1]
        if L > c.max_length:
            raise ValueError(f"rows of {L} tokens, but the encoder has {c.max_length} positions")

        def rows(table: nnx.Param, index: Any) -> jax.Array:
            return table[...][index].astype(jnp.float32)

        position_LD = rows(self.position_LD, slice(L)) + rows(self.token_type_TD, 0)
        x_BLD = layer_norm(
            rows(self.embed_VD, ids_BL) + position_LD,
            self.embed_norm_D[...],
            self.embed_norm_bias_D[...],
            c.norm_eps,
        )
        block_def, stacked = nnx.split(self.blocks)

        def layer(x_BLD: jax.Array, params: Any) -> tuple[jax.Array, None]:
            return keep_rows_split(nnx.merge(block_def, params)(x_BLD, length_B)), None

        return jax.lax.scan(layer, keep_rows_split(x_BLD.astype(c.dtype)), stacked)[0]


@functools.cache
def _abstract(config: BertConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Bert(config, rngs=nnx.Rngs(0))))


def bert_shapes(config: BertConfig) -> Params:
    """The parameters as `jax.ShapeDtypeStruct`s: embed_VD, blocks/{q_DHK, …}, position_LD, …"""
    return nnx.to_pure_dict(_abstract(config)[1])


def bind_bert(config: BertConfig, params: Params) -> Bert:
    """The module over a dict of parameters (arrays or tracers), shaped as `bert_shapes`."""
    graphdef, abstract = _abstract(config)
    state = jax.tree.map(lambda x: x, abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)


def read_bert(
    config: BertConfig, folder: Path, mesh: Mesh | None = None, param_dtype: str = "float32"
) -> Params:
    """The parameters of a BERT-style encoder from a Hugging Face folder.

    Args:
      config: its shape, from the folder's config.json.
      folder: where its safetensors lie.
      mesh: where to place the parameters; None for the default device.
      param_dtype: type of the parameters in memory.

    Raises:
      UserError: missing, unexpected, mis-shaped or truncated tensors, all named in one sentence.
    """
    stored, problems = open_tensors(folder)
    files = {_canonical(name): tensor for name, tensor in stored.items()}
    problems = [p for p in problems if not _canonical(p).startswith(_UNUSED)]
    c = config
    sizes = {
        "V": c.vocab_size,
        "L": c.max_length,
        "T": c.token_types,
        "D": c.width,
        "H": c.heads,
        "K": c.head_dim,
        "F": c.mlp_width,
    }
    layout = Layout(_OUTER, _LAYER, "encoder.layer.", c.layers, sizes)
    shapes = bert_shapes(config)
    problems += misfits(layout, shapes, files, lambda name: name.startswith(_UNUSED))
    refuse(folder, problems)
    return read_params(layout, shapes, files, mesh, param_dtype)


def _canonical(name: str) -> str:
    """A stored name without the prefix, and with the names that norms have had since PyTorch."""
    name = name.removeprefix(_PREFIX)
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    )
