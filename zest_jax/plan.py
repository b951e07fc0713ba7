"""Compiles every step of a run for a TPU slice that is not there: does it fit, how long is a step.

    python -m zest_jax.plan --config=configs/dr_free.py:qwen2.5-3b --topology=v5e-64 \\
        --passages=21015324

The compiler is the real one (libtpu, of the extra `tpu` or `test`); no TPU, no weights and no index
are needed. Told per device: the memory that the compiler assigns against the chip's, what devices
exchange in a step, and how long it would take at the least, with what that assumes. Ends with 2
where the run does not fit, and names the smallest change with which it would. For GPUs
(`--topology=h200-8`) steps are lowered as far as JAX goes without one, and memory is our estimate.
"""

import atexit
import os
import shutil
import sys
import tempfile
from typing import Any

from absl import flags

from zest_jax import chips, cli
from zest_jax.errors import UserError


def define(values: flags.FlagValues) -> None:
    """The program's own flags."""
    flags.DEFINE_string(
        "topology", None, "the slice: v5e-256, v5p-128 (cores), v6e-64, h200-8", values
    )
    flags.DEFINE_string("steps", "", "only these steps, separated by commas", values)
    numbers = {
        "passages": (0, "passages of an index on the devices; 0 for what the config names"),
        "dimension": (768, "components of its vectors"),
        "passage_tokens": (128, "ids kept of a passage"),
    }
    for name, (default, text) in numbers.items():
        flags.DEFINE_integer(name, default, text, flag_values=values)
    flags.DEFINE_boolean("int8_index", False, "vectors in 8 bits, not in bfloat16", values)
    flags.DEFINE_boolean(
        "quick", False, "compile with fewer passes: a third of the time, memory up to 15 % off",
        values,
    )  # fmt: skip
    flags.DEFINE_string("json", "", "a file for all numbers", values)


def prepare(where: chips.Slice, quick: bool) -> str:
    """Sets up the compiler, which reads its settings when JAX is imported.

    Returns:
      The folder in which the compiler leaves its reports.

    Raises:
      UserError: JAX is in use already with other devices.
    """
    dump = tempfile.mkdtemp(prefix="zest_jax-plan-")
    atexit.register(shutil.rmtree, dump, ignore_errors=True)
    os.environ["JAX_PLATFORMS"] = "cpu"
    if where.platform == "tpu":
        # Which chips there are would be asked of a metadata server, and other programs that have
        # loaded the compiler would keep this one from it.
        os.environ |= {
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-16",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text",
        }
        if quick:
            os.environ["JAX_OPTIMIZATION_LEVEL"] = "O1"
    else:
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={where.count}"
    return dump


def main(config: Any, workdir: str | None, values: flags.FlagValues) -> None:
    """See the head of the file."""
    if not values.topology:
        raise UserError("no topology is given; say which: --topology=v5e-64.")
    where = chips.find_slice(values.topology)
    if min(values.passages, values.dimension - 2, values.passage_tokens - 1) < 0:
        raise UserError("--passages, --dimension and --passage_tokens are numbers above 0.")
    dump = prepare(where, values.quick)
    from zest_jax import planning  # imports JAX

    wanted = tuple(filter(None, (name.strip() for name in values.steps.split(","))))
    corpus = None
    if values.passages:
        corpus = (values.passages, values.dimension, values.passage_tokens, values.int8_index)
    result = planning.plan(config, where, wanted, corpus, dump, print)
    if values.json:
        planning.write(values.json, result, config)
    if not result.fits:
        raise UserError(planning.refusal(result))


entry = cli.program(main, define=define, needs_workdir=False)

if __name__ == "__main__":
    sys.exit(entry())
