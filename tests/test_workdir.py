"""A run's folder: whose it is, and what a kill or a full disk leaves in it."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zest_jax import files
from zest_jax import workdir as workdir_lib
from zest_jax.errors import UserError
from zest_jax.workdir import Workdir

ROOT = Path(__file__).resolve().parent.parent
CONFIG = {"seed": 0, "solver": {"rate": 0.1, "group": 8}, "log": {"every": 1}}


def test_claim_first_again_and_refused(tmp_path):
    with Workdir(tmp_path / "a" / "run") as workdir:
        assert workdir.claim({"seed": "mistaken"}) is False
        assert workdir.claim(CONFIG) is False  # nothing came of the first
        assert json.loads(workdir.config_json.read_text()) == CONFIG
        workdir.metrics_jsonl.touch()
        assert workdir.claim(CONFIG) is True
        other = {"seed": 1, "solver": {"rate": 0.1}, "log": {"every": 1}}
        with pytest.raises(UserError) as caught:
            workdir.claim(other)
        assert "seed: 0 there, 1 now; solver.group: 8 there, '(absent)' now" in str(caught.value)
        assert "choose another --workdir" in str(caught.value)
        assert json.loads(workdir.config_json.read_text()) == CONFIG


def test_claim_lists_five_differences(tmp_path):
    with Workdir(tmp_path) as workdir:
        workdir.claim({f"f{i}": 0 for i in range(7)})
        workdir.metrics_jsonl.touch()
        with pytest.raises(UserError) as caught:
            workdir.claim({f"f{i}": 1 for i in range(7)})
        assert "f4: 0" in str(caught.value) and "f5" not in str(caught.value)
        assert "and 2 more" in str(caught.value)


def test_claim_lets_listed_fields_change(tmp_path):
    changed = {**CONFIG, "log": {"every": 5}}
    with Workdir(tmp_path) as workdir:
        workdir.claim(CONFIG)
        workdir.metrics_jsonl.touch()
        for allowed in (["log"], ["log.every"]):
            assert workdir.claim(changed, may_differ=allowed) is True
        assert json.loads(workdir.config_json.read_text()) == changed
        with pytest.raises(UserError):
            workdir.claim(CONFIG, may_differ=["lo", "log.ever"])


def test_claim_of_a_spoilt_config(tmp_path):
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "metrics.jsonl").touch()
    with Workdir(tmp_path) as workdir, pytest.raises(UserError, match="is not JSON"):
        workdir.claim(CONFIG)


def test_bad_places(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match="not a folder"):
            Workdir(place)
    with pytest.raises(UserError, match="not a local folder"):
        Workdir("gs://bucket/run")


def test_one_process_at_a_time_and_the_lock_dies_with_it(tmp_path):
    code = (
        "import sys, time\nfrom zest_jax.workdir import Workdir\n"
        "w = Workdir(sys.argv[1])\nprint('held', flush=True)\ntime.sleep(60)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"in use by process {holder.pid};"):
            Workdir(tmp_path)
        Workdir(tmp_path, lock=False)  # A reader is not kept out.
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    with Workdir(tmp_path) as workdir:
        workdir.claim(CONFIG)
    with Workdir(tmp_path):
        pass


def test_paths(tmp_path):
    with Workdir(tmp_path) as workdir:
        names = [
            path.relative_to(tmp_path).as_posix()
            for path in (
                workdir.config_json,
                workdir.metrics_jsonl,
                workdir.tensorboard,
                workdir.checkpoints,
                workdir.tasks(0),
                workdir.rollouts,
                workdir.report_json,
                workdir.report_html,
                workdir.log,
            )
        ]
    assert names == [
        "config.json",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "tasks/iteration_0.jsonl",
        "rollouts",
        "report.json",
        "report.html",
        "log.txt",
    ]


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    workdir_lib.write_atomically(path, "old")
    assert path.stat().st_mode & 0o777 == 0o666 & ~files._umask()

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        workdir_lib.write_atomically(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["x.json"]


def test_append_cuts_a_torn_line_and_reading_ignores_it(tmp_path):
    path = tmp_path / "deep" / "m.jsonl"
    assert list(workdir_lib.read_jsonl(path)) == []
    workdir_lib.append_jsonl(path, [{"step": 0, "é": "ü"}, {"step": 1}])
    for torn in ('{"step": 2, "te', '{"step": 2}', "x" * 10_000):
        with open(path, "a") as file:
            file.write(torn)
        assert [r["step"] for r in workdir_lib.read_jsonl(path)] == [0, 1]
        workdir_lib.append_jsonl(path, [])
        assert path.read_text() == '{"step": 0, "é": "ü"}\n{"step": 1}\n'
    path.write_text("torn, and nothing else")
    workdir_lib.append_jsonl(path, [{"step": 3}])
    assert path.read_text() == '{"step": 3}\n'


def test_a_broken_line_inside_is_an_error(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\nnonsense\n{"step": 1}\n')
    with pytest.raises(UserError, match="line 2 is not JSON"):
        list(workdir_lib.read_jsonl(path))


def test_truncate_after(tmp_path):
    path = tmp_path / "m.jsonl"
    assert workdir_lib.truncate_after(path, 3) == 0 and not path.exists()
    workdir_lib.append_jsonl(path, [{"step": i} for i in range(6)])
    with open(path, "a") as file:
        file.write('{"step": 6')
    assert workdir_lib.truncate_after(path, 3) == 2
    assert path.read_text() == "".join(f'{{"step": {i}}}\n' for i in range(4))
    assert workdir_lib.truncate_after(path, -1) == 4 and path.read_text() == ""
