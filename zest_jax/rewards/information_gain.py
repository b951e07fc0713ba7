r"""Dr. Free's proposer reward: how much the full evidence beats every shortcut to the answer.

Shape letters: B batch (one row per proposal), C contexts, L length.

A frozen anchor model scores the answer of a question under several contexts. The contexts stand in
fixed columns, so that all proposals of a batch, whatever their hop count, form one array with a
validity mask, and everything below runs inside the jitted proposer step:

=========  ============================  =====================================
column     context c                     what a high likelihood gives away
=========  ============================  =====================================
FULL       all passages of the chain     (nothing: this is the intended way)
NONE       no passage                    the answer is known by heart
SOURCE     the seed passage alone        no search beyond the source is needed
ONE_SHOT   one retrieval with q          one search suffices
HOP_1+k-1  the passage of hop k alone    no composition is needed
=========  ============================  =====================================

Source: Dr. Free. Its displayed equations were not readable; what is reconstructed
is said where it stands.
"""

from collections.abc import Collection
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

FULL, NONE, SOURCE, ONE_SHOT, HOP_1 = range(5)

Shortcut = Literal["none", "source", "one_shot", "hop"]
SHORTCUTS: tuple[Shortcut, ...] = ("none", "source", "one_shot", "hop")
SquashForm = Literal["a", "b"]

TAU = 3.0
LAMBDA = 0.2


def context_names(hops: int) -> tuple[str, ...]:
    """Names of the columns for chains of at most ``hops`` hops: ``4 + hops`` of them."""
    return ("full", "none", "source", "one_shot", *(f"hop_{k}" for k in range(1, hops + 1)))


def answer_log_likelihood(
    logp_BL: Float[Array, "*B L"], mask_BL: Bool[Array, "*B L"] | Num[Array, "*B L"]
) -> Float[Array, "*B"]:
    r"""Length-normalised log-likelihood of the answer, in nats per token.

    .. math::
        \ell(A \mid q, c) = \frac{1}{|A|} \sum_{t=1}^{|A|} \log \pi_a(a_t \mid q, c, a_{<t})

    Args:
        logp_BL: log-probability of each token under the anchor; any leading axes.
        mask_BL: 1 at the tokens of A. Template, question and closing tag stay outside.

    Returns:
        One value per row; 0 for a row without answer tokens. Such rows are padding, and their
        column must be invalid in ``information_gain``.
    """
    answer_BL = mask_BL != 0
    total_B = jnp.where(answer_BL, logp_BL, 0.0).sum(-1, dtype=jnp.float32)
    return total_B / jnp.maximum(answer_BL.sum(-1), 1)


def shortcut_mask(
    hops_B: Int[Array, " B"],
    valid_BC: Bool[Array, "B C"],
    without: Collection[Shortcut] = (),
) -> Bool[Array, "B C"]:
    """Which columns form the shortcut set B of each proposal.

    One hop: NONE alone, whatever ``without`` says (there is nothing else to compare with). Several:
    NONE, SOURCE, ONE_SHOT and all HOP_k, as far as valid and not left out (a chain of h hops
    has h of them, a proposer that searches one for each search).

    Args:
        hops_B: hop count h of each chain, >= 1.
        valid_BC: columns that hold a likelihood.
        without: kinds of shortcut to leave out (the paper's ablation).
    """
    unknown = set(without) - set(SHORTCUTS)
    if unknown:
        raise ValueError(f"unknown shortcut kinds {sorted(unknown)}; choose from {SHORTCUTS}")
    if set(without) == set(SHORTCUTS):
        raise ValueError("without= leaves no shortcut to compare with")
    column_C = jnp.arange(valid_BC.shape[1])
    kept_C = column_C != FULL
    for name, kind_C in (
        ("none", column_C == NONE),
        ("source", column_C == SOURCE),
        ("one_shot", column_C == ONE_SHOT),
        ("hop", column_C >= HOP_1),
    ):
        if name in without:
            kept_C &= ~kind_C
    return valid_BC & jnp.where(hops_B[:, None] == 1, column_C[None] == NONE, kept_C[None])


def information_gain(
    loglik_BC: Float[Array, "B C"],
    hops_B: Int[Array, " B"],
    valid_BC: Bool[Array, "B C"],
    *,
    without: Collection[Shortcut] = (),
) -> Float[Array, " B"]:
    r"""Margin of the intended evidence over the strongest shortcut, in nats per answer token.

    .. math::
        \Delta = \ell(A \mid q, \mathrm{retrieve}(q)) - \ell(A \mid q, \varnothing)
        \quad (h = 1), \qquad
        \Delta = \ell(A \mid q, c_{full}) - \max_{c \in B} \ell(A \mid q, c) \quad (h > 1)

    .. math::
        B = \{\varnothing,\; c_{src},\; c_{1shot}\} \cup \{c_k : k = 1..h\}

    Args:
        loglik_BC: likelihoods in the columns of this module; unused ones may hold anything.
        hops_B: hop count of each chain.
        valid_BC: columns that hold a likelihood.
        without: see ``shortcut_mask``.

    Returns:
        Delta. It is 0 (no gain, no reward) where the evidence column is invalid or nothing is left
        to compare with: a margin over nothing would be paid for without being earned.
    """
    _check(loglik_BC, hops_B, valid_BC)
    compared_BC = shortcut_mask(hops_B, valid_BC, without)
    strongest_B = jnp.where(compared_BC, loglik_BC, -jnp.inf).max(1)
    one_hop_B = hops_B == 1
    evidence_B = jnp.where(one_hop_B, loglik_BC[:, ONE_SHOT], loglik_BC[:, FULL])
    usable_B = jnp.where(one_hop_B, valid_BC[:, ONE_SHOT], valid_BC[:, FULL])
    return jnp.where(usable_B & compared_BC.any(1), evidence_B - strongest_B, 0.0)


def strongest_shortcut(
    loglik_BC: Float[Array, "B C"],
    hops_B: Int[Array, " B"],
    valid_BC: Bool[Array, "B C"],
    *,
    without: Collection[Shortcut] = (),
) -> Int[Array, " B"]:
    """Column of the shortcut that sets Delta, for the log; -1 where there is none."""
    _check(loglik_BC, hops_B, valid_BC)
    compared_BC = shortcut_mask(hops_B, valid_BC, without)
    best_B = jnp.where(compared_BC, loglik_BC, -jnp.inf).argmax(1)
    return jnp.where(compared_BC.any(1), best_B, -1)


def squash(
    delta_B: Float[Array, "*B"], tau: float = TAU, form: SquashForm = "a"
) -> Float[Array, "*B"]:
    r"""The gain as a reward: positive part only, bounded by tau.

    .. math::
        (a)\; R_{IG} = \tau \tanh\frac{\max(0, \Delta)}{\tau}, \qquad
        (b)\; R_{IG} = \tau \tanh(\max(0, \Delta))

    The text says "tanh, bounded by tau = 3, only positive gains"; the equation was not readable and
    both forms fit. (a) has slope 1 at 0 and is a soft clip at 3 nats; (b) has slope 3 and is
    saturated at 2 nats. In a hop group the factor is divided out again: they differ in curvature
    and in weight relative to the format score.
    """
    gain_B = jnp.maximum(delta_B, 0.0)
    if form == "a":
        return tau * jnp.tanh(gain_B / tau)
    if form == "b":
        return tau * jnp.tanh(gain_B)
    raise ValueError(f"unknown form {form!r} of the squashed gain; choose a or b")


def dr_free_reward(
    format_B: Float[Array, " B"],
    grounded_B: Bool[Array, " B"],
    delta_B: Float[Array, " B"],
    lam: float = LAMBDA,
    tau: float = TAU,
    form: SquashForm = "a",
) -> Float[Array, " B"]:
    r"""Dr. Free's total proposer reward, in ``[0, lam + tau)``.

    .. math::
        R = \lambda s_{fmt} + \mathbf{1}[s_{fmt} = 1 \wedge grounded] \, R_{IG}

    Args:
        format_B: graded format score in [0, 1] (``format.dr_free_format``).
        grounded_B: the answer stands in an admissible supporting passage (``gates.grounded``).
        delta_B: information gain in nats per token; unused, whatever it holds, where the
            proposal fails the gate.
        lam: weight of the format score.
        tau, form: see ``squash``.
    """
    passed_B = (format_B >= 1.0) & grounded_B
    return lam * format_B + jnp.where(passed_B, squash(delta_B, tau, form), 0.0)


def _check(loglik_BC: Array, hops_B: Array, valid_BC: Array) -> None:
    if loglik_BC.ndim != 2 or loglik_BC.shape != valid_BC.shape or loglik_BC.shape[1] <= HOP_1:
        raise ValueError(
            f"expected two [B, C >= {HOP_1 + 1}] arrays, got {loglik_BC.shape}, {valid_BC.shape}"
        )
    if hops_B.shape != loglik_BC.shape[:1]:
        raise ValueError(f"expected hops of shape {loglik_BC.shape[:1]}, got {hops_B.shape}")
