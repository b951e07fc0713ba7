"""The optimiser state of a role that waits its turn, kept in the host's pinned memory.

Proposer and solver are updated in turns, and the moments of the one that waits take twice its
weights (in float32). Pinned memory is what a device can copy to and from by itself.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from zest_jax.errors import UserError
from zest_jax.learning.updates import TrainState

PINNED = "pinned_host"


class Idle:
    """Moves the moments of roles between device and host as they take turns.

    Args:
      roles: the states that take turns; with fewer than two there is nothing to move.
      enabled: whether to move anything.

    Raises:
      UserError: enabled, and the device has no pinned host memory.
    """

    def __init__(self, roles: Sequence[str], enabled: bool):
        self.roles = tuple(roles) if enabled and len(roles) > 1 else ()
        device = jax.local_devices()[0]
        if self.roles and PINNED not in {memory.kind for memory in device.addressable_memories()}:
            raise UserError(
                f"training.offload_idle=True needs pinned host memory, which {device.device_kind} "
                "does not have; set it to False."
            )

    def bind(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with every array bound to its device, as moved ones are: a step that took
        bound and free ones by turns would be compiled twice."""
        if not self.roles:
            return state
        return jax.tree.map(lambda x: jax.device_put(x, x.sharding), state)

    def wake(self, state: dict[str, Any], role: str) -> None:
        """Brings the moments of a role to the device, and takes those of the others off first."""
        for other in self.roles:
            if other != role:
                state[other] = _moved(state[other], PINNED)
        if role in self.roles:
            state[role] = _moved(state[role], None)


def _moved(state: Any, kind: str | None) -> Any:
    """A train state with its moments in a kind of memory, the device's own if None."""
    if not isinstance(state, TrainState):
        return state  # one that is never updated has none

    def one(x: jax.Array) -> jax.Array:
        device: Any = next(iter(x.sharding.device_set))
        wanted = kind or device.default_memory().kind
        # Counts stay where they are: a step may read them as it likes.
        if not x.ndim or x.sharding.memory_kind == wanted:
            return x
        return jax.device_put(x, x.sharding.with_memory_kind(wanted))

    moved = jax.tree.map(one, state.opt_state)
    return dataclasses.replace(state, opt_state=moved)
