"""How far bfloat16 log-probabilities lie from transformers', at the shapes of real models.

    python -m benchmarks.precision                      on a GPU with torch and transformers

A model of the real shape learns a small random language (so that its tokens are as certain as a
trained model's are), is written as a Hugging Face folder and samples text in transformers. The
sampled tokens' log-probabilities are then computed by transformers in float32 (the truth) and in
bfloat16, and by us in bfloat16. Then our own compiled rollout samples, and what it wrote down is
compared with what the trainer's pass gives for the same tokens.

Shape letters: B sequences, L length.
"""

import gc
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.shapes import POLICIES

COLUMNS = (
    *("policy", "pair", "mean_abs", "mean_exp", "p99_abs", "max_abs", "mean", "tokens", "entropy"),
)


def trained(name: str, folder: Path, steps: int) -> float:
    """Writes the folder of a model that has learnt a language of 2,000 words, each followed by one
    of four; returns the last loss in nats (ln 4 = 1.386 where all is learnt)."""
    import functools

    import jax
    import numpy as np

    from zest_jax.learning.packing import Item, PackSpec, pack
    from zest_jax.learning.updates import UpdateSpec, cloning_update
    from zest_jax.models import init_params, save_pretrained
    from zest_jax.models.backends import choose_attention

    config, _ = choose_attention(POLICIES[name])
    spec = UpdateSpec(3e-4, warmup_steps=20, remat="dots")
    state = jax.jit(lambda key: spec.init(init_params(config, key)))(jax.random.key(0))
    step = jax.jit(functools.partial(cloning_update, config, spec), donate_argnums=0)
    rng = np.random.default_rng(0)
    W = min(2000, config.vocab_size)
    follow_W4 = rng.integers(0, W, (W, 4))
    names_W = rng.permutation(config.vocab_size)[:W]
    for _ in range(steps):
        words = [rng.integers(0, W, 16)]
        for _ in range(511):
            words.append(follow_W4[words[-1], rng.integers(0, 4, 16)])
        ids = names_W[np.stack(words, 1)]
        items = [Item(row, np.arange(1, 512), np.zeros(511)) for row in ids]
        state, metrics = step(state, pack(items, PackSpec(16, 512, 511, 1, segments=1)))
    # bfloat16: values that both types can say, so that all of them read the same weights.
    save_pretrained(config, jax.device_get(state.params), folder, dtype="bfloat16")
    np.save(folder / "ids.npy", ids)
    return float(metrics["loss"])


def reference(folder: Path, rows: int, prompt: int, new: int) -> dict[str, Any]:
    """Samples; log-probabilities by transformers in both types."""
    import numpy as np
    import torch
    import transformers

    torch.manual_seed(0)
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
    ids_BL = torch.tensor(np.load(folder / "ids.npy")[:rows, :prompt], device="cuda")
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


def ours(folder: Path, ids: Any, prompt: int) -> Any:
    """Log-probabilities of what follows the prompt, by the trainer's own scoring."""
    import functools

    import jax
    import numpy as np

    from zest_jax.learning.likelihood import as_rows, target_log_probs
    from zest_jax.learning.packing import Item, PackSpec, pack
    from zest_jax.models import bind, load_pretrained
    from zest_jax.models.backends import choose_attention

    config, params = load_pretrained(folder, dtype="bfloat16", param_dtype="bfloat16")
    config, _ = choose_attention(config)
    targets = np.arange(prompt, ids.shape[1])
    items = [Item(row, targets, np.zeros(len(targets))) for row in ids]
    packed = pack(items, PackSpec(len(ids), ids.shape[1], len(targets), 1, segments=1))

    @functools.partial(jax.jit, static_argnums=0)
    def run(config: Any, params: Any, packed: Any) -> Any:
        micro = jax.tree.map(lambda x: x[0], as_rows(packed))
        return target_log_probs(bind(config, params), micro)[0]

    return np.asarray(run(config, params, packed))


def sampled(folder: Path, rows: int, prompt: int, new: int) -> tuple[Any, Any]:
    """Tokens that the compiled rollout writes, and the log-probabilities that it wrote down."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks.rollout import words
    from zest_jax.models import load_pretrained
    from zest_jax.models.backends import choose_attention
    from zest_jax.rollout.engine import Engine, compiler_options
    from zest_jax.rollout.protocols import PLAIN_SEARCH
    from zest_jax.rollout.sampling import Draws
    from zest_jax.rollout.state import RolloutSpec
    from zest_jax.rollout.stops import build_stop_table

    config, params = load_pretrained(folder, dtype="bfloat16", param_dtype="bfloat16")
    config, _ = choose_attention(config)
    tokens = words(config.vocab_size, 0.0, 0.0)
    table = build_stop_table(tokens, PLAIN_SEARCH.opening, PLAIN_SEARCH.closing)
    engine = Engine(config, RolloutSpec(rows, prompt, new), PLAIN_SEARCH, ())
    ids_NP = np.resize(np.load(folder / "ids.npy")[:, :prompt], (rows, prompt)).astype(np.int32)
    length_N = np.full(rows, prompt, np.int32)
    draws = Draws(jax.random.key(0), jnp.float32(1.0))
    out, _ = jax.jit(engine.rollout, compiler_options=compiler_options())(
        params, jax.tree.map(jnp.asarray, table), None, ids_NP, length_N, draws
    )
    out = out.to_host()
    return out.ids_NL, out.logp_NL[:, prompt:]


def main() -> None:
    p = harness.parser(__doc__, "runs/benchmarks/precision.json")
    p.add_argument("--policies", default="qwen2.5-0.5b,qwen2.5-1.5b")
    p.add_argument("--train", type=int, default=120, help="steps of training beforehand")
    p.add_argument("--rows", type=int, default=8)
    p.add_argument("--slots", type=int, default=32, help="rollouts of our sampler")
    p.add_argument("--prompt", type=int, default=320)
    p.add_argument("--new", type=int, default=192)
    a = p.parse_args()
    import numpy as np

    rows = []
    for name in a.policies.split(","):
        with tempfile.TemporaryDirectory() as tmp:
            loss = trained(name, Path(tmp), a.train)
            print(f"{name}: loss {loss:.3f} after {a.train} steps", flush=True)
            theirs = reference(Path(tmp), a.rows, a.prompt, a.new)
            values = {
                "transformers float32": theirs["float32"],
                "transformers bfloat16": theirs["bfloat16"],
                "ours bfloat16": ours(Path(tmp), theirs["ids"], a.prompt),
            }
            ids, values["our sampler"] = sampled(Path(tmp), a.slots, a.prompt, a.new)
            values["our trainer"] = ours(Path(tmp), ids, a.prompt)
        pairs = [
            ("transformers bfloat16", "transformers float32"),
            ("ours bfloat16", "transformers float32"),
            ("ours bfloat16", "transformers bfloat16"),
            ("our sampler", "our trainer"),
        ]
        for left, right in pairs:
            difference = values[left].astype(np.float64) - values[right].astype(np.float64)
            size = np.abs(difference)
            rows.append(
                {
                    "policy": name,
                    "pair": f"{left} - {right}",
                    "mean_abs": float(size.mean()),
                    "mean_exp": float(np.exp(size).mean()),
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
