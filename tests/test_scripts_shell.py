"""The shell scripts, with stand-ins for the tools that they call."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["launch_gpu.sh", "tests/run.sh", ".ci/run", "scripts/venv.sh"]
ALL = [*SCRIPTS, "launch_tpu.sh", *(f"scripts/tpu_{k}.sh" for k in ("cloud", "run", "worker"))]
TRAIN = "<-m><zest_jax.train><--config=configs/smoke.py><--workdir=runs/smoke>"

# A python that fits, makes a venv of itself, and writes down everything else it is asked.
PYTHON = """#!/bin/bash
case "$1 $2" in
  "-c "*) exit 0 ;;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "venv" >>"$CALLS" ;;
  "-m pip")
    [[ $3 != --version ]] || exit 0
    echo "pip ${*: -1}" >>"$CALLS"
    exit "${PIP_CODE:-0}" ;;
  *) printf '<%s>' "$@" >>"$CALLS"; echo >>"$CALLS" ;;
esac
"""
UV = """#!/bin/bash
echo "uv $*" >>"$CALLS"
[[ $1 != venv ]] || { mkdir -p .venv/bin && cp "$(command -v python3)" .venv/bin/python; }
"""


class Checkout:
    """A copy of the scripts, and a PATH with nothing but the basic tools and the stand-ins."""

    def __init__(self, path: Path):
        self.path, self.tools, self.calls_file = path, path / "tools", path / "calls"
        for script in [*SCRIPTS, "setup.cfg", "pyproject.toml"]:
            (path / script).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / script, path / script)
        self.tools.mkdir()
        for name in "basename bash cat cksum cp dirname env mkdir rm".split():
            (self.tools / name).symlink_to(shutil.which(name))
        self.add("python3", PYTHON)

    def add(self, name: str, text: str) -> None:
        (self.tools / name).write_text(text)
        (self.tools / name).chmod(0o755)

    def nvidia(self, text: str, code: int = 0) -> None:
        self.add("nvidia-smi", f"#!/bin/bash\nprintf '{text}'\nexit {code}\n")

    def run(self, *command: str, **env: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            command,
            cwd=self.path,
            env={"PATH": str(self.tools), "CALLS": str(self.calls_file), **env},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self) -> list[str]:
        """What the stand-ins wrote down since the last look."""
        if not self.calls_file.exists():
            return []
        lines = self.calls_file.read_text().splitlines()
        self.calls_file.unlink()
        return lines


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck():
    done = subprocess.run(["shellcheck", "-x", *ALL], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_all_are_checked():
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if names.returncode == 0:
        there = {name for name in names.stdout.split() if name.endswith(".sh")}
        assert there | {".ci/run"} == set(ALL)
    for script in ALL:
        done = subprocess.run(["bash", "-n", str(ROOT / script)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_they_can_be_started():
    for script in ["launch_gpu.sh", "launch_tpu.sh", "tests/run.sh", ".ci/run"]:
        assert os.access(ROOT / script, os.X_OK), script
    assert "\nbash tests/run.sh\n" in (ROOT / ".ci/run").read_text()


def test_first_start_installs_and_trains_and_the_second_only_trains(checkout):
    train = TRAIN
    done = checkout.run("bash", "launch_gpu.sh")
    assert done.returncode == 0, done.stderr
    assert "no NVIDIA GPU found" in done.stderr and "CPU build" in done.stderr
    assert checkout.calls() == ["venv", "pip .", train]
    assert checkout.run("bash", "launch_gpu.sh").returncode == 0
    assert checkout.calls() == [train]
    with open(checkout.path / "setup.cfg", "a") as file:
        file.write("# changed\n")
    assert checkout.run("bash", "launch_gpu.sh").returncode == 0
    assert checkout.calls() == ["pip .", train]


def test_tests_add_their_extra_once_and_a_launch_keeps_it(checkout):
    checkout.run("bash", "launch_gpu.sh")
    checkout.calls()
    for tool in ("ruff", "mypy"):
        checkout.add(tool, f'#!/bin/bash\necho "{tool} $1" >>"$CALLS"\n')
        shutil.copy(checkout.tools / tool, checkout.path / ".venv/bin" / tool)
    expected = [
        "ruff check",
        "ruff format",
        "mypy zest_jax",
        "<-m><pytest><-q><-n><2><--dist><loadfile><--no-loadscope-reorder><-k><a b>",
    ]
    done = checkout.run("bash", "tests/run.sh", "-k", "a b")
    assert done.returncode == 0 and checkout.calls() == ["pip .[test]", *expected]
    assert checkout.run("bash", ".ci/run").returncode == 0
    assert checkout.calls() == [
        *expected[:3],
        "<-m><pytest><-q><-n><2><--dist><loadfile><--no-loadscope-reorder>",
    ]
    checkout.run("bash", "launch_gpu.sh")
    assert len(checkout.calls()) == 1


def test_a_failing_check_is_named_and_the_others_still_run(checkout):
    checkout.run("bash", "launch_gpu.sh")
    for tool, code in (("ruff", 1), ("mypy", 0)):
        path = checkout.path / ".venv/bin" / tool
        path.write_text(f"#!/bin/bash\nexit {code}\n")
        path.chmod(0o755)
    checkout.calls()
    done = checkout.run("bash", "tests/run.sh")
    assert done.returncode == 1 and "failed: lint format\n" in done.stderr
    assert (
        checkout.calls()[-1] == "<-m><pytest><-q><-n><2><--dist><loadfile><--no-loadscope-reorder>"
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--config.solver.size=8"], ["--config=configs/smoke.py", "--workdir=runs/smoke"]),
        (["--config=configs/smoke.py:gpu"], ["--workdir=runs/smoke-gpu"]),
        (["--config", "a/b.py:x=1,y"], ["--workdir=runs/b-x=1-y"]),
        (["--workdir=runs/my run"], ["--config=configs/smoke.py"]),
        (["--workdir", "w", "--config=c.py", "--config.name=a 'b' $c"], []),
    ],
)
def test_arguments_pass_through(checkout, given, expected):
    checkout.run("bash", "launch_gpu.sh", *given)
    assert checkout.calls()[-1] == "".join(
        f"<{word}>" for word in ["-m", "zest_jax.train", *expected, *given]
    )


@pytest.mark.parametrize(
    ("answer", "code", "flavour", "words"),
    [
        ("580.65.06, NVIDIA H200\\n580.65.06, NVIDIA H200\\n", 0, "cuda13", "found NVIDIA H200"),
        ("570.12, Tesla T4\\n", 0, "cuda12", "CUDA 12 build"),
        ("470.1, Tesla K80\\n", 0, "cpu", "(470.1) is older than 525"),
        ("No devices were found\\n", 6, "cpu", "finds no GPU"),
        ("", 0, "cpu", "finds no GPU"),
    ],
)
def test_the_build_of_jax_suits_the_driver(checkout, answer, code, flavour, words):
    checkout.nvidia(answer, code)
    done = checkout.run("bash", "launch_gpu.sh")
    assert words in done.stderr
    assert checkout.calls()[1] == ("pip ." if flavour == "cpu" else f"pip .[{flavour}]")


def test_a_new_gpu_makes_the_venv_anew(checkout):
    checkout.run("bash", "launch_gpu.sh")
    checkout.calls()
    checkout.nvidia("590.1, NVIDIA H200\\n")
    done = checkout.run("bash", "launch_gpu.sh")
    assert "holds the cpu build of JAX: making it anew" in done.stderr
    assert checkout.calls()[:2] == ["venv", "pip .[cuda13]"]
    done = checkout.run("bash", "launch_gpu.sh", ZEST_FLAVOUR="cuda12")
    assert "as ZEST_FLAVOUR says" in done.stderr
    assert checkout.calls()[:2] == ["venv", "pip .[cuda12]"]


def test_uv_is_used_where_it_is(checkout):
    checkout.add("uv", UV)
    done = checkout.run("bash", "launch_gpu.sh")
    assert done.returncode == 0, done.stderr
    calls = checkout.calls()
    assert calls[0] == f"uv venv --quiet --python {checkout.tools}/python3 .venv"
    assert calls[1] == "uv pip install --quiet --python .venv/bin/python -e ."


def test_no_python_is_one_sentence(checkout):
    (checkout.tools / "python3").write_text("#!/bin/bash\nexit 1\n")  # As an unfit version.
    done = checkout.run("bash", "launch_gpu.sh")
    assert done.returncode != 0 and "no Python 3.11, 3.12 or 3.13 found" in done.stderr
    assert not (checkout.path / ".venv").exists()


def test_a_failed_installation_is_tried_again(checkout):
    done = checkout.run("bash", "launch_gpu.sh", PIP_CODE="1")
    assert done.returncode != 0 and "the installation failed" in done.stderr
    assert checkout.calls() == ["venv", "pip ."]
    assert checkout.run("bash", "launch_gpu.sh").returncode == 0
    assert checkout.calls()[0] == "pip ."


# Says, too, what the launcher told the program by its environment.
TELLING_PYTHON = PYTHON.replace(
    "  *) ",
    """  *) for name in CUDA_VISIBLE_DEVICES ${!ZEST_*}; do
      [[ -z ${!name+x} ]] || echo "$name=${!name}" >>"$CALLS"
    done
    [[ ! -e /proc/$$/fd/9 ]] || echo "holds the lock" >>"$CALLS"
    """,
)
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2"}


@pytest.mark.parametrize(
    ("given", "env", "expected"),
    [
        ([], {}, ["CUDA_VISIBLE_DEVICES=0"]),
        (["--devices=all"], {}, []),
        (["--devices", "2"], {}, ["CUDA_VISIBLE_DEVICES=0,1"]),
        ([], {"CUDA_VISIBLE_DEVICES": "2,1,0"}, ["CUDA_VISIBLE_DEVICES=2,1,0"]),
        (["--devices=2"], {"CUDA_VISIBLE_DEVICES": "2,1,0"}, ["CUDA_VISIBLE_DEVICES=2,1"]),
        ([], {"CUDA_VISIBLE_DEVICES": ""}, ["CUDA_VISIBLE_DEVICES="]),
        ([], SLURM, ["ZEST_DISTRIBUTED=auto"]),
        ([], {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, ["CUDA_VISIBLE_DEVICES=0"]),
        (
            ["--coordinator=a:80", "--processes", "2", "--process=1"],
            SLURM,
            ["ZEST_COORDINATOR=a:80", "ZEST_PROCESS=1", "ZEST_PROCESSES=2"],
        ),
    ],
)
def test_which_gpus_and_which_process(checkout, given, env, expected):
    checkout.nvidia("0\\n1\\n2\\n")
    checkout.add("python3", TELLING_PYTHON)
    # The stand-in for nvidia-smi tells indices alone, which are no drivers.
    done = checkout.run("bash", "launch_gpu.sh", *given, **env)
    assert done.returncode == 0, done.stderr
    calls = checkout.calls()
    assert calls[2:] == [*expected, TRAIN]
    assert ("using one GPU of 3" in done.stderr) == (expected == ["CUDA_VISIBLE_DEVICES=0"])


def test_zest_devices_is_the_flag_in_the_environment(checkout):
    checkout.nvidia("0\\n1\\n2\\n")
    checkout.add("python3", TELLING_PYTHON)
    checkout.run("bash", "launch_gpu.sh", ZEST_DEVICES="2")
    assert "CUDA_VISIBLE_DEVICES=0,1" in checkout.calls()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--devices=4"], "there are 3 GPUs to choose from, and --devices asks for 4"),
        (["--devices=0"], "--devices is a number of GPUs, or all; not 0"),
        (["--coordinator=a:80"], "need all of --coordinator"),
        (["--coordinator=a", "--processes=2", "--process=0"], "--coordinator is HOST:PORT"),
        (["--coordinator=a:80", "--processes=2", "--process=2"], "not 2 of 2"),
        (["--coordinator=a:80", "--processes=2", "--process"], "--process needs a value"),
    ],
)
def test_mistakes_about_devices_and_processes(checkout, given, words):
    checkout.nvidia("0\\n1\\n2\\n")
    done = checkout.run("bash", "launch_gpu.sh", *given)
    assert done.returncode == 2 and words in done.stderr
    assert not checkout.calls()


@pytest.mark.skipif(shutil.which("flock") is None, reason="there is no flock")
def test_of_several_processes_one_makes_the_venv(checkout):
    for name in ("flock", "sleep"):
        (checkout.tools / name).symlink_to(shutil.which(name))
    slow = TELLING_PYTHON.replace('echo "pip ', 'sleep 0.5; echo "pip ')
    checkout.add("python3", slow)
    env = {"PATH": str(checkout.tools), "CALLS": str(checkout.calls_file)}
    running = [
        subprocess.Popen(
            ["bash", "launch_gpu.sh"], cwd=checkout.path, env=env, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    told = [process.communicate(timeout=60)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], told
    assert sum("another process is setting up .venv" in words for words in told) == 2
    assert checkout.calls() == ["venv", "pip .", TRAIN, TRAIN, TRAIN]
