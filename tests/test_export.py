"""A run's weights as a Hugging Face folder, and back."""

import shutil

import jax
import numpy as np
import pytest
from test_resume import arrays

from zest_jax import cli, export
from zest_jax.models.hf import load_pretrained

pytestmark = pytest.mark.slow


def run(*arguments: str) -> int:
    return export.entry(["export", *arguments])


@pytest.mark.parametrize("role", export.ROLES)
def test_weights_come_back_bit_for_bit(finished_run, tmp_path, role):
    before = sorted(str(path) for path in finished_run.rglob("*"))
    step = export.export(str(finished_run), role, str(tmp_path))
    assert before == sorted(str(path) for path in finished_run.rglob("*"))  # only reads
    state, host = arrays(finished_run)
    assert step == host["step"]
    _, params = load_pretrained(tmp_path)
    prefix = "['anchor']" if role == "anchor" else f"['{role}'].params"
    stored = {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}
    leaves = jax.tree_util.tree_leaves_with_path(params)
    assert len(leaves) == len(stored)
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(np.asarray(leaf), stored[name], err_msg=name, strict=True)


def test_an_exported_policy_starts_a_run(place, finished_run, tmp_path):
    assert run(f"--workdir={finished_run}", f"--out={tmp_path}/policy") == 0
    more = (f"--config.policy.folder={tmp_path}/policy", "--config.schedule.iterations=0")
    done = place.run(place.arguments(tmp_path / "run", *more))
    assert done.returncode == 0, done.stderr
    assert f"from {tmp_path}/policy" in done.stderr


def test_mistakes(finished_run, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    young = tmp_path / "young"
    shutil.copytree(finished_run, young, ignore=shutil.ignore_patterns("checkpoints"))
    out = f"--out={tmp_path}/out"
    for arguments, words in [
        ([f"--workdir={finished_run}"], "no folder is given"),
        ([f"--workdir={finished_run}", out, "--role=judge"], "role is one of solver, proposer"),
        ([f"--workdir={finished_run}", out, "--dtype=float8"], "float32 or bfloat16"),
        ([f"--workdir={empty}", out], "has no config.json"),
        ([f"--workdir={tmp_path}/nowhere", out], "nowhere"),
        ([f"--workdir={young}", out], "has no checkpoint yet"),
        ([out], "no workdir is given"),
    ]:
        assert run(*arguments) == cli.EXIT_USER
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1
    assert not (tmp_path / "nowhere").exists() and not list(empty.iterdir())
    assert not (tmp_path / "out").exists()
