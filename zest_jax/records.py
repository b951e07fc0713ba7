"""What a step leaves for people: metrics by name (WORKSPACE.md lists them).

Shape letters: B proposals or rollouts, C contexts.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zest_jax.rewards.information_gain import context_names
from zest_jax.rewards.outcome import Outcome, group_kind
from zest_jax.rewards.terms import Signals
from zest_jax.rollout.trajectories import Finish, Trajectories
from zest_jax.tasks.gates import leaks_answer
from zest_jax.tasks.gating import GATES, Judged, Means
from zest_jax.tasks.proposals import answer_in_source
from zest_jax.tasks.question_quality import Oracle
from zest_jax.tasks.seeds import Proposal
from zest_jax.tasks.types import Task

# Mean probability of an answer's tokens (geometric) above which a context counts as enough.
ANSWERABLE = 0.5


def proposer_metrics(
    proposed: Sequence[Proposal],
    episodes: Trajectories,
    values: Mapping[str, Any],
    per_row: Mapping[str, np.ndarray],
    signals: Signals,
) -> dict[str, float]:
    """Metrics of one proposer step; means over nothing are not a number."""
    hops_B, valid_BC = np.asarray(signals.hops_B), np.asarray(signals.valid_BC)
    passed_B = np.asarray(signals.passed_B)
    scored_B = passed_B & valid_BC.any(axis=1)
    several = [p for p in proposed if p.seed.hops > 1 and p.passed]
    columns: dict[str, np.ndarray] = {
        "reward": per_row["reward"],
        "format": np.array([p.format for p in proposed]),
        "grounded": np.array([_grounded(p) for p in proposed], np.float64),
        "leakage": np.array([_leaks(p) for p in proposed], np.float64),
        "gain": np.where(scored_B, per_row["gain"], np.nan),
        "gain_positive": np.where(scored_B, per_row["gain"] > 0, np.nan),
        "difficulty": np.where(signals.probed_B, signals.difficulty_B, np.nan),
        "searches": np.asarray(episodes.searches_N, np.float64),
    }
    columns |= {name: value for name, value in per_row.items() if name.startswith("term_")}
    record = {}
    for name, column_B in columns.items():
        record[f"proposer/{name}"] = _mean(column_B)
        for hops in np.unique(hops_B):
            record[f"proposer/{name}_hop{hops}"] = _mean(column_B[hops_B == hops])
    for c, name in enumerate(context_names(valid_BC.shape[1] - 4)):
        scored = per_row["loglik_BC"][:, c][valid_BC[:, c]]
        record[f"proposer/loglik_{name}"] = _mean(scored)
        record[f"proposer/answerable_{name}"] = _mean(np.exp(scored) > ANSWERABLE)
    questions = [p.written.question for p in proposed if p.passed]
    multi_B = hops_B > 1
    record |= {
        "proposer/valid": float(passed_B.mean()),
        "proposer/answer_in_source": _mean([answer_in_source(p.written) for p in several]),
        "proposer/duplicates": 1 - len(set(questions)) / len(questions) if questions else np.nan,
        "proposer/zero_search": _mean(np.asarray(episodes.searches_N)[multi_B] == 0),
    } | finish_metrics("proposer", episodes)
    for reason, count in collections.Counter(p.reason for p in proposed if p.reason).items():
        record[f"proposer/refused_{reason.replace(' ', '_')}"] = count / len(proposed)
    # A frozen proposer has no update that would have counted them.
    unread = int((~np.isfinite(per_row["loglik_BC"]) & valid_BC).sum())
    return record | update_metrics("proposer", {"not_finite_loglik": unread, **values})


def _grounded(proposal: Proposal) -> float:
    """Whether the answer stands in the evidence; not a number where there is no answer."""
    if not proposal.written.answers:
        return np.nan
    judged = Judged(proposal.written, proposal.format, dict(proposal.format_parts))
    return float(bool(GATES.find("grounded_beyond_source")([judged], Means(None))[0]))


def _leaks(proposal: Proposal) -> float:
    """Whether a name of the answer stands in the question; not a number without a question."""
    question = proposal.written.question
    return np.nan if question is None else float(leaks_answer(question, proposal.written.answers))


def truth_metrics(
    proposed: Sequence[Proposal], oracle: Oracle, right: Mapping[int, float]
) -> dict[str, float]:
    """How true the labels of accepted questions are, and whether a solver's success says so.

    Self-labelled loops can raise agreement and lower truth: both are told from the first step.

    Args:
      proposed: of the step.
      oracle: reads questions back by the world's facts.
      right: share of right answers of each proposal that a solver was asked, by its index.
    """
    true = {
        i: oracle.hops(p.written.question or "", p.written.answers) > 0
        for i, p in enumerate(proposed)
        if p.passed
    }
    agree = [(share > 0.5) == true[i] for i, share in right.items() if i in true]
    return {
        "proposer/true_label": _mean(list(true.values())),
        "proposer/probe_agreement": _mean(agree),
    }


def generation_metrics(
    proposed: Sequence[Proposal], tasks: Sequence[Task], duplicates: int
) -> dict[str, float]:
    """Metrics of an iteration's generated questions."""
    several = [t for t in tasks if t.hops > 1]
    return {
        "generate/accepted": float(np.mean([p.passed for p in proposed])),
        "generate/duplicates": duplicates / len(proposed),
        "generate/tasks": float(len(tasks)),
        "generate/answer_in_source": _mean([t.meta["answer_in_source"] for t in several]),
        "generate/leakage": _mean([_leaks(p) for p in proposed]),
    }


def solver_metrics(
    tasks: Sequence[Task],
    episodes: Trajectories,
    outcomes: Sequence[Outcome],
    reward_B: np.ndarray,
) -> dict[str, float]:
    """Metrics of one solver step but for its update."""
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
    return record


def finish_metrics(role: str, episodes: Trajectories) -> dict[str, float]:
    """How long the episodes of a step are (tokens that the policy wrote), and why they ended, as
    shares of them."""
    finish_N = np.asarray(episodes.finish_N)
    shares = {reason: float(np.mean(finish_N == reason)) for reason in Finish}
    return {
        f"{role}/length": float(np.asarray(episodes.mask_NL).sum(axis=1).mean()),
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
    """The update's own metrics under their public names; counts of what was not finite only where
    there was any."""
    names = {"kl_to_sampler": "kl"}
    return {
        f"{role}/{names.get(name, name)}": float(value)
        for name, value in values.items()
        if value != 0 or not name.startswith("not_finite")
    }


def _mean(values: Any) -> float:
    values = np.asarray(values, np.float64)
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else float("nan")
