"""What `zest_jax.plan` does once JAX may be imported: describe, compile, add up, suggest."""

import contextlib
import dataclasses
import json
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from zest_jax import assembly, hlo, memory_plan, placing, roofline, steps
from zest_jax.chips import Chip, Slice
from zest_jax.config import config_hash
from zest_jax.errors import UserError
from zest_jax.files import writing
from zest_jax.memory_plan import Plan
from zest_jax.players import policy_folder
from zest_jax.retrieval.index_files import read_manifest
from zest_jax.roofline import Cost, Episodes
from zest_jax.steps import Corpus, Described, Step, Steps

GB = 1e9
TRIED = 3
"""Changes that are compiled to see whether they help."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of a step.

    Attributes:
      name: of the step.
      seconds: it took to compile.
      arguments, temporaries, outputs, aliased: bytes on a device.
      assigned: bytes that its buffers take of a device, arguments among them.
      beside: bytes of what lies on the device besides.
      collectives: what devices exchange.
      cost: of one call; None where it is not known.
      calls: calls in a training step.
      problem: the compiler's words where it refuses.
    """

    name: str
    seconds: float = 0.0
    arguments: float = 0.0
    temporaries: float = 0.0
    outputs: float = 0.0
    aliased: float = 0.0
    assigned: float = 0.0
    beside: float = 0.0
    collectives: tuple[hlo.Collective, ...] = ()
    cost: Cost | None = None
    calls: int = 1
    problem: str = ""

    @property
    def peak(self) -> float:
        """Bytes on a device while it runs."""
        return self.assigned + self.beside


@dataclasses.dataclass(frozen=True)
class Result:
    """The plan of a run.

    Attributes:
      where: the slice.
      mesh: sizes of its axes.
      resident: bytes on a device of what lies there all the time, by name.
      compiled: what the compiler says of each step; () for GPUs.
      estimate: our own plan of the memory.
      changes: with which it would fit, as flags; of those, `checked` was compiled.
    """

    where: Slice
    mesh: Mapping[str, int]
    resident: Mapping[str, float]
    compiled: tuple[Compiled, ...]
    estimate: Plan
    changes: tuple[str, ...] = ()
    checked: bool = False

    @property
    def peak(self) -> float:
        """Bytes at the fullest moment."""
        return max((step.peak for step in self.compiled), default=self.estimate.peak)

    @property
    def fits(self) -> bool:
        if not self.compiled:
            return self.estimate.fits
        limit = self.where.chip.memory
        return all(not step.problem and step.peak <= limit for step in self.compiled)


# --------------------------------------------------------------------------------- the plan


def plan(
    config: Any,
    where: Slice,
    wanted: Sequence[str],
    corpus: tuple[int, int, int, bool] | None,
    dump: str,
    say: Callable[[str], object],
) -> Result:
    """The plan of a run on a slice, told as it goes.

    Args:
      config: the run's.
      where: the slice.
      wanted: names of steps; none for all.
      corpus: passages, dimension, ids of a passage and whether in 8 bits, of an index on the
        devices; None for what the config names.
      dump: the folder in which the compiler leaves its reports.
      say: prints a line.

    Raises:
      UserError: an unknown step, a folder that cannot be read, a mesh that does not fit the slice.
    """
    config = with_shapes(config)
    searched = Corpus(*corpus) if corpus else named_corpus(config, say)
    run = _Run(where, _devices(where), searched, dump)
    if searched is not None and "://" not in config.retrieval.index:
        say(f"the index lies on the devices: {searched.passages:,} passages")
    described, mesh, why = run.describe(config)
    chosen = _chosen(described, wanted)
    sizes = {} if mesh is None else dict(mesh.shape)
    shape = " x ".join(f"{axis}={size}" for axis, size in sizes.items()) or "one device"
    say(f"{where.name}: {where.count} of {where.chip.name}; mesh {shape} ({why})")
    estimate = run.estimate(config)
    resident = steps.sizes(described.resident)
    say(_resident_table(resident))
    if where.platform != "tpu":
        plain = memory_plan.changed(config, {"policy.attention": "xla"})
        others = {step.name: step for step in run.describe(plain)[0].steps}
        for step in chosen:
            say(_lowered(step, others[step.name], mesh, where.platform))
        say(f"memory by our own estimate, nothing is compiled without a GPU:\n{estimate.table()}")
        changes = () if estimate.fits else tuple(memory_plan.remedies(run.estimate, config))
        return Result(where, sizes, resident, (), estimate, changes)
    compiled = []
    for step in chosen:
        compiled.append(run.compile(step, described, config))
        say(step_lines(compiled[-1], where.chip))
    result = Result(where, sizes, resident, tuple(compiled), estimate)
    say(times(result, config))
    say(verdict(result))
    if result.fits:
        return result
    return run.suggest(result, config, say)


@dataclasses.dataclass(frozen=True)
class _Run:
    """A slice with what is searched on it."""

    where: Slice
    devices: Sequence[Any]
    corpus: Corpus | None
    dump: str

    def describe(self, config: Any) -> tuple[Steps, Any, str]:
        """The steps, the mesh and why it is that one."""
        mesh, why = None, "there is one"
        if len(self.devices) > 1:
            size = 0.0 if self.corpus is None else self.corpus.size
            limit = self.where.chip.memory
            mesh, why = placing.choose_mesh(config, self.devices, limit, size)
        place = Described(mesh, self.devices[0])
        return steps.describe(config, place, self.corpus, self._platform), mesh, why

    @property
    def _platform(self) -> str:
        return "tpu" if self.where.platform == "tpu" else "gpu"

    def estimate(self, config: Any, limit: float | None = None) -> Plan:
        """Our own plan of a config's memory; `limit` in place of the chip's."""
        described, mesh, _ = self.describe(config)
        solver, proposer = placing.shapes(config, self._platform)
        index = [tree for name, tree in described.resident.items() if _searched(name)]
        limit = self.where.chip.memory if limit is None else limit
        return memory_plan.plan_run(config, solver, index, mesh, limit, proposer)

    def compile(self, step: Step, described: Steps, config: Any) -> Compiled:
        """What the compiler says of a step."""
        mesh = _mesh_of(step)
        held = {name: described.resident[name] for name in step.holds if name in described.resident}
        total = sum(steps.sizes(described.resident).values())
        beside = total - sum(steps.sizes(held).values())
        begin = time.perf_counter()
        try:
            program = step.lower(mesh).compile()
        except Exception as error:  # of a class that moved between JAX versions
            used = re.search(r"Used ([\d.]+)([KMGT]) of", str(error))
            if "RESOURCE_EXHAUSTED" not in str(error) or used is None:
                raise
            taken = float(used[1]) * 2.0 ** (10 * "KMGT".index(used[2]) + 10)
            words = str(error).strip().splitlines()[0][:200]
            seconds = time.perf_counter() - begin
            return Compiled(step.name, seconds, assigned=taken, beside=beside, problem=words)
        memory = program.memory_analysis()
        found = tuple(hlo.collectives(program.as_text()))
        arguments, outputs = memory.argument_size_in_bytes, memory.output_size_in_bytes
        aliased, temporaries = memory.alias_size_in_bytes, memory.temp_size_in_bytes
        return Compiled(
            step.name,
            time.perf_counter() - begin,
            arguments,
            temporaries,
            outputs,
            aliased,
            _assigned(self.dump) or arguments + outputs - aliased + temporaries,
            beside,
            found,
            cost_of(step, described, config, found, self._platform),
            step.calls,
        )

    def suggest(self, result: Result, config: Any, say: Callable[[str], object]) -> Result:
        """The result with changes that would make it fit, the smallest first; of those the first
        that the compiler confirms, if one of the first few is."""
        # What the compiler takes more than we think, it would take of the changed run too.
        more = max(1.0, result.peak / max(result.estimate.peak, 1.0))
        limit = self.where.chip.memory / more / memory_plan.USABLE

        def estimated(changed: Any) -> Plan:
            try:
                return self.estimate(changed, limit)
            except UserError:  # a mesh that the slice does not have
                return Plan((memory_plan.Line("", 2 * limit),), {}, limit)

        changes = memory_plan.fitting_changes(estimated, config, TRIED, self._meshes(config))
        short = [s.name for s in result.compiled if s.problem or s.peak > self.where.chip.memory]
        for change in changes:
            changed = memory_plan.changed(config, change)
            described, _, _ = self.describe(changed)
            say(f"trying {memory_plan.flags_of(change)} …")
            again = [self.compile(step, described, changed) for step in _chosen(described, short)]
            if Result(result.where, {}, {}, tuple(again), result.estimate).fits:
                return dataclasses.replace(
                    result, changes=(memory_plan.flags_of(change),), checked=True
                )
        told = tuple(memory_plan.flags_of(change) for change in changes)
        return dataclasses.replace(result, changes=told)

    def _meshes(self, config: Any) -> list[dict[str, Any]]:
        """Meshes that share the weights of sampling among more devices."""
        if len(self.devices) == 1:
            return []
        tensor = dict(self.describe(config)[1].shape)["tensor"]
        sizes = [tensor * 2**n for n in (1, 2, 3) if len(self.devices) % (tensor * 2**n) == 0]
        solver, proposer = placing.shapes(config, self._platform)
        heads = [policy.kv_heads for policy in (solver, proposer) if policy is not None]
        return [
            {"mesh.fsdp": -1, "mesh.tensor": size}
            for size in sizes
            if all(n % size == 0 for n in heads)
        ]


def _devices(where: Slice) -> Sequence[Any]:
    """The slice's devices, which are not there; for GPUs virtual ones that stand for them.

    Raises:
      UserError: the TPU compiler is not installed.
    """
    if where.platform != "tpu":
        return jax.devices()[: where.count]
    # A host has four chips, which must not be more than there are.
    options: dict[str, Any] = {"chips_per_host_bounds": (1, 1, 1)} if where.count == 1 else {}
    try:
        return topologies.get_topology_desc(where.topology, "tpu", **options).devices
    except Exception as error:  # of many types: no libtpu, or it does not know the topology
        first = (str(error).strip() or repr(error)).splitlines()[0]
        raise UserError(
            f"the TPU compiler cannot be had for {where.topology} ({first[:160]}). If it is not "
            "installed: it comes with the package's extra tpu."
        ) from error


def _mesh_of(step: Step) -> Any:
    leaf = jax.tree.leaves(step.arguments)[0]
    return getattr(leaf.sharding, "mesh", None)


def _searched(name: str) -> bool:
    return name == "index" or name.startswith("passages of")


def _chosen(described: Steps, wanted: Sequence[str]) -> list[Step]:
    known = {step.name: step for step in described.steps}
    for name in wanted:
        if name not in known:
            raise UserError(f"the run has no step {name!r}; it has {', '.join(known)}.")
    return [known[name] for name in wanted or known]


def _assigned(dump: str) -> float | None:
    """Bytes that the compiler's last program takes of a device, by its buffer assignment; the
    reports are removed."""
    total = None
    reports = sorted(
        Path(dump).glob("*memory-usage-report.txt"), key=lambda path: path.stat().st_mtime_ns
    )
    if reports and (match := re.search(r"Total bytes: (\d+)", reports[-1].read_text())):
        total = float(match[1])
    shutil.rmtree(dump, ignore_errors=True)
    Path(dump).mkdir(exist_ok=True)
    return total


# --------------------------------------------------------------------- what a config names


def with_shapes(config: Any) -> Any:
    """The config with folders that hold nothing but a config.json where policies are named that are
    not at hand and whose shapes the package knows."""
    out = config.copy_and_resolve_references()
    for group in ("policy", "proposer"):
        folder = out[group].folder
        if folder and not Path(policy_folder(folder)).is_dir():
            name = folder.rstrip("/").rsplit("/", 1)[-1].lower().removesuffix("-instruct")
            known = Path(str(files("zest_jax") / "assets" / "shapes" / name))
            if known.is_dir():
                with out.unlocked():
                    out[group].folder = str(known)
    return out


def named_corpus(config: Any, say: Callable[[str], object]) -> Corpus | None:
    """The index that a config names, by its header; None for the world's passages.

    Raises:
      UserError: there is none, or it cannot be laid on devices.
    """
    name = config.retrieval.index
    if not name or config.schedule.iterations == 0:
        return None
    if "://" in name or not Path(name).expanduser().is_dir():
        raise UserError(
            f"the index {name!r} is not here to tell its size; say it: --passages=21015324 "
            "--dimension=768 --passage_tokens=128."
        )
    manifest = read_manifest(Path(name).expanduser())
    if not manifest.dimension:
        raise UserError(f"{name} is an index of kind {manifest.kind}, without vectors.")
    say(f"index {name}: {manifest.passages:,} passages of {manifest.dimension} components")
    return Corpus(manifest.passages, manifest.dimension, 128, False)


# ------------------------------------------------------------------------------------ time


def cost_of(
    step: Step,
    described: Steps,
    config: Any,
    found: Sequence[hlo.Collective],
    platform: str,
) -> Cost | None:
    """What one call of a step costs a device."""
    mesh = _mesh_of(step)
    devices = 1 if mesh is None else mesh.size
    tensor = 1 if mesh is None else mesh.shape["tensor"]
    shards = devices // tensor
    role = step.name.split("_")[0]
    shapes = placing.shapes(config, platform)
    policy = shapes[1] if role not in ("solver", "reader", "cloning") and shapes[1] else shapes[0]
    policy = dataclasses.replace(policy, dtype=config.policy.dtype)
    if step.rollout is not None:
        index = sum(
            steps.sizes({n: described.resident[n] for n in step.holds if n == "index"}).values()
        )
        return roofline.rollout_cost(
            policy, step.rollout, episodes(config, role, step, shards), index, found, tensor
        )
    if not step.name.endswith("update"):
        return None
    packs = assembly.pack_specs(config, shards)
    trained = packs[{"cloning": "warm_start"}.get(role, role)].micro_batches
    scored = 0
    if role == "proposer" and step.arguments[2].contexts is not None:
        scored = packs["contexts"].micro_batches
    # Contexts are scored before proposals are trained on; training on one micro-batch is no loop.
    turns = [scored] * (scored > 0) + [trained] * (trained > 1)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        operations = roofline.flops(step.function, step.arguments, turns) / devices
    state = steps.on_device(step.arguments[0])
    return roofline.update_cost(operations, policy, state, (trained, scored), found, tensor)


def episodes(config: Any, role: str, step: Step, shards: int) -> Episodes:
    """A device's share of a rollout's episodes, each as long as the config lets it be."""
    spec = step.rollout
    assert spec is not None
    s, p = config.solver, config.proposer
    prompts, group = {
        "solver": (s.tasks_per_step, s.group_size),
        "proposer": (p.seeds_per_step, p.samples),
    }.get(role, (spec.slots * shards, 1))
    count = -(-prompts * group // shards)
    written = (spec.searches + 1) * spec.action_length
    return Episodes(count, written, -(-prompts // shards), spec.searches)


ASSUMED = (
    "as long as the config lets it be: every episode writes and searches to its limits, every "
    "sequence takes a row of its own; nothing overlaps; matrix products, memory and links run at "
    "the figures of the chip's maker. Host work and waiting for others are not in it."
)


def times(result: Result, config: Any) -> str:
    """Least times of a training step of each role."""
    chip = result.where.chip
    rows = ["time of a call at the least, if " + ASSUMED]
    totals: dict[str, float] = {}
    for step in result.compiled:
        if step.cost is None:
            continue
        seconds = step.calls * step.cost.seconds(chip)
        totals[step.name.split("_")[0]] = totals.get(step.name.split("_")[0], 0.0) + seconds
        c = step.cost
        rows.append(
            f"  {step.name:<18} {seconds:8.1f} s  compute {c.flops / chip.flops:.1f}, memory "
            f"{c.memory / chip.bandwidth:.1f}, links {c.link / chip.links:.1f} ({c.bound(chip)})"
        )
    rows += [f"  a {role} step: {seconds:.1f} s" for role, seconds in totals.items()]
    return "\n".join(rows)


# ----------------------------------------------------------------------------------- words


def _resident_table(resident: Mapping[str, float]) -> str:
    rows = [f"  {name:<26} {size / GB:8.2f} GB" for name, size in resident.items()]
    total = f"  {'all the time':<26} {sum(resident.values()) / GB:8.2f} GB"
    return "\n".join(["on each device:", *rows, total])


def step_lines(step: Compiled, chip: Chip) -> str:
    """A step's memory and exchanges, for people."""
    head = f"{step.name}: "
    if step.problem:
        return head + f"does not compile: {step.problem}"
    rows = [
        head + f"{step.assigned / GB:.2f} GB assigned (arguments {step.arguments / GB:.2f}), "
        f"{step.beside / GB:.2f} beside it: {step.peak / GB:.2f} of {chip.memory / GB:.0f} GB; "
        f"compiled in {step.seconds:.0f} s"
    ]
    for (operation, where), (runs, size) in sorted(hlo.summary(step.collectives).items()):
        rows.append(f"  {operation:<18} {_WHERE[where]:<28} {runs:>6} x  {size / 1e6:>12,.3f} MB")
    return "\n".join(rows)


_WHERE = {
    "once": "a call",
    "loop": "a turn of a loop",
    "decode": "a token",
    "search": "a search of all",
    "extend": "a pass over new tokens",
}


def _lowered(step: Step, other: Step, mesh: Any, platform: str) -> str:
    """How far a step is lowered without a GPU; `other` is the same with XLA's attention."""
    how = ""
    try:
        program = step.lower(mesh, platform)
    except Exception as error:  # cuDNN's lowering asks the GPU for its version
        first = (str(error).strip() or repr(error)).splitlines()[0]
        how = f" with XLA's attention, since its own needs a GPU ({first[:160].rstrip('.')})"
        program = other.lower(mesh, platform)
    return f"{step.name}: lowered for {platform}{how}, {program.as_text().count(chr(10)):,} lines"


def verdict(result: Result) -> str:
    """Whether it fits, in a line."""
    chip = result.where.chip
    fullest = max(result.compiled, key=lambda step: step.peak)
    word = "fits" if result.fits else "does not fit"
    own = f"our own estimate: {result.estimate.peak / GB:.2f} GB"
    if result.fits and not result.estimate.fits:
        own += ", by which zest_jax.train would refuse the run"
    return (
        f"{word}: {result.peak / GB:.2f} GB of {chip.memory / GB:.0f} GB a device in "
        f"{fullest.name} ({own})"
    )


def refusal(result: Result) -> str:
    """The sentence with which the program ends where it does not fit."""
    chip = result.where.chip
    what = f"this run does not fit {result.where.name}: {result.peak / GB:.2f} GB of "
    what += f"{chip.memory / GB:.0f} GB a device."
    if not result.changes:
        return f"{what} No change of the config was found with which it would; take more chips."
    how = "the compiler agrees" if result.checked else "by estimate"
    return f"{what} It would with {' or '.join(result.changes)} ({how})."


def write(path: str, result: Result, config: Any) -> None:
    """All numbers as JSON."""
    chip = result.where.chip
    out = {
        "config_hash": config_hash(config),
        "topology": result.where.name,
        "devices": result.where.count,
        "mesh": dict(result.mesh),
        "chip": dataclasses.asdict(chip),
        "resident": dict(result.resident),
        "fits": result.fits,
        "peak": result.peak,
        "estimate": result.estimate.peak,
        "changes": list(result.changes),
        "steps": [
            {
                "name": s.name,
                "compile_seconds": round(s.seconds, 1),
                "arguments": s.arguments,
                "temporaries": s.temporaries,
                "outputs": s.outputs,
                "aliased": s.aliased,
                "assigned": s.assigned,
                "beside": s.beside,
                "peak": s.peak,
                "problem": s.problem,
                "calls": s.calls,
                "seconds": None if s.cost is None else s.calls * s.cost.seconds(chip),
                "cost": None if s.cost is None else dataclasses.asdict(s.cost),
                "collectives": [
                    {"operation": op, "where": where, "count": runs, "bytes": size}
                    for (op, where), (runs, size) in sorted(hlo.summary(s.collectives).items())
                ],
            }
            for s in result.compiled
        ],
    }
    with writing(Path(path)) as file:
        file.write((json.dumps(out, indent=2) + "\n").encode())
