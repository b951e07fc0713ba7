"""The program that prepares question sets."""

import json
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest

from zest_jax import cli, datasets, prepare_data
from zest_jax.datasets import benchmarks

ROWS = {"nq": 4, "triviaqa": 3, "popqa": 2, "hotpotqa": 5, "2wikimultihopqa": 6, "musique": 3,
        "bamboogle": 1}  # fmt: skip


def run(*arguments):
    return prepare_data.entry(["prepare_data", *map(str, arguments)])


def write(path, count, begin=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for i in range(begin, begin + count):
            row = {
                "id": f"{path.stem}_{i}",
                "question": f"What is {i}?",
                "golden_answers": [f"n{i}"],
            }
            file.write(json.dumps(row | {"metadata": {"pageviews": i}}) + "\n")
    return path


@pytest.fixture
def small(monkeypatch):
    """The table with other counts: the published ones of the small files below."""
    for name, rows in ROWS.items():
        b = benchmarks.BENCHMARKS[name]
        counts = {b.evaluated: rows, "train": 7}
        monkeypatch.setitem(benchmarks.BENCHMARKS, name, replace(b, rows=counts))


@pytest.fixture
def place(tmp_path, small):
    """FlashRAG's folder in small; every set has its train split too, but the last."""
    for b in benchmarks.BENCHMARKS.values():
        write(tmp_path / "source" / b.name / f"{b.evaluated}.jsonl", ROWS[b.name])
        if b.name != "bamboogle":
            write(tmp_path / "source" / b.name / "train.jsonl", 7)
    return tmp_path


def arguments(place, *more):
    return [f"--source={place / 'source'}", f"--data_dir={place / 'data'}", *more]


def refused(capsys, arguments, *words):
    capsys.readouterr()
    assert run(*arguments) == cli.EXIT_USER
    out, err = capsys.readouterr()
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("zest_jax: ") and last[-1] in ".?", err
    assert not re.search("Traceback|Error|Warning", err), err
    for word in words:
        assert word in last, last


def stamps(folder):
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_the_seven(place, capsys):
    assert run(*arguments(place)) == cli.EXIT_OK
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()] == [
        ["set", "split", "rows", "published", "verdict"],
        ["nq", "test", "4", "4", "as", "published"],
        ["triviaqa", "test", "3", "3", "as", "published"],
        ["popqa", "test", "2", "2", "as", "published"],
        ["hotpotqa", "dev", "5", "5", "as", "published"],
        ["2wikimultihopqa", "dev", "6", "6", "as", "published"],
        ["musique", "dev", "3", "3", "as", "published"],
        ["bamboogle", "test", "1", "1", "as", "published"],
        ["total", "evaluation", "24", "24", "as", "published"],
    ]
    assert err.startswith("preparing nq/test (MB) 1/1") and len(err.splitlines()) == 7
    for name, rows in ROWS.items():
        tasks = list(datasets.read(name, place / "data"))
        assert len(tasks) == rows and {t.meta["benchmark"] for t in tasks} == {name}
        assert tasks[0].answers == ("n0",) and tasks[0].meta["metadata"] == '{"pageviews": 0}'
    assert next(datasets.read("bamboogle", place / "data")).hops == 2


def test_again_only_what_has_changed(place, capsys):
    wanted = arguments(place, "--sets=nq,2wiki,nq")
    assert run(*wanted) == cli.EXIT_OK
    before, table = stamps(place / "data"), capsys.readouterr().out
    assert run(*wanted) == cli.EXIT_OK
    out, err = capsys.readouterr()
    assert out == table and err.count("prepared before, and its file is unchanged") == 2
    assert stamps(place / "data") == before
    write(place / "source" / "nq" / "test.jsonl", 4, begin=4)  # as many rows and bytes
    assert run(*wanted) == cli.EXIT_OK
    assert capsys.readouterr().err.count("unchanged") == 1
    after = stamps(place / "data")
    assert {p.relative_to(place / "data").parts[0] for p in after if after[p] != before.get(p)} == {
        "nq"
    }
    assert [t.id for t in datasets.read("nq", place / "data")] == [f"test_{i}" for i in range(4, 8)]


def test_training_sets(place, capsys):
    wanted = arguments(place, "--sets=NQ,hotpot", "--splits=train")
    assert run(*wanted) == cli.EXIT_OK
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[-1] == ["total", "training", "14", "14", "as", "published"]
    assert len(list(datasets.read("hotpotqa", place / "data", split="train"))) == 7
    assert run(*arguments(place, "--sets=nq", "--splits=all")) == cli.EXIT_OK
    out, err = capsys.readouterr()
    assert "preparing nq/test (MB) 1/1" in err and "nq/train: prepared before" in err
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [["nq", "test"], ["nq", "train"]]
    assert run(*arguments(place, "--sets=hotpotqa", "--splits=train,dev")) == cli.EXIT_OK


@pytest.mark.parametrize(("rows", "words"), [(3, "1 fewer"), (6, "2 more")])
def test_row_counts(place, capsys, rows, words):
    write(place / "source" / "nq" / "test.jsonl", rows)
    wanted = arguments(place, "--sets=nq")
    refused(capsys, wanted, f"has {rows} questions, {words} than the published 4 of nq/test",
            "--allow_row_mismatch")  # fmt: skip
    assert not (place / "data" / "nq").exists()
    assert run(*wanted, "--allow_row_mismatch") == cli.EXIT_OK
    assert capsys.readouterr().out.splitlines()[1].split() == [
        "nq",
        "test",
        str(rows),
        "4",
        *words.split(),
    ]
    refused(capsys, wanted, words)


def test_a_file_of_ones_own(tmp_path, capsys):
    path = write(tmp_path / "some.jsonl", 3)
    data = f"--data_dir={tmp_path / 'data'}"
    assert run(f"--file={path}", "--name=mine", data) == cli.EXIT_OK
    assert capsys.readouterr().out.splitlines()[1].split() == [
        "mine", "test", "3", "-", "nothing", "published",
    ]  # fmt: skip
    assert [t.meta["benchmark"] for t in datasets.read("mine", tmp_path / "data")] == ["mine"] * 3
    assert run(f"--file={path}", "--name=mine", "--splits=train", data) == cli.EXIT_OK
    capsys.readouterr()
    with path.open("a") as file:
        file.write('{"id": "some_9", "question": "Wh')
    refused(capsys, [f"--file={path}", "--name=mine", data], "cut short", "last line, 4")
    assert len(list(datasets.read("mine", tmp_path / "data"))) == 3


def test_mistakes(place, capsys):
    source, data = arguments(place)
    file = f"--file={write(place / 'x.jsonl', 1)}"
    for given, words in [
        ([source], ["--data_dir=data"]),
        ([data], ["either --source=FOLDER or --file"]),
        ([source, file, data], ["either"]),
        ([source, "--data_dir=gs://b/data"], ["must be a local folder"]),
        ([source, f"--data_dir={place / 'x.jsonl'}"], ["is a file"]),
        ([source, data, "--workdir=w"], ["no workdir"]),
        ([source, data, "--name=x"], ["--name goes with --file"]),
        ([f"--source={place / 'no'}", data], ["no such folder"]),
        ([source, data, "--sets=squad"], ["no set 'squad'", "nq, triviaqa", "--file and --name"]),
        ([source, data, "--splits=validation"], ["no split 'validation'", "test, dev, train"]),
        ([source, data, "--sets=nq", "--splits=dev"],
         ["nq has no split dev", "only test, train", "fetch the file"]),
        ([file, data], ["--name=mine"]),
        ([file, data, "--name=m", "--sets=nq"], ["--sets goes with --source"]),
        ([file, data, "--name=nq"], ["published set"]),
        ([file, data, "--name=2Wiki"], ["published set"]),
        ([file, data, "--name=My set"], ["small letters"]),
        ([file, data, "--name=m", "--splits=all"], ["no split 'all'"]),
        ([f"--file={place / 'y.jsonl'}", data, "--name=m"], ["no such file"]),
    ]:  # fmt: skip
        refused(capsys, given, *words)
    assert not [p for p in (place / "data").glob("*") if p.name != ".lock"]


def test_a_split_that_is_not_the_published_one(place, capsys):
    nq = place / "source" / "nq"
    (nq / "test.jsonl").rename(nq / "dev.jsonl")
    wanted = arguments(place, "--sets=nq")
    refused(capsys, wanted, "has dev.jsonl but no test.jsonl", "--splits=dev")
    (nq / "dev.jsonl").unlink()
    refused(capsys, wanted, "has train.jsonl but no test.jsonl")
    write(place / "source" / "hotpotqa" / "test.jsonl", 2)
    refused(capsys, arguments(place, "--sets=hotpotqa"), "the published split", "say --splits=dev")
    # All the same if that is wanted: Search-R1's rule, to the letter.
    assert run(*arguments(place, "--sets=hotpotqa", "--allow_row_mismatch")) == cli.EXIT_OK
    (nq / "train.jsonl").unlink()
    refused(capsys, arguments(place), "has no test.jsonl", "--sets")
    assert not (place / "data" / "nq").exists()


PROGRAM = """
    import os, signal, sys
    from zest_jax import prepare_data
    from zest_jax.datasets import benchmarks, files
    plain = files.TaskFile.__iter__

    def dying(self):
        for number, task in enumerate(plain(self)):
            if number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield task

    files.TaskFile.__iter__ = dying
    sys.exit(prepare_data.entry(["prepare_data", *sys.argv[1:]]))
"""


def test_a_killed_one_is_made_anew(place, capsys):
    wanted = arguments(place, "--sets=nq", "--allow_row_mismatch")
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), *wanted]
    assert subprocess.run(program).returncode == -signal.SIGKILL
    data = place / "data"
    assert (data / ".making").exists() and not (data / "nq").exists()
    assert run(*wanted) == cli.EXIT_OK
    assert sorted(p.name for p in data.iterdir()) == [".lock", "nq"]
    assert len(list(datasets.read("nq", data))) == 4
    capsys.readouterr()


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process's files")
def test_a_full_disk(tmp_path):
    path = write(tmp_path / "many.jsonl", 3000)
    program = """
        import resource, sys
        from zest_jax import prepare_data
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        sys.exit(prepare_data.entry(["prepare_data", *sys.argv[1:]]))
    """
    command = [sys.executable, "-c", textwrap.dedent(program), f"--file={path}", "--name=many",
               f"--data_dir={tmp_path / 'data'}"]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == cli.EXIT_DISK, result.stderr
    assert result.stdout == ""
    line = result.stderr.splitlines()[-1]
    assert line.startswith("zest_jax: a file has reached the size limit"), line
    assert [p.name for p in (tmp_path / "data").iterdir()] == [".lock"]


def test_two_at_once(place, capsys):
    from zest_jax.retrieval.storage import held

    with held(place / "data"):
        refused(capsys, arguments(place), "another process is writing")
