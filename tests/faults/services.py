"""Runs on labelled questions whose retriever or teacher fails, or whose file has a bad line."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import re
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from . import damage, judging
from .campaign import HELDOUT, Campaign, Fault, HungError
from .processes import Started, count_lines, started

RETRIEVER = ("retriever_down", "retriever_slow", "retriever_flapping")
TEACHER = ("teacher_down", "teacher_slow", "teacher_half")
TASKS = ("bad_task_line",)
STEPS = 6
GOLD = "nobody guesses this"  # every group is all-zero, and the teacher is asked about all
SMALL = (
    "--config.solver.slots=8",
    "--config.solver.tasks_per_step=4",
    "--config.solver.group_size=4",
    "--config.solver.decay=False",
    f"--config.schedule.solver_steps={STEPS}",
    "--config.training.rows=4",
    "--config.evaluation.draws=200",
    "--config.log.rollouts_every=1",
    "--config.checkpoint.every=1",
    "--config.checkpoint.keep=3",
)


class Service:
    """A server that answers as it should, or in the way that `mode` says.

    Modes: well; slow (each answer late); flapping (one to two failures before each answer: 503,
    500, a dropped connection, half a body); wrong (an answer of another kind). `down` closes the
    port, `up` opens it again.

    Args:
      answer: from the body of a request to that of its answer.
      rng: draws delays and failures.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], Any], rng: random.Random):
        self.answer, self.rng, self.mode = answer, rng, "well"
        self._failed: Counter[bytes] = Counter()
        self._server: ThreadingHTTPServer | None = None
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]

    def up(self) -> None:
        """Opens the port."""
        if self._server is not None:
            return
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with contextlib.suppress(OSError):  # a client that is gone
                    service.reply(self, body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def down(self) -> None:
        """Closes the port; connections that are open answer no more."""
        self.mode = "dropped"
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def reply(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        mode, data = self.mode, b""
        if mode == "slow":
            time.sleep(self.rng.uniform(0.05, 0.7))
        if mode == "flapping" and self._failed[body] < 2 and self.rng.random() < 0.6:
            self._failed[body] += 1
            mode = self.rng.choice(("503", "500", "dropped", "half"))
        if mode == "dropped":
            handler.close_connection = True
            return
        if mode in ("503", "500"):
            handler.send_response(int(mode))
            data = b"not now"
        else:
            handler.send_response(200)
            said = {"oops": 1} if mode == "wrong" else self.answer(json.loads(body))
            data = json.dumps(said).encode()
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[: len(data) // 2] if mode == "half" else data)
        if mode == "half":
            handler.close_connection = True


# ------------------------------------------------------------------------------ what they answer


class Words:
    """Passages by the words that they share with a query; one answer to each query, always."""

    def __init__(self, world: Path):
        self.passages = judging.lines(world / "passages.jsonl")
        self.words = [set(self._of(f"{p['title']} {p['text']}")) for p in self.passages]

    @staticmethod
    def _of(text: str) -> list[str]:
        return re.findall(r"\w+", text.lower())

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"result": [self.search(q, request["topk"]) for q in request["queries"]]}

    def search(self, query: str, top_k: int) -> list[dict[str, Any]]:
        asked = self._of(query)
        scores = [
            sum(word in words for word in asked) + (p["title"].lower() == query.strip().lower())
            for p, words in zip(self.passages, self.words, strict=True)
        ]
        best = sorted(range(len(scores)), key=lambda n: (-scores[n], n))[:top_k]
        return [
            {
                "document": {
                    "id": self.passages[n]["id"],
                    "contents": f'"{self.passages[n]["title"]}"\n{self.passages[n]["text"]}',
                },
                "score": float(scores[n]),
            }
            for n in best
        ]


def verdict(request: dict[str, Any]) -> dict[str, Any]:
    """A teacher's: supported, or insufficient evidence, by the length of what it is shown."""
    text = request["messages"][-1]["content"]
    supported = "Candidate answers" in text or len(text) % 2 == 0
    status = "supported_answer" if supported else "insufficient_evidence"
    answer = GOLD if supported else "INSUFFICIENT_EVIDENCE"
    said = f"<reason>r</reason><status>{status}</status><answer>{answer}</answer>"
    choice = {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    return {"choices": [choice], "usage": usage}


def questions(campaign: Campaign, gold: str | None) -> Path:
    """Labelled questions, none of them asked in the evaluation; with answers of their own, or one
    for all."""
    from zest_jax.tasks.atlas import load_atlas

    name = "labelled" if gold is None else "unguessable"
    path = campaign.folder / f"{name}.jsonl"
    asked = (campaign.place.world / "validation.jsonl").read_text("utf-8")
    rows = (load_atlas().folder / "validation.jsonl").read_text("utf-8").splitlines()
    rest = [json.loads(row) for row in rows if row not in asked][:: len(rows) // (4 * STEPS) - 1]
    tasks = [
        {"id": f"u{n}", "question": r["question"], "golden_answers": [gold] if gold else
         r["golden_answers"]}
        for n, r in enumerate(rest[: 4 * STEPS])
    ]  # fmt: skip
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks), "utf-8")
    return path


# ------------------------------------------------------------------------------------ the stories


class Story:
    """One run beside a service that is hurt, time and again, until the run is done."""

    def __init__(self, campaign: Campaign, name: str, rng: random.Random, of: str):
        self.campaign, self.name, self.rng, self.of = campaign, name, rng, of
        base = campaign.folder / ("unhurt" if name.startswith("unhurt") else "stories")
        self.folder = base / (of if name.startswith("unhurt") else name)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.workdir = self.folder / "run"
        self.faults: list[Fault] = []
        self.starts = 0
        self.tasks = self.folder / "questions.jsonl"
        teacher = of == "teacher"
        shutil.copy(campaign.folder / f"{'unguessable' if teacher else 'labelled'}.jsonl",
                    self.tasks)  # fmt: skip
        answer = verdict if teacher else Words(campaign.place.world)
        self.service = Service(answer, rng)
        self.service.up()
        address = f"http://127.0.0.1:{self.service.port}"
        if teacher:
            self.config = "configs/eviback.py:atlas"
            flags = (
                "--config.solver.advantage.singleton=zero",
                "--config.teacher.kind=endpoint",
                f"--config.teacher.where={address}/v1",
                "--config.teacher.model=glm",
                "--config.teacher.connections=2",
                "--config.teacher.retries=3",
                "--config.teacher.answer_s=2.0",
                "--config.teacher.most_unanswered=0.0",
            )
            self.words = ("unanswered",)
        else:
            self.config = "configs/search_r1.py:atlas"
            flags = (f"--config.retrieval.index={address}",)
            self.words = (address,)
        self.flags = (*SMALL, *flags, f"--config.source.file={self.tasks}")

    @contextlib.contextmanager
    def start(self) -> Iterator[Started]:
        self.starts += 1
        arguments = self.campaign.place.arguments(self.workdir, *self.flags, config=self.config)
        words = self.folder / f"start-{self.starts}.txt"
        more = {"ZEST_TEACHER_API_KEY": "sk-none"}
        with started(self.campaign.place, arguments, words, more) as run:
            yield run

    def step(self) -> int:
        return judging.standing(self.workdir, HELDOUT).finished

    def end(self, code: int, said: str) -> None:
        """Judges the run and its faults, once it is done."""
        problems = []
        if code:
            problems = [f"exit code {code}: {said[-600:]}"]
        problems += judging.end_problems(self.workdir, self.campaign.folder / "unhurt" /
                                         self.reference / "run")  # fmt: skip
        for fault in self.faults:
            fault.numbers = not problems
            fault.problems += problems
        self.service.down()
        if not self.campaign.keep and not any(fault.wrong for fault in self.faults):
            shutil.rmtree(self.folder)

    @property
    def reference(self) -> str:
        return "teacher" if self.of == "teacher" else "retriever"

    def fault(self, kind: str, detail: str) -> Fault:
        self.faults.append(Fault(kind, self.name, f"start {self.starts}: {detail}"))
        return self.faults[-1]

    # A service that fails.

    def tell(self, kinds: tuple[str, ...]) -> list[Fault]:
        while True:
            before = judging.standing(self.workdir, HELDOUT)
            with self.start() as run:
                code = self.through(run, kinds)
                said = run.said()
            problems = judging.resume_problems(before, said)
            problems += judging.lost_problems(judging.standing(self.workdir, HELDOUT), 2)
            if self.faults:
                self.faults[-1].problems += problems
            if code != 2 or self.starts > 20:
                self.end(code, said)
                return self.faults

    def through(self, run: Started, kinds: tuple[str, ...]) -> int:
        """A start, with faults until it ends; its exit code."""
        metrics = self.workdir / "metrics.jsonl"
        while True:
            kind = self.campaign.take(kinds)
            if kind is None:
                return run.end()
            wait = self.rng.uniform(0, 4 if count_lines(metrics) < 2 else 1.0)
            if not run.lives_for(wait):
                self.campaign.give_back(kind)
                return run.end()
            fault = self.fault(kind, f"{run_seconds(run):.1f} s after its start, ")
            problem = kind.split("_")[1]
            if problem == "down":
                if self.is_gone(run, fault):
                    return run.end()
                continue
            mode = {"slow": "slow", "flapping": "flapping", "half": "flapping"}[problem]
            if problem == "half" and self.rng.random() < 0.4:
                mode = "half"
            self.service.mode = mode
            first = count_lines(metrics)
            more = self.rng.randrange(1, 3)
            fault.detail += f"{mode} for {more} steps"
            alive = run.reaches(functools.partial(_has_lines, metrics, first + more))
            self.service.mode = "well"
            if not alive:
                return self.ended(run, fault)

    def is_gone(self, run: Started, fault: Fault) -> bool:
        """The service goes away, for seconds or until the run has ended; whether it has."""
        first = count_lines(self.workdir / "metrics.jsonl")
        how = self.rng.choice(("down", "down for 1.5 s", "wrong"))
        if how == "wrong" and self.of == "teacher":
            how = "down"
        fault.detail += how
        if how == "wrong":
            self.service.mode = how
        else:
            self.service.down()
        try:
            if how == "down for 1.5 s":
                alive = run.lives_for(1.5)
            else:
                alive = run.reaches(
                    lambda: count_lines(self.workdir / "metrics.jsonl") > first + 3, 150
                )
                if alive:
                    fault.problems.append("it went on without its service")
        finally:
            self.service.mode = "well"
            self.service.up()
        if not alive:
            self.ended(run, fault)
        return not alive

    def ended(self, run: Started, fault: Fault) -> int:
        """Judges how the program ended that was left without its service."""
        code = run.end()
        if code != 0:
            fault.judge_said(judging.sentence_problems(code, 2, run.said(), *self.words))
        return code

    # A file with a bad line.

    def tell_tasks(self) -> list[Fault]:
        done = False
        while not done:
            whole = self.tasks.read_bytes()
            while self.rng.random() < 0.8 and self.campaign.take(TASKS):
                what, words = damage.spoil_line(self.tasks, self.rng)
                fault = self.fault(TASKS[0], f"before start {self.starts + 1}, {what}")
                seen = damage.listing(self.workdir / "checkpoints")
                with self.start() as run:
                    code = run.end()
                    fault.judge_said(judging.sentence_problems(code, 2, run.said(), *words))
                if damage.listing(self.workdir / "checkpoints") != seen:
                    fault.problems.append("something was changed in the checkpoints")
                self.tasks.write_bytes(whole)
            before = judging.standing(self.workdir, HELDOUT)
            more = self.rng.randrange(2, 4) if self.campaign.wants(TASKS) else 99
            with self.start() as run:
                wanted = before.finished + more
                done = not run.reaches(
                    functools.partial(_has_lines, self.workdir / "metrics.jsonl", wanted)
                )
                if not done:
                    run.send(signal.SIGKILL)
                code, said = run.end(), run.said()
            done = code == 0
            if code not in (0, -signal.SIGKILL):
                raise HungError(f"exit code {code}: {said[-600:]}")
            if self.faults:
                self.faults[-1].problems += judging.resume_problems(before, said)
        self.end(code, said)
        return self.faults


def _has_lines(path: Path, count: int) -> bool:
    return count_lines(path) >= count


def run_seconds(run: Started) -> float:
    return time.monotonic() - run.begun


def tell_retriever(campaign: Campaign, name: str, rng: random.Random) -> list[Fault]:
    """A run beside a retrieval server that fails."""
    return Story(campaign, name, rng, "retriever").tell(RETRIEVER)


def tell_teacher(campaign: Campaign, name: str, rng: random.Random) -> list[Fault]:
    """A run beside a teacher that fails."""
    return Story(campaign, name, rng, "teacher").tell(TEACHER)


def tell_tasks(campaign: Campaign, name: str, rng: random.Random) -> list[Fault]:
    """A run whose file of questions has bad lines."""
    return Story(campaign, name, rng, "tasks").tell_tasks()


def _make(campaign: Campaign, of: str) -> float:
    begun = time.monotonic()
    questions(campaign, GOLD if of == "teacher" else None)
    story = Story(campaign, "unhurt", random.Random(0), of)
    with story.start() as run:
        if run.end(600):
            raise RuntimeError(f"the run without faults failed: {run.said()[-2000:]}")
    story.service.down()
    return time.monotonic() - begun


def make_retriever(campaign: Campaign) -> float:
    """The run with a retriever that always answers; returns its seconds."""
    return _make(campaign, "retriever")


def make_teacher(campaign: Campaign) -> float:
    """The run with a teacher that always answers; returns its seconds."""
    return _make(campaign, "teacher")
