"""The client of retrieval servers: forms of answers, retries, errors, batches."""

import json
import math
import socket
import time

import pytest
from retrieval_server import Echo, scripted, serving

from zest_jax.errors import UserError
from zest_jax.retrieval.interface import Passage, PassageRetriever, from_contents, to_contents
from zest_jax.retrieval.remote import RemoteError, RemoteRetriever, RemoteSettings, read_answer

QUICK = RemoteSettings(connect_s=2, read_s=2, retries=2, first_wait_s=0.01)
GOOD = json.dumps(
    {"result": [[{"document": {"id": "7", "contents": '"A title"\nA text.'}, "score": 0.5}]]}
).encode()
WANTED = [[(Passage("7", "A title", "A text."), 0.5)]]


def form(*items):
    return json.dumps({"result": [list(items)]}).encode()


def test_contents():
    for passage in (
        Passage("1", "Paris", "The capital.\nOf France."),
        Passage("1", "", "no title"),
        Passage("1", 'the "X" files', ""),
    ):
        assert from_contents("1", to_contents(passage)) == passage
    assert to_contents(Passage("1", "a\nb", "c")) == '"a b"\nc'
    assert from_contents("1", "Title\ntext") == Passage("1", "Title", "text")
    assert from_contents("1", "only text") == Passage("1", "", "only text")
    assert from_contents("1", '"') == Passage("1", "", '"')


def test_forms_of_answers():
    assert read_answer(GOOD, 1) == WANTED
    # Without scores: bare documents, as Search-R1 would send them.
    [[(passage, score)]] = read_answer(form({"id": 7, "contents": '"A title"\nA text.'}), 1)
    assert passage == WANTED[0][0][0] and math.isnan(score)
    [[(passage, score)]] = read_answer(form({"document": {"contents": "x"}, "score": None}), 1)
    assert passage == Passage("", "", "x") and math.isnan(score)
    assert read_answer(form({"document": {"id": "1", "title": "T", "text": "x"}, "score": 2}), 1)[
        0
    ] == [(Passage("1", "T", "x"), 2.0)]
    assert read_answer(form({"document": "a\nb", "score": 1}), 1)[0][0][0] == Passage("", "a", "b")
    assert read_answer(form(), 1) == [[]]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"<html>proxy</html>", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no list 'result'"),
        (b'{"result": null}', "no list 'result'"),
        (b'{"result": []}', "1 queries were sent and 0 answered"),
        (b'{"result": [[], []]}', "1 queries were sent and 2 answered"),
        (b'{"result": ["text"]}', "query 0 is not a list"),
        (form("text"), "not an object"),
        (form({"document": 5}), "not an object"),
        (form({"document": {"id": "1"}}), "neither 'contents' nor 'text'"),
        (form({"document": {"id": [], "contents": "x"}}), "an id of query 0"),
        (form({"document": {"contents": "x"}, "score": "high"}), "a score of query 0"),
    ],
)
def test_malformed_answers_are_refused(data, reason):
    with pytest.raises(ValueError, match=reason):
        read_answer(data, 1)


def test_request_and_answer():
    with scripted(lambda *_: (200, GOOD, {})) as (url, bodies), RemoteRetriever(url, QUICK) as r:
        assert isinstance(r, PassageRetriever)
        assert r.search_passages(["where? é \ud800"], 3) == WANTED
        assert json.loads(bodies[0]) == {
            "queries": ["where? é ?"],
            "topk": 3,
            "return_scores": True,
        }
        assert r.search_passages([], 3) == [] and len(bodies) == 1
        with pytest.raises(TypeError):
            r.search_passages("one text", 3)


def test_more_than_asked_for_is_cut():
    many = form(*({"document": {"contents": str(i)}, "score": 1} for i in range(9)))
    with scripted(lambda *_: (200, many, {})) as (url, _), RemoteRetriever(url, QUICK) as r:
        assert [p.text for p, _ in r.search_passages(["q"], 2)[0]] == ["0", "1"]


@pytest.mark.parametrize("trouble", [(503, b"", {}), (429, b"", {"Retry-After": "0"}), None])
def test_passing_trouble_is_retried(trouble):
    with scripted(lambda n, _: trouble if n < 3 else (200, GOOD, {})) as (url, bodies):
        with RemoteRetriever(url, QUICK) as r:
            assert r.search_passages(["q"], 1) == WANTED
        assert len(bodies) == 3


def test_lasting_trouble_is_told():
    with scripted(lambda *_: (500, b"Internal   Server Error", {})) as (url, bodies):
        with RemoteRetriever(url, QUICK) as r, pytest.raises(RemoteError) as error:
            r.search_passages(["q"], 1)
        assert f"{url}/retrieve answered 500" in str(error.value)
        assert "asked 3 times: Internal Server Error" in str(error.value)
        assert len(bodies) == 3
    assert isinstance(error.value, UserError)


def test_a_refusal_is_not_retried():
    with scripted(lambda *_: (400, b'{"error": "no queries"}', {})) as (url, bodies):
        with RemoteRetriever(url, QUICK) as r, pytest.raises(RemoteError, match="400.*no queries"):
            r.search_passages(["q"], 1)
        assert len(bodies) == 1


def test_a_wrong_answer_is_shown():
    with scripted(lambda *_: (200, b"<html>" + b"x" * 9999, {})) as (url, _):
        with RemoteRetriever(url, QUICK) as r, pytest.raises(RemoteError) as error:
            r.search_passages(["q"], 1)
    assert f"{url}/retrieve" in str(error.value) and "not JSON" in str(error.value)
    assert "<html>xxx" in str(error.value) and len(str(error.value)) < 600


def test_cut_answers_and_silence_end_in_an_error():
    cut = scripted(
        lambda *_: (200, GOOD[:-9], {"Content-Length": str(len(GOOD)), "Connection": "close"})
    )
    hurried = RemoteSettings(connect_s=1, read_s=0.2, retries=1, first_wait_s=0.01)
    with cut as (url, bodies), RemoteRetriever(url, hurried) as r:
        with pytest.raises(RemoteError, match="cannot be reached"):
            r.search_passages(["q"], 1)
        assert len(bodies) == 2
    with scripted(lambda *_: time.sleep(0.7)) as (url, _), RemoteRetriever(url, hurried) as r:
        with pytest.raises(RemoteError, match="no answer in time"):
            r.search_passages(["q"], 1)


def test_nobody_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with RemoteRetriever(url, QUICK) as r:
        with pytest.raises(RemoteError, match=rf"{url}/retrieve cannot be reached.*refused.*3 tim"):
            r.search_passages(["q"], 1)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x/y", "http://", "http://[::1"])
def test_no_address(url):
    with pytest.raises(UserError, match="no address of a retrieval server"):
        RemoteRetriever(url)


def test_end_points():
    for url in ("http://h:1", "http://h:1/", "http://h:1/retrieve"):
        assert RemoteRetriever(url).url == "http://h:1/retrieve"
    assert RemoteRetriever("https://h/search").url == "https://h/search"


@pytest.mark.parametrize("scores", [True, False])
def test_batches_keep_their_order(scores):
    """700 queries in requests of 7, five at a time, against our own server."""
    echo = Echo()
    settings = RemoteSettings(batch=7, connections=5, scores=scores)
    queries = [f"query {i}" for i in range(700)]
    with serving(echo) as server, RemoteRetriever(server.url, settings) as r:
        answers = r.search_passages(queries, 2)
    assert [[p.id for p, _ in answer] for answer in answers] == [
        [f"{q}#0", f"{q}#1"] for q in queries
    ]
    passage, score = answers[5][1]
    assert passage == Passage("query 5#1", "title of query 5", "1\nünï")
    assert score == 1 - 1 / 8 if scores else math.isnan(score)


def test_one_failed_batch_fails_the_search():
    def respond(number, body):
        if b"query 9" in body:
            return 400, b"no", {}
        count = len(json.loads(body)["queries"])
        return 200, json.dumps({"result": [[]] * count}).encode(), {}

    settings = RemoteSettings(batch=2, connections=3)
    with scripted(respond) as (url, _), RemoteRetriever(url, settings) as r:
        with pytest.raises(RemoteError, match="400"):
            r.search_passages([f"query {i}" for i in range(12)], 1)
        assert r.search_passages(["a", "b", "c"], 1) == [[], [], []]
