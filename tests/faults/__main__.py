"""Injects faults into real runs, and sees that they end as if nothing had happened.

    python -m tests.faults                                     a campaign of 210 faults
    python -m tests.faults --faults=20 --kinds=kill,sigterm    a part of it

Each run ends with the numbers of a run without faults, or stops with the right message and then
goes on to them; no finished step is lost beyond what a checkpoint allows, and none is done twice.
Prints a table, writes faults.json into the folder, and exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.metadata
import json
import os
import signal
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def _environment() -> None:
    """As of the suite (`conftest.py`); before JAX is imported anywhere."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As of a shell's background jobs: the runs would inherit that, and not hear Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["HF_HUB_OFFLINE"] = "1"
    fusion = importlib.metadata.version("jaxlib").startswith("0.10.")
    os.environ["XLA_FLAGS"] = " ".join(
        (
            os.environ.get("XLA_FLAGS", ""),
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
            *(["--xla_cpu_use_fusion_emitters=false"] if fusion else []),
        )
    ).strip()
    sys.path.insert(0, str(TESTS))


def main() -> int:
    """Runs the campaign; the exit code."""
    from . import services, several, single
    from .campaign import HELDOUT, SHARES, Campaign, plan, table
    from .processes import may_mount

    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=210, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--kinds", default=",".join(SHARES), help="some of: " + ", ".join(SHARES))
    parser.add_argument("--jobs", type=int, default=3, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=60, help="no fault is begun later")
    parser.add_argument("--folder", type=Path, default=Path("runs/faults"), help="where to write")
    parser.add_argument("--keep", action="store_true", help="keep the workdirs of right runs, too")
    flags = parser.parse_args()
    kinds = flags.kinds.split(",")
    unknown = [kind for kind in kinds if kind not in SHARES]
    if unknown:
        parser.error(f"no kind {unknown[0]}; there are {', '.join(SHARES)}")

    _environment()
    import tiny_run

    folder = flags.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    place = tiny_run.Place(folder)
    place.make_world()
    for name in ("heldout", "validation"):
        path = place.world / f"{name}.jsonl"
        rows = path.read_text("utf-8").splitlines(keepends=True)
        path.write_text("".join(rows[:HELDOUT]), "utf-8")
    campaign = Campaign(plan(flags.faults, kinds), flags.seed, folder, place, flags.keep)
    campaign.mount = may_mount(folder / "mount")
    begun = time.monotonic()
    campaign.deadline = begun + 60 * flags.minutes
    groups = (
        ("single", single.KINDS, single.tell, single.make_unhurt),
        ("retriever", services.RETRIEVER, services.tell_retriever, services.make_retriever),
        ("teacher", services.TEACHER, services.tell_teacher, services.make_teacher),
        ("tasks", services.TASKS, services.tell_tasks, services.make_retriever),
        ("several", several.KINDS, several.tell, several.make_unhurt),
    )
    wanted = [group for group in groups if campaign.wants(group[1])]
    makes = list(dict.fromkeys(group[3] for group in wanted))

    def make_one(make) -> None:
        print(f"{make.__module__}.{make.__name__}: {make(campaign):.0f} s", flush=True)

    with concurrent.futures.ThreadPoolExecutor(flags.jobs) as pool:
        list(pool.map(make_one, makes))

    def work(number: int) -> None:
        # Each begins with another group, and then helps with the others.
        at = (number * len(wanted)) // flags.jobs
        for name, of, tell, _ in wanted[at:] + wanted[:at]:
            campaign.work(name, of, tell)

    with concurrent.futures.ThreadPoolExecutor(flags.jobs) as pool:
        list(pool.map(work, range(flags.jobs)))

    seconds = time.monotonic() - begun
    shown, rows = table(campaign.faults)
    print("\n".join(shown))
    left = sum(campaign.todo.values())
    wrong = [fault for fault in campaign.faults if fault.wrong]
    print(
        f"\n{len(campaign.faults)} faults in {seconds / 60:.1f} minutes on {os.cpu_count()} cores, "
        f"seed {flags.seed}; {len(wrong)} wrong, {left} not injected."
    )
    told = {
        "seed": flags.seed,
        "seconds": round(seconds),
        "cores": os.cpu_count(),
        "not_injected": {kind: count for kind, count in campaign.todo.items() if count},
        "broken": campaign.broken,
        "table": rows,
        "faults": [vars(fault) | {"wrong": fault.wrong} for fault in campaign.faults],
    }
    (folder / "faults.json").write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    return 1 if wrong or campaign.broken or not campaign.faults else 0


if __name__ == "__main__":
    sys.exit(main())
