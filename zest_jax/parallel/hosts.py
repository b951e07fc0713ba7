"""Several processes that run one program: how they begin, share work, and keep of one mind.

Every process runs the same host code on the same numbers, so that all of them call the same
compiled steps in the same order. What only one of them can know (a file, a clock, an answer of a
server) is told to the others (`told`); what costs time is done in shares (`share`); what all worked
out for themselves can be checked (`agree`). With one process each of these is the plain call.
"""

import os
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from zest_jax import lost
from zest_jax.errors import UserError

T = TypeVar("T")
S = TypeVar("S")

VARIABLES = ("ZEST_COORDINATOR", "ZEST_PROCESSES", "ZEST_PROCESS")


def initialize(environment: Mapping[str, str] = os.environ) -> bool:
    """Joins the other processes of a run, as environment variables say; before JAX is used.

    `ZEST_DISTRIBUTED=auto` leaves it to JAX to find out (Cloud TPU slices, SLURM and others that
    it knows); else `ZEST_COORDINATOR=host:port`, `ZEST_PROCESSES=n` and `ZEST_PROCESS=i` say it
    (launch_gpu.sh sets them). Without any of these there is one process.

    Returns:
      Whether there are others.

    Raises:
      UserError: some of the three are missing or no numbers, or the others were not reached.
    """
    if environment.get("ZEST_DISTRIBUTED"):
        if environment["ZEST_DISTRIBUTED"] != "auto":
            raise UserError(
                f"ZEST_DISTRIBUTED={environment['ZEST_DISTRIBUTED']}; it is auto or not set."
            )
        return _join({})
    given = [name for name in VARIABLES if environment.get(name)]
    if not given:
        return False
    if len(given) < len(VARIABLES):
        missing = [name for name in VARIABLES if name not in given]
        raise UserError(f"{' and '.join(given)} given without {' and '.join(missing)}; set all.")
    try:
        count, number = (int(environment[name]) for name in VARIABLES[1:])
    except ValueError:
        count, number = 0, 0
    if not 0 <= number < count:
        raise UserError(
            f"ZEST_PROCESS={environment['ZEST_PROCESS']} of "
            f"ZEST_PROCESSES={environment['ZEST_PROCESSES']}: expected a number from 0 to one less "
            "than the number of processes."
        )
    if count == 1:
        return False
    return _join(
        {
            "coordinator_address": environment["ZEST_COORDINATOR"],
            "num_processes": count,
            "process_id": number,
        }
    )


def _join(arguments: dict[str, Any]) -> bool:
    if jax.distributed.is_initialized():
        return jax.process_count() > 1
    try:
        jax.distributed.initialize(**arguments, heartbeat_timeout_seconds=lost.HEARTBEAT)
    except Exception as error:
        where = arguments.get("coordinator_address", "the coordinator that JAX found")
        raise UserError(
            f"the other processes were not reached at {where}: {error}. Start all of them within "
            "five minutes, with the same address, on a port that is free on process 0's machine."
        ) from error
    several = jax.process_count() > 1
    if several:
        lost.speak_at_abort()
        lost.listen()
    return several


def is_first() -> bool:
    """Whether this is the process that writes the workdir and speaks to people."""
    return jax.process_index() == 0


def stream() -> IO[str] | None:
    """Where this process tells people things: nowhere, but for the first (None: the default)."""
    return None if is_first() else open(os.devnull, "w", encoding="utf-8")


def told(make: Callable[[], T]) -> T:
    """What `make` gives on the first process, on all of them; it runs nowhere else.

    Raises:
      Whatever it raised there.
    """
    if jax.process_count() == 1:
        return make()
    outcome: tuple[bool, Any] = (True, None)
    if is_first():
        outcome = _tried(make)
    return _got(_exchange([outcome])[0])


def share(items: Sequence[S], work: Callable[[Sequence[S]], Sequence[T]]) -> list[T]:
    """`work` on all items, each process on neighbours of its own; the results on all, in order.

    Args:
      items: the same on every process.
      work: gives one result for each item that it is given; the results can be pickled.

    Raises:
      Whatever it raised on any process (the first of them).
    """
    count = jax.process_count()
    if count == 1:
        return list(work(items))
    ends = np.linspace(0, len(items), count + 1).astype(int)
    at = jax.process_index()
    mine = items[ends[at] : ends[at + 1]]
    parts = _exchange([_tried(lambda: list(work(mine)) if len(mine) else [])])
    return [result for part in parts for result in _got(part)]


def gathered(value: T) -> list[T]:
    """Every process's value, on all of them, in order of their numbers."""
    return [value] if jax.process_count() == 1 else _exchange([value])


def gathered_or_raised(make: Callable[[], T]) -> list[T]:
    """What `make` gives on every process, on all of them, in order of their numbers.

    Raises:
      Whatever it raised on any process (the first of them), on all.
    """
    if jax.process_count() == 1:
        return [make()]
    return [_got(part) for part in _exchange([_tried(make)])]


def agree(name: str, value: Any) -> None:
    """Checks that a value is the same on every process: none goes on with numbers of its own.

    Args:
      name: what it is, for the message.
      value: anything that can be pickled to the same bytes.

    Raises:
      RuntimeError: it is not.
    """
    if jax.process_count() == 1:
        return
    sums = gathered(zlib.crc32(pickle.dumps(value)))
    if len(set(sums)) > 1:
        raise RuntimeError(
            f"{name} differs between processes (checksums {sums}): a host computed something that "
            "is no function of the seed and the step."
        )


def alone(make: Callable[[], T]) -> T:
    """What `make` gives, computed on this process's own device, whatever mesh is set."""
    if jax.sharding.get_abstract_mesh().empty:
        return make()
    with ThreadPoolExecutor(1) as pool:  # a thread has no mesh of its own accord
        return pool.submit(make).result()


def fetch(tree: Any) -> Any:
    """Arrays of the devices as whole numpy arrays, on every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)

    def one(x: Any) -> np.ndarray:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return np.asarray(jax.device_get(x))
        if x.is_fully_replicated:
            return np.asarray(x.addressable_data(0))
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))

    return jax.tree.map(one, tree)


def _tried(make: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        return True, make()
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # some kinds cannot be sent
            return False, RuntimeError(f"{type(error).__name__}: {error}")
        return False, error


def _got(outcome: tuple[bool, Any]) -> Any:
    fine, value = outcome
    if not fine:
        raise value
    return value


def _exchange(value: list[Any]) -> list[Any]:
    """One value of each process, on all; as bytes, since devices exchange arrays only."""
    data = np.frombuffer(pickle.dumps(value[0]), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int64(len(data)))).reshape(-1)
    # Sizes are rounded up, so that few of them are compiled for.
    room = 1 << int(max(sizes.max(), 256) - 1).bit_length()
    padded = np.zeros(room, np.uint8)
    padded[: len(data)] = data
    everyone = np.asarray(multihost_utils.process_allgather(padded))
    return [pickle.loads(everyone[i, : sizes[i]].tobytes()) for i in range(len(sizes))]
