"""What is kept of an update that was not finite, so that `zest_jax.replay` can make it again.

A folder `not_finite` in the workdir, of the last such update:

  what.json   step, phase, role, metrics, seed and versions
  batch.npz   the batch with its advantages, arrays by their paths
  state/      the whole state before the update, as in a checkpoint
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

import zest_jax
from zest_jax.checkpoint import Checkpoints
from zest_jax.config import config_hash
from zest_jax.errors import UserError
from zest_jax.files import writing
from zest_jax.learning.packing import Packed
from zest_jax.learning.updates import ProposalBatch
from zest_jax.metrics import not_finite, told
from zest_jax.parallel import hosts
from zest_jax.rewards.terms import Signals
from zest_jax.workdir import Workdir, write_atomically

FOLDER = "not_finite"
Batch = Packed | ProposalBatch


@dataclasses.dataclass(frozen=True)
class Tried:
    """An update that was tried.

    Attributes:
      step: number that it would have had.
      phase: of the run.
      metrics: of the step, the update's among them.
      batch: what it was made from.
      advantage_N: of the batch's sequences; None where the update finds them itself, and where
        there are none.
    """

    step: int
    phase: str
    metrics: Mapping[str, float]
    batch: Batch
    advantage_N: Any = None

    @property
    def bad(self) -> dict[str, float]:
        """The metrics that say that it was not finite; {} where it was."""
        return not_finite(self.metrics)

    @property
    def role(self) -> str:
        """Whose update it was: warm_start, proposer or solver."""
        return next(iter(self.bad)).partition("/")[0]


def keep_tried(
    workdir: Workdir,
    config: Any,
    tried: Tried,
    state: Any,
    host: Mapping[str, Any],
    say: Callable[[str], None],
) -> None:
    """Says what happened, and writes the folder of an update in place of an earlier one.

    With several processes all must call it: each writes its part of the state, and the first one
    everything else.

    Args:
      workdir: the run's.
      config: the run's.
      tried: that was not finite.
      state: before it, which is also the state after it.
      host: the host state that belongs to it.
      say: shows a line.
    """
    folder, state_folder = workdir.path / FOLDER, epath.Path(workdir.shared / FOLDER / "state")
    here, copied = workdir.path, ""
    if workdir.shared != here:  # in a bucket, where a replay does not look
        here = Path("runs", workdir.shared.name)
        copied = f"copy {workdir.shared} to {here} (checkpoints are not needed), then "
    say(
        f"step {tried.step}, phase {tried.phase}: {told(tried.bad)}. The update was not made; "
        f"its batch and the state before it go to {workdir.shared / FOLDER}: {copied}python -m "
        f"zest_jax.replay --workdir={here} tells where the numbers go wrong."
    )
    arrays = {name: hosts.fetch(x) for name, x in _flat(tried.batch).items()}
    if tried.advantage_N is not None:
        arrays["advantage_N"] = hosts.fetch(tried.advantage_N)
    first = hosts.is_first()
    if first and folder.exists():
        shutil.rmtree(folder)
    if first and state_folder.exists():  # not in that folder if in a bucket
        state_folder.rmtree()
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(FOLDER)
    with Checkpoints(str(state_folder), keep=1) as checkpoints:
        checkpoints.save(1, state, dict(host))
    if first:
        folder.mkdir(exist_ok=True)
        with writing(folder / "batch.npz") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        # Last: where it is there, all is.
        text = json.dumps(_what(config, tried), indent=2)
        write_atomically(folder / "what.json", text + "\n")


def _what(config: Any, tried: Tried) -> dict[str, Any]:
    return {
        "step": tried.step,
        "phase": tried.phase,
        "role": tried.role,
        "not_finite": {name: repr(x) for name, x in tried.bad.items()},
        "metrics": {name: repr(float(x)) for name, x in tried.metrics.items()},
        # What was drawn is a function of these two.
        "seed": config.seed,
        "updates_before": tried.step - 1,
        "config_hash": config_hash(config),
        "zest_jax": zest_jax.__version__,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
    }


def read(workdir: Path) -> tuple[dict[str, Any], Tried]:
    """What was kept but for the state: what.json and the update.

    Raises:
      UserError: there is nothing, or not all of it.
    """
    folder = workdir / FOLDER
    if not (folder / "what.json").exists():
        raise UserError(
            f"{workdir} has no update to make again: a run leaves one in its folder {FOLDER} when "
            "a loss, a gradient or a log-probability is not finite."
        )
    what = json.loads((folder / "what.json").read_text("utf-8"))
    with np.load(folder / "batch.npz") as file:
        arrays = dict(file)
    advantage_N = arrays.pop("advantage_N", None)
    proposals = "proposals/ids_MRL" in arrays
    batch: Batch = _proposal_batch(arrays) if proposals else _packed(arrays, "")
    metrics = {name: float(x) for name, x in what["metrics"].items()}
    return what, Tried(what["step"], what["phase"], metrics, batch, advantage_N)


def _flat(batch: Batch) -> dict[str, Any]:
    """Arrays by their paths; the packed parts' static field as one of them."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    flat = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}
    if isinstance(batch, Packed):
        return flat | {"segments": batch.segments}
    flat["proposals/segments"] = batch.proposals.segments
    if batch.contexts is not None:
        flat["contexts/segments"] = batch.contexts.segments
    return flat


def _packed(arrays: Mapping[str, np.ndarray], prefix: str) -> Packed:
    fields: dict[str, Any] = {f.name: arrays[prefix + f.name] for f in dataclasses.fields(Packed)}
    return Packed(**fields | {"segments": int(fields["segments"])})


def _proposal_batch(arrays: Mapping[str, np.ndarray]) -> ProposalBatch:
    names = [f.name for f in dataclasses.fields(Signals) if f.name != "more"]
    more = "signals/more/"
    return ProposalBatch(
        proposals=_packed(arrays, "proposals/"),
        contexts=_packed(arrays, "contexts/") if "contexts/ids_MRL" in arrays else None,
        signals=Signals(
            **{name: arrays[f"signals/{name}"] for name in names},
            more={n.removeprefix(more): x for n, x in arrays.items() if n.startswith(more)},
        ),
        group_B=arrays["group_B"],
        reward_order_B=arrays["reward_order_B"],
    )
