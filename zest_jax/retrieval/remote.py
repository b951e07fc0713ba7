"""A client for retrieval servers of Search-R1's kind, ours included.

    POST /retrieve  {"queries": ["…", …], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"id": "…", "contents": …}, "score": 0.8}, …], …]}

Search-R1, verl, Dr. Zero and EviBack all speak it. Without scores each item is the document
itself. For `contents` see `interface.from_contents`; documents may also carry `title` and `text` in
their place, or lack an id.
"""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import urllib3

from zest_jax.errors import UserError
from zest_jax.retrieval.interface import Passage, PassageRetriever, from_contents

_TRY_AGAIN = frozenset({429, 500, 502, 503, 504})
_SHOWN = 300  # characters of an unexpected answer that an error shows


class RemoteError(UserError):
    """A retrieval server that cannot be reached or does not answer as it should."""


@dataclass(frozen=True)
class RemoteSettings:
    """How to call a server.

    Attributes:
      connect_s: seconds to wait for a connection.
      read_s: seconds without a byte of the answer until an attempt counts as failed.
      retries: attempts after the first, on connection errors, time-outs, 429 and 5xx.
      first_wait_s: wait before the first retry; doubles each time, at most 30 s, and is drawn
        from its upper half, so that many clients do not return at once. A server's `Retry-After`
        is heeded up to 30 s.
      batch: queries of one request; more are sent in several.
      connections: requests sent at the same time, at most.
      scores: whether to ask for scores; without them they are NaN. Search-R1's own server fails
        if not asked.
    """

    connect_s: float = 5.0
    read_s: float = 120.0
    retries: int = 5
    first_wait_s: float = 0.5
    batch: int = 256
    connections: int = 4
    scores: bool = True


class RemoteRetriever(PassageRetriever):
    """Searches on a server. Safe to use from several threads; close it when done."""

    def __init__(self, url: str, settings: RemoteSettings | None = None) -> None:
        """Prepares a client; nothing is sent yet.

        Args:
          url: of the server ("http://10.0.0.7:8000") or of its end point; a URL without a path
            gets /retrieve.
          settings: see `RemoteSettings`.

        Raises:
          UserError: not a URL, or settings that cannot be.
        """
        self.url = _end_point(url)
        self._settings = s = settings or RemoteSettings()
        if s.batch < 1 or s.connections < 1 or s.retries < 0:
            raise UserError(
                "a remote retriever needs batch >= 1, connections >= 1 and retries >= 0, not "
                f"{s.batch}, {s.connections} and {s.retries}."
            )
        self._http = urllib3.PoolManager(
            maxsize=s.connections,
            block=True,
            retries=False,  # ours know what to say at the end
            timeout=urllib3.Timeout(connect=s.connect_s, read=s.read_s),
        )
        self._threads = ThreadPoolExecutor(s.connections, thread_name_prefix="retrieve")

    def __enter__(self) -> RemoteRetriever:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives the connections back."""
        self._threads.shutdown(cancel_futures=True)
        self._http.clear()

    def search_passages(
        self, queries: Sequence[str], top_k: int
    ) -> list[list[tuple[Passage, float]]]:
        """See `PassageRetriever`; the order is the server's, the answers are those of the queries.

        Raises:
          RemoteError: the server cannot be reached, refuses, or answers something else; the
            message names the URL and what came back.
        """
        if isinstance(queries, str):
            raise TypeError("queries are a list of texts, not one text")
        if top_k < 1:
            raise ValueError(f"top_k must be 1 or more, not {top_k}")
        size = self._settings.batch
        parts = [queries[at : at + size] for at in range(0, len(queries), size)]
        if len(parts) <= 1:
            return self._ask(parts[0], top_k) if parts else []
        futures = [self._threads.submit(self._ask, part, top_k) for part in parts]
        try:
            return [answer for future in futures for answer in future.result()]
        finally:
            for future in futures:
                future.cancel()

    def _ask(self, queries: Sequence[str], top_k: int) -> list[list[tuple[Passage, float]]]:
        # What a policy writes may hold half of a surrogate pair, which is no UTF-8.
        clean = [query.encode("utf-8", "replace").decode() for query in queries]
        body = {"queries": clean, "topk": top_k, "return_scores": self._settings.scores}
        data = self._send(json.dumps(body, ensure_ascii=False).encode())
        try:
            return [answer[:top_k] for answer in read_answer(data, len(queries))]
        except ValueError as error:
            raise RemoteError(
                f"{self.url} does not answer as a retrieval server does: {error}. It sent: "
                f"{_shown(data)}"
            ) from None

    def _send(self, body: bytes) -> bytes:
        """The body of a successful answer; tries again where that may help."""
        s = self._settings
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        for attempt in range(s.retries + 1):
            told = 0.0
            try:
                answer = self._http.request("POST", self.url, body=body, headers=headers)
            except urllib3.exceptions.HTTPError as error:
                problem = f"cannot be reached ({_reason(error)})"
                cure = "; see that the server runs and the address is right"
            else:
                if answer.status == 200:
                    return answer.data
                problem = f"answered {answer.status} {answer.reason or ''}".rstrip()
                cure = f": {_shown(answer.data)}"
                if answer.status not in _TRY_AGAIN:
                    raise RemoteError(f"{self.url} {problem}{cure}")
                told = _retry_after(answer.headers.get("Retry-After", ""))
            if attempt < s.retries:
                wait = min(s.first_wait_s * 2**attempt, 30.0) * random.uniform(0.5, 1.0)
                time.sleep(max(wait, told))
        times = f"{s.retries + 1} times" if s.retries else "once"
        raise RemoteError(f"{self.url} {problem}, asked {times}{cure}")


def read_answer(data: bytes, queries: int) -> list[list[tuple[Passage, float]]]:
    """Passages and scores of an answer, NaN where there is no score.

    Raises:
      ValueError: what is wrong with it, as part of a sentence.
    """
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("the answer is not JSON") from None
    result = whole.get("result") if isinstance(whole, dict) else None
    if not isinstance(result, list):
        raise ValueError("the answer has no list 'result'")
    if len(result) != queries:
        raise ValueError(f"{queries} queries were sent and {len(result)} answered")
    out = []
    for number, items in enumerate(result):
        if not isinstance(items, list):
            raise ValueError(f"the answer to query {number} is not a list")
        out.append([_read_item(item, f"query {number}") for item in items])
    return out


def _read_item(item: Any, where: str) -> tuple[Passage, float]:
    if not isinstance(item, dict):
        raise ValueError(f"a result of {where} is not an object")
    document = item.get("document", item)
    if isinstance(document, str):
        document = {"contents": document}
    if not isinstance(document, dict):
        raise ValueError(f"a document of {where} is not an object")
    score = item.get("score")
    if score is None:
        score = math.nan
    elif isinstance(score, bool) or not isinstance(score, int | float):
        raise ValueError(f"a score of {where} is not a number")
    id = document.get("id", "")
    if not isinstance(id, str | int):
        raise ValueError(f"an id of {where} is neither text nor number")
    contents, title, text = (document.get(name) for name in ("contents", "title", "text"))
    if isinstance(contents, str):
        return from_contents(str(id), contents), float(score)
    if isinstance(text, str) and isinstance(title, str | None):
        return Passage(str(id), title or "", text), float(score)
    raise ValueError(f"a document of {where} has neither 'contents' nor 'text'")


def _end_point(url: str) -> str:
    try:
        parts = urllib3.util.parse_url(url)
    except urllib3.exceptions.LocationParseError:
        parts = urllib3.util.Url()
    if parts.scheme not in ("http", "https") or not parts.host:
        raise UserError(
            f"{url!r} is no address of a retrieval server; write http://host:port, such as "
            "http://127.0.0.1:8000."
        )
    return url.rstrip("/") + "/retrieve" if parts.path in (None, "", "/") else url


def _reason(error: Exception) -> str:
    """What went wrong, without the library's names of its objects."""
    refused = isinstance(error, urllib3.exceptions.NewConnectionError)  # which urllib3 derives
    if isinstance(error, urllib3.exceptions.ConnectTimeoutError) and not refused:
        return "no connection in time"
    if isinstance(error, urllib3.exceptions.ReadTimeoutError):
        return "no answer in time"
    cause = next((e for e in (error.__cause__, *error.args) if isinstance(e, OSError)), None)
    return re.sub(r"^(<[^>]*>|\w+\([^)]*\)): ", "", str(cause or error)) or type(error).__name__


def _retry_after(value: str) -> float:
    """Seconds of a Retry-After header; 0 for a date, which few servers send."""
    return min(float(value), 30.0) if value.isascii() and value.isdigit() else 0.0


def _shown(data: bytes) -> str:
    text = " ".join(data[: 4 * _SHOWN].decode("utf-8", "replace").split())
    return (text[:_SHOWN] + " …" if len(text) > _SHOWN else text) or "nothing"
