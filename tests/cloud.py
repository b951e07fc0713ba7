"""A stand-in for Cloud TPU: a `gcloud` that keeps a slice in a file and runs what it is told on
workers that are folders of this machine.

Every worker has a home of its own, a Python that is too old, a metadata server, and a program
whose behaviour a test writes as a few lines of shell. Faults are told in advance, a list for each
operation: `create`, `describe`, `setup`, `start`, `follow`, `status`, `stop`. Of commands on
workers: `dropped` (the connection, after a while), `partly` (only worker 0 was reached), `twice`
(as gcloud does where the answer was lost), `preempted` and `deleted` (the slice).
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SENT = ["launch_tpu.sh", "setup.cfg", "pyproject.toml", "scripts"]

CURL = """#!/bin/bash
case "${*: -1}" in
  */agent-worker-number) echo "$WORKER" ;;
  */worker-network-endpoints) echo "$ENDPOINTS" ;;
  */accelerator-type) echo v5litepod-16 ;;
esac
"""
# What a worker copies into a bucket, and from it.
STORAGE = """#!/bin/bash
case "$1 $2 $3 $4" in
  "storage cp --quiet "*)
    target=$CLOUD/bucket/${5#gs://}
    mkdir -p "${target%/*}" && cp "$4" "$target" ;;
  "storage rsync --quiet --recursive")
    [[ -d $6 ]] && cp -r "$CLOUD/bucket/${5#gs://}/." "$6" ;;
  *) exit 1 ;;
esac
"""
OLD_PYTHON = """#!/bin/bash
[[ "$1 $2 $3" == "-m pip install" ]] || exit 1
mkdir -p ~/.local/bin && cp "$CLOUD/uv" ~/.local/bin/uv
"""
UV = """#!/bin/bash
echo "$*" >>~/uv-calls
[[ $1 != venv ]] || { mkdir -p .venv/bin && cp "$CLOUD/python" .venv/bin/python; }
"""
# The program: writes down what it was given, then behaves as the test says.
PYTHON = """#!/bin/bash
[[ $1 != -c ]] || exit 0
ATTEMPT=$(($(cat "$CLOUD/attempts-$WORKER" 2>/dev/null || echo 0) + 1))
echo "$ATTEMPT" >"$CLOUD/attempts-$WORKER"
printf '%s\\0' "$@" >"$CLOUD/argv-$WORKER-$ATTEMPT"
env >"$CLOUD/environ-$WORKER-$ATTEMPT"
. "$CLOUD/program"
"""


class Cloud:
    """A user's machine with a checkout and the stand-in, and the cloud behind it."""

    def __init__(self, path: Path):
        self.path, self.checkout, self.tools = path / "cloud", path / "checkout", path / "tools"
        for folder in (self.path, self.checkout, self.tools, path / "home"):
            folder.mkdir()
        for name in SENT:
            source, target = ROOT / name, self.checkout / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        (self.checkout / ".gitignore").write_text("runs/\n.venv/\n")
        self.git("init", "--quiet", "--initial-branch=main")
        self.commit("first")
        self.write(
            self.tools / "gcloud",
            f'#!/bin/bash\nexec {sys.executable} -S {__file__} "$@"\n',
        )
        self.write(self.tools / "curl", "#!/bin/bash\nexit 6\n")
        worker = self.path / "tools"
        worker.mkdir()
        self.write(worker / "curl", CURL)
        self.write(worker / "gcloud", STORAGE)
        for name in ("python3", "python3.11", "python3.12", "python3.13", "python"):
            self.write(worker / name, OLD_PYTHON)
        self.write(self.path / "uv", UV)
        self.write(self.path / "python", PYTHON)
        self.program("echo trained")
        self.save(slice=None, faults={}, workers=1)

    def write(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def git(self, *words: str) -> str:
        identity = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
        done = subprocess.run(
            ["git", *identity, *words],
            cwd=self.checkout,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def commit(self, message: str) -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "-m", message)
        return self.git("rev-parse", "HEAD")

    def program(self, text: str) -> None:
        (self.path / "program").write_text(text)

    def save(self, **changes: Any) -> None:
        save(self.path, load(self.path) | changes)

    @property
    def state(self) -> dict[str, Any]:
        return load(self.path)

    def make_slice(self, **more: Any) -> None:
        self.save(slice=new_slice("v5litepod-16") | more)

    def start(self, *words: str, **env: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", "launch_tpu.sh", *words],
            cwd=self.checkout,
            env={
                "PATH": f"{self.tools}:/usr/bin:/bin",
                "HOME": str(self.path.parent / "home"),
                "CLOUD": str(self.path),
                "ZEST_POLL": "0.1",
                **env,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def launch(self, *words: str, **env: str) -> subprocess.CompletedProcess:
        running = self.start(*words, **env)
        try:
            out, err = running.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            out, err = running.communicate()
            raise AssertionError(f"does not end:\n{out[-2000:]}\n{err[-2000:]}") from None
        return subprocess.CompletedProcess(words, running.returncode, out, err)

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess:
        """A run with the arguments that nearly all tests give."""
        usual = ["--name=mine", "--zone=z", "--type=v5e-16", "--repo=.", "--bucket=gs://b"]
        return self.launch("run", *usual, "--config=c.py", *words, **env)

    def calls(self) -> list[list[str]]:
        """What gcloud was called with, without the words that it is always given."""
        if not (self.path / "calls").exists():
            return []
        return [json.loads(line) for line in (self.path / "calls").read_text().splitlines()]

    def operations(self, *kinds: str) -> list[str]:
        """Names of the operations asked for, in order; of these kinds, if any are given."""
        names = [operation(words) for words in self.calls()]
        return [name for name in names if not kinds or name in kinds]

    def given(self, worker: int = 0, attempt: int = 1) -> list[str]:
        """The arguments with which a worker's program was started."""
        return (self.path / f"argv-{worker}-{attempt}").read_text().split("\0")[:-1]

    def environ(self, worker: int = 0, attempt: int = 1) -> dict[str, str]:
        lines = (self.path / f"environ-{worker}-{attempt}").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def attempts(self, worker: int = 0) -> int:
        path = self.path / f"attempts-{worker}"
        return int(path.read_text()) if path.exists() else 0

    def close(self) -> None:
        """Ends what still runs on the workers."""
        end_programs(self.path, signal.SIGKILL)


def load(cloud: Path) -> dict[str, Any]:
    path = cloud / "state.json"
    return json.loads(path.read_text()) if path.exists() else {}


def save(cloud: Path, state: dict[str, Any]) -> None:
    (cloud / "state.new").write_text(json.dumps(state))
    (cloud / "state.new").replace(cloud / "state.json")


def new_slice(kind: str, **more: Any) -> dict[str, Any]:
    usual = {"state": "READY", "type": kind, "version": "v2-alpha-tpuv5-lite", "queue": None}
    return usual | {"spot": False, "reserved": False} | more


def end_programs(cloud: Path, number: int) -> None:
    for path in cloud.glob("worker-*/zest-run/pid"):
        if not (path.parent / "code").exists():
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), number)


def operation(words: list[str]) -> str:
    """What a command of gcloud is about."""
    for word in words:
        if word.startswith("--command="):
            for name in ("setup", "start", "follow", "stop", "status", "cat"):
                if f"tpu_worker.sh {name}" in word or f'"$f" {name}' in word:
                    return name
            return "fetch"
    return words[3] if words[:2] == ["compute", "tpus"] else words[0]


# What follows is the stand-in itself.

REFUSALS = {
    "capacity": 'There is no more capacity in the zone "z"; you can try in another zone.',
    "quota": "Quota limit 'TPUV5sPreemptible' has been exceeded. Limit: 0 in zone z.",
    "type": "INVALID_ARGUMENT: accelerator type v5litepod-16 is not available in z.",
    "network": "There was a problem refreshing your current auth tokens.",
    "dropped": "[/usr/bin/ssh] exited with return code [255].",
}


def refuse(why: str, code: int = 1) -> int:
    print(f"ERROR: (gcloud) {REFUSALS.get(why, why)}", file=sys.stderr)
    return code


def gcloud(words: list[str]) -> int:
    cloud = Path(os.environ["CLOUD"])
    with open(cloud / "calls", "a") as file:
        file.write(json.dumps(words) + "\n")
    if words[0] == "auth":
        print(os.environ.get("ACCOUNT", "me@example.com"))
        return 0
    if words[0] == "config":
        print({"project": os.environ.get("PROJECT", "p")}.get(words[2], ""))
        return 0
    state = load(cloud)
    name = operation(words)
    waiting = state["faults"].get(name, [])
    fault = waiting.pop(0) if waiting else ""
    save(cloud, state)
    if words[3] == "ssh":
        return ssh(cloud, words, fault)
    if fault in REFUSALS:
        return refuse(fault)
    there = state["slice"]
    if words[3] == "scp":
        for k in range(state["workers"]):
            shutil.copy(words[4], home(cloud, k) / words[5].split(":")[1])
        return 0
    if words[3] == "create":
        if there or fault == "exists":
            if fault == "exists":
                save(cloud, state | {"slice": new_slice("v5litepod-16")})
            return refuse("ALREADY_EXISTS: Resource 'mine' already exists")
        options = dict(
            word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word
        )
        queue = "WAITING_FOR_RESOURCES" if words[2] == "queued-resources" else None
        made = new_slice(
            options["accelerator-type"],
            spot="--spot" in words,
            reserved="--reserved" in words,
            queue=queue,
            state="CREATING",
        )
        save(cloud, state | {"slice": made})
        return 0
    if there is None or (words[2] == "queued-resources" and not there["queue"]):
        return refuse("NOT_FOUND: Resource 'mine' was not found")
    if words[3] == "delete":
        save(cloud, state | {"slice": None})
        return 0
    return describe(cloud, words, state)


def describe(cloud: Path, words: list[str], state: dict[str, Any]) -> int:
    """Tells the state; what is being made is a state further at the next look."""
    there = dict(state["slice"])
    if words[2] == "queued-resources":
        print(there["queue"])
        if there["queue"] == "WAITING_FOR_RESOURCES":
            save(cloud, state | {"slice": there | {"queue": "ACTIVE", "state": "CREATING"}})
        return 0
    if there["queue"] and there["queue"] != "ACTIVE":
        return refuse("NOT_FOUND: Resource 'mine' was not found")
    words = [there["state"], there["type"], there["version"]]
    words += ["True" if there["spot"] else "", "True" if there["reserved"] else ""]
    print("|".join([*words, "projects/p/q" if there["queue"] else ""]))
    if there["state"] == "CREATING":
        save(cloud, state | {"slice": there | {"state": "READY"}})
    return 0


def home(cloud: Path, worker: int) -> Path:
    path = cloud / f"worker-{worker}"
    path.mkdir(exist_ok=True)
    return path


def ssh(cloud: Path, words: list[str], fault: str) -> int:
    state = load(cloud)
    if not state["slice"] or state["slice"]["state"] != "READY":
        return refuse("This TPU has terminal state.")
    if fault in REFUSALS and fault != "dropped":
        return refuse(fault)
    command = next(word for word in words if word.startswith("--command="))[len("--command=") :]
    which = next(word for word in words if word.startswith("--worker="))[len("--worker=") :]
    count = state["workers"]
    running: list[subprocess.Popen] = []
    chosen = range(count) if which == "all" else [int(which)]
    if fault == "partly":
        chosen = [0]
    elif fault == "twice":
        chosen = [k for k in chosen for _ in range(2)]
    for k in chosen:
        env = {
            "PATH": f"{cloud / 'tools'}:/usr/bin:/bin",
            "HOME": str(home(cloud, k)),
            "CLOUD": str(cloud),
            "WORKER": str(k),
            "ENDPOINTS": ",".join(f"10.0.0.{i}" for i in range(count)),
        }
        # gcloud splits at blanks and ssh joins with them; the login shell reads what comes of it.
        line = " ".join(command.split(" "))
        if fault == "twice" and running:
            running[-1].wait()
        running.append(subprocess.Popen(["bash", "-c", line], cwd=env["HOME"], env=env))
    if fault in ("dropped", "preempted", "deleted"):
        wait_for_log(cloud)
        if fault == "dropped":
            running[0].kill()
            return refuse(fault, 255)
        end_programs(cloud, signal.SIGTERM)
        for process in running:
            process.wait()
        for k in range(count):
            shutil.rmtree(home(cloud, k))
        there = None
        if fault == "preempted":
            queue = "SUSPENDED" if state["slice"]["queue"] else None
            there = state["slice"] | {"state": "PREEMPTED", "queue": queue}
        save(cloud, load(cloud) | {"slice": there})
        return refuse("dropped", 255)
    codes = [process.wait() for process in running]
    if fault == "partly":
        return refuse("dropped", 255)
    return next((code for code in codes if code), 0)


def wait_for_log(cloud: Path) -> None:
    """Until worker 0's program has written something, and somebody had the time to read it."""
    import time

    for _ in range(200):
        if (cloud / "worker-0/zest-run/log").stat().st_size:
            break
        time.sleep(0.05)
    time.sleep(0.3)


if __name__ == "__main__":
    sys.exit(gcloud(sys.argv[1:]))
