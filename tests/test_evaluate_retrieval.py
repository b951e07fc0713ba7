"""Recall of gold evidence by a program, over indexes of three kinds."""

import json
from pathlib import Path

import pytest
from retrieval_server import save_bm25_index, save_exact_index
from test_open_index import PASSAGES

from zest_jax import build_index, cli, evaluate_retrieval
from zest_jax.retrieval.index_files import read_manifest
from zest_jax.retrieval.open_index import open_index
from zest_jax.retrieval.partitioned import PartitionedIndex
from zest_jax.tasks.types import Task, write_tasks

ENCODER = Path(__file__).parent / "fixtures" / "encoders" / "e5"


def run(**flags):
    return evaluate_retrieval.entry(["x", *(f"--{k}={v}" for k, v in flags.items())])


def build(*arguments):
    return build_index.entry(["build_index", *map(str, arguments)])


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / "tasks.jsonl"
    write_tasks(
        path,
        [
            Task("a", "Which animal barks?", ("dog",), evidence=("p4",)),
            Task("b", "Rhône and a tower", ("x",), hops=2, evidence=("p1", "p7", "gone")),
            Task("c", "without evidence", ("x",)),
        ],
    )
    return path


def test_recall_worked_by_hand():
    tasks = [
        Task("a", "?", ("x",), evidence=("p1",)),
        Task("b", "?", ("x",), hops=2, evidence=("p1", "p2", "p2")),
    ]
    found = [["p3", "p1"], ["p2"]]
    rows = evaluate_retrieval.summary(tasks, found, [1, 2])
    told = [(r["hops"], r["k"], r["tasks"], r["recall"], r["whole"]) for r in rows]
    assert told == [
        ("all", 1, 2, 0.25, 0), ("all", 2, 2, 0.75, 0.5), (1, 1, 1, 0, 0), (1, 2, 1, 1, 1),
        (2, 1, 1, 0.5, 0), (2, 2, 1, 0.5, 0),
    ]  # fmt: skip
    assert (rows[1]["low"], rows[1]["high"]) == (0.5, 1)


def test_words(tmp_path, tasks, capsys):
    save_bm25_index(tmp_path / "index", PASSAGES)
    out = tmp_path / "out.json"
    assert run(index=tmp_path / "index", tasks=tasks, top_k="3,1", out=out, batch_size=1) == 0
    shown = capsys.readouterr()
    assert "1 of 3 tasks have no evidence" in shown.err
    assert "1 gold passages are not in the index" in shown.err
    told = json.loads(out.read_text())
    recall = {(r["hops"], r["k"]): r["recall"] for r in told["rows"]}
    assert recall[1, 1] == 1 and recall[2, 3] == pytest.approx(2 / 3)
    assert recall["all", 3] == pytest.approx(5 / 6) and told["gold_passages_missing"] == 1
    assert len(shown.out.splitlines()) == 7


def test_every_kind_of_vectors_finds_the_same(tmp_path, tasks, capsys):
    index = tmp_path / "index"
    save_exact_index(index, PASSAGES, ENCODER)
    assert run(index=index, tasks=tasks) == 0
    exact = capsys.readouterr().out
    settings = ["--dimensions_per_block=2", "--num_leaves=2", "--num_leaves_to_search=2",
                "--reordering_num_neighbors=10", "--soar_lambda=1"]  # fmt: skip
    assert build(f"--index={index}", "--kind=partitioned", *settings) == 0
    manifest = read_manifest(index)
    assert manifest.kind == "partitioned" and manifest.settings["partitioned"]["reorder"] == 10
    assert {e.file for e in manifest.files} >= {"partitioned/code_GPW.npy"}
    index.rename(tmp_path / "moved")
    index = tmp_path / "moved"
    assert isinstance(open_index(index)._index, PartitionedIndex)
    capsys.readouterr()
    assert run(index=index, tasks=tasks) == 0
    assert capsys.readouterr().out == exact
    # Changed without a change of length, then cut short: both are found and named.
    path = index / "partitioned" / "vectors.npy"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert run(index=index, tasks=tasks) == cli.EXIT_USER
    assert "vectors.npy is damaged" in capsys.readouterr().err
    path.write_bytes(data[:-5])
    assert run(index=index, tasks=tasks) == cli.EXIT_USER
    assert "cut short" in capsys.readouterr().err
    path.write_bytes(data)
    assert build(f"--index={index}", "--kind=exact") == 0
    assert read_manifest(index).kind == "exact" and not (index / "partitioned").exists()
    capsys.readouterr()
    assert run(index=index, tasks=tasks) == 0 and capsys.readouterr().out == exact


def test_mistakes(tmp_path, tasks, capsys):
    save_bm25_index(tmp_path / "index", PASSAGES)
    other, none = tmp_path / "other.jsonl", tmp_path / "none.jsonl"
    write_tasks(other, [Task("a", "?", ("x",), evidence=("elsewhere",))])
    write_tasks(none, [Task("a", "?", ("x",))])
    index = tmp_path / "index"
    for flags, said in [
        ({"index": index}, "no --tasks"),
        ({"tasks": tasks}, "no --index"),
        ({"index": index, "tasks": tasks, "top_k": "1,x"}, "--top_k takes numbers"),
        ({"index": index, "tasks": tasks, "top_k": "0"}, "--top_k takes numbers"),
        ({"index": index, "tasks": tasks, "batch_size": 0}, "--batch_size"),
        ({"index": index, "tasks": tmp_path / "no"}, "no such file"),
        ({"index": tmp_path, "tasks": tasks}, "is no index"),
        ({"index": index, "tasks": none}, "none of its 1 tasks has evidence"),
        ({"index": index, "tasks": other}, "none of the 1 gold passages"),
    ]:
        assert run(**flags) == cli.EXIT_USER
        assert said in capsys.readouterr().err
    for arguments, said in [
        ([f"--index={index}", "--kind=partitioned"], "index of words"),
        ([f"--index={index}", "--num_leaves=4", "--encoder=bm25"], "needs --kind"),
        ([f"--index={tmp_path}/x", "--encoder=bm25", "--kind=scann"], "takes no --kind"),
        ([f"--index={index}", "--kind=scann", "--spherical"], "needs vectors"),
    ]:
        assert build(*arguments) == cli.EXIT_USER
        assert said in capsys.readouterr().err
