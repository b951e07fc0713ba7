"""Retrievers, servers and indexes that tests of retrieval share."""

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from zest_jax.models import load_encoder
from zest_jax.retrieval import bm25
from zest_jax.retrieval.http_server import RetrievalServer
from zest_jax.retrieval.index_files import Manifest, encoder_card, write_manifest, write_shard
from zest_jax.retrieval.interface import Passage, PassageRetriever, to_contents
from zest_jax.retrieval.passages import store_passages
from zest_jax.retrieval.storage import list_files


class Echo(PassageRetriever):
    """Answers a query with passages that name it, so that every answer can be checked."""

    def __init__(self):
        self.calls = []
        self.gate = threading.Event()
        self.gate.set()

    def search_passages(self, queries, top_k):
        self.calls.append((len(queries), top_k))
        self.gate.wait(20)
        if "poison" in queries:
            raise RuntimeError("a bad query")
        return [
            [(Passage(f"{q}#{i}", f"title of {q}", f"{i}\nünï"), 1.0 - i / 8) for i in range(top_k)]
            for q in queries
        ]


@contextlib.contextmanager
def serving(retriever, **options):
    """A running server on a free port."""
    server = RetrievalServer(retriever, port=0, **options)
    server.start()
    try:
        yield server
    finally:
        server.stop(5)


@contextlib.contextmanager
def scripted(respond):
    """A bare server: `respond(number of the request, body) -> (status, bytes, headers)`; the
    connection is dropped where it returns None. Yields its URL and the list of bodies."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            answer = respond(len(bodies), bodies[-1])
            if answer is None:
                self.close_connection = True
                return
            status, data, headers = answer
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):  # a client that has given up
                self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def save_bm25_index(folder, passages):
    """An index of words as `zest_jax.build_index` lays it out."""
    corpus = store_passages(passages, folder / "passages")
    bm25.build((f"{p.title}\n{p.text}" for p in passages), folder / "bm25")
    names = sorted(f"bm25/{path.name}" for path in (folder / "bm25").iterdir())
    card = {"name": "test", "fingerprint": corpus.fingerprint}
    files = list_files(folder, names)
    write_manifest(
        folder, Manifest("bm25", len(passages), 0, "", {"name": "bm25"}, card, (), files)
    )


def save_exact_index(folder, passages, encoder_folder, dtype="bfloat16", shard_rows=4):
    """An index of vectors as `zest_jax.build_index` lays it out; returns the vectors."""
    corpus = store_passages(passages, folder / "passages")
    encoder = load_encoder(encoder_folder)
    vector_NE = encoder.encode_texts([to_contents(p) for p in passages], "passage")
    shards = tuple(
        write_shard(folder, number, vector_NE[first : first + shard_rows], dtype)
        for number, first in enumerate(range(0, len(passages), shard_rows))
    )
    who = encoder_card(encoder_folder, encoder, "contents")
    card = {"name": "test", "fingerprint": corpus.fingerprint}
    write_manifest(folder, Manifest("exact", len(passages), encoder.size, dtype, who, card, shards))
    return vector_NE
