"""Going on from a checkpoint: the host state of a run, and cutting its files back to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zest_jax import workdir as workdir_lib
from zest_jax.assembly import Parts, Phase, base_of, check_base
from zest_jax.checkpoint import Checkpoints
from zest_jax.errors import UserError
from zest_jax.parallel import hosts
from zest_jax.workdir import Workdir

EVOLVING = ("solver", "online")  # kinds of the phases that end an iteration
LOGS = ("proposals.jsonl", "episodes.jsonl", "rewards.jsonl")


def checkpoints_of(config: Any, workdir: Workdir, say: Callable[[str], None]) -> Checkpoints:
    """The checkpoints of a run, as its config says they are kept."""
    c = config.checkpoint
    return Checkpoints(
        workdir.checkpoints, c.keep, keep_best=c.keep_best, asynchronous=c.asynchronous, say=say
    )


def begin(
    checkpoints: Checkpoints,
    state: dict[str, Any],
    parts: Parts,
    say: Callable[[str], None],
) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """State and host state of the newest good checkpoint, or those of a run that begins.

    Host state: `saves` made, the `phase` and the `phase_step` in it, the `step` of the run, metric
    `records` written, programs traced again (`retraces`), `seconds` by kind of work, the `pool` of
    replayed tasks, the last iterations `evaluated` and `generated`, and which frozen `base` the
    adapters belong to.

    Returns:
      State, host state, and whether they are a checkpoint's.

    Raises:
      UserError: no checkpoint is good, or the adapters belong to other weights.
    """
    host: dict[str, Any] = {"saves": 0, "phase": 0, "phase_step": 0, "step": 0, "records": 0}
    host |= {"retraces": 0, "seconds": {}, "pool": [], "evaluated": "", "base": base_of(parts)}
    host["generated"] = -1
    newest = hosts.gathered(checkpoints.latest)
    if len(set(newest)) > 1:
        raise UserError(
            f"processes see other checkpoints (the newest of each: {newest}): the workdir must be "
            "one folder for all of them, on a shared file system or in a bucket."
        )
    if checkpoints.latest is None:
        return state, host, False
    _, state, host = checkpoints.restore(state)
    check_base(host, parts)
    say(f"resumed at step {host['step']}")
    return state, host, True


def cut_back(workdir: Workdir, host: dict[str, Any], phases: Sequence[Phase]) -> None:
    """Drops what files hold of later steps than the checkpoint's: samples, and held-out answers,
    which the same steps made again may give otherwise on a GPU."""
    for log in LOGS:
        workdir_lib.truncate_after(workdir.rollouts / log, host["step"])
    evolved = sum(phase.kind in EVOLVING for phase in phases[: host["phase"]])
    for path in (workdir.path / "evaluation").glob("iteration_*.jsonl"):
        if int(path.stem.removeprefix("iteration_")) > evolved:
            path.unlink()
