"""Checkpoints of a run: one pytree and a little host state, written whole or not at all."""

import logging
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp


class Checkpoints:
    """The newest few checkpoints of a run, numbered in the order they were made.

    A checkpoint that a kill interrupted is not complete and is never restored; an older one is.

    Args:
      folder: where they are kept.
      keep: how many.
    """

    def __init__(self, folder: Path, keep: int = 2):
        _quieten()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=True, enable_async_checkpointing=False
        )
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    @property
    def latest(self) -> int | None:
        """Number of the newest complete checkpoint, None without one."""
        return self._manager.latest_step()

    def steps(self) -> dict[int, int]:
        """Updates made -> number of the newest complete checkpoint after so many, in order.

        Read from the host states' `step`: the end of a phase is saved without an update, so that
        several checkpoints may have the same one.
        """
        found = {}
        for number in sorted(self._manager.all_steps()):
            args = ocp.args.Composite(host=ocp.args.JsonRestore())
            found[int(self._manager.restore(number, args=args)["host"]["step"])] = number
        return found

    def save(self, number: int, state: Any, host: dict[str, Any]) -> None:
        """Writes a checkpoint under a larger number than before; on return it is complete.

        A number that is there already is left as it is.
        """
        if number == self.latest:
            return
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host))
        self._manager.save(number, args=args, force=True)
        self._manager.wait_until_finished()

    def restore(self, like: Any, number: int | None = None) -> tuple[int, Any, dict[str, Any]]:
        """Number, state and host state of a checkpoint (the newest if not told), arrays placed as
        those of `like` are."""
        number = self.latest if number is None else number
        if number is None:
            raise ValueError("there is no checkpoint to restore")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract), host=ocp.args.JsonRestore()
        )
        restored = self._manager.restore(number, args=args)
        return number, jax.tree.map(_bound_like, restored["state"], like), restored["host"]

    def close(self) -> None:
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bound_like(restored: jax.Array, like: jax.Array) -> jax.Array:
    """Frees a restored array from its device where `like` was bound to none.

    A program for bound arguments is another one than for free ones: without this, a resumed run
    would compile its steps anew, and again wherever a fresh state replaces a restored one.
    """
    return restored if like.committed else jnp.array(np.asarray(restored))


class _RaisedAnyway(logging.Filter):
    """Drops what orbax's threads log about an exception that their caller is then given."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "_SignalingThread.run() raised an exception" not in str(record.msg)


_RAISED_ANYWAY = _RaisedAnyway()


def _quieten() -> None:
    """Lets a save that failed be told once, by its exception.

    Where one write of a save fails, orbax leaves its event loop while others are still under way,
    and TensorStore prints a traceback for each of them.
    """
    logging.getLogger("absl").addFilter(_RAISED_ANYWAY)
    before = sys.unraisablehook
    if getattr(before, "_quiet", False):
        return

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            before(unraisable)

    hook._quiet = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook
