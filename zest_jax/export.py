"""Writes a role's weights of a run as a Hugging Face folder.

    python -m zest_jax.export --workdir=runs/smoke --role=solver --out=my-solver

The folder loads in transformers (`AutoModelForCausalLM`, `AutoTokenizer`) and in another run
(`--config.policy.folder=my-solver`).
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
from zest_jax.models.hf import save_pretrained
from zest_jax.models.policy import Params
from zest_jax.tracing import TraceCounter
from zest_jax.workdir import Workdir

ROLES = ("solver", "proposer", "anchor")


def load_role(workdir_path: str, role: str) -> tuple[assembly.Parts, Params, int]:
    """The parts of a run, a role's weights in its newest checkpoint, and that checkpoint's step.

    Raises:
      UserError: an unknown role, or a folder that is no workdir or has no checkpoint.
    """
    if role not in ROLES:
        raise UserError(f"the role is one of {', '.join(ROLES)}, not {role!r}.")
    if not (Path(workdir_path) / "config.json").exists():
        raise UserError(f"{workdir_path} is no workdir of a run: it has no config.json.")
    workdir = Workdir(workdir_path, lock=False)
    config = ConfigDict(json.loads(workdir.config_json.read_text("utf-8")))
    parts = assembly.build(config, TraceCounter())
    checkpoints = Checkpoints(workdir.checkpoints, config.checkpoint.keep)
    if checkpoints.latest is None:
        raise UserError(f"{workdir_path} has no checkpoint yet; let the run come further.")
    _, state, host = checkpoints.restore(assembly.initial_state(config, parts.params))
    checkpoints.close()
    return parts, state[role] if role == "anchor" else state[role].params, host["step"]


def export(workdir_path: str, role: str, out: str, dtype: str = "float32") -> int:
    """Writes the newest checkpoint's weights of a role as a folder; returns its step.

    Raises:
      UserError: see `load_role`.
    """
    if Path(out).exists() and not Path(out).is_dir():
        raise UserError(f"{out} is a file; name a folder to write to.")
    parts, params, step = load_role(workdir_path, role)
    save_pretrained(parts.policy, jax.device_get(params), out, parts.tokenizer, dtype=dtype)
    return step


def main(config: Any, workdir: str, values: flags.FlagValues) -> None:
    if config is not None:
        raise UserError("an export takes the run's own config; leave --config out.")
    if not values.out:
        raise UserError("no folder is given; say where to write: --out=my-solver.")
    step = export(workdir, values.role, values.out, values.dtype)
    print(f"{values.role} of step {step} written to {values.out}")


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("role", "solver", "whose weights: solver, proposer or anchor", values)
    flags.DEFINE_string("out", "", "the folder to write", values)
    flags.DEFINE_string("dtype", "float32", "float32 or bfloat16", values)


entry = cli.program(main, define=define, needs_config=False)

if __name__ == "__main__":
    sys.exit(entry())
