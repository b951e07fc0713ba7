"""An endpoint as a teacher, against a real server on this machine that fails in every known way."""

import contextlib
import dataclasses
import email.utils
import gzip
import json
import logging
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from zest_jax.errors import UserError
from zest_jax.teachers.cache import AnswerCache
from zest_jax.teachers.endpoint import (
    EndpointSettings,
    EndpointTeacher,
    end_point,
    read_completion,
    retry_after,
)
from zest_jax.teachers.evidence import Case, EvidenceTeacher, Round, Rule
from zest_jax.teachers.interface import Failure, Reply, failed, user
from zest_jax.teachers.spending import Spending

SECRET = "sk-Very-Secret-0123456789abcdef"
QUICK = EndpointSettings(first_wait_s=0.001, retries=2, answer_s=5.0, connections=4)


def completion(text, finish="stop", usage=(7, 3)):
    told = {"prompt_tokens": usage[0], "completion_tokens": usage[1]} if usage else None
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return json.dumps({"choices": [choice], "usage": told}).encode()


@contextlib.contextmanager
def api(respond, port=0):
    """A server: `respond(request) -> bytes | (status, bytes, headers) | None`, where None drops the
    connection. At a free port unless one is given. Yields the URL of its API and the requests:
    dicts of path, headers and body."""
    requests, lock = [], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            request = {"path": self.path, "headers": dict(self.headers), "body": body}
            request["text"] = body["messages"][-1]["content"]
            with lock:
                requests.append(request)
                request["number"] = len(requests)
            answer = respond(request)
            if answer is None:
                self.close_connection = True
                return
            status, data, headers = (
                answer if isinstance(answer, tuple) else (200, answer, {})
            )  # fmt: skip
            with contextlib.suppress(OSError):  # a client that has given up
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
            if int(headers.get("Content-Length", len(data))) > len(data):
                self.close_connection = True

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(url, texts, settings=QUICK, **options):
    with EndpointTeacher(url, "glm", settings, **options) as teacher:
        return teacher.ask([user(text) for text in texts]), teacher


def free_address():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{one.getsockname()[1]}/v1"


# ----------------------------------------------------------------------------- when all is well


def test_what_is_sent_and_what_comes_back(monkeypatch):
    monkeypatch.setenv("OTHER_KEY", SECRET)
    settings = dataclasses.replace(
        QUICK, max_tokens=9, extra={"seed": 1}, key_variable="OTHER_KEY", tokens_field="max_new"
    )
    with api(lambda r: completion(f"re: {r['text']}")) as (url, requests):
        texts = [f"ünï {n}" for n in range(10)]
        replies, teacher = ask(url, texts, settings)
        assert [r.text for r in replies] == [f"re: {text}" for text in texts], "in order"
        with EndpointTeacher(url, "glm", settings) as other:
            (reply,) = other.ask([user("half \ud800 a pair", "be brief")])
            assert reply.text == "re: half ? a pair"
    assert {r["path"] for r in requests} == {"/v1/chat/completions"}
    assert requests[0]["headers"]["Authorization"] == f"Bearer {SECRET}"
    body = requests[-1]["body"]
    assert body.pop("messages") == [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "half ? a pair"},
    ]  # fmt: skip
    assert body == {"model": "glm", "temperature": 0, "top_p": 1, "max_new": 9, "stream": False,
                    "seed": 1}  # fmt: skip
    counts = teacher.counts
    assert (counts.asked, counts.answered, counts.requests, counts.retries) == (10, 10, 10, 0)
    assert (counts.tokens_in, counts.tokens_out) == (70, 30) and counts.unanswered == 0
    assert replies[0].finish == "stop" and replies[0].tokens_in == 7 and not replies[0].cached


def test_no_key_and_a_header_of_another_name(monkeypatch):
    monkeypatch.delenv("ZEST_TEACHER_API_KEY", raising=False)
    with api(lambda r: completion("x", finish="length", usage=None)) as (url, requests):
        _, teacher = ask(url, ["a"])
        assert "Authorization" not in requests[0]["headers"] and teacher.counts.cut_off == 1
        assert teacher.counts.tokens_in > 30, "estimated by its bytes"
        monkeypatch.setenv("ZEST_TEACHER_API_KEY", SECRET)
        ask(url, ["a"], dataclasses.replace(QUICK, key_header="api-key"))
        assert requests[1]["headers"]["api-key"] == SECRET


def test_answers_in_the_forms_that_servers_have():
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    whole = {"choices": [{"message": {"content": parts}}]}
    assert read_completion(json.dumps(whole).encode()) == Reply("ab")
    for content in (None, "", " \n", []):
        whole = {"choices": [{"message": {"content": content}}], "usage": [1]}
        assert read_completion(json.dumps(whole).encode()).failure == Failure.EMPTY
    for broken, said in [
        (b"", "not JSON"), (b'{"choices": [{"mess', "not JSON"), (b"[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"), (b"[]", "not an object"), (b'{"error": {"code": 500}}', "'choices'"),
        (b'{"choices": []}', "'choices'"), (b'{"choices": [1]}', "'choices'"),
        (b'{"choices": [{"text": "x"}]}', "'message'"),
        (b'{"choices": [{"message": {"content": 7}}]}', "no text"),
        (b'{"choices": [{"message": {"content": ["x"]}}]}', "no text"),
        (b'{"choices": [{"message": {"content": [{"type": "text", "text": 1}]}}]}', "no text"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=said):
            read_completion(broken)


def test_a_compressed_answer():
    data = gzip.compress(completion("packed"))
    with api(lambda r: (200, data, {"Content-Encoding": "gzip"})) as (url, _):
        assert ask(url, ["a"])[0][0].text == "packed"
    with api(lambda r: (200, b"no gzip", {"Content-Encoding": "gzip"})) as (url, _):
        assert ask(url, ["a"])[0][0].failure == Failure.BAD_ANSWER


# ---------------------------------------------------------------------------------- faults


def test_nobody_is_there():
    replies, teacher = ask(free_address(), ["a", "b"])
    assert [r.failure for r in replies] == [Failure.UNREACHABLE] * 2
    assert "refused" in replies[0].detail.lower()
    assert teacher.counts.unanswered == 1 and teacher.counts.requests == 6
    assert teacher.counts.retries == 4 and "UNANSWERED 2" in teacher.counts.sentence()
    assert (teacher.spending.requests, teacher.spending.tokens) == (0, 0), "nobody got them"


@pytest.mark.parametrize("status", [500, 502, 503, 529])
def test_an_error_that_passes(status):
    def respond(r):
        return completion("fine") if r["number"] > 2 else (status, b"oh no", {})

    with api(respond) as (url, requests):
        replies, teacher = ask(url, ["a"])
    assert replies[0].text == "fine" and len(requests) == 3 and teacher.counts.retries == 2
    assert not teacher.counts.failed


def test_errors_that_last_and_refusals():
    for status, failure, times in [
        (500, Failure.SERVER_ERROR, 3), (429, Failure.BUSY, 3), (408, Failure.TIMEOUT, 3),
        (401, Failure.REFUSED, 1), (404, Failure.REFUSED, 1), (400, Failure.REFUSED, 1),
        (302, Failure.REFUSED, 1),
    ]:  # fmt: skip
        answer = status, b'{"error": "the words of it"}', {"Location": "/elsewhere"}
        with api(lambda r, answer=answer: answer) as (url, requests):
            (reply,), teacher = ask(url, ["a"])
        assert reply.failure == failure and len(requests) == times, status
        assert str(status) in reply.detail and "the words of it" in reply.detail
        assert teacher.counts.failed == {failure.value: 1}


def test_a_server_that_asks_to_wait_is_left_alone_so_long():
    times = []

    def respond(r):
        times.append(time.monotonic())
        return (429, b"", {"Retry-After": "0.3"}) if r["number"] == 1 else completion("now")

    with api(respond) as (url, _):
        replies, _ = ask(url, ["a", "b", "c"], dataclasses.replace(QUICK, connections=1))
    assert [r.text for r in replies] == ["now"] * 3
    assert times[1] - times[0] >= 0.29

    too_long = (429, b"", {"Retry-After": "3600"})
    with api(lambda r: too_long) as (url, requests):
        begun = time.monotonic()
        replies, _ = ask(url, ["a", "b"], dataclasses.replace(QUICK, connections=1))
    assert [r.failure for r in replies] == [Failure.BUSY] * 2 and len(requests) == 1
    assert time.monotonic() - begun < 5 and "3600 s" in replies[1].detail

    assert retry_after("7") == 7 and retry_after(" 0.5 ") == 0.5
    for value in ("", "soon", "-3", "nan", "inf", "1e99", "Wed, 99 Foo 2020"):
        assert retry_after(value) == 0, value
    later = email.utils.formatdate(time.time() + 60, usegmt=True)
    assert 50 < retry_after(later) <= 60
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0


def test_silence_and_a_trickle_end_at_the_time_out():
    end = threading.Event()
    settings = dataclasses.replace(QUICK, answer_s=0.2, retries=1)
    with api(lambda r: end.wait(20) and None) as (url, requests):
        begun = time.monotonic()
        replies, teacher = ask(url, ["a", "b"], settings)
        assert time.monotonic() - begun < 5
        end.set()
    assert [r.failure for r in replies] == [Failure.TIMEOUT] * 2 and len(requests) == 4
    assert "0.2 s" in replies[0].detail and teacher.spending.requests == 4
    assert teacher.spending.tokens > 100, "what was asked in vain may have been computed"

    end = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as trickle:

        def drip():
            connection, _ = trickle.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n")
                while not end.wait(0.02):
                    connection.sendall(b" ")  # a sign of life, and never an answer

        thread = threading.Thread(target=drip)
        thread.start()
        url = f"http://127.0.0.1:{trickle.getsockname()[1]}"
        (reply,), _ = ask(url, ["a"], dataclasses.replace(settings, retries=0))
        end.set()
        thread.join()
    assert reply.failure == Failure.TIMEOUT


def test_no_retry_begins_when_patience_is_at_its_end():
    settings = dataclasses.replace(QUICK, retries=50, patience_s=0.05, first_wait_s=0.02)
    with api(lambda r: (500, b"", {})) as (url, requests):
        (reply,), _ = ask(url, ["a"], settings)
    assert reply.failure == Failure.SERVER_ERROR and 1 <= len(requests) < 10


def test_half_an_answer_a_dropped_connection_and_no_sense():
    half = completion("x" * 100)[:40]
    for answer, failure in [
        (half, Failure.BAD_ANSWER),
        ((200, half, {"Content-Length": "400"}), Failure.UNREACHABLE),
        (None, Failure.UNREACHABLE),
        (b"<html>proxy</html>", Failure.BAD_ANSWER),
        (b'{"object": "error"}', Failure.BAD_ANSWER),
        (completion(""), Failure.EMPTY),
    ]:
        with api(lambda r, answer=answer: answer) as (url, requests):
            (reply,), _ = ask(url, ["a"])
        assert reply.failure == failure, answer
        assert len(requests) == (1 if failure == Failure.EMPTY else 3)
        # A fault that passes costs a retry and nothing else.
        with api(lambda r, a=answer: completion("fine") if r["number"] > 1 else a) as (url, _):
            (reply,), _ = ask(url, ["a"])
        assert reply.text == "fine" or failure == Failure.EMPTY


def test_an_endpoint_that_dies_midway_is_given_up_and_found_again():
    alive = threading.Event()
    alive.set()
    settings = dataclasses.replace(QUICK, connections=1, retries=1, give_up_after=3)

    def respond(r):
        if r["number"] == 5:
            alive.clear()
        return completion("ok") if alive.is_set() else None

    with api(respond) as (url, requests), EndpointTeacher(url, "glm", settings) as teacher:
        got = teacher.ask([user(f"{n}") for n in range(20)])
        assert [r.text for r in got[:4]] == ["ok"] * 4
        assert [r.failure for r in got[4:7]] == [Failure.UNREACHABLE] * 3
        assert [r.failure for r in got[7:]] == [Failure.GIVEN_UP] * 13
        assert len(requests) == 4 + 3 * 2 and teacher.counts.unanswered == 0.8
        # Still dead: one conversation finds out.
        got = teacher.ask([user(f"x{n}") for n in range(9)])
        assert [r.failure for r in got] == [Failure.UNREACHABLE] + [Failure.GIVEN_UP] * 8
        assert len(requests) == 11
        alive.set()
        got = teacher.ask([user(f"y{n}") for n in range(9)])
        assert [r.text for r in got] == ["ok"] * 9
        assert teacher.counts.to_json()["failed"] == {"given_up": 21, "unreachable": 4}


def test_a_judge_whose_second_stage_dies_goes_on():
    good = "<reason>r</reason><status>supported_answer</status><answer>Jane</answer>"

    def respond(r):
        return (503, b"", {}) if "Candidate" in r["text"] else completion(good)

    passage = type("P", (), {"title": "Emma", "text": "By her."})()
    case = Case("Who?", ("Jane Austen",), (Round("q", (passage,)),))
    with api(respond) as (url, _), EndpointTeacher(url, "glm", QUICK) as teacher:
        (verdict,) = EvidenceTeacher(teacher).judge([case])
    assert verdict.rule == Rule.B_UNUSABLE and verdict.answer == "Jane" and verdict.unanswered
    assert verdict.stage_b.failure == Failure.SERVER_ERROR and verdict.supported
    assert verdict.versions["teacher"]["model"] == "glm"


# ------------------------------------------------------------------------------ keys are secret


def test_the_key_stands_nowhere(monkeypatch, tmp_path, caplog, capfd):
    monkeypatch.setenv("ZEST_TEACHER_API_KEY", f" {SECRET}\n")
    caplog.set_level(logging.DEBUG)
    answers = {
        "echo": completion(f"your key is {SECRET}"),
        "refuse": (401, f"Incorrect key: {SECRET}".encode(), {}),
        "nonsense": SECRET.encode(),
        "drop": None,
        "redirect": (307, b"", {"Location": free_address()}),
    }
    told = []
    with api(lambda r: answers[r["text"]]) as (url, requests):
        with EndpointTeacher(
            url, "glm", QUICK, cache=tmp_path / "cache", ledger=tmp_path / "spent.jsonl"
        ) as teacher:
            replies = teacher.ask([user(name) for name in answers])
            told += [repr(teacher), str(vars(teacher)), str(teacher.card), str(teacher.settings)]
            told += [json.dumps(teacher.counts.to_json()), teacher.counts.sentence()]
    assert {r["headers"]["Authorization"] for r in requests} == {f"Bearer {SECRET}"}
    told += [repr(reply) for reply in replies]
    told += [caplog.text, *capfd.readouterr()]
    told += [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    told += [str(path) for path in tmp_path.rglob("*")]
    assert len(told) > 10 and not [text for text in told if SECRET in text]
    assert replies[0].text == "your key is <key>" and "<key>" in replies[1].detail
    # What no header can hold is refused without being shown.
    for bad in (f"{SECRET}\r\nX: y", f"{SECRET} x", f"{SECRET}é"):
        monkeypatch.setenv("ZEST_TEACHER_API_KEY", bad)
        with pytest.raises(UserError, match="ZEST_TEACHER_API_KEY") as caught:
            EndpointTeacher("http://127.0.0.1:1", "glm")
        assert SECRET not in str(caught.getrepr(style="long", showlocals=False).reprcrash)
        assert caught.value.__cause__ is None and SECRET not in str(caught.value)
    with pytest.raises(UserError) as caught:
        end_point(f"https://user:{SECRET}@host/v1")
    assert SECRET not in str(caught.value)


def test_addresses():
    for given, full in [
        ("http://h:1", "http://h:1/v1/chat/completions"),
        ("http://h:1/", "http://h:1/v1/chat/completions"),
        ("https://h/api/v3/", "https://h/api/v3/chat/completions"),
        ("http://h/v1/chat/completions", "http://h/v1/chat/completions"),
        ("https://h/x?api-version=1", "https://h/x/chat/completions?api-version=1"),
    ]:
        assert end_point(given) == full
    for bad in ("", "h:1", "ftp://h", "http://", "http://[", "/folder"):
        with pytest.raises(UserError, match="no address"):
            end_point(bad)
    with pytest.raises(UserError, match="no model"):
        EndpointTeacher("http://h", "")
    for field in ("connections", "max_tokens", "answer_s", "most_tokens", "retries"):
        with pytest.raises(UserError, match=field):
            dataclasses.replace(QUICK, **{field: -1})


# ---------------------------------------------------------------------------- cache and limits


def test_what_is_cached_is_not_asked_again(tmp_path):
    def respond(r):
        return (500, b"", {}) if r["text"] == "bad" else completion(f"re: {r['text']} é")

    with api(respond) as (url, requests):
        first, _ = ask(url, ["a", "b", "bad", "a"], cache=tmp_path)
        assert len(requests) == 2 + 3, "equal ones are asked once, failures are tried again"
        again, teacher = ask(url, ["b", "a"], cache=tmp_path)
        assert len(requests) == 5 and [r.cached for r in again] == [True, True]
        assert [r.text for r in again] == [first[1].text, first[0].text]
        assert (teacher.counts.cached, teacher.counts.requests) == (2, 0)
        # Anything that changes the answer changes the key; a failure is never kept.
        ask(url, ["a"], dataclasses.replace(QUICK, max_tokens=8), cache=tmp_path)
        ask(url, ["bad"], dataclasses.replace(QUICK, retries=0), cache=tmp_path)
        assert len(requests) == 7
        with EndpointTeacher(url, "other", QUICK, cache=tmp_path) as teacher:
            teacher.ask([user("a")])
            teacher.ask([user("a", "system")])
        assert len(requests) == 9
        # Damage is found, counted and mended.
        files = sorted(tmp_path.rglob("*.json"))
        assert len(files) == 5 and all(len(file.parent.name) == 2 for file in files)
        for file in files:
            file.write_bytes(file.read_bytes()[:-30])
        again, teacher = ask(url, ["a", "b"], cache=tmp_path)
        assert teacher.cache.damaged == 2 and not any(r.cached for r in again)
        again, teacher = ask(url, ["a", "b"], cache=tmp_path)
        assert len(requests) == 11 and all(r.cached for r in again)
    # A dead endpoint is no trouble for what is cached.
    again, _ = ask(free_address(), ["b", "new"], cache=tmp_path)
    assert again[0].text == "re: b é" and again[1].failure == Failure.UNREACHABLE


def test_an_entry_of_another_question_or_text_is_none(tmp_path):
    cache = AnswerCache(tmp_path)
    cache.put("ab1", Reply("text \ud800", None, "", "stop", False, 5, 6))
    assert cache.get("ab1") == Reply("text \ud800", None, "", "stop", True, 5, 6)
    assert cache.get("ab2") is None and cache.damaged == 0
    entry = tmp_path / "ab" / "ab1.json"
    told = json.loads(entry.read_text())
    (tmp_path / "ab" / "ab2.json").write_text(json.dumps(told))
    assert cache.get("ab2") is None and cache.damaged == 1
    for change in ({"text": "other"}, {"format": 2}, {"finish": 1}, {"tokens_in": "x"}):
        entry.write_text(json.dumps(told | change))
        assert cache.get("ab1") is None
    assert cache.damaged == 5
    with pytest.raises(ValueError):
        cache.put("x", failed(Failure.BUSY))


def test_a_limit_in_requests_holds_over_restarts(tmp_path):
    ledger = tmp_path / "spent.jsonl"
    settings = dataclasses.replace(QUICK, most_requests=5)
    with api(lambda r: completion("x")) as (url, requests):
        replies, teacher = ask(url, ["a", "b", "c"], settings, ledger=ledger)
        assert all(r.answered for r in replies)
        with ledger.open("a") as file:
            file.write('{"requests": 1, "tok')  # a kill
        replies, teacher = ask(url, [*"defgh"], settings, ledger=ledger)
        assert sorted(r.failure or "" for r in replies) == ["", "", *[Failure.OVER_LIMIT] * 3]
        assert len(requests) == 5 and teacher.counts.failed == {"over_limit": 3}
        refused = next(r for r in replies if r.failure)
        assert "5 of 5 requests and 50 tokens are spent" in refused.detail
        replies, _ = ask(url, ["a"], settings, ledger=ledger)
        assert len(requests) == 5 and replies[0].failure == Failure.OVER_LIMIT
    ledger.write_text('{"requests": "many"}\n')
    with pytest.raises(UserError, match="line 1"):
        EndpointTeacher("http://h", "glm", settings, ledger=ledger)


def test_a_limit_in_tokens_is_not_passed():
    settings = dataclasses.replace(QUICK, max_tokens=100, most_tokens=1000)
    with api(lambda r: completion("x", usage=(60, 40))) as (url, requests):
        replies, teacher = ask(url, [f"{n}" for n in range(30)], settings)
    # About 50 bytes of request / 3 + 100 are set aside for each, and 100 spent.
    assert teacher.spending.tokens <= 1000 and len(requests) in (8, 9)
    assert sum(r.answered for r in replies) == len(requests)
    spending = Spending(most_tokens=100)
    assert spending.reserve(60) and not Spending(most_tokens=10).reserve(60)
    done = []
    waiting = threading.Thread(target=lambda: done.append(spending.reserve(60)))
    waiting.start()
    spending.settle(60, 10)
    waiting.join(5)
    assert done == [True] and spending.tokens == 10
    spending.settle(60, 0, sent=False)
    assert spending.requests == 1 and not spending.reserve(91)
