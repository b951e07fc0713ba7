"""Whether a device has room for what a corpus brings along."""

from typing import Any

import jax
import numpy as np

from zest_jax.errors import UserError


def require_room(
    what: str,
    shape: tuple[int, ...],
    dtype: Any,
    sharding: jax.sharding.Sharding | None,
    advice: str,
) -> None:
    """Refuses an array that a device has no room for, where devices tell (a CPU does not).

    Args:
      what: for the sentence, as in "the tokens of wiki-18".
      shape: of the array.
      dtype: of its elements.
      sharding: how it is split; None for the first device.
      advice: what to do about it.

    Raises:
      UserError: what it takes of which device, and what that has free.
    """
    if sharding is None:
        part, devices = shape, [jax.local_devices()[0]]
    else:
        part, devices = sharding.shard_shape(shape), list(sharding.addressable_devices)
    needed = int(np.prod(part)) * np.dtype(dtype).itemsize
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            continue
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        if needed > free:
            raise UserError(
                f"{what} take {needed / 1e9:.1f} GB, {device} has {free / 1e9:.1f} GB free; "
                f"{advice}."
            )
