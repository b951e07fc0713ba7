"""One of two processes of `test_agreeing.py`: `python -m tests.agreeing WHAT FOLDER`."""

import errno
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from zest_jax import cli
from zest_jax.checkpoint import Checkpoints
from zest_jax.errors import UserError
from zest_jax.parallel import hosts
from zest_jax.stopping import Stopper

WHAT, FOLDER = sys.argv[1:]


def restore(error: OSError) -> None:
    """Where the second process cannot read the newest checkpoint."""
    devices = jax.sharding.NamedSharding(jax.make_mesh((2,), ("data",)), jax.P("data"))
    state = {"x": jax.jit(lambda: jnp.arange(8.0), out_shardings=devices)()}
    with Checkpoints(FOLDER, keep=3) as checkpoints:
        for number in (1, 2):
            checkpoints.save(number, state, {"step": number})
    said: list[str] = []
    with Checkpoints(FOLDER, keep=3, say=said.append) as checkpoints:
        real = checkpoints._reader.restore

        def read(path, args):
            if path.name == "2" and not hosts.is_first():
                raise error
            return real(path, args)

        checkpoints._reader.restore = read
        number, _, host = checkpoints.restore(state)
        assert host == {"step": number}
        checkpoints.save(2, state, {"step": 2})
    print(number, said)


def fill() -> None:
    """Where the first process alone has an error, and the second waits for it."""
    hosts.gathered(0)
    if hosts.is_first():
        raise OSError(errno.ENOSPC, "No space left on device")
    hosts.gathered(1)


def refuse() -> None:
    """Where all have the same error."""

    def look() -> None:
        raise UserError("there is no world; name one.")

    hosts.told(look)


def train() -> None:
    """Steps until a signal has come to one of them."""
    with Stopper() as stop:
        stop.due()
        for step in range(1, 1000):
            hosts.gathered(step)
            if step == 2:
                (Path(FOLDER) / "begun").touch()
            time.sleep(0.01)
            if stop.due():
                stop.end(step)


def main(*_: object) -> None:
    hosts.initialize()
    {
        "damaged": lambda: restore(OSError(errno.EIO, "Input/output error")),
        "denied": lambda: restore(PermissionError(errno.EACCES, "Permission denied")),
        "full": fill,
        "refused": refuse,
        "trains": train,
    }[WHAT]()


if __name__ == "__main__":
    sys.argv = sys.argv[:1]
    sys.exit(cli.program(main, needs_config=False, needs_workdir=False)())
