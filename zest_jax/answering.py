"""Many questions answered on all local devices, batch by batch.

Each device holds a copy of the policy and answers whole batches. What an answer is drawn with
follows from its question and the number of its sample (`evaluation.stream_of`), so that neither the
number of devices nor a restart changes what is sampled; only the rounding of a kernel may differ
with what else is in its batch, as it does anywhere.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax

from zest_jax.errors import UserError
from zest_jax.evaluation import Answered, answer_tasks
from zest_jax.models.policy import Params
from zest_jax.retrieval.interface import Passage, PassageRetriever
from zest_jax.retrieval.remote import RemoteRetriever
from zest_jax.rollout.host_driver import HostSampler
from zest_jax.rollout.sampler import Sampler
from zest_jax.tasks.types import Task

Wanted = tuple[Task, int]
"""A question and the number of the sample."""


def answer_all(
    sampler: Sampler,
    params: Params,
    wanted: Sequence[Wanted],
    key: jax.Array,
    temperature: float,
    devices: Sequence[jax.Device],
) -> Iterator[list[Answered]]:
    """Yields the answers of each batch as it is done; the order of batches is free.

    Args:
      sampler, params: the solver; the params may lie anywhere.
      wanted: what is to be answered.
      key, temperature: of sampling.
      devices: each answers its share of the batches.
    """
    size = batch_size(sampler, len(wanted), len(devices))
    batches = [wanted[at : at + size] for at in range(0, len(wanted), size)]

    def worker(own: Sampler, copy: Params, device: jax.Device) -> Callable:
        def answer(batch: Sequence[Wanted]) -> list[Answered]:
            # What the host's driver makes without arguments shall be made here, too. (The compiled
            # rollout follows its arguments, and would be traced anew.)
            driven = isinstance(own, HostSampler)
            with jax.default_device(device) if driven else contextlib.nullcontext():
                tasks, samples = zip(*batch, strict=True)
                return answer_tasks(own, copy, tasks, key, temperature, samples)

        return answer

    if len(devices) == 1:
        workers = [worker(sampler, params, devices[0])]
    else:
        shared = _shared(sampler, devices[0])
        workers = [worker(shared.on(d), jax.device_put(params, d), d) for d in devices]
    yield from spread(batches, workers)


def batch_size(sampler: Sampler, wanted: int, devices: int) -> int:
    """Questions of a batch: a few for each slot, so that slots are refilled, little is lost by a
    kill and every device has its share."""
    return max(1, min(sampler.capacity, 4 * sampler.spec.slots, -(-wanted // devices)))


def spread(batches: Sequence[Sequence[Wanted]], workers: Sequence[Callable]) -> Iterator:
    """Yields what the workers make of the batches; each works on one at a time, in a thread of its
    own where there are several."""
    if len(workers) == 1:
        yield from map(workers[0], batches)
        return
    free: queue.SimpleQueue[Callable] = queue.SimpleQueue()
    for each in workers:
        free.put(each)

    def run(batch: Sequence[Wanted]) -> list[Answered]:
        own = free.get()
        try:
            return own(batch)
        finally:
            free.put(own)

    with ThreadPoolExecutor(len(workers)) as pool:
        futures = [pool.submit(run, batch) for batch in batches]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def choose_devices(asked: int, size: int) -> tuple[list[jax.Device], str]:
    """The devices that answer, and why, in words.

    Args:
      asked: how many; 0 for all local ones that have room for a copy of the policy.
      size: of the policy, in bytes; it lies on the first device already.

    Raises:
      UserError: there are not so many.
    """
    local = jax.local_devices()
    if not 0 <= asked <= len(local):
        raise UserError(f"--devices={asked} is not 0 (all) to {len(local)}, which are there.")
    chosen = [local[0]] + [d for d in local[1 : asked or None] if asked or _free(d) > size]
    kind, GB = local[0].device_kind, size / 1e9
    if len(chosen) == 1:
        why = f", of {len(local)}" if len(local) > 1 else ""
        return chosen, f"one device ({kind}{why})"
    return chosen, f"{len(chosen)} devices ({kind}), a copy of the policy ({GB:.2f} GB) on each"


def _free(device: jax.Device) -> float:
    """Bytes of a device that are free; without limit where it does not tell."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return float("inf")
    return 0.5 * stats["bytes_limit"] - stats.get("bytes_in_use", 0)  # the cache needs room too


def _shared(sampler: Sampler, home: jax.Device) -> Sampler:
    """The sampler with a retriever that several threads may ask; a server's client is one."""
    if not isinstance(sampler, HostSampler):
        return sampler
    out, retriever = sampler.on(home), sampler.driver.retriever
    if retriever is not None and not isinstance(retriever, RemoteRetriever):
        out.driver.retriever = _OneAtATime(retriever, home)
    return out


class _OneAtATime(PassageRetriever):
    """A retriever asked by several threads, one after the other, on the device of its index."""

    def __init__(self, retriever: PassageRetriever, home: jax.Device):
        self._retriever, self._home, self._lock = retriever, home, threading.Lock()

    def search_passages(
        self, queries: Sequence[str], top_k: int
    ) -> list[list[tuple[Passage, float]]]:
        """See `PassageRetriever`."""
        with self._lock, jax.default_device(self._home):
            return self._retriever.search_passages(queries, top_k)
