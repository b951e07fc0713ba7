"""What all benchmarks share: timing, the machine's description, tables, JSON, cases in processes.

Every case runs in a process of its own, so that neither memory nor compiled programs of one are
there when the next is measured.
"""

import argparse
import gzip
import json
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# bfloat16 matrix products on random data, TFLOP/s: what a large product was seen to reach on the
# chip, where it was measured (H200), else the vendor's figure.
PEAK_TFLOPS = {"H200": 790.0, "H100": 989.0, "A100": 312.0}


def peak_tflops(device: str) -> float | None:
    """The roof that a share is stated of; None for a chip that is not in the table."""
    return next((v for name, v in PEAK_TFLOPS.items() if name in device), None)


def machine() -> dict[str, str]:
    """The device and the versions that a figure depends on."""
    import jax

    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "devices": str(jax.device_count()),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def seconds(step: Callable[[], Any], steps: int, warm_up: int = 2) -> dict[str, float]:
    """Wall-clock seconds of a call that returns when its work is done: median, least, most."""
    for _ in range(warm_up):
        step()
    taken = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return {"median_s": statistics.median(taken), "min_s": min(taken), "max_s": max(taken)}


def run_case(module: str, case: Mapping[str, Any], timeout: float = 600) -> dict[str, Any]:
    """Runs `python -m module --case=JSON` and reads the JSON of its last line.

    A case that fails (out of memory, say) becomes {"failed": reason}: the others still run.
    """
    command = [sys.executable, "-m", module, f"--case={json.dumps(case)}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {**case, "failed": f"more than {timeout:.0f} s"}
    if done.returncode == 0:
        return {**case, **json.loads(done.stdout.strip().splitlines()[-1])}
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "RESOURCE_EXHAUSTED" in line]
    return {**case, "failed": (telling or lines or ["no message"])[-1][:300]}


def run_here(case: str, ours: Callable[[dict[str, Any]], dict[str, Any]], peer: str) -> None:
    """The other end of `run_case`: measures the case in this process and prints the JSON.

    Args:
      case: as JSON; its `engine` says whether ours or the peer is measured.
      ours: measures ours.
      peer: name of the function of `peer_transformers` that measures the peer.
    """
    fields = json.loads(case)
    if fields["engine"] == "zest_jax":
        result = ours(fields)
    else:
        from benchmarks import peer_transformers

        result = getattr(peer_transformers, peer)(fields)
    print(json.dumps(result))


def copies(folder: str) -> dict[str, dict[str, int]]:
    """What a profile (`jax.profiler.trace`) shows to have travelled between host and device.

    Args:
      folder: where it was written.

    Returns:
      By the name of the copy (MemcpyD2H, …): how many there were, and the bytes of all and of the
      largest, where the profile tells.
    """
    out: dict[str, dict[str, int]] = {}
    for path in Path(folder).rglob("*.trace.json.gz"):
        for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
            name = str(event.get("name", ""))
            if event.get("ph") != "X" or not name.startswith("Memcpy"):
                continue
            told = re.search(r"size:(\d+)", json.dumps(event.get("args", {})))
            size = int(told[1]) if told else 0
            kind = out.setdefault(name, {"count": 0, "bytes": 0, "largest": 0})
            kind["count"] += 1
            kind["bytes"] += size
            kind["largest"] = max(kind["largest"], size)
    return out


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A plain-text table; floats with three significant digits, "-" for what is not there."""

    def text(value: Any) -> str:
        if value is None:
            return "-"
        if isinstance(value, float):
            return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
        return str(value)

    cells = [list(columns)] + [[text(row.get(c)) for c in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def parser(doc: str, default_out: str) -> argparse.ArgumentParser:
    """Flags that every benchmark has: --out, --case (one case, in this process), --steps."""
    p = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--out", default=default_out, help="JSON file to write")
    p.add_argument("--case", help=argparse.SUPPRESS)
    p.add_argument("--steps", type=int, default=8, help="timed repetitions of each case")
    return p


def write(path: str, rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    """Writes the rows and what they were measured on."""
    out = Path(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"about": dict(about), "rows": [dict(r) for r in rows]}, indent=1))
    print(f"\nwritten to {out}")


def has_torch_gpu() -> bool:
    """Whether torch is there and sees a GPU (asked in another process, which keeps no memory)."""
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
