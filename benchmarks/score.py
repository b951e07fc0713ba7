"""How fast answers are scored under contexts: the trainer's own `sequence_log_likelihood`.

    python -m benchmarks.score                          on a GPU, beside transformers
    python -m benchmarks.score --policies=tiny --contexts=16 --context=64    a trial on a CPU

Contexts of 512 tokens with answers of 8, as the likelihood contrast of Dr. Free needs them by the
thousand. We pack several into a row and run the head at the answers only; the peer is a forward
pass with the logits of every token, as libraries compute them.
"""

import functools
import time
from typing import Any

from benchmarks import harness
from benchmarks.shapes import POLICIES
from benchmarks.train_step import parameters

COLUMNS = (
    *("engine", "policy", "attention", "batch", "contexts", "context", "answer"),
    *("contexts_per_s", "ratio", "tokens_per_s", "share", "median_s", "peak_gib", "failed"),
)


def ours(case: dict[str, Any]) -> dict[str, Any]:
    """Times the scoring of all contexts in this process."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from zest_jax.learning.likelihood import sequence_log_likelihood
    from zest_jax.learning.packing import Item, PackSpec, pack
    from zest_jax.models import init_params
    from zest_jax.models.backends import choose_attention

    config, _ = choose_attention(POLICIES[case["policy"]], case["attention"])
    # A frozen judge: its weights are kept in the compute type.
    params = jax.jit(
        lambda key: jax.tree.map(lambda x: x.astype(config.dtype), init_params(config, key))
    )(jax.random.key(0))
    N, length = case["contexts"], case["context"] + case["answer"]
    rng = np.random.default_rng(0)
    targets = np.arange(case["context"], length)
    items = [
        Item(rng.integers(0, config.vocab_size, length), targets, np.zeros(len(targets)))
        for _ in range(N)
    ]
    per_row = case["per_row"]
    rows = max(1, case["batch"] // per_row)
    micro = -(-N // (rows * per_row))
    spec = PackSpec(rows, length * per_row, case["answer"] * per_row, micro, segments=per_row)
    packed = jax.device_put(pack(items, spec))
    score = jax.jit(functools.partial(sequence_log_likelihood, config, sequences=N))
    start = time.perf_counter()
    result = jax.block_until_ready(score(params, packed))
    first = time.perf_counter() - start
    assert bool(jnp.all(jnp.isfinite(result)))
    timed = harness.seconds(lambda: jax.block_until_ready(score(params, packed)), case["steps"])
    if case.get("trace"):
        with jax.profiler.trace(case["trace"]):
            jax.block_until_ready(score(params, packed))
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return timed | {
        "first_s": first,
        "attention": config.attention,
        "peak_gib": peak / 2**30 if peak else None,
        **harness.machine(),
    }


def main() -> None:
    p = harness.parser(__doc__, "runs/benchmarks/score.json")
    p.add_argument("--policies", default="qwen2.5-0.5b,qwen2.5-1.5b")
    p.add_argument("--contexts", type=int, default=256, help="contexts to score in a call")
    p.add_argument("--context", type=int, default=512, help="tokens before the answer")
    p.add_argument("--answer", type=int, default=8, help="tokens of the answer")
    p.add_argument("--batch", default="32,64", help="contexts of a forward pass")
    p.add_argument("--per_row", type=int, default=4, help="contexts packed into a row (ours)")
    p.add_argument("--attention", default="auto")
    p.add_argument("--trace", default="", help="folder for a profile of one call")
    p.add_argument("--peer", action=harness.argparse.BooleanOptionalAction, default=True)
    a = p.parse_args()
    if a.case:
        return harness.run_here(a.case, ours, "score")
    names = ("contexts", "context", "answer", "per_row", "steps", "trace")
    shape = {k: getattr(a, k) for k in names}
    engines = [("zest_jax", a.attention)]
    if a.peer and harness.has_torch_gpu():
        engines.append(("transformers", "sdpa"))
    rows: list[dict[str, Any]] = []
    for name in a.policies.split(","):
        of_policy = []
        for engine, attention in engines:
            for batch in (int(b) for b in a.batch.split(",")):
                case = {"engine": engine, "policy": name, "attention": attention, "batch": batch}
                row = harness.run_case("benchmarks.score", case | shape)
                if "median_s" in row:
                    row["contexts_per_s"] = a.contexts / row["median_s"]
                    row["tokens_per_s"] = row["contexts_per_s"] * (a.context + a.answer)
                    roof = harness.peak_tflops(row.get("device", ""))
                    if roof:  # the body's products only: that is all that has to be computed
                        body = parameters(name) - POLICIES[name].vocab_size * POLICIES[name].width
                        row["share"] = 2 * body * row["tokens_per_s"] / 1e12 / roof
                of_policy.append(row)
                print(harness.table([row], COLUMNS), flush=True)
        best = max((r.get("contexts_per_s", 0.0) for r in of_policy if r["engine"] != "zest_jax"),
                   default=0.0)  # fmt: skip
        for row in of_policy:
            if best and "contexts_per_s" in row:
                row["ratio"] = row["contexts_per_s"] / best
        rows += of_policy
    print(harness.table(rows, COLUMNS))
    harness.write(a.out, rows, {"ratio": "contexts per second over the best peer's"})


if __name__ == "__main__":
    main()
