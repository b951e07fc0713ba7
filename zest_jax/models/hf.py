"""Hugging Face folders of policies in and out, tensor by tensor and bit for bit.

One table of names and letters (see `layouts`) drives both ways.

Shape letters: V vocabulary, D width, H query heads, J key/value heads, K head size, F feed-forward
width; in the table below they name the dimensions of the stored tensor, a space between the groups
that it flattens.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zest_jax.errors import UserError
from zest_jax.models.config import PolicyConfig
from zest_jax.models.layouts import Layout, misfits, read_params, refuse, to_stored
from zest_jax.models.policy import Params, param_shapes
from zest_jax.models.tensor_files import Stored, open_tensors, write_tensors

_OUTER = {
    "embed_VD": ("model.embed_tokens.weight", "V D"),
    "final_norm_D": ("model.norm.weight", "D"),
    "head_DV": ("lm_head.weight", "V D"),
}
_LAYER = {
    "attention_norm_D": ("input_layernorm.weight", "D"),
    "q_DHK": ("self_attn.q_proj.weight", "HK D"),
    "k_DJK": ("self_attn.k_proj.weight", "JK D"),
    "v_DJK": ("self_attn.v_proj.weight", "JK D"),
    "o_HKD": ("self_attn.o_proj.weight", "D HK"),
    "q_bias_HK": ("self_attn.q_proj.bias", "HK"),
    "k_bias_JK": ("self_attn.k_proj.bias", "JK"),
    "v_bias_JK": ("self_attn.v_proj.bias", "JK"),
    "q_norm_K": ("self_attn.q_norm.weight", "K"),
    "k_norm_K": ("self_attn.k_norm.weight", "K"),
    "mlp_norm_D": ("post_attention_layernorm.weight", "D"),
    "gate_DF": ("mlp.gate_proj.weight", "F D"),
    "up_DF": ("mlp.up_proj.weight", "F D"),
    "down_FD": ("mlp.down_proj.weight", "D F"),
}
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model")
_TYPES = ("float32", "bfloat16", "float16")
# Buffers that old Llama checkpoints stored although they follow from the config.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def local_folder(name: str | Path) -> Path:
    """The folder itself, or a downloaded snapshot where `name` is an id of the Hugging Face hub.

    Raises:
      UserError: no such folder, and nothing could be fetched under that name.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(name)):
        raise UserError(f"{name} is no folder; give the path of a Hugging Face model folder")
    import huggingface_hub

    try:
        kept = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
        return Path(huggingface_hub.snapshot_download(str(name), allow_patterns=kept))
    except Exception as e:  # of many types: network, authorisation, name, offline mode
        raise UserError(
            f"{name} is no folder here and could not be fetched from the Hugging Face hub "
            f"({type(e).__name__}); check the name and the network, or download the model "
            "elsewhere and give the path of its folder"
        ) from e


def load_config(folder: str | Path, dtype: str = "float32") -> PolicyConfig:
    """The policy's shape from a folder (or hub id), without its weights.

    Raises:
      UserError: no readable config.json, or a model that is not supported.
    """
    return PolicyConfig.from_hf(read_config(local_folder(folder)), dtype)


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a folder.

    Raises:
      UserError: there is none, or it cannot be read.
    """
    path = folder / "config.json"
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no config.json; give the path of a Hugging Face model folder"
        ) from None
    except (ValueError, TypeError):
        raise UserError(f"{path} is not valid JSON; fetch the model again") from None
    except OSError as e:
        raise UserError(f"{path} cannot be read ({e.strerror}); fetch the model again") from None


def has_tokenizer(folder: Path) -> bool:
    """Whether a local folder has files of a tokenizer."""
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def read_tokenizer(folder: str | Path, vocab_size: int | None = None) -> Any:
    """The tokenizer of a folder (or hub id).

    Args:
      folder: where its files lie.
      vocab_size: rows of the embedding that it must fit; None where there is none yet.

    Raises:
      UserError: there is none, it cannot be read, or it has ids that the embedding has not.
    """
    import transformers  # slow to import, and most callers need no tokenizer

    folder = local_folder(folder)
    # Without these files the library makes up an empty tokenizer, and says nothing.
    if not has_tokenizer(folder):
        raise UserError(
            f"{folder} has no tokenizer ({', '.join(TOKENIZER_FILES)}); fetch the model again with "
            "its tokenizer files"
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    except Exception as e:  # whatever the library makes of a broken file
        reason = str(e).strip().splitlines()[0] if str(e).strip() else repr(e)
        raise UserError(
            f"the tokenizer in {folder} cannot be read ({type(e).__name__}: {reason[:120]}); "
            "fetch the model again"
        ) from e
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if vocab_size is not None and largest >= vocab_size:
        raise UserError(
            f"the tokenizer in {folder} has ids up to {largest}, but the model has only "
            f"{vocab_size} rows for them: it is the tokenizer of another model"
        )
    return tokenizer


def load_generation(folder: str | Path) -> dict[str, Any]:
    """The folder's generation_config.json (end tokens and the like), {} where it has none.

    Raises:
      UserError: it is there and cannot be read.
    """
    path = local_folder(folder) / "generation_config.json"
    try:
        return dict(json.loads(path.read_text())) if path.exists() else {}
    except (ValueError, TypeError, OSError):
        raise UserError(f"{path} is not valid JSON; fetch the model again") from None


def load_pretrained(
    folder: str | Path,
    *,
    mesh: Mesh | None = None,
    dtype: str = "float32",
    param_dtype: str = "float32",
) -> tuple[PolicyConfig, Params]:
    """Reads a Qwen2, Qwen2.5, Qwen3 or Llama-shaped model from a Hugging Face folder.

    The files are mapped, and one stacked parameter at a time is copied out of them, each process
    and device getting only the shards that the rules give it.

    Args:
      folder: a local folder with config.json and safetensors, or an id of the Hugging Face hub.
      mesh: where to place the parameters; None for the default device.
      dtype: compute type of the policy.
      param_dtype: type of the parameters in memory; float32 for whatever is trained, "bfloat16"
        halves the memory of a frozen model.

    Returns:
      The config, and the parameters as `init_params` would lay them out.

    Raises:
      UserError: an unsupported model, or missing, unexpected, mis-shaped or truncated tensors: all
        of them named in one sentence; or a type that is none of float32, bfloat16 and float16.
    """
    for name, value in (("dtype", dtype), ("param_dtype", param_dtype)):
        if value not in _TYPES:
            raise UserError(f"{name} is one of {', '.join(_TYPES)}, not {value!r}")
    folder = local_folder(folder)
    config = load_config(folder, dtype)
    files, problems = open_tensors(folder)
    refuse(folder, problems + policy_misfits(config, files))
    return config, read_policy(config, files, mesh, param_dtype)


def read_policy(
    config: PolicyConfig, files: Mapping[str, Stored], mesh: Mesh | None, param_dtype: str
) -> Params:
    """The parameters of a policy from stored tensors in which `policy_misfits` found nothing."""
    return read_params(_layout(config), param_shapes(config), files, mesh, param_dtype)


def policy_misfits(config: PolicyConfig, files: Mapping[str, Stored]) -> list[str]:
    """What is missing, too much or of the wrong shape for a policy, a sentence each."""
    head, embed = "lm_head.weight", "model.embed_tokens.weight"
    spare_head = config.tied and head in files and embed in files
    problems = misfits(
        _layout(config),
        param_shapes(config),
        files,
        lambda name: bool(_DERIVED.fullmatch(name)) or (name == head and spare_head),
    )
    if spare_head and not _same(files[head], files[embed]):
        problems.append(f"{head} differs from {embed} although the two are tied")
    return problems


def save_pretrained(
    config: PolicyConfig,
    params: Params,
    folder: str | Path,
    tokenizer: Any = None,
    *,
    dtype: str = "float32",
    max_shard_size: int | str = "5GB",
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Writes a folder that transformers and vLLM load: config, weights, tokenizer.

    With several processes all must call it; the first one writes.

    Args:
      config: the policy's shape.
      params: its parameters, wherever they lie.
      folder: made if needed; an earlier export in it is replaced.
      tokenizer: a transformers tokenizer to save along, or None.
      dtype: type of the stored weights, "float32" or "bfloat16" (rounded to nearest even).
      max_shard_size: most bytes of weights in a file, as a number or like "5GB", "200MB".
      generation: what generation_config.json shall hold; if None, the tokenizer's end, begin and
        pad ids. Pass `load_generation` of the starting model to keep its several end tokens.

    Raises:
      UserError: a policy that no Hugging Face architecture describes, an unknown type or size, or
        a folder that cannot be made.
    """
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"weights are stored as float32 or bfloat16, not as {dtype!r}")
    limit = _byte_count(max_shard_size)
    hf = config.to_hf(dtype)
    target = np.dtype(jnp.dtype(dtype))
    folder = Path(folder).expanduser()
    first = jax.process_index() == 0
    ids = {
        f"{k}_token_id": getattr(tokenizer, f"{k}_token_id", None) for k in ("bos", "eos", "pad")
    }
    if generation is None:
        generation = {k: v for k, v in ids.items() if v is not None}
    # Only bos and eos: a pad id in config.json makes torch freeze that row of the embedding.
    hf |= {"bos_token_id": ids["bos_token_id"], "eos_token_id": ids["eos_token_id"]}
    if hf["eos_token_id"] is None:
        hf |= {k: generation[k] for k in ("bos_token_id", "eos_token_id") if k in generation}
    if first:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(
                f"{folder} cannot be made ({e.strerror}); name another folder"
            ) from None
    layout = _layout(config)
    stored_shapes = {
        name: layout.stored_shape(letters) for name, letters, *_ in _walk(config, params)
    }

    def producers() -> Iterator[tuple[str, Any]]:
        for name, letters, key, leaf, layer in _walk(config, params):
            yield (
                name,
                lambda letters=letters, key=key, leaf=leaf, layer=layer: to_stored(
                    _host(leaf, layer), key, letters
                ).astype(target),
            )

    write_tensors(folder, stored_shapes, target, limit, producers(), dry=not first)
    if first:
        _write_json(folder / "config.json", hf)
        _write_json(folder / "generation_config.json", dict(generation))
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    if jax.process_count() > 1:  # nobody reads what the first one is still writing
        multihost_utils.sync_global_devices("save_pretrained")


# ------------------------------------------------------------------------- names and layouts


def _walk(config: PolicyConfig, params: Params) -> Iterator[tuple[str, str, str, Any, int | None]]:
    """(stored name, letters, our name, leaf, layer or None) in the order of the network."""
    yield (*_OUTER["embed_VD"], "embed_VD", params["embed_VD"], None)
    for layer in range(config.layers):
        for key, (name, letters) in _LAYER.items():
            if key in params["blocks"]:
                leaf = params["blocks"][key]
                yield f"model.layers.{layer}.{name}", letters, key, leaf, layer
    for key in ("final_norm_D", "head_DV"):
        if key in params:
            yield (*_OUTER[key], key, params[key], None)


def _layout(config: PolicyConfig) -> Layout:
    c = config
    sizes = {
        "V": c.vocab_size,
        "D": c.width,
        "H": c.heads,
        "J": c.kv_heads,
        "K": c.head_dim,
        "F": c.mlp_width,
    }
    return Layout(_OUTER, _LAYER, "model.layers.", c.layers, sizes)


# ------------------------------------------------------------------------- checks and transfers


def _same(a: Stored, b: Stored, rows: int = 8192) -> bool:
    """Whether two stored tensors are equal, read a few rows at a time."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    x, y = a.view(), b.view()
    return all(np.array_equal(x[i : i + rows], y[i : i + rows]) for i in range(0, len(x), rows))


@functools.cache
def _gather(replicated: NamedSharding, stacked: bool) -> Any:
    """A program that brings one layer of a parameter (or the whole) to every device of a mesh."""

    def take(array: jax.Array, layer: jax.Array) -> jax.Array:
        return array[layer] if stacked else array

    return jax.jit(take, out_shardings=replicated)


def _host(array: Any, layer: int | None) -> np.ndarray:
    """One layer of a stacked parameter (or a whole one) on the host."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        assert isinstance(array.sharding, NamedSharding)
        replicated = NamedSharding(array.sharding.mesh, P())
        return np.asarray(_gather(replicated, layer is not None)(array, layer or 0))
    return np.asarray(array if layer is None else array[layer])


def _byte_count(size: int | str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?)i?B?\s*", str(size), re.IGNORECASE)
    count = 0
    if match:
        count = int(float(match[1]) * 1000 ** " KMG".index(match[2].upper() or " "))
    if count < 1:
        raise UserError(f"max_shard_size is a number of bytes or like '5GB', not {size!r}")
    return count


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
