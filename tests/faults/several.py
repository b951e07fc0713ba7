"""A run of four processes, one of which is killed, again and again."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import socket
import time

from . import judging
from .campaign import HELDOUT, Campaign, Fault, HungError
from .processes import Started, count_lines, started
from .services import SMALL

KINDS = ("lost_process",)
COUNT = 4
SOON = 40.0  # seconds in which those that are left have to end
TOLERANCE = 1e-3
CONFIG = "configs/search_r1.py:atlas"  # the fewest compiled programs
FLAGS = (*SMALL, "--config.schedule.tasks=24")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Story:
    """One run and its starts, each of several processes."""

    def __init__(self, campaign: Campaign, name: str, rng: random.Random):
        self.campaign, self.name, self.rng = campaign, name, rng
        self.folder = campaign.folder / ("unhurt" if name == "unhurt" else "stories") / (
            "several" if name == "unhurt" else name
        )  # fmt: skip
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.workdir = self.folder / "run"
        self.faults: list[Fault] = []
        self.starts = 0

    def start(self, stack: contextlib.ExitStack, count: int) -> list[Started]:
        self.starts += 1
        place = self.campaign.place
        arguments = place.arguments(self.workdir, *FLAGS, config=CONFIG)
        address = f"127.0.0.1:{free_port()}"
        runs = []
        for number in range(count):
            more = {
                "ZEST_COORDINATOR": address,
                "ZEST_PROCESSES": str(count),
                "ZEST_PROCESS": str(number),
            }
            words = self.folder / f"start-{self.starts}-{number}.txt"
            runs.append(stack.enter_context(started(place, arguments, words, more)))
        return runs

    def tell(self) -> list[Fault]:
        done = False
        while not done:
            before = judging.standing(self.workdir, HELDOUT)
            kind = self.campaign.take(KINDS)
            count = COUNT if kind else self.rng.choice((COUNT, 2, 1))
            with contextlib.ExitStack() as stack:
                runs = self.start(stack, count)
                done = not (kind and self.lose_one(runs))
                if done:
                    self.campaign.give_back(kind)
                    codes = [run.end(600) for run in runs]
                    if any(codes):
                        raise HungError(f"exit codes {codes}: {runs[0].said()[-900:]}")
                said = runs[0].said()
            problems = judging.resume_problems(before, said)
            problems += judging.lost_problems(judging.standing(self.workdir, HELDOUT), 2)
            if self.faults:
                self.faults[-1].problems += problems
        unhurt = self.campaign.folder / "unhurt" / "several" / "run"
        problems = judging.end_problems(self.workdir, unhurt, TOLERANCE)
        for fault in self.faults:
            fault.numbers = not problems
            fault.problems += problems
        if not self.campaign.keep and not any(fault.wrong for fault in self.faults):
            shutil.rmtree(self.folder)
        return self.faults

    def lose_one(self, runs: list[Started]) -> bool:
        """Kills one of the processes and looks at the others; False where all ended before."""
        rng = self.rng
        metrics = self.workdir / "metrics.jsonl"
        words = "resumed at step" if self.starts > 1 else "attention: "
        if rng.random() < 0.8:
            if not runs[0].reaches(lambda: words in runs[0].said()):
                return False
            runs[0].lives_for(0.3)
            first, more = count_lines(metrics), rng.randrange(0, 3)
            if not runs[0].reaches(lambda: count_lines(metrics) >= first + more):
                return False
            when = f"after {more} more records"
        else:
            # Before all have joined the others wait for it, five minutes, as for a late one.
            if not runs[0].reaches(lambda: ", config " in runs[0].said()):
                return False
            when = "while starting"
        wait = rng.uniform(0, 3 if when == "while starting" else 1.0)
        if not runs[0].lives_for(wait):
            return False
        victim = rng.randrange(len(runs))
        runs[victim].send(signal.SIGKILL)
        begun = time.monotonic()
        if runs[victim].end() != -signal.SIGKILL:
            return False
        fault = Fault(KINDS[0], self.name, f"start {self.starts}: process {victim}, {when}")
        self.faults.append(fault)
        problems = []
        for number, run in enumerate(runs):
            if number == victim:
                continue
            try:
                code = run.end(max(0.1, begun + SOON - time.monotonic()))
            except HungError as error:
                problems.append(f"process {number} goes on without process {victim}: {error}")
                continue
            found = judging.sentence_problems(
                code, 5, run.said(), "another process of this run is gone", "is saved", "again"
            )
            problems += [f"process {number}: {problem}" for problem in found]
        fault.detail += f"; the others ended in {time.monotonic() - begun:.0f} s"
        fault.judge_said(problems)
        return True


def tell(campaign: Campaign, name: str, rng: random.Random) -> list[Fault]:
    """A run of four processes from its beginning to its end."""
    story = Story(campaign, name, rng)
    try:
        return story.tell()
    except HungError as error:
        for fault in story.faults[-1:]:
            fault.problems.append(str(error))
        if not story.faults:
            raise
        return story.faults


def make_unhurt(campaign: Campaign) -> float:
    """The run of four processes that none of them leaves; returns its seconds."""
    begun = time.monotonic()
    story = Story(campaign, "unhurt", random.Random(0))
    with contextlib.ExitStack() as stack:
        runs = story.start(stack, COUNT)
        codes = [run.end(900) for run in runs]
        if any(codes):
            raise RuntimeError(f"the run without faults failed: {codes} {runs[0].said()[-2000:]}")
    return time.monotonic() - begun
