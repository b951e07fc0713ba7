"""Starting runs, watching what they write, and stopping them at a chosen moment."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LIMIT = 240.0  # seconds after which a start counts as hanging
POLL = 0.004


class HungError(Exception):
    """A program did not end, or did not come so far, in the time that it should need."""


class Started:
    """A run of `zest_jax.train` in a process of its own, whose words go to a file.

    Args:
      place: of `tiny_run`, where the world and the compiled programs are.
      arguments: flags.
      words: the file.
      more: environment variables.
      prefix: stands before the command.
    """

    def __init__(
        self,
        place: Any,
        arguments: list[str],
        words: Path,
        more: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ):
        self.words = words
        words.parent.mkdir(parents=True, exist_ok=True)
        self.begun = time.monotonic()
        with words.open("wb") as file:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "zest_jax.train", *arguments],
                cwd=Path(__file__).resolve().parents[2],
                env=place.environment() | (more or {}),
                stdout=subprocess.DEVNULL,
                stderr=file,
            )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def said(self) -> str:
        return self.words.read_text("utf-8", errors="replace")

    def reaches(self, condition: Callable[[], bool], limit: float = LIMIT) -> bool:
        """Waits until it is so: True; False where the program ends before.

        Raises:
          HungError: neither.
        """
        ends = time.monotonic() + limit
        while self.alive:
            if condition():
                return True
            if time.monotonic() > ends:
                raise HungError(f"{limit:.0f} s passed; it said: {self.said()[-300:]}")
            time.sleep(POLL)
        return False

    def lives_for(self, seconds: float) -> bool:
        """Waits: whether it is still there."""
        ends = time.monotonic() + seconds
        return self.reaches(lambda: time.monotonic() >= ends)

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def end(self, limit: float = LIMIT) -> int:
        """Its exit code, once it has ended; below 0 the signal that killed it.

        Raises:
          HungError: it does not end.
        """
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise HungError(f"no end in {limit:.0f} s; it said: {self.said()[-300:]}") from None


@contextlib.contextmanager
def started(*args: Any, **options: Any) -> Iterator[Started]:
    """A run that is gone when the block ends, whatever happens in it."""
    program = Started(*args, **options)
    try:
        yield program
    finally:
        if program.alive:
            program.process.kill()
            program.process.wait()


def count_lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def file_limit(kilobytes: int) -> tuple[str, ...]:
    """A command prefix under which no file may be larger."""
    return ("bash", "-c", f'ulimit -f {kilobytes} && exec "$@"', "-")


# A disk of $1 bytes at $2 with what is in $3, copied to $4 in the end; then the command.
SMALL_DISK = """
mount -t tmpfs -o size="$1" none "$2" || exit 99
cp -a "$3"/. "$2"
"${@:5}"
code=$?
cp -a "$2"/. "$4"
exit $code
"""


def may_mount(folder: Path) -> tuple[str, ...]:
    """The command by which this user may mount a disk in a name space of its own; () for none."""
    folder.mkdir(parents=True, exist_ok=True)
    for flags in ("-m", "-Urm"):
        unshare = ("unshare", flags)
        with contextlib.suppress(FileNotFoundError):
            command = [*unshare, "mount", "-t", "tmpfs", "none", str(folder)]
            if subprocess.run(command, capture_output=True).returncode == 0:
                return unshare
    return ()
