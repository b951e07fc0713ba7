"""The shape of a decoder-only policy, in our own words and as a Hugging Face config.json."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from zest_jax.errors import UserError

FAMILIES = ("qwen2", "qwen3", "llama")

# The matrices of a block: letters of the axes that each contracts, and of those that it makes.
MATRICES = {
    "q": ("D", "HK"),
    "k": ("D", "JK"),
    "v": ("D", "JK"),
    "o": ("HK", "D"),
    "gate": ("D", "F"),
    "up": ("D", "F"),
    "down": ("F", "D"),
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How a checkpoint stretches the rotary embedding beyond the length it was first trained for.

    Attributes:
      kind: "linear" (every frequency divided by `factor`), "llama3" (low frequencies divided, high
        ones kept, a ramp between) or "yarn" (the same idea by dimension, and a warmer softmax).
      factor: the stretch.
      original_length: longest position before the stretch ("llama3", "yarn").
      low_freq_factor, high_freq_factor: ends of Llama 3's ramp, in turns within original_length.
      beta_fast, beta_slow: ends of YaRN's ramp, in turns within original_length.
      attention_factor: YaRN's factor on cosines and sines; 0 for its rule 0.1 ln(factor) + 1.
      truncate: whether YaRN rounds the ends of its ramp to whole dimensions.
    """

    kind: str
    factor: float
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class LoraSpec:
    """Low-rank adapters beside frozen matrices (Hu et al., 2021): y = x W + (alpha / rank) x A B.

    Attributes:
      rank: columns of A and rows of B.
      alpha: the adapters' weight, divided by the rank.
      targets: which matrices have one, names of `MATRICES`.

    Raises:
      UserError: a rank below 1, an alpha that is not above 0, no targets or unknown ones.
    """

    rank: int
    alpha: float = 16.0
    targets: tuple[str, ...] = tuple(MATRICES)

    def __post_init__(self):
        if self.rank < 1 or self.alpha <= 0:
            raise UserError(
                f"adapters have a rank of at least 1 and an alpha above 0, got rank={self.rank} "
                f"and alpha={self.alpha}"
            )
        if not self.targets or set(self.targets) - set(MATRICES):
            raise UserError(
                f"adapters stand beside some of {', '.join(MATRICES)}, got "
                f"{', '.join(self.targets) or 'none'}"
            )

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    @staticmethod
    def names(target: str) -> tuple[str, str]:
        """Names of a target's two parameters, A and B (letter A for the rank)."""
        ins, outs = MATRICES[target]
        return f"{target}_lora_a_{ins}A", f"{target}_lora_b_A{outs}"


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """Everything that fixes a Qwen-style decoder's parameters and arithmetic.

    Qwen2/Qwen2.5 are `qkv_bias=True, qk_norm=False`; Qwen3 is `qkv_bias=False, qk_norm=True`;
    Llama-shaped models have neither.

    Attributes:
      vocab_size: rows of the embedding, V.
      width: residual width, D.
      layers: number of blocks.
      heads: query heads, H.
      kv_heads: key/value heads, J; H is a multiple of J (grouped-query attention).
      head_dim: size of a head, K (apart from D / H in Qwen3).
      mlp_width: hidden width of the SwiGLU feed-forward, F.
      rope_theta: base of the rotary frequencies.
      norm_eps: epsilon of every RMS norm.
      qkv_bias: biases on the query, key and value projections.
      qk_norm: RMS norm over each head of query and key, before the rotation.
      tied: the head is the transposed embedding.
      max_length: the longest position the checkpoint was made for.
      dtype: compute type; parameters stay float32 (at learning rates near 1e-6 an update would be
        lost in bfloat16).
      rope_scaling: the checkpoint's stretch of the rotary embedding, or None.
      lora: low-rank adapters beside the matrices, or None. They are no part of a Hugging Face
        model: `lora.merge_lora` makes them one with the matrices.
      attention: back end of attention over whole sequences, see `attention.BACKENDS`. Like `dtype`
        it says how to compute, not what; `backends.choose_attention` picks one for the machine.
      decoding: what reads the cache, see `cache.DECODING`; chosen together with `attention`.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    qk_norm: bool = True
    tied: bool = True
    max_length: int = 4096
    dtype: str = "float32"
    rope_scaling: RopeScaling | None = None
    lora: LoraSpec | None = None
    attention: str = "xla"
    decoding: str = "xla"

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for the rotary embedding")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], dtype: str = "float32") -> "PolicyConfig":
        """Reads a config.json of transformers 4 or 5.

        Args:
          hf: the parsed config.json.
          dtype: compute type of the policy (the file's own type says how it was stored, no more).

        Raises:
          UserError: a family, or a field of it, that this block cannot compute; or a missing field.
        """
        family = hf.get("model_type")
        _refuse_unsupported(hf)
        read = functools.partial(_number, hf)
        heads = read("num_attention_heads", int)
        width = read("hidden_size", int)
        theta, scaling = _read_rope(hf)
        # Qwen3's head size is a field of its own, 128 unless told; elsewhere it is D / H.
        head_dim = read("head_dim", int, 128 if family == "qwen3" else width // heads)
        kv_heads = read("num_key_value_heads", int, heads)
        if heads % kv_heads or head_dim % 2:
            raise UserError(
                f"config.json has num_attention_heads = {heads}, num_key_value_heads = {kv_heads} "
                f"and a head size of {head_dim}; the first must be a multiple of the second, and "
                "the third even"
            )
        return cls(
            vocab_size=read("vocab_size", int),
            width=width,
            layers=read("num_hidden_layers", int),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            mlp_width=read("intermediate_size", int),
            rope_theta=theta,
            norm_eps=read("rms_norm_eps", float, 1e-6),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            tied=bool(hf.get("tie_word_embeddings", False)),
            max_length=read("max_position_embeddings", int, 32_768),
            dtype=dtype,
            rope_scaling=scaling,
        )

    @property
    def family(self) -> str:
        """Name of the Hugging Face architecture with this block.

        Raises:
          UserError: biases and query/key norms together, which no such architecture has.
        """
        if self.qkv_bias and self.qk_norm:
            raise UserError(
                "a policy with both qkv_bias and qk_norm is neither Qwen2 nor Qwen3 and cannot be "
                "written as a Hugging Face model; set one of them to False"
            )
        return "qwen2" if self.qkv_bias else "qwen3" if self.qk_norm else "llama"

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """A config.json that transformers 5 and 4 both read; `dtype` is that of the stored weights.

        Raises:
          UserError: see `family`; or adapters, which would be lost.
        """
        if self.lora is not None:
            raise UserError(
                "a policy with adapters is no Hugging Face model; merge them into its matrices "
                "first (merge_lora)"
            )
        family = self.family
        hf: dict[str, Any] = {
            "architectures": [f"{family.capitalize()}ForCausalLM"],
            "model_type": family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.mlp_width,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.max_length,
            "tie_word_embeddings": self.tied,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "dtype": dtype,
            "torch_dtype": dtype,
            "rope_theta": self.rope_theta,
            "rope_parameters": _write_rope(self.rope_theta, self.rope_scaling),
        }
        if self.rope_scaling is not None:  # where transformers 4 looks
            hf["rope_scaling"] = {
                k: v for k, v in hf["rope_parameters"].items() if k != "rope_theta"
            }
        if family == "llama":
            hf |= {"attention_bias": False, "mlp_bias": False}
        else:
            hf |= {"use_sliding_window": False, "sliding_window": None}
            hf |= {"max_window_layers": self.layers}
        if family == "qwen3":
            hf["attention_bias"] = False
        return hf


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    """Raises UserError for whatever our block would compute otherwise than the checkpoint."""
    family = hf.get("model_type")
    if family in ("qwen2_moe", "qwen3_moe"):
        raise UserError(
            f"mixture-of-experts models ({family}) are not supported yet; "
            "use a dense Qwen2, Qwen2.5 or Qwen3 checkpoint"
        )
    if family not in FAMILIES:
        raise UserError(
            f"model_type {family!r} is not supported; supported are {', '.join(FAMILIES)} "
            "(Qwen2, Qwen2.5, Qwen3 dense, Llama and SmolLM2)"
        )
    window = hf.get("sliding_window")
    layer_types = hf.get("layer_types")
    if layer_types is not None:
        slides = any(t != "full_attention" for t in layer_types)
    else:
        slides = bool(hf.get("use_sliding_window")) and window is not None
        slides &= int(hf.get("max_window_layers", 28)) < int(hf.get("num_hidden_layers", 32))
    if slides:
        raise UserError(
            "this checkpoint uses sliding-window attention, which is not supported; "
            "pick one whose config.json has use_sliding_window false"
        )
    # (field, values that our block computes, what they mean)
    plain = (
        ("hidden_act", ("silu", "swish", None), "a SiLU-gated feed-forward"),
        ("attention_bias", (False, None), "models without a bias on the output projection"),
        ("mlp_bias", (False, None), "models without biases in the feed-forward"),
        ("quantization_config", (None,), "unquantised weights"),
        ("partial_rotary_factor", (1.0, None), "a rotation of the whole head"),
    )
    for field, allowed, meaning in plain:
        if hf.get(field) not in allowed:
            raise UserError(
                f"config.json has {field} = {hf[field]!r}, which is not supported: "
                f"only {meaning} can be loaded"
            )


def _number(
    fields: Mapping[str, Any],
    name: str,
    kind: type,
    default: Any = None,
    where: str = "config.json",
) -> Any:
    """A positive number of a config, `default` where the field is absent or null.

    Raises:
      UserError: there is none and no default, or it is no positive number.
    """
    value = fields.get(name)
    if value is None:
        if default is None:
            raise UserError(f"{where} has no field {name!r}: it is not a complete config")
        return default
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    if not good or (kind is int and value != int(value)):
        raise UserError(f"{where} has {name} = {value!r}, which is no positive {_KINDS[kind]}")
    return kind(value)


_KINDS = {int: "whole number", float: "number"}


def _read_rope(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from the fields of transformers 5 (`rope_parameters`) or 4.

    Where there are both, `rope_scaling` counts, as it does in transformers: model cards tell people
    to add it.
    """
    both = {name: hf.get(name) or {} for name in ("rope_scaling", "rope_parameters")}
    for name, fields in both.items():
        if not isinstance(fields, Mapping):
            raise UserError(f"config.json has {name} = {fields!r}, which is no group of fields")
    name = "rope_scaling" if both["rope_scaling"] else "rope_parameters"
    rope = both[name]
    read = functools.partial(_number, rope, where=f"{name} of config.json")
    given = [fields["rope_theta"] for fields in (rope, hf) if fields.get("rope_theta") is not None]
    if not given and "rope_theta" in both["rope_parameters"]:
        raise UserError(
            "config.json has both rope_scaling and rope_parameters, and rope_theta only in the "
            "second, which the first replaces; write rope_theta into rope_scaling as well"
        )
    theta = _number({"rope_theta": given[0] if given else None}, "rope_theta", float, 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if any(isinstance(v, Mapping) for v in rope.values()):
        raise UserError("config.json has rotary settings by kind of layer, which is not supported")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError("partial rotary embeddings are not supported: only whole heads are rotated")
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3", "yarn") or rope.get("mscale") or rope.get("mscale_all_dim"):
        extra = " with mscale" if kind == "yarn" else ""
        raise UserError(
            f"rotary scaling of type {kind!r}{extra} is not supported; "
            "supported are default, linear, llama3 and yarn"
        )
    factor = read("factor", float)
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    # YaRN's original length is the checkpoint's longest where nothing else is said.
    otherwise = hf.get("original_max_position_embeddings")
    if otherwise is None and kind == "yarn":
        otherwise = hf.get("max_position_embeddings")
    length = read("original_max_position_embeddings", int, otherwise)
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            factor,
            length,
            low_freq_factor=read("low_freq_factor", float),
            high_freq_factor=read("high_freq_factor", float),
        )
    return theta, RopeScaling(
        "yarn",
        factor,
        length,
        beta_fast=read("beta_fast", float, 32.0),
        beta_slow=read("beta_slow", float, 1.0),
        attention_factor=read("attention_factor", float, 0.0) or 0.0,
        truncate=bool(rope.get("truncate", True)),
    )


def _write_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The inverse of `_read_rope`, as transformers 5 writes it."""
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    if scaling is None:
        return rope
    rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        rope["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind == "llama3":
        rope["low_freq_factor"] = scaling.low_freq_factor
        rope["high_freq_factor"] = scaling.high_freq_factor
    if scaling.kind == "yarn":
        rope |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        if scaling.attention_factor:
            rope["attention_factor"] = scaling.attention_factor
        if not scaling.truncate:
            rope["truncate"] = False
    return rope
