"""A run's folder: who owns it, where everything in it is, and writing that survives a kill.

    with Workdir("runs/smoke") as workdir:
        resumed = workdir.claim(config)
        workdir.write("report.json", text)

Files are replaced whole (`write`) or grow by lines (`append_jsonl`). After `kill -9` a replaced
file is the old or the new one, never half of either, and a growing file has at most one torn last
line, which reading ignores and the next append cuts off.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from zest_jax import config as config_lib
from zest_jax.errors import UserError
from zest_jax.files import writing

SHOWN_DIFFERENCES = 5


class Workdir:
    """The folder of one run, held by one process at a time.

    Args:
      path: a local folder; made if it is missing.
      lock: False only for readers, such as a report over a finished run.
      checkpoints: where the run's checkpoints are, if not in it: a folder, or one in a bucket.
      publish: copies what has changed to where others see it.

    Raises:
      UserError: no folder can be made there, or another process holds it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        lock: bool = True,
        checkpoints: Any = None,
        publish: Callable[[], None] | None = None,
    ):
        if "://" in str(path):
            raise UserError(
                f"workdir {path} is not a local folder, and this program takes no other; copy it "
                "to one, as in runs/smoke."
            )
        self.path = Path(path)
        self._publish = publish
        self._checkpoints = self.path / "checkpoints" if checkpoints is None else checkpoints
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"workdir {path} is a file, not a folder; name another.") from None
        except PermissionError:
            raise UserError(f"workdir {path} cannot be made: permission denied.") from None
        self._lock: IO[str] | None = self._take_lock() if lock else None

    def publish(self) -> None:
        """Copies what has changed to where others see it, if that is not this folder.

        Called before every checkpoint, so that none is there without what belongs to it.
        """
        if self._publish is not None:
            self._publish()

    # Where everything is.

    @property
    def config_json(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics_jsonl(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Any:
        return self._checkpoints

    @property
    def shared(self) -> Any:
        """The run's folder or bucket, which need not be this process's own folder."""
        return self._checkpoints.parent

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def report_json(self) -> Path:
        return self.path / "report.json"

    @property
    def report_html(self) -> Path:
        return self.path / "report.html"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    def tasks(self, iteration: int) -> Path:
        """The tasks that the proposer made in an iteration (counted from 0)."""
        return self.path / "tasks" / f"iteration_{iteration}.jsonl"

    # Whose it is.

    def claim(self, config: Any, may_differ: Sequence[str] = ()) -> bool:
        """Writes config.json on the first start; later refuses a config that differs.

        Until there are metrics the run has not begun: a start that failed on a mistake in its
        config leaves the folder to the config without it.

        Args:
          config: the resolved config of this start.
          may_differ: dotted paths of fields, or of groups of fields, that may change between
            starts (how often to log, say). config.json then shows the latest.

        Returns:
          Whether the workdir belonged to this config already.

        Raises:
          UserError: the workdir is another config's; tells what differs.
        """
        if not (self.config_json.exists() and self.metrics_jsonl.exists()):
            self.write("config.json", config_lib.resolved_json(config))
            return False
        try:
            old = json.loads(self.config_json.read_text("utf-8"))
        except ValueError:
            raise UserError(
                f"{self.config_json} is not JSON; restore it, or choose another workdir."
            ) from None
        found = config_lib.differences(old, config)
        serious = [d for d in found if not any(_stands_in(d.path, place) for place in may_differ)]
        if serious:
            shown = "; ".join(str(each) for each in serious[:SHOWN_DIFFERENCES])
            more = len(serious) - SHOWN_DIFFERENCES
            raise UserError(
                f"workdir {self.path} belongs to another config ({shown}"
                f"{f'; and {more} more' if more > 0 else ''}); "
                "start with the old values or choose another --workdir."
            )
        if found:
            self.write("config.json", config_lib.resolved_json(config))
        return True

    def _take_lock(self) -> IO[str]:
        """An advisory lock on a file; the system lets it go when the process dies, however."""
        path = self.path / ".lock"
        try:
            file = open(path, "a+", encoding="utf-8")  # Kept open: the lock lives with it.
        except PermissionError:
            raise UserError(f"workdir {self.path} cannot be written: permission denied.") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip()
            file.close()
            raise UserError(
                f"workdir {self.path} is in use by process {owner or '(unknown)'}; "
                "wait for it, stop it, or choose another --workdir."
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        return file

    def close(self) -> None:
        """Lets another process have the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Workdir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writing.

    def write(self, name: str, content: str | bytes) -> Path:
        """Replaces a file of the workdir whole; `name` is relative to it."""
        path = self.path / name
        write_atomically(path, content)
        return path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces a file: after a crash at any moment it is the old or the new one, whole.

    A full disk leaves the old file and no litter.
    """
    with writing(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replaces a file of JSON lines whole."""
    write_atomically(path, "".join(dump_line(record) for record in records))


def append_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Adds JSON lines, after cutting off a torn last line; they are with the system on return."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cut_torn_line(path)
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(dump_line(record) for record in records))


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file of ours; a torn last line is ignored, a missing file is empty.

    Raises:
      UserError: another line is not JSON.
    """
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return  # A line counts once its end is written.
            try:
                yield json.loads(line)
            except ValueError:
                raise UserError(f"{path}, line {number} is not JSON; remove the line.") from None


def truncate_after(path: Path, step: int, key: str = "step") -> int:
    """Drops the records of later steps than a restored checkpoint's; a torn last line too.

    Args:
      path: a file of JSON lines, each with a number under `key`.
      step: the last step to keep.

    Returns:
      How many whole records were dropped.
    """
    records = list(read_jsonl(path))
    kept = [record for record in records if record[key] <= step]
    if path.exists():
        write_jsonl(path, kept)
    return len(records) - len(kept)


def dump_line(record: Mapping[str, Any]) -> str:
    """One JSON line; refuses NaN and infinity, which are no JSON."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"


def cut_torn_line(path: Path) -> None:
    """Removes what stands behind the last line end: a kill tore it."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        keep = end
        block = 4096
        while keep > 0:
            start = max(0, keep - block)
            file.seek(start)
            found = file.read(keep - start).rfind(b"\n")
            if found >= 0:
                keep = start + found + 1
                break
            keep = start
        if keep < end:
            file.truncate(keep)


def _stands_in(path: str, place: str) -> bool:
    return path == place or path.startswith(f"{place}.")
