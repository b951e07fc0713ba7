"""A teacher behind an OpenAI-compatible endpoint: POST …/chat/completions.

    EndpointTeacher("http://127.0.0.1:8000/v1", "zai-org/GLM-4.7-Flash")

vLLM, SGLang, llama.cpp and the hosted services speak it. The key comes from an environment variable
alone and stands nowhere else: not in a file, a log, a message or a representation.

A dead, slow or confused endpoint costs time and gives replies that name the failure. After some
failures in a row the rest of a call is not sent; the next call tries with one conversation whether
the endpoint is back.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any

import urllib3

from zest_jax.errors import UserError
from zest_jax.teachers.cache import AnswerCache
from zest_jax.teachers.interface import Conversation, Failure, Reply, Teacher, digest, failed
from zest_jax.teachers.spending import Spending

KEY_VARIABLE = "ZEST_TEACHER_API_KEY"

_SHOWN = 300  # characters of an unexpected answer that a detail shows
_LONGEST = 8 << 20  # bytes of an answer that are read
_BYTES_PER_TOKEN = 3  # where nobody tells; on the dear side for English
_TRY_AGAIN = frozenset({Failure.UNREACHABLE, Failure.TIMEOUT, Failure.BUSY, Failure.SERVER_ERROR,
                        Failure.BAD_ANSWER})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class EndpointSettings:
    """How an endpoint is asked.

    Attributes:
      temperature, top_p, max_tokens: of the answer.
      tokens_field: the name that the endpoint has for max_tokens.
      extra: more fields of every request, such as {"seed": 1}; part of the cache's key.
      connect_s: seconds to wait for a connection.
      answer_s: seconds from a request to the last byte of its answer.
      retries: attempts after the first, where another may help.
      patience_s: seconds after which a conversation is not tried again.
      first_wait_s: wait before the first retry; doubles each time and is drawn from its upper half.
      most_wait_s: longest wait. An endpoint that asks for more (Retry-After) counts as failed.
      connections: requests under way at the same time.
      most_requests, most_tokens: the spending limit; 0 for none. Tokens are those that the endpoint
        tells, else a third of the bytes.
      give_up_after: conversations that fail in a row until the rest of a call is given up; 0 never.
      key_variable: the environment variable that holds the key; it need not be set.
      key_header: the header that carries it; "Authorization" has "Bearer" before it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 512
    tokens_field: str = "max_tokens"
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    connect_s: float = 10.0
    answer_s: float = 180.0
    retries: int = 4
    patience_s: float = 300.0
    first_wait_s: float = 0.5
    most_wait_s: float = 60.0
    connections: int = 8
    most_requests: int = 0
    most_tokens: int = 0
    give_up_after: int = 8
    key_variable: str = KEY_VARIABLE
    key_header: str = "Authorization"

    def __post_init__(self) -> None:
        least = {"max_tokens": 1, "connections": 1, "retries": 0, "give_up_after": 0}
        least |= {"most_requests": 0, "most_tokens": 0, "temperature": 0}
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise UserError(
                    f"the teacher's {name} is {limit} or more, not {getattr(self, name)}."
                )
        for name in ("connect_s", "answer_s", "patience_s"):
            if not getattr(self, name) > 0:
                raise UserError(f"the teacher's {name} is more than 0, not {getattr(self, name)}.")


class _Key:
    """A secret that shows itself to nobody who does not ask."""

    def __init__(self, value: str) -> None:
        self._reveal = lambda: value

    def __repr__(self) -> str:
        return "<key>"

    def reveal(self) -> str:
        return self._reveal()

    def hide(self, text: str) -> str:
        """The text without the key. Short ones are the dummies of local servers, and no secret."""
        value = self.reveal()
        return text.replace(value, "<key>") if len(value) >= 8 else text


class EndpointTeacher(Teacher):
    """Asks an endpoint. Safe to use from several threads; close it when done.

    Args:
      url: of the API ("http://host:8000/v1"), with or without /chat/completions.
      model: as the endpoint calls it.
      settings: see `EndpointSettings`.
      cache: folder of answers; they are kept under the digest of the request, whatever endpoint
        answers it. None keeps none.
      ledger: file of what was spent (`Spending`); None forgets with the process.

    Raises:
      UserError: not a URL, a key in it, or a key that cannot be one.
    """

    def __init__(
        self,
        url: str,
        model: str,
        settings: EndpointSettings | None = None,
        *,
        cache: str | Path | None = None,
        ledger: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.settings = s = settings or EndpointSettings()
        self.url, self.model = end_point(url), model
        if not model:
            raise UserError("no model is named; an endpoint needs the name of the model it serves.")
        self._key = _read_key(s.key_variable)
        self.cache = AnswerCache(cache) if cache else None
        self.spending = Spending(s.most_requests, s.most_tokens, ledger)
        self._http = urllib3.PoolManager(maxsize=s.connections + 1, retries=False)
        self._threads = ThreadPoolExecutor(s.connections, thread_name_prefix="teacher")
        self._closed = threading.Event()
        self._resume_at = 0.0  # when an endpoint that was asked too much may be asked again
        self._in_row = 0
        self._down = False

    @property
    def card(self) -> dict[str, Any]:
        s = self.settings
        told = {"temperature": s.temperature, "top_p": s.top_p, "max_tokens": s.max_tokens}
        return {"kind": "endpoint", "url": _shown_url(self.url), "model": self.model, **told,
                "extra": dict(s.extra)}  # fmt: skip

    def close(self) -> None:
        """Gives the connections back. Waits between attempts end at once; an attempt that is under
        way (there is none but after an interrupt) is left to its time-out."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._http.clear()

    def _answer(self, conversations: Sequence[Conversation]) -> list[Reply]:
        out: list[Reply | None] = []
        bodies = [self._body(conversation) for conversation in conversations]
        keys = [digest(body) for body in bodies]
        for key in keys:
            out.append(self.cache.get(key) if self.cache else None)
        todo = [n for n, reply in enumerate(out) if reply is None]
        if todo and self._down:
            n = todo.pop(0)
            out[n] = self._keep(keys[n], self._ask(bodies[n], retries=0))
        if self._down:  # still
            for n in todo:
                out[n] = self._given_up()
            todo = []
        futures = [
            (n, self._threads.submit(self._ask_or_give_up, keys[n], bodies[n])) for n in todo
        ]
        try:
            for n, future in futures:
                out[n] = future.result()
        finally:
            for _, future in futures:
                future.cancel()
        return [reply for reply in out if reply is not None]

    def _body(self, conversation: Conversation) -> dict[str, Any]:
        s = self.settings
        # What a policy wrote may hold half of a surrogate pair, which is no UTF-8.
        messages = [
            {"role": m.role, "content": m.content.encode("utf-8", "replace").decode()}
            for m in conversation
        ]
        return {
            "model": self.model,
            "messages": messages,
            "temperature": s.temperature,
            "top_p": s.top_p,
            s.tokens_field: s.max_tokens,
            "stream": False,
            **s.extra,
        }

    def _ask_or_give_up(self, key: str, body: dict[str, Any]) -> Reply:
        if self._down:
            return self._given_up()
        return self._keep(key, self._ask(body, self.settings.retries))

    def _given_up(self) -> Reply:
        return failed(Failure.GIVEN_UP, f"{self._in_row} conversations in a row have failed")

    def _keep(self, key: str, reply: Reply) -> Reply:
        """Keeps an answer, and counts failures in a row."""
        limit = self.settings.give_up_after
        with self._lock:
            if reply.answered:
                self._in_row, self._down = 0, False
            elif reply.failure not in (Failure.OVER_LIMIT, Failure.EMPTY):
                self._in_row += 1
                self._down = self._down or 0 < limit <= self._in_row
        if reply.answered and self.cache:
            self.cache.put(key, reply)
        return reply

    def _ask(self, body: dict[str, Any], retries: int) -> Reply:
        """One conversation, tried again where that may help."""
        s = self.settings
        data = json.dumps(body, ensure_ascii=False).encode()
        estimate = len(data) // _BYTES_PER_TOKEN
        ends = time.monotonic() + s.patience_s
        reply = failed(Failure.GIVEN_UP, "the teacher is closed")
        for attempt in range(retries + 1):
            if attempt:
                wait = min(s.first_wait_s * 2 ** (attempt - 1), s.most_wait_s)
                self._closed.wait(wait * random.uniform(0.5, 1.0))
            pause = self._resume_at - time.monotonic()
            if pause > s.most_wait_s:
                told = f"{_shown_url(self.url)}: asks to wait {pause:.0f} s, too long"
                return reply if attempt else failed(Failure.BUSY, told)
            self._closed.wait(max(0.0, pause))
            if self._closed.is_set() or (attempt and time.monotonic() >= ends):
                return reply
            reserved = estimate + s.max_tokens
            if not self.spending.reserve(reserved):
                limit = failed(Failure.OVER_LIMIT, self.spending.told())
                return reply if attempt else limit
            sent, spent = True, estimate
            try:
                reply, sent = self._request(data)
                if reply.answered:
                    tokens = reply.tokens_in, reply.tokens_out
                    spent = sum(tokens) or estimate + len(reply.text or "") // _BYTES_PER_TOKEN
                elif reply.failure in (Failure.BUSY, Failure.REFUSED):
                    spent = 0  # turned away
            finally:
                self.spending.settle(reserved, spent, sent)
            with self._lock:
                self.counts.requests += 1
                self.counts.retries += attempt > 0
                if reply.answered:
                    told_in, told_out = reply.tokens_in, reply.tokens_out
                    guessed = told_in + told_out == 0
                    self.counts.tokens_in += estimate if guessed else told_in
                    self.counts.tokens_out += spent - estimate if guessed else told_out
            if reply.failure not in _TRY_AGAIN or self._resume_at >= ends:
                return reply
        return reply

    def _request(self, data: bytes) -> tuple[Reply, bool]:
        """One attempt, and whether anybody got it. No fault of the other side is an exception."""
        s = self.settings
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key:
            bearer = "Bearer " if s.key_header.lower() == "authorization" else ""
            headers[s.key_header] = bearer + self._key.reveal()
        ends = time.monotonic() + s.answer_s
        timeout = urllib3.Timeout(connect=min(s.connect_s, s.answer_s), read=s.answer_s)
        try:
            answer = self._http.request(
                "POST", self.url, body=data, headers=headers, timeout=timeout, redirect=False,
                preload_content=False,
            )  # fmt: skip
            try:
                content = _read(answer, ends)
            finally:
                # A connection whose answer was not read to its end is of no more use.
                if not answer.closed:
                    answer.close()
                answer.release_conn()
        except (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError) as e:
            return self._fail(Failure.UNREACHABLE, _reason(e)), False
        except (urllib3.exceptions.TimeoutError, TimeoutError):
            return self._fail(Failure.TIMEOUT, f"no whole answer in {s.answer_s:g} s"), True
        except urllib3.exceptions.DecodeError:
            return self._fail(Failure.BAD_ANSWER, "the answer cannot be decompressed"), True
        except (urllib3.exceptions.HTTPError, HTTPException, OSError) as e:
            return self._fail(Failure.UNREACHABLE, _reason(e)), True
        if answer.status >= 300:
            return self._turned_away(answer.status, content, answer.headers), True
        return self._read_answer(content), True

    def _turned_away(self, status: int, content: bytes, headers: Mapping[str, str]) -> Reply:
        kind = (
            Failure.BUSY
            if status == 429
            else Failure.SERVER_ERROR
            if status >= 500 or status == 425
            else Failure.TIMEOUT
            if status == 408
            else Failure.REFUSED
        )
        told = retry_after(headers.get("Retry-After", "")) if kind != Failure.REFUSED else 0.0
        if told:
            with self._lock:
                self._resume_at = max(self._resume_at, time.monotonic() + told)
        wait = f", asks to wait {told:.0f} s" if told else ""
        return self._fail(kind, f"answered {status}{wait}: {_shown(content)}")

    def _read_answer(self, content: bytes) -> Reply:
        try:
            reply = read_completion(content)
        except ValueError as error:
            return self._fail(Failure.BAD_ANSWER, f"{error}; it sent: {_shown(content)}")
        if reply.text is None:
            return self._fail(reply.failure or Failure.EMPTY, reply.detail)
        text = self._key.hide(reply.text) if self._key else reply.text
        return dataclasses.replace(reply, text=text)

    def _fail(self, kind: Failure, detail: str) -> Reply:
        detail = f"{_shown_url(self.url)}: {detail}"
        return failed(kind, self._key.hide(detail) if self._key else detail)


def read_completion(content: bytes) -> Reply:
    """The reply in the body of a chat completion.

    Raises:
      ValueError: what is wrong with it, as part of a sentence.
    """
    try:
        whole = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("the answer is not JSON") from None
    if not isinstance(whole, dict):
        raise ValueError("the answer is not an object")
    choices = whole.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ValueError("the answer has no 'choices'")
    message = choices[0].get("message")
    if not isinstance(message, dict):
        raise ValueError("the answer has no 'message'")
    # Half of a surrogate pair is a legal escape and no text.
    text = _text(message.get("content")).encode("utf-8", "replace").decode()
    finish = choices[0].get("finish_reason")
    if not text.strip():
        why = ": its thoughts took all of max_tokens" if finish == "length" else ""
        return failed(Failure.EMPTY, f"the answer has no text{why}")
    usage = whole.get("usage")
    told = usage if isinstance(usage, dict) else {}
    tokens = [_count(told.get(name)) for name in ("prompt_tokens", "completion_tokens")]
    return Reply(text, None, "", finish if isinstance(finish, str) else "", False, *tokens)


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        texts = [part.get("text", "") for part in content if part.get("type") == "text"]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    raise ValueError("the message's 'content' is no text")


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def end_point(url: str) -> str:
    """The address of chat completions of an API.

    Raises:
      UserError: not a URL, or one with a key in it.
    """
    try:
        parts = urllib3.util.parse_url(url)
    except urllib3.exceptions.LocationParseError:
        parts = urllib3.util.Url()
    if parts.auth:
        raise UserError(
            "the teacher's address holds a user name or key; leave it out, and put the key in an "
            "environment variable."
        )
    if parts.scheme not in ("http", "https") or not parts.host:
        raise UserError(
            f"{url!r} is no address of an API; write http://host:port/v1, such as "
            "http://127.0.0.1:8000/v1."
        )
    path = (parts.path or "").rstrip("/") or "/v1"
    if not path.endswith("/chat/completions"):
        path += "/chat/completions"
    return parts._replace(path=path).url


def retry_after(value: str) -> float:
    """Seconds of a Retry-After header, which holds seconds or a date; 0 where it holds neither."""
    value = value.strip()
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return seconds if 0 < seconds < 1e9 else 0.0


def _read_key(variable: str) -> _Key | None:
    value = os.environ.get(variable, "").strip() if variable else ""
    # Anything else would be refused by the HTTP library in an error that shows it.
    if not all("!" <= c <= "~" for c in value):
        raise UserError(
            f"the environment variable {variable} holds a character that cannot stand in a key; "
            "set it to the key alone."
        )
    return _Key(value) if value else None


def _read(answer: Any, ends: float) -> bytes:
    """The body of an answer, read as it arrives, until `ends`."""
    parts, size = [], 0
    read = getattr(answer, "read1", answer.read)
    while part := read(1 << 16):
        parts.append(part)
        size += len(part)
        if size > _LONGEST:
            raise urllib3.exceptions.DecodeError("too long")
        if time.monotonic() > ends:
            raise TimeoutError
    return b"".join(parts)


def _reason(error: Exception) -> str:
    """What went wrong, without the library's names of its objects."""
    cause = next((e for e in (error.__cause__, *error.args) if isinstance(e, OSError)), None)
    if isinstance(error, urllib3.exceptions.ConnectTimeoutError) and cause is None:
        return "no connection in time"
    told = str(cause.strerror or cause) if cause else "the connection broke"
    return f"cannot be reached ({told})" if cause else told


def _shown(content: bytes) -> str:
    text = " ".join(content[: 4 * _SHOWN].decode("utf-8", "replace").split())
    return (text[:_SHOWN] + " …" if len(text) > _SHOWN else text) or "nothing"


def _shown_url(url: str) -> str:
    return url.partition("?")[0]
