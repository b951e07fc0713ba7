"""Makes a warm-started policy: behaviour cloning, stopped by the validation questions, as a folder.

    python -m zest_jax.warm_start --config=configs/smoke.py:warm_start --workdir=runs/warm_start \\
        --out=my-policy

Trajectories of your own: `--config.warm_start.file=mine.jsonl`, one
{"segments": [[text, trained], …]} a line.
"""

import sys
from typing import Any

from absl import flags

from zest_jax import cli, train
from zest_jax.errors import UserError
from zest_jax.export import export


def main(config: Any, workdir: str, values: flags.FlagValues) -> None:
    if not config.warm_start.steps:
        raise UserError("the config has no warm start: set config.warm_start.steps.")
    if config.schedule.iterations:
        raise UserError(
            "the config goes on with self-evolution; set config.schedule.iterations=0, or run "
            "zest_jax.train."
        )
    if not values.out:
        raise UserError("no folder is given; say where to write: --out=my-policy.")
    train.main(config, workdir)
    step = export(workdir, "solver", values.out)
    print(f"the policy of step {step} is in {values.out}")


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("out", "", "the folder to write", values)


entry = cli.program(main, define=define)

if __name__ == "__main__":
    sys.exit(entry())
