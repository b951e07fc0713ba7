"""Answers on disk, one file each, under the digest of everything that was sent.

A kill leaves every entry whole or absent, and several processes may share a folder. An entry that
does not read as it was written counts as absent, is counted, and is written anew.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

from zest_jax.files import writing
from zest_jax.teachers.interface import Reply, digest

FORMAT = 1


class AnswerCache:
    """Replies by key. Safe to use from several threads.

    Args:
      folder: made when the first answer is kept.

    Attributes:
      damaged: entries that could not be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self.damaged = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> Reply | None:
        """The reply of a key, marked as cached; None where there is none."""
        try:
            reply = _read(self._path(key).read_bytes(), key)
        except FileNotFoundError:
            return None
        except OSError:
            reply = None
        if reply is None:
            with self._lock:
                self.damaged += 1
        return reply

    def put(self, key: str, reply: Reply) -> None:
        """Keeps an answer; a failure is never kept."""
        if reply.text is None:
            raise ValueError("only answers are kept")
        told = {
            "format": FORMAT,
            "key": key,
            "text": reply.text,
            "sha256": digest(reply.text),
            "finish": reply.finish,
            "tokens_in": reply.tokens_in,
            "tokens_out": reply.tokens_out,
        }
        with writing(self._path(key)) as file:
            # Half a surrogate pair, which an answer may hold, is no UTF-8: it stays escaped.
            file.write(json.dumps(told).encode())

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"


def _read(data: bytes, key: str) -> Reply | None:
    """The reply of an entry; None where it does not read as it was written."""
    try:
        told = json.loads(data)
        text, finish = told["text"], told["finish"]
        tokens = int(told["tokens_in"]), int(told["tokens_out"])
        whole = told["format"] == FORMAT and told["key"] == key and told["sha256"] == digest(text)
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    if not whole or not isinstance(text, str) or not isinstance(finish, str):
        return None
    return Reply(text, None, "", finish, True, *tokens)
