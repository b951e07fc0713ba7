"""Builds tests/fixtures/hf: tiny random models of transformers, and what torch computes with them.

Needs torch and transformers (not a dependency of this project), so the results are kept in git:

    python tools/make_parity_fixtures.py tests/fixtures/hf

(`make_encoder_fixtures.py` does the same for text encoders.)

Each model is a folder as `save_pretrained` of transformers writes it, and `expected.npz` beside the
weights. Biases and norms are random too: freshly made they are all 0 and all 1, and a loader that
drops them would pass.

Shape letters: B batch, L length, V vocabulary.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, MLP = 67, 32, 2, 4, 2, 40
NEW_TOKENS = 64
ENTRIES, PROJECTIONS = 8, 3
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,  # so that one wavelength lies on the ramp
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# name: (class prefix, config fields, stored type, file size limit)
MODELS: dict[str, tuple[str, dict[str, Any], torch.dtype, str]] = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, torch.float32, "5GB"),
    "qwen2_yarn_sharded": (
        "Qwen2",
        {"tie_word_embeddings": False, "rope_parameters": YARN},
        torch.float32,
        "30KB",
    ),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 16}, torch.float32, "5GB"),
    "qwen3_untied": (
        "Qwen3",
        {
            "tie_word_embeddings": False,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
        torch.bfloat16,
        "5GB",
    ),
    "llama3": (
        "Llama",
        {"tie_word_embeddings": False, "rope_parameters": LLAMA3},
        torch.float32,
        "5GB",
    ),
    "llama_linear_v4": (
        "Llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 2.0},
        },
        torch.bfloat16,
        "5GB",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    for number, name in enumerate(MODELS):
        build(folder / name, name, seed=number)


def build(folder: Path, name: str, seed: int) -> None:
    """Writes one model and its expected values; tries seeds until greedy choices are clear-cut."""
    prefix, fields, dtype, limit = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=MLP,
        max_position_embeddings=32_768,
        rms_norm_eps=1e-5 if prefix == "Llama" else 1e-6,
        bos_token_id=None,
        eos_token_id=None,
        **fields,
    )
    config._attn_implementation = "eager"
    for attempt in range(100):
        torch.manual_seed(1000 * attempt + seed)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
        randomise(model)
        # What is stored is what is computed with (model.to would round the rotary buffers too).
        for p in model.parameters():
            p.data = p.data.to(dtype).float()
        rng = np.random.default_rng(seed)
        values, margin = expected(model, rng)
        kinds = min(len(np.unique(row)) for row in values["generated"])
        if margin > 2e-3 and kinds > 12:  # no near ties, no loop of a few tokens
            break
    else:
        raise SystemExit(f"{name}: no seed gives a clear greedy generation")
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    model.to(dtype).save_pretrained(folder, max_shard_size=limit)
    if name.endswith("_v4"):
        as_transformers_4(folder / "config.json")
    np.savez_compressed(folder / "expected.npz", **values)
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{name}: {size / 1e3:.0f} kB, attempt {attempt}, margin {margin:.4f}, {kinds} kinds")


def randomise(model: torch.nn.Module) -> None:
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            scale, middle = 0.5, 0.0
        elif p.ndim == 1:
            scale, middle = 0.3, 1.0
        elif "embed" in name or "lm_head" in name:
            scale, middle = 0.5, 0.0
        else:
            scale, middle = 1.5 * p.shape[1] ** -0.5, 0.0
        p.data = middle + scale * torch.randn_like(p)


def expected(model: Any, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], float]:
    """Logits, gradients and generations of a model, and the closest call of the generations."""
    ids_BL = rng.integers(0, VOCAB, (2, 24))
    length_B = np.array([24, 15])
    position_L = np.sort(rng.choice(30_000, 24, replace=False))
    out: dict[str, np.ndarray] = {
        "ids": ids_BL.astype(np.int16),
        "length": length_B.astype(np.int16),
        "long_position": position_L.astype(np.int32),
    }
    ids = torch.tensor(ids_BL)
    with torch.no_grad():
        out["logits"] = model(ids).logits.numpy()
        out["left_padded_logits"] = left_padded(model, ids, length_B)
        out["long_logits"] = model(
            ids[:1],
            attention_mask=torch.ones_like(ids[:1]),
            position_ids=torch.tensor(position_L)[None],
        ).logits.numpy()
        # What the choice of positions does at all: a test that cannot fail is no test.
        moved = np.abs(out["long_logits"] - out["logits"][:1]).max()
        assert moved > 0.1, moved
    out |= gradients(model, ids, length_B)
    generated, margin = greedy(model, ids, np.array([9, 5]))
    return out | {"generated": generated, "prompt_length": np.array([9, 5], np.int16)}, margin


def left_padded(model: Any, ids: torch.Tensor, length_B: np.ndarray) -> np.ndarray:
    """Logits of the rows' first length_B tokens, from left-padded rows, moved back to the left."""
    B, L = ids.shape
    padded, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    for b, n in enumerate(length_B):
        padded[b, L - n :] = ids[b, :n]
        mask[b, L - n :] = 1
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(padded, attention_mask=mask, position_ids=position).logits.numpy()
    out = np.zeros_like(logits)
    for b, n in enumerate(length_B):
        out[b, :n] = logits[b, L - n :]
    return out


def gradients(model: Any, ids: torch.Tensor, length_B: np.ndarray) -> dict[str, np.ndarray]:
    """Loss (mean over real next tokens) and, for each tensor, norm, projections and a few entries.

    Projections are on +-1 vectors of `numpy.random.default_rng(3)`, entries lie at even distances.
    """
    model.zero_grad()
    mask = torch.tensor(np.arange(ids.shape[1])[None] < length_B[:, None])
    log_p = torch.log_softmax(model(ids, attention_mask=mask.long()).logits[:, :-1], -1)
    nll = -log_p.gather(-1, ids[:, 1:, None])[..., 0]
    loss = (nll * mask[:, 1:]).sum() / mask[:, 1:].sum()
    loss.backward()
    out = {"loss": np.float32(loss.item())}
    for name, p in model.named_parameters():
        out[f"grad/{name}"] = digest(p.grad.numpy())
    return out


def digest(gradient: np.ndarray) -> np.ndarray:
    flat = gradient.astype(np.float64).ravel()
    signs = np.random.default_rng(3).integers(0, 2, (PROJECTIONS, flat.size)) * 2 - 1
    entries = flat[np.linspace(0, flat.size - 1, ENTRIES).astype(int)]
    return np.concatenate([[np.linalg.norm(flat)], signs @ flat, entries]).astype(np.float32)


def greedy(model: Any, ids: torch.Tensor, length_B: np.ndarray) -> tuple[np.ndarray, float]:
    """Greedy tokens [B, 64] by `generate` (left-padded prompts), and the closest call."""
    L = int(length_B.max())
    padded, mask = torch.zeros((len(ids), L), dtype=torch.long), torch.zeros((len(ids), L)).long()
    for b, n in enumerate(length_B):
        padded[b, L - n :] = ids[b, :n]
        mask[b, L - n :] = 1
    done = model.generate(
        padded,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    top = torch.stack(done.scores).topk(2, -1).values
    margin = float((top[..., 0] - top[..., 1]).min())
    return done.sequences[:, L:].numpy().astype(np.int16), margin


def as_transformers_4(path: Path) -> None:
    """Rewrites a config.json the way transformers 4 wrote it."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.45.0"
    path.write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
