"""How long a step would take at the least: operations, bytes of memory and bytes between devices,
each over what the chip's maker states.

Operations are counted in the traced program (matrix products only), through its loops; loops whose
end depends on data are counted as often as their assumptions say.

Shape letters: D width, H heads, J key/value heads, K head size, F feed-forward width, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from zest_jax.chips import Chip
from zest_jax.hlo import Collective, part
from zest_jax.models import PolicyConfig, param_shapes
from zest_jax.rollout.state import RolloutSpec


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one device does in a step.

    Attributes:
      flops: operations of matrix products.
      memory: bytes read from and written to its memory.
      link: bytes that it sends to other devices.
    """

    flops: float
    memory: float
    link: float

    def seconds(self, chip: Chip) -> float:
        """The longer of computing and reading, and then the exchange, with no overlap."""
        busy = max(self.flops / chip.flops, self.memory / chip.bandwidth)
        return busy + self.link / chip.links

    def bound(self, chip: Chip) -> str:
        """What takes the most of it."""
        times = {
            "compute": self.flops / chip.flops,
            "memory": self.memory / chip.bandwidth,
            "links": self.link / chip.links,
        }
        return max(times, key=lambda name: times[name])


def flops(
    function: Callable[..., Any], arguments: Iterable[Any], turns: Sequence[int] = ()
) -> float:
    """Operations of the matrix products of a function, on all devices together.

    Args:
      function: traced, not run.
      arguments: abstract arrays.
      turns: of the loops whose end depends on data, in the order of the program; of further ones,
        one.
    """
    return _of(jax.make_jaxpr(function)(*arguments).jaxpr, iter(turns))


def _of(jaxpr: Jaxpr, turns: Iterator[int]) -> float:
    total = 0.0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            (contracting, _), _ = eqn.params["dimension_numbers"]
            left: Any = eqn.invars[0].aval
            out: Any = eqn.outvars[0].aval
            total += 2.0 * out.size * math.prod(left.shape[i] for i in contracting)
            continue
        known = next(turns, 1) if name == "while" else 1
        inner = [_of(each, turns) for each in _inner(eqn.params)]
        if not inner:
            continue
        if name == "cond":
            total += max(inner)
            continue
        times = 1.0
        if name == "scan":
            times = eqn.params["length"]
        elif name == "while":
            times = known
        elif name == "shard_map":
            mesh = eqn.params["mesh"]  # the axes' name differs between JAX versions
            axes = next(eqn.params[k] for k in _AXES if k in eqn.params)
            times = math.prod(mesh.shape[axis] for axis in axes)
        elif name == "pallas_call":
            times = math.prod(n for n in eqn.params["grid_mapping"].grid if isinstance(n, int))
        total += times * sum(inner)
    return total


_AXES = ("newly_manual_axes", "manual_axes")


def _inner(params: dict[str, Any]) -> list[Jaxpr]:
    found = []
    for value in params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, ClosedJaxpr):
                found.append(each.jaxpr)
            elif isinstance(each, Jaxpr):
                found.append(each)
    return found


# ------------------------------------------------------------------------------------ updates


def update_cost(
    operations: float,
    config: PolicyConfig,
    state: float,
    micro_batches: tuple[int, int],
    found: Iterable[Collective],
    tensor: int = 1,
) -> Cost:
    """Of an update.

    Args:
      operations: of a device.
      config: the policy.
      state: bytes of parameters and moments on a device; read and written once.
      micro_batches: that are trained on, and that are only scored (contexts).
      found: the program's exchanges.
      tensor: devices that share heads and features.
    """
    trained, scored = micro_batches
    # Forward, once more in the backward pass, and there: a layer's weights are read three times.
    weights = _weights(config) / tensor * (3 * trained + scored)

    def turns(each: Collective) -> int:
        if not each.loops:
            return 1
        return trained if "jvp" in each.where else max(scored, 1)

    link = sum(each.travels * each.times * turns(each) for each in found)
    return Cost(operations, 2 * state + weights, link)


# ----------------------------------------------------------------------------------- rollouts


@dataclasses.dataclass(frozen=True)
class Episodes:
    """What a rollout's episodes are taken to be like.

    Attributes:
      count: of a device's share.
      written: tokens that the policy writes in each.
      prompts: prompts that go through the policy; a group's share one.
      searches: of each.
    """

    count: float
    written: float
    prompts: float
    searches: float


def rollout_cost(
    config: PolicyConfig,
    spec: RolloutSpec,
    episodes: Episodes,
    index: float,
    found: Iterable[Collective],
    tensor: int = 1,
) -> Cost:
    """Of a rollout.

    Args:
      config: the policy.
      spec: sizes of a device's share.
      episodes: see `Episodes`.
      index: bytes of vectors on a device.
      found: the program's exchanges.
      tensor: devices that share heads and features.
    """
    waves = math.ceil(episodes.count / spec.slots)
    steps = waves * episodes.written
    weights = _weights(config) / tensor
    positions = spec.cache_lengths[-1]  # XLA reads the whole cache
    token = 2 * config.layers * config.kv_heads * config.head_dim * 2 / tensor
    cache = spec.slots * positions * token
    rounds = waves * episodes.searches
    filled = episodes.prompts * spec.prompt_length
    filled += episodes.count * episodes.searches * (spec.observation_length + 1)
    passes = max(filled / (min(spec.block_slots, spec.slots) * spec.block_tokens), rounds)
    multiply = 2 * (_weights(config) / 2) / tensor
    attend = 4 * config.layers * config.heads * config.head_dim * positions / tensor
    operations = (steps * spec.slots + filled) * (multiply + attend)
    memory = steps * (weights + cache) + passes * weights + rounds * index
    turns = {"decode": steps, "search": rounds, "extend": passes, "loop": rounds + waves}
    link = sum(each.travels * each.times * turns.get(part(each), 1.0) for each in found)
    return Cost(operations, memory, link)


def _weights(config: PolicyConfig) -> float:
    """Bytes of the matrices that a token goes through, two a number: all but the looked-up
    embedding (a tied head is read)."""
    shapes = param_shapes(dataclasses.replace(config, lora=None))
    size = sum(x.size for x in jax.tree.leaves(shapes))
    embedding = shapes["embed_VD"].size
    return 2.0 * (size if config.tied else size - embedding)
