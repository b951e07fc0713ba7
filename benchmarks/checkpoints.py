"""What checkpoints cost a run: the trainer's own update and its whole state, saved in between.

    python -m benchmarks.checkpoints                                   at the shape of Qwen2.5-0.5B
    python -m benchmarks.checkpoints --shape=tiny --rows=2 --length=128 --steps=4    on a CPU

The state is a run's: solver (float32 parameters and both moments) and anchor; with `--proposer` a
proposer of its own as well. The step measured is the update alone: a run's step has its rollouts
too, so that the share stated here is an upper bound. The limits that are stated are what the bytes
would take over the link to the device and to the folder at rates measured here.
"""

import functools
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.shapes import POLICIES
from benchmarks.train_step import batch

COLUMNS = (
    *("shape", "state_gib", "step_s", "checksum_s", "blocking_s", "blocking_max_s", "written_s"),
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

    def step() -> float:
        begun = time.perf_counter()
        state["solver"], metrics = update(state["solver"], packed, advantage_B)
        jax.block_until_ready((state["solver"], metrics))
        return time.perf_counter() - begun

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
    p.add_argument("--folder", default="", help="where to write; the system's temporary folder")
    a = p.parse_args()
    if a.case:
        return harness.run_here(a.case, measure, "train")
    names = ("shape", "every", "saves", "rows", "length", "remat", "proposer", "folder", "steps")
    case = {name: getattr(a, name) for name in names}
    case |= {"engine": "zest_jax", "segments": 1, "targets": 1.0}
    row = harness.run_case("benchmarks.checkpoints", case)
    print(harness.table([row], COLUMNS))
    if "overhead" in row:
        print(f"\n{100 * row['overhead']:.2f} % of the time of {a.every} updates")
    harness.write(a.out, [row], {"overhead": "(blocking + slower steps) / (every * step)"})


if __name__ == "__main__":
    main()
