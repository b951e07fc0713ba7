"""When another process of the run is gone: this one ends soon, with a sentence.

JAX's coordination service notices that a process sends no heartbeats, and then ends all others by
`abort` from a thread of its own, where no Python runs; there a C handler says what happened. What
a collective raises meanwhile (a connection reset, say) is told by the same sentence (`tells`).

A process that ends of an error of its own says so through that service (`leave`), and the others,
which listen (`listen`), end within seconds and tell its reason.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from zest_jax.errors import EXIT_LOST

# Seconds without a heartbeat until a process counts as gone; JAX's own 100 would be a long wait for
# a whole slice. Heartbeats come from a thread that needs no Python, also during compilation.
HEARTBEAT = 25
SENTENCE = (
    "another process of this run is gone{}; everything up to the last checkpoint is saved: "
    "start all processes again with the same command to resume."
)
# What only several processes' exchange is called; and what its errors of JAX's types say besides.
_EXCHANGE = ("Gloo", "gloo::", "NCCL", "coordination service", "CoordinationService")
_GONE = (
    *("Connection reset by peer", "Connection closed by peer", "Socket closed", "heartbeat"),
    *("Barrier timed out", "already in error"),
)
LISTENS_EVERY = 1.0  # seconds
# Seconds after which others follow one that has left: those with the same error end by themselves.
FOLLOWS = 3.0
_LEFT = "zest_jax/left/"  # with a process's number, the key under which it says why
_leaving = threading.Event()
_keep: list[object] = []  # the handler, which C alone refers to


def one_of_several() -> bool:
    """Whether this process has joined others; JAX is not imported for the question."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def tells(error: BaseException) -> bool:
    """Whether an error in one of several processes says that another does not answer. Arrays that
    wait for one raise ValueErrors, too."""
    if any(word in str(error) for word in _EXCHANGE):
        return True
    names = {cls.__name__ for cls in type(error).__mro__}
    of_jax = bool(names & {"XlaRuntimeError", "JaxRuntimeError", "BarrierTimeoutError"})
    return of_jax and any(word in str(error) for word in _GONE)


def sentence(what: str) -> str:
    """What a user is told; `what` goes on after "gone"."""
    return SENTENCE.format(what)


def speak_at_abort() -> None:
    """Lets an `abort` in this process be told in a sentence, with exit code EXIT_LOST.

    Only for a process that is one of several. `abort` calls the handler as a plain function on the
    thread that gives up, so that Python may run in it once the interpreter is free.
    """
    if _keep:
        return
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int)

    def handle(number: int) -> None:
        # A failed check of JAX's own ends in the same place.
        said = sentence(", or JAX failed in this one (the lines above tell)")
        os.write(2, f"\nzest_jax: {said}\n".encode())
        os._exit(EXIT_LOST)

    handler = kind(handle)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, kind], ctypes.c_void_p
    libc.signal(int(signal.SIGABRT), handler)
    _keep.append(handler)


def listen() -> None:
    """Lets this process end, with a sentence, soon after another one has left.

    Only for a process that is one of several.
    """
    listener = threading.Thread(target=_quietly, args=(_follow,), daemon=True)
    listener.start()

    def stop() -> None:
        # A thread that comes back from JAX while the interpreter is taken down would abort it.
        _leaving.set()
        listener.join(FOLLOWS)

    atexit.register(stop)


def leave(why: str, waits: bool = True) -> bool:
    """Tells the other processes why this one ends.

    Args:
      why: a sentence.
      waits: whether to give them a moment to leave as well.

    Returns:
      Whether all of them leave by themselves, as where all have the same error.
    """
    _leaving.set()
    all_leave = threading.Event()

    def tell() -> None:  # in a thread: without the first process there is nobody to answer
        import jax

        client = _service()
        client.key_value_set(f"{_LEFT}{jax.process_index()}", why, allow_overwrite=True)
        while len(_left(client)) < jax.process_count():
            time.sleep(0.1)
        all_leave.set()

    threading.Thread(target=_quietly, args=(tell,), daemon=True).start()
    return all_leave.wait(FOLLOWS + LISTENS_EVERY + 1 if waits else 0.5)


def _follow() -> None:
    while not (told := _left(_service())):
        if _leaving.wait(LISTENS_EVERY):
            return
    if not _leaving.wait(FOLLOWS):
        number, why = min(told.items())
        said = sentence(f" (process {number}: {why.strip().rstrip('.')})")
        os.write(2, f"\nzest_jax: {said}\n".encode())
        os._exit(EXIT_LOST)


def _quietly(work: Callable[[], None]) -> None:
    """Where the service is gone there is nobody to ask, and JAX ends this process by itself."""
    try:
        work()
    except Exception:
        return


def _service() -> Any:
    """The client of JAX's coordination service, which JAX offers no public name for."""
    from jax._src import distributed

    return distributed.global_state.client


def _left(client: Any) -> dict[int, str]:
    """Why processes have left, by their numbers."""
    found = client.key_value_dir_get(_LEFT)
    return {int(key.rpartition("/")[2]): why for key, why in found}
