"""SIGTERM and Ctrl-C: a run stops where its state is whole, with everything saved.

    with Stopper() as stop:
        with stop.saved(step):       # nothing is unsaved here: a signal ends it at once
            evaluate()
        for step in …:
            update()
            if stop.due():           # asked once a step, by all processes alike
                with stop.held():    # a signal waits for the block's end
                    save()
                stop.end(step)

A machine that is taken back announces it by SIGTERM, or by a notice (`preemption.py`). JAX's own
preemption service listens to the same signal; it is not used, since orbax counts its sync points in
numbers of checkpoints.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from zest_jax import preemption
from zest_jax.errors import Stopped, UserError

PREEMPTED_EXIT = "ZEST_PREEMPTED_EXIT"  # names the exit code after SIGTERM; 0 if it is not set
INTERRUPTED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)  # the later one wins where processes got different ones
GRACE = 2.0  # seconds that a second Ctrl-C leaves for closing what is open
ASKED = (
    "\nzest_jax: stopping at the end of this step, with everything saved; press Ctrl-C again to "
    "quit at once.\n"
)


class Stopper:
    """Listens to SIGTERM and Ctrl-C while it is entered. In the main thread; elsewhere it is deaf.

    Raises:
      UserError: the environment variable ZEST_PREEMPTED_EXIT is no exit code.
    """

    def __init__(self) -> None:
        text = os.environ.get(PREEMPTED_EXIT) or "0"
        if not text.isdecimal() or int(text) > 255:
            raise UserError(f"{PREEMPTED_EXIT}={text} must be an exit code, from 0 to 255.")
        self._codes = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: int(text)}
        self._got = 0  # place in SIGNALS, counted from 1
        self._interrupts = 0
        self._saved_at: int | None = None
        self._at_once = False
        self._held = False
        self._before: dict[signal.Signals, Any] = {}
        self._watcher: threading.Thread | None = None
        self._quitting = threading.Timer(GRACE, _quit)
        self._unraisable = sys.unraisablehook

    def due(self) -> bool:
        """Whether the run is to stop now; every process gets the same answer.

        With several processes all must ask equally often.
        """
        import jax

        self._at_once = False
        if jax.process_count() > 1:
            import numpy as np
            from jax.experimental import multihost_utils

            self._got = int(np.max(multihost_utils.process_allgather(np.int32(self._got))))
        return self._got > 0

    def end(self, step: int) -> None:
        """Ends the run, which is saved as it is after `step` updates.

        Raises:
          Stopped: always, once a signal has come.
        """
        raise self._stopped(step)

    @contextmanager
    def saved(self, step: int) -> Iterator[None]:
        """While within, a signal ends the run at once (one process) or at the end (several).

        Args:
          step: updates made, all of which are in a checkpoint.

        Raises:
          Stopped: a signal has come.
        """
        import jax

        if self.due():
            self.end(step)
        self._saved_at, self._at_once = step, jax.process_count() == 1
        try:
            if self._at_once and self._got:  # came between the question and the permission
                self.end(step)
            yield
        finally:
            self._at_once = False
        if self.due():
            self.end(step)

    @contextmanager
    def held(self) -> Iterator[None]:
        """While within, a signal raises nothing: what has come is raised at the end.

        For code that does not stand an exception between any two of its instructions: an event
        loop drops one that was raised in a callback of its own, with a traceback, and orbax tells
        one as an error of reading. A second Ctrl-C still ends the program within GRACE.

        Raises:
          Stopped: a signal has come where it ends the run at once.
          KeyboardInterrupt: two Ctrl-C have.
        """
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self._raise()

    def __enter__(self) -> Stopper:
        if threading.current_thread() is not threading.main_thread():
            return self
        # The pipe tells of a signal even while the main thread is compiling or waiting for a
        # device, where Python would call no handler and count two signals as one.
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for each in SIGNALS:
            if signal.getsignal(each) is not signal.SIG_IGN:  # by nohup, say
                self._before[each] = signal.signal(each, self._handle)
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._unheard
        # All that there is is saved until the first step has ended; starting may take minutes.
        self._at_once = True
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        preemption.listen()
        return self

    def __exit__(self, *_: object) -> None:
        if self._watcher is None:
            return
        for each, before in self._before.items():
            # None: not Python's, as jax.distributed's, which would go unheard from here on.
            signal.signal(each, signal.SIG_DFL if before is None else before)
        self._before.clear()
        if sys.unraisablehook == self._unheard:  # else somebody's stands before it, to stay
            sys.unraisablehook = self._unraisable
        signal.set_wakeup_fd(self._wakeup)
        os.write(self._write, b"\0")
        self._watcher.join()
        self._watcher = None
        self._quitting.cancel()  # all is closed
        os.close(self._read)
        os.close(self._write)

    def _unheard(self, unraisable: Any) -> None:
        """What a handler raised inside a finaliser or a callback of the garbage collector, which
        drops it: the end of the step, or the watcher, stops the run all the same."""
        if not isinstance(unraisable.exc_value, KeyboardInterrupt | Stopped):
            self._unraisable(unraisable)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, between two of its instructions."""
        self._got = max(self._got, 1 + SIGNALS.index(signal.Signals(number)))
        self._interrupts += number == signal.SIGINT
        if not self._held:
            self._raise(number == signal.SIGINT)

    def _raise(self, interrupted: bool = True) -> None:
        """What a signal that has come raises here; nothing if it waits for the end of a step."""
        if interrupted and self._interrupts > 1:
            raise KeyboardInterrupt
        import jax

        if self._got and self._at_once and not jax.distributed.is_initialized():
            self._at_once = False
            raise self._stopped(self._saved_at, at_once=True)

    def _watch(self) -> None:
        """In a thread of its own: tells that Ctrl-C was heard, and sees that a second one ends."""
        interrupts = 0
        while True:
            for number in os.read(self._read, 64):
                if number == 0:
                    return
                if number != signal.SIGINT:
                    continue
                interrupts += 1
                if interrupts == 1 and not self._at_once:
                    os.write(2, ASKED.encode())
                if interrupts == 2:
                    self._quitting.daemon = True
                    self._quitting.start()

    def _stopped(self, step: int | None, at_once: bool = False) -> Stopped:
        by = SIGNALS[self._got - 1]
        place = "before the first step of this start" if step is None else f"at step {step}"
        where = f"{place}; everything is saved"
        if by == signal.SIGINT:
            sentence = f"interrupted {where}: run the same command to resume."
        else:
            sentence = f"stopped by SIGTERM {where}; resume with: {command()}"
        return Stopped(sentence, self._codes[by], at_once)


def command() -> str:
    """The command line of this process, for a shell."""
    return shlex.join(sys.orig_argv)


def _quit() -> None:
    """Ends the process wherever it is; a kill at any moment loses nothing that was saved."""
    os.write(2, b"\nzest_jax: interrupted; run the same command to resume.\n")
    os._exit(INTERRUPTED)
