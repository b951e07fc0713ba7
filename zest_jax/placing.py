"""Which devices share a run, and how: the mesh that the config's group `mesh` says or that fits.

Axes (`parallel/mesh.py`): `data` copies the weights and shares the rows; `fsdp` shares both;
`tensor` shares heads, feed-forward and vocabulary, also while sampling.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from zest_jax import assembly, bucket, memory_plan, players, retrieving
from zest_jax.datasets.files import to_path
from zest_jax.errors import UserError
from zest_jax.models import PolicyConfig
from zest_jax.models.backends import KERNELS
from zest_jax.models.hf import has_tokenizer, read_tokenizer
from zest_jax.parallel import AXES, Placement, hosts, make_mesh
from zest_jax.workdir import Workdir

MAY_DIFFER = (
    *("log", "checkpoint", "guards", "mesh", "training.offload_idle", "retrieval.encoder"),
    "solver.narrowings",
)
"""Fields that may change between the starts of a run: they do not change its numbers (but for the
order in which floats are added)."""


def place(config: Any) -> tuple[Placement, str]:
    """The devices of a run, of all processes, and what was chosen and why, in words.

    Raises:
      UserError: the sizes of the config's group `mesh` do not fit the devices.
    """
    devices = jax.devices()
    kind = f"{devices[0].device_kind} ({devices[0].platform})"
    if len(devices) == 1:
        _check_sizes(config, 1)
        return Placement(), kind
    # All must choose alike, and hosts may differ a little in what they leave to JAX.
    limits = [limit for limit in hosts.gathered(memory_plan.device_limit()) if limit is not None]
    given = {"solver": config.policy, "proposer": config.proposer}
    given["proposer"] = given["proposer"] if config.proposer.folder else config.policy
    tokenizers = {role: tokenizer_of(config, each) for role, each in given.items()}
    size = retrieving.index_bytes(config, tokenizers) if config.retrieval.index else (0.0, 0.0)
    shared, whole = size or (None, 0.0)
    mesh, why = choose_mesh(config, devices, min(limits, default=None), shared, whole)
    shape = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    processes = jax.process_count()
    of = f" of {processes} processes" if processes > 1 else ""
    return Placement(mesh), f"{len(devices)} of {kind}{of}; mesh {shape} ({why})"


def choose_mesh(
    config: Any,
    devices: Sequence[Any],
    limit: float | None,
    index: float | None = 0.0,
    whole: float = 0.0,
) -> tuple[Mesh, str]:
    """The config's mesh over some devices, or the first of a row of meshes whose plan fits.

    The row begins with `data` alone, which exchanges the least, then `fsdp`, then `fsdp` with ever
    more devices to `tensor`, as far as the key and value heads can be shared.

    Args:
      config: the run's.
      devices: all that take part; they need not be there (`jax.experimental.topologies`).
      limit: bytes of a device; None where it is not known, as on CPUs.
      index: bytes of an index and passages that are shared out over `data` and `fsdp`; None where
        the host is asked for passages.
      whole: bytes of one that every device has whole.

    Returns:
      The mesh, and why, in words.

    Raises:
      UserError: see `place`.
    """
    count = len(devices)
    if any(config.mesh[axis] for axis in AXES):
        _check_sizes(config, count)
        data, fsdp, tensor = (config.mesh[axis] or 1 for axis in AXES)
        return make_mesh(data, fsdp, tensor, devices), "as config.mesh says"
    solver, proposer = shapes(config, devices[0].platform)
    heads = [policy.kv_heads for policy in (solver, proposer) if policy is not None]
    row = [(count, 1, 1), (1, count, 1)]
    tensor = 2
    while count % tensor == 0 and all(n % tensor == 0 for n in heads):
        row.append((1, count // tensor, tensor))
        tensor *= 2
    for sizes in row:
        mesh = make_mesh(*sizes, devices=devices)
        held: Any = {} if index is None else None
        plan = memory_plan.plan_run(config, solver, held, mesh, limit, proposer)
        searched = memory_plan.Line("index", whole + (index or 0.0) / (sizes[0] * sizes[1]))
        if dataclasses.replace(plan, resident=(*plan.resident, searched)).fits:
            break
    else:
        return mesh, "none of the meshes fits the devices' memory by plan; this shares the most"
    first = sizes == row[0]
    return mesh, "all copies fit" if first else "the first mesh whose memory plan fits"


def shapes(config: Any, platform: str = "cpu") -> tuple[PolicyConfig, PolicyConfig | None]:
    """Shapes of the solver and of the proposer, None where it begins as the same policy.

    Args:
      config: the run's.
      platform: of the devices: attention is the kernel that there is for it, if the config leaves
        it open.

    Raises:
      UserError: a folder cannot be read.
    """
    wanted = config.policy.attention
    attention = KERNELS.get(platform, "xla") if wanted == "auto" else wanted
    world = None if config.policy.folder else assembly.find_world(config)

    def shape(given: Any, world: Any) -> PolicyConfig:
        policy = players.policy_shape(given, config.policy, world)
        return dataclasses.replace(policy, attention=attention)

    solver = shape(config.policy, world)
    return solver, shape(config.proposer, None) if config.proposer.folder else None


def tokenizer_of(config: Any, given: Any) -> Any:
    """The tokenizer of a player, or None where there is none, as in a folder of shapes only.

    Args:
      config: the run's.
      given: its group with the player's `folder`.

    Raises:
      UserError: it cannot be read.
    """
    if not given.folder:
        atlas = assembly.find_world(config).atlas
        return None if atlas is None else read_tokenizer(atlas.tokenizer_folder)
    folder = Path(players.policy_folder(given.folder))
    return read_tokenizer(folder) if has_tokenizer(folder) else None


def _check_sizes(config: Any, devices: int) -> None:
    sizes = {axis: config.mesh[axis] for axis in AXES}
    product = 1
    for axis, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < -1:
            raise UserError(f"mesh.{axis}={size}: expected a size, -1 for the rest, or 0.")
        product *= size or 1
    if devices == 1 and product not in (1, -1):
        raise UserError(
            f"mesh {sizes} asks for {abs(product)} devices, and there is one; set mesh.data, "
            "mesh.fsdp and mesh.tensor to 0, which takes all there are."
        )


@contextlib.contextmanager
def workdir_of(path: str, config: Any) -> Iterator[Workdir]:
    """The run's workdir for the first process; for others a folder of their own that is thrown
    away, whose checkpoints are the run's. A workdir in a bucket is worked on in such a folder, too,
    and copied (`bucket`).

    So all processes run the same program, and one of them writes the run.

    Args:
      path: of the workdir.
      config: the run's, to which the workdir belongs.

    Raises:
      UserError: on every process, where the first one cannot have the workdir.
    """
    opened: list[Workdir] = []
    with contextlib.ExitStack() as stack:

        def scratch() -> Path:
            folder = tempfile.TemporaryDirectory(prefix="zest_jax-")
            return Path(stack.enter_context(folder))

        def open_it() -> None:
            mirror = bucket.Mirror(path, scratch()) if bucket.is_bucket(path) else None
            if mirror is None:
                workdir = Workdir(path)
            else:
                workdir = Workdir(mirror.local, checkpoints=mirror.checkpoints, publish=mirror.push)
            opened.append(workdir)
            workdir.claim(config, may_differ=MAY_DIFFER)

        try:
            hosts.told(open_it)
            if not opened:
                folder = to_path(path) / "checkpoints"
                opened.append(Workdir(scratch(), lock=False, checkpoints=folder))
            yield opened[0]
        finally:
            for workdir in opened:
                workdir.publish()
                workdir.close()
