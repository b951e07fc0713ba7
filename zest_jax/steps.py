"""The compiled steps of a run, described without computing anything: what `train` jits, and shapes.

For `plan`, which compiles them for devices that are not there, and for tests. A step is the very
function that `train` or a `Sampler` jits, with abstract arguments that say where each would lie.

Shape letters: N episodes or passages, P prompt or passage length, X shards, V vocabulary,
E embedding size, B proposals, C contexts.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from zest_jax import assembly, placing
from zest_jax.learning import updates
from zest_jax.learning.packing import pack, placed
from zest_jax.models import param_shapes
from zest_jax.models.lora import join, split_lora
from zest_jax.models.policy import Params
from zest_jax.parallel import Placement, param_shardings
from zest_jax.parallel.sharding import BATCH
from zest_jax.players import Player
from zest_jax.retrieval import Retriever
from zest_jax.retrieval.encoders import BagEncoder
from zest_jax.retrieval.exact import ExactIndex, Int8Rows
from zest_jax.retrieval.retriever import passage_store
from zest_jax.retrieval.split import may_split, split_specs
from zest_jax.retrieval.store import FramePieces, PassageStore
from zest_jax.rewards.information_gain import context_names
from zest_jax.rewards.terms import (
    NEEDS_LIKELIHOOD,
    Signals,
    needs,
    proposer_reward,
)
from zest_jax.rollout import side_by_side
from zest_jax.rollout.engine import Engine, compiler_options
from zest_jax.rollout.protocols import SEARCH, Protocol
from zest_jax.rollout.sampling import Draws
from zest_jax.rollout.state import RolloutSpec
from zest_jax.rollout.stops import StopTable, build_stop_table
from zest_jax.tasks import proposals
from zest_jax.tasks.reader import READER

LONGEST_TOKEN = 128
"""Bytes of a vocabulary's longest token where there is no tokenizer to ask: Qwen's."""
CHARACTERS = 4
"""Characters of a token, on average, where there is no tokenizer to ask."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled step.

    Attributes:
      name: as `train` counts its traces.
      function: what is jitted.
      arguments: trees of `jax.ShapeDtypeStruct`s, each with its sharding.
      options: of `jax.jit`.
      holds: names of the run's resident trees that are among the arguments.
      rollout: sizes of a device's share of the rollout; None for other steps.
      calls: calls of it in a training step of its role.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    holds: tuple[str, ...]
    rollout: RolloutSpec | None = None
    calls: int = 1

    def lower(self, mesh: Any = None, platform: str = "") -> Any:
        """`jax.jit(…).lower(…)`, within the mesh where there is one.

        Args:
          mesh: that the arguments lie on.
          platform: to lower for where it is not the one of the arguments' devices.
        """
        with Placement(mesh).active():
            traced = jax.jit(self.function, **self.options).trace(*self.arguments)
            return traced.lower(lowering_platforms=(platform,) if platform else None)


@dataclasses.dataclass(frozen=True)
class Steps:
    """All steps of a run.

    Attributes:
      steps: in the order of a run.
      resident: what lies on the devices all the time, by name.
    """

    steps: tuple[Step, ...]
    resident: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """An index that is described and not opened.

    Attributes:
      passages: N.
      dimension: of a vector, E.
      tokens: ids kept of a passage, P.
      int8: 8-bit codes with a scale a row instead of bfloat16.
    """

    passages: int
    dimension: int
    tokens: int
    int8: bool = False

    @property
    def size(self) -> float:
        """Bytes of vectors and passages."""
        vector = self.dimension + 4 if self.int8 else 2 * self.dimension
        return float(self.passages) * (vector + 4 * self.tokens + 4)


@dataclasses.dataclass(frozen=True)
class Described(Placement):
    """A `Placement` that only says where things would lie.

    Attributes:
      device: where all of it lies without a mesh; None for the first one there is.
    """

    device: Any = None

    @property
    def _whole(self) -> Sharding:
        if self.mesh is not None:
            return NamedSharding(self.mesh, P())
        return SingleDeviceSharding(jax.devices()[0] if self.device is None else self.device)

    def params(self, tree: Any) -> Any:
        if self.mesh is None:
            return self.whole(tree)
        return jax.tree.map(_at, tree, param_shardings(tree, self.mesh))

    def whole(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: _at(x, self._whole), tree)

    def rows(self, tree: Any, axis: int = 0) -> Any:
        if self.mesh is None:
            return self.whole(tree)
        split = NamedSharding(self.mesh, P(*[None] * axis, *BATCH))
        return jax.tree.map(lambda x: _at(x, split if np.ndim(x) > axis else self._whole), tree)

    def retriever(self, retriever: Any) -> Any:
        """As `side_by_side.place_retriever`."""
        if self.mesh is None or not may_split(retriever):
            return self.whole(retriever)
        mesh, axes = self.mesh, side_by_side.AXES
        split = dataclasses.replace(
            retriever, index=dataclasses.replace(retriever.index, vectors=retriever.index.size)
        )

        def one(x: Any, spec: P) -> Any:
            rows = -(-x.shape[0] // self.shards) * self.shards if spec else 0
            shape = (rows, *x.shape[1:]) if spec else x.shape
            return _at(jax.ShapeDtypeStruct(shape, x.dtype), NamedSharding(mesh, spec))

        return jax.tree.map(one, split, split_specs(split, axes))


def _at(x: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding)


def describe(
    config: Any, place: Described, corpus: Corpus | None = None, platform: str = "tpu"
) -> Steps:
    """The steps of a run of `train`.

    Args:
      config: the run's; only shapes are read of the policies that it names.
      place: the devices.
      corpus: what is searched; None for the passages of the config's world.
      platform: of the devices, for the attention back end.

    Raises:
      UserError: a folder or a world cannot be read.
    """
    players = _players(config, place, platform)
    solver, proposer = players["solver"], players["proposer"]
    apart = proposer is not solver
    lora = assembly.lora_spec(config)

    def state_of(params: Params, asking: Params) -> dict[str, Any]:
        parts: Any = SimpleNamespace(apart=apart, proposer=SimpleNamespace(params=asking))
        return assembly.state_from(config, parts, params)

    state = place.params(jax.eval_shape(state_of, solver.params, proposer.params))
    resident: dict[str, Any] = {**state}
    if lora is not None:
        resident["frozen"] = solver.frozen
        if apart:
            resident["frozen of the proposer"] = proposer.frozen
    retrievers = _retrievers(config, players, place, corpus)
    if retrievers:
        first = next(iter(retrievers.values()))
        resident["index"] = (first.encoder, first.index)
        resident |= {f"passages of the {role}": r.store for role, r in retrievers.items()}
    steps = [
        *_rollouts(config, players, state, retrievers, place),
        *_updates(config, players, state, place),
    ]
    return Steps(tuple(steps), resident)


def _players(config: Any, place: Described, platform: str) -> dict[str, Player]:
    """The players without weights; a player's tokenizer is None where only shapes are at hand."""
    shapes = placing.shapes(config, platform)
    lora = assembly.lora_spec(config)
    made: list[Player] = []

    def in_type(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, jnp.dtype(config.policy.dtype))

    for shape, given in zip(shapes, (config.policy, config.proposer), strict=True):
        if shape is None:
            made.append(made[0])
            continue
        policy = dataclasses.replace(shape, dtype=config.policy.dtype, decoding="xla", lora=lora)
        params, frozen = param_shapes(policy), None
        if lora is not None:
            params, frozen = split_lora(params)
            frozen = place.params(jax.tree.map(in_type, frozen))
        tokenizer = placing.tokenizer_of(config, given)
        made.append(Player(tokenizer, policy, place.params(params), frozen, "", "", {}))
    solver, proposer = made
    return {"solver": solver, "proposer": proposer, "reader": solver} | dict.fromkeys(
        assembly.STAGES_WRITTEN, proposer
    )


# --------------------------------------------------------------------------------- retrieval


def _retrievers(
    config: Any, players: Mapping[str, Player], place: Described, corpus: Corpus | None
) -> dict[str, Retriever]:
    """A retriever for each role that searches, by `retrieving.build_retrieval`'s rules."""
    roles = ["solver"] if config.schedule.kind == "labelled" else ["solver", "proposer"]
    spoken = {role: assembly.protocol(config[role].protocol) for role in roles}
    roles = [r for r in roles if spoken[r].kind(SEARCH) and config[r].searches]
    return {
        role: place.retriever(_retriever(config, role, spoken[role], players[role], corpus))
        for role in roles
    }


def _retriever(
    config: Any, role: str, spoken: Protocol, player: Player, corpus: Corpus | None
) -> Retriever:
    r, queries, room = config.retrieval, spoken.most_queries, config[role].observation_length
    vocabulary = player.policy.vocab_size
    if corpus is None:
        world = assembly.find_world(config)
        titles = [passage.title for passage in world.passages]
        texts = [passage.text for passage in world.passages]
        store = passage_store(
            player.tokenizer, titles, texts, spoken.layout, r.top_k, queries, room
        )
        vocabulary = max(vocabulary, len(player.tokenizer))
        size = r.dimension or vocabulary
        rows: Any = jax.ShapeDtypeStruct((len(titles), 2 * size), jnp.float32)
    else:
        frame = spoken.layout.frame(_pieces, queries, r.top_k)
        N = corpus.passages
        store = PassageStore(
            jax.ShapeDtypeStruct((N, corpus.tokens), jnp.int32),  # type: ignore[arg-type]
            jax.ShapeDtypeStruct((N,), jnp.int32),  # type: ignore[arg-type]
            FramePieces.build(frame),
            room,
        )
        size = corpus.dimension // 2
        rows = jax.ShapeDtypeStruct((N, 2 * size), jnp.int8 if corpus.int8 else jnp.bfloat16)
        if corpus.int8:
            rows = Int8Rows(rows, jax.ShapeDtypeStruct((N,), jnp.float32))  # type: ignore[arg-type]
    table: Any = jax.ShapeDtypeStruct((vocabulary, size), jnp.float32)
    encoder = BagEncoder(table, r.text_weight)
    return Retriever(encoder, ExactIndex(rows), store, r.top_k)


def _pieces(texts: list[str]) -> list[list[int]]:
    """Ids as many as a tokenizer would give, about."""
    return [[0] * -(-len(text) // CHARACTERS) for text in texts]


# ---------------------------------------------------------------------------------- rollouts


def _rollouts(
    config: Any,
    players: Mapping[str, Player],
    state: Mapping[str, Any],
    retrievers: Mapping[str, Retriever],
    place: Described,
) -> list[Step]:
    steps = []
    capacities = assembly.capacities(config)
    asks = assembly.proposer_state(config)
    held = {"solver": "solver", "reader": "anchor"}
    for role, spec in assembly.rollout_specs(config).items():
        player = players[role]
        name = held.get(role, asks or "solver")
        spoken = READER if role == "reader" else assembly.protocol(_protocol_of(config, role))
        trained = state[name]
        trained = trained.params if isinstance(trained, updates.TrainState) else trained
        engine = _engine(player, spec, spoken)
        retriever = retrievers.get(role) if spec.searches else None
        run: Callable[..., Any] = engine.rollout
        if place.mesh is not None:
            engine = side_by_side.share_engine(engine, place.mesh)
            run = side_by_side.rollout_on(engine, place.mesh)
        share = -(-capacities[role] // place.shards)
        holds = [name, "frozen of the proposer" if player is not players["solver"] else "frozen"]
        if retriever is not None:
            holds += ["index", f"passages of the {role}"]
        steps.append(
            Step(
                f"{role}_rollout",
                run,
                (
                    join(player.frozen, trained),
                    place.whole(_stop_table(player, spoken)),
                    retriever,
                    *_prompts(spec, share, place),
                ),
                {"compiler_options": compiler_options()},
                tuple(holds),
                engine.spec,
                calls=_calls(config, role, capacities[role]),
            )
        )
    return steps


def _calls(config: Any, role: str, capacity: int) -> int:
    """Calls of a rollout in a training step of its role (a reader's and stages' are not known)."""
    s, p = config.solver, config.proposer
    episodes = {
        "solver": s.tasks_per_step * s.group_size,
        "proposer": p.seeds_per_step * p.samples,
    }
    return -(-episodes.get(role, capacity) // capacity)


def _protocol_of(config: Any, role: str) -> str:
    stages = assembly.STAGES_WRITTEN
    return config.source[f"{role}_protocol"] if role in stages else config[role].protocol


def _engine(player: Player, spec: RolloutSpec, spoken: Protocol) -> Engine:
    if player.tokenizer is not None:
        return Engine.build(player.policy, spec, spoken, player.tokenizer)
    correction = tuple(_pieces([spoken.correction or ""])[0])
    return Engine(player.policy, spec, spoken, (0,), correction)


def _stop_table(player: Player, spoken: Protocol) -> StopTable:
    if player.tokenizer is not None:
        spec = RolloutSpec(1, 1, 1, observation_length=LONGEST_TOKEN)
        engine = dataclasses.replace(_engine(player, spec, spoken), correction_ids=())
        return engine.stop_table(player.tokenizer)
    return build_stop_table(
        [b" " * LONGEST_TOKEN],
        spoken.opening,
        spoken.closing,
        player.policy.vocab_size,
        with_text=spoken.call is not None,
    )


def _prompts(spec: RolloutSpec, share: int, place: Described) -> tuple[Any, ...]:
    """Prompts, lengths, draws and count, as `Sampler` gives them."""
    X = place.shards
    N = X * share
    prompt = np.zeros((N, spec.prompt_length), np.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    if place.mesh is None:
        whole = place.whole((prompt, np.zeros(N, np.int32), key, np.float32(0), np.int32(0)))
        prompt, length, key, heat, count = whole
        return prompt, length, Draws(key, heat), count
    prompt, length, stream, count = place.rows(
        (prompt, np.zeros(N, np.int32), np.zeros(N, np.uint32), np.zeros(X, np.int32))
    )
    key, heat = place.whole((key, np.float32(0)))
    return prompt, length, Draws(key, heat, stream), count


# ----------------------------------------------------------------------------------- updates


def _updates(
    config: Any, players: Mapping[str, Player], state: Mapping[str, Any], place: Described
) -> list[Step]:
    solver, proposer = players["solver"], players["proposer"]
    specs, packs = assembly.update_specs(config), assembly.pack_specs(config, place.shards)
    schedule, steps = config.schedule, []
    donated = {"donate_argnums": 0}
    apart = proposer is not solver

    def empty(name: str) -> Any:
        return placed(pack([], packs[name]), placement=place)

    def reference(role: str) -> Any:
        if not config[role].kl_weight:
            return None
        return state["proposer_base" if apart and role == "proposer" else "base"]

    if config.warm_start.steps:
        spec = specs["warm_start"]
        begun = place.params(jax.eval_shape(spec.init, solver.params))
        function = functools.partial(updates.cloning_update, solver.policy, spec)
        arguments: tuple[Any, ...] = (begun, empty("warm_start"), solver.frozen)
        steps.append(Step("cloning_update", function, arguments, donated, ("solver", "frozen")))
    asks = assembly.proposer_state(config)
    paid = (
        assembly.advantage_of(config, "proposer"),
        functools.partial(proposer_reward, options=config.reward),
    )
    if asks and schedule.iterations and schedule.proposer_steps:
        batch = placed(_proposal_batch(config, packs), placement=place)
        if config.proposer.frozen:
            score = functools.partial(updates.proposer_score, solver.policy, *paid)
            given: tuple[Any, ...] = (state["anchor"], batch, solver.frozen)
            steps.append(Step("proposer_score", score, given, {}, ("anchor", "frozen")))
        else:
            update = functools.partial(
                updates.proposer_update, proposer.policy, solver.policy, specs["proposer"], *paid
            )
            given = (
                state[asks], state["anchor"], batch, proposer.frozen, reference("proposer"),
                solver.frozen,
            )  # fmt: skip
            base = ("base",) if config.proposer.kl_weight and not apart else ()
            known = (asks, "anchor", "frozen", "frozen of the proposer", "proposer_base", *base)
            steps.append(Step("proposer_update", update, given, donated, known))
    if schedule.iterations and schedule.solver_steps:
        count = config.solver.tasks_per_step * config.solver.group_size
        rows = place.whole(
            (np.zeros(count, np.float32), np.zeros(count, np.int32), np.zeros(count, np.float32))
        )
        counted = place.whole(np.zeros(count, bool))
        estimate = assembly.advantage_of(config, "solver")
        steps.append(Step("advantages", estimate, (*rows, counted), {}, ()))
        function = functools.partial(updates.policy_update, solver.policy, specs["solver"])
        given = (state["solver"], empty("solver"), rows[0], solver.frozen, reference("solver"))
        holds = ("solver", "frozen", *(("base",) if config.solver.kl_weight else ()))
        calls = config.solver.updates_per_batch
        steps.append(Step("solver_update", function, given, donated, holds, calls=calls))
    return steps


def _proposal_batch(config: Any, packs: Mapping[str, Any]) -> updates.ProposalBatch:
    """As `Proposing.batch`, of no proposals."""
    B = config.proposer.seeds_per_step * config.proposer.samples
    C = len(context_names(assembly.evidence_parts(config)))
    likely = needs(config.reward, NEEDS_LIKELIHOOD)

    def column(dtype: Any) -> np.ndarray:
        return np.zeros(B, dtype)

    return updates.ProposalBatch(
        proposals=pack([], packs["proposer"]),
        contexts=pack([], packs["contexts"]) if likely else None,
        signals=Signals(
            format_B=column(np.float32),
            passed_B=column(bool),
            hops_B=column(np.int32),
            probed_B=column(bool),
            difficulty_B=column(np.float32),
            valid_BC=np.zeros((B, C), bool),
            more={name: column(np.float32) for name in proposals.COLUMNS},
        ),
        group_B=column(np.int32),
        reward_order_B=column(np.int32),
    )


def on_device(tree: Any) -> float:
    """Bytes that each device holds of a tree of placed abstract arrays."""
    total = 0
    for x in jax.tree.leaves(tree):
        size = 8 if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.itemsize
        total += int(np.prod(x.sharding.shard_shape(x.shape))) * size
    return float(total)


def sizes(trees: Mapping[str, Any]) -> dict[str, float]:
    """`on_device` of each."""
    return {name: on_device(tree) for name, tree in trees.items()}


def called(steps: Sequence[Step]) -> dict[str, Step]:
    """Steps by name."""
    return {step.name: step for step in steps}
