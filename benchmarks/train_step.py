"""How fast one optimiser step is: the trainer's own `policy_update` on packed rows.

    python -m benchmarks.train_step                       everything, on a GPU
    python -m benchmarks.train_step --policies=tiny --length=128 --rows=2    a trial on a CPU

The step is clipped policy gradient with float32 master weights and moments, gradient clipping and
AdamW; with `--targets=1` every token carries loss. Throughput is stated as tokens per second and as
TFLOP/s by the usual count of 6 x parameters x tokens (no attention, no recomputation), next to the
share of the chip's measured roof.
"""

import functools
import time
from typing import Any

from benchmarks import harness
from benchmarks.shapes import POLICIES

COLUMNS = (
    *("engine", "policy", "remat", "attention", "lora", "moments", "rows", "length", "targets"),
    *("tokens_per_s", "tflops", "share", "median_s", "min_s", "peak_gib", "first_s", "failed"),
)


def batch(case: dict[str, Any], vocab_size: int) -> tuple[Any, Any]:
    """One micro-batch of full rows and an advantage for each."""
    import numpy as np

    from zest_jax.learning.packing import Item, PackSpec, pack

    R, L, parts = case["rows"], case["length"], case["segments"]
    rng = np.random.default_rng(0)
    lengths = [L // parts] * parts
    items = []
    for _ in range(R):
        for n in lengths:
            # The last tokens of a sequence are the loss's.
            targets = np.arange(max(1, round(n * (1 - case["targets"]))), n)
            ids = rng.integers(0, vocab_size, n)
            items.append(Item(ids, targets, np.full(len(targets), -12.0, np.float32)))
    most = sum(len(i.targets) for i in items[:parts])
    packed = pack(items, PackSpec(R, L, most, 1, segments=parts))
    return packed, rng.normal(size=len(items)).astype(np.float32)


def ours(case: dict[str, Any]) -> dict[str, Any]:
    """Times `policy_update` in this process."""
    import dataclasses

    import jax
    import jax.numpy as jnp

    from zest_jax.learning.updates import UpdateSpec, policy_update
    from zest_jax.models import init_params
    from zest_jax.models.backends import choose_attention
    from zest_jax.models.config import LoraSpec
    from zest_jax.models.lora import add_lora, split_lora

    config, message = choose_attention(POLICIES[case["policy"]], case["attention"])
    spec = UpdateSpec(learning_rate=1e-6, remat=case["remat"])
    frozen = None
    dtype = config.dtype if case["lora"] else "float32"  # a frozen base is kept in bfloat16
    params = jax.jit(lambda key: jax.tree.map(lambda x: x.astype(dtype), init_params(config, key)))(
        jax.random.key(0)
    )
    if case["lora"]:
        config = dataclasses.replace(config, lora=LoraSpec(case["lora"], 2.0 * case["lora"]))
        params, frozen = split_lora(add_lora(config, params, jax.random.key(1)))
    if case["moments"] != "float32":
        spec = dataclasses.replace(spec, moments=case["moments"])
    # As a whole in one program: no second copy of the weights is held.
    state = jax.jit(lambda p: spec.init(p), donate_argnums=0)(params)
    del params
    packed, advantage_B = batch(case, config.vocab_size)
    packed, advantage_B = jax.device_put((packed, jnp.asarray(advantage_B)))
    step = jax.jit(functools.partial(policy_update, config, spec), donate_argnums=0)
    arguments = (packed, advantage_B) if frozen is None else (packed, advantage_B, frozen)
    start = time.perf_counter()
    compiled = step.lower(state, *arguments).compile()
    first = time.perf_counter() - start
    analysis = compiled.memory_analysis()
    holder = [state]
    del state

    def once() -> None:
        holder[0], metrics = compiled(holder[0], *arguments)
        jax.block_until_ready((holder[0], metrics))

    timed = harness.seconds(once, case["steps"])
    if case.get("trace"):
        with jax.profiler.trace(case["trace"]):
            once()
    stats = jax.devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return timed | {
        "first_s": first,
        "attention": config.attention,
        "attention_note": message,
        "peak_gib": peak / 2**30 if peak else None,
        "temp_gib": analysis.temp_size_in_bytes / 2**30 if analysis else None,
        "argument_gib": analysis.argument_size_in_bytes / 2**30 if analysis else None,
        **harness.machine(),
    }


def parameters(name: str) -> int:
    """Number of parameters, embedding counted once."""
    import jax

    from zest_jax.models import param_shapes

    return sum(x.size for x in jax.tree.leaves(param_shapes(POLICIES[name])))


def main() -> None:
    p = harness.parser(__doc__, "runs/benchmarks/train_step.json")
    p.add_argument("--policies", default="qwen2.5-0.5b,qwen2.5-1.5b")
    p.add_argument("--lora_policies", default="", help="policies to train with LoRA")
    p.add_argument("--rows", type=int, default=8)
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--segments", type=int, default=1, help="sequences packed into a row")
    p.add_argument("--targets", type=float, default=1.0, help="share of tokens that carry loss")
    p.add_argument("--remat", default="none,dots,full")
    p.add_argument("--attention", default="auto")
    p.add_argument("--moments", default="float32")
    p.add_argument("--trace", default="", help="folder for a profile of one step")
    p.add_argument("--peer", action=harness.argparse.BooleanOptionalAction, default=True)
    a = p.parse_args()
    if a.case:
        return harness.run_here(a.case, ours, "train")
    shape = {k: getattr(a, k) for k in ("rows", "length", "segments", "targets", "steps", "trace")}
    cases = []
    plain = {"engine": "zest_jax", "lora": 0, **shape}
    with_peer = a.peer and harness.has_torch_gpu()
    for name in filter(None, a.policies.split(",")):
        for remat in a.remat.split(","):
            for attention in a.attention.split(","):
                for moments in a.moments.split(","):
                    more = {"remat": remat, "attention": attention, "moments": moments}
                    cases.append(plain | {"policy": name} | more)
        if with_peer:
            for remat in ("none", "full"):
                more = {"remat": remat, "attention": "sdpa", "moments": "float32"}
                cases.append(plain | {"policy": name, "engine": "transformers"} | more)
    for name in filter(None, a.lora_policies.split(",")):
        for remat in a.remat.split(","):
            more = {"remat": remat, "attention": "auto", "moments": "float32", "lora": 16}
            cases.append(plain | {"policy": name} | more)
    rows: list[dict[str, Any]] = []
    for case in cases:
        row = harness.run_case("benchmarks.train_step", case)
        tokens = case["rows"] * case["length"]
        if "median_s" in row:
            row["tokens_per_s"] = tokens / row["median_s"]
            flops = 6 * parameters(case["policy"]) * tokens
            row["tflops"] = flops / row["median_s"] / 1e12
        rows.append(row)
        device = next((r["device"] for r in rows if "device" in r), "")
        if (roof := harness.peak_tflops(device)) and "tflops" in row:
            row["share"] = row["tflops"] / roof
        print(harness.table([row], COLUMNS), flush=True)
    print("\n" + harness.table(rows, COLUMNS))
    harness.write(a.out, rows, {"flops": "6 * parameters * tokens", "roof": harness.PEAK_TFLOPS})


if __name__ == "__main__":
    main()
