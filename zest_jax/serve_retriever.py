"""Serves an index over HTTP, in the form that Search-R1, verl, Dr. Zero and EviBack ask for.

    python -m zest_jax.serve_retriever --index=indexes/wiki18 --port=8000

    curl http://127.0.0.1:8000/retrieve -H 'Content-Type: application/json' \\
      -d '{"queries": ["capital of France"], "topk": 3, "return_scores": true}'

GET /health says what is served, GET /metrics counts it for Prometheus. There is no log-in: the
server listens on this machine only, unless --host says otherwise. SIGTERM and Ctrl-C stop it once
what has begun is answered.
"""

import logging
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from absl import flags

from zest_jax import cli
from zest_jax.errors import UserError
from zest_jax.retrieval.http_server import Limits, RetrievalServer
from zest_jax.retrieval.interface import PassageRetriever


def serve(
    retriever: PassageRetriever,
    *,
    grace_s: float,
    stop: threading.Event,
    **options: Any,
) -> bool:
    """Serves until `stop` is set.

    Args:
      retriever: what searches.
      grace_s: seconds that requests which have begun may take after that.
      stop: ends it.
      **options: see `RetrievalServer`.

    Returns:
      Whether everything that had begun was answered.
    """
    # What compiles on first use does so before anybody waits, and what cannot search says so now.
    retriever.search_passages(["warm up"], 1)
    server = RetrievalServer(retriever, **options)
    server.start()
    print(f"serving on {server.url}/retrieve (also /health and /metrics)", flush=True)
    stop.wait()
    print("stopping: what has begun is answered", flush=True)
    return server.stop(grace_s)


def main(config: Any, workdir: str, values: flags.FlagValues) -> None:
    if config is not None or workdir:
        raise UserError("the server takes an index only; leave --config and --workdir out.")
    if not values.index:
        raise UserError("no index is given; say which: --index=indexes/wiki18.")
    if values.topk > values.max_topk:
        raise UserError(f"--topk={values.topk} is over --max_topk={values.max_topk}.")
    logging.getLogger().setLevel(logging.INFO)
    stop = threading.Event()

    def ask(*_: object) -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):  # the second signal ends it at once
            signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, ask)
    # JAX and the index are loaded after the flags have been checked.
    from zest_jax.retrieval.open_index import open_index

    done = serve(
        open_index(values.index, encoder=values.encoder),
        grace_s=values.grace,
        stop=stop,
        host=values.host,
        port=values.port,
        limits=Limits(
            default_topk=values.topk,
            max_topk=values.max_topk,
            max_queries=values.max_queries,
            max_body=values.max_body_mib << 20,
            max_connections=values.max_connections,
            request_s=values.request_seconds,
        ),
        max_batch=values.max_batch,
        wait_s=values.wait_ms / 1000,
        about={"index": Path(values.index).resolve().name},
    )
    print("stopped" if done else "stopped with requests unanswered", flush=True)


def define(values: flags.FlagValues) -> None:
    def count(name: str, default: int, about: str) -> None:
        flags.DEFINE_integer(name, default, about, lower_bound=1, flag_values=values)

    def span(name: str, default: float, about: str) -> None:
        flags.DEFINE_float(name, default, about, lower_bound=0.0, flag_values=values)

    flags.DEFINE_string("index", "", "folder of the index (see zest_jax.build_index)", values)
    flags.DEFINE_string(
        "encoder", "", "where the index's encoder is, if not where it was", flag_values=values
    )
    flags.DEFINE_string("host", "127.0.0.1", "address to listen on; 0.0.0.0 for all", values)
    flags.DEFINE_integer(
        "port", 8000, "port to listen on; 0 for any free one", 0, 65_535, flag_values=values
    )
    count("topk", 3, "passages for a query where a request does not say")
    count("max_topk", 1000, "most passages for a query")
    count("max_queries", 8192, "most queries of a request")
    count("max_body_mib", 16, "largest request, MiB")
    count("max_connections", 1024, "most open connections")
    count("max_batch", 256, "most queries of one search")
    span("wait_ms", 3.0, "how long a search waits for others to join")
    span("request_seconds", 30.0, "how long a request may take to arrive")
    span("grace", 30.0, "seconds to answer what has begun when stopped")


entry = cli.program(main, define=define, needs_config=False, needs_workdir=False)

if __name__ == "__main__":
    sys.exit(entry())
