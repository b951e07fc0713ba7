"""What is refused before a run begins, while its workdir is still free for another config."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zest_jax import config as config_lib
from zest_jax.errors import UserError
from zest_jax.models.attention import BACKENDS
from zest_jax.models.config import MATRICES
from zest_jax.rewards.difficulty import CURVES
from zest_jax.rewards.information_gain import SHORTCUTS
from zest_jax.rewards.solver import SOLVER_REWARDS
from zest_jax.rewards.terms import NEEDS_DIFFICULTY, needs, weights_of
from zest_jax.rollout.protocols import SEARCH, find
from zest_jax.tasks import path_gates as path_gates  # registers its gates
from zest_jax.tasks.formats import FORMATS
from zest_jax.tasks.gating import GATES
from zest_jax.tasks.refill import REFILLS
from zest_jax.tasks.sources import SOURCES, TaskSource
from zest_jax.tasks.types import Task

if TYPE_CHECKING:
    from zest_jax.assembly import Parts

PATHS = ("linked", "written", "none")
"""How an evidence path comes about: by the documents' sentences, as the proposer writes it, or not
at all (the baseline that only retrieves for the answer)."""

SCHEDULES = ("iterated", "online", "labelled")

# What the placeholders of a proposer's prompt can be filled with, by kind of source; a source of
# your own may fill others.
GIVEN = {
    "chains": {"chain", "passages"},
    "chain_pool": {"chain", "passages"},
    "documents": {"hops", "searches", "title", "text"},
    "answers": {"answer", "searches", "hops"},
    "references": {"chain", "path", "passages", "answer", "reference", "hops"},
}


def check_fields(config: Any) -> None:
    """Refuses values that no part could work with, before anything is built.

    Raises:
      UserError: the first field that is off, and what it may be.
    """
    check_parts(config)
    choices = {
        "schedule.kind": (config.schedule.kind, SCHEDULES),
        "teacher.kind": (config.teacher.kind, ("endpoint", "local", "recorded", "reader")),
        "probe.model": (config.probe.model, ("anchor", "base", "solver")),
        "solver_reward.tool_form": (config.solver_reward.tool_form, ("T1", "T2", "T3")),
        "retrieval.where": (config.retrieval.where, ("auto", "device", "host")),
        "source.path": (config.source.path, PATHS),
        "policy.dtype": (config.policy.dtype, ("float32", "bfloat16")),
        "policy.attention": (config.policy.attention, ("auto", *BACKENDS)),
        "reward.squash": (config.reward.squash, ("a", "b")),
        "training.remat": (config.training.remat, ("none", "dots", "full")),
        "training.moments": (config.training.moments, ("float32", "int8")),
    }
    for role in ("solver", "proposer"):
        a = config[role].advantage
        choices |= {
            f"{role}.kl_kind": (config[role].kl_kind, ("low_var_kl", "k1", "k2")),
            f"{role}.advantage.group": (a.group, ("prompt", "hop", "role", "batch")),
            f"{role}.advantage.baseline": (a.baseline, ("mean", "none")),
            f"{role}.advantage.singleton": (a.singleton, ("zero", "raw")),
        }
    if config.retrieval.where == "device" and not config.retrieval.index:
        raise UserError(
            "retrieval.where says where an index is searched, and retrieval.index names none; "
            "leave it at auto (a world's passages lie on the devices)."
        )
    for field, (value, known) in choices.items():
        if value not in known:
            raise UserError(f"config field {field} is one of {', '.join(known)}, not {value!r}.")
    left_out = set(config.reward.without)
    if left_out - set(SHORTCUTS) or left_out == set(SHORTCUTS):
        raise UserError(
            f"config field reward.without names some of {', '.join(SHORTCUTS)}, and not all."
        )
    lora = config.training.lora
    if lora.rank < 0 or not 0 < lora.alpha < float("inf"):
        raise UserError(
            f"config field training.lora.rank must be at least 0 (which trains the whole policy), "
            f"and training.lora.alpha above 0, got {lora.rank} and {lora.alpha}."
        )
    if not lora.targets or set(lora.targets) - set(MATRICES):
        raise UserError(f"config field training.lora.targets names some of {', '.join(MATRICES)}.")
    least = {
        "seed": 0,
        "policy.width": 1,
        "policy.layers": 1,
        "policy.heads": 1,
        "policy.kv_heads": 1,
        "policy.head_dim": 2,
        "policy.mlp_width": 1,
        "warm_start.steps": 0,
        "warm_start.sequences": 1,
        "warm_start.stop_every": 1,
        "retrieval.dimension": 0,
        "retrieval.query_length": 1,
        "solver.group_size": 1 if config.solver.advantage.baseline == "none" else 2,
        "solver.updates_per_batch": 1,
        "proposer.samples": 1,
        "proposer.searches": 0,
        "probe.rollouts": 2 if config.reward.difficulty == "dr_zero" else 1,
        "generation.samples": 1,
        "generation.most_words": 0,
        "refill.rounds": 1,
        "refill.period": 1,
        "source.most_characters": 1,
        "source.target_prompt": 1,
        "source.target_length": 4,
        "source.documents": 1,
        "source.support": 1,
        "source.path_prompt": 1,
        "source.path_length": 4,
        "source.relation_words": 1,
        "source.rounds": 1,
        "gates.reading_length": 8,
        "gates.rag_noise": 0,
        "solver.prompt_length": 1,
        "solver.action_length": 4,
        "proposer.prompt_length": 1,
        "proposer.action_length": 4,
        "schedule.iterations": 0,
        "schedule.proposer_steps": 0,
        "schedule.solver_steps": 0,
        "evaluation.draws": 100,
        "solver.tasks_per_step": 1,
        "solver.slots": 1,
        "solver.narrowings": 0,
        "solver.searches": 1,
        "proposer.slots": 1,
        "proposer.seeds_per_step": 1,
        "retrieval.top_k": 1,
        "world.max_hops": 1,
        "schedule.tasks": config.solver.tasks_per_step,
        "schedule.max_seeds": config.world.max_hops,
        "checkpoint.every": 1,
        "checkpoint.keep": 1,
        "training.rows": 1,
        "log.rollouts_every": 1,
    }
    for field, low in least.items():
        *groups, name = field.split(".")
        value = config[groups[0]][name] if groups else config[name]
        if value < low:
            raise UserError(f"config field {field} must be at least {low}, got {value}.")
    for role in ("solver", "proposer"):
        if config[role].temperature <= 0:
            raise UserError(
                f"config field {role}.temperature must be above 0: rollouts that are all alike "
                "teach nothing."
            )
    check_protocols(config)
    check_schedule(config)
    check_options(config)
    check_numbers(config)
    for group in ("policy", "proposer"):
        if config[group].system and not config[group].chat:
            raise UserError(
                f"config field {group}.system is part of a chat template; set {group}.chat=True as "
                "well, or leave it empty."
            )
    if config.proposer.chat and not config.proposer.folder:
        raise UserError(
            "config field proposer.chat is of a proposer with a policy of its own: set "
            "proposer.folder, or policy.chat for both roles."
        )
    heads, kv_heads, head_dim = config.policy.heads, config.policy.kv_heads, config.policy.head_dim
    if heads % kv_heads or head_dim % 2:
        raise UserError(
            f"config field policy.heads={heads} must be a multiple of policy.kv_heads={kv_heads}, "
            f"and policy.head_dim={head_dim} even."
        )


def check_parts(config: Any) -> None:
    """Refuses names of parts that there are not.

    Raises:
      UserError: which, and what there is.
    """
    SOURCES.find(config.source.kind)
    SOLVER_REWARDS.find(config.solver.reward)
    REFILLS.find(config.refill.kind)
    CURVES.find(config.reward.difficulty)
    FORMATS.find(config.proposer.format)
    for name in config.proposer.gates:
        GATES.find(name)
    if not weights_of(config.reward) and config.schedule.kind != "labelled":
        raise UserError(
            "config group reward.weights has no term above 0, so that no proposal would be paid."
        )
    weights = config.source.hop_weights
    if not weights or any(w < 0 for w in weights) or not sum(weights):
        raise UserError("config field source.hop_weights holds weights of 1, 2, … hops, e.g. 4,3.")


def check_options(config: Any) -> None:
    """Refuses options of parts that mean nothing.

    Raises:
      UserError: the first field that is off, and what it may be.
    """
    r = config.solver_reward
    t3 = r.tool_form == "T3"
    if not (r.tool_cost > 0 if t3 else 0 <= r.tool_cost < 1):
        raise UserError(
            f"config field solver_reward.tool_cost={r.tool_cost} must be "
            + ("above 0 for T3." if t3 else "in [0, 1): a right answer must stay worth more.")
        )
    shares = {
        "solver_reward.waypoint_alpha": r.waypoint_alpha,
        "solver_reward.structure_score": r.structure_score,
        "solver_reward.answer_score": r.answer_score,
        "solver_reward.retrieval_score": r.retrieval_score,
        "refill.most_success": config.refill.most_success,
        "teacher.most_unanswered": config.teacher.most_unanswered,
    }
    for field, value in shares.items():
        if not 0 <= value <= 1 or (field.endswith("waypoint_alpha") and value == 1):
            below = ", below 1" if field.endswith("waypoint_alpha") else ""
            raise UserError(f"config field {field}={value} must lie in [0, 1]{below}.")
    above = {
        "solver_reward.tool_scale": r.tool_scale,
        "reward.tau": config.reward.tau,
        "probe.temperature": config.probe.temperature,
    }
    at_least = {
        f"{role}.{name}": value
        for role in ("solver", "proposer")
        for name, value in (
            ("kl_weight", config[role].kl_weight),
            ("advantage.eps", config[role].advantage.eps),
            ("advantage.ddof", config[role].advantage.ddof),
        )
    } | {f"fallback.{name}": config.fallback[name] for name in ("beta", "gamma", "lam")}
    for field, value in (above | at_least).items():
        good = value > 0 if field in above else value >= 0
        if not good or value != value or value == float("inf"):
            wanted = "above 0" if field in above else "0 or more"
            raise UserError(f"config field {field}={value} must be {wanted}, and finite.")


def check_numbers(config: Any) -> None:
    """Refuses numbers with which training runs and means nothing.

    Raises:
      UserError: the first field that is off, and what it may be.
    """
    for field, value in config_lib.flatten(config).items():
        values = value if isinstance(value, (tuple, list)) else (value,)
        if any(isinstance(v, float) and not math.isfinite(v) for v in values):
            raise UserError(f"config field {field}={value} must be a finite number.")
    above, least = ["training.b2", "solver.wait_fraction"], []
    within: dict[str, tuple[float, float]] = {}
    for role in ("solver", "proposer"):
        above += [f"{role}.{name}" for name in ("learning_rate", "max_grad_norm")]
        above += [f"{role}.{name}" for name in ("clip_low", "clip_high")]
        above += [f"{role}.advantage.{name}" for name in ("eps", "post_scale")]
        least += [f"{role}.warmup_steps"]
        within[f"{role}.advantage.ddof"] = (0, 1)
        a = config[role].advantage
        if a.baseline == "none" and a.std:
            raise UserError(
                f"config field {role}.advantage.baseline=none divides rewards by a deviation that "
                f"may be 0; set {role}.advantage.std=False as well."
            )
    above += ["warm_start.learning_rate", "teacher.answer_s"]
    least += ["warm_start.warmup_steps", "teacher.retries", "teacher.most_requests"]
    least += ["teacher.most_tokens", "retrieval.text_weight"]
    least += [f"reward.weights.{name}" for name in config.reward.weights]
    for name in ("solver", "reading", "proposer", "document", "backward", "target", "path"):
        least.append(f"warm_start.{name}")
    for name in ("renamed", "early_answer", "wrong_field", "relation_query", "flawed_proposer"):
        within[f"warm_start.{name}"] = (0, 1)
    for name in ("documents", "max_tokens", "connections"):
        within[f"teacher.{name}"] = (1, math.inf)
    within |= {"training.b2": (0, 1 - 1e-9), "solver.wait_fraction": (0, 1)}
    within |= {"reward.invalid": (-math.inf, 0)}
    flat = config_lib.flatten(config)
    for field in above:
        if not flat[field] > 0:
            raise UserError(f"config field {field}={flat[field]} must be above 0.")
    for field in least:
        if not flat[field] >= 0:
            raise UserError(f"config field {field}={flat[field]} must be 0 or more.")
    for field, (low, high) in within.items():
        if not low <= flat[field] <= high:
            words = "0 or less" if high == 0 else f"from {low} to {high}"
            words = f"at least {low}" if high == math.inf else words
            words = "below 1" if field == "training.b2" else words
            raise UserError(f"config field {field}={flat[field]} must be {words}.")
    check_guards(config.guards)
    g = config.gates
    for what in ("words", "characters"):
        if g[f"min_{what}"] > g[f"max_{what}"]:
            raise UserError(f"config field gates.min_{what} is more than gates.max_{what}.")
    r = config.solver_reward
    if config.solver.reward == "search_r1_format" and r.structure_score >= 0.5:
        raise UserError(
            f"config field solver_reward.structure_score={r.structure_score} must be below 0.5: a "
            "right answer must stay worth more than a well-formed one."
        )


def check_guards(guards: Any) -> None:
    """Refuses bounds at which a warning would be given always or never.

    Raises:
      UserError: the first field that is off, and what it may be.
    """
    for field, least in (("steps", 2), ("again", 1)):
        if guards[field] < least:
            raise UserError(
                f"config field guards.{field}={guards[field]} must be at least {least}."
            )
    for field in ("reward_spread", "kl", "kl_to_reference", "entropy"):
        if guards[field] < 0:
            raise UserError(
                f"config field guards.{field}={guards[field]} must be above 0, or 0 for no warning."
            )
    for field in ("length_ratio", "mismatch"):
        if guards[field] and guards[field] <= 1:
            raise UserError(
                f"config field guards.{field}={guards[field]} must be above 1 (which is no "
                "difference), or 0 for no warning."
            )
    for field in ("valid_share", "same_groups", "hit_limit"):
        most = "below 1" if field == "valid_share" else "at most 1"
        beyond = guards[field] >= 1 if field == "valid_share" else guards[field] > 1
        if guards[field] < 0 or beyond:
            raise UserError(
                f"config field guards.{field}={guards[field]} must be above 0 and {most}, or 0 for "
                "no warning."
            )


def check_schedule(config: Any) -> None:
    """Refuses schedules that source, sizes or rewards do not fit.

    Raises:
      UserError: which, and what would do.
    """
    if config.fallback.enabled and config.teacher.kind != "reader" and not config.teacher.where:
        raise UserError(
            f"config field fallback.enabled=True asks a teacher of kind {config.teacher.kind}: set "
            "teacher.where to its address (and teacher.model), folder or file."
        )
    advantage = config.solver.advantage
    if config.fallback.enabled and not (advantage.std and advantage.ddof == 1):
        raise UserError(
            "the fallback's lambda acts after a normalisation by the sample deviation; set "
            "solver.advantage.std=True and solver.advantage.ddof=1."
        )
    kind, source = config.schedule.kind, config.source.kind
    if source in GIVEN or source == "labelled":  # one of your own is looked at when it is built
        check_source_kind(kind, source, source == "labelled")
    if kind == "labelled":
        if config.proposer.folder:
            raise UserError(
                "config field schedule.kind=labelled has no proposer; leave proposer.folder empty."
            )
        return
    ways = {"start_named", "between_hidden"} & set(config.proposer.gates)
    wayless = source in ("documents", "answers") or config.source.path == "none"
    if ways and wayless and source in GIVEN and source not in ("chains", "chain_pool"):
        raise UserError(
            f"config field proposer.gates has {', '.join(sorted(ways))}, which need a path, and "
            f"source.kind={source} (source.path={config.source.path}) gives none."
        )
    if source == "references" and config.source.support > config.source.documents:
        raise UserError(
            f"config field source.support={config.source.support} asks for more documents than "
            f"source.documents={config.source.documents} retrieves."
        )
    if kind == "online" and needs(config.reward, NEEDS_DIFFICULTY):
        if config.reward.difficulty == "dr_zero" and config.solver.group_size < 2:
            raise UserError(
                "config field reward.difficulty=dr_zero needs at least 2 rollouts of a question; "
                "raise solver.group_size."
            )
    if config.policy.shared and config.proposer.frozen:
        raise UserError(
            "config field policy.shared=True trains the proposer's weights as the solver's; it "
            "cannot have proposer.frozen=True."
        )
    if config.source.file and source == "chains":
        raise UserError(
            "config field source.kind=chains takes chains of the world and reads no file; leave "
            "source.file empty, or set source.kind=chain_pool."
        )
    if config.reward.without and not config.reward.weights.information_gain:
        raise UserError(
            "config field reward.without leaves shortcuts out of the information gain, which "
            "reward.weights.information_gain=0 does not pay; leave one of them out."
        )
    if config.policy.shared and kind != "online":
        raise UserError("config field policy.shared=True needs schedule.kind=online.")
    if config.policy.shared and config.proposer.folder:
        raise UserError(
            "config field policy.shared=True has one policy in both roles, and proposer.folder "
            "names another; leave one of them out."
        )
    proposals = config.proposer.seeds_per_step * config.proposer.samples
    if kind == "online" and proposals > config.solver.tasks_per_step:
        raise UserError(
            f"an online step asks the solver every question that passed: "
            f"solver.tasks_per_step={config.solver.tasks_per_step} must be at least the "
            f"{proposals} proposals of a step."
        )
    group = config.proposer.advantage
    if group.group == "prompt" and config.proposer.samples < 2 and group.singleton == "zero":
        raise UserError(
            "config field proposer.advantage.group=prompt compares the proposals of one seed; "
            "raise proposer.samples, or set proposer.advantage.singleton=raw."
        )
    widest = len(config.source.hop_weights)
    if source in ("documents", "answers", "references") and widest > config.world.max_hops:
        raise UserError(
            f"config field source.hop_weights asks for up to {widest} hops, and world.max_hops is "
            f"{config.world.max_hops}; raise it."
        )


def check_source_kind(schedule: str, source: str, labelled: bool) -> None:
    """Refuses a schedule that has no use for a source.

    Raises:
      UserError: one is labelled and the other is not.
    """
    if (schedule == "labelled") != labelled:
        raise UserError(
            f"config field schedule.kind={schedule} does not go with source.kind={source}: "
            "labelled questions need no proposer, and all other sources need one."
        )


def check_source(config: Any, source: Any) -> None:
    """Refuses a source that cannot fill a step.

    Raises:
      UserError: it is of the other kind, or has too few questions, answers or chains.
    """
    labelled = isinstance(source, TaskSource)
    check_source_kind(config.schedule.kind, config.source.kind, labelled)
    if labelled and config.schedule.iterations:
        there, wanted = len(source.tasks()), config.solver.tasks_per_step
        if there < wanted:
            raise UserError(
                f"the source has {there} questions beside the evaluation, and a step takes "
                f"solver.tasks_per_step={wanted}; lower it or give more."
            )


def check_protocols(config: Any) -> None:
    """Refuses protocols that the roles' tasks do not fit, and sizes that a protocol forbids.

    Raises:
      UserError: which, and what would do.
    """
    given = {"solver": {"question"}, "proposer": GIVEN.get(config.source.kind)}
    if config.schedule.kind == "labelled":
        del given["proposer"]
    apart = bool(config.proposer.folder)
    for role, parts in given.items():
        protocol = find(config[role].protocol)
        group = "proposer" if role == "proposer" and apart else "policy"
        if protocol.special and not config[group].chat:
            raise UserError(
                f"protocol {protocol.name} is written in the turns of a chat; set "
                f"{group}.chat=True."
            )
        if parts is not None and set(protocol.placeholders) - parts:
            raise UserError(
                f"config field {role}.protocol={protocol.name} asks for "
                f"{', '.join(sorted(set(protocol.placeholders) - parts))}, and a {role} of this "
                f"method is given {' and '.join(sorted(parts))} only."
            )
        if role == "proposer" and protocol.kind(SEARCH) and not config.proposer.searches:
            raise UserError(
                f"protocol {protocol.name} searches; set proposer.searches, and "
                "proposer.observation_length for what a search brings."
            )
        most = {
            "searches": protocol.most_searches,
            "action_length": protocol.limits.action,
            "observation_length": protocol.limits.observation,
        }
        for name, limit in most.items():
            if name in config[role] and limit and config[role][name] > limit:
                raise UserError(
                    f"config field {role}.{name}={config[role][name]} is more than the {limit} of "
                    f"protocol {protocol.name}; lower it."
                )
    stages = {"target": {"question"}, "path": {"answer", "hops", "documents"}}
    if config.source.path != "written":
        del stages["path"]
    for stage, shown in stages.items() if config.source.kind == "references" else ():
        protocol = find(config.source[f"{stage}_protocol"])
        if set(protocol.placeholders) - shown or protocol.kind(SEARCH):
            raise UserError(
                f"config field source.{stage}_protocol={protocol.name} must be a reply without "
                f"searches, to a prompt with {' and '.join(sorted(shown))}."
            )


def check_world(config: Any, parts: Parts, labelled: Sequence[Task] = ()) -> None:
    """Finds what would stop a run later, before its workdir belongs to the config.

    Args:
      config: the run's.
      parts: built.
      labelled: questions that take the place of refused ones.

    Raises:
      UserError: a question that does not fit the solver's prompt, fewer chains than are drawn, or
        a warm start that was written for other prompts.
    """
    if config.policy.chat and config.warm_start.steps and not config.warm_start.file:
        raise UserError(
            "the scripts of a warm start are written for base prompts; set policy.chat=False, or "
            "give trajectories of your own (warm_start.file)."
        )
    atlas = parts.world.atlas
    where = Path(parts.world.name) if atlas is None else atlas.folder
    limit, template = config.solver.prompt_length, parts.solver_sampler.protocol.prompt
    if isinstance(parts.source, TaskSource):
        labelled = parts.source.tasks()
    asked: dict[str, Sequence[Task]] = {
        str(Path(config.source.file or config.refill.file or "labelled").absolute()): labelled,
        "heldout.jsonl": parts.world.heldout_tasks if config.schedule.iterations else (),
        "validation.jsonl": parts.world.validation_tasks if config.warm_start.steps else (),
    }
    for name, tasks in asked.items():
        prompts = parts.solver.encode([template.format(question=task.question) for task in tasks])
        for task, ids in zip(tasks, prompts, strict=True):
            if len(ids) > limit:
                raise UserError(
                    f"{where / name}: question {task.id} has {len(ids)} tokens with "
                    f"its prompt, more than solver.prompt_length={limit}; raise it or shorten the "
                    "question."
                )
    if atlas is None or config.source.kind != "chains":
        return
    drawn = {
        "schedule.max_seeds": config.schedule.max_seeds,
        "proposer.seeds_per_step": config.proposer.seeds_per_step,
    }
    for hops in range(1, config.world.max_hops + 1) if config.schedule.iterations else ():
        try:
            there = atlas.count_chains(hops)
        except ValueError:
            continue  # too many to be listed: enough
        for field, count in drawn.items():
            share = -(-count // config.world.max_hops)
            if there < share:
                raise UserError(
                    f"{atlas.folder} has {there} training chains of {hops} hop(s), but "
                    f"{field}={count} draws {share} of each length; lower it, lower "
                    "world.max_hops, or add facts."
                )
