"""What checkpoints cost a run: the trainer's own update and its whole state, saved in between.

    python -m benchmarks.checkpoints                                   at the shape of Qwen2.5-0.5B
    python -m benchmarks.checkpoints --shape=tiny --rows=2 --length=128 --steps=4    on a CPU

The state is a run's: solver (float32 parameters and both moments) and anchor; with `--proposer` a
proposer of its own as well. `update_s` is the update alone. A run's step has its rollouts too:
`--rollouts` episodes of `--new` tokens after prompts of `--prompt` are written before every update
by the trainer's engine (without a search), and the share is that of both together. The limits that
are stated are what the bytes would take over the link to the device and to the folder at rates
measured here.
"""

import functools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.shapes import POLICIES
from benchmarks.train_step import batch

COLUMNS = (
    *(
        "shape",
        "state_gib",
        "update_s",
        "step_s",
        "checksum_s",
        "blocking_s",
        "blocking_max_s",
        "written_s",
    ),
    *("step_while_writing_s", "overhead_s", "every", "overhead", "to_host_limit_s"),
    *("disk_limit_s", "failed"),
)
PROBE_BYTES = 1 << 28


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Times one shape in this process."""
    import jax
    import jax.numpy as jnp

    from zest_jax.checkpoint import Checkpoints
    from zest_jax.checksums import checksums
    from zest_jax.learning.updates import UpdateSpec, policy_update
    from zest_jax.models import init_params
    from zest_jax.models.backends import choose_attention

    config, _ = choose_attention(POLICIES[case["shape"]], "auto")
    spec = UpdateSpec(learning_rate=1e-6, remat=case["remat"])
    start = jax.jit(
        lambda key: jax.tree.map(lambda x: x.astype(jnp.float32), init_params(config, key))
    )
    params = start(jax.random.key(0))
    state = {"solver": jax.jit(spec.init)(params), "anchor": params}
    if case["proposer"]:
        state["proposer"] = jax.jit(spec.init)(params)
    del params
    packed, advantage_B = jax.device_put(batch(case, config.vocab_size))
    update = jax.jit(functools.partial(policy_update, config, spec), donate_argnums=0)

    sample = rollouts(config, case)

    def step(whole: bool = True) -> float:
        begun = time.perf_counter()
        if whole:
            sample(state["solver"].params)
        state["solver"], metrics = update(state["solver"], packed, advantage_B)
        jax.block_until_ready((state["solver"], metrics))
        return time.perf_counter() - begun

    alone = harness.seconds(lambda: step(whole=False), case["steps"])
    timed = harness.seconds(step, case["steps"])
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    sums = harness.seconds(lambda: checksums(state), 3)
    folder = Path(tempfile.mkdtemp(dir=case["folder"] or None))
    blocking, written, during = [], [], []
    try:
        with Checkpoints(folder, keep=1) as checkpoints:
            for number in range(1, case["saves"] + 2):
                step()
                begun = time.perf_counter()
                checkpoints.save(number, state, {"step": number})
                blocked = time.perf_counter() - begun
                slow = []
                while checkpoints.writing and len(slow) < case["every"]:
                    slow.append(step())
                checkpoints.wait()
                if number > 1:  # the first one compiles and allocates
                    blocking.append(blocked)
                    written.append(time.perf_counter() - begun)
                    during.append(slow)
        disk = _disk_rate(folder)
    finally:
        shutil.rmtree(folder)
    usual = timed["median_s"]
    slower = [sum(max(0.0, s - usual) for s in slow) for slow in during]
    overhead = statistics.median(blocking) + statistics.median(slower)
    flat = [s for slow in during for s in slow]
    to_host = _to_host_rate()
    return {
        "state_gib": size / 2**30,
        "update_s": alone["median_s"],
        "step_s": usual,
        "checksum_s": sums["median_s"],
        "blocking_s": statistics.median(blocking),
        "blocking_max_s": max(blocking),
        "written_s": statistics.median(written),
        "step_while_writing_s": statistics.median(flat) if flat else None,
        "overhead_s": overhead,
        "overhead": overhead / (case["every"] * usual),
        "to_host_gb_per_s": to_host / 1e9,
        "to_host_limit_s": size / to_host,
        "disk_gb_per_s": disk / 1e9,
        "disk_limit_s": size / disk,
        "cpus": os.cpu_count(),
        **harness.machine(),
    }


def rollouts(config: Any, case: dict[str, Any]) -> Callable[[Any], None]:
    """Writes the episodes of a step with some parameters; nothing for none."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks.rollout import words
    from zest_jax.rollout.engine import Engine, compiler_options
    from zest_jax.rollout.protocols import PLAIN_SEARCH
    from zest_jax.rollout.sampling import Draws
    from zest_jax.rollout.state import RolloutSpec
    from zest_jax.rollout.stops import build_stop_table

    N = case["rollouts"]
    if not N:
        return lambda params: None
    tokens = words(config.vocab_size, 0.0, 0.0)
    table = jax.tree.map(
        jnp.asarray, build_stop_table(tokens, PLAIN_SEARCH.opening, PLAIN_SEARCH.closing)
    )
    spec = RolloutSpec(
        slots=min(N, 256), prompt_length=case["prompt"], action_length=case["new"], block_tokens=128
    )
    run = jax.jit(
        functools.partial(
            Engine(config, spec, PLAIN_SEARCH, ()).rollout,
            draws=Draws(jax.random.key(1), jnp.float32(1.0)),
        ),
        compiler_options=compiler_options(),
    )
    rng = np.random.default_rng(0)
    prompt_NP = jnp.asarray(rng.integers(0, config.vocab_size, (N, case["prompt"])), jnp.int32)
    length_N = jnp.full(N, case["prompt"], jnp.int32)
    return lambda params: jax.block_until_ready(run(params, table, None, prompt_NP, length_N))


def _to_host_rate() -> float:
    """Bytes a second from the device to this machine's memory, of one large array."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rates = []
    for value in range(4):
        x = jax.block_until_ready(jnp.full(PROBE_BYTES // 4, value, jnp.float32))
        begun = time.perf_counter()
        np.array(x)
        rates.append(PROBE_BYTES / (time.perf_counter() - begun))
    return max(rates)


def _disk_rate(folder: Path) -> float:
    """Bytes a second into the folder, one file written and flushed to the disk."""
    data = os.urandom(1 << 24)
    begun = time.perf_counter()
    with open(folder / "probe", "wb") as file:
        for _ in range(PROBE_BYTES // len(data)):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return PROBE_BYTES / (time.perf_counter() - begun)


def main() -> None:
    p = harness.parser(__doc__, "runs/benchmarks/checkpoints.json")
    p.add_argument("--shape", default="qwen2.5-0.5b", help=f"one of {', '.join(POLICIES)}")
    p.add_argument("--every", type=int, default=20, help="updates between saves")
    p.add_argument("--saves", type=int, default=3, help="saves that are timed")
    p.add_argument("--rows", type=int, default=8)
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--remat", default="dots")
    p.add_argument("--proposer", action="store_true", help="a proposer with weights of its own")
    p.add_argument("--rollouts", type=int, default=0, help="episodes of a step; 0 for the update")
    p.add_argument("--prompt", type=int, default=512)
    p.add_argument("--new", type=int, default=256)
    p.add_argument("--folder", default="", help="where to write; the system's temporary folder")
    a = p.parse_args()
    if a.case:
        return harness.run_here(a.case, measure, "train")
    names = ("shape", "every", "saves", "rows", "length", "remat", "proposer", "folder", "steps")
    case = {name: getattr(a, name) for name in (*names, "rollouts", "prompt", "new")}
    case |= {"engine": "zest_jax", "segments": 1, "targets": 1.0}
    row = harness.run_case("benchmarks.checkpoints", case)
    print(harness.table([row], COLUMNS))
    if "overhead" in row:
        print(f"\n{100 * row['overhead']:.2f} % of the time of {a.every} steps")
    harness.write(a.out, [row], {"overhead": "(blocking + slower steps) / (every * step)"})


if __name__ == "__main__":
    main()
