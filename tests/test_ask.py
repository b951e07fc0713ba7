"""One question on the command line: what is shown, what is recorded, what is refused."""

import json

import pytest
import tiny
from retrieval_server import save_bm25_index, serving

from zest_jax import ask, cli, evaluate
from zest_jax.models.hf import save_pretrained
from zest_jax.retrieval.interface import Passage
from zest_jax.retrieval.open_index import open_index
from zest_jax.rollout.host_driver import SearchFailed

SEARCH, ANSWER = "<search> Emma novel</search>", "<answer> Jane Austen</answer>"
LIKES = {SEARCH: 9.0, ANSWER: 9.5, "I think ": 8.0}
PASSAGES = [
    Passage("1", "Emma", "A novel of 1815 by Jane Austen.\x1b[31m" + " More of it." * 20),
    Passage("2", "Ivanhoe", "A novel by Walter Scott."),
    Passage("3", "Helium", "A gas."),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A policy that writes a few things only, and an index: their folders."""
    folder = tmp_path_factory.mktemp("ask")
    words, config, params, _, _ = tiny.search_world(LIKES, tuple(LIKES))
    save_pretrained(config, params, str(folder / "policy"), words)
    save_bm25_index(folder / "index", PASSAGES)
    return folder


def run(places, *arguments, question="Who wrote Emma?"):
    flags = [f"--model={places}/policy", "--protocol=plain_search", "--max_tokens=6", *arguments]
    return ask.entry(["ask", *flags, question])


SAMPLED = ("--temperature=1", "--seed=5", "--max_searches=2", "--top_k=2")


def test_the_episode_is_shown_as_it_goes(places, capsys):
    assert run(places, f"--index={places}/index", *SAMPLED) == cli.EXIT_OK
    shown = capsys.readouterr().out
    steps = [
        "question: Who wrote Emma?\n",
        "protocol plain_search\n",
        f"index: {places}/index\n",
        f"[1] {SEARCH}\n",
        "    search: Emma novel\n",
        "      1. Emma (",
        "by Jane Austen",
        "\n      2. Ivanhoe (",
        "[2] ",
        ANSWER,
        "answer: Jane Austen\n",
        "ended: it answered; 2 turns, 1 search, ",
        "seconds, with compilation: decode ",
    ]
    at = 0
    for step in steps:
        assert step in shown[at:], f"{step!r} is missing after {shown[:at]!r}: {shown}"
        at = shown.index(step, at) + len(step)
    assert "\x1b" not in shown, "no passage steers the terminal"
    assert max(map(len, shown.splitlines())) < 250


@pytest.mark.slow
def test_the_record_of_a_run_s_policy_among_its_own_passages(finished_run, capsys):
    question = "What is the capital of Bahamas?"
    assert ask.entry(["ask", f"--workdir={finished_run}", "--json", question]) == cli.EXIT_OK
    record = json.loads(capsys.readouterr().out)
    assert record["question"] == question and record["index"] == "the run's passages"
    assert record["protocol"] == "plain_search" and "step" in record["policy"]
    searches = [search for turn in record["turns"] for search in turn["searches"]]
    assert len(searches) == record["searches"] >= 1
    for search in searches:
        assert f"<search> {search['query']}</search>" in str(record["turns"])
        assert len(search["passages"]) == 1
    # Every name of the world finds its own passage, as in the run.
    assert searches[0]["passages"][0]["title"] == searches[0]["query"] == "Bahamas"
    assert record["finish"] == "answered" and record["answer"]
    assert set(record["seconds"]) == {"decode", "extend", "search", "text"}


@pytest.mark.slow
def test_a_run_is_evaluated_with_the_index_of_a_server(places, finished_run, tmp_path, capsys):
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "out.jsonl"
    asked = [f"What is the capital of {land}?" for land in ("Bahamas", "Cuba")]
    lines = [{"id": str(n), "question": q, "golden_answers": ["x"]} for n, q in enumerate(asked)]
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = [f"--workdir={finished_run}", f"--tasks={tasks}", f"--out={out}"]
    save_bm25_index(tmp_path / "index", [Passage("1", "Bahamas", "Its capital is Zed.")])
    with serving(open_index(tmp_path / "index")) as server:
        assert (
            evaluate.entry(["evaluate", *run, f"--index={server.url}", "--json=-"]) == cli.EXIT_OK
        )
    assert json.loads(capsys.readouterr().out)["settings"]["index"] == server.url
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert first["searches"] >= 1 and "Bahamas: Its capital is Zed." in first["text"]
    assert "<information></information>" in second["text"]
    assert evaluate.entry(["evaluate", *run, "--top_k=2"]) == cli.EXIT_USER
    assert "goes with --index" in capsys.readouterr().err


def test_without_an_index_a_search_ends_the_episode(places, capsys):
    assert run(places, "--temperature=1", "--seed=5") == cli.EXIT_OK
    shown = capsys.readouterr().out
    assert "no --index is given: the policy answers from memory" in shown
    assert "answer: none\nended: it wanted to search" in shown


def test_a_dead_server_is_named(places, capsys, monkeypatch):
    def fails(*_):
        raise SearchFailed("http://127.0.0.1:9/retrieve cannot be reached", 0, 1)

    monkeypatch.setattr(ask.HostSampler, "__call__", fails)
    assert run(places, "--index=http://127.0.0.1:9", *SAMPLED) == cli.EXIT_USER
    told = capsys.readouterr().err
    assert told == "zest_jax: http://127.0.0.1:9/retrieve cannot be reached.\n"


@pytest.mark.parametrize(
    ("arguments", "question", "words"),
    [
        ((), "", "no question is given"),
        (("--workdir=runs/x",), "x", "either --model=FOLDER_OR_HUB_ID or --workdir"),
        (("--step=3",), "x", "--step names a checkpoint of a run"),
        (("--top_k=0",), "x", "--top_k=0 is out of range; it is 1 or more"),
        (("--temperature=-1",), "x", "--temperature=-1.0 is out of range"),
        (("--protocol=plain_proposer",), "x", "asks for chain, passages"),
        (("--protocol=search_r2",), "x", "there is no protocol 'search_r2'"),
        (("--protocol=search_r1", "--max_tokens=501"), "x", "more than the 500 of protocol"),
        (("--protocol=qwen_tools",), "x", "no chat template"),
        (("--protocol=qwen_tools", "--nochat"), "x", "leave out --nochat"),
        (("--index=nowhere",), "x", "nowhere"),
        (("--index=ftp://x",), "x", "ftp:"),
        (("more",), "x", "several arguments are given; quote the question"),
        ((), "long " * 9000, "of the policy's context; shorten it"),
    ],
)
def test_mistakes_are_told_in_a_sentence(places, capsys, arguments, question, words):
    assert run(places, *arguments, question=question) == cli.EXIT_USER
    told = capsys.readouterr().err
    assert words in told and "Traceback" not in told
