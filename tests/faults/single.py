"""A run in one process, killed, stopped, starved and damaged until it is done."""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path

from . import damage, judging
from .campaign import HELDOUT, Campaign, Fault
from .judging import Standing
from .processes import SMALL_DISK, HungError, Started, count_lines, file_limit, started

LIVE = ("kill", "kill_while_saving", "sigterm", "ctrl_c", "ctrl_c_twice", "disk_full")
HURT = ("checkpoint_truncated", "checkpoint_corrupt", "checkpoint_file_gone")
LITTER = ("half_written",)
STOPS = ("all_checkpoints_damaged", "own_task_line", "metrics_cut")
KINDS = (*LIVE, *HURT, *LITTER, *STOPS)
HURTS = {
    "checkpoint_truncated": damage.truncate,
    "checkpoint_corrupt": damage.corrupt,
    "checkpoint_file_gone": damage.remove,
}
STEPS = 8
FLAGS = (
    "--config.warm_start.steps=0",
    "--config.schedule.solver_steps=2",
    "--config.schedule.tasks=4",
    "--config.schedule.max_seeds=12",
    "--config.solver.tasks_per_step=2",
    "--config.checkpoint.keep=3",
)
SIGNALS = {"sigterm": (signal.SIGTERM, 0), "ctrl_c": (signal.SIGINT, 130)}


class Story:
    """One run and all that happens to it."""

    def __init__(self, campaign: Campaign, name: str, rng: random.Random):
        self.campaign, self.name, self.rng = campaign, name, rng
        self.workdir = campaign.folder / "stories" / name / "run"
        shutil.rmtree(self.workdir.parent, ignore_errors=True)  # of an earlier campaign
        self.every = rng.choice((1, 1, 2, 3))
        self.faults: list[Fault] = []
        self.starts = 0
        self.hurt: set[int] = set()  # checkpoints that were damaged and may still be there

    # What is started.

    def start(self, workdir: Path | None = None, prefix: tuple[str, ...] = ()) -> Started:
        self.starts += 1
        more = (*FLAGS, f"--config.checkpoint.every={self.every}")
        arguments = self.campaign.place.arguments(workdir or self.workdir, *more)
        words = self.workdir.parent / f"start-{self.starts}.txt"
        return started(self.campaign.place, arguments, words, prefix=prefix)

    def standing(self) -> Standing:
        return judging.standing(self.workdir, HELDOUT)

    def fault(self, kind: str, detail: str = "") -> Fault:
        fault = Fault(kind, self.name, f"start {self.starts + 1}: {detail}")
        self.faults.append(fault)
        return fault

    # How it goes.

    def tell(self) -> list[Fault]:
        while True:
            before = self.standing()
            if self.stop_by_damage(before):
                continue
            hurt = [self.hurt_something(before), self.litter(before)]
            if self.go_on(before, [fault for fault in hurt if fault]):
                break
            if self.starts > 60:
                raise HungError("sixty starts did not bring the run to its end")
        problems = judging.end_problems(self.workdir, self.campaign.folder / "unhurt" / "single")
        for fault in self.faults:
            fault.numbers = not problems
            fault.problems += problems
        if not self.campaign.keep and not any(fault.wrong for fault in self.faults):
            shutil.rmtree(self.workdir.parent)
        return self.faults

    def good(self, before: Standing) -> list[int]:
        return [n for n in sorted(before.checkpoints) if n not in self.hurt]

    def hurt_something(self, before: Standing) -> Fault | None:
        """Damages the newest checkpoint, where another one is good."""
        good = self.good(before)
        if len(good) < 2 or before.newest != good[-1] or self.rng.random() < 0.15:
            return None
        kind = self.campaign.take(HURT)
        if kind is None:
            return None
        folder = self.workdir / "checkpoints" / str(good[-1])
        fault = self.fault(kind, HURTS[kind](folder, self.rng))
        self.hurt.add(good[-1])
        return fault

    def litter(self, before: Standing) -> Fault | None:
        """Leaves half-written files about."""
        if before.newest is None or self.rng.random() < 0.5:
            return None
        kind = self.campaign.take(LITTER)
        if kind is None:
            return None
        return self.fault(kind, damage.litter(self.workdir, before.newest, self.rng))

    def stop_by_damage(self, before: Standing) -> bool:
        """Damages something that must end the run with a message, and mends it; whether it did."""
        good = self.good(before)
        if not good or before.newest != good[-1] or self.rng.random() < 0.6:
            return False
        host = before.checkpoints[good[-1]]
        kinds = ["all_checkpoints_damaged"]
        if host["phase"] % 2 and 0 < host["phase_step"] < 2:
            kinds.append("own_task_line")
        if host["records"]:
            kinds.append("metrics_cut")
        kind = self.campaign.take(kinds)
        if kind is None:
            return False
        fault = self.fault(kind)
        kept = self.workdir.parent / "kept"
        shutil.copytree(self.workdir, kept)
        words: tuple[str, ...]
        if kind == "all_checkpoints_damaged":
            damage.ruin(self.workdir / "checkpoints")
            words = ("can be restored", "is damaged", "another workdir")
        elif kind == "own_task_line":
            path = self.workdir / "tasks" / f"iteration_{host['phase'] // 2}.jsonl"
            what, words = damage.spoil_line(path, self.rng)
            fault.detail += what
        else:
            path = self.workdir / "metrics.jsonl"
            fault.detail += damage.cut_tail(path, self.rng)
            words = ("metrics.jsonl", "records")
            if count_lines(path) >= host["records"]:  # nothing that the checkpoint counts
                shutil.rmtree(kept)
                return False
        seen = damage.listing(self.workdir / "checkpoints")
        with self.start() as run:
            code = run.end()
            fault.judge_said(judging.sentence_problems(code, 2, run.said(), *words))
        if damage.listing(self.workdir / "checkpoints") != seen and kind != "own_task_line":
            fault.problems.append("something was changed in the checkpoints")
        shutil.rmtree(self.workdir)
        kept.rename(self.workdir)
        return True

    def go_on(self, before: Standing, hurt: list[Fault]) -> bool:
        """One start with a fault; whether the run came to its end."""
        kind, planned = self.campaign.take(LIVE), True
        if kind is None and self.starts < 15 and self.campaign.wants((*HURT, *LITTER, *STOPS)):
            # One more than planned: the others need runs that have not ended.
            kind, planned = "kill", False
        fault = Fault(kind or "none", self.name, f"start {self.starts + 1}: ")
        try:
            if kind == "disk_full":
                code, said, done = self.starve(fault, before)
            else:
                code, said, done = self.disturb(fault, before)
        except HungError as error:
            fault.problems.append(f"hangs: {error}")
            self.faults.append(fault)
            raise
        after = self.standing()
        damaged = frozenset(self.hurt)
        problems = judging.resume_problems(before, said, damaged)
        told = judging.DAMAGED.findall(said)
        if judging.RESUMED.search(said):
            resumed = min((int(good) for *_, good in told), default=before.newest)
            problems += judging.redone_problems(before, after, resumed)
        self.hurt &= set(after.checkpoints)
        if judging.RESUMED.search(said):
            # Where nothing was said of it the damage did not matter; numbers will tell.
            self.hurt.clear()
        blamed = (hurt or self.faults[-1:] or [fault])[0]
        blamed.problems += problems
        if done:
            self.campaign.give_back(kind if planned else None)
            if code or "Traceback" in said:
                blamed.problems.append(f"exit code {code}: {said[-600:]}")
            if fault.problems:
                self.faults.append(fault)
        elif fault.detail.endswith(" "):  # it was over before the moment came
            self.campaign.give_back(kind if planned else None)
            wrong = [f"ended by itself with {code}: {said[-600:]}"]
            (self.faults[-1] if self.faults else fault).problems += wrong
            if not self.faults:
                self.faults.append(fault)
            raise HungError(wrong[0])
        else:
            self.faults.append(fault)
            fresh = before.newest is None
            if judging.RESUMED.search(said) or fresh:
                kept = kind in ("sigterm", "ctrl_c")
                allowed = 0 if kept else 2 * self.every
                fault.problems += judging.lost_problems(after, allowed)
        return done

    # The faults.

    def disturb(self, fault: Fault, before: Standing) -> tuple[int, str, bool]:
        """A start that gets a signal, or none: exit code, what it said, whether the run is done."""
        kind = fault.kind
        with self.start() as run:
            if kind == "none" or not self.moment(run, fault, before):
                code = run.end()
            elif kind.startswith("kill"):
                run.send(signal.SIGKILL)
                code = run.end()
                if code != -signal.SIGKILL:
                    fault.detail += " (too late)"
            elif kind == "ctrl_c_twice":
                run.send(signal.SIGINT)
                run.lives_for(self.rng.random() * 0.6)
                run.send(signal.SIGINT)
                code = run.end(30)
                if not self.over(code):
                    fault.judge_said(
                        judging.sentence_problems(code, 130, run.said(), "interrupted", "resume")
                    )
            else:
                number, wanted = SIGNALS[kind]
                run.send(number)
                code = run.end(90)
                if not self.over(code):
                    by = {"sigterm": "stopped by SIGTERM", "ctrl_c": "interrupted"}[kind]
                    fault.judge_said(
                        judging.sentence_problems(
                            code, wanted, run.said(), by, "everything is saved", "resume"
                        )
                    )
            return code, run.said(), self.over(code)

    def over(self, code: int) -> bool:
        return code == 0 and (self.workdir / "report.json").exists()

    def moment(self, run: Started, fault: Fault, before: Standing) -> bool:
        """Waits for one; False where the run ends before."""
        rng, work = self.rng, self.workdir
        by_signal = not fault.kind.startswith("kill")
        if by_signal and not run.reaches(lambda: ", config " in run.said()):
            return False  # its handlers stand from here on
        how = rng.choices(("start", "step", "file"), (0.3, 0.55, 0.15))[0]
        if fault.kind == "kill_while_saving":
            half = set((work / "checkpoints").glob("*.orbax-checkpoint-tmp*"))
            skip = rng.randrange(2)
            seen: set[Path] = set(half)

            def saving() -> bool:
                seen.update((work / "checkpoints").glob("*.orbax-checkpoint-tmp*"))
                return len(seen) > len(half) + skip

            if not run.reaches(saving) or not run.lives_for(rng.random() * 0.05):
                return False
            fault.detail += "a checkpoint is being written"
            return True
        if how == "start":
            wait = rng.uniform(0.1, 3.0 if by_signal else 6.0)
            if not run.lives_for(wait):
                return False
            fault.detail += f"{wait:.1f} s after its start"
            return True
        # From here on what an earlier start left over is cut back.
        words = "attention: " if before.newest is None else "resumed at step"
        if not run.reaches(lambda: words in run.said()) or not run.lives_for(0.15):
            return False
        if how == "file":
            folders = [work / "tasks", work / "evaluation"]
            old = {(p.name, p.stat().st_mtime_ns) for f in folders for p in f.glob("*")}

            def written() -> bool:
                try:
                    now = {(p.name, p.stat().st_mtime_ns) for f in folders for p in f.glob("*")}
                except FileNotFoundError:
                    return False
                return bool(now - old)

            if not run.reaches(written) or not run.lives_for(rng.random() * 0.05):
                return False
            fault.detail += "answers or questions are written"
            return True
        more = rng.choice((1, 1, 2))
        first = count_lines(work / "metrics.jsonl")
        if not run.reaches(lambda: count_lines(work / "metrics.jsonl") >= first + more):
            return False
        wait = rng.random() * 0.5
        if not run.lives_for(wait):
            return False
        fault.detail += f"{wait:.2f} s after {more} more records"
        return True

    def starve(self, fault: Fault, before: Standing) -> tuple[int, str, bool]:
        """A start with too little room; the rest as of `disturb`."""
        words = ("what was saved before is kept", "resume")
        if before.newest is None or not self.campaign.mount or self.rng.random() < 0.5:
            limit = int(10 ** self.rng.uniform(0.0, 4.0))
            with self.start(prefix=file_limit(limit)) as run:
                code, said = run.end(), run.said()
            detail = f"no file beyond {limit} kB"
        else:
            code, said, room = self.on_small_disk()
            detail = f"a disk with {room / 2**20:.1f} MB of room"
        if self.over(code):
            return code, said, True
        fault.detail += detail
        fault.judge_said(judging.sentence_problems(code, 4, said, *words))
        return code, said, False

    def on_small_disk(self) -> tuple[int, str, int]:
        disk, kept = self.workdir.parent / "disk", self.workdir.parent / "kept"
        for folder in (disk, kept):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        used = sum(-(-p.stat().st_size // 4096) * 4096 + 4096 for p in self.workdir.rglob("*"))
        room = int(2 ** self.rng.uniform(10, 24))
        prefix = ("bash", "-c", SMALL_DISK, "-", str(used + room), str(disk), str(self.workdir))
        with self.start(disk, (*self.campaign.mount, *prefix, str(kept))) as run:
            code, said = run.end(), run.said()
        shutil.rmtree(self.workdir)
        kept.rename(self.workdir)
        return code, said, room


def tell(campaign: Campaign, name: str, rng: random.Random) -> list[Fault]:
    """A run from its beginning to its end, with as many faults as befall it."""
    story = Story(campaign, name, rng)
    try:
        return story.tell()
    except HungError as error:
        for fault in story.faults[-1:]:
            fault.problems.append(str(error))
        return story.faults


def make_unhurt(campaign: Campaign) -> float:
    """The run that nothing befalls; returns its seconds."""
    workdir = campaign.folder / "unhurt" / "single"
    shutil.rmtree(workdir, ignore_errors=True)
    begun = time.monotonic()
    arguments = campaign.place.arguments(workdir, *FLAGS, "--config.checkpoint.every=1")
    with started(campaign.place, arguments, workdir.parent / "single.txt") as run:
        if run.end(600):
            raise RuntimeError(f"the run without faults failed: {run.said()[-2000:]}")
    return time.monotonic() - begun
