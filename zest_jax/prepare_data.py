"""Prepares the seven benchmarks, or a file of one's own, for evaluation and training.

    python -m zest_jax.prepare_data --source=FlashRAG_datasets --data_dir=data
    python -m zest_jax.prepare_data --source=gs://bucket/flashrag --data_dir=data --sets=nq,2wiki
    python -m zest_jax.prepare_data --source=FlashRAG_datasets --data_dir=data \\
        --sets=nq,hotpotqa --splits=train                          # what Search-R1 trains on
    python -m zest_jax.prepare_data --file=mine.jsonl --name=mine --data_dir=data

--source is a folder, or an address in a bucket, with the files of FlashRAG's data sets:
SET/test.jsonl, SET/dev.jsonl, SET/train.jsonl, each perhaps with .gz. Without --sets it is all
seven; --splits=auto takes of each what Search-R1 evaluates on: test if it exists, else dev, else
train. Row counts must be the published ones.

A set that was prepared of the same, unchanged file is left alone; after a kill the same command
goes on. A line of --file is {"id", "question", "golden_answers"}; the file becomes the split test,
or the one that --splits names.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from absl import flags

from zest_jax import cli
from zest_jax.columns import in_columns
from zest_jax.datasets import benchmarks
from zest_jax.datasets.files import bucket_errors, find_file, to_path
from zest_jax.datasets.prepared import (
    Prepared,
    Source,
    check_name,
    file_card,
    look_up_current,
    prepare,
)
from zest_jax.errors import UserError
from zest_jax.progress import Progress
from zest_jax.retrieval.storage import held

_MEGABYTE = 1_000_000


def main(config: Any, workdir: str | None, values: flags.FlagValues) -> None:
    if config is not None or workdir:
        raise UserError("data have no config and no workdir; say where they go with --data_dir.")
    if not values.data_dir:
        raise UserError("no folder is given; say where prepared sets go: --data_dir=data.")
    if bool(values.source) == bool(values.file):
        raise UserError("say what to prepare: either --source=FOLDER or --file=mine.jsonl.")
    if "://" in values.data_dir:
        raise UserError("--data_dir is read at random and must be a local folder, not a bucket.")
    data_dir = Path(values.data_dir).expanduser()
    if data_dir.exists() and not data_dir.is_dir():
        raise UserError(f"{data_dir} is a file; name a folder for --data_dir.")
    sources = plan_file(values) if values.file else plan_sets(values)
    made = []
    with held(data_dir), Progress() as progress:
        for source in sources:
            what = f"{source.name}/{source.split}"
            prepared = look_up_current(source, data_dir, values.allow_row_mismatch)
            if prepared is not None:
                progress.say(f"{what}: prepared before, and its file is unchanged")
            else:
                prepared = prepare_shown(source, data_dir, values.allow_row_mismatch, progress)
            if prepared.blank_answers:
                progress.say(f"{what}: {prepared.blank_answers:,} blank answers were left out")
            made.append((source, prepared))
    print(table(made))


def prepare_shown(
    source: Source, data_dir: Path, allow_row_mismatch: bool, progress: Progress
) -> Prepared:
    """`prepare`, with its progress."""
    total = -(-file_card(source.path)["bytes"] // _MEGABYTE)
    with progress.phase(f"preparing {source.name}/{source.split} (MB)", total) as bar:
        told = 0

        def tell(read: int) -> None:
            nonlocal told
            if (now := read // _MEGABYTE) > told:
                bar.advance(now - told)
                told = now

        prepared = prepare(source, data_dir, allow_row_mismatch, tell)
        bar.advance(total - told)
    return prepared


def plan_file(values: flags.FlagValues) -> list[Source]:
    """The one split that is made of --file.

    Raises:
      UserError: flags that do not go together, or a name that cannot be.
    """
    if values.sets:
        raise UserError("--sets goes with --source; a file is named by --name.")
    if not values.name:
        raise UserError("the file needs a name for its set: --name=mine.")
    split = "test" if values.splits == "auto" else benchmarks.check_split(values.splits)
    return [Source(check_name(values.name), split, to_path(values.file))]


def plan_sets(values: flags.FlagValues) -> list[Source]:
    """What is made of which files of --source.

    Raises:
      UserError: a set or split that is unknown or not there.
    """
    if values.name:
        raise UserError("--name goes with --file; sets of --source have their names.")
    root = to_path(values.source)
    with bucket_errors(root):
        if not root.exists():
            raise UserError(f"{root}: no such folder; say where FlashRAG's data sets are.")
    names = [name for name in values.sets.split(",") if name.strip()] or list(benchmarks.BENCHMARKS)
    chosen = {}
    for name in names:
        benchmark = benchmarks.find(name)
        if benchmark is None:
            raise UserError(
                f"there is no set {name.strip()!r}; known are {', '.join(benchmarks.BENCHMARKS)}, "
                "and a file of your own goes with --file and --name."
            )
        chosen[benchmark.name] = benchmark
    return [
        source
        for benchmark in chosen.values()
        for source in plan_set(root, benchmark, values.splits, values.allow_row_mismatch)
    ]


def plan_set(
    root: Any, benchmark: benchmarks.Benchmark, splits: str, any_split: bool
) -> list[Source]:
    """The files of one set.

    Args:
      root: folder of FlashRAG's data sets.
      benchmark: the set.
      splits: auto, all, or names with commas between.
      any_split: whether auto may be another split than the published one.

    Raises:
      UserError: the set or a split is not there.
    """
    folder = root / benchmark.name
    there = {
        split: path for split in benchmarks.SPLITS if (path := find_file(folder, split)) is not None
    }
    if not there:
        raise UserError(
            f"{folder} has no {benchmark.evaluated}.jsonl, nor another split of {benchmark.title}; "
            "fetch it, or name the sets that there are with --sets."
        )
    if splits == "all":
        wanted = list(there)
    elif splits == "auto":
        wanted = [benchmarks.rule(there)]
        if wanted[0] != benchmark.evaluated and not any_split:
            missing = benchmark.evaluated not in there
            raise UserError(
                f"{folder} has {wanted[0]}.jsonl"
                f"{f' but no {benchmark.evaluated}.jsonl' if missing else ''}, and the published "
                f"split of {benchmark.title} is {benchmark.evaluated}; "
                f"{'fetch it' if missing else f'say --splits={benchmark.evaluated}'}, or take "
                f"{wanted[0]} with --splits={wanted[0]}."
            )
    else:
        wanted = [benchmarks.check_split(split.strip()) for split in splits.split(",")]
    for split in wanted:
        if split not in there:
            raise UserError(
                f"{benchmark.name} has no split {split} in {folder}, only {', '.join(there)}; "
                "name one of them, or fetch the file."
            )
    return [Source(benchmark.name, split, there[split]) for split in dict.fromkeys(wanted)]


def table(made: list[tuple[Source, Prepared]]) -> str:
    """Lines of set, split, rows, published rows and verdict, with the totals that are published."""
    rows = [("set", "split", "rows", "published", "verdict")]
    for source, prepared in made:
        rows.append(_row(source.name, source.split, prepared.rows, source.published))
    for title, wanted in (
        ("evaluation", {(b.name, b.evaluated) for b in benchmarks.BENCHMARKS.values()}),
        ("training", {(name, "train") for name in benchmarks.TRAINED_ON}),
    ):
        counted = [(s, p) for s, p in made if (s.name, s.split) in wanted]
        if len(counted) == len(wanted):
            total = sum(p.rows for _, p in counted)
            rows.append(_row("total", title, total, sum(s.published for s, _ in counted)))
    return in_columns(rows, "llrrl")


def _row(name: str, split: str, rows: int, published: int) -> tuple[str, str, str, str, str]:
    if not published:
        return name, split, f"{rows:,}", "-", "nothing published"
    more = rows - published
    verdict = f"{abs(more):,} {'more' if more > 0 else 'fewer'}" if more else "as published"
    return name, split, f"{rows:,}", f"{published:,}", verdict


def define(values: flags.FlagValues) -> None:
    def text(name: str, default: str, help: str) -> None:
        flags.DEFINE_string(name, default, help, values)

    text("source", "", "folder or bucket (gs://…) with the files of FlashRAG's data sets")
    text("data_dir", "", "the folder that gets prepared sets")
    text("sets", "", "names with commas between; all seven without it")
    text("splits", "auto", "auto, all, or names with commas between: test, dev, train")
    text("file", "", "a jsonl of your own, perhaps gzipped, in place of --source")
    text("name", "", "of the set that --file becomes")
    flags.DEFINE_bool(
        "allow_row_mismatch", False, "take files of other than the published number of rows", values
    )


entry = cli.program(main, define=define, needs_config=False, needs_workdir=False)

if __name__ == "__main__":
    sys.exit(entry())
