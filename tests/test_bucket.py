"""A workdir in a bucket: what is copied, what is brought back, and a run that goes on from it."""

import pytest

from zest_jax import bucket
from zest_jax.bucket import Mirror
from zest_jax.errors import UserError


@pytest.fixture
def address(tmp_path, monkeypatch):
    """A bucket that is a folder: epath takes it as it is."""
    monkeypatch.setattr(bucket, "to_path", lambda text: tmp_path / "bucket" / text[len("gs://") :])
    return "gs://b/run"


def test_what_changed_is_copied_and_what_is_gone_removed(tmp_path, address):
    local, there = tmp_path / "local", tmp_path / "bucket" / "b" / "run"
    (local / "tasks").mkdir(parents=True)
    (local / "metrics.jsonl").write_text("one\n")
    (local / "tasks" / "iteration_0.jsonl").write_text("task\n")
    (local / ".lock").write_text("1")
    mirror = Mirror(address, local)
    mirror.push()
    assert sorted(p.name for p in there.rglob("*") if p.is_file()) == [
        "iteration_0.jsonl",
        "metrics.jsonl",
    ]
    before = (there / "tasks" / "iteration_0.jsonl").stat().st_mtime_ns
    with (local / "metrics.jsonl").open("a") as file:
        file.write("two\n")
    mirror.push()
    assert (there / "metrics.jsonl").read_text() == "one\ntwo\n"
    assert (there / "tasks" / "iteration_0.jsonl").stat().st_mtime_ns == before
    (local / "tasks" / "iteration_0.jsonl").unlink()
    mirror.push()
    assert not (there / "tasks" / "iteration_0.jsonl").exists()


def test_another_machine_finds_everything_but_checkpoints(tmp_path, address):
    there = tmp_path / "bucket" / "b" / "run"
    (there / "checkpoints" / "3").mkdir(parents=True)
    (there / "checkpoints" / "3" / "large").write_text("x")
    (there / "not_finite" / "state").mkdir(parents=True)
    (there / "not_finite" / "state" / "large").write_text("x")
    (there / "not_finite" / "what.json").write_text("{}")
    (there / "config.json").write_text("{}")
    local = tmp_path / "fresh"
    mirror = Mirror(address, local)
    found = sorted(str(p.relative_to(local)) for p in local.rglob("*") if p.is_file())
    assert found == ["config.json", "not_finite/what.json"]
    assert mirror.checkpoints == there / "checkpoints"
    mirror.push()  # and leaves alone what it did not bring
    assert (there / "checkpoints" / "3" / "large").exists()


def test_a_bucket_that_cannot_be_written(tmp_path, address):
    local = tmp_path / "local"
    local.mkdir()
    (local / "a").write_text("a")
    mirror = Mirror(address, local)
    (tmp_path / "bucket").write_text("no folder")
    with pytest.raises(UserError, match="cannot be written"):
        mirror.push()


def test_no_such_kind(tmp_path):
    with pytest.raises(UserError, match="no such kind of bucket"):
        Mirror("ftp://b/run", tmp_path)
