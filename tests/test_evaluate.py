"""The program that evaluates: resuming, devices, tables and page, mistakes in one sentence."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import pytest
import tiny
import virtual_devices
from retrieval_server import save_bm25_index

from zest_jax import answering, cli, compare, datasets, evaluate, evaluation, published
from zest_jax import questions as questions_lib
from zest_jax.answers_file import AnswersFile, key_of
from zest_jax.behaviour import paired, read_answers
from zest_jax.datasets import BENCHMARKS
from zest_jax.errors import UserError
from zest_jax.evaluation import Answered, stream_of
from zest_jax.models.hf import save_pretrained
from zest_jax.retrieval.interface import Passage
from zest_jax.tasks.types import Task

SEARCH, ANSWER = "<search> Emma novel</search>", "<answer> Jane Austen</answer>"
LIKES = {SEARCH: 9.0, ANSWER: 9.6, "<answer> Walter Scott</answer>": 9.0, "I think ": 9.0}
PASSAGES = [
    Passage("1", "Emma", "A novel of 1815 by Jane Austen."),
    Passage("2", "Ivanhoe", "A novel by Walter Scott."),
]
HERE = Path(__file__).resolve().parent


def lines(*asked, **more):
    return "".join(
        json.dumps({"id": id, "question": q, "golden_answers": golds} | more) + "\n"
        for id, q, golds in asked
    )


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A policy that writes a few things only, an index and two files of questions."""
    folder = tmp_path_factory.mktemp("evaluate")
    words, config, params, _, _ = tiny.search_world(LIKES, tuple(LIKES))
    save_pretrained(config, params, str(folder / "policy"), words)
    save_bm25_index(folder / "index", PASSAGES)
    asked = [(str(n), f"Who wrote Emma, number {n}?", ["Jane Austen"]) for n in range(5)]
    (folder / "books.jsonl").write_text(lines(*asked))
    other = [("0", "Who wrote Ivanhoe?", ["Walter Scott"]), ("1", "Who is it?", ["austen"])]
    (folder / "other.jsonl").write_text(lines(*other, hops=2))
    return folder


def run(places, *arguments, model=True):
    flags = [f"--model={places}/policy", "--protocol=plain_search", "--max_tokens=6", "--slots=2",
             "--max_searches=2", f"--index={places}/index", "--top_k=1", "--draws=200"]  # fmt: skip
    return evaluate.entry(["evaluate", *(flags if model else []), *arguments])


SAMPLED = ("--temperature=1", "--samples=3")


def files(places):
    return f"--tasks={places}/books.jsonl,{places}/other.jsonl"


@pytest.fixture(scope="module")
def whole(places):
    """A whole evaluation in one go: its files and what it told."""
    out = places / "whole.jsonl"
    assert run(places, files(places), *SAMPLED, f"--out={out}", f"--json={places}/whole.json",
               f"--html={places}/whole.html") == cli.EXIT_OK  # fmt: skip
    return out, json.loads((places / "whole.json").read_text("utf-8"))


def read(path):
    answers = [Answered(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]
    return {key_of(a): a for a in answers}


def test_what_is_told(places, whole, capsys):
    out, told = whole
    answers = read(out)
    assert len(answers) == 21 and told["questions"] == 7 and told["samples"] == 3
    assert {n: r["count"] for n, r in told["benchmarks"].items()} == {"books": 5, "other": 2}
    books = [a.em for a in answers.values() if a.benchmark == "books"]
    assert told["benchmarks"]["books"]["em"] == pytest.approx(sum(books) / 15) and 0 < sum(books)
    # "austen" is covered by "Jane Austen", and never what is answered.
    other = told["benchmarks"]["other"]
    assert other["em"] <= other["cover_em"]
    mean = (told["benchmarks"]["books"]["em"] + other["em"]) / 2
    assert told["average"]["em"] == pytest.approx(mean)
    assert list(told["by_hop"]) == ["2"], "the other file does not tell hops"
    assert told["published"] == [] and told["comparison"] is None
    for a in answers.values():
        assert a.tokens > a.written > 0 and (a.hops, a.benchmark) in {(0, "books"), (2, "other")}
    assert len({a.text for a in answers.values()}) > 3, "samples differ"
    page = (places / "whole.html").read_text("utf-8")
    assert (
        "pass@3" in page and "average (unweighted)" in page and "http" not in page.split("<h1")[1]
    )


def test_it_goes_on_where_it_was_stopped(places, whole, tmp_path, capsys, monkeypatch):
    out, told = whole
    cut = tmp_path / "cut.jsonl"
    first = out.read_text("utf-8").splitlines(keepends=True)
    cut.write_text("".join(first[:7]) + first[7][: len(first[7]) // 2], "utf-8")  # a kill
    settings = out.with_name("whole.jsonl.settings.json").read_text("utf-8")
    cut.with_name("cut.jsonl.settings.json").write_text(settings)
    asked, answer = [], evaluation.answer_tasks

    def watched(sampler, params, tasks, key, temperature, samples):
        asked.extend(zip((t.meta["benchmark"] for t in tasks), (t.id for t in tasks), samples,
                         strict=True))  # fmt: skip
        return answer(sampler, params, tasks, key, temperature, samples)

    monkeypatch.setattr(answering, "answer_tasks", watched)
    again = [files(places), *SAMPLED, f"--out={cut}", "--json=-"]
    assert run(places, *again) == cli.EXIT_OK
    said = capsys.readouterr()
    assert "7 of 21 answers; going on" in said.err
    assert len(asked) == 14 and len(set(asked)) == 14
    assert not set(asked) & {key_of(Answered(**json.loads(x))) for x in first[:7]}
    assert read(cut) == read(out), "the same answers, whenever they were given"
    assert json.loads(said.out) == told
    # A third start asks nothing and tells the same.
    assert run(places, *again) == cli.EXIT_OK and len(asked) == 14
    assert json.loads(capsys.readouterr().out) == told
    # Other settings, or answers of which nothing is known, are refused.
    for more, words in (
        (["--seed=4"], "other settings (seed: 0, now 4)"),
        (["--top_k=2", "--seed=4"], "seed: 0, now 4; "),
        (["--limit=2"], "questions: 7, now 4; questions_digest: "),
    ):
        assert run(places, *again, *more) == cli.EXIT_USER
        err = capsys.readouterr().err
        assert words in err and "name another --out" in err, err
    cut.with_name("cut.jsonl.settings.json").unlink()
    assert run(places, *again) == cli.EXIT_USER
    assert "whose settings are not known" in capsys.readouterr().err


def test_the_file_of_answers_is_one_process_s(tmp_path):
    path = tmp_path / "x" / "answers.jsonl"
    with AnswersFile(path, {"seed": 1}) as file:
        with pytest.raises(UserError, match="written by another evaluation"):
            AnswersFile(path, {"seed": 1})
        file.append([Answered("1", "q?", ["a"], 1, None, 0.0, 0.0, 0, False, "text")])
    with AnswersFile(path, {"seed": 1}) as file:
        assert list(file.answers) == [("", "1", 0)] and file.answers["", "1", 0].text == ""
    with pytest.raises(UserError, match="seed: 1, now 2"):
        AnswersFile(path, {"seed": 2})
    path.write_text('{"id": "1"}\n')
    with pytest.raises(UserError, match="line 1 is no answer"):
        AnswersFile(path, {"seed": 1})
    with pytest.raises(UserError, match="is a folder"):
        AnswersFile(tmp_path, {})


def test_two_runs_are_compared(places, whole, tmp_path, capsys):
    """The greedy policy against its samples, by the program and by zest_jax.compare."""
    out, _ = whole
    assert run(places, files(places), f"--out={tmp_path}/greedy.jsonl", f"--against={out}",
               f"--json={tmp_path}/told.json", "--shown=1") == cli.EXIT_OK  # fmt: skip
    shown = capsys.readouterr().out
    told = json.loads((tmp_path / "told.json").read_text("utf-8"))["comparison"]
    assert told["count"] == 7 and set(told["by_benchmark"]) == {"books", "other"}
    em = told["figures"]["em"]
    right = [a.em for a in read(tmp_path / "greedy.jsonl").values()]
    assert em["after"] == pytest.approx(sum(right) / 7) and 0 < sum(right) < 7
    assert em["ci95"][0] <= em["difference"] <= em["ci95"][1]
    assert told["rescued"]["count"] + told["regressed"]["count"] <= 5
    assert f"before: {out}" in shown and f"rescued: {told['rescued']['count']}" in shown
    page = tmp_path / "compared.html"
    assert compare.entry(["compare", str(out), f"{tmp_path}/greedy.jsonl", "--draws=100",
                          f"--html={page}"]) == cli.EXIT_OK  # fmt: skip
    text = page.read_text("utf-8")
    assert "Two evaluations" in text and "Rescued" in text and "books" in text


def test_other_questions_are_refused_before_any_is_answered(places, whole, tmp_path, capsys):
    out = tmp_path / "few.jsonl"
    assert run(places, files(places), "--limit=1", f"--against={whole[0]}",
               f"--out={out}") == cli.EXIT_USER  # fmt: skip
    assert "the two sides answer different questions: 7 and 2" in capsys.readouterr().err
    assert not out.exists()


def test_an_unfinished_evaluation_is_not_compared(whole, tmp_path):
    lines = whole[0].read_text("utf-8").splitlines(keepends=True)
    part = tmp_path / "part.jsonl"
    part.write_text("".join(lines[:-1]))
    answers = read_answers(part)  # without its settings nothing tells how many are wanted
    with pytest.raises(UserError, match="some questions have 2 answers and some 3"):
        paired(answers, answers)
    settings = whole[0].with_name(f"{whole[0].name}.settings.json").read_text("utf-8")
    part.with_name("part.jsonl.settings.json").write_text(settings)
    with pytest.raises(UserError, match="has 20 of 21 answers; let its evaluation come to its"):
        read_answers(part)


def test_hops_that_a_file_states_are_told(tmp_path):
    stated, silent = tmp_path / "stated.jsonl", tmp_path / "silent.jsonl"
    stated.write_text(lines(("1", "q?", ["a"]), hops=1))
    silent.write_text(lines(("1", "q?", ["a"])))
    got = questions_lib.read_questions([str(stated), str(silent)], [], "")
    assert [task.hops for task in got] == [1, 0]


def test_a_protocol_that_does_not_fit_is_refused(capsys):
    assert evaluate.entry(["evaluate", "--config=configs/smoke.py", "--protocol=search_r1",
                           "--limit=1"]) == cli.EXIT_USER  # fmt: skip
    said = capsys.readouterr().err
    assert "the correction has 76 tokens, more than observation_length=62" in said
    assert "does not fit the lengths of the run's episodes" in said


MISTAKES = [
    ((), "one of them"),
    (("--config=configs/smoke.py", "--model=x"), "one of them"),
    (("--model=x",), "a folder has no held-out questions"),
    (("--model=x", "--tasks=x.jsonl", "--step=3"), "--step names a checkpoint of a run"),
    (("--workdir=x", "--max_tokens=3"), "--max_tokens is for a --model"),
    (("--workdir=x", "--top_k=3"), "goes with --index"),
    (("--workdir=x", "--samples=2"), "2 greedy answers are all the same"),
    (("--workdir=x", "--samples=0"), "--samples=0 is out of range; it is 1 or more"),
    (("--workdir=x", "--temperature=-1"), "--temperature=-1.0 is out of range"),
    (("--workdir=x", "--out=tests"), "tests is a folder"),
    (("--workdir=x", "--out=/proc/x.jsonl"), "/proc/x.jsonl cannot be written"),
    (("--workdir=x", "--json=README.md/x.json"), "README.md/x.json cannot be written"),
    (("--workdir=x", "--samples=100000000", "--temperature=1"), "it is 10000 at most"),
    (("--workdir=x", "--html=tests"), "tests is a folder"),
    (("--workdir=x", "--against=nowhere.jsonl"), "nowhere.jsonl: no such file of evaluated"),
    (("--workdir=x", "--tasks=nowhere.jsonl"), "nowhere.jsonl: no such file"),
    (("--workdir=x", "--benchmarks=nq"), "nq is a prepared set; say where it is with --data_dir"),
    (("--workdir=x", "--benchmarks=nqq", "--data_dir=tests"), "nqq is no set in tests"),
    (("--workdir=nowhere",), "nowhere is no workdir of a run"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_mistakes_are_told_in_a_sentence(capsys, monkeypatch, arguments, words):
    monkeypatch.chdir(HERE.parent)
    assert evaluate.entry(["evaluate", *arguments]) == cli.EXIT_USER
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 1 and not said.out, said.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (lines(("1", "q?", ["a"]), ("1", "r?", ["b"])), "line 2: the id '1' was used on line 1"),
        (lines(("1", "q?", [])), "line 1: 'golden_answers' is empty"),
        (lines(("1", "q?", ["a"]), evidence=["77", "78"]), "is of another corpus: it holds none "
         "of the 2 passages that the questions name as evidence ('77' is one)"),
        (lines(("1", "long " * 9000, ["a"])), "of the policy's context; shorten it"),
    ],
)  # fmt: skip
def test_bad_questions_are_told_in_a_sentence(places, tmp_path, capsys, text, words):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    assert run(places, f"--tasks={path}") == cli.EXIT_USER
    said = capsys.readouterr()
    assert words in said.err and said.err.strip().count("\n") == 0, said.err


def test_evidence_in_part_is_told(places):
    known = [Task("1", "q?", ("a",), evidence=("1", "9")), Task("2", "r?", ("a",))]
    assert questions_lib.check_evidence(known, PASSAGES, "the index") == (
        "1 of the 2 passages that the questions name as evidence are not in the index."
    )
    assert questions_lib.check_evidence(known[1:], PASSAGES, "x") == ""
    assert questions_lib.check_evidence(known, None, "a server") == "", "nobody can tell"


def test_another_corpus_than_the_run_s_is_told(places, tmp_path):
    from zest_jax.examinee import other_corpus

    save_bm25_index(tmp_path / "other", PASSAGES[:1])
    (note,) = other_corpus(str(tmp_path / "other"), str(places / "index"), "x")
    assert note.startswith(f"{tmp_path / 'other'} holds the corpus ")
    assert note.endswith(f"of {places / 'index'}.") and "the policy's run searched another" in note
    (note,) = other_corpus(str(tmp_path / "other"), "", "atlas")
    assert note.endswith("the policy's run searched the passages of atlas.")
    assert other_corpus(str(places / "index"), str(places / "index"), "x") == ()
    assert other_corpus("http://127.0.0.1:1", str(places / "index"), "x") == ()
    assert other_corpus("http://127.0.0.1:1", "", "atlas") == ()


def test_questions_of_several_places(places, monkeypatch):
    def read(name, data_dir, split="", limit=0):
        if name.endswith(".jsonl"):
            return real(name, data_dir, split, limit)
        assert data_dir == "data" and limit == 2
        return iter([Task(str(n), "q?", ("a",), meta={"benchmark": name}) for n in range(2)])

    real = datasets.read
    monkeypatch.setattr(datasets, "read", read)
    files = [f"{places}/books.jsonl", f"{places}/other.jsonl"]
    got = questions_lib.read_questions(files, ["nq", "triviaqa"], "data", 2)
    assert [(t.meta["benchmark"], t.id, t.hops) for t in got[::2]] == [
        ("books", "0", 0), ("other", "0", 2), ("nq", "0", 1), ("triviaqa", "0", 1),
    ]  # fmt: skip
    with pytest.raises(UserError, match="two questions of nq have the id '0'"):
        questions_lib.read_questions([], ["nq", "nq"], "data", 2)
    assert questions_lib.digest(got) != questions_lib.digest(got[:-1])


def test_a_sample_s_stream_is_its_own():
    tasks = [Task(str(n), "q?", ("a",), meta={"benchmark": b}) for n in range(50) for b in "xy"]
    streams = [stream_of(task, n) for task in tasks for n in range(8)]
    assert len(set(streams)) == 800 and 0 <= min(streams) and max(streams) < 2**32


COUNTS = {name: b.rows[b.evaluated] for name, b in BENCHMARKS.items()}


def test_published_numbers_stand_where_the_setting_is_the_same():
    assert sum(COUNTS.values()) == 51_713
    rows = published.comparable(COUNTS)
    assert {r["metric"] for r in rows} == {"em"} and len(rows) == 9 + 6 + 5
    ppo = next(r for r in rows if (r["system"], r["backbone"]) == ("PPO", "7B-base"))
    assert ppo["scores"]["nq"] == 0.48 and ppo["average"] == 0.431
    # One set alone: its numbers, no average; and of papers that tell only that, nothing.
    rows = published.comparable({"nq": 3610, "musique": 100, "mine": 5})
    assert len(rows) == 15 and all(list(r["scores"]) == ["nq"] for r in rows)
    assert all(r["average"] is None for r in rows)
    assert published.comparable({"nq": 3609, "mine": 3610}) == []
    assert all(r["average"] is None for r in published.comparable(COUNTS | {"mine": 3}))
    sample = dict.fromkeys(COUNTS, 562) | {
        "bamboogle": 125,
        "nq": 563,
        "musique": 563,
        "popqa": 563,
    }
    averages = [r for r in published.comparable(sample) if r["average"] is not None]
    assert {(r["source"], r["metric"]) for r in averages} == {("EviBack (arXiv 2607.23955)", "f1")}
    # Averages are what the papers print for their own rows.
    for row in published.ROWS:
        if row.scores:
            mean = sum(row.scores.values()) / 7
            assert row.average == pytest.approx(mean, abs=0.0011), row
            assert list(row.scores) == list(COUNTS)


def test_published_rows_stand_beside_ours_as_published():
    from zest_jax import evaluation_tables, scores

    answered = [
        Answered(str(n), "q?", ["a"], 0, "a", float(n % 2), 0.5, 1, True, "", benchmark="bamboogle")
        for n in range(125)
    ]
    told = scores.score(answered, draws=50) | {
        "settings": {"index": "wiki"}, "published": published.comparable({"bamboogle": 125}),
    }  # fmt: skip
    head, ours, *theirs = evaluation_tables.published_rows(told)
    assert head == ["as published, EM or F1", "Bamboogle", "average", "measured with"]
    assert ours == ["ours, EM", "0.496", "–", "wiki"]
    assert theirs[1] == [
        "Search-R1 (arXiv 2503.09516): PPO, 7B-base (published EM)", "0.432", "–",
        "E5-base-v2 over Wiki-18, top 3",
    ]  # fmt: skip
    assert told["average"]["em"] == pytest.approx(62 / 125), "theirs enter no mean of ours"


def test_devices_are_chosen_by_what_they_have_room_for(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Device:
        free: float
        device_kind: str = "chip"

        def memory_stats(self):
            return {"bytes_limit": 2 * self.free + 20, "bytes_in_use": 10}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device(0), Device(5e9), Device(1e9)])
    chosen, why = answering.choose_devices(0, int(3e9))
    assert [d.free for d in chosen] == [0, 5e9]
    assert why == "2 devices (chip), a copy of the policy (3.00 GB) on each"
    assert len(answering.choose_devices(3, int(3e9))[0]) == 3, "as asked"
    assert answering.choose_devices(1, 1)[1] == "one device (chip, of 3)"
    with pytest.raises(UserError, match="--devices=4 is not 0"):
        answering.choose_devices(4, 1)


def test_a_batch_that_fails_stops_the_others():
    done = []

    def worker(batch):
        if batch == [2]:
            raise UserError("no")
        done.append(batch)
        return batch

    with pytest.raises(UserError, match="no"):
        list(answering.spread([[n] for n in range(50)], [worker, worker]))
    nine = [[n] for n in range(3, 12)]
    assert sorted(answering.spread(nine, [worker] * 3)) == nine


PROGRAM = """
    import json, sys
    import jax
    import tiny
    from zest_jax import answering, assembly, evaluate
    from zest_jax.retrieval import Retriever
    from zest_jax.rollout.protocols import find
    from zest_jax.rollout.sampler import Sampler
    from zest_jax.rollout.state import RolloutSpec
    from zest_jax.tasks.types import Task
    from zest_jax.tracing import TraceCounter

    # Driven from the host, by the program.
    folder, arguments = sys.argv[1], sys.argv[2:]
    for count in (1, 2):
        out = f"--out={folder}/devices{count}.jsonl"
        assert evaluate.entry(["evaluate", *arguments, f"--devices={count}", out]) == 0

    # One compiled program, with the retriever inside.
    words, config, params, titles, texts = tiny.search_world()
    spec = RolloutSpec(slots=3, prompt_length=16, action_length=6, observation_length=24,
                       searches=2, query_length=4)
    protocol = find("plain_search")
    retriever = Retriever.build(words, titles, texts, layout=protocol.layout, retrieved=1,
                                observation_length=24)
    traces = TraceCounter()
    sampler = Sampler("s", config, spec, protocol, words, retriever, 12, traces)
    tasks = [Task(str(n), f"q{n}", ("a",)) for n in range(10)]
    wanted = [(task, n) for task in tasks for n in range(2)]
    key = assembly.random_key(0, "evaluate", 0)
    got = []
    for count in (1, 2):
        batches = answering.answer_all(sampler, params, wanted, key, 1.0, jax.devices()[:count])
        got.append(sorted((a.id, a.sample, a.text, a.searches) for b in batches for a in b))
    print(json.dumps({"devices": len(jax.devices()), "same": got[0] == got[1], "one": got[0],
                      "retraces": traces.retraces}))
"""


@pytest.mark.slow
def test_answers_do_not_depend_on_the_number_of_devices(places):
    program = textwrap.dedent(PROGRAM)
    arguments = [f"--model={places}/policy", "--protocol=plain_search", "--max_tokens=6",
                 "--slots=2", "--max_searches=2", f"--index={places}/index", "--top_k=1",
                 "--draws=10", "--temperature=1", "--samples=2", files(places),
                 "--json=-"]  # fmt: skip
    environment = os.environ | {
        "XLA_FLAGS": virtual_devices.flags(2),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]),
    }
    done = subprocess.run(
        [sys.executable, "-c", program, str(places), *arguments],
        capture_output=True, text=True, env=environment, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["devices"] == 2 and told["same"] and told["retraces"] == 0
    assert len(told["one"]) == 20 and len({text for _, _, text, _ in told["one"]}) > 10
    one, two = (read(places / f"devices{count}.jsonl") for count in (1, 2))
    assert len(one) == 14 and one == two
    assert "answering on one device (cpu, of 2)" in done.stderr
    assert "answering on 2 devices (cpu), a copy of the policy (0.00 GB) on each" in done.stderr
