"""Checkpoints of a run: one pytree and a little host state, written whole or not at all."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """The newest few checkpoints of a run, by step.

    A checkpoint that a kill interrupted is not complete and is never restored; an older one is.

    Args:
      folder: where they are kept.
      keep: how many.
    """

    def __init__(self, folder: Path, keep: int = 2):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=True, enable_async_checkpointing=False
        )
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint, None without one."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, host: dict[str, Any]) -> None:
        """Writes a checkpoint; on return it is complete."""
        if step == self.latest:
            return  # the same step leaves the same state
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host))
        self._manager.save(step, args=args, force=True)
        self._manager.wait_until_finished()

    def restore(self, like: Any) -> tuple[int, Any, dict[str, Any]]:
        """The newest checkpoint, its arrays placed as those of `like` are."""
        step = self.latest
        if step is None:
            raise ValueError("there is no checkpoint to restore")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract), host=ocp.args.JsonRestore()
        )
        restored = self._manager.restore(step, args=args)
        return step, restored["state"], restored["host"]

    def close(self) -> None:
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
