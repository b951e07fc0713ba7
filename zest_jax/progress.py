"""Progress for people: bars with time left on a terminal, plain lines elsewhere, all in log.txt.

with Progress(log=workdir.log) as progress:
    progress.say("device: cpu")
    with progress.phase("iteration 1/2: solver", total=50) as bar:
        for step in range(50):
            …
            bar.advance(reward=0.41, searches=1.9)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

PLAIN_EVERY = 10.0  # Seconds between lines of a phase where there is no terminal.


class Progress:
    """Tells what a run does.

    Args:
      log: a file that gets every line with its time; None for none.
      stream: where to show it; the default is stderr, so that stdout stays clean.
      every: seconds between the plain lines of one phase.
    """

    def __init__(
        self, log: Path | None = None, stream: IO[str] | None = None, every: float = PLAIN_EVERY
    ):
        self._console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self.live = self._console.is_terminal and not self._console.is_dumb_terminal
        self.every = every
        self._log = open(log, "a", encoding="utf-8") if log is not None else None
        self._bars = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("·"),
            TimeRemainingColumn(compact=True),
            TextColumn("left{task.fields[values]}"),
            console=self._console,
            transient=True,
        )

    def say(self, text: str) -> None:
        """Shows and logs one line."""
        self._write_log(text)
        self._console.print(text, markup=False)

    @contextmanager
    def phase(self, name: str, total: int, done: int = 0) -> Iterator[Phase]:
        """Shows a phase of `total` steps, of which `done` were done before a resume."""
        phase = Phase(self, name, total, done)
        phase.open()
        try:
            yield phase
        finally:
            phase.close()

    def close(self) -> None:
        if self.live:
            self._bars.stop()
        if self._log is not None:
            self._log.close()
            self._log = None

    def __enter__(self) -> Progress:
        if self.live:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_log(self, text: str) -> None:
        if self._log is not None:
            self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            self._log.flush()


class Phase:
    """One running phase; made by `Progress.phase`."""

    def __init__(self, progress: Progress, name: str, total: int, done: int):
        self._progress = progress
        self._name, self._total, self._done = name, total, done
        self._begun = self._told = time.monotonic()
        self._skipped = done
        self._values = ""
        self._task: object = None

    def open(self) -> None:
        bars = self._progress._bars
        if self._progress.live:
            self._task = bars.add_task(
                self._name, total=self._total, completed=self._done, values=""
            )

    def advance(self, steps: int = 1, **values: float | int | str) -> None:
        """Counts steps as done and shows the latest values, `name value` each."""
        self._done += steps
        if values:
            self._values = "".join(f" · {key} {_short(value)}" for key, value in values.items())
        now = time.monotonic()
        if self._progress.live:
            self._progress._bars.update(
                self._task,  # type: ignore[arg-type]
                completed=self._done,
                values=self._values,
            )
        elif now - self._told >= self._progress.every:
            self._told = now
            self._progress.say(f"{self._line()} · {clock(self.seconds_left())} left{self._values}")

    def seconds_left(self) -> float:
        """By the mean pace of this start; infinite before the first step."""
        own = self._done - self._skipped
        if own <= 0:
            return float("inf")
        return (time.monotonic() - self._begun) / own * max(0, self._total - self._done)

    def close(self) -> None:
        if self._progress.live:
            self._progress._bars.remove_task(self._task)  # type: ignore[arg-type]
        took = clock(time.monotonic() - self._begun)
        self._progress.say(f"{self._line()} · took {took}{self._values}")

    def _line(self) -> str:
        return f"{self._name} {self._done}/{self._total}"


def clock(seconds: float) -> str:
    """0:07, 12:30, 3:05:00; "?" if it is not known."""
    if not seconds < 1e9:
        return "?"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _short(value: float | int | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
