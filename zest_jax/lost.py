"""When another process of the run is gone: this one ends soon, with a sentence.

JAX's coordination service notices that a process sends no heartbeats, and then ends all others by
`abort` from a thread of its own, where no Python runs; there a C handler says what happened. What
a collective raises meanwhile (a connection reset, say) is told by the same sentence (`tells`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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
