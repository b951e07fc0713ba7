"""How far bfloat16 log-probabilities lie from transformers', at the shapes of real models.

    python -m benchmarks.precision                      on a GPU with torch and transformers

A model of random weights (norms and biases random too, the last norm scaled so that the logits
spread as a trained model's do) samples text in transformers; the sampled tokens' log-probabilities
are then computed four ways: transformers in float32 (the truth) and in bfloat16, ours in bfloat16
from float32 and from bfloat16 parameters.

Shape letters: B sequences, L length.
"""

import gc
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.shapes import POLICIES

COLUMNS = ("policy", "pair", "mean_abs", "p99_abs", "max_abs", "mean", "tokens", "entropy")


def reference(name: str, folder: Path, rows: int, prompt: int, new: int) -> dict[str, Any]:
    """Writes the model's folder; samples; log-probabilities by transformers in both types."""
    import torch
    import transformers

    torch.manual_seed(0)
    hf = POLICIES[name].to_hf()
    hf.pop("architectures")
    config = transformers.AutoConfig.for_model(**hf)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "norm" in key:
                value.copy_(1 + 0.1 * torch.randn_like(value))
            elif key.endswith("bias"):
                value.copy_(0.1 * torch.randn_like(value))
        model.model.norm.weight.mul_(4)
        # What a checkpoint holds: values that bfloat16 can say, so that all four read the same.
        for value in model.parameters():
            value.copy_(value.bfloat16().float())
    model.bfloat16().save_pretrained(folder)
    load = transformers.AutoModelForCausalLM.from_pretrained

    @torch.no_grad()
    def logp(model: Any) -> tuple[Any, float]:
        out, entropy = [], 0.0
        for row in ids_BL:
            z = model(input_ids=row[None], use_cache=False).logits[0, prompt - 1 : -1].float()
            all_logp = torch.log_softmax(z, -1)
            entropy += -(all_logp.exp() * all_logp).sum(-1).mean().item() / rows
            out.append(all_logp.gather(-1, row[prompt:, None])[:, 0])
        return torch.stack(out).cpu().numpy(), entropy

    # Loaded, not cast: casting a model also rounds its rotary frequencies.
    model = load(folder, dtype=torch.bfloat16).cuda()
    ids_BL = torch.randint(0, config.vocab_size, (rows, prompt), device="cuda")
    ids_BL = model.generate(
        ids_BL, do_sample=True, min_new_tokens=new, max_new_tokens=new, top_k=0, pad_token_id=0
    )
    bf16, _ = logp(model)
    model = load(folder, dtype=torch.float32).cuda()
    truth, entropy = logp(model)
    ids = ids_BL.cpu().numpy()
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return {"ids": ids, "float32": truth, "bfloat16": bf16, "entropy": entropy}


def ours(folder: Path, ids: Any, prompt: int, param_dtype: str) -> Any:
    """Log-probabilities of what follows the prompt, by the trainer's own scoring."""
    import functools

    import jax
    import numpy as np

    from zest_jax.learning.likelihood import as_rows, target_log_probs
    from zest_jax.learning.packing import Item, PackSpec, pack
    from zest_jax.models import bind, load_pretrained
    from zest_jax.models.backends import choose_attention

    config, params = load_pretrained(folder, dtype="bfloat16", param_dtype=param_dtype)
    config, message = choose_attention(config)
    print(message)
    targets = np.arange(prompt, ids.shape[1])
    items = [Item(row, targets, np.zeros(len(targets))) for row in ids]
    packed = pack(items, PackSpec(len(ids), ids.shape[1], len(targets), 1, segments=1))

    @functools.partial(jax.jit, static_argnums=0)
    def run(config: Any, params: Any, packed: Any) -> Any:
        micro = jax.tree.map(lambda x: x[0], as_rows(packed))
        return target_log_probs(bind(config, params), micro)[0]

    return np.asarray(run(config, params, packed))


def main() -> None:
    p = harness.parser(__doc__, "runs/benchmarks/precision.json")
    p.add_argument("--policies", default="qwen2.5-0.5b,qwen2.5-1.5b")
    p.add_argument("--rows", type=int, default=8)
    p.add_argument("--prompt", type=int, default=320)
    p.add_argument("--new", type=int, default=192)
    a = p.parse_args()
    import numpy as np

    rows = []
    for name in a.policies.split(","):
        with tempfile.TemporaryDirectory() as tmp:
            theirs = reference(name, Path(tmp), a.rows, a.prompt, a.new)
            values = {
                "transformers float32": theirs["float32"],
                "transformers bfloat16": theirs["bfloat16"],
                "ours bfloat16": ours(Path(tmp), theirs["ids"], a.prompt, "float32"),
                "ours bfloat16, weights too": ours(Path(tmp), theirs["ids"], a.prompt, "bfloat16"),
            }
        truth = values["transformers float32"]
        pairs = [(k, "transformers float32") for k in values if values[k] is not truth]
        pairs.append(("ours bfloat16", "transformers bfloat16"))
        for left, right in pairs:
            difference = values[left].astype(np.float64) - values[right].astype(np.float64)
            size = np.abs(difference)
            rows.append(
                {
                    "policy": name,
                    "pair": f"{left} - {right}",
                    "mean_abs": float(size.mean()),
                    "p99_abs": float(np.quantile(size, 0.99)),
                    "max_abs": float(size.max()),
                    "mean": float(difference.mean()),
                    "tokens": int(size.size),
                    "entropy": theirs["entropy"],
                }
            )
        print(harness.table(rows[-len(pairs) :], COLUMNS), flush=True)
    harness.write(a.out, rows, harness.machine())


if __name__ == "__main__":
    main()
