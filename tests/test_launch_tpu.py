"""launch_tpu.sh, against a stand-in for Cloud TPU that runs what is sent to the workers."""

import os
import shlex
import signal
import subprocess
import time

import pytest

from tests.cloud import Cloud

TRAINS_UNTIL_TOLD = 'trap "echo saved; exit 75" TERM; echo training; while :; do sleep 0.05; done'
AWKWARD = [
    "--config.name=a 'b' \"c\"",
    "--config.sizes=(1, 2,  3)",
    "--config.note=$HOME `id` \\ !x & ; | * ? ~ # {a,b} [c]",
    "--config.empty=",
    "--config.lines=one\ntwo",
    "--config.unicode=Größe → 3",
    "",
]


@pytest.fixture
def cloud(tmp_path):
    made = Cloud(tmp_path)
    yield made
    made.close()


def wait_until(true) -> None:
    for _ in range(600):
        if true():
            return
        time.sleep(0.05)
    raise AssertionError("what was waited for did not happen")


def test_from_nothing_to_a_finished_run(cloud):
    cloud.save(workers=2)
    cloud.program('echo "this is worker $WORKER"')
    done = cloud.run("--spot", "--env=NOTE=a b", *AWKWARD)
    assert done.returncode == 0, done.stderr
    assert cloud.operations("create", "setup", "start") == ["create", "setup", "start"]
    [create] = [words for words in cloud.calls() if "create" in words]
    for word in ("--accelerator-type=v5litepod-16", "--version=v2-alpha-tpuv5-lite", "--spot"):
        assert word in create
    for worker in (0, 1):
        given = ["-m", "zest_jax.train", "--workdir=gs://b/mine", "--config=c.py", *AWKWARD]
        assert cloud.given(worker) == given
        environ = cloud.environ(worker)
        assert environ["ZEST_DISTRIBUTED"] == "auto" and environ["ZEST_PREEMPTED_EXIT"] == "75"
        assert environ["NOTE"] == "a b"
        # The image's Python is too old: uv was fetched, and brought one.
        calls = (cloud.path / f"worker-{worker}/uv-calls").read_text()
        assert "venv --quiet --python >=3.11,<3.14 .venv" in calls and "-e .[tpu]" in calls
    assert done.stdout == "this is worker 0\n"
    kept = {path.name: path.read_text() for path in cloud.checkout.glob("runs/tpu-mine/*/*.log")}
    assert kept == {f"worker-{k}.log": f"this is worker {k}\n" for k in (0, 1)}
    bucket = {path.read_text() for path in cloud.path.glob("bucket/b/mine/logs/*.log")}
    assert bucket == set(kept.values())
    assert "costs money until: ./launch_tpu.sh delete --name=mine --zone=z" in done.stderr
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=cloud.path / "worker-1/zest_jax", capture_output=True
    )
    assert head.stdout.decode().strip() == cloud.git("rev-parse", "HEAD")


def test_what_the_config_reads_comes_to_every_worker(cloud):
    cloud.save(workers=2)
    chains = cloud.path / "bucket/b/its data/chains"
    chains.mkdir(parents=True)
    (chains / "pool.json").write_text("a pool")
    cloud.program("cat data/chains/pool.json")
    words = ["--data=gs://b/its data", "--config.source.file=data/chains"]
    done = cloud.run(*words)
    assert done.returncode == 0 and done.stdout == "a pool", done.stderr
    assert (cloud.path / "worker-1/zest_jax/data/chains/pool.json").exists()
    assert cloud.given()[-1] == words[1] and not any("its data" in word for word in cloud.given())
    shown = cloud.run("--dry_run", *words).stdout
    setup = next(line for line in shown.splitlines() if "tpu_worker.sh setup" in line)
    remote = next(word for word in shlex.split(setup) if word.startswith("--command="))
    assert "ZEST_DATA=gs://b/its data" in shlex.split(remote)


def test_data_that_is_not_there_is_said_and_nothing_started(cloud):
    cloud.make_slice()
    done = cloud.launch("setup", "--name=mine", "--zone=z", "--repo=.", "--data=gs://b/none")
    assert done.returncode == 1 and cloud.attempts() == 0
    assert "gs://b/none could not be copied" in done.stderr
    assert "workers of mine could not be set up" in done.stderr


def test_a_dry_run_shows_what_a_run_does_and_does_nothing(cloud):
    done = cloud.run("--dry_run", "--project=p", *AWKWARD[:4])
    assert done.returncode == 0 and not cloud.calls() and not (cloud.checkout / "runs").exists()
    shown = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    starts = [line for line in shown if "tpu_worker.sh start" in line]
    # What is shown can be pasted into a shell, which hands on the same words.
    assert len(starts) == 1
    remote = next(word for word in shlex.split(starts[0]) if word.startswith("--command="))
    assert shlex.split(remote)[-4:] == AWKWARD[:4]
    cloud.run("--project=p", *AWKWARD[:4])
    really = [words for words in cloud.calls() if words[0] == "compute"]
    drop = ("describe", "start", "follow", "status")
    for words in really:
        if not any(name in " ".join(words) for name in drop):
            assert ["gcloud", *words] in [shlex.split(line) for line in shown], words


@pytest.mark.parametrize("queued", [False, True])
def test_a_preempted_run_goes_on_on_a_new_slice_of_the_same_kind(cloud, queued):
    cloud.save(faults={"follow": ["preempted"]})
    cloud.program(f'if ((ATTEMPT == 1)); then {TRAINS_UNTIL_TOLD}; fi; echo "resumed and done"')
    done = cloud.run("--spot", *(["--queued"] if queued else []), "--config.x=1 2")
    assert done.returncode == 0, done.stderr
    assert "mine was preempted" in done.stderr
    kinds = cloud.operations("create", "delete", "setup", "start")
    assert kinds == ["create", "setup", "start", "delete", "create", "setup", "start"]
    creates = [words for words in cloud.calls() if "create" in words]
    assert creates[0] == creates[1] and "--spot" in creates[1]
    assert all((words[2] == "queued-resources") == queued for words in creates)
    assert cloud.given(0, 1) == cloud.given(0, 2) and cloud.given(0, 2)[-1] == "--config.x=1 2"
    assert "training" in done.stdout and done.stdout.endswith("resumed and done\n")


def test_a_run_is_taken_up_on_a_preempted_slice_at_the_same_price(cloud):
    cloud.make_slice(state="PREEMPTED", type="v6e-8", version="v2-alpha-tpuv6e")
    done = cloud.launch(
        "run", "--name=mine", "--zone=z", "--repo=.", "--bucket=gs://b", "--config=c.py"
    )
    assert done.returncode == 0, done.stderr
    [create] = [words for words in cloud.calls() if "create" in words]
    assert {"--accelerator-type=v6e-8", "--version=v2-alpha-tpuv6e", "--spot"} <= set(create)


def test_a_slice_made_without_the_queue_is_replaced_by_one_from_it(cloud):
    cloud.make_slice(state="PREEMPTED")
    done = cloud.run("--queued")
    assert done.returncode == 0, done.stderr
    made = [words[2:4] for words in cloud.calls() if {"create", "delete"} & set(words)]
    assert made == [
        ["queued-resources", "delete"],
        ["tpu-vm", "delete"],
        ["queued-resources", "create"],
    ]


def test_interrupted_before_the_run_began_it_tells_of_the_slice(cloud):
    cloud.save(faults={"create": ["capacity"] * 1000})
    running = cloud.start(
        *["run", "--name=mine", "--zone=z", "--type=v5e-8", "--repo=.", "--bucket=gs://b"],
        "--config=c.py",
    )
    wait_until(lambda: "create" in cloud.operations())
    os.killpg(running.pid, signal.SIGINT)
    _, told = running.communicate(timeout=30)
    assert running.returncode == 130 and "the run had not begun" in told


@pytest.mark.parametrize(
    "end",
    [
        "exit 75",
        # A machine's end signals all; the program of then says nothing by its exit code.
        'kill -TERM "$(cat ~/zest-run/keeper)"; sleep 0.2; exit 0',
    ],
)
def test_a_program_told_to_end_by_the_machine_is_started_again(cloud, end):
    cloud.make_slice()
    cloud.program(f'((ATTEMPT > 1)) || {{ {end}; }}; echo "went on"')
    done = cloud.run()
    assert done.returncode == 0 and "went on" in done.stdout
    assert cloud.operations("create", "delete") == [] and cloud.attempts() == 2


def test_a_dropped_connection_neither_ends_nor_repeats_anything(cloud):
    cloud.make_slice()
    cloud.save(faults={"follow": ["dropped", "dropped"], "start": ["dropped"]})
    cloud.program("for ((i = 0; i < 40; i++)); do echo line $i; sleep 0.05; done")
    done = cloud.run()
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"line {i}\n" for i in range(40))
    assert cloud.attempts() == 1 and "the run goes on. Trying again" in done.stderr


def test_a_start_that_reached_some_workers_is_made_again_on_all(cloud):
    cloud.make_slice()
    cloud.save(workers=2, faults={"start": ["partly", "twice"]})
    cloud.program("((ATTEMPT == 2 || WORKER == 1)) || sleep 60; echo together; sleep 0.5")
    done = cloud.run()
    assert done.returncode == 0 and done.stdout == "together\n", done.stderr
    assert "not every worker has begun" in done.stderr and "another run" not in done.stderr
    assert cloud.attempts(0) == 2 and cloud.attempts(1) == 1


def test_a_cloud_that_does_not_answer_is_waited_for(cloud):
    cloud.make_slice()
    cloud.save(faults={"follow": ["dropped"], "describe": ["network", "", "network"]})
    cloud.program("echo begun; sleep 1")
    done = cloud.run()
    assert done.returncode == 0, done.stderr
    assert cloud.operations("create", "delete") == [] and cloud.attempts() == 1


def test_no_capacity_is_asked_for_again(cloud):
    cloud.save(faults={"create": ["capacity", "capacity"]})
    done = cloud.run()
    assert done.returncode == 0 and done.stderr.count("no v5litepod-16 is free in z") == 2
    assert cloud.operations("create") == ["create"] * 3


@pytest.mark.parametrize(
    ("fault", "words"), [("quota", "quota does not cover"), ("type", "cannot be had in z")]
)
def test_what_cannot_be_had_is_asked_for_once(cloud, fault, words):
    cloud.save(faults={"create": [fault] * 9})
    done = cloud.run()
    assert done.returncode == 2 and words in done.stderr
    assert cloud.operations("create") == ["create"]


def test_a_name_that_exists_is_used_if_it_is_of_that_type(cloud):
    cloud.save(faults={"create": ["exists"]})
    done = cloud.launch("create", "--name=mine", "--zone=z", "--type=v5e-16")
    assert done.returncode == 0 and "exists already; it is used" in done.stderr
    done = cloud.launch("create", "--name=mine", "--zone=z", "--type=v6e-8")
    assert done.returncode == 2 and "mine is v5litepod-16, not v6e-8" in done.stderr
    assert cloud.operations("create") == ["create"]


@pytest.mark.parametrize(
    ("program", "code", "attempts"),
    [
        ("echo 'no such config' >&2; exit 2", 2, 1),
        ("exit 1", 1, 1),
        ("exit 3", 3, 1),
        ("kill -ABRT $$", 134, 4),
        ("exit 5", 5, 4),
    ],
)
def test_what_ends_a_run_for_good(cloud, program, code, attempts):
    cloud.make_slice()
    cloud.program(program)
    done = cloud.run("--delete_after")
    assert done.returncode == code and cloud.attempts() == attempts, done.stderr
    assert cloud.state["slice"] is None
    if code == 2:
        assert "no such config" in done.stdout and "not started again" in done.stderr


def test_a_lost_worker_is_no_error_of_its_peers(cloud):
    cloud.make_slice()
    cloud.save(workers=2)
    cloud.program("((ATTEMPT > 1)) || { ((WORKER == 0)) && exit 1; kill -KILL $$; }; echo done")
    done = cloud.run()
    assert done.returncode == 0 and cloud.attempts() == 2, done.stderr


def test_interrupted_the_run_goes_on_and_can_be_followed_and_stopped(cloud):
    cloud.make_slice()
    cloud.program(TRAINS_UNTIL_TOLD)
    words = ["run", "--name=mine", "--zone=z", "--repo=.", "--bucket=gs://b", "--config=c.py"]
    first = cloud.start(*words)
    wait_until(lambda: "follow" in cloud.operations())
    os.killpg(first.pid, signal.SIGINT)
    _, told = first.communicate(timeout=30)
    assert first.returncode == 130 and "the run on mine goes on" in told
    assert "./launch_tpu.sh stop --name=mine --zone=z" in told

    done = cloud.launch("status", "--name=mine", "--zone=z")
    assert "READY" in done.stderr and "worker 0: running" in done.stdout
    done = cloud.launch(*words, "--config.other=1")
    assert done.returncode == 2 and "another run is going on mine" in done.stderr
    for command in ("setup", "delete"):
        done = cloud.launch(command, "--name=mine", "--zone=z")
        assert done.returncode == 2 and "a run is going on mine" in done.stderr

    second = cloud.start(*words)
    wait_until(lambda: cloud.operations().count("follow") == 2)
    done = cloud.launch("stop", "--name=mine", "--zone=z")
    assert done.returncode == 0, done.stderr
    shown, told = second.communicate(timeout=30)
    assert second.returncode == 130 and "the run is going already" in told
    assert "was stopped" in told and shown.endswith("saved\n") and cloud.attempts() == 1
    done = cloud.launch("logs", "--name=mine", "--zone=z")
    assert done.stdout == "training\nsaved\n"


def test_a_slice_that_somebody_deleted_is_not_made_again(cloud):
    cloud.save(faults={"follow": ["deleted"]})
    cloud.program(TRAINS_UNTIL_TOLD)
    done = cloud.run()
    assert done.returncode == 1 and "mine was deleted" in done.stderr
    assert cloud.operations("create") == ["create"]


def test_the_code_is_that_of_the_commit_wherever_it_comes_from(cloud, tmp_path):
    cloud.make_slice()
    old = cloud.git("rev-parse", "HEAD")
    (cloud.checkout / "newer").write_text("")
    cloud.commit("second")
    origin = tmp_path / "it's an origin"
    cloud.git("clone", "--quiet", "--bare", str(cloud.checkout), str(origin))
    cloud.git("remote", "add", "origin", str(origin))
    place = ["--name=mine", "--zone=z"]
    newer = cloud.path / "worker-0/zest_jax/newer"
    for commit, there in (("HEAD", True), (old[:9], False), ("main", True)):
        done = cloud.launch("setup", *place, f"--commit={commit}")
        assert done.returncode == 0 and newer.exists() == there, done.stderr
    assert not [words for words in cloud.calls() if "scp" in words]
    unpublished = cloud.commit("third")
    (cloud.checkout / "setup.cfg").write_text("changed")
    done = cloud.launch("setup", *place)
    assert done.returncode == 2 and f"commit {unpublished} is not in {origin}" in done.stderr
    assert "changes that are not committed do not reach" in done.stderr
    done = cloud.launch("setup", *place, "--repo=.")
    assert done.returncode == 0, done.stderr


def test_deleting_what_is_not_there_is_no_mistake(cloud):
    cloud.make_slice()
    for words in ("mine is deleted", "there is no mine in z"):
        done = cloud.launch("delete", "--name=mine", "--zone=z")
        assert done.returncode == 0 and words in done.stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["run", "--config=c.py"], "this is no TPU VM"),
        (["status"], "say which slice"),
        (["run", "--name=mine", "--zone=z"], "no config is given"),
        (["run", "--name=mine", "--zone=z", "--config=c"], "say where the run shall live"),
        (["create", "--name=mine"], "say where the slice is"),
        (["create", "--name=mine", "--zone=z"], "say what to ask for"),
        (["create", "--name=mine", "--zone=z", "--dry_run"], "say what to ask for"),
        (["run", "--name=mine", "--zone=z", "--data=mine"], "--data is a bucket's folder"),
        (["logs", "--name=mine", "--zone=z", "--data=gs://b/d"], "--data goes with run or setup"),
        (["create", "--name=mine", "--zone=z", "--type=v5-8"], "there is no type v5-8"),
        (["create", "--name=My_1", "--zone=z"], "lower-case letters"),
        (["create", "--name=mine", "--zone=z", "--spot", "--reserved"], "exclude each other"),
        (["status", "--name=mine", "--zone=z", "--tpye=v5e-8"], "does not know --tpye=v5e-8"),
        (["launch"], "there is no command launch"),
        (["run", "--name"], "--name needs a value"),
    ],
)
def test_mistakes_are_one_sentence(cloud, given, words):
    done = cloud.launch(*given)
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert cloud.operations("create", "start", "setup") == []


def test_gcloud_must_be_there_and_know_who_asks(cloud):
    given = ["status", "--name=mine", "--zone=z"]
    assert "gcloud auth login" in cloud.launch(*given, ACCOUNT="").stderr
    assert "no project is set" in cloud.launch(*given, PROJECT="").stderr
    tools = cloud.tools / "few"
    tools.mkdir()
    for name in ("bash", "dirname", "env"):
        (tools / name).symlink_to(f"/bin/{name}" if name == "bash" else f"/usr/bin/{name}")
    done = cloud.launch(*given, PATH=str(tools))
    assert done.returncode == 2 and "install the Google Cloud CLI" in done.stderr


def test_on_a_worker_itself_it_sets_up_and_runs_there(cloud):
    home = cloud.path / "worker-0"
    home.mkdir()
    on_it = {
        "PATH": f"{cloud.path / 'tools'}:/usr/bin:/bin",
        "HOME": str(home),
        "WORKER": "0",
        "ENDPOINTS": "10.0.0.1",
    }
    cloud.program('echo here; exit "$ATTEMPT"')
    words = ["run", "--config=c.py", "--workdir=w", *AWKWARD]
    done = cloud.launch(*words, **on_it)
    assert done.returncode == 1 and done.stdout == "here\n", done.stderr
    assert cloud.given() == ["-m", "zest_jax.train", *words[1:]]
    assert "ZEST_DISTRIBUTED" not in cloud.environ()
    done = cloud.launch(*words, **on_it | {"ENDPOINTS": "10.0.0.1,10.0.0.2"})
    assert cloud.environ(attempt=2)["ZEST_DISTRIBUTED"] == "auto"
