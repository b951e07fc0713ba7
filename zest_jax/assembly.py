"""From a config to the parts of a run: world, policy, retriever, samplers, specs, phases."""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from zest_jax import preflight
from zest_jax.errors import UserError
from zest_jax.learning.packing import PackSpec
from zest_jax.learning.updates import UpdateSpec
from zest_jax.models import PolicyConfig, init_params
from zest_jax.models.backends import choose_attention
from zest_jax.models.config import LoraSpec
from zest_jax.models.hf import load_generation, load_pretrained, read_tokenizer
from zest_jax.models.lora import add_lora, fingerprint, join, split_lora
from zest_jax.models.policy import Params
from zest_jax.retrieval import Retriever
from zest_jax.rollout.protocols import Protocol, find, in_chat_template
from zest_jax.rollout.sampler import Sampler
from zest_jax.rollout.state import RolloutSpec
from zest_jax.tasks.atlas import Atlas, load_atlas
from zest_jax.tasks.cloning import Mix
from zest_jax.tracing import TraceCounter


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a run is made of.

    Attributes:
      atlas: the world.
      tokenizer: the policy's.
      encode: texts -> token ids.
      policy: shape of the policy (proposer, solver and anchor share it so far).
      params: where training starts from: the whole policy, or adapters that change nothing yet.
      frozen: the policy beside the adapters, one for all roles; None where all of it is trained.
      origin: where that came from, in words.
      attention: which back end was chosen, and why.
      generation: its generation_config.json, {} for random weights.
      retriever: the passages, on device.
      solver_sampler, proposer_sampler: compiled rollouts.
    """

    atlas: Atlas
    tokenizer: Any
    encode: Callable[[Sequence[str]], list[list[int]]]
    policy: PolicyConfig
    params: Params
    frozen: Params | None
    origin: str
    attention: str
    generation: dict[str, Any]
    retriever: Retriever
    solver_sampler: Sampler
    proposer_sampler: Sampler

    def whole(self, params: Params) -> Params:
        """All parameters of a policy of which `params` are trained, without copying any."""
        return join(self.frozen, params)


def build(config: Any, traces: TraceCounter) -> Parts:
    """Builds everything that a config names.

    Raises:
      UserError: a folder, a file of the world, a protocol or a length does not fit.
    """
    preflight.check_fields(config)
    atlas = load_atlas(config.world.folder or None)
    needed = {
        "heldout": (config.schedule.iterations, atlas.heldout_tasks),
        "validation": (config.warm_start.steps, atlas.validation_tasks),
    }
    for name, (used, tasks) in needed.items():
        if used and not tasks:
            raise UserError(
                f"{atlas.folder / name}.jsonl: no such file; expected questions to measure the "
                "solver by."
            )
    lora, frozen = lora_spec(config), None
    generation: dict[str, Any] = {}
    # A frozen policy is only computed with, so it is kept in the type of that.
    kept = "float32" if lora is None else config.policy.dtype
    if config.policy.folder:
        folder = policy_folder(config.policy.folder)
        policy, params = load_pretrained(folder, dtype=config.policy.dtype, param_dtype=kept)
        tokenizer = read_tokenizer(folder, policy.vocab_size)
        generation = load_generation(folder)
        origin = config.policy.folder
    else:
        tokenizer = read_tokenizer(atlas.tokenizer_folder)
        policy = PolicyConfig(
            vocab_size=len(tokenizer),
            width=config.policy.width,
            layers=config.policy.layers,
            heads=config.policy.heads,
            kv_heads=config.policy.kv_heads,
            head_dim=config.policy.head_dim,
            mlp_width=config.policy.mlp_width,
            dtype=config.policy.dtype,
        )
        params = init_params(policy, random_key(config.seed, "policy", 0))
        params = jax.tree.map(lambda x: x.astype(kept), params)
        origin = "random weights"
    policy, attention = choose_attention(policy, config.policy.attention)
    if lora is not None:
        policy = dataclasses.replace(policy, lora=lora)
        params = add_lora(policy, params, random_key(config.seed, "adapters", 0))
        params, frozen = split_lora(params)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        # Not verbose: what is too long is our own business, with an error of its own.
        return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]

    s, p, r = config.solver, config.proposer, config.retrieval
    solver_protocol, proposer_protocol = protocol(s.protocol), protocol(p.protocol)
    if config.policy.chat:
        solver_protocol, proposer_protocol = (
            in_chat_template(each, tokenizer, config.policy.system)
            for each in (solver_protocol, proposer_protocol)
        )
    most = solver_protocol.most_queries
    shown = encode(
        [
            solver_protocol.show_results([[(p.title, p.text)] * r.top_k] * most)
            for p in atlas.passages
        ]
    )
    longest = max(range(len(shown)), key=lambda n: len(shown[n]))
    if len(shown[longest]) > s.observation_length:
        raise UserError(
            f"{atlas.folder / 'passages.jsonl'}: passage {atlas.passages[longest].id} has "
            f"{len(shown[longest])} tokens with its tags, shown "
            f"{r.top_k * most} at a time, more than "
            f"solver.observation_length={s.observation_length}; raise it, lower retrieval.top_k or "
            "shorten the passage."
        )
    retriever = Retriever.build(
        tokenizer,
        [passage.title for passage in atlas.passages],
        [passage.text for passage in atlas.passages],
        layout=solver_protocol.layout,
        retrieved=r.top_k,
        queries=most,
        observation_length=s.observation_length,
        text_weight=r.text_weight,
        dimension=r.dimension,
        vocab_size=policy.vocab_size,
    )
    specs = rollout_specs(config)
    return Parts(
        atlas=atlas,
        tokenizer=tokenizer,
        encode=encode,
        policy=policy,
        params=params,
        frozen=frozen,
        origin=origin,
        attention=attention,
        generation=generation,
        retriever=retriever,
        solver_sampler=Sampler(
            "solver_rollout",
            policy,
            specs["solver"],
            solver_protocol,
            tokenizer,
            retriever,
            max(s.tasks_per_step * s.group_size, 4 * s.slots),
            traces,
            end_ids(generation),
        ),
        proposer_sampler=Sampler(
            "proposer_rollout",
            policy,
            specs["proposer"],
            proposer_protocol,
            tokenizer,
            None,
            max(p.chains_per_step, 16 * p.slots),
            traces,
            end_ids(generation),
        ),
    )


def policy_folder(name: str) -> str:
    """A folder as given, or a policy that ships with the package under that name."""
    name = str(Path(name).expanduser()) if name.startswith("~") else name
    shipped = Path(str(files("zest_jax") / "assets" / name))
    return str(shipped) if "/" not in name and shipped.is_dir() else name


def end_ids(generation: dict[str, Any]) -> list[int]:
    """The end tokens that a generation_config.json names: none, one or several."""
    ends = generation.get("eos_token_id")
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


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
        r = config[role]
        specs[role] = UpdateSpec(
            learning_rate=r.learning_rate,
            warmup_steps=r.warmup_steps,
            total_steps=config.schedule[f"{role}_steps"] if r.decay else 0,
            max_grad_norm=r.max_grad_norm,
            clip_low=r.clip_low,
            clip_high=r.clip_high,
            temperature=r.temperature,
            **shared,
        )
    return specs


def rollout_specs(config: Any) -> dict[str, RolloutSpec]:
    """Sizes of the roles' episodes."""
    s, p = config.solver, config.proposer
    solver, proposer = protocol(s.protocol), protocol(p.protocol)
    return {
        "solver": RolloutSpec(
            slots=s.slots,
            prompt_length=s.prompt_length,
            action_length=s.action_length,
            observation_length=s.observation_length,
            searches=s.searches,
            query_length=config.retrieval.query_length,
            wait_fraction=s.wait_fraction,
            queries=solver.most_queries,
            response_length=solver.limits.response,
        ),
        "proposer": RolloutSpec(
            slots=p.slots,
            prompt_length=p.prompt_length,
            action_length=p.action_length,
            response_length=proposer.limits.response,
        ),
    }


def pack_specs(config: Any) -> dict[str, PackSpec]:
    """Shapes of the packed batches.

    Rows are as long as the longest sequence of their kind, and there is room for every sequence
    even if each needs a row of its own.
    """
    rollouts, hops = rollout_specs(config), config.world.max_hops
    solver, proposer = rollouts["solver"], rollouts["proposer"]
    # A context: the question, every passage of a chain, and the answer.
    passages = config.solver.observation_length * max(hops + 1, config.retrieval.top_k)
    context = config.solver.prompt_length + passages + config.solver.action_length
    proposals = config.proposer.chains_per_step
    shapes = {
        "warm_start": (config.warm_start.sequences, max(solver.length, proposer.length, context)),
        "solver": (config.solver.tasks_per_step * config.solver.group_size, solver.length),
        "proposer": (proposals, proposer.length),
        "contexts": (proposals * (hops + 4), context),
    }
    return {
        # Half of a row may be trained tokens; it is less in any episode with passages or a chain.
        name: PackSpec.for_items(count, config.training.rows, length, length // 2)
        for name, (count, length) in shapes.items()
    }


def mix(config: Any, clean: bool) -> Mix:
    """What the warm start imitates; `clean` leaves out flaws and renaming."""
    w = config.warm_start
    return Mix(
        solver=w.solver,
        reading=w.reading,
        proposer=w.proposer,
        renamed=0.0 if clean else w.renamed,
        early_answer=0.0 if clean else w.early_answer,
        wrong_field=0.0 if clean else w.wrong_field,
        relation_query=0.0 if clean else w.relation_query,
        flawed_proposer=0.0 if clean else w.flawed_proposer,
        max_hops=config.world.max_hops,
    )


def initial_state(config: Any, params: Params) -> dict[str, Any]:
    """Everything that a checkpoint holds, as it is before the first update: of `Parts.params`, so
    that a frozen policy is in none."""
    specs = update_specs(config)
    return {
        "solver": specs["warm_start" if config.warm_start.steps else "solver"].init(params),
        "proposer": specs["proposer"].init(params),
        "anchor": jax.tree.map(jnp.copy, params),
    }


def base_of(parts: Parts) -> int | None:
    """What a checkpoint notes of a frozen policy, which it does not hold; None where there is
    none."""
    return None if parts.frozen is None else fingerprint(parts.frozen)


def check_base(host: dict[str, Any], parts: Parts) -> None:
    """Refuses adapters beside another frozen policy than the one that they were trained with.

    Raises:
      UserError: the checkpoint with this host state notes another one.
    """
    if host.get("base") != base_of(parts):
        raise UserError(
            f"the checkpoint's adapters belong to other weights than those that {parts.origin} "
            "has now; bring the run's own weights back (policy.folder), or begin in another "
            "workdir."
        )


@dataclasses.dataclass(frozen=True)
class Phase:
    """One stretch of a run.

    Attributes:
      kind: warm_start, proposer or solver.
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
        out.append(Phase("proposer", k, config.schedule.proposer_steps, f"{where}: proposer"))
        out.append(Phase("solver", k, config.schedule.solver_steps, f"{where}: solver"))
    return out


def random_key(seed: int, word: str, step: int) -> jax.Array:
    """The key of a purpose at a step, a function of its arguments alone: resuming needs nothing."""
    named = jax.random.fold_in(jax.random.key(seed), zlib.crc32(word.encode()))
    return jax.random.fold_in(named, step)


def notes(config: Any) -> list[str]:
    """What a reader of the report should know about how the run was set up."""
    out = [
        "No answer of a held-out question was used for training; their source entities stand in "
        "no training chain.",
        "The warm start imitates flawed scripts on purpose (many give up too early), so that there "
        "is something to mend: the gain shows that the loop mends it, not that reinforcement "
        "learning beats more or better cloning.",
    ]
    if config.reward.without:
        left_out = ", ".join(config.reward.without)
        out.append(f"Left out of the shortcuts that the gain is measured against: {left_out}.")
    if config.control.shuffle_rewards:
        out.append("Control: rewards went to random rollouts of their batch.")
    return out
