"""A cloud's notice that a machine is taken back ends a run as SIGTERM does."""

import contextlib
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from zest_jax import preemption
from zest_jax.errors import Stopped, UserError
from zest_jax.stopping import Stopper


@contextlib.contextmanager
def metadata(answers):
    """A server that gives these answers one after the other; yields its address and requests."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers["Metadata-Flavor"]))
            answer = answers[min(len(asked), len(answers)) - 1]
            self.send_response(200 if answer else 503)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/preempted", asked
    finally:
        server.shutdown()
        server.server_close()


def test_a_notice_stops_a_run(monkeypatch):
    """At once or after a while, also where the server fails in between."""
    monkeypatch.setattr(preemption, "_AGAIN", 0.01)
    for answers in (["TRUE"], ["FALSE", "", "FALSE\n", "TRUE\n"]):
        with metadata(answers) as (address, asked):
            monkeypatch.setenv(preemption.NOTICE, address)
            with pytest.raises(Stopped, match="stopped by SIGTERM"), Stopper():
                time.sleep(20)
        assert len(asked) == len(answers)
        assert asked[0] == ("/preempted", "Google")
        assert all("wait_for_change=true" in path for path, _ in asked[1:])


def test_nobody_is_asked_without_an_address(monkeypatch):
    monkeypatch.delenv(preemption.NOTICE, raising=False)
    assert preemption.listen() is None
    monkeypatch.setenv(preemption.NOTICE, "metadata/preempted")
    with pytest.raises(UserError, match="must be an address that begins with http"):
        preemption.listen()
