"""The fault campaign's own judging: it must notice what it is there for."""

import json
import random
import shutil
from pathlib import Path

import pytest
from faults import damage, judging
from faults.campaign import SHARES, Fault, plan, table

STEPS = 4
PHASES = ("proposer", "proposer", "solver", "solver")


def write_lines(path: Path, records) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")


def checkpoint(workdir: Path, number: int, **host) -> Path:
    folder = workdir / "checkpoints" / str(number) / "host"
    folder.mkdir(parents=True)
    state = {"step": 0, "phase": 0, "phase_step": 0, "records": 0, "evaluated": "", "seconds": {}}
    noted = {"host": state | host, "score": None, "sums": {"['w']": 17}}
    (folder / "metadata").write_text(json.dumps(noted))
    return folder / "metadata"


@pytest.fixture
def unhurt(tmp_path):
    """What a finished run leaves, as far as it is looked at."""
    workdir = tmp_path / "unhurt"
    records = [
        {"step": n, "phase": phase, "time": 5.0, "time/step": 0.1, f"{phase}/loss": n / 8}
        for n, phase in enumerate(PHASES, 1)
    ]
    records.insert(2, {"step": 2, "phase": "generate", "time": 5.0, "generate/tasks": 4})
    write_lines(workdir / "metrics.jsonl", records)
    write_lines(workdir / "tasks" / "iteration_0.jsonl", [{"id": "t1"}])
    write_lines(workdir / "evaluation" / "iteration_0.jsonl", [{"em": 1}, {"em": 0}])
    write_lines(workdir / "rollouts" / "episodes.jsonl", [{"step": 1, "text": "…"}])
    (workdir / "report.json").write_text(json.dumps({"heldout": 0.5, "wall_seconds": {"a": 1}}))
    checkpoint(workdir, 7, step=4)
    return workdir


@pytest.fixture
def run(unhurt, tmp_path):
    return Path(shutil.copytree(unhurt, tmp_path / "run"))


def change(workdir: Path, edit) -> None:
    path = workdir / "metrics.jsonl"
    records = judging.lines(path)
    edit(records)
    write_lines(path, records)


def test_the_same_run_is_no_problem(run, unhurt):
    change(run, lambda records: [r.update({"time": 9.0, "time/step": 3.0}) for r in records])
    (run / "report.json").write_text(json.dumps({"heldout": 0.5, "wall_seconds": {"a": 2}}))
    (run / "tasks" / ".iteration_0.jsonl.x").write_text("half")
    assert judging.end_problems(run, unhurt) == []


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        (lambda records: records.insert(1, dict(records[1])), "repeated steps [2]"),
        (lambda records: records.pop(1), "missing steps [2]"),
        (lambda records: records.append({"step": 9, "phase": "solver"}), "unknown steps [9]"),
        (lambda records: records.reverse(), "out of order"),
        (lambda records: records.insert(2, dict(records[2])), "told twice"),
        (lambda records: records.pop(2), "4 metric records, not 5"),
        (lambda records: records[3].update({"solver/loss": 0.376}), "solver/loss is 0.376, not"),
        (lambda records: records[3].update({"solver/kl": 0.0}), "solver/kl is 0.0, not None"),
    ],
)
def test_metrics_that_are_not_those_of_the_unhurt_run(run, unhurt, edit, word):
    change(run, edit)
    problems = judging.end_problems(run, unhurt)
    assert any(word in problem for problem in problems), problems


def test_other_numbers_elsewhere(run, unhurt):
    (run / "report.json").write_text(json.dumps({"heldout": 0.6}))
    write_lines(run / "tasks" / "iteration_0.jsonl", [{"id": "t2"}])
    (run / "evaluation" / "iteration_0.jsonl").unlink()
    metadata = run / "checkpoints" / "7" / "host" / "metadata"
    metadata.write_text(metadata.read_text().replace("17", "18"))
    assert judging.end_problems(run, unhurt) == [
        "report.json differs",
        "evaluation/iteration_0.jsonl is there in one of the two only",
        "tasks/iteration_0.jsonl differs",
        "the arrays of the last checkpoint differ",
    ]
    (run / "report.json").unlink()
    assert judging.end_problems(run, unhurt) == ["there is no report"]


def test_a_tolerance_is_one(run, unhurt):
    change(run, lambda records: records[3].update({"solver/loss": 0.375 + 1e-5}))
    assert judging.end_problems(run, unhurt, tolerance=1e-3) == []
    assert judging.end_problems(run, unhurt, tolerance=1e-6) != []


def test_which_checkpoint_was_gone_on_from(tmp_path):
    for number, step in ((1, 0), (2, 1), (3, 2)):
        checkpoint(tmp_path, number, step=step)
    before = judging.standing(tmp_path, heldout=2)
    assert (before.newest, before.saved) == (3, 2)
    assert judging.resume_problems(before, "resumed at step 2") == []
    assert judging.resume_problems(before, "starting") == []
    fell = "checkpoint 3 is damaged (x); going on from checkpoint 2\nresumed at step 1"
    assert judging.resume_problems(before, fell, frozenset({3})) == []
    (wrong,) = judging.resume_problems(before, fell)
    assert wrong == "checkpoint 3 was called damaged and is not"
    (wrong,) = judging.resume_problems(before, "resumed at step 1")
    assert wrong == "resumed at step 1; checkpoint 3 is of step 2"
    far = "checkpoint 3 is damaged (x); going on from checkpoint 1\nresumed at step 0"
    (wrong,) = judging.resume_problems(before, far, frozenset({3}))
    assert wrong == "checkpoints [2] were passed over in silence"


def test_finished_work_that_is_lost_or_done_again(unhurt, tmp_path):
    now = judging.standing(unhurt, heldout=1)
    assert now.finished == 4 and judging.lost_problems(now, 0) == []
    shutil.rmtree(unhurt / "checkpoints" / "7")
    checkpoint(unhurt, 5, step=2, phase=1, phase_step=1, evaluated="_0", seconds={"evaluation": 2})
    before = judging.standing(unhurt, heldout=1)
    (lost,) = judging.lost_problems(before, 1)
    assert "2 finished steps were not in a checkpoint" in lost
    assert judging.lost_problems(before, 2) == []
    # Answers of an evaluation that was noted already, and questions of a phase that had begun.
    checkpoint(unhurt, 6, step=4, phase=1, phase_step=2, evaluated="_0", seconds={"evaluation": 3})
    write_lines(unhurt / "tasks" / "iteration_0.jsonl", [{"id": "t1"}])
    assert judging.redone_problems(before, judging.standing(unhurt, heldout=1), 5) == [
        "tasks/iteration_0.jsonl was written anew",
        "held-out questions were answered again",
    ]
    assert judging.redone_problems(before, before, 5) == []


def test_sentences():
    said = "some progress\nzest_jax: the disk is full; what was saved before is kept.\n"
    assert judging.sentence_problems(4, 4, said, "disk is full") == []
    assert judging.sentence_problems(1, 4, said) == ["exit code 1, not 4"]
    assert len(judging.sentence_problems(4, 4, said, "memory")) == 1
    traced = "Traceback (most recent call last):\n" + said
    assert judging.sentence_problems(4, 4, traced) == ["a traceback was printed"]
    assert "no sentence of ours" in judging.sentence_problems(1, 1, "Killed")[0]


def test_a_plan_has_every_kind():
    for total in (1, 100, 210, 500):
        todo = plan(total, list(SHARES))
        assert todo.keys() == SHARES.keys() and min(todo.values()) >= 1
        assert sum(todo.values()) == max(total, len(SHARES))
    assert plan(7, ["kill", "sigterm"]).keys() == {"kill", "sigterm"}


def test_a_fault_that_came_to_nothing_is_wrong():
    ended = Fault("kill", "a", numbers=True)
    stopped = Fault("bad_task_line", "a", said=True)
    other = Fault("kill", "a", numbers=False, problems=["step 2 differs"])
    silent = Fault("sigterm", "a")
    assert [fault.wrong for fault in (ended, stopped, other, silent)] == [False, False, True, True]
    _, rows = table([ended, stopped, other, silent])
    assert rows[0] == {
        **{"kind": "kill", "injected": 2, "same_numbers": 1},
        **{"right_message": 0, "wrong": 1},
    }
    assert rows[-1]["injected"] == 4 and rows[-1]["wrong"] == 2


def test_damage_changes_what_it_says(tmp_path):
    rng = random.Random(3)
    for hurt in (damage.truncate, damage.corrupt, damage.remove):
        folder = tmp_path / hurt.__name__ / "4"
        (folder / "state" / "d").mkdir(parents=True)
        for n in range(3):
            (folder / "state" / "d" / f"{n}").write_bytes(bytes(range(90)))
        before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        told = hurt(folder, rng)
        after = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        assert before != after and "4/state/d" in told
    path = tmp_path / "q.jsonl"
    path.write_text('{"id": "a"}\n' * 5)
    told, words = damage.spoil_line(path, rng)
    assert told.startswith("line ") and words[0] == "q.jsonl"
    assert path.read_bytes().count(b'{"id": "a"}') == 4
