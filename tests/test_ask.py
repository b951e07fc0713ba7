"""One question on the command line: what is shown, what is recorded, what is refused."""

import json

import pytest
import tiny
from retrieval_server import save_bm25_index, serving

from zest_jax import ask, cli
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


def test_the_record_of_an_episode_over_http(places, capsys):
    with serving(open_index(places / "index")) as server:
        assert run(places, f"--index={server.url}", "--json", *SAMPLED) == cli.EXIT_OK
    record = json.loads(capsys.readouterr().out)
    assert record["answer"] == "Jane Austen" and record["finish"] == "answered"
    assert record["searches"] == 1 and record["index"] == server.url
    first, last = record["turns"]
    assert first["text"] == SEARCH and last["text"].endswith(ANSWER) and last["searches"] == []
    (search,) = first["searches"]
    assert search["query"] == "Emma novel"
    assert [p["title"] for p in search["passages"]] == ["Emma", "Ivanhoe"]
    assert search["passages"][0]["score"] > search["passages"][1]["score"] > 0
    assert set(record["seconds"]) == {"decode", "extend", "search", "text"}


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
