"""The HTTP side of a retrieval server: Search-R1's API, health and metrics.

    POST /retrieve  {"queries": ["…", …], "topk": 3, "return_scores": true}
    GET /health     GET /metrics

A thread serves each connection (the standard library's server); what it reads is bounded in size
and in time, so that a slow or endless request costs one waiting thread until its time is up. That
it may not take long as a whole, and not only between two bytes, is ours to see to: the library's
time-out, like that of most servers, starts anew with every byte.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import json
import logging
import math
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from zest_jax.errors import UserError
from zest_jax.retrieval.batching import Answers, Batcher, Busy, Closed
from zest_jax.retrieval.interface import PassageRetriever, to_contents
from zest_jax.retrieval.server_metrics import ServerMetrics


@dataclass(frozen=True)
class Limits:
    """What a request may cost.

    Attributes:
      default_topk: passages for a query where the request does not say.
      max_topk: passages for a query.
      max_queries: queries of a request; Search-R1 sends a whole batch of rollouts in one.
      max_results: queries times topk of a request, which bounds the answer's size.
      max_body: bytes of a request's body.
      max_connections: open connections; others are told to come back.
      request_s: seconds for a request to arrive as a whole.
      search_s: seconds until a search is given up.
      send_s: seconds for an answer to be taken.
      idle_s: seconds that a connection may lie idle between requests.
    """

    default_topk: int = 3
    max_topk: int = 1000
    max_queries: int = 8192
    max_results: int = 262_144
    max_body: int = 16 << 20
    max_connections: int = 1024
    request_s: float = 30.0
    search_s: float = 600.0
    send_s: float = 60.0
    idle_s: float = 75.0


class RetrievalServer(ThreadingHTTPServer):
    """Serves a retriever; `start`, then `stop`."""

    daemon_threads = True
    request_queue_size = 1024  # clients that connect at once; the library's default is 5

    def __init__(
        self,
        retriever: PassageRetriever,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        limits: Limits | None = None,
        max_batch: int = 256,
        wait_s: float = 0.003,
        about: dict[str, Any] | None = None,
    ) -> None:
        """Binds to the address.

        Args:
          retriever: what searches.
          host: address to listen on.
          port: port to listen on, 0 for any that is free.
          limits: see `Limits`.
          max_batch: see `Batcher`.
          wait_s: see `Batcher`.
          about: what /health tells beside the state.

        Raises:
          UserError: the address cannot be had.
        """
        self.limits = limits or Limits()
        self.metrics = ServerMetrics()
        self.about = about or {}
        self.stopping = False
        self._changed = threading.Condition()
        self._open: set[socket.socket] = set()  # connections
        self._busy: set[socket.socket] = set()  # those with a request that has begun
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(
                f"cannot listen on {host}, port {port} ({reason}); choose another --port or --host."
            ) from None
        self.batcher = Batcher(
            retriever, max_batch=max_batch, wait_s=wait_s, on_batch=self.metrics.batch
        )
        self._thread = threading.Thread(
            target=self.serve_forever, args=(0.05,), name="accept", daemon=True
        )

    @property
    def url(self) -> str:
        """Where to send requests."""
        host, port = str(self.server_address[0]), self.server_address[1]
        shown = f"[{host}]" if self.address_family == socket.AF_INET6 else host
        return f"http://{shown}:{port}"

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self._open)

    def start(self) -> None:
        """Serves from a thread of its own."""
        self._thread.start()

    def stop(self, grace_s: float = 30.0) -> bool:
        """Takes no new connections, answers what has begun, and ends.

        Returns:
          Whether all that had begun was answered within `grace_s` seconds.
        """
        self.stopping = True
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()
        with self._changed:
            for connection in self._open - self._busy:
                # Its thread finds the end, after a request that has just arrived if there is one.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RD)
            done = self._changed.wait_for(lambda: not self._open, grace_s)
        if done:  # otherwise its thread is at work on what nobody waits for any more
            self.batcher.close()
        return done

    # ------------------------------------------------------- called by the library and handlers

    def server_bind(self) -> None:
        # Without the name look-up of the library's own, which can take seconds.
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            full = len(self._open) >= self.limits.max_connections
            if not full:
                self._open.add(request)
        if not full:
            try:
                super().process_request(request, client_address)
            except RuntimeError:  # no thread can be started
                self._closed(request)
                full = True
        if full:
            self.metrics.request("none", 503)
            with contextlib.suppress(OSError):
                request.settimeout(0)
                request.send(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._closed(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logging.exception("a connection from %s failed", client_address)

    def _closed(self, connection: socket.socket) -> None:
        with self._changed:
            self._open.discard(connection)
            self._changed.notify_all()

    @contextlib.contextmanager
    def busy(self, connection: socket.socket) -> Iterator[None]:
        """While a request is read, searched and answered; `stop` does not cut it off."""
        with self._changed:
            self._busy.add(connection)
        try:
            yield
        finally:
            with self._changed:
                self._busy.discard(connection)


class _Refused(Exception):
    """An answer other than 200: status and reason; `drop` if the connection cannot go on."""

    def __init__(self, status: int, reason: str, drop: bool = False) -> None:
        super().__init__(reason)
        self.status, self.reason, self.drop = status, reason, drop


class _Timed(io.RawIOBase):
    """Reads a socket until a moment, however the bytes trickle in."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline = 0.0

    def allow(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: RetrievalServer
    protocol_version = "HTTP/1.1"
    server_version = "zest-retriever"
    sys_version = ""
    # Head and body leave in one piece; without this a later answer would wait for the
    # acknowledgement of an earlier one, 40 ms.
    disable_nagle_algorithm = True

    _PATHS = {"/retrieve": ("POST",), "/health": ("GET", "HEAD"), "/metrics": ("GET", "HEAD")}

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._timed = _Timed(self.connection)
        self.rfile = self._reader = io.BufferedReader(self._timed, 1 << 16)

    def handle_one_request(self) -> None:
        """Reads a request and answers it; replaces the library's, which knows no whole time."""
        self.close_connection = True
        try:
            self._timed.allow(self.server.limits.idle_s)
            if not self._reader.peek(1):
                return
        except OSError:  # idle for too long, or broken
            return
        with self.server.busy(self.connection):
            self._timed.allow(self.server.limits.request_s)
            self.command, self.path, self._read = "", "", False
            try:
                self._serve()
            except _Refused as refused:
                self._refuse(refused)
            except TimeoutError:
                self._refuse(_Refused(408, "the request did not arrive in time", drop=True))
            except OSError:  # the client has gone
                self.close_connection = True
            except Exception:
                logging.exception("a request from %s failed", self.client_address)
                self._refuse(_Refused(500, "an error of the server; see its log", drop=True))

    def _serve(self) -> None:
        self.raw_requestline = self.rfile.readline(65_537)
        if len(self.raw_requestline) > 65_536:
            raise _Refused(414, "the request line is too long", drop=True)
        # Sets command, path and headers, or answers through send_error.
        if not self.parse_request():
            self.close_connection = True
            return
        if self.request_version == "HTTP/0.9":
            raise _Refused(400, "the request line has no HTTP version", drop=True)
        path = self.path.partition("?")[0].rstrip("/")
        if path not in self._PATHS:
            raise _Refused(
                404, f"there is no {path[:100] or '/'}; there are {_listed(self._PATHS)}"
            )
        if self.command not in self._PATHS[path]:
            raise _Refused(405, f"{path} takes {' or '.join(self._PATHS[path])}")
        if path == "/retrieve":
            self._retrieve(self._body())
            return
        if self._has_body():  # nobody reads it
            self.close_connection = True
        if path == "/health":
            state = "stopping" if self.server.stopping else "ok"
            self._send_json(200, {"status": state, **self.server.about})
        else:
            text = self.server.metrics.text(self.server.batcher.waiting, self.server.connections)
            self._send(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")

    def _body(self) -> bytes:
        body = self.rfile.read(self._length())
        if len(body) < self._length():
            raise ConnectionError
        self._read = True
        return body

    def _length(self) -> int:
        """Bytes of the body, as declared and allowed."""
        if self.headers.get("Transfer-Encoding"):
            raise _Refused(411, "send the body with a Content-Length, not in chunks", drop=True)
        declared = self.headers.get_all("Content-Length") or []
        if not declared:
            raise _Refused(411, "the request has no Content-Length", drop=True)
        value = declared[0].strip()
        if len(set(declared)) > 1 or not (value.isascii() and value.isdigit()):
            raise _Refused(400, "the Content-Length is no number", drop=True)
        most = self.server.limits.max_body
        if len(value) > 15 or int(value) > most:
            raise _Refused(413, f"the body has {value[:20]} bytes, at most {most} fit", drop=True)
        return int(value)

    def handle_expect_100(self) -> bool:
        self._length()  # refuse before the body is sent
        return super().handle_expect_100()

    def _retrieve(self, body: bytes) -> None:
        start = time.monotonic()
        queries, top_k, scores = read_request(body, self.server.limits)
        answers: Answers = []
        if queries:
            answers = self._search(queries, top_k)
        data = write_answer(answers, scores)
        # Before it is sent, so that whoever has the answer finds it counted.
        self.server.metrics.search(len(queries), time.monotonic() - start)
        self._send(200, data, "application/json")

    def _search(self, queries: list[str], top_k: int) -> Answers:
        try:
            future = self.server.batcher.submit(queries, top_k)
        except Busy:
            raise _Refused(503, "too many queries are waiting; try again") from None
        except Closed:
            raise _Refused(503, "the server is stopping", drop=True) from None
        concurrent.futures.wait([future], self.server.limits.search_s)
        if future.cancel() or not future.done():
            raise _Refused(503, "the search took too long; try again")
        try:
            return future.result()
        except Exception as error:  # logged where it was raised
            raise _Refused(500, f"the search failed ({type(error).__name__})") from None

    # -------------------------------------------------------------------------------- answering

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library refuses is told in our form."""
        self._refuse(_Refused(code, message or self.responses[code][0], drop=True))

    def _refuse(self, refused: _Refused) -> None:
        # Unread bytes of a body would be taken for the next request.
        if refused.drop or (not self._read and self._has_body()):
            self.close_connection = True
            drop = True
        else:
            drop = False
        self._send_json(refused.status, {"error": refused.reason})
        if drop:
            self._drain()

    def _has_body(self) -> bool:
        headers = getattr(self, "headers", None)
        if headers is None:
            return True
        return bool(headers.get("Transfer-Encoding") or headers.get("Content-Length", "0") != "0")

    def _drain(self) -> None:
        """Takes a little more, for a while: closing at once would reset the connection, and the
        client would see that instead of the answer."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self._timed.allow(1.0)
            left = self.server.limits.max_body
            while left > 0 and (piece := self._reader.read1(1 << 16)):
                left -= len(piece)

    def _send_json(self, status: int, value: Any) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        path = self.path.partition("?")[0].rstrip("/")
        self.server.metrics.request(path if path in self._PATHS else "other", status)
        if self.server.stopping:
            self.close_connection = True
        self.request_version = self.protocol_version  # before it is read it is that of 1991
        self.send_response_only(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status == 405:
            self.send_header("Allow", ", ".join(self._PATHS[path]))
        if status == 503:
            self.send_header("Retry-After", "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        head = b"".join(self._headers_buffer) + b"\r\n"  # type: ignore[has-type]
        self._headers_buffer: list[bytes] = []
        try:
            self.connection.settimeout(self.server.limits.send_s)
            self.connection.sendall(head + (b"" if self.command == "HEAD" else body))
        except OSError:  # the client has gone, or does not read
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        logging.debug("%s: " + format, self.client_address, *args)


def read_request(body: bytes, limits: Limits) -> tuple[list[str], int, bool]:
    """Queries, topk and whether scores are wanted.

    Raises:
      _Refused: with 400 or 413 and the reason.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Refused(400, f"the body is not UTF-8 (byte {error.start})") from None
    try:
        request = json.loads(text)
    except json.JSONDecodeError as error:
        raise _Refused(400, f"the body is not JSON ({error.msg}, char {error.pos})") from None
    except (ValueError, RecursionError):  # a number of thousands of digits; endless brackets
        raise _Refused(400, "the body is JSON beyond any use") from None
    if not isinstance(request, dict):
        raise _Refused(400, "the body must be an object with 'queries'")
    queries = request.get("queries")
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise _Refused(400, "'queries' must be a list of texts")
    if len(queries) > limits.max_queries:
        raise _Refused(413, f"{len(queries)} queries, at most {limits.max_queries} fit")
    top_k = request.get("topk")
    if top_k is None:
        top_k = limits.default_topk
    if not isinstance(top_k, int) or isinstance(top_k, bool) or not 1 <= top_k <= limits.max_topk:
        raise _Refused(400, f"'topk' must be a whole number from 1 to {limits.max_topk}")
    if len(queries) * top_k > limits.max_results:
        raise _Refused(
            413, f"{len(queries)} queries times topk {top_k} is over {limits.max_results} results"
        )
    scores = request.get("return_scores")
    if not isinstance(scores, bool | None):
        raise _Refused(400, "'return_scores' must be true or false")
    for number, query in enumerate(queries):
        try:
            query.encode("utf-8")
        except UnicodeEncodeError:
            raise _Refused(400, f"query {number} holds half of a surrogate pair") from None
    return queries, top_k, bool(scores)


def write_answer(answers: Answers, scores: bool) -> bytes:
    """The body of an answer, in Search-R1's form."""
    result: list[list[Any]] = []
    for answer in answers:
        documents = [{"id": p.id, "contents": to_contents(p)} for p, _ in answer]
        if scores:
            result.append(
                [
                    {"document": document, "score": score if math.isfinite(score) else None}
                    for document, (_, score) in zip(documents, answer, strict=True)
                ]
            )
        else:
            result.append(documents)
    # A corpus may hold half of a surrogate pair, which is no UTF-8.
    return json.dumps({"result": result}, ensure_ascii=False).encode("utf-8", "replace")


def _listed(names: Any) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}"
