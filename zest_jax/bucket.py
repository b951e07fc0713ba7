"""A workdir in a bucket: its small files are kept in a local folder and copied there.

Files that grow by lines, and a lock, need a disk; checkpoints do not, and are written to the bucket
directly. So a run whose workdir is `gs://…` works in a local folder, brings what an earlier start
left there at its beginning, and copies what has changed before every checkpoint and at its end: a
checkpoint in the bucket never stands there without the records that belong to it.
"""

from pathlib import Path
from typing import Any

from zest_jax.datasets.files import bucket_errors, to_path
from zest_jax.errors import UserError

LEFT_OUT = ("checkpoints", ".lock")
"""What is not copied: written there directly, or of this machine only."""


def is_bucket(path: str) -> bool:
    """Whether a workdir is an address rather than a folder."""
    return "://" in path


class Mirror:
    """A local folder and its copy in a bucket.

    Args:
      address: of the bucket's folder, as gs://bucket/runs/name.
      local: the folder; what the bucket has is brought there.

    Raises:
      UserError: there is no such kind of bucket, or it cannot be read.
    """

    def __init__(self, address: str, local: Path):
        self.address, self.local = to_path(address), local
        self._copied: dict[str, tuple[int, int]] = {}
        with bucket_errors(self.address):
            for name, there in _files(self.address):
                here = local / name
                here.parent.mkdir(parents=True, exist_ok=True)
                here.write_bytes(there.read_bytes())
                self._copied[name] = _mark(here)

    @property
    def checkpoints(self) -> Any:
        """Where the run's checkpoints are."""
        return self.address / "checkpoints"

    def push(self) -> None:
        """Copies every file that has changed, and removes those that are gone.

        Raises:
          UserError: the bucket cannot be written.
        """
        here = dict(_files(self.local))
        try:
            for name, path in here.items():
                mark = _mark(path)
                if self._copied.get(name) == mark:
                    continue
                there = self.address / name
                there.parent.mkdir(parents=True, exist_ok=True)
                there.write_bytes(path.read_bytes())
                self._copied[name] = mark
            for name in self._copied.keys() - here.keys():
                (self.address / name).unlink(missing_ok=True)
                del self._copied[name]
        except Exception as error:
            raise UserError(
                f"{self.address} cannot be written ({error}); check that you may write there, and "
                "start the run again: it goes on from the last checkpoint there."
            ) from error


def _files(folder: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Names relative to the folder, and paths, of the files below it that are copied."""
    out: list[tuple[str, Any]] = []
    if not folder.exists():
        return out
    for path in folder.iterdir():
        name = f"{prefix}{path.name}"
        if name in LEFT_OUT:
            continue
        if path.is_dir():
            # The state of an update that was not finite is written directly, as checkpoints are.
            if name != "not_finite/state":
                out += _files(path, f"{name}/")
        else:
            out.append((name, path))
    return out


def _mark(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
