"""A whole tiny run: what it leaves, that sampler and trainer agree, that nothing compiles twice."""

import json
import math
import re
import shutil
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

from zest_jax.config import config_hash
from zest_jax.learning.advantages import HRPO
from zest_jax.models.hf import load_pretrained, save_pretrained
from zest_jax.players import policy_folder
from zest_jax.report import REQUIRED
from zest_jax.tasks.types import read_tasks
from zest_jax.traces import text_of
from zest_jax.workdir import read_jsonl

pytestmark = pytest.mark.slow

STEPS = {"warm_start": 2, "proposer": 2, "solver": 3}  # of tiny_config, per iteration


@pytest.fixture(scope="module")
def records(finished_run):
    return list(read_jsonl(finished_run / "metrics.jsonl"))


@pytest.fixture(scope="module")
def report(finished_run):
    return json.loads((finished_run / "report.json").read_text("utf-8"))


def test_the_report_has_its_numbers(finished_run, report):
    for path in REQUIRED:
        value = report
        for part in path.split("."):
            value = value[part]
        assert value is not None, path
    heldout = report["heldout"]
    for when in ("before", "after"):
        assert 0 <= heldout[when]["em"] <= 1 and heldout[when]["count"] == tiny_run.HELDOUT
        assert heldout[when]["by_hop"].keys() == {"1", "2", "3"}
        assert 0 <= heldout[when]["em_sampled"] <= 1
    low, high = heldout["gain_ci95"]
    assert low <= heldout["gain"] <= high
    assert heldout["gain"] == pytest.approx(heldout["after"]["em"] - heldout["before"]["em"])
    assert report["warnings"] == []
    assert report["config_hash"] == config_hash(
        json.loads((finished_run / "config.json").read_text("utf-8"))
    )
    assert {"warm_start", "proposer", "generation", "solver", "evaluation", "checkpoint"} <= report[
        "wall_seconds"
    ].keys()
    # What was measured adds up to what it took.
    whole = report["seconds_of_this_start"]
    assert 0.9 * whole < sum(report["wall_seconds"].values()) < 1.01 * whole


def test_no_step_was_traced_twice(report):
    assert report["retraces"] == 0
    assert report["traces"] == dict.fromkeys(report["traces"], 1)
    assert {"solver_update", "proposer_update", "cloning_update", "solver_rollout"} <= report[
        "traces"
    ].keys()


def test_the_page_stands_alone(finished_run):
    page = (finished_run / "report.html").read_text("utf-8")
    assert "<svg" in page and "KL to the sampling policy" in page
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?!#|data:)\w""", page)
    assert "@import" not in page and not re.search(r"url\((?!#|data:)", page)


def test_everything_is_left_in_the_workdir(finished_run):
    names = {path.name for path in finished_run.iterdir()}
    assert names == {
        "config.json", "metrics.jsonl", "tensorboard", "checkpoints", "tasks", "rollouts",
        "evaluation", "report.json", "report.html", "log.txt", ".lock", "memory.txt",
    }  # fmt: skip
    for iteration in range(2):
        tasks = list(read_tasks(finished_run / "tasks" / f"iteration_{iteration}.jsonl"))
        assert 4 <= len(tasks) <= 8
        assert {task.iteration for task in tasks} == {iteration}
        assert all(task.question and task.answers and task.evidence for task in tasks)
    for iteration in range(3):
        path = finished_run / "evaluation" / f"iteration_{iteration}.jsonl"
        answered = list(read_jsonl(path))
        assert [a["mode"] for a in answered] == ["greedy"] * 12 + ["sampled"] * 12
    proposals = list(read_jsonl(finished_run / "rollouts" / "proposals.jsonl"))
    episodes = list(read_jsonl(finished_run / "rollouts" / "episodes.jsonl"))
    assert {p["step"] for p in proposals} == {3, 4, 8, 9}
    assert {e["step"] for e in episodes} == {5, 6, 7, 10, 11, 12}
    assert all("<answer>" in text_of(p) for p in proposals if p["answer"])
    events = b"".join(path.read_bytes() for path in (finished_run / "tensorboard").iterdir())
    assert b"solver/reward" in events and b"eval/em" in events
    # No bar's control characters where there is no terminal.
    assert "\x1b" not in (finished_run / "log.txt").read_text("utf-8")


def test_every_update_has_its_record(records):
    steps = [(r["step"], r["phase"]) for r in records if r["phase"] in STEPS]
    expected = ["warm_start"] * 2 + (["proposer"] * 2 + ["solver"] * 3) * 2
    assert steps == [(n + 1, phase) for n, phase in enumerate(expected)]
    others = [(r["step"], r["phase"]) for r in records if r["phase"] not in STEPS]
    assert others == [(2, "eval"), (4, "generate"), (7, "eval"), (9, "generate"), (12, "eval")]
    for record in records:
        if record["phase"] in ("proposer", "solver"):
            assert any(key.endswith("/reward") for key in record)


def test_every_update_says_how_long_it_took_and_its_episodes_were(records):
    updates = [r for r in records if r["phase"] in STEPS]
    for record in updates:
        parts = record["time/rollout"] + record["time/update"]
        assert 0 < record["time/update"] <= parts <= record["time/step"]
        assert record["guards/warnings"] == 0  # fewer steps than a warning looks back on
    # Each program is compiled in the first step that needs it, and in no later one.
    for role in ("solver", "proposer"):
        first, *others = [r["time/compile"] for r in updates if r["phase"] == role]
        assert first > 0 and others == [0] * len(others)
    assert all(r["solver/length"] > 3 for r in updates if r["phase"] == "solver")


def test_sampler_and_trainer_agree(records):
    """At the first update of a phase the policy is the one that sampled: KL 0, ratios 1."""
    for role in ("solver", "proposer"):
        of_role = [r for r in records if r["phase"] == role]
        firsts = of_role[:: STEPS[role]]
        assert len(firsts) == 2
        for record in firsts:
            assert abs(record[f"{role}/kl"]) < 1e-6
            assert 1 <= record[f"{role}/exp_abs_delta"] < 1.001
        # Every later step samples anew, so the same holds there.
        for record in of_role:
            assert abs(record.get(f"{role}/kl", 0.0)) < 1e-6


def _advantages(workdir, step: int, order: Callable[[int], np.ndarray]) -> tuple[list, np.ndarray]:
    """Logged advantages of a proposer step, and those that follow from its logged rewards."""
    lines = [
        line
        for line in read_jsonl(workdir / "rollouts" / "proposals.jsonl")
        if line["step"] == step
    ]
    assert len(lines) == 6  # all proposals of the step
    reward_B = jnp.array([line["reward"] for line in lines], jnp.float32)
    hops_B = jnp.array([line["hops"] for line in lines], jnp.int32)
    logged = [line["advantage"] for line in lines]
    return logged, np.asarray(HRPO(reward_B[order(len(lines))], hops_B))


def test_the_control_pays_the_wrong_proposals(place, finished_run, tmp_path):
    config = f"{tiny_run.CONFIG}:control"
    workdir = tmp_path / "control"
    more = ("--config.warm_start.steps=0", "--config.schedule.iterations=1")
    done = place.run(place.arguments(workdir, *more, config=config))
    assert done.returncode == 0, done.stderr
    moved = 0
    for step in (1, 2):
        at = [0, *b"shuffle", step - 1]
        logged, expected = _advantages(
            workdir, step, lambda n, at=at: np.random.default_rng(at).permutation(n)
        )
        np.testing.assert_allclose(logged, expected, atol=1e-5)
        moved += not np.allclose(logged, _advantages(workdir, step, np.arange)[1], atol=1e-3)
    assert moved
    for step in (3, 4):  # a run that is no control pays whom it should
        logged, expected = _advantages(finished_run, step, np.arange)
        np.testing.assert_allclose(logged, expected, atol=1e-5)


def test_a_loss_that_is_no_number_stops_the_run_and_can_be_replayed(place, finished_run, tmp_path):
    folder = tmp_path / "broken"
    source = json.loads((finished_run / "config.json").read_text("utf-8"))["policy"]["folder"]
    policy, params = load_pretrained(policy_folder(source))
    blocks = params["blocks"]
    params["blocks"] = blocks | {"down_FD": blocks["down_FD"].at[2, 5, 3].set(jnp.nan)}
    save_pretrained(policy, jax.device_get(params), folder)
    for path in (finished_run.parent / "world" / "tokenizer").iterdir():
        shutil.copy(path, folder)
    workdir = tmp_path / "run"
    more = (f"--config.policy.folder={folder}", "--config.warm_start.steps=0")
    done = place.run(place.arguments(workdir, *more))
    assert done.returncode == 1
    assert "NonFiniteError: step 1, phase proposer: " in done.stderr
    assert "proposer/loss = nan" in done.stderr and "zest_jax.replay" in done.stderr
    # The update is in no checkpoint, and its record says which metrics were no numbers.
    # (1 and 2: before and after the first evaluation.)
    assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["1", "2"]
    last = list(read_jsonl(workdir / "metrics.jsonl"))[-1]
    assert last["step"] == 1 and last["proposer/loss"] is None
    assert last["proposer/not_finite_logp"] > 0
    assert not math.isnan(last["proposer/valid"])
    assert not (workdir / "report.json").exists()

    dump = tmp_path / "found.json"
    done = place.run([f"--workdir={workdir}", f"--dump={dump}"], program="replay")
    assert done.returncode == 0, done.stderr
    assert "not finite before the update, first blocks/down_FD, layer 2 (1 of" in done.stdout
    found = json.loads(dump.read_text("utf-8"))
    broken = {(x["where"], x["leaf"], x["layer"]) for x in found["weights"] if x["not_finite"]}
    assert broken == {(w, "blocks/down_FD", 2) for w in ("proposer's weights", "anchor")}
    assert found["metrics"]["loss"] == "nan" and found["what"]["role"] == "proposer"
    lost = {row["rollout"] for row in found["rows"] if row["loss"] == "nan"}
    assert lost == set(range(6))  # every proposal of the step


def test_the_memory_plan_is_left_and_told(finished_run):
    plan = (finished_run / "memory.txt").read_text("utf-8")
    for part in ("solver: moments (float32)", "solver update", "solver rollouts", "KV cache"):
        assert part in plan
    log = (finished_run / "log.txt").read_text("utf-8")
    assert "attention: xla (there is no kernel for cpu); over the cache: xla (" in log
    assert "; memory: " in log
