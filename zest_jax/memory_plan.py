"""What a step will hold on each device, told before anything is compiled.

Parameters, moments and gradients follow from the shapes and their shardings. What the backward pass
keeps of a layer is read from the program itself: one layer is traced (not compiled) under its remat
policy and its residuals are counted. A step holds the most where the head works (all residuals and
a chunk of logits) or where the last gradients are made (all residuals, all gradients and one layer
made again); the plan shows the fuller of the two.

Shape letters: B rows, L row length, D width, H query heads, J key/value heads, K head size,
V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Var
from jax.sharding import AbstractMesh, Mesh

from zest_jax import assembly
from zest_jax.errors import UserError
from zest_jax.learning.head import CHUNK
from zest_jax.learning.packing import PackSpec
from zest_jax.learning.updates import UpdateSpec
from zest_jax.models import PolicyConfig, param_shapes
from zest_jax.models.attention_splash import RESIDUAL_NAME
from zest_jax.models.cache import padded_length
from zest_jax.models.lora import split_lora
from zest_jax.models.policy import Block, checkpointed
from zest_jax.models.rope import rotary
from zest_jax.parallel import AXES
from zest_jax.parallel.sharding import STACKED, plan_shardings
from zest_jax.rollout.state import RolloutSpec

GIB = 2**30
# What a device cannot give to arrays: the runtime's own memory and fragmentation.
USABLE = 0.95


@dataclasses.dataclass(frozen=True)
class Line:
    """One thing in memory.

    Attributes:
      name: what it is.
      size: bytes on each device.
    """

    name: str
    size: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a device holds.

    Attributes:
      resident: what is there all the time.
      phases: what each phase of a run needs besides, by name.
      limit: bytes of a device, None where it does not tell.
    """

    resident: tuple[Line, ...]
    phases: dict[str, tuple[Line, ...]]
    limit: float | None = None

    @property
    def peak(self) -> float:
        """Bytes at the fullest moment of the run."""
        most = max((_total(lines) for lines in self.phases.values()), default=0.0)
        return _total(self.resident) + most

    @property
    def fits(self) -> bool:
        """Whether the peak leaves the runtime its share; True where the limit is unknown."""
        return self.limit is None or self.peak <= USABLE * self.limit

    def summary(self) -> str:
        """The peak and where it is, in a line."""
        fullest = max(self.phases, key=lambda name: _total(self.phases[name]), default="")
        limit = (
            "the device does not tell how much it has"
            if self.limit is None
            else f"of {_gib(self.limit)}"
        )
        return f"memory: {_gib(self.peak)} at the most ({fullest}), {limit}"

    def table(self) -> str:
        """Lines per device, for people."""
        rows: list[tuple[str, float | None]] = [("all the time", None)]
        rows += [(f"  {line.name}", line.size) for line in self.resident]
        for phase, lines in self.phases.items():
            rows.append((f"{phase}: {_gib(_total(self.resident) + _total(lines))} in all", None))
            rows += [(f"  {line.name}", line.size) for line in lines]
        limit = "unknown" if self.limit is None else _gib(self.limit)
        rows.append((f"peak {_gib(self.peak)} of {limit} a device", None))
        width = max(len(name) for name, _ in rows)
        return "\n".join(
            name if size is None else f"{name.ljust(width)}  {_gib(size):>10}"
            for name, size in rows
        )


# ------------------------------------------------------------------------- parts of a plan


def state_lines(
    role: str, config: PolicyConfig, spec: UpdateSpec, mesh: Mesh | None = None
) -> tuple[Line, ...]:
    """Trained parameters and moments of a role (the frozen base of adapters is `base_line`)."""
    trained = _trained(config)
    moments = jax.eval_shape(spec.optimizer().init, trained)
    return (
        Line(f"{role}: parameters", per_device(trained, mesh)),
        Line(f"{role}: moments ({spec.moments})", per_device(moments, mesh)),
    )


def base_line(config: PolicyConfig, dtype: str, mesh: Mesh | None = None) -> Line:
    """The frozen base beside adapters, in the type it is kept in."""
    frozen = split_lora(param_shapes(config))[1]
    return Line(f"frozen base ({dtype})", per_device(_as_type(frozen, dtype), mesh))


def step_lines(
    config: PolicyConfig, spec: UpdateSpec, pack: PackSpec, mesh: Mesh | None = None
) -> tuple[Line, ...]:
    """What an update needs besides its state, at its fullest moment."""
    trained, shapes = _trained(config), param_shapes(config)
    rows = pack.rows / _row_parts(pack.rows, mesh)
    tokens = rows * pack.length
    growing, fixed = layer_residuals(config, spec.remat)
    kept = config.layers * (growing * tokens + fixed)
    # The layer that is being differentiated is made again in full (under "none" it is there).
    again = layer_residuals(config, "none")[0] * tokens if spec.remat != "none" else 0.0
    gradients = per_device(trained, mesh)
    # A sum over micro-batches is kept beside the one that is being added.
    copies = 1 if pack.micro_batches == 1 else 2
    gathered = _gathered_layer(config, mesh)
    if config.attention == "xla":  # which holds all scores
        scores = rows * config.heads / _share(config.heads, mesh, "tensor") * pack.length**2
        kept += scores * 4 * config.layers if spec.remat == "none" else 0.0
        again += scores * 8
    width = jnp.dtype(config.dtype).itemsize
    targets = min(rows * pack.targets, max(CHUNK, rows))
    vocabulary = config.vocab_size / _axis(mesh, "tensor")
    # Logits in float32, their slopes rounded to the compute type.
    logits = targets * vocabulary * (4 + width)
    head = per_device({"embed_VD": shapes["embed_VD"]}, mesh) if "embed_VD" in trained else 0.0
    head_gathered = 0.0
    if _axis(mesh, "fsdp") > 1:
        head_gathered = config.width * vocabulary * width
    at_head = [
        Line("the head's weight, gathered", head_gathered),
        Line("logits of a chunk", logits),
        Line("gradient of the head", head + gradients * (copies - 1)),
    ]
    at_layers = [
        Line("gradients", gradients * copies),
        Line("the layer being differentiated", again),
        Line("weights of a layer, gathered", gathered),
    ]
    fullest = max((at_head, at_layers), key=_total)
    lines = (Line(f"activations (remat {spec.remat})", kept), *fullest)
    return tuple(line for line in lines if line.size)


def rollout_lines(
    config: PolicyConfig, spec: RolloutSpec, mesh: Mesh | None = None
) -> tuple[Line, ...]:
    """What sampling needs: the cache, the weights in the compute type, and a pass of new tokens."""
    width = jnp.dtype(config.dtype).itemsize
    slots = spec.slots / _row_parts(spec.slots, mesh)
    heads = config.kv_heads / _share(config.kv_heads, mesh, "tensor")
    positions = padded_length(config, spec.cache_lengths[-1])
    cache = 2 * config.layers * slots * positions * heads * config.head_dim * width
    # While it is narrowed, the half that goes on stands beside the whole.
    cache *= 1 + spec.narrower[0] / spec.slots if spec.narrower else 1
    # Decoding reads the layers apart from one another, cast once; on a mesh they are whole but for
    # what `tensor` splits, and what is no layer stays in float32 (`for_decoding`).
    shapes = param_shapes(config)
    cast = per_device(_as_type(shapes, config.dtype), _gathered(mesh))
    if _axis(mesh, "fsdp") > 1:
        rest = {name: x for name, x in shapes.items() if name != STACKED}
        cast += per_device(rest, _gathered(mesh))
    vocabulary = config.vocab_size / _axis(mesh, "tensor")
    fill = min(spec.block_slots, spec.slots) * min(spec.block_tokens, spec.chunk)
    # A kernel that reads the cache keeps no scores in memory.
    scores = 0 if config.decoding == "pallas" else 4 * config.heads * fill * positions
    lines = (
        Line("KV cache", cache),
        Line(f"weights for decoding ({config.dtype})", cast),
        Line("logits of all slots", 2 * 4 * slots * vocabulary),
        Line("attention of a pass over new tokens", scores),
    )
    return tuple(line for line in lines if line.size)


def driven_lines(config: PolicyConfig, spec: RolloutSpec, mesh: Mesh) -> tuple[Line, ...]:
    """As `rollout_lines`, of rollouts that the host drives (`rollout.host_driver`): each device has
    its share of the slots and all of the policy, layers in the compute type."""
    share = dataclasses.replace(spec, slots=-(-spec.slots // mesh.size))
    shapes = param_shapes(config)
    # What is no layer stays in float32 (`for_decoding`).
    rest = {name: x for name, x in shapes.items() if name != STACKED}
    whole = per_device(_as_type(shapes[STACKED], config.dtype)) + per_device(rest)
    return (Line("the whole policy, driven by the host", whole), *rollout_lines(config, share))


@functools.cache
def layer_residuals(config: PolicyConfig, remat: str) -> tuple[float, float]:
    """Bytes that the backward pass keeps of one layer: for every token, and whatever their number.

    Read from the trace of one layer, with a stand-in for attention that keeps what flash kernels
    keep. The second figure is that of the weights' casts, where the policy keeps them.
    """
    config = dataclasses.replace(config, attention="xla")
    # A prime that no weight has as a dimension: what carries it grows with the tokens.
    tokens = 100_003
    block_def, block = nnx.split(nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0))))
    x_BLD = jax.ShapeDtypeStruct((1, tokens, config.width), jnp.float32)
    position_BL = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    turn = functools.partial(rotary, head_dim=config.head_dim, theta=config.rope_theta)
    rope = jax.eval_shape(turn, position_BL)

    def back(x: jax.Array, params: Any, rope: Any) -> Any:
        def layer(x: jax.Array, params: Any) -> jax.Array:
            return nnx.merge(block_def, params)(x, rope, lambda *qkv: (_flash(*qkv), None))[0]

        return jax.vjp(checkpointed(layer, remat), x, params)[1]

    jaxpr = jax.make_jaxpr(back)(x_BLD, block, rope).jaxpr
    given = set(jaxpr.invars) | set(jaxpr.constvars)
    kept: set[Any] = {v for v in jaxpr.outvars if isinstance(v, Var) and v not in given}
    sizes = [(tokens in v.aval.shape, v.aval.size * v.aval.dtype.itemsize) for v in kept]
    growing = sum(size for grows, size in sizes if grows) / tokens
    fixed = sum(size for grows, size in sizes if not grows)
    return growing + config.width * 4, fixed  # and the input, which the scan keeps


@jax.custom_vjp
def _flash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """A stand-in with a flash kernel's residuals: its inputs, its output and the normalisers."""
    return q


def _flash_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    out = checkpoint_name(q * 1, RESIDUAL_NAME)
    norm = checkpoint_name(jnp.sum(q.astype(jnp.float32), axis=-1), RESIDUAL_NAME)
    return out, (q, k, v, out, norm)


def _flash_backward(kept: Any, slope: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v, out, norm = kept
    return q * slope * norm[..., None].astype(q.dtype) + out, k, v


_flash.defvjp(_flash_forward, _flash_backward)


# ------------------------------------------------------------------------- sizes on a mesh


def per_device(tree: Any, mesh: Mesh | None = None) -> float:
    """Bytes of a tree of abstract arrays on one device, split by the sharding rules."""
    leaves = jax.tree.leaves(tree)
    if mesh is None:
        return float(sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves))
    shardings = jax.tree.leaves(plan_shardings(tree, mesh)[0])
    shards = [s.shard_shape(x.shape) for s, x in zip(shardings, leaves, strict=True)]
    return float(sum(math.prod(n) * x.dtype.itemsize for n, x in zip(shards, leaves, strict=True)))


def _held(x: Any) -> float:
    """Bytes that one device holds of an array, or would of a described one."""
    place = getattr(x, "sharding", None)
    shape = x.shape if place is None else place.shard_shape(x.shape)
    return float(math.prod(shape) * x.dtype.itemsize)


def _trained(config: PolicyConfig) -> Any:
    """Shapes of what is trained: the adapters where there are any, else everything."""
    shapes = param_shapes(config)
    return split_lora(shapes)[0] if config.lora else shapes


def _as_type(tree: Any, dtype: str) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype)), tree)


def _gathered_layer(config: PolicyConfig, mesh: Mesh | None) -> float:
    """Bytes of one layer's weights in the compute type, brought together from the fsdp axis."""
    if _axis(mesh, "fsdp") == 1:
        return 0.0
    blocks = _as_type(param_shapes(config)["blocks"], config.dtype)
    return per_device({"blocks": blocks}, mesh) / config.layers * _axis(mesh, "fsdp")


def _gathered(mesh: Any) -> Any:
    """A mesh on which only `tensor` splits anything, as for weights that decoding reads."""
    return None if mesh is None else AbstractMesh((1, 1, mesh.shape["tensor"]), AXES)


def _axis(mesh: Mesh | None, name: str) -> int:
    return 1 if mesh is None else mesh.shape[name]


def _share(size: int, mesh: Mesh | None, name: str) -> int:
    """Parts that a dimension is split into: the axis, where it divides."""
    axis = _axis(mesh, name)
    return 1 if size % axis else axis


def _row_parts(rows: int, mesh: Mesh | None) -> int:
    parts = _axis(mesh, "data") * _axis(mesh, "fsdp")
    return 1 if rows % parts else parts


def _total(lines: Sequence[Line]) -> float:
    return sum(line.size for line in lines)


def _gib(size: float) -> str:
    """In GiB, or in MiB where that would show nothing."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.2f} MiB"


# ------------------------------------------------------------------------- a run's plan


def plan_run(
    config: Any,
    policy: PolicyConfig,
    retriever: Any = None,
    mesh: Mesh | None = None,
    limit: float | None = None,
    proposer_policy: PolicyConfig | None = None,
) -> Plan:
    """The plan of a run of `train`: both roles and the anchor, their updates and their rollouts.

    Args:
      config: the run's.
      policy: shape of the policy; its dtype, adapters and the like are taken from `config`.
      retriever: a pytree of what retrieval holds on device; {} where the host is asked, None where
        it is not known.
      mesh: the devices; None for one.
      limit: bytes of a device.
      proposer_policy: shape of the proposer where it is another policy from the beginning.
    """
    told = {"dtype": config.policy.dtype, "lora": assembly.lora_spec(config)}
    policy = dataclasses.replace(policy, **told)
    asking = policy if proposer_policy is None else dataclasses.replace(proposer_policy, **told)
    specs = assembly.update_specs(config)
    packs = assembly.pack_specs(config, _axis(mesh, "data") * _axis(mesh, "fsdp"))
    rollouts = assembly.rollout_specs(config)
    resident: list[Line] = []
    if policy.lora:
        resident.append(base_line(policy, policy.dtype, mesh))
        if proposer_policy is not None:
            resident.append(base_line(asking, asking.dtype, mesh))
    own = assembly.proposer_state(config)
    resident += state_lines("solver", policy, specs["solver"], mesh)
    if own == "proposer":
        whole = state_lines("proposer", asking, specs["proposer"], mesh)
        frozen = [Line("proposer", per_device(_trained(asking), mesh))]
        resident += frozen if config.proposer.frozen else whole
    resident.append(Line("anchor", per_device(_trained(policy), mesh)))
    if assembly.needs_base(config):
        resident.append(Line("base", per_device(_trained(policy), mesh)))
        pulled = config.proposer.kl_weight and not config.proposer.frozen
        if proposer_policy is not None and pulled:
            resident.append(Line("base of the proposer", per_device(_trained(asking), mesh)))
    # With turns and `offload_idle`, moments are on the device while their role is updated only.
    moved: dict[str, Line] = {}
    if config.training.offload_idle and own == "proposer" and not config.proposer.frozen:
        moved = {line.name.split(":")[0]: line for line in resident if ": moments" in line.name}
        resident = [line for line in resident if line not in moved.values()]
    # Roles share an index, so that an array may stand there twice.
    arrays = {id(x): _held(x) for x in jax.tree.leaves(retriever) if hasattr(x, "dtype")}
    resident.append(Line("index and passages", sum(arrays.values())))
    asks = bool(own and not config.proposer.frozen)
    used = {
        "warm_start": bool(config.warm_start.steps),
        "solver": bool(config.schedule.iterations and config.schedule.solver_steps),
        "proposer": bool(asks and config.schedule.iterations and config.schedule.proposer_steps),
    }
    phases: dict[str, tuple[Line, ...]] = {}
    for name, there in used.items():
        if there:
            shape = asking if name == "proposer" else policy
            phases[f"{name} update"] = step_lines(shape, specs[name], packs[name], mesh)
    for role, spec in rollouts.items():
        shape = policy if role in ("solver", "reader") else asking
        if mesh is not None and config.retrieval.index and retriever == {} and spec.searches:
            phases[f"{role} rollouts"] = driven_lines(shape, spec, mesh)
        else:
            phases[f"{role} rollouts"] = rollout_lines(shape, spec, mesh)
    for name in phases if moved else ():
        role = "proposer" if name.startswith("proposer") else "solver"
        phases[name] = (moved[role], *phases[name])
    return Plan(tuple(resident), phases, limit)


def device_limit() -> float | None:
    """Bytes that JAX may take of the first device; None where the back end does not tell (CPU)."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit")


def check_run(
    config: Any,
    policy: PolicyConfig,
    retriever: Any = None,
    proposer_policy: PolicyConfig | None = None,
    mesh: Mesh | None = None,
) -> Plan:
    """`plan_run` for the devices of this run, if it fits.

    Raises:
      UserError: it does not; see `check`.
    """
    return check(
        functools.partial(
            plan_run,
            policy=policy,
            retriever=retriever,
            mesh=mesh,
            limit=device_limit(),
            proposer_policy=proposer_policy,
        ),
        config,
    )


def check(plan_of: Callable[[Any], Plan], config: Any) -> Plan:
    """The plan of a config, if it fits.

    Args:
      plan_of: config -> plan.
      config: the run's.

    Raises:
      UserError: it does not fit; with the table, and the smallest changes that would.
    """
    plan = plan_of(config)
    if plan.fits:
        return plan
    raise UserError(
        f"this run does not fit the device's memory.\n{plan.table()}\n"
        f"What would fit: {' or '.join(remedies(plan_of, config)) or 'a smaller policy'}."
    )


def remedies(plan_of: Callable[[Any], Plan], config: Any, most: int = 3) -> list[str]:
    """`fitting_changes` as flags of a command line."""
    return [flags_of(change) for change in fitting_changes(plan_of, config, most)]


def fitting_changes(
    plan_of: Callable[[Any], Plan],
    config: Any,
    most: int = 3,
    first: Sequence[dict[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Changes to the config that make its plan fit, the least harmful first.

    Single changes come first (at most `most` of them); where none is enough, they are added up in
    the same order until they are. [] where not even that fits.

    Args:
      plan_of: config -> plan.
      config: the run's.
      most: single changes that are told.
      first: changes that are tried before our own.
    """
    steps = [*first, *_changes(config)]
    singles = [step for step in steps if plan_of(changed(config, step)).fits]
    if singles:
        return singles[:most]
    together: dict[str, Any] = {}
    for step in steps:
        together |= step
        if plan_of(changed(config, together)).fits:
            return [together]
    return []


def _changes(config: Any) -> list[dict[str, Any]]:
    """What may be changed, the least harmful first: slower, then coarser, then another training."""
    t = config.training
    out: list[dict[str, Any]] = []
    order = ("none", "dots", "full")
    out += [{"training.remat": name} for name in order[order.index(t.remat) + 1 :]]
    for field, value in (
        ("training.rows", t.rows),
        ("solver.slots", config.solver.slots),
        ("proposer.slots", config.proposer.slots),
    ):
        while value > 1:
            value //= 2
            out.append({field: value})
    if config.policy.dtype == "float32":
        out.append({"policy.dtype": "bfloat16"})
    if t.moments == "float32":
        out.append({"training.moments": "int8"})
    if not t.lora.rank:
        out.append({"training.lora.rank": 16})
    return out


def changed(config: Any, changes: dict[str, Any]) -> Any:
    """A copy of a config with other values at dotted paths."""
    copy = config.copy_and_resolve_references()
    with copy.unlocked():
        copy.update_from_flattened_dict(changes)
    return copy


def flags_of(changes: dict[str, Any]) -> str:
    """Changes as they are written on a command line."""
    return " ".join(f"--config.{field}={value}" for field, value in changes.items())
