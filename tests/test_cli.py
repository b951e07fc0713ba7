"""Programs: a user's mistake is one sentence and a code; an error of ours keeps its traceback."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags

from zest_jax import cli, errors, lost
from zest_jax.errors import UserError

CONFIG = """
from ml_collections import ConfigDict

def get_config():
    return ConfigDict({"seed": 0, "solver": {"group_size": 8}})
"""


@pytest.fixture
def argv(tmp_path):
    (tmp_path / "exp.py").write_text(CONFIG)
    return ["prog", f"--config={tmp_path}/exp.py", f"--workdir={tmp_path}/run"]


def test_main_gets_config_and_workdir(argv):
    got = []
    entry = cli.program(lambda config, workdir: got.append((config, workdir)))
    assert entry([*argv, "--config.solver.group_size=4"]) == 0
    assert entry(argv) == 0  # A second start in one process knows nothing of the first.
    assert [config.solver.group_size for config, _ in got] == [4, 8]
    assert got[0][1].endswith("/run") and got[0][0].is_locked


def test_own_flags(argv):
    def define(values):
        flags.DEFINE_integer("count", 3, "how many", flag_values=values)

    got = []
    entry = cli.program(lambda c, w, f: got.append((c, w, f.count)), define=define)
    assert entry([*argv, "--count=5"]) == 0
    assert entry(["prog", "--count=5"]) == 2
    free = cli.program(
        lambda c, w, f: got.append((c, w, f.count)),
        define=define,
        needs_config=False,
        needs_workdir=False,
    )
    assert free(["prog"]) == 0
    assert got[0][2] == 5 and got[1] == (None, None, 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--config.solver.group_sze=4"], "config has no field solver.group_sze; the nearest is"),
        (["--config.seed=x"], "config field seed must be a whole number, got 'x'."),
        (["--wrkdir=x"], "unknown flag --wrkdir; did you mean --workdir?"),
        (["run"], "unexpected argument 'run'"),
        (["--config=nowhere.py"], "config file nowhere.py does not exist"),
        (["--config"], "--config needs a file"),
        (["--workdir="], "no workdir is given"),
    ],
)
def test_mistakes_on_the_command_line(argv, change, words, capsys):
    entry = cli.program(lambda config, workdir: pytest.fail("main ran"))
    assert entry([*argv, *change]) == cli.EXIT_USER
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"zest_jax: {words}") and err.count("\n") == 1


def test_config_is_needed(argv, capsys):
    entry = cli.program(lambda config, workdir: pytest.fail("main ran"))
    assert entry(["prog", argv[2]]) == cli.EXIT_USER
    assert "--config=configs/smoke.py" in capsys.readouterr().err
    assert entry(["prog", "--config.seed=3", argv[2]]) == cli.EXIT_USER
    assert "no --config=FILE is given" in capsys.readouterr().err


def test_help_lists_flags(capsys):
    def main(config, workdir):
        """What it does."""

    main.__module__ = "nowhere"
    assert cli.program(main)(["prog", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("What it does.") and "--workdir" in out and "--config" in out


class JaxRuntimeError(RuntimeError):  # The class is told by its name.
    pass


def _wrapped(inner: BaseException) -> Exception:
    """As a library does it: raised from, while handling, in a group."""
    try:
        try:
            raise inner
        except BaseException as error:
            raise ValueError("saving failed") from error
    except ValueError as error:
        return ExceptionGroup("background", [KeyError("other"), error])


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UserError("Line 3 of x.jsonl is not JSON."), 2, "Line 3 of x.jsonl is not JSON."),
        (KeyboardInterrupt(), 130, "interrupted; run the same command to resume."),
        (MemoryError(), 3, "this machine has no memory left"),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."), 3, "the device"),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), 4, "is full (writing /x/y)"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 4, "the disk is full"),
        (_wrapped(OSError(errno.ENOSPC, "No space left on device")), 4, "the disk is full"),
        (
            ValueError("RESOURCE_EXHAUSTED: Error writing: [OS error 28: No space left on device]"),
            4,
            "the disk is full",
        ),
    ],
)
def test_what_the_machine_says_is_told_in_a_sentence(argv, error, code, words, capsys):
    def main(config, workdir):
        raise error

    assert cli.program(main)(argv) == code
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    "error",
    [
        ValueError("shape"),
        JaxRuntimeError("INTERNAL: something"),
        FloatingPointError("loss is nan"),
        RuntimeError("out of memory, said somebody else"),
    ],
)
def test_our_errors_stay_loud(argv, error, capsys):
    def main(config, workdir):
        raise error

    assert cli.program(main)(argv) == cli.EXIT_BUG
    err = capsys.readouterr().err
    assert "Traceback" in err and str(error) in err


@pytest.mark.parametrize(
    "error",
    [
        JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer\nmore"),
        ValueError("UNKNOWN: Gloo AllGather failed: [pair.cc:547] Connection closed by peer"),
        _wrapped(JaxRuntimeError("UNAVAILABLE: Socket closed")),
    ],
)
def test_another_process_is_gone(argv, error, capsys, monkeypatch):
    def main(config, workdir):
        raise error

    # One process has no others, whatever a library says.
    assert cli.program(main)(argv) == cli.EXIT_BUG
    capsys.readouterr()
    monkeypatch.setattr(lost, "one_of_several", lambda: True)
    assert cli.program(main)(argv) == errors.EXIT_LOST
    err = capsys.readouterr().err
    assert err.startswith("zest_jax: another process of this run is gone (UN")
    assert err.count("\n") == 1 and "start all processes again" in err


def test_where_the_coordination_service_gives_up_a_sentence_is_told():
    code = "from zest_jax import lost; lost.speak_at_abort(); import os; os.abort()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == errors.EXIT_LOST
    assert "another process of this run is gone" in done.stderr and "is saved" in done.stderr


def test_a_real_device_out_of_memory(argv, capsys):
    def main(config, workdir):
        import jax.numpy as jnp

        jnp.zeros((1 << 46,), jnp.float32).block_until_ready()

    assert cli.program(main, memory_hint="use less")(argv) == cli.EXIT_MEMORY
    assert capsys.readouterr().err == "zest_jax: the device has no memory left: use less.\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_real_full_disk(argv, capsys):
    def main(config, workdir):
        with open("/dev/full", "w") as out:
            out.write("x" * 100_000)

    assert cli.program(main)(argv) == cli.EXIT_DISK
    assert "the disk is full" in capsys.readouterr().err


def test_flags_are_answered_before_jax_is_imported(argv):
    code = (
        "import sys\nfrom zest_jax import cli\n"
        "code = cli.program(lambda c, w: None)(sys.argv)\n"
        "assert 'jax' not in sys.modules\nsys.exit(code)\n"
    )
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code, *argv[1:]], cwd=root, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_libtpu_is_told_that_there_is_no_tpu_only_where_there_is_none(tmp_path, monkeypatch):
    for name in ("TPU_SKIP_MDS_QUERY", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "accel0").touch()
    cli._hush_libtpu(tmp_path)
    assert "TPU_ACCELERATOR_TYPE" not in os.environ
    (tmp_path / "accel0").unlink()
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "mine")
    cli._hush_libtpu(tmp_path)
    assert os.environ["TPU_ACCELERATOR_TYPE"] and os.environ["TPU_WORKER_HOSTNAMES"] == "mine"
    for name in ("TPU_SKIP_MDS_QUERY", "TPU_ACCELERATOR_TYPE"):
        os.environ.pop(name)


def test_an_interrupt_after_the_end_changes_nothing():
    """It comes while the interpreter takes itself down."""
    program = (
        "import atexit, os, sys\n"
        "from zest_jax import cli\n"
        "atexit.register(os.kill, os.getpid(), 2)\n"
        "sys.exit(cli.program(lambda *_: None, needs_config=False, needs_workdir=False)())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
