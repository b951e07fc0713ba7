"""Writes questions with a proposer, and tells how many came through each stage and how good they
are.

    python -m zest_jax.generate --config=configs/zest_search.py:atlas --seeds=500 --out=tasks.jsonl
    python -m zest_jax.generate --workdir=runs/zest --seeds=500 --out=tasks.jsonl

With --workdir the run's own proposer of its newest checkpoint writes, with --config the one that a
run begins with. The accepted questions go to the file --out (as `zest_jax.evaluate --tasks=…` and
`source.kind=labelled` read them), counts, times and quality beside it as OUT.report.json.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from zest_jax import assembly, cli, export
from zest_jax import workdir as workdir_lib
from zest_jax.errors import UserError
from zest_jax.models.policy import Params
from zest_jax.proposing import Proposing
from zest_jax.tasks import proposals
from zest_jax.tasks.funnel import Funnel
from zest_jax.tasks.question_quality import Oracle, quality
from zest_jax.tasks.seeds import Proposal
from zest_jax.tasks.types import task_to_line
from zest_jax.tracing import TraceCounter


def main(config: Any, workdir: str, values: flags.FlagValues) -> None:
    if (config is None) == (not workdir):
        raise UserError("give either --config=…, or --workdir=… of a run.")
    if values.seeds < 1 or values.batch < 1 or values.seed < 0:
        raise UserError("--seeds and --batch must be at least 1, --seed at least 0.")
    out = Path(values.out)
    if not values.out or out.is_dir():
        raise UserError("no file is given; say where the questions go: --out=tasks.jsonl.")
    if config is None:
        config = export.read_config(workdir)
        parts, params, _ = export.load_role(workdir, "proposer")
    else:
        parts = assembly.build(config, TraceCounter())
        if parts.proposer_sampler is None:
            raise UserError(f"{config.method} trains on labelled questions; it has no proposer.")
        params = parts.proposer.whole(parts.proposer.params)
    begun = time.perf_counter()
    proposing = Proposing(config, parts, assembly.pack_specs(config))
    proposed, funnel = write(proposing, params, values.seeds, values.batch, values.seed)
    seconds = time.perf_counter() - begun
    tasks, duplicates = proposals.tasks_of(proposed, 0, len(proposed), probe="")
    atlas = parts.world.atlas
    judged = quality(proposed, None if atlas is None else Oracle(atlas))
    workdir_lib.write_atomically(out, "".join(task_to_line(task) + "\n" for task in tasks))
    report = {
        "method": config.method,
        "seeds": values.seeds,
        "tasks": len(tasks),
        "duplicates": duplicates,
        "seconds": seconds,
        "funnel": funnel.to_json(),
        "quality": judged.to_json(),
    }
    beside = out.with_name(out.name + ".report.json")
    workdir_lib.write_atomically(beside, json.dumps(report, indent=2) + "\n")
    print(f"{config.method}: {len(tasks)} questions of {values.seeds} seeds in {seconds:.1f} s\n")
    print(f"{funnel.table()}\n\n{funnel.times()}\n\n{judged.table()}\n\n{out}, {beside}")


def write(
    proposing: Proposing, params: Params, seeds: int, batch: int, seed: int
) -> tuple[list[Proposal], Funnel]:
    """Proposals for so many seeds (references, chains, documents …), some at a time."""
    proposed: list[Proposal] = []
    funnel = Funnel()
    rng = np.random.default_rng([seed, 11])
    key = jax.random.key(seed)
    for at in range(0, seeds, batch):
        count = min(batch, seeds - at)
        drawn = proposing.draw(params, count, rng, jax.random.fold_in(key, 2 * at), some=False)
        if drawn:
            step = jax.random.fold_in(key, 2 * at + 1)
            proposed += proposing.propose(params, drawn, step, rng)[1]
        funnel += proposing.funnel
        proposing.funnel = Funnel()
    return proposed, funnel


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("out", "", "the file to write", flag_values=values)
    flags.DEFINE_integer("seeds", 500, "references, chains, … to begin with", flag_values=values)
    flags.DEFINE_integer("batch", 64, "of those at a time", flag_values=values)
    flags.DEFINE_integer("seed", 0, "of everything drawn", flag_values=values)


entry = cli.program(main, define=define, needs_config=False, needs_workdir=False)

if __name__ == "__main__":
    sys.exit(entry())
