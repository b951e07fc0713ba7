"""Question sets: the table, files in FlashRAG's format, and what is prepared of them."""

import gzip
import json
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace

import fsspec
import pytest

from zest_jax import datasets
from zest_jax.datasets import benchmarks, files, prepared
from zest_jax.datasets.files import TaskFile, hops_told, to_path
from zest_jax.datasets.prepared import Source, look_up_current, prepare
from zest_jax.errors import UserError
from zest_jax.tasks.types import Task

HOTPOT = {
    "type": "bridge",
    "level": "hard",
    "supporting_facts": {"title": ["Ulm", "Danube", "Ulm"], "sent_id": [0, 1, 2]},
    "context": {"title": ["Ulm", "Danube"], "sentences": [["a", "b"], ["ü"]]},
}
MUSIQUE = {"answerable": True, "question_decomposition": [{"id": 1}, {"id": 2}, {"id": 3}]}


def row(number, question="Which river is at Ulm?", answers=("Danube",), **more):
    return {"id": f"test_{number}", "question": question, "golden_answers": list(answers)} | more


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def refused(call, *words):
    with pytest.raises(UserError) as error:
        call()
    text = str(error.value)
    assert text.count("\n") == 0 and text[-1] in ".?", text
    for word in words:
        assert word in text, text


# --------------------------------------------------------------------------------------- the table


def test_published_rows():
    # The table of Search-R1's evaluation, written down here a second time.
    assert {b.name: (b.evaluated, b.rows[b.evaluated]) for b in datasets.BENCHMARKS.values()} == {
        "nq": ("test", 3610),
        "triviaqa": ("test", 11313),
        "popqa": ("test", 14267),
        "hotpotqa": ("dev", 7405),
        "2wikimultihopqa": ("dev", 12576),
        "musique": ("dev", 2417),
        "bamboogle": ("test", 125),
    }
    assert datasets.evaluated_rows() == 51713
    assert sum(datasets.BENCHMARKS[name].rows["train"] for name in datasets.TRAINED_ON) == 169615


def test_search_r1_rule():
    for there, want in (
        ("train dev test", "test"),
        ("train dev", "dev"),
        ("train", "train"),
        ("", ""),
    ):
        assert benchmarks.rule(there.split()) == want
    for b in datasets.BENCHMARKS.values():  # with the files that FlashRAG offers
        assert benchmarks.rule(b.rows) == b.evaluated


def test_names():
    for b in datasets.BENCHMARKS.values():
        assert benchmarks.find(b.title) is b and prepared._NAME.fullmatch(b.folder)
        assert all(benchmarks.find(alias) is b for alias in b.aliases)
    assert benchmarks.find("2Wiki").name == "2wikimultihopqa"
    assert benchmarks.find("Natural-Questions").name == "nq"
    assert benchmarks.find("squad") is None


# ------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["test.jsonl", "test.jsonl.gz"])
def test_a_file(tmp_path, name):
    path = write(
        tmp_path / name,
        row(0, "  which river is at Ulm ", ["Danube", " ", "Donau", ""], metadata=HOTPOT),
        row(1, "Why not?", hops=4, source_id="Q1", evidence=["p1", "p2"], benchmark="popqa"),
        row(2, extra={"a": [1]}),
    )
    tasks = TaskFile(path, "mine")
    first, second, third = tasks
    assert (tasks.rows, tasks.blank_answers) == (3, 2)
    assert first.question == "which river is at Ulm?" and first.answers == ("Danube", "Donau")
    assert first.hops == 2 and first.meta["benchmark"] == "mine"
    assert json.loads(first.meta["metadata"]) == HOTPOT and "ü" in first.meta["metadata"]
    assert second == Task(
        "test_1", "Why not?", ("Danube",), 4, "Q1", ("p1", "p2"), meta={"benchmark": "popqa"}
    )
    assert third.hops == 0 and third.meta == {"benchmark": "mine", "extra": {"a": [1]}}


def test_escapes(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps(row(0, "Which \U0001f40b is in the Donau bei Köln?")) + "\n")
    assert "\\ud83d" in path.read_text()
    assert next(iter(TaskFile(path, "nq"))).question.startswith("Which \U0001f40b is")


def test_hops_are_those_that_are_told(tmp_path):
    assert hops_told(HOTPOT) == 2 and hops_told(MUSIQUE) == 3
    two_wiki = {"type": "bridge_comparison", "supporting_facts": {"title": list("ABCD")}}
    assert hops_told(two_wiki) == 4
    assert hops_told({"supporting_facts": [["A", 0], ["A", 1], ["B", 0]]}) == 2
    for metadata in (None, "text", {}, {"supporting_facts": 3}, {"supporting_facts": {"x": 1}}):
        assert hops_told(metadata) == 0
    path = write(tmp_path / "test.jsonl", row(0), row(1, metadata=MUSIQUE))
    assert [t.hops for t in TaskFile(path, "bamboogle")] == [2, 3]
    assert [t.hops for t in TaskFile(path, "nq")] == [1, 3]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("is empty; fetch it again",)),
        (b"\n\n", ("is empty",)),
        (b'{"id": "a", "question": "x?", "golden_answers": ["y"]}\n{"id": "b", "ques',
         ("cut short", "last line, 2", "fetch it again")),
        (b'{"id": "a", "question": "caf\xc3', ("cut short", "last line, 1")),
        (b'{"id": "a"\n', ("line 1", "JSON object")),
        (b'{"id": "caf\xe9"}\n', ("line 1", "UTF-8")),
        (b'{"id": "a", "question": "\\ud83D?"}\n', ("line 1", "UTF-8")),
        (b'["a"]\n', ("line 1", "JSON object", "in braces")),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", ("git lfs pull",)),
        (b'{"id": "a", "golden_answers": ["y"]}\n', ("line 1", "'question'", "missing")),
        (b'{"id": "a", "question": " ", "golden_answers": ["y"]}\n', ("line 1", "is empty")),
        (b'{"id": "a", "question": "x?", "golden_answers": []}\n', ("line 1", "answers' is empty")),
        (b'{"id": "a", "question": "x?", "golden_answers": ["", " "]}\n', ("'golden_answers' is",)),
        (b'{"id": "a", "question": "x?", "golden_answers": [3]}\n', ("golden_answers", "texts")),
        (b'{"id": "a", "question": "x?", "golden_answers": "y"}\n', ("golden_answers", "a list")),
        (b'{"id": "a", "question": "x?", "golden_answers": ["y"], "benchmark": 3}\n',
         ("'benchmark'",)),
        (b'{"id": "a", "question": "x?", "golden_answers": ["y"]}\n' * 2,
         ("line 2", "the id 'a' was used on line 1")),
    ],
)  # fmt: skip
def test_bad_files(tmp_path, content, words):
    path = tmp_path / "test.jsonl"
    path.write_bytes(content)
    refused(lambda: list(TaskFile(path, "nq")), str(path), *words)


def test_a_gzipped_file_cut_short(tmp_path):
    path = write(tmp_path / "test.jsonl.gz", *(row(i, f"Number {i * i}?") for i in range(500)))
    path.write_bytes(path.read_bytes()[:-300])
    refused(lambda: list(TaskFile(path, "nq")), "cut short or damaged", "fetch it again")


def test_no_file(tmp_path):
    refused(lambda: list(TaskFile(tmp_path / "x.jsonl", "nq")), "no such file")
    refused(lambda: list(TaskFile(tmp_path, "nq")), "is a folder")


@pytest.fixture
def bucket(monkeypatch):
    """A bucket gs://b in memory, behind the package that would talk to a real one."""
    from etils.epath import backend

    memory = fsspec.filesystem("memory")

    class Bucket(type(memory)):
        cachable = False

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(str(path).removeprefix("gs:/"))

    monkeypatch.setattr(backend.fsspec_backend, "fs", lambda path: Bucket())
    memory.pipe("/b/nq/test.jsonl", json.dumps(row(0)).encode() + b"\n")
    memory.pipe("/b/popqa/test.jsonl.gz", gzip.compress(json.dumps(row(1)).encode() + b"\n"))
    yield memory
    memory.rm("/b", recursive=True)


def test_a_bucket(bucket, tmp_path, monkeypatch):
    root = to_path("gs://b")
    assert files.find_file(root / "nq", "dev") is None
    path = files.find_file(root / "nq", "test")
    assert [t.id for t in TaskFile(path, "nq")] == ["test_0"]
    zipped = files.find_file(root / "popqa", "test")
    assert str(zipped) == "gs://b/popqa/test.jsonl.gz"
    assert [t.id for t in TaskFile(zipped, "popqa")] == ["test_1"]
    monkeypatch.setitem(benchmarks.BENCHMARKS, "nq", published("nq", test=1))
    made = prepare(Source("nq", "test", path), tmp_path, False)
    assert made.rows == 1 and made.source["path"] == "gs://b/nq/test.jsonl"
    assert look_up_current(Source("nq", "test", path), tmp_path, False) == made


def test_a_bucket_that_cannot_be_read(monkeypatch):
    from etils.epath import backend

    def missing(path):
        raise ImportError("No module named 'gcsfs'")

    monkeypatch.setattr(backend.fsspec_backend, "fs", missing)
    folder = to_path("gs://b/nq")
    refused(lambda: files.find_file(folder, "test"), "gs://b/nq", "gcsfs", "copy the files")
    refused(lambda: list(TaskFile(folder / "test.jsonl", "nq")), "gcsfs")
    refused(lambda: to_path("ftp://b/nq"), "no such kind of bucket")

    def forbidden(path):
        raise RuntimeError("403")

    monkeypatch.setattr(backend.fsspec_backend, "fs", forbidden)
    refused(lambda: list(TaskFile(folder / "test.jsonl", "nq")), "cannot be read (403)")


# ---------------------------------------------------------------------------------------- prepared


def published(name, **rows):
    return replace(benchmarks.BENCHMARKS[name], rows=rows)


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    """A folder with 2wikimultihopqa/dev of 600 rows, nq/train and mine/{train,test} of two."""
    root = tmp_path_factory.mktemp("data")
    many = [row(i, f"Number {i}?", [str(i), "ü"], metadata=HOTPOT) for i in range(600)]
    for name, split, rows in (
        ("2wikimultihopqa", "dev", many),
        ("nq", "train", [row(0), row(1)]),
        ("mine", "train", [row(0), row(1)]),
        ("mine", "test", [row(2, evidence=["p"], benchmark="popqa", extra={"a": [1]}), row(3)]),
    ):
        path = write(root / "source" / name / f"{split}.jsonl", *rows)
        prepare(Source(name, split, path), root / "data", True)
    return root / "data"


def test_read_gives_what_the_file_has(ready):
    source = ready.parent / "source"
    want = list(TaskFile(source / "2wikimultihopqa" / "dev.jsonl", "2wikimultihopqa"))
    got = list(datasets.read("2wiki", ready))
    assert got == want and [t.id for t in got] == [f"test_{i}" for i in range(600)]
    assert got[0].meta["benchmark"] == "2wikimultihopqa" and got[0].hops == 2
    assert [t.id for t in datasets.read("2WikiMultihopQA", ready, limit=3)] == [
        "test_0", "test_1", "test_2",
    ]  # fmt: skip
    mine = list(datasets.read("mine", str(ready)))
    assert mine == list(TaskFile(source / "mine" / "test.jsonl", "mine"))
    assert mine[0].evidence == ("p",) and mine[0].meta["extra"] == {"a": [1]}
    assert [t.meta["benchmark"] for t in mine] == ["popqa", "mine"]
    assert [t.id for t in datasets.read("mine", ready, split="train")] == ["test_0", "test_1"]


def test_read_a_file(tmp_path):
    path = write(tmp_path / "own.jsonl.gz", *(row(i) for i in range(3)))
    tasks = list(datasets.read(str(path), None, limit=2))
    assert [(t.id, t.meta["benchmark"]) for t in tasks] == [("test_0", "own"), ("test_1", "own")]
    refused(lambda: datasets.read(str(path), None, split="test"), "has no splits")
    refused(lambda: datasets.read(f"{tmp_path}/no.jsonl", None), "no such file")


def test_what_is_not_there_is_refused_at_once(ready, tmp_path):
    refused(lambda: datasets.read("nq", ""), "--data_dir")
    refused(
        lambda: datasets.read("squad", ready),
        "squad is no set", "which has nq, 2wikimultihopqa, mine;", "prepare_data",
    )  # fmt: skip
    refused(lambda: datasets.read("popqa", ready), "popqa is not prepared")
    refused(lambda: datasets.read("nq", tmp_path), "has none")
    # NQ's train split must not be evaluated on because test is missing.
    refused(
        lambda: datasets.read("nq", ready),
        "nq has no split test", "only train", "--sets=nq --splits=test",
    )  # fmt: skip
    assert len(list(datasets.read("nq", ready, split="train"))) == 2
    refused(lambda: datasets.read("mine", ready, split="dev"), "no split dev", "only test, train")
    refused(lambda: datasets.read("mine", ready, split="validation"), "no split 'validation'")
    refused(lambda: datasets.read("mine", ready, limit=-1), "0 (all) or more")


def test_damaged_files_are_refused(ready, tmp_path):
    shutil.copytree(ready / "mine", tmp_path / "mine")
    (data,) = (tmp_path / "mine" / "test" / "1.0.0").glob("*array_record*")
    data.write_bytes(data.read_bytes()[:100])
    refused(lambda: list(datasets.read("mine", tmp_path)), "is damaged", "prepare mine again")


def test_a_mistake_leaves_what_was_there(tmp_path, monkeypatch):
    monkeypatch.setitem(benchmarks.BENCHMARKS, "nq", published("nq", test=2))
    path = write(tmp_path / "test.jsonl", row(0), row(1))
    source, data = Source("nq", "test", path), tmp_path / "data"
    assert look_up_current(source, data, False) is None
    made = prepare(source, data, False)
    assert (made.rows, made.blank_answers) == (2, 0)
    assert look_up_current(source, data, False) == made
    for rows, words in (
        ([row(0)], ("has 1 questions, 1 fewer than the published 2 of nq/test", "cut short")),
        ([row(0), row(1), row(2)], ("has 3 questions, 1 more than the published 2",)),
        ([row(0), row(0)], ("line 2", "was used on line 1")),
        ([row(0), row(1, answers=[])], ("line 2", "'golden_answers' is empty")),
    ):
        write(path, *rows)
        assert look_up_current(source, data, False) is None
        refused(lambda: prepare(source, data, False), *words)
        assert sorted(p.name for p in data.iterdir()) == ["nq"]
        assert [t.id for t in datasets.read("nq", data)] == ["test_0", "test_1"]
    write(path, row(5))
    prepare(source, data, True)
    assert [t.id for t in datasets.read("nq", data)] == ["test_5"]
    # Also where nothing is to be done.
    refused(lambda: look_up_current(source, data, False), "1 fewer")


def test_tensorflow_is_not_needed(ready):
    program = f"""
        import sys
        from zest_jax import datasets
        assert not {{"tensorflow_datasets", "array_record"}} & sys.modules.keys()
        assert len(list(datasets.read("2wiki", {str(ready)!r}))) == 600
        import tensorflow_datasets as tfds
        # Without a class of ours: the files describe themselves.
        name, place = "two_wiki_multihop_qa/dev:1.0.0", {str(ready)!r}
        own = tfds.data_source(name, split="dev", data_dir=place)
        assert (len(own), own[7]["id"], own[7]["golden_answers"][0]) == (600, b"test_7", b"7")
        assert "tensorflow" not in sys.modules
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
