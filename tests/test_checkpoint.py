"""Checkpoints: whole or not at all, placed as asked, and only the newest few."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zest_jax.checkpoint import Checkpoints


def state_of(value: float) -> dict:
    return {
        "solver": {"params": jnp.full((3, 2), value), "step": jnp.int32(value)},
        "anchor": jnp.full((4,), value, jnp.bfloat16),
    }


def test_save_and_restore_bit_for_bit(tmp_path):
    state = state_of(0.1)
    host = {"phase": 1, "seconds": {"solver": 0.1 + 0.2}, "word": "é"}
    with Checkpoints(tmp_path / "c") as checkpoints:
        assert checkpoints.latest is None
        with pytest.raises(ValueError, match="no checkpoint"):
            checkpoints.restore(state)
        checkpoints.save(7, state, host)
    with Checkpoints(tmp_path / "c") as checkpoints:
        step, restored, host_restored = checkpoints.restore(state_of(0.0))
    assert (step, host_restored) == (7, host)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert got.dtype == want.dtype and got.sharding == want.sharding
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_keeps_the_newest(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in range(4):
            checkpoints.save(step, state_of(step), {})
        assert checkpoints.latest == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def test_an_older_one_by_the_updates_made_before_it(tmp_path):
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        # As a run saves: the end of a phase changes the state without an update.
        for number, step in ((1, 0), (2, 5), (3, 10), (4, 10)):
            checkpoints.save(number, state_of(number), {"step": step})
        assert checkpoints.steps() == {5: 2, 10: 4}
        number, state, host = checkpoints.restore(state_of(0), 2)
    assert (number, host) == (2, {"step": 5})
    np.testing.assert_array_equal(state["solver"]["params"], 2)


def test_an_unfinished_checkpoint_is_never_restored(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(1), {"phase": 1})
        checkpoints.save(2, state_of(2), {"phase": 2})
    # As a kill leaves it: the folder under its temporary name, with part of its files.
    (tmp_path / "2" / "host" / "metadata").unlink()
    (tmp_path / "2").rename(tmp_path / "2.orbax-checkpoint-tmp")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest == 1
        step, state, host = checkpoints.restore(state_of(0))
        assert (step, host) == (1, {"phase": 1})
        np.testing.assert_array_equal(state["solver"]["params"], 1)
        checkpoints.save(2, state_of(2), {"phase": 2})
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest == 2


def test_the_same_step_is_saved_once(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(1), {"phase": 1})
        checkpoints.save(1, state_of(1), {"phase": 1})
        assert checkpoints.latest == 1


def test_what_the_run_changes_after_a_save_is_not_in_it(tmp_path, monkeypatch):
    """It is written in the background, while the run counts on in its own host state."""
    host = {"step": 1, "seconds": {"solver": 1.0}}
    with Checkpoints(tmp_path) as checkpoints:
        given = []
        save = checkpoints._manager.save

        def late(number, args, **options):
            host["step"], host["seconds"]["solver"] = 2, 2.0
            given.append(args)
            return save(number, args=args, **options)

        monkeypatch.setattr(checkpoints._manager, "save", late)
        state = {"x": jnp.zeros(3)}
        checkpoints.save(1, state, host)
        checkpoints.wait()
        _, _, restored = checkpoints.restore(state)
    assert given and restored == {"step": 1, "seconds": {"solver": 1.0}}
