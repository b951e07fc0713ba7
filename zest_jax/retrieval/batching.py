"""Joins searches that come in at the same time into batches: one search runs at a time."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from zest_jax.retrieval.interface import Passage, PassageRetriever

Answers = list[list[tuple[Passage, float]]]


class Busy(Exception):
    """More searches are waiting than the batcher takes."""


class Closed(Exception):
    """The batcher has been closed."""


@dataclass(eq=False)
class _Request:
    queries: Sequence[str]
    top_k: int
    answer: Future[Answers] = field(default_factory=Future)


class Batcher:
    """Searches for many threads in batches, in a thread of its own.

    A search waits up to `wait_s` for others to join it, or until the batch is full. Requests of
    about the same `top_k` are searched together with the largest among them, and each gets the
    first of what is found; one that asks for a thousand does not make all others read as many.
    If a search fails its requests are searched alone, so that only the one to blame fails.
    """

    def __init__(
        self,
        retriever: PassageRetriever,
        *,
        max_batch: int = 256,
        wait_s: float = 0.003,
        max_waiting: int = 65_536,
        on_batch: Callable[[int, float], None] = lambda queries, seconds: None,
    ) -> None:
        """Starts the thread.

        Args:
          retriever: what searches; only the batcher's thread calls it.
          max_batch: queries of one call of the retriever, at most.
          wait_s: seconds that the first request of a batch waits for others.
          max_waiting: queries that may wait, at most.
          on_batch: told of each call of the retriever: queries and seconds.
        """
        self._retriever = retriever
        self._max_batch = max_batch
        self._wait_s = wait_s
        self._max_waiting = max_waiting
        self._on_batch = on_batch
        self._queue: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Queries that wait or are being searched."""
        return self._waiting

    def submit(self, queries: Sequence[str], top_k: int) -> Future[Answers]:
        """The answers to come, one for each query; the future may be cancelled.

        Raises:
          Busy: too many are waiting.
          Closed: the batcher takes no more.
        """
        request = _Request(queries, top_k)
        with self._lock:
            if self._closed:
                raise Closed
            # A request larger than the limit is served when nothing else waits.
            if self._waiting and self._waiting + len(queries) > self._max_waiting:
                raise Busy
            self._waiting += len(queries)
            self._queue.put(request)
        return request.answer

    def close(self) -> None:
        """Answers what has been submitted and ends the thread."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        last = False
        while not last:
            batch, last = self._collect()
            live = [r for r in batch if r.answer.set_running_or_notify_cancel()]
            groups: dict[int, list[_Request]] = {}
            for request in live:
                groups.setdefault(max(request.top_k - 1, 7).bit_length(), []).append(request)
            for group in groups.values():
                self._answer(group)
            with self._lock:
                self._waiting -= sum(len(request.queries) for request in batch)

    def _collect(self) -> tuple[list[_Request], bool]:
        """The next batch, and whether it is the last."""
        batch: list[_Request] = []
        count = 0
        deadline = 0.0
        while count < self._max_batch:
            try:
                wait = max(0.0, deadline - time.monotonic()) if batch else None
                request = self._queue.get(timeout=wait)
            except queue.Empty:
                break
            if request is None:
                return batch, True
            if not batch:
                deadline = time.monotonic() + self._wait_s
            batch.append(request)
            count += len(request.queries)
        return batch, False

    def _answer(self, batch: list[_Request]) -> None:
        try:
            top_k = max(request.top_k for request in batch)
            answers = self._search([q for request in batch for q in request.queries], top_k)
        except Exception as error:
            if len(batch) > 1:
                for request in batch:
                    self._answer([request])
            else:
                logging.exception("a search for %d queries failed", len(batch[0].queries))
                batch[0].answer.set_exception(error)
            return
        at = 0
        for request in batch:
            mine = answers[at : at + len(request.queries)]
            request.answer.set_result([answer[: request.top_k] for answer in mine])
            at += len(mine)

    def _search(self, queries: list[str], top_k: int) -> Answers:
        answers: Answers = []
        for at in range(0, len(queries), self._max_batch):
            part = queries[at : at + self._max_batch]
            start = time.monotonic()
            found = self._retriever.search_passages(part, top_k)
            if len(found) != len(part):
                raise RuntimeError(f"{len(part)} queries got {len(found)} answers")
            answers += found
            self._on_batch(len(part), time.monotonic() - start)
        return answers
