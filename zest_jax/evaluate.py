"""Answers questions with a solver and tells its scores: by benchmark, on average, by hop.

    python -m zest_jax.evaluate --workdir=runs/smoke                       # the run's newest solver
    python -m zest_jax.evaluate --workdir=runs/smoke --tasks=mine.jsonl,yours.jsonl --out=out.jsonl
    python -m zest_jax.evaluate --model=my-solver --index=indexes/wiki18 \\
        --benchmarks=nq,hotpotqa --data_dir=data --out=out.jsonl --html=out.html

Who is asked: the solver of a run (--workdir, with --step=N after N updates), the policy that a
config begins with (--config), or a Hugging Face folder (--model). What it searches: --index, a
folder of build_index or a server's address; without it a run's own passages. What it is asked:
--tasks, --benchmarks (see zest_jax.prepare_data), or the run's held-out questions.

With --out the answers are kept line by line, and the same command goes on where it was stopped.
With --samples=N and a --temperature each question is answered N times: pass@k and the majority's
answer are told too. --against=OTHER.jsonl compares, question by question. Where all questions of a
benchmark were answered, what papers have published of it stands beside, as published.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

from absl import flags

from zest_jax import answering, assembly, behaviour, cli, examinee, published, questions, scores
from zest_jax import evaluation_tables as tables
from zest_jax.answers_file import AnswersFile, key_of, without_text
from zest_jax.errors import UserError
from zest_jax.evaluation import Answered
from zest_jax.evaluation_page import render
from zest_jax.progress import Progress
from zest_jax.workdir import write_atomically

MOST_SAMPLES = 10_000


def main(config: Any, workdir: str | None, values: flags.FlagValues) -> None:
    check(config, workdir, values)
    against = behaviour.read_answers(values.against) if values.against else None
    tasks = None
    if values.tasks or values.benchmarks:
        tasks = questions.read_questions(
            _names(values.tasks), _names(values.benchmarks), values.data_dir, values.limit
        )
    with Progress() as progress:
        if values.model:
            assert tasks is not None
            who = examinee.of_folder(tasks, values)
        else:
            who = examinee.of_run(config, workdir, tasks, values)
        if tasks is None:
            tasks = list(who.questions)[: values.limit or None]
        if not tasks:
            raise UserError(f"{who.name} has no held-out questions; give --tasks or --benchmarks.")
        if against is not None:
            behaviour.check_same(against, [(t.id, t.question, t.answers) for t in tasks])
        notes = who.check(tasks)
        for note in notes:
            progress.say(note)
        settings = who.settings() | {
            "questions": len(tasks),
            "questions_digest": questions.digest(tasks),
            "samples": values.samples,
            "temperature": values.temperature,
            "seed": values.seed,
        }
        answered = ask_all(who, tasks, settings, values, progress)

    told: dict[str, Any] = {"settings": settings, "notes": list(notes)}
    told |= scores.score(answered, values.draws)
    counts = {name: row["count"] for name, row in told["benchmarks"].items()}
    told["published"] = published.comparable(counts) if values.samples == 1 else []
    told["comparison"] = None
    if against is not None:
        told["comparison"] = {"before": values.against} | behaviour.compare(
            against, answered, values.draws
        )
    text = json.dumps(told, ensure_ascii=False, indent=2, allow_nan=False)
    # Shown before anything is written: a disk may have filled up meanwhile.
    print(text if values.json == "-" else tables.whole(told, values.shown), flush=True)
    if values.html:
        write_atomically(Path(values.html), render(told))
    if values.json and values.json != "-":
        write_atomically(Path(values.json), text + "\n")


def ask_all(
    who: examinee.Examinee,
    tasks: list[questions.Task],
    settings: dict[str, Any],
    values: flags.FlagValues,
    progress: Progress,
) -> list[Answered]:
    """The answers to all questions, in their order; those that --out holds are not asked again."""
    wanted = [(task, n) for task in tasks for n in range(values.samples)]
    order = [(questions.benchmark_of(task), task.id, n) for task, n in wanted]
    file = AnswersFile(values.out, settings) if values.out else None
    done = {} if file is None else dict(file.answers)
    rest = [each for each, key in zip(wanted, order, strict=True) if key not in done]
    if done:
        progress.say(f"{values.out} has {len(done):,} of {len(wanted):,} answers; going on")
    try:
        if rest:
            devices, why = answering.choose_devices(values.devices, who.size)
            progress.say(f"answering on {why}")
            key = assembly.random_key(values.seed, "evaluate", 0)
            args = (who.sampler, who.params, rest, key, values.temperature, devices)
            with progress.phase("answering", len(wanted), len(done)) as bar:
                right = sum(a.em for a in done.values())
                for batch in answering.answer_all(*args):
                    if file is not None:
                        file.append(batch)
                    done |= {key_of(a): without_text(a) for a in batch}
                    right += sum(a.em for a in batch)
                    bar.advance(len(batch), EM=right / len(done))
    finally:
        if file is not None:
            file.close()
    return [done[key] for key in order]


def check(config: Any, workdir: str | None, values: flags.FlagValues) -> None:
    """Refuses flags that do not go together, before anything is loaded.

    Raises:
      UserError: which.
    """
    if sum((config is not None, workdir is not None, bool(values.model))) != 1:
        raise UserError(
            "say whose solver is asked: --workdir=RUN, --config=FILE or --model=FOLDER, one of "
            "them."
        )
    if workdir is None and values.step is not None:
        raise UserError("--step names a checkpoint of a run; say which run: --workdir=RUN.")
    if values.model and not (values.tasks or values.benchmarks):
        raise UserError("a folder has no held-out questions; give --tasks or --benchmarks.")
    for name in ("max_tokens", "max_searches", "chat"):
        if values[name].value is not None and not values.model:
            raise UserError(f"--{name} is for a --model; a run has its own, --config.solver.….")
    least = {
        "top_k": 1, "max_searches": 0, "max_tokens": 1, "temperature": 0, "samples": 1,
        "limit": 0, "draws": 1, "shown": 0, "slots": 1, "devices": 0,
    }  # fmt: skip
    for name, limit in least.items():
        value: float | None = values[name].value
        if value is not None and not limit <= value < math.inf:
            raise UserError(f"--{name}={value} is out of range; it is {limit} or more.")
    if values.top_k is not None and not values.index:
        raise UserError("--top_k is 1 or more, and goes with --index.")
    if values.samples > MOST_SAMPLES:
        raise UserError(f"--samples={values.samples} is too many; it is {MOST_SAMPLES} at most.")
    if values.samples > 1 and not values.temperature:
        raise UserError(
            f"{values.samples} greedy answers are all the same; give a --temperature above 0."
        )
    questions.check_files(values.out, values.json, values.html)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def define(values: flags.FlagValues) -> None:
    def text(name: str, help: str) -> None:
        flags.DEFINE_string(name, "", help, values)

    def number(name: str, default: int | None, help: str) -> None:
        flags.DEFINE_integer(name, default, help, flag_values=values)

    text("model", "a policy: a Hugging Face folder or hub id")
    number("step", None, "of the run; its newest if not given")
    text("tasks", "JSON lines of questions, several after commas")
    text("benchmarks", "prepared sets, several after commas: nq,hotpotqa")
    text("data_dir", "where the benchmarks were prepared")
    number("limit", 0, "questions of each benchmark or file, the first; 0 for all")
    text("index", "folder of an index, or http://… of a server")
    text("encoder", "the index's encoder, where it has moved")
    number("top_k", None, "of --index; the run's if not given, 3 for a --model")
    text("protocol", "how episodes are written; the run's own if not given")
    number("max_tokens", None, "of an action of a --model; the protocol's limit if not given")
    number("max_searches", None, "of an episode of a --model")
    flags.DEFINE_bool("chat", None, "a --model's prompt in its chat template", values)
    flags.DEFINE_float("temperature", 0.0, "of sampling; 0 is greedy", flag_values=values)
    number("samples", 1, "answers to each question")
    number("seed", 0, "of sampling")
    number("slots", 64, "episodes at the same time on a device, of a --model")
    number("devices", 0, "how many answer; 0 for all local ones")
    number("draws", 10_000, "of the bootstrap")
    text("out", "a jsonl that gets every answer with its episode; goes on where it was stopped")
    text("json", "a JSON file of all figures; - prints them instead of the tables")
    text("html", "a page of all figures")
    text("against", "a file of answers, or a run, to compare with, question by question")
    number("shown", 10, "changed questions told of each kind")


entry = cli.program(main, define=define, needs_config=False, needs_workdir=False)

if __name__ == "__main__":
    sys.exit(entry())
