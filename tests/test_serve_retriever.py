"""The retrieval server: its API, what it refuses, what it survives, and how it stops."""

import concurrent.futures
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import urllib3
from retrieval_server import Echo, save_bm25_index, serving

from zest_jax import serve_retriever
from zest_jax.errors import UserError
from zest_jax.retrieval import bm25
from zest_jax.retrieval.batching import Batcher, Closed
from zest_jax.retrieval.http_server import Limits, RetrievalServer
from zest_jax.retrieval.interface import Passage
from zest_jax.retrieval.remote import RemoteRetriever
from zest_jax.retrieval.server_metrics import resident_bytes

# Small, so that the limits are met soon.
TIGHT = Limits(
    default_topk=3, max_topk=5, max_queries=4, max_results=12, max_body=10_000,
    request_s=0.5, idle_s=1.0,
)  # fmt: skip


@pytest.fixture
def server():
    with serving(Echo(), limits=TIGHT) as running:
        yield running


def send(server, body=b"", path="/retrieve", method="POST", headers=None):
    """Status, headers and parsed body of one request."""
    connection = http.client.HTTPConnection(*server.server_address, timeout=10)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        data = answer.read()
        kind = answer.headers["Content-Type"]
        return answer.status, answer.headers, json.loads(data) if "json" in kind else data.decode()
    finally:
        connection.close()


def ask(server, **request):
    status, _, answer = send(server, json.dumps(request).encode())
    return status, answer


def raw(server, data, *, wait=5.0):
    """What comes back for bytes as they are, until the server closes."""
    with socket.create_connection(server.server_address, timeout=wait) as connection:
        connection.sendall(data)
        got = b""
        while piece := connection.recv(65_536):
            got += piece
    return got


def alive(server):
    """The server still answers."""
    assert ask(server, queries=["still"], topk=1)[0] == 200


# -------------------------------------------------------------------------------------- the API


def test_with_scores(server):
    assert ask(server, queries=["a", "é"], topk=2, return_scores=True) == (
        200,
        {
            "result": [
                [
                    {
                        "document": {"id": f"{q}#{i}", "contents": f'"title of {q}"\n{i}\nünï'},
                        "score": 1 - i / 8,
                    }
                    for i in range(2)
                ]
                for q in ("a", "é")
            ]
        },
    )


def test_without_scores(server):
    """Documents themselves; topk as the server was told, as in Search-R1 where none is sent."""
    document = {"id": "a#0", "contents": '"title of a"\n0\nünï'}
    for extra in ({}, {"topk": None, "return_scores": None}, {"return_scores": False, "mode": "x"}):
        status, answer = ask(server, queries=["a"], **extra)
        assert status == 200 and len(answer["result"][0]) == 3
        assert answer["result"][0][0] == document
    assert ask(server, queries=[]) == (200, {"result": []})


def test_what_their_clients_make_of_it(server):
    """The reading of Search-R1's and verl's clients: title on the first line, text on the rest."""
    _, answer = ask(server, queries=["a"], topk=1, return_scores=True)
    title, _, text = answer["result"][0][0]["document"]["contents"].partition("\n")
    assert (title, text) == ('"title of a"', "0\nünï")


def test_one_connection_many_requests(server):
    connection = http.client.HTTPConnection(*server.server_address, timeout=10)
    for i in range(50):
        connection.request("POST", "/retrieve", json.dumps({"queries": [str(i)], "topk": 1}))
        answer = connection.getresponse()
        assert json.loads(answer.read())["result"][0][0]["id"] == f"{i}#0"
        if i % 10 == 0:  # a refused request, with its body read, does not cost the connection
            connection.request("POST", "/retrieve", b"{")
            answer = connection.getresponse()
            assert (answer.status, answer.headers["Connection"]) == (400, None)
            answer.read()
    assert server.connections == 1
    connection.close()


def test_health_and_metrics(server):
    assert send(server, path="/health", method="GET")[2] == {"status": "ok"}
    head = raw(server, b"HEAD /health HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and head.endswith(b"\r\n\r\n")
    ask(server, queries=["a", "b"])
    ask(server, queries="a")
    while server.connections:  # a closed one is counted until its thread has seen it
        time.sleep(0.01)
    status, headers, text = send(server, path="/metrics", method="GET")
    assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
    for line in (
        'requests_total{path="/retrieve",status="200"} 1',
        'requests_total{path="/retrieve",status="400"} 1',
        "errors_total 1",
        "queries_total 2",
        'batch_queries_bucket{le="1"} 0',
        'batch_queries_bucket{le="2"} 1',
        "batch_queries_sum 2",
        "waiting_queries 0",
        "connections 1",
        "latency_seconds_count 1",
    ):
        assert f"zest_retriever_{line}\n" in text
    assert 0 < float(re.search(r'latency_seconds{quantile="0.99"} (\S+)', text)[1]) < 5
    for line in text.splitlines():  # the format as a whole
        assert re.fullmatch(
            r'# (HELP|TYPE) \w+ .+|\w+({\w+="[^"]*"(,\w+="[^"]*")*})? [\w.+-]+', line
        )


# ------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"\xff\xfe{}", 400, "not UTF-8 (byte 0)"),
        (b'{"queries": ["caf\xe9"]}', 400, "not UTF-8"),
        (b"[" * 9_999, 400, "beyond any use"),
        (b"9" * 9_999, 400, "beyond any use"),
        (b"[]", 400, "must be an object"),
        (b"{}", 400, "'queries'"),
        (b'{"queries": "a"}', 400, "list of texts"),
        (b'{"queries": [1]}', 400, "list of texts"),
        (b'{"queries": ["a", null]}', 400, "list of texts"),
        (b'{"queries": ["a"], "topk": 0}', 400, "from 1 to 5"),
        (b'{"queries": ["a"], "topk": 6}', 400, "from 1 to 5"),
        (b'{"queries": ["a"], "topk": true}', 400, "whole number"),
        (b'{"queries": ["a"], "topk": 2.5}', 400, "whole number"),
        (b'{"queries": ["a"], "topk": 1e400}', 400, "whole number"),
        (b'{"queries": ["a"], "return_scores": "yes"}', 400, "true or false"),
        (b'{"queries": ["\\ud800"]}', 400, "surrogate"),
        (b'{"queries": ["a", "b", "c", "d", "e"]}', 413, "at most 4"),
        (b'{"queries": ["a", "b", "c", "d"], "topk": 5}', 413, "over 12 results"),
        (b'{"queries": ["' + b"a" * 10_000 + b'"]}', 413, "at most 10000 fit"),
    ],
)
def test_bad_requests(server, body, status, reason):
    got, headers, answer = send(server, body)
    assert (got, reason in answer["error"]) == (status, True), answer
    assert headers["Content-Type"] == "application/json"
    alive(server)


def test_a_huge_body_is_refused_unread(server):
    """The answer arrives although the client is still sending."""
    body = b"x" * 300_000
    status, headers, answer = send(server, body)
    assert status == 413 and headers["Connection"] == "close"
    # Refused before it is sent, where the client asks first.
    got = raw(
        server, b"POST /retrieve HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n"
        b"Expect: 100-continue\r\n\r\n"
    )  # fmt: skip
    assert got.startswith(b"HTTP/1.1 413 ") and b"100 Continue" not in got
    alive(server)


def test_wrong_ways_in(server):
    assert send(server, path="/", method="GET")[0] == 404
    status, headers, answer = send(server, path="/retrieve", method="GET")
    assert (status, headers["Allow"]) == (405, "POST") and "POST" in answer["error"]
    assert send(server, path="/health", method="POST")[0] == 405
    assert send(server, path="/retrieve/", body=b'{"queries": []}')[0] == 200
    alive(server)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n\n", b"400"),  # TLS
        (b"GARBAGE\r\n\r\n", b"400"),
        (b"GET /health\r\n\r\n", b"400"),
        (b"GET /health HTTP/9.9\r\n\r\n", b"505"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"431"),
        (b"GET / HTTP/1.1\r\na: " + b"b" * 70_000 + b"\r\n\r\n", b"431"),
        (b"POST /retrieve HTTP/1.1\r\n\r\n", b"411"),
        (b"POST /retrieve HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"411"),
        (b"POST /retrieve HTTP/1.1\r\nContent-Length: -5\r\n\r\n", b"400"),
        (b"POST /retrieve HTTP/1.1\r\nContent-Length: 1_0\r\n\r\n", b"400"),
        (b"POST /retrieve HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}", b"400"),
        (b"DELETE /x HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", b"404"),
    ],
)
def test_no_proper_http(server, data, status):
    assert raw(server, data).startswith(b"HTTP/1.1 " + status)
    alive(server)


def test_slow_requests_end(server):
    """A body, a head and a first byte that do not come, and bytes that trickle in."""
    start = time.monotonic()
    assert b" 408 " in raw(server, b"POST /retrieve HTTP/1.1\r\nContent-Length: 50\r\n\r\n{")
    assert b" 408 " in raw(server, b"POST /retrieve HT")
    assert raw(server, b"") == b""
    with socket.create_connection(server.server_address, timeout=5) as connection:
        with pytest.raises(OSError):
            for _ in range(100):  # a byte each 50 ms: never silent for long
                connection.sendall(b"P")
                time.sleep(0.05)
    assert time.monotonic() - start < 8
    alive(server)
    until = time.monotonic() + 3
    while server.connections and time.monotonic() < until:
        time.sleep(0.02)
    assert server.connections == 0


def test_clients_that_leave(server):
    for data in (b"", b"POST /ret", b"POST /retrieve HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"):
        for _ in range(5):
            with socket.create_connection(server.server_address) as connection:
                connection.sendall(data)
    body = b'{"queries": ["a"]}'
    head = b"POST /retrieve HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    for _ in range(5):  # gone before the answer
        with socket.create_connection(server.server_address) as connection:
            connection.sendall(head + body)
    alive(server)


def test_too_many_connections():
    with serving(Echo(), limits=Limits(max_connections=2)) as server:
        held = [socket.create_connection(server.server_address) for _ in range(2)]
        while server.connections < 2:
            time.sleep(0.01)
        assert raw(server, b"GET /health HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 503 Busy")
        for connection in held:
            connection.close()
        while server.connections:
            time.sleep(0.01)
        alive(server)


def test_random_bytes(server):
    """Whatever is sent, the server answers the next one."""
    rng = random.Random(0)
    good = b'POST /retrieve HTTP/1.1\r\nContent-Length: 18\r\n\r\n{"queries": ["a"]}'
    for _ in range(60):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with socket.create_connection(server.server_address, timeout=5) as connection:
            connection.sendall(bytes(data))
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65_536):
                pass
    alive(server)


# ------------------------------------------------------------------------ searches and batches


def test_a_failing_search_is_alone(server):
    """In a batch with others only the request to blame fails, and the server goes on."""
    echo = server.batcher._retriever
    echo.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        first = pool.submit(ask, server, queries=["first"])
        while not echo.calls:
            time.sleep(0.005)
        queries = ["one", "poison", "two", "three"]
        answers = [pool.submit(ask, server, queries=[q], topk=1 + i) for i, q in enumerate(queries)]
        while server.batcher.waiting < 5:
            time.sleep(0.005)
        echo.gate.set()
        assert first.result()[0] == 200
        for i, (q, future) in enumerate(zip(queries, answers, strict=True)):
            status, answer = future.result()
            if q == "poison":
                assert status == 500 and "RuntimeError" in answer["error"]
            else:
                assert [d["id"] for d in answer["result"][0]] == [f"{q}#{n}" for n in range(1 + i)]
    # Searched as one, with the largest topk, and then one by one.
    assert echo.calls[1] == (4, 4) and sorted(echo.calls[2:]) == [(1, i) for i in range(1, 5)]


def test_requests_of_like_topk_are_searched_together():
    """1 to 8 in one search, 9 to 16 in the next."""
    echo = Echo()
    batcher = Batcher(echo, wait_s=0.2)
    futures = [batcher.submit([f"{k}"], k) for k in (1, 8, 100, 3, 9, 16, 128)]
    assert [len(f.result(5)[0]) for f in futures] == [1, 8, 100, 3, 9, 16, 128]
    assert sorted(echo.calls) == [(2, 16), (2, 128), (3, 8)]
    batcher.close()


def test_batches_are_bounded():
    echo = Echo()
    batcher = Batcher(echo, max_batch=3, wait_s=0.2)
    future = batcher.submit([str(i) for i in range(8)], 1)
    assert [a[0][0].id for a in future.result(5)] == [f"{i}#0" for i in range(8)]
    assert echo.calls == [(3, 1), (3, 1), (2, 1)]
    batcher.close()
    with pytest.raises(Closed):
        batcher.submit(["late"], 1)


def test_too_much_is_waiting_and_too_slow():
    echo = Echo()
    echo.gate.clear()
    with serving(echo, limits=Limits(search_s=0.3)) as server:
        server.batcher._max_waiting = 2
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            slow = [pool.submit(ask, server, queries=["a"])]
            while not echo.calls:
                time.sleep(0.005)
            slow.append(pool.submit(ask, server, queries=["b"]))
            while server.batcher.waiting < 2:
                time.sleep(0.005)
            status, answer = ask(server, queries=["c"])
            assert status == 503 and "waiting" in answer["error"]
            for future in slow:
                status, answer = future.result()
                assert status == 503 and "too long" in answer["error"]
        echo.gate.set()
        while server.batcher.waiting:  # what was given up is searched to its end
            time.sleep(0.005)
        alive(server)


# ------------------------------------------------------------------------------------ stopping


def test_stop_answers_what_has_begun():
    echo = Echo()
    with serving(echo) as server:
        idle = socket.create_connection(server.server_address)
        echo.gate.clear()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            begun = pool.submit(ask, server, queries=["begun"])
            while not echo.calls:
                time.sleep(0.005)
            stopper = threading.Thread(target=server.stop, args=(10,))
            stopper.start()
            time.sleep(0.3)
            assert stopper.is_alive()
            with pytest.raises(OSError):
                socket.create_connection(server.server_address, timeout=1)
            assert idle.recv(1) == b""  # idle connections are closed at once
            echo.gate.set()
            assert begun.result()[0] == 200
            stopper.join(5)
            assert not stopper.is_alive() and server.connections == 0
        idle.close()


def test_stop_does_not_wait_for_ever():
    echo = Echo()
    echo.gate.clear()
    server = RetrievalServer(echo, port=0)
    server.start()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        begun = pool.submit(ask, server, queries=["begun"])
        while not echo.calls:
            time.sleep(0.005)
        assert server.stop(0.2) is False
        echo.gate.set()
        begun.result()


def test_address_in_use(server):
    with pytest.raises(UserError, match="cannot listen on 127.0.0.1, port .*--port"):
        RetrievalServer(Echo(), port=server.server_port)
    with pytest.raises(UserError, match="cannot listen on 203.0.113.1"):
        RetrievalServer(Echo(), host="203.0.113.1", port=0)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "no index is given"),
        (["--index=/nowhere"], "/nowhere"),
        (["--index=x", "--port=70000"], "port"),
        (["--index=x", "--max_batch=0"], "max_batch"),
        (["--index=x", "--topk=9", "--max_topk=5"], "--topk=9"),
    ],
)
def test_mistakes_on_the_command_line(flags, said, capsys):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        assert serve_retriever.entry(["serve_retriever", *flags]) == 2
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_program(tmp_path, number):
    """Started on a BM25 index, asked, and stopped by a signal."""
    passages = [Passage("1", "Cat", "It sat."), Passage("2", "Dog", "It ran.")]
    save_bm25_index(tmp_path / "index", passages)
    command = [sys.executable, "-m", "zest_jax.serve_retriever", "--port=0"]
    process = subprocess.Popen(
        [*command, f"--index={tmp_path / 'index'}"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    try:
        line = process.stdout.readline()
        url = re.search(r"http://127.0.0.1:\d+", line)[0]
        with RemoteRetriever(url) as remote:
            [[(passage, score)], nothing] = remote.search_passages(["Which dog? Dog!", "zebra"], 2)
        assert passage == passages[1] and score > 0 and nothing == []
        process.send_signal(number)
        rest, _ = process.communicate(timeout=20)
        assert rest.endswith("stopped\n") and process.returncode == 0
    finally:
        process.kill()
        process.wait()


# -------------------------------------------------------------------------------------- load


@pytest.mark.slow
def test_many_clients(tmp_path):
    """200 clients for some seconds against BM25; each answer is checked, none is lost or crossed.

    LOAD_SECONDS lengthens it.
    """
    seconds = float(os.environ.get("LOAD_SECONDS", "4"))
    names = [f"entity{i}" for i in range(5000)]
    corpus = [Passage(f"id-{i}", name, f"{name} is number {i}") for i, name in enumerate(names)]
    bm25.build((p.text for p in corpus), tmp_path / "index")
    retriever = bm25.open_bm25(tmp_path / "index", corpus)
    counts = [0] * 200
    problems = []
    with serving(retriever) as server:
        http_pool = urllib3.PoolManager(maxsize=200, retries=False)

        def client(number, until):
            rng = random.Random(number)
            while time.monotonic() < until:
                asked = [rng.randrange(5000) for _ in range(rng.choice((1, 1, 1, 4)))]
                scores = rng.random() < 0.5
                body = json.dumps(
                    {"queries": [names[i] for i in asked], "topk": 2, "return_scores": scores}
                )
                # Half of them connect anew each time, as verl's client does.
                headers = {"Connection": "close"} if number % 2 else {}
                try:
                    answer = http_pool.request(
                        "POST", f"{server.url}/retrieve", body=body, headers=headers
                    )
                    documents = [
                        [d["document"] if scores else d for d in found]
                        for found in json.loads(answer.data)["result"]
                    ]
                    assert answer.status == 200
                    assert [[d["id"] for d in found] for found in documents] == [
                        [f"id-{i}"] for i in asked
                    ]
                    counts[number] += 1
                except Exception as error:
                    problems.append(repr(error))

        memory = []
        until = time.monotonic() + seconds
        threads = [threading.Thread(target=client, args=(n, until)) for n in range(200)]
        for thread in threads:
            thread.start()
        while time.monotonic() < until:
            time.sleep(seconds / 20)
            memory.append(resident_bytes())
        for thread in threads:
            thread.join()
        metrics = send(server, path="/metrics", method="GET")[2]
        http_pool.clear()
    assert not problems, (len(problems), problems[:3])
    assert min(counts) > 0
    assert f'{{path="/retrieve",status="200"}} {sum(counts)}\n' in metrics
    assert "errors_total 0\n" in metrics
    middle, end = memory[len(memory) // 2], memory[-1]
    print(f"{sum(counts) / seconds:.0f} requests/s, memory {[m >> 20 for m in memory]} MiB")
    print("\n".join(line for line in metrics.splitlines() if "latency" in line or "batch" in line))
    assert end < middle + (16 << 20)
