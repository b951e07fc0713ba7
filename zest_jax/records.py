"""What a step leaves for people: metrics by name (WORKSPACE.md lists them) and readable traces.

Shape letters: B proposals or rollouts, C contexts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zest_jax.rewards.information_gain import context_names
from zest_jax.rewards.outcome import Outcome, group_kind
from zest_jax.rollout.sampler import Sampler
from zest_jax.rollout.trajectories import Finish, Trajectories
from zest_jax.tasks.atlas import Atlas
from zest_jax.tasks.proposals import Proposal, answer_in_source
from zest_jax.tasks.scripts import chain_words
from zest_jax.tasks.types import Task


def proposer_metrics(
    proposed: Sequence[Proposal],
    episodes: Trajectories,
    values: Mapping[str, Any],
    per_row: Mapping[str, np.ndarray],
    valid_BC: np.ndarray,
    atlas: Atlas,
) -> dict[str, float]:
    """Metrics of one proposer step; means over nothing are not a number."""
    hops_B = np.array([p.chain.hops for p in proposed])
    passed_B = np.array([p.gate.passed for p in proposed])
    several = [p for p in proposed if p.chain.hops > 1 and p.gate.passed]
    columns: dict[str, np.ndarray] = {
        "reward": per_row["reward"],
        "format": np.array([p.gate.s_fmt for p in proposed]),
        "grounded": np.array([p.gate.grounded for p in proposed], np.float64),
        "gain": np.where(passed_B, per_row["gain"], np.nan),
        "gain_positive": np.where(passed_B, per_row["gain"] > 0, np.nan),
    }
    record = {}
    for name, column_B in columns.items():
        record[f"proposer/{name}"] = _mean(column_B)
        for hops in np.unique(hops_B):
            record[f"proposer/{name}_hop{hops}"] = _mean(column_B[hops_B == hops])
    for c, name in enumerate(context_names(valid_BC.shape[1] - 4)):
        record[f"proposer/loglik_{name}"] = _mean(per_row["loglik_BC"][:, c][valid_BC[:, c]])
    record |= {
        "proposer/valid": float(passed_B.mean()),
        "proposer/answer_in_source": _mean([answer_in_source(p.chain, atlas) for p in several]),
    } | finish_metrics("proposer", episodes)
    return record | update_metrics("proposer", values)


def solver_metrics(
    tasks: Sequence[Task],
    episodes: Trajectories,
    outcomes: Sequence[Outcome],
    reward_B: np.ndarray,
    values: Mapping[str, Any],
) -> dict[str, float]:
    """Metrics of one solver step; of the update only where there was one."""
    group = len(outcomes[0].y_G)
    hops_B = np.repeat([t.hops for t in tasks], group)
    y_B = np.concatenate([o.y_G for o in outcomes])
    searches_B = np.asarray(episodes.searches_N)
    kinds = [group_kind(o.y_G) for o in outcomes]
    record = {
        "solver/reward": float(reward_B.mean()),
        "solver/em": float(y_B.mean()),
        "solver/searches": float(searches_B.mean()),
        "solver/valid": float(np.concatenate([o.answered_G for o in outcomes]).mean()),
        "solver/zero_search": _mean(searches_B[hops_B > 1] == 0),
    } | finish_metrics("solver", episodes)
    asked_B = np.asarray(episodes.asked_N)
    record["solver/queries"] = float(asked_B.mean())
    record["solver/duplicate_queries"] = _mean(
        np.asarray(episodes.duplicates_N)[asked_B > 0] / asked_B[asked_B > 0]
    )
    for kind in ("mixed", "all_right", "all_wrong"):
        record[f"solver/groups_{kind}"] = float(np.mean([k == kind for k in kinds]))
    for hops in np.unique(hops_B):
        of_B = hops_B == hops
        record[f"solver/em_hop{hops}"] = float(y_B[of_B].mean())
        record[f"solver/searches_hop{hops}"] = float(searches_B[of_B].mean())
    return record | update_metrics("solver", values)


def finish_metrics(role: str, episodes: Trajectories) -> dict[str, float]:
    """Why the episodes of a step ended, as shares of them."""
    finish_N = np.asarray(episodes.finish_N)
    shares = {reason: float(np.mean(finish_N == reason)) for reason in Finish}
    return {
        f"{role}/hit_limit": shares[Finish.TOO_LONG] + shares[Finish.OUT_OF_TURNS],
        f"{role}/finish_too_long": shares[Finish.TOO_LONG],
        f"{role}/finish_out_of_turns": shares[Finish.OUT_OF_TURNS],
        f"{role}/finish_invalid": shares[Finish.INVALID],
        f"{role}/finish_no_answer": shares[Finish.NO_ANSWER],
        f"{role}/corrections": float(np.mean(episodes.corrections_N)),
    }


def rollout_metrics(role: str, counters: Mapping[str, float]) -> dict[str, float]:
    """How well the slots of a step's rollouts were used (`Engine.counters`)."""
    names = ("slot_utilisation", "slot_waiting", "decode_steps", "prefilled")
    return {f"{role}/{name}": counters[name] for name in names}


def update_metrics(role: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The update's own metrics under their public names."""
    names = {"kl_to_sampler": "kl"}
    return {f"{role}/{names.get(name, name)}": float(value) for name, value in values.items()}


def proposal_traces(
    proposed: Sequence[Proposal],
    per_row: Mapping[str, np.ndarray],
    valid_BC: np.ndarray,
    atlas: Atlas,
) -> list[dict[str, Any]]:
    """Readable proposals: chain, question, likelihoods and parts of the reward."""
    names = context_names(valid_BC.shape[1] - 4)
    traces = []
    for b, p in enumerate(proposed):
        parts = {"format": p.gate.s_fmt, "advantage": float(per_row["advantage"][b])}
        if p.gate.passed:
            parts["gain"] = float(per_row["gain"][b])
        traces.append(
            {
                "kind": "proposal",
                "label": p.gate.reason or "passed the gates",
                "chain": chain_words(p.chain, atlas),
                "question": p.parsed.question,
                "answer": p.parsed.answer,
                "hops": p.chain.hops,
                "reward": float(per_row["reward"][b]),
                "reward_parts": parts,
                "log_likelihoods": {
                    name: float(per_row["loglik_BC"][b, c])
                    for c, name in enumerate(names)
                    if valid_BC[b, c]
                },
                "text": p.output,
            }
        )
    return traces


def episode_traces(
    tasks: Sequence[Task],
    episodes: Trajectories,
    answers: Sequence[str | None],
    outcomes: Sequence[Outcome],
    sampler: Sampler,
) -> list[dict[str, Any]]:
    """One readable episode of each hop count among the tasks."""
    group = len(outcomes[0].y_G)
    texts = sampler.texts(episodes)
    first = {task.hops: g for g, task in reversed(list(enumerate(tasks)))}
    return [
        {
            "kind": "solver",
            "label": f"{int(outcomes[g].y_G.sum())} of {group} rollouts right",
            "question": tasks[g].question,
            "golden_answers": list(tasks[g].answers),
            "answer": answers[g * group],
            "em": int(outcomes[g].y_G[0]),
            "hops": hops,
            "text": texts[g * group],
        }
        for hops, g in sorted(first.items())
    ]


def _mean(values: Any) -> float:
    values = np.asarray(values, np.float64)
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else float("nan")
