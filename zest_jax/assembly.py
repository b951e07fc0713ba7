"""From a config to the parts of a run: world, policy, retriever, samplers, specs, phases."""

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zest_jax import players as players_lib
from zest_jax import preflight
from zest_jax.errors import UserError
from zest_jax.learning.advantages import AdvantageSpec
from zest_jax.learning.packing import PackSpec
from zest_jax.learning.updates import UpdateSpec
from zest_jax.models.config import LoraSpec
from zest_jax.models.lora import fingerprint
from zest_jax.models.policy import Params
from zest_jax.parallel import Placement
from zest_jax.players import Player
from zest_jax.retrieving import (
    Retrieval,
    build_index_retrieval,
    build_retrieval,
    index_world,
)
from zest_jax.rollout.protocols import SEARCH, Protocol, find
from zest_jax.rollout.sampler import Sampler
from zest_jax.rollout.state import RolloutSpec
from zest_jax.tasks.atlas import Atlas, load_atlas
from zest_jax.tasks.cloning import Mix
from zest_jax.tasks.gating import GATES
from zest_jax.tasks.reader import READER, Reader
from zest_jax.tasks.sources import SOURCES, SeedSource, TaskSource
from zest_jax.tasks.sources.labelled import without_evaluated
from zest_jax.tasks.types import Task, read_tasks
from zest_jax.tasks.world import World
from zest_jax.tracing import TraceCounter

ONE_DEVICE = Placement()
STAGES_WRITTEN = ("target", "path")
"""What a proposer may write before its question, where it begins with a reference."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a run is made of.

    Attributes:
      world: corpus and questions.
      source: where seeds or labelled tasks come from.
      solver: the policy that answers (and that the anchor was once).
      proposer: the policy that asks; the same object where it is the same to begin with.
      retrieval: what answers searches.
      solver_sampler, proposer_sampler: compiled rollouts; no proposer where nothing is proposed.
      stages: compiled rollouts of what a proposer writes before its question, by stage.
      reader: answers from given passages; None where no gate asks for it.
      placement: the devices that all of it lies on.
    """

    world: World
    source: SeedSource | TaskSource
    solver: Player
    proposer: Player
    retrieval: Retrieval
    solver_sampler: Sampler
    proposer_sampler: Sampler | None
    stages: Mapping[str, Sampler]
    reader: Reader | None
    placement: Placement = Placement()

    @property
    def apart(self) -> bool:
        """Whether proposer and solver are different policies from the beginning."""
        return self.proposer is not self.solver

    def player(self, role: str) -> Player:
        """The player of a role; the anchor and the base are earlier solvers."""
        return self.proposer if role.startswith("proposer") else self.solver

    @property
    def atlas(self) -> Atlas:
        """The world's facts.

        Raises:
          UserError: it has none.
        """
        if self.world.atlas is None:
            raise UserError(
                "scripted episodes need a world with facts: give warm_start.file, or set "
                "warm_start.steps=0."
            )
        return self.world.atlas


def build(config: Any, traces: TraceCounter, placement: Placement = ONE_DEVICE) -> Parts:
    """Builds everything that a config names, on the devices of a placement.

    Raises:
      UserError: a folder, a file of the world, a protocol or a length does not fit.
    """
    preflight.check_fields(config)
    world = find_world(config)
    solver = proposer = load_player(config.policy, config, world, "", placement)
    if config.proposer.folder:
        proposer = load_player(config.proposer, config, world, "proposer ", placement)
    players = {"solver": solver, "proposer": proposer, "reader": solver}
    protocols = {r: players[r].speaks(protocol(config[r].protocol)) for r in ("solver", "proposer")}
    if config.retrieval.index:
        retrieval = build_index_retrieval(config, players, protocols, placement)
    else:
        retrieval = retrieval_of(config, world, players, protocols, traces)
    retrieval = retrieval.on(placement)
    for stage in STAGES_WRITTEN if config.source.kind == "references" else ():
        players[stage] = proposer
        protocols[stage] = proposer.speaks(protocol(config.source[f"{stage}_protocol"]))
    specs = rollout_specs(config)
    capacity = capacities(config)
    samplers = {}
    for role, spec in specs.items():
        samplers[role] = retrieval.sampler(
            role,
            policy=players[role].policy,
            spec=spec,
            protocol=protocols.get(role, READER),
            tokenizer=players[role].tokenizer,
            capacity=capacity[role],
            traces=traces,
            eos_ids=players[role].end_ids,
            placement=placement,
        )
    reader = None
    if "reader" in samplers:
        reader = Reader(samplers["reader"], protocols["solver"], solver.encode)
    source = SOURCES.find(config.source.kind)(config, world)
    preflight.check_source(config, source)
    return Parts(
        world=world,
        source=source,
        solver=solver,
        proposer=proposer,
        retrieval=retrieval,
        solver_sampler=samplers["solver"],
        proposer_sampler=samplers.get("proposer"),
        stages={stage: samplers[stage] for stage in STAGES_WRITTEN if stage in samplers},
        reader=reader,
        placement=placement,
    )


def capacities(config: Any) -> dict[str, int]:
    """Most prompts of one call of each compiled rollout."""
    s, p = config.solver, config.proposer
    return {
        "solver": max(s.tasks_per_step * s.group_size, 4 * s.slots),
        "proposer": max(p.seeds_per_step * p.samples, 16 * p.slots),
        "reader": 4 * s.slots,
    } | dict.fromkeys(STAGES_WRITTEN, 4 * p.slots)


def load_player(
    given: Any, config: Any, world: World, word: str, placement: Placement = ONE_DEVICE
) -> Player:
    """The player of a config's group; `word` keeps its random numbers apart.

    Raises:
      UserError: see `players.load_player`.
    """
    keys = [random_key(config.seed, f"{word}{name}", 0) for name in ("policy", "adapters")]
    return players_lib.load_player(
        given, config.policy, world, lora_spec(config), (keys[0], keys[1]), placement
    )


def retrieval_of(
    config: Any,
    world: World,
    players: Mapping[str, Player],
    protocols: Mapping[str, Protocol],
    traces: TraceCounter,
) -> Retrieval:
    """What answers searches without an index: of both roles, each in its own tokens.

    Raises:
      UserError: see `build_retrieval`.
    """
    solver, proposer = players["solver"], players["proposer"]
    if proposer is solver:
        return build_retrieval(config, world, solver, protocols, traces)
    shared = build_retrieval(config, world, solver, {"solver": protocols["solver"]}, traces)
    if protocols["proposer"].kind(SEARCH) and config.proposer.searches:
        # Another tokenizer has other passages and other vectors.
        own = build_retrieval(config, world, proposer, {"proposer": protocols["proposer"]}, traces)
        shared = dataclasses.replace(shared, on_device=shared.on_device | own.on_device)
    return shared


def find_world(config: Any) -> World:
    """The corpus and the questions that a config names.

    Raises:
      UserError: a file is missing or broken, or there are no questions to measure a solver by.
    """
    if config.retrieval.index and not config.world.folder:
        world = index_world(config.retrieval.index)
    else:
        world = World.of_atlas(load_atlas(config.world.folder or None))
    if config.evaluation.tasks:
        tasks = tuple(read_tasks(config.evaluation.tasks))
        world = dataclasses.replace(world, heldout_tasks=tasks)
    needed = {
        "heldout": (config.schedule.iterations, world.heldout_tasks),
        "validation": (config.warm_start.steps, world.validation_tasks),
    }
    for name, (used, tasks) in needed.items():
        if used and not tasks:
            if world.atlas is None:
                raise UserError(
                    "a run on an index needs questions to measure the solver by: set "
                    "evaluation.tasks."
                    if name == "heldout"
                    else "a warm start is stopped by validation questions, which an index has "
                    "none of; set warm_start.steps=0."
                )
            raise UserError(
                f"{world.atlas.folder / name}.jsonl: no such file; expected questions to measure "
                "the solver by."
            )
    return world


def protocol(name: str) -> Protocol:
    """The protocol of a name.

    Raises:
      UserError: there is none; tells which there are.
    """
    return find(name)


def lora_spec(config: Any) -> LoraSpec | None:
    """The adapters that are trained, None where the whole policy is."""
    lora = config.training.lora
    return LoraSpec(lora.rank, lora.alpha, tuple(lora.targets)) if lora.rank else None


def update_specs(config: Any) -> dict[str, UpdateSpec]:
    """How each role is updated, and how the warm start is."""
    w, t = config.warm_start, config.training
    shared = {"b2": t.b2, "remat": t.remat, "moments": t.moments}
    specs = {
        "warm_start": UpdateSpec(
            learning_rate=w.learning_rate,
            warmup_steps=w.warmup_steps,
            total_steps=w.steps,
            **shared,
        )
    }
    for role in ("solver", "proposer"):
        r, ticks = config[role], optimizer_steps(config, role)
        online = config.schedule.kind == "online"
        steps = config.schedule["solver_steps" if online else f"{role}_steps"]
        specs[role] = UpdateSpec(
            learning_rate=r.learning_rate,
            warmup_steps=r.warmup_steps * ticks,
            total_steps=steps * ticks if r.decay else 0,
            max_grad_norm=r.max_grad_norm,
            clip_low=r.clip_low,
            clip_high=r.clip_high,
            temperature=r.temperature,
            kl_weight=r.kl_weight,
            kl_kind=r.kl_kind,
            **shared,
        )
    return specs


def optimizer_steps(config: Any, role: str) -> int:
    """Steps that the optimiser of a role makes in one training step.

    A solver may make several updates with one batch; where both roles are one policy, each update
    of either is a step of the same optimiser.
    """
    updates = config.solver.updates_per_batch
    if config.policy.shared:
        return updates + (not config.proposer.frozen)
    return updates if role == "solver" else 1


def advantage_of(config: Any, role: str) -> Callable[..., jax.Array]:
    """The estimator of a role: rewards and group keys (and scales, and which rows count) to
    advantages; jittable."""
    fields = dict(config[role].advantage.items())
    scale = fields.pop("post_scale")
    spec = AdvantageSpec(**fields)

    def estimate(
        reward_B: jax.Array,
        group_B: jax.Array,
        scale_B: jax.Array | float = 1.0,
        valid_B: jax.Array | None = None,
    ) -> jax.Array:
        scaled_B = jnp.broadcast_to(jnp.float32(scale) * scale_B, reward_B.shape)
        return spec(reward_B, group_B, scaled_B, valid_B)

    return estimate


def rollout_specs(config: Any) -> dict[str, RolloutSpec]:
    """Sizes of the episodes of the roles that a run has, and of the gates' reader."""
    s, p = config.solver, config.proposer
    specs = {}
    for role, r in (("solver", s), ("proposer", p)):
        if role == "proposer" and config.schedule.kind == "labelled":
            continue
        spoken = protocol(r.protocol)
        searches = r.searches if spoken.kind(SEARCH) else 0
        specs[role] = RolloutSpec(
            slots=r.slots,
            prompt_length=r.prompt_length,
            action_length=r.action_length,
            observation_length=r.observation_length if searches else 0,
            searches=searches,
            query_length=config.retrieval.query_length,
            wait_fraction=s.wait_fraction,
            narrowings=s.narrowings,
            queries=spoken.most_queries,
            response_length=spoken.limits.response,
        )
    if config.source.kind == "references":
        source = config.source
        written = ("target", "path") if source.path == "written" else ("target",)
        for stage in written:
            specs[stage] = RolloutSpec(
                slots=p.slots,
                prompt_length=source[f"{stage}_prompt"],
                action_length=source[f"{stage}_length"],
            )
    if needs_reader(config):
        specs["reader"] = RolloutSpec(
            slots=s.slots,
            prompt_length=config.gates.reading_length,
            action_length=s.action_length,
        )
    return specs


def needs_reader(config: Any) -> bool:
    """Whether a gate, or the fallback's judge, answers from given passages."""
    proposing = config.schedule.kind != "labelled"
    gates = [GATES.find(name) for name in config.proposer.gates]
    asked = proposing and any(getattr(gate, "asks_reader", False) for gate in gates)
    return asked or (config.fallback.enabled and config.teacher.kind == "reader")


def pack_specs(config: Any, shards: int = 1) -> dict[str, PackSpec]:
    """Shapes of the packed batches; a micro-batch's rows are rounded up to a multiple of `shards`.

    Rows are as long as the longest sequence of their kind, and there is room for every sequence
    even if each needs a row of its own.
    """
    rollouts, parts = rollout_specs(config), evidence_parts(config)
    solver, proposer = rollouts["solver"], rollouts.get("proposer", rollouts["solver"])
    context = context_length(config)
    proposals = config.proposer.seeds_per_step * config.proposer.samples
    rows = -(-config.training.rows // shards) * shards
    shapes = {
        "warm_start": (config.warm_start.sequences, max(solver.length, proposer.length, context)),
        "solver": (config.solver.tasks_per_step * config.solver.group_size, solver.length),
        "proposer": (proposals, proposer.length),
        "contexts": (proposals * (parts + 4), context),
    }
    return {
        # Half of a row may be trained tokens; it is less in any episode with passages or a chain.
        name: PackSpec.for_items(count, rows, length, length // 2)
        for name, (count, length) in shapes.items()
    }


def evidence_parts(config: Any) -> int:
    """Most parts of a proposal's evidence beside the source's passage: a hop or a search each."""
    return max(config.world.max_hops, config.proposer.searches)


def context_length(config: Any) -> int:
    """Tokens of the longest context: the question, every passage of the evidence, the answer."""
    parts = evidence_parts(config) + 1
    passages = config.solver.observation_length * max(parts, config.retrieval.top_k)
    return config.solver.prompt_length + passages + config.solver.action_length


def mix(config: Any, clean: bool) -> Mix:
    """What the warm start imitates; `clean` leaves out flaws and renaming."""
    w = config.warm_start
    return Mix(
        solver=w.solver,
        reading=w.reading,
        proposer=w.proposer,
        document=w.document,
        backward=w.backward,
        target=w.target,
        path=w.path,
        renamed=0.0 if clean else w.renamed,
        early_answer=0.0 if clean else w.early_answer,
        wrong_field=0.0 if clean else w.wrong_field,
        relation_query=0.0 if clean else w.relation_query,
        flawed_proposer=0.0 if clean else w.flawed_proposer,
        max_hops=config.world.max_hops,
    )


def initial_state(config: Any, parts: Parts) -> dict[str, Any]:
    """Everything that a checkpoint holds, as it is before the first update: of the players'
    `params`, so that a frozen policy is in none."""
    state = state_from(config, parts, parts.solver.params)
    if config.warm_start.steps:
        state["solver"] = update_specs(config)["warm_start"].init(parts.solver.params)
    return state


def state_from(config: Any, parts: Parts, params: Params) -> dict[str, Any]:
    """The state of a run whose self-evolution begins with a solver of these parameters (and a
    proposer of the same, unless it is another policy).

    A role that shares its weights, or that there is not, has no state of its own; the policies that
    training began with are kept where something looks back at them.
    """
    specs = update_specs(config)
    proposer = parts.proposer.params if parts.apart else params
    state: dict[str, Any] = {
        "solver": specs["solver"].init(params),
        "anchor": jax.tree.map(jnp.copy, params),
    }
    if proposer_state(config) == "proposer":
        # One that is never updated has no moments.
        frozen = config.proposer.frozen
        state["proposer"] = (
            jax.tree.map(jnp.copy, proposer) if frozen else specs["proposer"].init(proposer)
        )
    if needs_base(config):
        state["base"] = jax.tree.map(jnp.copy, params)
        if parts.apart and config.proposer.kl_weight and not config.proposer.frozen:
            state["proposer_base"] = jax.tree.map(jnp.copy, proposer)
    return state


def proposer_state(config: Any) -> str | None:
    """Name of the state that the proposer's weights are in; None where nothing is proposed."""
    if config.schedule.kind == "labelled":
        return None
    return "solver" if config.policy.shared else "proposer"


def needs_base(config: Any) -> bool:
    """Whether a KL penalty or a probe looks back at the policy that training began with."""
    probed = config.probe.model == "base" and config.schedule.kind != "labelled"
    return bool(config.solver.kl_weight or config.proposer.kl_weight or probed)


def base_of(parts: Parts) -> int | list[int | None] | None:
    """What a checkpoint notes of frozen policies, which it does not hold; None where there is
    none."""
    bases = [
        None if player.frozen is None else fingerprint(player.frozen)
        for player in (parts.solver, parts.proposer)
    ]
    return bases if parts.apart and any(bases) else bases[0]


def check_base(host: dict[str, Any], parts: Parts) -> None:
    """Refuses adapters beside another frozen policy than the one that they were trained with.

    Raises:
      UserError: the checkpoint with this host state notes another one.
    """
    if host.get("base") != base_of(parts):
        origins = " and ".join(dict.fromkeys((parts.solver.origin, parts.proposer.origin)))
        raise UserError(
            f"the checkpoint's adapters belong to other weights than those that {origins} "
            "has now; bring the run's own weights back (policy.folder, proposer.folder), or begin "
            "in another workdir."
        )


@dataclasses.dataclass(frozen=True)
class Phase:
    """One stretch of a run.

    Attributes:
      kind: warm_start, proposer, solver or online (both in every step).
      iteration: counted from 0; -1 for the warm start.
      steps: most updates.
      title: for people.
    """

    kind: str
    iteration: int
    steps: int
    title: str


def phases(config: Any) -> list[Phase]:
    """The row of phases that a config describes."""
    out = []
    if config.warm_start.steps:
        out.append(Phase("warm_start", -1, config.warm_start.steps, "warm start"))
    for k in range(config.schedule.iterations):
        where = f"iteration {k + 1}/{config.schedule.iterations}"
        if config.schedule.kind == "online":
            out.append(Phase("online", k, config.schedule.solver_steps, "proposer and solver"))
            continue
        if config.schedule.kind == "iterated" and not config.proposer.frozen:
            out.append(Phase("proposer", k, config.schedule.proposer_steps, f"{where}: proposer"))
        out.append(Phase("solver", k, config.schedule.solver_steps, f"{where}: solver"))
    return out


def begins(phases: Sequence[Phase], number: int) -> bool:
    """Whether a phase is the first of its iteration."""
    at = phases[number].iteration
    return at >= 0 and (number == 0 or phases[number - 1].iteration != at)


def refill_tasks(config: Any, world: World) -> list[Task]:
    """The labelled questions that the refill rule `seed` draws from; [] for other rules.

    Raises:
      UserError: the rule has no file, or a broken one.
    """
    if config.refill.kind != "seed" or config.schedule.kind != "online":
        return []
    if not config.refill.file:
        raise UserError("refill.kind=seed needs labelled questions: set refill.file.")
    return without_evaluated(list(read_tasks(config.refill.file)), world)


def random_key(seed: int, word: str, step: int) -> jax.Array:
    """The key of a purpose at a step, a function of its arguments alone: resuming needs nothing."""
    named = jax.random.fold_in(jax.random.key(seed), zlib.crc32(word.encode()))
    return jax.random.fold_in(named, step)


def introduction(config: Any, parts: Parts) -> list[str]:
    """What a run begins with, in sentences."""
    solver, world = parts.solver, parts.world
    how = f" {parts.retrieval.how}" if parts.retrieval.how else ""
    adapters = f", of which {solver.trained:,} in adapters are trained" if solver.frozen else ""
    out = [
        f"{config.method} on {world.name}: {len(world.passages)} passages, searches answered by "
        f"{parts.retrieval.name}{how}; policy of {solver.size:,} parameters from {solver.origin}"
        f"{adapters}"
    ]
    if parts.apart:
        proposer = parts.proposer
        out.append(f"the proposer is another: {proposer.size:,} parameters, {proposer.origin}")
    return out


def notes(config: Any, world: World) -> list[str]:
    """What a reader of the report should know about how the run was set up."""
    unnamed = sum(not task.source_id for task in world.heldout_tasks)
    out = [
        "Nothing that was trained on starts from the source of a held-out question.",
        *(
            [
                f"{unnamed} held-out questions name no source, so that only their wording could be "
                "kept out of training."
            ]
            if unnamed
            else []
        ),
        "The warm start imitates flawed scripts on purpose (many give up too early), so that there "
        "is something to mend: the gain shows that the loop mends it, not that reinforcement "
        "learning beats more or better cloning.",
    ]
    if config.reward.without and config.reward.weights.information_gain:
        left_out = ", ".join(config.reward.without)
        out.append(f"Left out of the shortcuts that the gain is measured against: {left_out}.")
    if config.control.shuffle_rewards:
        out.append("Control: rewards went to random rollouts of their batch.")
    return out
