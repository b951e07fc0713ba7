"""Answers a file of questions with a solver and prints its scores.

    python -m zest_jax.evaluate --workdir=runs/smoke                       # the run's newest solver
    python -m zest_jax.evaluate --config=configs/smoke.py \\
        --config.policy.folder=my-solver --tasks=questions.jsonl --out=answers.jsonl

With --step=N it is the run's solver after N updates, as long as the run keeps that checkpoint.
With --index=FOLDER or --index=http://… that index or server answers the searches, in place of the
run's own passages. Without --tasks the world's held-out questions are asked. A line of a task file
is {"id", "question", "golden_answers"}, and "hops" where known.
"""

import json
import sys
from pathlib import Path
from typing import Any

from absl import flags

from zest_jax import assembly, cli, evaluation, export
from zest_jax import workdir as workdir_lib
from zest_jax.errors import UserError
from zest_jax.retrieval.open_index import open_retriever
from zest_jax.rollout.host_driver import HostSampler
from zest_jax.rollout.sampler import Sampler
from zest_jax.tasks.types import read_tasks
from zest_jax.tracing import TraceCounter


def main(config: Any, workdir: str | None, values: flags.FlagValues) -> None:
    if (config is None) == (workdir is None):
        raise UserError("say whose solver is asked: either --workdir=RUN or --config=FILE.")
    if config is not None and values.step is not None:
        raise UserError("--step names a checkpoint of a run; say which run: --workdir=RUN.")
    if values.top_k is not None and (values.top_k < 1 or not values.index):
        raise UserError("--top_k is 1 or more, and goes with --index.")
    if values.out and Path(values.out).is_dir():
        raise UserError(f"{values.out} is a folder; name a file to write to.")
    if workdir is not None:
        parts, params, step = export.load_role(workdir, "solver", values.step)
        who = f"{workdir}, step {step}"
    else:
        parts = assembly.build(config, TraceCounter())
        params, who = parts.solver.whole(parts.solver.params), parts.solver.origin
    tasks = list(read_tasks(values.tasks)) if values.tasks else list(parts.world.heldout_tasks)
    if not tasks:
        raise UserError(f"{parts.world.name} has no held-out questions; give --tasks=FILE.")
    sampler = (
        with_index(parts, values.index, values.top_k) if values.index else parts.solver_sampler
    )
    limit = sampler.spec.prompt_length
    for task in tasks:
        prompt = sampler.protocol.prompt.format(question=task.question)
        length = len(parts.solver.encode([prompt])[0])
        if length > limit:
            raise UserError(
                f"question {task.id} has {length} tokens with its prompt, more than "
                f"solver.prompt_length={limit}; raise that field or leave the question out."
            )
    key = assembly.random_key(values.seed, "evaluate", 0)
    answered = evaluation.answer_tasks(sampler, params, tasks, key, values.temperature)
    if values.out:
        workdir_lib.write_jsonl(Path(values.out), [a.to_json() for a in answered])
    summary = evaluation.summarise(answered)
    told = {"solver": who, "temperature": values.temperature}
    told |= {"index": values.index} if values.index else {}
    print(json.dumps(told | summary, indent=2))


def with_index(parts: assembly.Parts, index: str, top_k: int | None) -> Sampler:
    """The solver's sampler with its searches answered by an index or a server.

    Raises:
      UserError: no such index, or observations too short for so many passages.
    """
    own = parts.solver_sampler
    return HostSampler(
        "solver_rollout",
        parts.solver.policy,
        own.spec,
        own.protocol,
        parts.solver.tokenizer,
        open_retriever(index),
        own.capacity,
        TraceCounter(),
        parts.solver.end_ids,
        top_k=parts.retrieval.top_k if top_k is None else top_k,
    )


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("tasks", "", "a jsonl of questions; the held-out ones without it", values)
    flags.DEFINE_string("out", "", "a jsonl that gets every answer with its episode", values)
    flags.DEFINE_string("index", "", "folder of an index, or http://… of a server", values)
    flags.DEFINE_integer("top_k", None, "of --index; the run's if not given", flag_values=values)
    flags.DEFINE_integer("step", None, "of the run; its newest if not given", flag_values=values)
    flags.DEFINE_float("temperature", 0.0, "of sampling; 0 is greedy", flag_values=values)
    flags.DEFINE_integer("seed", 0, "of sampling", flag_values=values)


entry = cli.program(main, define=define, needs_config=False, needs_workdir=False)

if __name__ == "__main__":
    sys.exit(entry())
