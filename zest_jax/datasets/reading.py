"""Reads questions by the name of a prepared set, or out of a file."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from zest_jax.datasets import benchmarks
from zest_jax.datasets.files import ENDINGS, TaskFile, to_path
from zest_jax.datasets.prepared import Prepared, all_prepared, look_up, read_prepared
from zest_jax.errors import UserError
from zest_jax.tasks.types import Task


def read(
    name_or_path: str, data_dir: str | Path | None, split: str = "", limit: int = 0
) -> Iterator[Task]:
    """Streams the questions of a set; their `meta["benchmark"]` says which set it is.

    Ids are those of the file, and sets repeat each other's: `test_0` is in several.

    Args:
      name_or_path: a prepared set (nq, 2wiki, one of your own), or a JSON-lines file.
      data_dir: where sets were prepared; None or "" if only files are read.
      split: test, dev or train. "" is the split that Search-R1 evaluates on for one of the seven
        sets, else test if it is there, else dev, else train.
      limit: only so many questions, the first; 0 for all.

    Raises:
      UserError: no such set, split or file (at once), or a wrong line (when it is read).
    """
    if limit < 0:
        raise UserError(f"the number of questions must be 0 (all) or more, not {limit}.")
    if _is_path(name_or_path):
        if split:
            raise UserError(f"{name_or_path} is a file and has no splits; leave the split out.")
        path = to_path(name_or_path)
        if isinstance(path, Path) and not path.is_file():
            raise UserError(f"{path}: no such file; expected a JSON-lines file of questions.")
        tasks = iter(TaskFile(path, path.name.partition(".")[0]))
        return islice(tasks, limit) if limit else tasks
    return read_prepared(find(name_or_path, data_dir, split), limit)


def find(name: str, data_dir: str | Path | None, split: str = "") -> Prepared:
    """The prepared split that `read` reads.

    Raises:
      UserError: there is no such set or split; the sentence names those that there are.
    """
    if not data_dir:
        raise UserError(
            f"{name} is a prepared set; say where it is with --data_dir, or name a .jsonl file."
        )
    folder = Path(data_dir).expanduser()
    if split:
        benchmarks.check_split(split)
    there = all_prepared(folder)
    benchmark = benchmarks.find(name)
    key = benchmark.name if benchmark else name
    splits = [prepared.split for prepared in there if prepared.name == key]
    if not splits:
        names = ", ".join(dict.fromkeys(prepared.name for prepared in there))
        what = "is not prepared" if benchmark else "is no set"
        raise UserError(
            f"{name} {what} in {folder}, which has "
            f"{names or 'none'}; prepare it with python -m zest_jax.prepare_data."
        )
    # A set of which only train is prepared must not be evaluated on it unasked.
    wanted = split or (benchmark.evaluated if benchmark else benchmarks.rule(splits))
    prepared = look_up(folder, key, wanted)
    if prepared is None:
        raise UserError(
            f"{key} has no split {wanted} in {folder}, only {', '.join(splits)}; name one of them, "
            f"or prepare it: python -m zest_jax.prepare_data --sets={key} --splits={wanted}."
        )
    return prepared


def _is_path(text: str) -> bool:
    return "/" in text or text.endswith((*ENDINGS, ".json", ".gz"))
