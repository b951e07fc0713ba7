"""Checkpoints that are not what was saved: noticed, said, and the one before used."""

import asyncio
import gc
import json
import logging
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from zest_jax import cli
from zest_jax.checkpoint import CheckpointError, Checkpoints
from zest_jax.checksums import checksums
from zest_jax.errors import Stopped, UserError


def state_of(value: float) -> dict:
    return {"weights": jnp.arange(64.0).reshape(8, 8) + value, "step": jnp.int32(value)}


def make(folder, count=2) -> None:
    with Checkpoints(folder, keep=9) as checkpoints:
        for number in range(1, count + 1):
            checkpoints.save(number, state_of(number), {"step": number})


def restore(folder) -> tuple[int, list[str]]:
    """Which checkpoint is gone on from, and what is said."""
    told: list[str] = []
    with Checkpoints(folder, keep=9, say=told.append) as checkpoints:
        number, state, host = checkpoints.restore(state_of(0))
        assert host == {"step": number}
        np.testing.assert_array_equal(state["weights"], state_of(number)["weights"])
        # The number is free again, whatever stood there.
        checkpoints.save(number + 1, state_of(number + 1), {"step": number + 1})
    return number, told


def garble(path) -> None:
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 8] = b"\xff" * len(data[middle : middle + 8])
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["cut", "gone", "garbled"])
def test_any_file_may_be_hurt(tmp_path, how):
    make(tmp_path / "whole")
    files = [p for p in sorted((tmp_path / "whole" / "2").rglob("*")) if p.is_file()]
    assert len(files) > 4
    hurt = {
        "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        "gone": lambda path: path.unlink(),
        "garbled": garble,
    }[how]
    noticed = 0
    for place, path in enumerate(files):
        folder = tmp_path / str(place)
        shutil.copytree(tmp_path / "whole", folder)
        hurt(folder / path.relative_to(tmp_path / "whole"))
        number, told = restore(folder)
        if number == 1:
            noticed += 1
            assert len(told) == 1 and told[0].startswith("checkpoint 2 is damaged (")
            assert told[0].endswith("; going on from checkpoint 1")
            assert (folder / "damaged-2").is_dir()
        else:  # of a file that nothing was read from: the numbers were compared
            assert number == 2 and not told
    assert noticed >= 2


def test_one_wrong_number_in_an_array(tmp_path, monkeypatch):
    make(tmp_path)
    real = checksums

    def other(tree):
        return real(tree) | {"['step']": 7}

    with monkeypatch.context() as patch:
        patch.setattr("zest_jax.checkpoint.checksums", other)
        with Checkpoints(tmp_path, keep=9) as checkpoints:
            checkpoints.save(3, state_of(3), {"step": 3})
    number, told = restore(tmp_path)
    assert number == 2
    assert told == [
        "checkpoint 3 is damaged (array ['step'] is not what was saved); going on from checkpoint 2"
    ]


def test_none_is_good(tmp_path):
    make(tmp_path)
    for number in (1, 2):
        path = tmp_path / str(number) / "host" / "metadata"
        noted = json.loads(path.read_text())
        noted["host"]["step"] = 99
        path.write_text(json.dumps(noted))
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(UserError) as error:
            checkpoints.restore(state_of(0))
    for word in (str(tmp_path), "checkpoint 2 is damaged", "checkpoint 1", "another workdir"):
        assert word in str(error.value)
    # Nothing is moved: another version may read them.
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


def test_a_reader_changes_nothing(tmp_path):
    make(tmp_path)
    next((tmp_path / "2" / "host").iterdir()).unlink()
    (tmp_path / "3.orbax-checkpoint-tmp").mkdir()  # the run goes on
    before = sorted(tmp_path.rglob("*"))
    told: list[str] = []
    with Checkpoints(tmp_path, keep=None, say=told.append) as checkpoints:
        assert checkpoints.steps() == {1: 1} and len(told) == 1
        assert checkpoints.restore(state_of(0))[0] == 1
        with pytest.raises(UserError, match="choose another"):
            checkpoints.restore(state_of(0), 2)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_larger_state_than_the_device_is_no_damage(tmp_path, monkeypatch):
    make(tmp_path)

    def full(tree):
        raise ValueError("RESOURCE_EXHAUSTED: no memory")

    with Checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(checkpoints._reader, "restore", full)
        monkeypatch.setattr(checkpoints, "_read_host", lambda number: {})
        with pytest.raises(Exception, match="full|RESOURCE"):
            checkpoints.restore(state_of(0))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Stopped])
def test_what_interrupts_a_read_is_no_damage(tmp_path, monkeypatch, kind):
    make(tmp_path)
    interrupt = kind() if kind is KeyboardInterrupt else kind("stopped", 0)

    def restore(*_, **__):
        try:
            raise interrupt
        except BaseException as error:
            raise Exception("Encountered error while reading") from error  # as orbax does

    with Checkpoints(tmp_path) as checkpoints:
        with monkeypatch.context() as patch, pytest.raises(kind):
            patch.setattr(checkpoints._reader, "restore", restore)
            checkpoints.restore(state_of(0))
        assert checkpoints.restore(state_of(0))[0] == 2


def test_tasks_that_fail_beside_the_first_are_not_told_of(tmp_path, caplog):
    Checkpoints(tmp_path).close()  # from here on

    async def fails(said):
        raise ValueError(said)

    async def reads(_):
        ocp.JsonCheckpointHandler().restore(epath.Path("/nowhere"))  # raises there

    async def all_three():
        for work, said in (
            (fails, 'Failed to write: File too large [tensorstore_spec="…"]'),
            (fails, "another's"),
            (reads, "no such file"),
        ):
            asyncio.ensure_future(work(said))
        await asyncio.sleep(0)

    with caplog.at_level(logging.ERROR, logger="asyncio"):  # a program that has ended silences it
        asyncio.run(all_three())
        gc.collect()
    told = [r for r in caplog.records if r.name == "asyncio" and r.levelno >= logging.ERROR]
    assert len(told) == 1 and "another's" in caplog.text and "too large" not in caplog.text


def test_a_failed_write_is_raised_later_and_says_why(tmp_path):
    large = {"x": jax.random.bits(jax.random.key(0), (1 << 20,))}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, large, {})
        checkpoints.wait()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
            with pytest.raises(CheckpointError, match="checkpoint 2 could not be") as error:
                checkpoints.save(2, large, {})
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert cli.explain(error.value)[0] == cli.EXIT_DISK
        assert checkpoints.restore(large)[0] == 1
        checkpoints.save(2, large, {})
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(large)[0] == 2


def test_donated_right_after_a_save(tmp_path):
    """The next update may write over the arrays while they are still being written."""
    start = jnp.zeros((1024, 1024))
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = {"x": step(start)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        for _ in range(3):
            state = {"x": step(state["x"])}
        jax.block_until_ready(state)
        checkpoints.wait()
        _, restored, _ = checkpoints.restore({"x": start})
    assert float(state["x"][0, 0]) == 4
    np.testing.assert_array_equal(restored["x"], np.ones((1024, 1024)))


def test_the_best_is_kept_however_old(tmp_path):
    scores = {1: 0.1, 2: 0.5, 3: None, 4: 0.3, 5: None, 6: None}
    for number, score in scores.items():  # each by a start of its own
        with Checkpoints(tmp_path, keep=2, keep_best=True) as checkpoints:
            checkpoints.save(number, state_of(number), {"step": number}, score)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "5", "6"]
    with Checkpoints(tmp_path, keep=1, keep_best=False) as checkpoints:
        checkpoints.save(7, state_of(7), {"step": 7})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["7"]


@pytest.mark.parametrize("text", ['"x"', '{"item_handlers": 3}', ""])
def test_notes_of_orbaxs_own_do_not_matter(tmp_path, text):
    make(tmp_path)
    for number in (1, 2):
        (tmp_path / str(number) / "_CHECKPOINT_METADATA").write_text(text)
    assert restore(tmp_path) == (2, [])
    # Not either where another one is moved aside.
    (tmp_path / "2" / "_CHECKPOINT_METADATA").write_text(text)
    garble(tmp_path / "3" / "host" / "metadata")
    number, told = restore(tmp_path)
    assert number == 2 and len(told) == 1 and "checkpoint 3 is damaged" in told[0]
