"""Writes a role's weights of a run as a Hugging Face folder.

    python -m zest_jax.export --workdir=runs/smoke --role=solver --out=my-solver

The folder loads in transformers (`AutoModelForCausalLM`, `AutoTokenizer`) and in another run
(`--config.policy.folder=my-solver`). The weights are those of the newest checkpoint, or with
--step=N of the one after N updates, as long as the run keeps it (checkpoint.keep). Adapters are
merged into the matrices that they stand beside.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
from absl import flags
from ml_collections import ConfigDict

from zest_jax import assembly, cli
from zest_jax.checkpoint import Checkpoints
from zest_jax.errors import UserError
from zest_jax.learning.updates import TrainState
from zest_jax.models.hf import save_pretrained
from zest_jax.models.lora import merge_lora
from zest_jax.models.policy import Params
from zest_jax.tracing import TraceCounter
from zest_jax.workdir import Workdir

ROLES = ("solver", "proposer", "anchor")


def read_config(workdir_path: str) -> ConfigDict:
    """The config of a run.

    Raises:
      UserError: the folder is no workdir.
    """
    path = Path(workdir_path) / "config.json"
    if not path.exists():
        raise UserError(f"{workdir_path} is no workdir of a run: it has no config.json.")
    return ConfigDict(json.loads(path.read_text("utf-8")))


def load_role(
    workdir_path: str, role: str, step: int | None = None
) -> tuple[assembly.Parts, Params, int]:
    """The parts of a run, a role's weights in a checkpoint of it, and that checkpoint's step.

    Args:
      workdir_path: the run's.
      role: one of `ROLES`.
      step: updates after which the checkpoint was made; None for the newest.

    Returns:
      The parts, all parameters of the role (base and adapters where there are any), the step.

    Raises:
      UserError: an unknown role, a folder that is no workdir or has no checkpoint (of that step),
        or adapters whose base is another one now.
    """
    if role not in ROLES:
        raise UserError(f"the role is one of {', '.join(ROLES)}, not {role!r}.")
    config = read_config(workdir_path)
    workdir = Workdir(workdir_path, lock=False)
    with Checkpoints(workdir.checkpoints, keep=None) as checkpoints:
        number = None  # the newest that is not damaged
        if checkpoints.latest is None:
            raise UserError(f"{workdir_path} has no checkpoint yet; let the run come further.")
        if step is not None:
            steps = checkpoints.steps()
            if step not in steps:
                raise UserError(
                    f"{workdir_path} has no checkpoint of step {step}; there are those of "
                    f"{', '.join(map(str, steps))} (checkpoint.keep says how many a run keeps)."
                )
            number = steps[step]
        try:
            parts = assembly.build(config, TraceCounter())
        except AttributeError as error:  # a field that runs did not have when this one began
            raise UserError(
                f"{workdir_path} was made by another version of zest_jax ({error}); use that one."
            ) from None
        name = assembly.proposer_state(config) if role == "proposer" else role
        if name is None:
            raise UserError(f"{workdir_path} is a run on labelled questions; it has no proposer.")
        like = assembly.initial_state(config, parts)
        _, state, host = checkpoints.restore(like, number)
    assembly.check_base(host, parts)
    held = state[name]
    params = held.params if isinstance(held, TrainState) else held
    return parts, parts.player(role).whole(params), host["step"]


def export(
    workdir_path: str, role: str, out: str, dtype: str = "float32", step: int | None = None
) -> int:
    """Writes a checkpoint's weights of a role as a folder; returns the checkpoint's step.

    Raises:
      UserError: see `load_role`.
    """
    if Path(out).exists() and not Path(out).is_dir():
        raise UserError(f"{out} is a file; name a folder to write to.")
    parts, params, step = load_role(workdir_path, role, step)
    player = parts.player(role)
    policy, params = merge_lora(player.policy, params)
    save_pretrained(
        policy,
        jax.device_get(params),
        out,
        player.tokenizer,
        dtype=dtype,
        # The several end tokens of an instruct model, say.
        generation=player.generation or None,
    )
    return step


def main(config: Any, workdir: str, values: flags.FlagValues) -> None:
    if config is not None:
        raise UserError("an export takes the run's own config; leave --config out.")
    if not values.out:
        raise UserError("no folder is given; say where to write: --out=my-solver.")
    step = export(workdir, values.role, values.out, values.dtype, values.step)
    print(f"{values.role} of step {step} written to {values.out}")


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("role", "solver", "whose weights: solver, proposer or anchor", values)
    flags.DEFINE_string("out", "", "the folder to write", values)
    flags.DEFINE_integer("step", None, "updates made; the newest if not given", flag_values=values)
    flags.DEFINE_string("dtype", "float32", "float32 or bfloat16", values)


entry = cli.program(main, define=define, needs_config=False)

if __name__ == "__main__":
    sys.exit(entry())
