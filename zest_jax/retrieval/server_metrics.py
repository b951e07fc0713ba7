"""Figures of a running server, in the text format that Prometheus reads."""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path

_WINDOW = 10_000  # requests that quantiles are taken over
_BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_QUANTILES = (0.5, 0.9, 0.99, 1.0)
_PREFIX = "zest_retriever"


class ServerMetrics:
    """Counts requests, queries, batches and times; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._queries = 0
        self._batch_bins: Counter[int] = Counter()  # by the bound that a batch falls under
        self._batched = self._batches = 0
        self._search_seconds = self._request_seconds = 0.0
        self._searches = 0
        self._recent: deque[float] = deque(maxlen=_WINDOW)

    def request(self, path: str, status: int) -> None:
        """A request was answered with a status."""
        with self._lock:
            self._requests[path, status] += 1

    def search(self, queries: int, seconds: float) -> None:
        """A search request was answered; seconds from its last byte until its answer is ready."""
        with self._lock:
            self._searches += 1
            self._queries += queries
            self._request_seconds += seconds
            self._recent.append(seconds)

    def batch(self, queries: int, seconds: float) -> None:
        """The retriever was called."""
        with self._lock:
            self._batches += 1
            self._batched += queries
            self._search_seconds += seconds
            self._batch_bins[next((b for b in _BATCH_BOUNDS if queries <= b), 0)] += 1

    def text(self, waiting: int, connections: int) -> str:
        """All figures; `waiting` queries and open `connections` are told by the server."""
        with self._lock:
            requests = sorted(self._requests.items())
            recent = sorted(self._recent)
            bins = self._batch_bins.copy()
            figures = (
                ("queries_total", "counter", "Queries answered.", self._queries),
                ("search_seconds_total", "counter", "Time in the retriever.", self._search_seconds),
                ("waiting_queries", "gauge", "Queries that wait or are searched.", waiting),
                ("connections", "gauge", "Open connections.", connections),
                ("uptime_seconds", "gauge", "Since the start.", time.monotonic() - self._start),
                ("resident_bytes", "gauge", "Memory of the process.", resident_bytes()),
            )
            sums = (self._batches, self._batched, self._searches, self._request_seconds)
        batches, batched, searches, request_seconds = sums
        lines = _head("requests_total", "counter", "Requests by end point and HTTP status.")
        for (path, status), count in requests:
            lines.append(f'{_PREFIX}_requests_total{{path="{path}",status="{status}"}} {count}')
        errors = sum(count for (_, status), count in requests if status >= 400)
        lines += _head("errors_total", "counter", "Requests answered with 400 or more.")
        lines.append(f"{_PREFIX}_errors_total {errors}")
        for name, kind, about, value in figures:
            lines += _head(name, kind, about)
            lines.append(f"{_PREFIX}_{name} {value}")
        lines += _head("batch_queries", "histogram", "Queries of one call of the retriever.")
        total = 0
        for bound in _BATCH_BOUNDS:
            total += bins[bound]
            lines.append(f'{_PREFIX}_batch_queries_bucket{{le="{bound}"}} {total}')
        lines.append(f'{_PREFIX}_batch_queries_bucket{{le="+Inf"}} {batches}')
        lines.append(f"{_PREFIX}_batch_queries_sum {batched}")
        lines.append(f"{_PREFIX}_batch_queries_count {batches}")
        lines += _head("latency_seconds", "summary", "Of the last searches, from last byte in.")
        for q in _QUANTILES:
            value = recent[min(int(q * len(recent)), len(recent) - 1)] if recent else float("nan")
            shown = "NaN" if value != value else value
            lines.append(f'{_PREFIX}_latency_seconds{{quantile="{q}"}} {shown}')
        lines.append(f"{_PREFIX}_latency_seconds_sum {request_seconds}")
        lines.append(f"{_PREFIX}_latency_seconds_count {searches}")
        return "\n".join(lines) + "\n"


def resident_bytes() -> int:
    """Memory of this process now; where the system does not say so, its peak."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak


def _head(name: str, kind: str, about: str) -> list[str]:
    return [f"# HELP {_PREFIX}_{name} {about}", f"# TYPE {_PREFIX}_{name} {kind}"]
