"""Llama-shaped models and their tokenizers out of GGUF files (the format of llama.cpp).

Such a file holds settings by name, a vocabulary, and quantised tensors under names of its own. Read
here is what the demo needs: the architecture "llama" and byte-level BPE. The file is mapped and a
tensor is dequantised when it is asked for. Nothing needs PyTorch, which the reader of transformers
does.

Shape letters: H heads, K head size, D width.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from zest_jax.errors import UserError
from zest_jax.models import PolicyConfig
from zest_jax.models.hf import policy_misfits, read_policy
from zest_jax.models.layouts import refuse
from zest_jax.models.policy import Params
from zest_jax.models.tensor_files import Stored

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Kinds of tokens in `tokenizer.ggml.token_type`.
_CONTROL, _USER_DEFINED = 3, 4
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


class GgufModel:
    """An opened GGUF file with a Llama-shaped policy.

    Attributes:
      path: the file.
      fields: its settings by name, like "llama.embedding_length".
      config: the policy's shape.

    Raises:
      UserError: the package gguf is missing, or the file is broken or holds something else.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        gguf = library()
        try:
            reader = gguf.GGUFReader(self.path)
            self.fields: dict[str, Any] = {k: f.contents() for k, f in reader.fields.items()}
        except FileNotFoundError:
            raise UserError(f"there is no file {self.path}") from None
        except (ValueError, IndexError, KeyError, UnicodeDecodeError) as e:
            raise UserError(f"{self.path} is truncated or no GGUF file; fetch it again") from e
        self._tensors = {t.name: t for t in reader.tensors}
        self.config = self._read_config()

    def params(self) -> Params:
        """The policy's float32 parameters, dequantised one stacked parameter at a time.

        Raises:
          UserError: tensors are missing, too many or of the wrong shape, all named.
        """
        files = {
            _hf_name(name): _Quantised(
                self.path,
                np.dtype(np.float32),
                tuple(int(n) for n in reversed(tensor.shape)),  # innermost first in the file
                int(tensor.data_offset),
                tensor,
                self._rotated_heads(name),
            )
            for name, tensor in self._tensors.items()
        }
        refuse(self.path, policy_misfits(self.config, files))
        return read_policy(self.config, files, None, "float32")

    def tokenizer(self) -> Any:
        """The transformers tokenizer that the file's vocabulary, merges and template describe.

        Raises:
          UserError: it is not byte-level BPE, or splits text in a way that is not known here.
        """
        import tokenizers
        import transformers
        from tokenizers import pre_tokenizers

        kind, split = self._get("tokenizer.ggml.model"), self.fields.get("tokenizer.ggml.pre")
        if kind != "gpt2" or split not in ("smollm", "gpt-2"):
            raise UserError(
                f"{self.path} has a tokenizer of type {kind!r} that splits like {split!r}; only "
                "'gpt2' (byte-level BPE) that splits like 'smollm' or 'gpt-2' can be read"
            )
        tokens = self._get("tokenizer.ggml.tokens")
        merges = [tuple(pair.split(" ")) for pair in self._get("tokenizer.ggml.merges")]
        vocabulary = {token: i for i, token in enumerate(tokens)}
        model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
        by_bytes: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if split == "smollm":  # every digit stands alone before anything else is split
            by_bytes = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), by_bytes])
        model.pre_tokenizer = by_bytes
        model.decoder = tokenizers.decoders.ByteLevel()
        kinds = self.fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
        for token, kind in zip(tokens, kinds, strict=True):
            if kind in (_CONTROL, _USER_DEFINED):
                added = tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
                model.add_special_tokens([added]) if added.special else model.add_tokens([added])
        ids = {k: self.fields.get(f"tokenizer.ggml.{v}_token_id") for k, v in _SPECIAL.items()}
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=model,
            **{f"{k}_token": tokens[i] for k, i in ids.items() if i is not None},
            chat_template=self.fields.get("tokenizer.chat_template"),
            model_max_length=self.config.max_length,
            clean_up_tokenization_spaces=False,
        )

    def quantisation(self) -> dict[str, int]:
        """How many tensors are stored in which type, like {"Q4_1": 210, "F32": 61}."""
        count: dict[str, int] = {}
        for tensor in self._tensors.values():
            count[tensor.tensor_type.name] = count.get(tensor.tensor_type.name, 0) + 1
        return count

    def _read_config(self) -> PolicyConfig:
        architecture = self._get("general.architecture")
        if architecture != "llama":
            raise UserError(
                f"{self.path} holds a model of architecture {architecture!r}; only 'llama' can be "
                "read from GGUF files: fetch the model as safetensors instead"
            )
        scaling = self.fields.get("llama.rope.scaling.type", "none")
        if scaling != "none":
            raise UserError(
                f"{self.path} has rotary scaling ({scaling}), which is not read from GGUF files: "
                "fetch the model as safetensors instead"
            )
        width, heads = self._get("llama.embedding_length"), self._get("llama.attention.head_count")
        head_dim = self.fields.get("llama.attention.key_length") or width // heads
        if self.fields.get("llama.rope.dimension_count", head_dim) != head_dim:
            raise UserError(f"{self.path} rotates a part of each head, which is not supported")
        return PolicyConfig(
            vocab_size=len(self._get("tokenizer.ggml.tokens")),
            width=width,
            layers=self._get("llama.block_count"),
            heads=heads,
            kv_heads=self.fields.get("llama.attention.head_count_kv") or heads,
            head_dim=head_dim,
            mlp_width=self._get("llama.feed_forward_length"),
            rope_theta=_decimal(self.fields.get("llama.rope.freq_base", 10_000.0)),
            norm_eps=_decimal(self._get("llama.attention.layer_norm_rms_epsilon")),
            qk_norm=False,
            tied="output.weight" not in self._tensors,
            max_length=self._get("llama.context_length"),
        )

    def _get(self, name: str) -> Any:
        if name not in self.fields:
            raise UserError(f"{self.path} has no setting {name}: it is no complete model")
        return self.fields[name]

    def _rotated_heads(self, name: str) -> int:
        """Heads whose rows the file stores in another order, 0 where there are none."""
        if name.endswith(".attn_q.weight"):
            return self.config.heads
        return self.config.kv_heads if name.endswith(".attn_k.weight") else 0


@dataclasses.dataclass(frozen=True)
class _Quantised(Stored):
    """A tensor of a GGUF file that is dequantised whenever it is looked at.

    Attributes:
      tensor: the reader's.
      heads: see `GgufModel._rotated_heads`.
    """

    tensor: Any
    heads: int

    def view(self) -> np.ndarray:
        values = library().dequantize(self.tensor.data, self.tensor.tensor_type)
        values = values.astype(np.float32, copy=False).reshape(self.shape)
        return unpermute(values, self.heads) if self.heads else values


def unpermute(weight_RD: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key matrix (R = H K of them) as Hugging Face orders them.

    Its rotation turns component i of a head together with i + K/2; llama.cpp's turns 2 i with
    2 i + 1, so its files hold the two halves of every head interleaved.
    """
    rows, width = weight_RD.shape
    pairs = weight_RD.reshape(heads, rows // heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


def _hf_name(name: str) -> str:
    """Hugging Face's name of a tensor; the given one where there is none."""
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("blk."):
        _, number, part = (*stem.split(".", 2), "")[:3]
        return f"model.layers.{number}.{_LAYER[part]}.{suffix}" if part in _LAYER else name
    return f"{_OUTER[stem]}.{suffix}" if stem in _OUTER else name


def _decimal(value: float) -> float:
    """The shortest decimal number with the same float32: files store 1e-5 as 9.99999975e-06."""
    return float(str(np.float32(value)))


def library() -> Any:
    """The package gguf.

    Raises:
      UserError: it is not installed.
    """
    try:
        import gguf
    except ModuleNotFoundError as e:
        if e.name != "gguf":
            raise
        raise UserError(
            "GGUF files are read with the package gguf, which is not installed; "
            "run: pip install 'zest-jax[demo]' (or: pip install 'gguf>=0.19')"
        ) from None
    return gguf
