"""Mistakes and a full machine: one sentence, the right exit code, nothing lost."""

import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from test_resume import assert_same_run

from zest_jax import cli, train


@pytest.fixture
def program(place, tmp_path, capfd):
    """Runs `zest_jax.train` in this process; returns (exit code, stderr)."""

    def run(*more: str, workdir: Path | None = None) -> tuple[int, str]:
        code = train.entry(["train", *place.arguments(workdir or tmp_path / "run", *more)])
        return code, capfd.readouterr().err

    return run


def assert_sentence(err: str, *words: str) -> None:
    """The last line is one sentence of ours with these words; no library adds any of its own."""
    assert not re.search("Traceback|Error|Warning|Exception|PyTorch", err), err
    last = err.strip().splitlines()[-1]
    assert last.startswith("zest_jax: ") and last[-1] in ".?", err
    for word in words:
        assert word in last, last


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--config.solver.goup_size=4", ("no field solver.goup_size", "solver.group_size")),
        ("--config.warmstart.steps=4", ("no field warmstart.steps", "warm_start.steps")),
        ("--config.solver.group_size=many", ("solver.group_size", "a whole number", "'many'")),
        ("--config.solver.decay=perhaps", ("solver.decay", "true or false", "'perhaps'")),
        ("--config=configs/smok.py", ("configs/smok.py does not exist", "configs/smoke.py")),
        ("--config=configs/smoke.py:contrl", ("unknown config variant 'contrl'", "control")),
        ("--wrokdir=x", ("unknown flag --wrokdir", "--workdir")),
    ],
)
def test_command_lines(program, tmp_path, flag, words):
    code, err = program(flag)
    assert code == cli.EXIT_USER
    assert_sentence(err, *words)
    assert not (tmp_path / "run").exists()


def lines_of(world: Path, name: str) -> list[str]:
    return (world / name).read_text("utf-8").splitlines(keepends=True)


@pytest.fixture
def world(place, tmp_path):
    return Path(shutil.copytree(place.world, tmp_path / "world"))


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("passages.jsonl", "not json\n", ("line 3", "one JSON object a line", "not JSON")),
        ("passages.jsonl", '{"id": "x", "title": "X"}\n', ("line 3", "'text' (a text)", "missing")),
        (
            "passages.jsonl",
            '{"id": "x", "title": 7, "text": ""}\n',
            ("line 3", "'title'", "a text"),
        ),
        ("entities.jsonl", '{"id": "x"}\n', ("line 3",)),
        ("relations.jsonl", '{"id": "currency", "label": "x"}\n', ("line 3", "'phrases'")),
        ("triples.tsv", "one\ttwo\n", ("line 3",)),
        ("heldout.jsonl", '{"id": "x", "question": "?"}\n', ("line 3", "'golden_answers'")),
    ],
)
def test_a_line_of_the_world(program, world, name, line, words):
    lines = lines_of(world, name)
    lines[2] = line
    (world / name).write_text("".join(lines), "utf-8")
    code, err = program(f"--config.world.folder={world}")
    assert code == cli.EXIT_USER
    assert_sentence(err, str(world / name), *words)


@pytest.mark.parametrize("name", ["passages.jsonl", "entities.jsonl", "heldout.jsonl"])
def test_an_empty_file_of_the_world(program, world, name):
    (world / name).write_text("")
    code, err = program(f"--config.world.folder={world}")
    assert code == cli.EXIT_USER
    assert_sentence(err, str(world / name), "is empty")


@pytest.mark.parametrize("name", ["passages.jsonl", "triples.tsv", "heldout.jsonl"])
def test_a_missing_file_of_the_world(program, world, name):
    (world / name).unlink()
    code, err = program(f"--config.world.folder={world}")
    assert code == cli.EXIT_USER
    assert_sentence(err, str(world / name), "no such file")


def test_a_mistake_corrected_goes_on_in_the_same_workdir(program, tmp_path):
    """A first start that failed before it began must not keep the workdir for its config."""
    workdir = tmp_path / "run"
    for folder in ("nowhere-1", "nowhere-2"):
        code, err = program(f"--config.policy.folder={folder}", workdir=workdir)
        assert code == cli.EXIT_USER
        assert_sentence(err, folder)


def test_questions_longer_than_the_prompt(program, world):
    lines = lines_of(world, "heldout.jsonl")
    record = json.loads(lines[0])
    record["question"] = "What is " + "the capital of " * 20 + "France?"
    (world / "heldout.jsonl").write_text(json.dumps(record) + "\n" + "".join(lines[1:]))
    code, err = program(f"--config.world.folder={world}", "--config.warm_start.steps=0")
    assert code == cli.EXIT_USER
    assert_sentence(err, "prompt_length")


def test_a_passage_longer_than_an_observation(program, world):
    lines = lines_of(world, "passages.jsonl")
    record = json.loads(lines[4])
    record["text"] += " It is a place that many people know." * 12
    lines[4] = json.dumps(record) + "\n"
    (world / "passages.jsonl").write_text("".join(lines))
    code, err = program(f"--config.world.folder={world}")
    assert code == cli.EXIT_USER
    assert_sentence(err, "passages.jsonl", f"passage {record['id']} has", "observation_length=62")


def test_a_workdir_of_another_config(place, finished_run):
    before = {path: path.stat().st_mtime_ns for path in finished_run.rglob("*.json*")}
    done = place.run(place.arguments(finished_run, "--config.solver.learning_rate=1e-5"))
    assert done.returncode == cli.EXIT_USER
    assert_sentence(
        done.stderr, "another config", "solver.learning_rate: 0.0003 there, 1e-05 now", "--workdir"
    )
    assert before == {path: path.stat().st_mtime_ns for path in finished_run.rglob("*.json*")}


# ---------------------------------------------------------------------------------------------
# A machine without room


def unfinished(finished_run: Path, workdir: Path) -> Path:
    """The finished run as it was before its last checkpoint."""
    shutil.copytree(finished_run, workdir)
    newest = max((workdir / "checkpoints").iterdir(), key=lambda path: int(path.name))
    shutil.rmtree(newest)
    for name in ("report.json", "report.html"):
        (workdir / name).unlink()
    return workdir


def file_limit(kilobytes: int) -> tuple[str, ...]:
    """A command prefix under which no file may be larger."""
    return ("bash", "-c", f'ulimit -f {kilobytes} && exec "$@"', "-")


def checkpoints_of(workdir: Path) -> list[str]:
    return sorted(path.name for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())


def test_a_file_that_may_not_grow_while_checkpointing(place, finished_run, tmp_path):
    workdir = unfinished(finished_run, tmp_path / "run")
    before = checkpoints_of(workdir)
    done = place.run(place.arguments(workdir), prefix=file_limit(1024))
    assert done.returncode == cli.EXIT_DISK, done.stderr
    assert_sentence(done.stderr, "limit", "what was saved before is kept")
    assert checkpoints_of(workdir) == before
    done = place.run(place.arguments(workdir))
    assert done.returncode == 0, done.stderr
    assert_same_run(workdir, finished_run)


MOUNT = """
mount -t tmpfs -o size="$1" none "$2" || exit 99
cp -a "$3"/. "$2"
"${@:5}"
code=$?
cp -a "$2"/. "$4"
exit $code
"""


def test_a_full_disk_while_checkpointing(place, finished_run, tmp_path):
    source = unfinished(finished_run, tmp_path / "source")
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    # A mount of its own, for root and for users who may have a name space.
    unshare = next((u for u in (["-m"], ["-Urm"]) if _may_mount(u, disk)), None)
    if unshare is None:
        pytest.skip("may not mount a small disk here")
    used = sum(-(-path.stat().st_size // 4096) * 4096 for path in source.rglob("*"))
    prefix = ("bash", "-c", MOUNT, "-", str(used + (4 << 20)), str(disk), str(source), str(kept))
    done = place.run(place.arguments(disk), prefix=("unshare", *unshare, *prefix))
    assert done.returncode == cli.EXIT_DISK, done.stderr
    assert_sentence(done.stderr, "the disk is full", "what was saved before is kept")
    assert checkpoints_of(kept) == checkpoints_of(source)
    done = place.run(place.arguments(kept))
    assert done.returncode == 0, done.stderr
    assert_same_run(kept, finished_run)


def _may_mount(unshare: list[str], folder: Path) -> bool:
    if not shutil.which("unshare"):
        return False
    command = ["unshare", *unshare, "mount", "-t", "tmpfs", "none", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


def test_a_full_disk_at_the_very_start(place, tmp_path):
    done = place.run(place.arguments(tmp_path / "run"), prefix=file_limit(0))
    assert done.returncode == cli.EXIT_DISK, done.stderr
    assert_sentence(done.stderr, "limit")


def test_no_memory(place, tmp_path):
    workdir = tmp_path / "run"
    more = ("--config.solver.slots=68719476736", "--config.warm_start.steps=0")
    done = place.run(place.arguments(workdir, *more))
    assert done.returncode == cli.EXIT_MEMORY, done.stderr
    assert_sentence(done.stderr, "no memory left", "in the config")
    assert checkpoints_of(workdir)


def test_interrupted(place, tmp_path):
    workdir = tmp_path / "run"
    with place.start(place.arguments(workdir)) as process:
        try:
            deadline = time.monotonic() + 120
            while not (workdir / "checkpoints" / "1").exists():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == cli.EXIT_INTERRUPTED, err
    assert_sentence(err, "interrupted", "the same command")
    assert checkpoints_of(workdir)
