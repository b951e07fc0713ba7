"""Checkpoints of a run: one pytree and a little host state, written whole or not at all.

A save copies the arrays to this machine's memory and returns; they are written while the run goes
on (`wait` is for the end). Every array has a checksum (`checksums`) and the host state a CRC: a
checkpoint that is damaged, cut short or missing files is never restored; the one before it is.
"""

from __future__ import annotations

import errno
import json
import logging
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from zest_jax.checksums import checksums
from zest_jax.errors import Stopped, UserError
from zest_jax.parallel import hosts

ASIDE = "damaged-"  # before the number of a checkpoint that was found damaged
_SHOWN = 200  # characters of what a library says


class CheckpointError(Exception):
    """A checkpoint could not be written; its cause is what the library or the system said."""


class DamagedError(Exception):
    """A checkpoint is not what was saved; says in what."""


class UnreadableError(Exception):
    """Another process cannot read a checkpoint that may be good; says which, and why."""


def _to_stderr(text: str) -> None:
    print(f"zest_jax: {text}", file=sys.stderr, flush=True)


class Checkpoints:
    """The newest few checkpoints of a run, and the best; numbered in the order they were made.

    A checkpoint that a kill interrupted is not complete and is never restored; an older one is.
    With several processes all of them must make the same calls.

    Args:
      folder: where they are kept: a local folder, or one in a bucket (gs://…).
      keep: how many of the newest; None only reads: nothing is made, deleted or moved.
      keep_best: whether the one with the highest score (see `save`) is kept however old it is.
      asynchronous: whether a save returns before all is written.
      say: gets a line about each checkpoint that is damaged; stderr if not given.
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int | None = 2,
        *,
        keep_best: bool = False,
        asynchronous: bool = True,
        say: Callable[[str], None] = _to_stderr,
    ):
        _quieten()
        self._say = say
        self._reads_only = keep is None
        self._pending: int | None = None  # number of the last save that may still be going on
        self._scores: dict[int, float] = {}
        policies: list[Any] = [ocp.checkpoint_managers.LatestN(keep)]
        if keep_best:
            policies.append(_Best(self._scores))
        self._folder = epath.Path(folder) if "://" in str(folder) else epath.Path(folder).resolve()
        self._options = ocp.CheckpointManagerOptions(
            create=not self._reads_only,
            # What a kill left half-written; a reader may look on while a run is writing.
            cleanup_tmp_directories=not self._reads_only,
            preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(policies),
            enable_async_checkpointing=asynchronous and not self._reads_only,
            # Orbax's own notes are not needed, and it would give up where one's are damaged.
            lightweight_initialize=True,
        )
        self._manager = ocp.CheckpointManager(self._folder, options=self._options)
        self._reader = _reader()
        for number in self._manager.all_steps() if keep_best else ():
            try:
                score = self._read_host(number)["score"]
            except DamagedError:
                continue  # said when it is restored
            if score is not None:
                self._scores[number] = score

    @property
    def latest(self) -> int | None:
        """Number of the newest checkpoint that is complete or being written, None without one."""
        return self._manager.latest_step()

    @property
    def writing(self) -> bool:
        """Whether a save is still going on."""
        return self._manager.is_saving_in_progress()

    def steps(self) -> dict[int, int]:
        """Updates made -> number of the newest complete checkpoint after so many, in order.

        Read from the host states' `step`: the end of a phase is saved without an update, so that
        several checkpoints may have the same one. One whose host state is damaged is left out.
        Waits for a save that is going on.
        """
        self.wait()
        found = {}
        for number in sorted(self._manager.all_steps()):
            try:
                found[int(self._read_host(number)["host"]["step"])] = number
            except DamagedError as error:
                self._say(f"checkpoint {number} is damaged ({error}); it is left out")
        return found

    def save(
        self, number: int, state: Any, host: dict[str, Any], score: float | None = None
    ) -> None:
        """Saves under a larger number than before; a number that is there is left as it is.

        On return the arrays have been copied, and may be donated; the checkpoint is complete after
        `wait`, or when the next save returns.

        Args:
          number: of the checkpoint.
          state: tree of arrays.
          host: what else is needed, as JSON has it.
          score: how good the state is, for `keep_best`; None where nobody has measured.

        Raises:
          CheckpointError: this checkpoint, or the one whose writing was still going on, could not
            be written.
        """
        if number == self.latest:
            return
        self.wait()
        # A copy, as JSON has it: the run goes on changing its own while this is being written.
        text = json.dumps({"host": host, "score": score, "sums": checksums(state)})
        noted = json.loads(text)
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            host=ocp.args.JsonSave(noted | {"crc32": _crc(noted)}),
        )
        if score is not None:
            self._scores[number] = score
        self._pending = number
        with self._writing():
            self._manager.save(number, args=args, force=True)

    def wait(self) -> None:
        """Returns when the last save is complete.

        Raises:
          CheckpointError: it could not be written.
        """
        with self._writing():
            self._manager.wait_until_finished()

    def restore(self, like: Any, number: int | None = None) -> tuple[int, Any, dict[str, Any]]:
        """Number, state and host state of a checkpoint, arrays placed as those of `like` are.

        Args:
          like: a tree of arrays of the state's shapes, types and places.
          number: which one; if not told the newest that is not damaged. What is newer is then moved
            aside (unless this only reads), after saying so.

        Raises:
          ValueError: there is no checkpoint.
          UserError: the one that was asked for is damaged, or all are.
          CheckpointError: a save that was still going on failed.
        """
        self.wait()
        numbers = sorted(self._manager.all_steps(), reverse=True) if number is None else [number]
        if not numbers:
            raise ValueError("there is no checkpoint to restore")
        damaged: dict[int, DamagedError] = {}
        for each in numbers:
            try:
                state, host = self._read(each, like)
            except DamagedError as error:
                damaged[each] = error
                continue
            for bad, why in damaged.items():
                self._say(f"checkpoint {bad} is damaged ({why}); going on from checkpoint {each}")
            self._set_aside(list(damaged))
            return each, state, host
        told = "; ".join(f"checkpoint {each} is damaged ({why})" for each, why in damaged.items())
        cure = (
            "choose another one"
            if number is not None
            else "bring a copy of them back, or begin in another workdir"
        )
        raise UserError(f"no checkpoint in {self._folder} can be restored: {told}; {cure}.")

    def close(self) -> None:
        """Waits for the last save and frees what orbax holds."""
        with self._writing():
            self._manager.close()
            self._reader.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            return  # Who quits at once does not wait for a write.
        if kind is None or issubclass(kind, Stopped):
            return self.close()
        try:
            self.close()
        except CheckpointError as error:  # beside what ended the run, which is told
            self._say(str(error))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        number = self._pending
        try:
            yield
        except Exception as error:
            _raise_interrupt(error)
            self._scores.pop(number or 0, None)
            said = f"checkpoint {number} could not be written: {_short(error)}"
            raise CheckpointError(said) from error

    def _read_host(self, number: int) -> dict[str, Any]:
        """The host state with its score and checksums, and with the CRC that it should have."""
        with _damage():
            args = ocp.args.Composite(host=ocp.args.JsonRestore())
            noted = dict(self._reader.restore(self._folder / str(number), args)["host"])
            crc = noted.pop("crc32")
            if crc != _crc(noted):
                raise DamagedError("its host state is not what was saved")
            return noted

    def _read(self, number: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """State and host state of a checkpoint, compared with what was saved.

        Raises:
          DamagedError: some process finds it damaged.
          UnreadableError: another process cannot read it for another reason.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        with _alike():
            noted = self._read_host(number)
        with _alike(), _damage():
            args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
            state = self._reader.restore(self._folder / str(number), args)["state"]
            jax.block_until_ready(state)
        found, saved = checksums(state), noted["sums"]
        wrong = [name for name in found if found[name] != saved.get(name)]
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise DamagedError(f"array {wrong[0]}{more} is not what was saved")
        return jax.tree.map(_bound_like, state, like), noted["host"]

    def _set_aside(self, numbers: Sequence[int]) -> None:
        """Frees the numbers of damaged checkpoints, which later saves will want."""
        if not numbers or self._reads_only:
            return

        def move() -> None:
            for number in numbers:
                aside = self._folder / f"{ASIDE}{number}"
                if aside.exists():
                    aside.rmtree()
                (self._folder / str(number)).rename(aside)

        hosts.told(move)
        self._manager.close()
        self._manager = ocp.CheckpointManager(self._folder, options=self._options)
        for number in numbers:
            self._scores.pop(number, None)


class _Best:
    """Of orbax's preservation policies: keeps the newest of those with the highest score."""

    def __init__(self, scores: dict[int, float]):
        self._scores = scores

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        scores = {c.step: self._scores[c.step] for c in checkpoints if c.step in self._scores}
        best = max(scores, key=lambda number: (scores[number], number), default=None)
        return [c.step == best for c in checkpoints]


# What is said by errors that are no damage: the same checkpoint may be readable in a moment, or by
# another user, or on a larger device.
_NO_DAMAGE = (
    *("RESOURCE_EXHAUSTED", "out of memory", "Out of memory", "PERMISSION_DENIED"),
    *("UNAUTHENTICATED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "Cannot connect"),
)
# Of the machine or the network at that moment. EIO is none: what a disk cannot read is gone.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE)


@contextmanager
def _damage() -> Iterator[None]:
    """Calls whatever a reader raises damage, unless it tells of something else."""
    try:
        yield
    except (DamagedError, MemoryError, PermissionError):
        raise
    except Exception as error:
        _raise_interrupt(error)
        passing = isinstance(error, ConnectionError | TimeoutError)
        passing |= isinstance(error, OSError) and error.errno in _PASSING
        if passing or any(word in str(error) for word in _NO_DAMAGE):
            raise
        raise DamagedError(_short(error)) from error


def _reader() -> Any:
    """What reads checkpoints: each process for itself, since one that fails in orbax's manager
    leaves the others waiting in a barrier."""
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"reader{me}"
    )
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=alone),
        state=ocp.StandardCheckpointHandler(multiprocessing_options=alone),
        host=ocp.JsonCheckpointHandler(multiprocessing_options=alone),
    )
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _raise_interrupt(error: BaseException) -> None:
    """Raises the Ctrl-C that orbax, which catches whatever is raised, has told as an error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt | Stopped):
            raise cause from None
        cause = cause.__cause__ or cause.__context__


@contextmanager
def _alike() -> Iterator[None]:
    """What one process finds damaged is damaged for all."""
    if jax.process_count() == 1:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as found:
        error = found
    mine = None
    if error is not None:
        bad = isinstance(error, DamagedError)
        mine = bad, str(error) if bad else _short(error)
    wrong = {n: told for n, told in enumerate(hosts.gathered(mine)) if told is not None}
    if not wrong:
        return
    # What is no damage on one of them ends all of them.
    number = min(wrong, key=lambda n: (wrong[n][0], n))
    damaged, said = wrong[number]
    if error is not None and isinstance(error, DamagedError) == damaged:
        raise error
    kind = DamagedError if damaged else UnreadableError
    raise kind(f"process {number} cannot read it: {said}") from error


def _short(error: BaseException) -> str:
    """The first line of what an error says, and its kind."""
    lines = str(error).partition(" See full TensorStore details")[0].strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _crc(noted: dict[str, Any]) -> int:
    # As JSON gives it back: keys are text then, and sorted as such.
    as_read = json.loads(json.dumps(noted))
    return zlib.crc32(json.dumps(as_read, sort_keys=True).encode())


def _bound_like(restored: jax.Array, like: jax.Array) -> jax.Array:
    """Frees a restored array from its device where `like` was bound to none.

    A program for bound arguments is another one than for free ones: without this, a resumed run
    would compile its steps anew, and again wherever a fresh state replaces a restored one.
    """
    return restored if like.committed else jnp.array(np.asarray(restored))


class _RaisedAnyway(logging.Filter):
    """Drops what is logged, with tracebacks, about an exception that orbax's caller is then given:
    by orbax's threads, and by asyncio of tasks that failed beside the first that did."""

    SAID = (
        "_SignalingThread.run() raised an exception",
        "Handler Commit operations or the Commit callback in background save thread",
        "[wait_until_finished] Save Finalize thread",
        "Checkpointer failed: one or more items may not be finalized",
        "Failed to write metadata=",
        "Failed to update metadata=",
    )

    def filter(self, record: logging.LogRecord) -> bool:
        said = str(record.msg)
        if record.name == "asyncio":
            where = record.exc_info[2] if record.exc_info else None
            places = "".join(frame.filename for frame in traceback.extract_tb(where))
            ours = any(word in said + places for word in ("orbax", "tensorstore"))
            return not (ours and "exception was never retrieved" in said)
        return not any(each in said for each in self.SAID)


_RAISED_ANYWAY = _RaisedAnyway()


def _quieten() -> None:
    """Lets a save or a restore that failed be told once, by its exception.

    Where one write or read fails, orbax leaves its event loop while others are still under way, and
    a traceback is printed for each of them, or for its coroutine when that is collected.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_RAISED_ANYWAY)
    before = sys.unraisablehook
    if getattr(before, "_quiet", False):
        return

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        code = getattr(unraisable.object, "cr_code", None)
        ours = code is not None and "orbax" in Path(code.co_filename).parts
        closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        if not (ours or closed):
            before(unraisable)

    hook._quiet = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook
