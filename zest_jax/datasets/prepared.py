"""Prepared question sets on disk: making one of a file, finding and reading them.

    DATA_DIR/nq/test/1.0.0/     dataset_info.json, features.json, metadata.json, array_record files

A split appears there whole or not at all: it is written under `.making` and then moved.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zest_jax.datasets import benchmarks
from zest_jax.datasets.files import TaskFile, bucket_errors
from zest_jax.errors import UserError
from zest_jax.tasks.types import Task

VERSION = "1.0.0"  # of the stored form
_MAKING = ".making"
_CARD = "metadata.json"
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_ROWS_AT_A_TIME = 256


@dataclass(frozen=True)
class Source:
    """A file that becomes a split.

    Attributes:
      name: of the set.
      split: of the set.
      path: of the file; local, or in a bucket.
    """

    name: str
    split: str
    path: Any

    @property
    def published(self) -> int:
        """How many questions it should have; 0 if nothing is published of it."""
        benchmark = benchmarks.BENCHMARKS.get(self.name)
        return benchmark.rows.get(self.split, 0) if benchmark else 0


@dataclass(frozen=True)
class Prepared:
    """A split that is prepared.

    Attributes:
      name: of the set.
      split: of the set.
      folder: where it lies.
      rows: its questions.
      blank_answers: blank answers that were left out beside others.
      source: what is known of the file: path, bytes, time of its last change in ns.
    """

    name: str
    split: str
    folder: Path
    rows: int
    blank_answers: int
    source: dict[str, Any]


def check_name(name: str) -> str:
    """The name of a set of one's own, if it can be one.

    Raises:
      UserError: it cannot.
    """
    if benchmarks.find(name):
        raise UserError(
            f"{name} is the name of a published set; call your own file something else with --name."
        )
    if not _NAME.fullmatch(name):
        raise UserError(
            f"--name={name} cannot be the name of a set; use small letters, digits and "
            "underscores, and begin with a letter."
        )
    return name


def split_folder(data_dir: Path, name: str, split: str) -> Path:
    """Where a split lies."""
    benchmark = benchmarks.BENCHMARKS.get(name)
    return data_dir / (benchmark.folder if benchmark else name) / split / VERSION


def look_up(data_dir: Path, name: str, split: str) -> Prepared | None:
    """A split that is there; None if it is not."""
    folder = split_folder(data_dir, name, split)
    try:
        card = json.loads((folder / _CARD).read_text("utf-8"))
        return Prepared(
            name, split, folder, card["rows"], card["blank_answers"], dict(card["source"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def all_prepared(data_dir: Path) -> list[Prepared]:
    """Every split in a folder, the published sets first and in their order."""
    own = set()
    with contextlib.suppress(OSError):
        known = {b.folder for b in benchmarks.BENCHMARKS.values()}
        own = {p.name for p in data_dir.iterdir() if p.is_dir() and _NAME.fullmatch(p.name)} - known
    names = [*benchmarks.BENCHMARKS, *sorted(own)]
    found = (look_up(data_dir, name, split) for name in names for split in benchmarks.SPLITS)
    return [prepared for prepared in found if prepared is not None]


def file_card(path: Any) -> dict[str, Any]:
    """Path, bytes and time of the last change: what tells a file from one that replaces it.

    Raises:
      UserError: there is no such file.
    """
    try:
        with bucket_errors(path):
            stat = path.stat()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected a JSON-lines file.") from None
    if isinstance(path, Path):
        name, size, changed = path.resolve(), stat.st_size, stat.st_mtime_ns
    else:  # a bucket tells whole seconds, if any
        name, size, changed = path, stat.length, int(stat.mtime or 0) * 1_000_000_000
    return {"path": str(name), "bytes": size, "changed": changed}


def look_up_current(source: Source, data_dir: Path, allow_row_mismatch: bool) -> Prepared | None:
    """A split that is there and was made of this very file, unchanged since; else None.

    Raises:
      UserError: there is no such file, or its number of rows is not the published one.
    """
    found = look_up(data_dir, source.name, source.split)
    if found is None or found.source != file_card(source.path):
        return None
    _check_rows(source, found.rows, allow_row_mismatch)
    return found


def prepare(
    source: Source,
    data_dir: Path,
    allow_row_mismatch: bool,
    tell: Callable[[int], None] = lambda read: None,
) -> Prepared:
    """Makes a split of its file, in place of the one that is there.

    Only one process may do so in a folder at a time. After a kill at any moment the old split or
    the new one is there whole, or none.

    Args:
      source: the file, and what it becomes.
      data_dir: folder of prepared sets.
      allow_row_mismatch: whether the number of rows may be another than the published one.
      tell: called with the bytes of the file that are read, now and then.

    Raises:
      UserError: a line of the file is wrong, or the number of rows is not the published one.
    """
    from zest_jax.datasets import builder as builder_lib

    card = file_card(source.path)
    making = data_dir / _MAKING
    shutil.rmtree(making, ignore_errors=True)
    tasks = TaskFile(source.path, source.name)
    target = split_folder(data_dir, source.name, source.split)

    def checked() -> Iterator[Task]:
        for task in tasks:
            yield task
            tell(tasks.bytes_read)
        _check_rows(source, tasks.rows, allow_row_mismatch)
        builder.info.metadata.update(
            source=card, rows=tasks.rows, blank_answers=tasks.blank_answers
        )

    try:
        builder = builder_lib.make(target.parent.parent.name, source.split, checked(), making)
        builder_lib.write(builder, making / "downloads")
        if len(builder.as_data_source(split=source.split)) != tasks.rows:
            raise RuntimeError(f"{builder.data_path} does not hold the {tasks.rows} rows written.")
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():  # moved out of the way in one step: half of it must not be found there
            target.rename(making / "old")
        Path(builder.data_path).rename(target)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    made = look_up(data_dir, source.name, source.split)
    if made is None:
        raise RuntimeError(f"{target} was written and cannot be read.")
    return made


def read_prepared(prepared: Prepared, limit: int) -> Iterator[Task]:
    """Streams the questions of a split, the first `limit` of them or all if that is 0.

    Raises:
      UserError: the files are damaged.
    """
    from zest_jax.datasets import builder as builder_lib

    try:
        rows = builder_lib.open_split(prepared.folder, prepared.split)
        count = min(limit or len(rows), len(rows))
        for begin in range(0, count, _ROWS_AT_A_TIME):
            end = min(begin + _ROWS_AT_A_TIME, count)
            yield from map(builder_lib.to_task, rows.__getitems__(list(range(begin, end))))
    except (OSError, RuntimeError, ValueError, IndexError, KeyError) as error:
        raise UserError(
            f"{prepared.folder} is damaged ({error}); delete that folder and prepare "
            f"{prepared.name} again."
        ) from error


def _check_rows(source: Source, rows: int, allow_row_mismatch: bool) -> None:
    published = source.published
    if not published or rows == published or allow_row_mismatch:
        return
    fewer = rows < published
    raise UserError(
        f"{source.path} has {rows:,} questions, {abs(published - rows):,} "
        f"{'fewer' if fewer else 'more'} than the published {published:,} of {source.name}/"
        f"{source.split}; {'it may be cut short: ' if fewer else ''}fetch it again, or take it as "
        "it is with --allow_row_mismatch."
    )
