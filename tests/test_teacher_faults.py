"""Whole EviBack runs through a real local server as the teacher, which fails in every known way."""

import contextlib
import json
import threading
import time

import pytest
from test_methods import SMALL
from test_teachers_endpoint import SECRET, api, completion

from zest_jax import cli
from zest_jax.tasks.atlas import load_atlas
from zest_jax.teachers.evidence import Skip
from zest_jax.teachers.prompts import PLACEHOLDER
from zest_jax.workdir import read_jsonl

pytestmark = pytest.mark.slow

STEPS, ASKED = 4, 4  # steps of a run, questions of a step
GOLD = "nobody guesses this"  # so every group is all-zero, and every rollout is asked about


@pytest.fixture(scope="module")
def questions(place):
    """Labelled questions, as many as the steps ask, whose answer is found by nobody."""
    path = place.folder / "unguessable.jsonl"
    evaluated = (place.world / "validation.jsonl").read_text("utf-8")
    lines = (load_atlas().folder / "validation.jsonl").read_text("utf-8").splitlines()
    # Those of the evaluation would be left out, and others be asked twice and cached.
    rest = [line for line in lines if line not in evaluated][:: len(lines) // (STEPS * ASKED) - 1]
    tasks = [
        {"id": f"u{n}", "question": json.loads(line)["question"], "golden_answers": [GOLD]}
        for n, line in enumerate(rest[: STEPS * ASKED])
    ]
    assert len({task["question"] for task in tasks}) == STEPS * ASKED
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks), "utf-8")
    return path


def flags(questions, url, *more):
    return (
        *SMALL,
        f"--config.schedule.solver_steps={STEPS}",
        f"--config.source.file={questions}",
        "--config.policy.folder=smoke_policy",
        "--config.teacher.kind=endpoint",
        f"--config.teacher.where={url}",
        "--config.teacher.model=glm",
        "--config.teacher.connections=1",
        "--config.teacher.retries=0",
        "--config.teacher.answer_s=1.0",
        "--config.checkpoint.every=1",
        *more,
    )


def verdict(request):
    """A supported answer, and an insufficient one to every other question."""
    if "Candidate answers" not in request["text"] and len(request["text"]) % 2:
        said = ("insufficient_evidence", PLACEHOLDER)
    else:
        said = ("supported_answer", GOLD)
    return completion("<reason>r</reason><status>{}</status><answer>{}</answer>".format(*said))


def solver_steps(work):
    return [r for r in read_jsonl(work / "metrics.jsonl") if r["phase"] == "solver"]


class Teacher:
    """Answers in the first step, fails in turn in the next two, and is gone from the fourth on: its
    socket is closed, so that nobody can connect.

    Args:
      work: workdir of the run, which tells the step.
      faulty: whether it fails before it is gone; else it is gone from the second step on.
    """

    def __init__(self, work, faulty):
        self.work, self.told, self.times = work, [], []
        self.dies_at = STEPS if faulty else 2
        self.gone, self.silence = threading.Event(), threading.Event()
        wrong = completion("The evidence supports it, I would say.")
        self.faults = [
            ("busy", lambda r: (429, b"", {"Retry-After": "0.3"})),
            ("well", verdict),
            ("error", lambda r: (500, b"oh no", {})),
            ("half", lambda r: verdict(r)[:40]),
            ("well", verdict),
            ("silent", lambda r: self.silence.wait(60) and None),
            ("wrong", lambda r: wrong),
            ("dropped", lambda r: None),
        ]

    def __call__(self, request):
        self.times.append(time.monotonic())
        step = 1 + len(solver_steps(self.work))
        if step >= self.dies_at:
            self.gone.set()
        if self.gone.is_set():
            return None
        if step == 1:
            return verdict(request)
        name, fault = self.faults[len(self.told) % len(self.faults)]
        self.told.append((name, len(self.times) - 1))
        return fault(request)

    @contextlib.contextmanager
    def serving(self):
        with contextlib.ExitStack() as server:
            url, _ = server.enter_context(api(self))

            def close():
                self.gone.wait()
                server.close()

            closer = threading.Thread(target=close)
            closer.start()
            try:
                yield url
            finally:
                self.silence.set()
                self.gone.set()
                closer.join()


def test_a_run_goes_on_through_every_fault(place, questions, tmp_path, monkeypatch):
    monkeypatch.setenv("ZEST_TEACHER_API_KEY", SECRET)
    work = tmp_path / "run"
    teacher = Teacher(work, faulty=True)
    with teacher.serving() as url:
        done = place.run(
            place.arguments(work, *flags(questions, url), config="configs/eviback.py:atlas")
        )
    assert done.returncode == 0, done.stderr[-2000:]
    assert {name for name, _ in teacher.told} == {name for name, _ in teacher.faults}
    busy = [at for name, at in teacher.told if name == "busy"]
    assert all(teacher.times[at + 1] - teacher.times[at] > 0.29 for at in busy), "Retry-After"

    steps = solver_steps(work)
    assert len(steps) == STEPS
    shares = [step["teacher/unanswered"] for step in steps]
    assert shares[0] == 0 and shares[-1] == 1 and 0 < shares[1] + shares[2] < 2
    told = json.loads((work / "report.json").read_text("utf-8"))["teacher"]
    asked = sum(step["teacher/asked"] for step in steps)
    silent = sum(step["teacher/asked"] * step["teacher/unanswered"] for step in steps)
    assert told["asked"] == asked > 30 and told["unanswered"] == round(silent)
    assert told["unanswered_share"] == pytest.approx(silent / asked)
    kinds = {"busy", "server_error", "bad_answer", "timeout", "unreachable"}
    assert kinds <= told["failure"].keys() and told["breach"] == {
        "not_three_blocks": told["breach"]["not_three_blocks"]
    }
    page = (work / "report.html").read_text("utf-8")
    assert f"{100 * told['unanswered_share']:.1f} %" in page and "Unanswered" in page
    assert "UNANSWERED" in (work / "log.txt").read_text("utf-8"), "told while it runs, too"

    lines = list(read_jsonl(work / "rollouts" / "rewards.jsonl"))
    assert len(lines) == STEPS * 16 and all(line["all_zero"] for line in lines)
    for line in lines:
        unanswered = any((line[s] or {}).get("failure") for s in ("stage_a", "stage_b"))
        assert not unanswered or line["left_out"]
        assert line["scale"] == (1.0 if line["left_out"] else 0.1)
        paid = line["status"] == "supported_answer" and not line["left_out"]
        assert (line["reward"] > 0) == paid and line["reward"] in (0, 0.1, 0.2)
    first = [line for line in lines if line["step"] == 1]
    assert any(line["reward"] > 0 for line in first) and not any(x["left_out"] for x in first)
    last = [line for line in lines if line["step"] == STEPS and line["skip"] != Skip.NO_EVIDENCE]
    assert last and all(line["left_out"] for line in last)

    kept = [p for p in work.rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()]
    assert not kept and SECRET not in done.stdout + done.stderr


def test_a_run_stops_where_it_shall_and_goes_on_from_there(place, questions, tmp_path):
    """The endpoint dies in the second step; then the same command finds it again."""
    work = tmp_path / "run"
    teacher = Teacher(work, faulty=False)
    with teacher.serving() as url:
        arguments = place.arguments(
            work,
            *flags(questions, url, "--config.teacher.most_unanswered=0.5"),
            "--config.schedule.solver_steps=2",
            config="configs/eviback.py:atlas",
        )
        done = place.run(arguments)
    assert done.returncode == cli.EXIT_USER, done.stderr[-2000:]
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("zest_jax: ")]
    assert "left more than 50% of the conversations unanswered" in sentence
    assert "unreachable" in sentence and "Traceback" not in done.stderr
    assert not (work / "report.json").exists()

    with api(verdict, port=int(url.split(":")[2].split("/")[0])):
        done = place.run(arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "resumed at step 1" in (work / "log.txt").read_text("utf-8")
    told = json.loads((work / "report.json").read_text("utf-8"))["teacher"]
    assert told["unanswered_share"] == 0 and told["failure"] == {}
    lines = list(read_jsonl(work / "rollouts" / "rewards.jsonl"))
    assert [line["step"] for line in lines] == [1] * 16 + [2] * 16
