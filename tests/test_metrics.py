"""Metrics: lines and TensorBoard events through resumes, numbers that are none, seconds."""

import io
import json
import time

import numpy as np
import pytest

from zest_jax import metrics as metrics_lib
from zest_jax import progress as progress_lib
from zest_jax.errors import UserError
from zest_jax.metrics import MetricsWriter, NonFiniteError, Stopwatch
from zest_jax.progress import Progress
from zest_jax.workdir import Workdir


@pytest.fixture
def workdir(tmp_path):
    with Workdir(tmp_path) as workdir:
        yield workdir


def test_records(workdir):
    with MetricsWriter(workdir) as writer:
        writer.write(0, "eval", {"eval/em": np.float32(0.5)})
        record = writer.write(1, "solver", {"solver/reward": 1, "solver/em_hop3": float("nan")})
        # On disk before close: a kill may come.
        lines = workdir.metrics_jsonl.read_text().splitlines()
    assert json.loads(lines[1]) == record
    assert record["step"] == 1 and record["phase"] == "solver"
    assert record["solver/reward"] == 1.0 and record["solver/em_hop3"] is None
    assert list(workdir.tensorboard.glob("events.out.tfevents.*"))


@pytest.mark.parametrize("key", ["solver/loss", "a/format_loss", "solver/grad_norm", "a/kl", "kl"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_guarded_metric_that_is_no_number_stops_the_run(workdir, key, value):
    with MetricsWriter(workdir) as writer:
        with pytest.raises(NonFiniteError, match=f"step 7, phase solver: {key} = "):
            writer.write(7, "solver", {key: value, "solver/reward": 0.5})
    (record,) = metrics_lib.read_metrics(workdir.metrics_jsonl)
    assert record[key] is None and record["solver/reward"] == 0.5


def test_a_count_of_what_was_not_finite_stops_the_run_where_there_is_any(workdir):
    with MetricsWriter(workdir) as writer:
        writer.write(1, "solver", {"solver/not_finite_logp": 0.0, "solver/em_hop2": np.nan})
        with pytest.raises(
            NonFiniteError, match="step 2, phase solver: solver/not_finite_logp = 3"
        ):
            writer.write(2, "solver", {"solver/not_finite_logp": 3.0, "solver/loss": 0.5})
    assert [r["step"] for r in metrics_lib.read_metrics(workdir.metrics_jsonl)] == [1, 2]


def test_resume_drops_later_steps(workdir):
    with MetricsWriter(workdir) as writer:
        for step in range(5):
            writer.write(step, "solver", {"solver/reward": step})
    with open(workdir.metrics_jsonl, "a") as file:
        file.write('{"step": 5, "ph')
    with MetricsWriter(workdir, resume_step=2) as writer:
        writer.write(3, "solver", {"solver/reward": 30})
        writer.write(3, "solver", {"solver/reward": 31})
        writer.write(3, "eval", {"eval/em": 1})
    records = metrics_lib.read_metrics(workdir.metrics_jsonl)
    assert [(r["step"], r["phase"]) for r in records] == [
        (0, "solver"),
        (1, "solver"),
        (2, "solver"),
        (3, "solver"),
        (3, "eval"),
    ]
    assert records[3]["solver/reward"] == 31
    with MetricsWriter(workdir):
        assert workdir.metrics_jsonl.read_text() == ""


def test_resume_drops_what_came_after_the_checkpoint_at_its_step(workdir):
    with MetricsWriter(workdir) as writer:
        writer.write(1, "solver", {"solver/reward": 1})
        count = writer.count
        writer.write(1, "eval", {"eval/em": 1})
    for _ in range(2):
        with MetricsWriter(workdir, resume_step=1, resume_count=count) as writer:
            writer.write(1, "eval", {"eval/em": 1})
            assert writer.count == 2
    lines = workdir.metrics_jsonl.read_text().splitlines()
    assert [json.loads(line)["phase"] for line in lines] == ["solver", "eval"]


def test_records_from_before_the_checkpoint_are_missed(workdir):
    with MetricsWriter(workdir) as writer:
        for step in (1, 2, 3):
            writer.write(step, "solver", {"solver/reward": 1})
    whole = workdir.metrics_jsonl.read_bytes()
    workdir.metrics_jsonl.write_bytes(whole[:-9])
    with pytest.raises(UserError, match="holds 2 of the 3 records"):
        MetricsWriter(workdir, resume_step=3, resume_count=3)
    assert workdir.metrics_jsonl.read_bytes() == whole[:-9]


def test_tensorboard_is_told_to_purge(workdir):
    with MetricsWriter(workdir) as writer:
        writer.write(0, "solver", {"solver/reward": 0})
    first = set(workdir.tensorboard.iterdir())
    time.sleep(1.1)  # The file's name carries the second.
    with MetricsWriter(workdir, resume_step=2) as writer:
        writer.write(3, "solver", {"solver/reward": 0})
    (second,) = set(workdir.tensorboard.iterdir()) - first
    from tensorboardX.proto.event_pb2 import Event

    events = list(_events(second.read_bytes(), Event))
    assert any(e.session_log.status == 1 and e.step == 3 for e in events)  # 1: START
    assert any(v.tag == "solver/reward" for e in events for v in e.summary.value)


def _events(data, event_type):
    """TFRecord: length (8 bytes), checksum (4), payload, checksum (4)."""
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        yield event_type.FromString(data[at + 12 : at + 12 + size])
        at += size + 16


def test_stopwatch_counts_own_seconds_and_goes_on(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics_lib.time, "perf_counter", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    watch = Stopwatch({"solver": 10.0})
    wait(5)  # Belongs to no phase.
    with watch("solver"):
        wait(1)
        with watch("eval"):
            wait(2)
        wait(3)
        assert watch.seconds == {"solver": 14.0, "eval": 2.0}
    with pytest.raises(ValueError), watch("eval"):
        wait(4)
        raise ValueError
    assert watch.seconds == {"solver": 14.0, "eval": 6.0}
    assert Stopwatch(watch.seconds).seconds == {"solver": 14.0, "eval": 6.0}


def test_plain_progress_where_there_is_no_terminal(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_lib.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    with Progress(log=tmp_path / "log.txt", stream=stream) as progress:
        progress.say("device: [cpu]")
        with progress.phase("solver", total=10, done=2) as bar:
            assert bar.seconds_left() == float("inf")
            for _ in range(5):
                now[0] += 6
                bar.advance(reward=0.12345, note="x")
    assert stream.getvalue().splitlines() == [
        "device: [cpu]",
        "solver 4/10 · 0:36 left · reward 0.123 · note x",
        "solver 6/10 · 0:24 left · reward 0.123 · note x",
        "solver 7/10 · took 0:30 · reward 0.123 · note x",
    ]
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert len(log) == 4 and log[0].endswith(" device: [cpu]")


def test_bars_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with Progress(stream=stream) as progress:
        with progress.phase("solver", total=2) as bar:
            bar.advance(reward=0.5)
            bar.advance(reward=0.75)
    assert "solver 2/2 · took 0:00 · reward 0.75" in stream.getvalue()


def test_clock():
    told = [progress_lib.clock(s) for s in (0, 7.4, 59.6, 750, 11_100, float("inf"))]
    assert told == ["0:00", "0:07", "1:00", "12:30", "3:05:00", "?"]
