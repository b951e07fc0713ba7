r"""Losses as pure functions of per-token log-probabilities.

Shape letters: B batch, L length.

**Why one explicit normaliser.** Every function here returns ``sum over loss tokens / normaliser``,
where the normaliser is the number of loss tokens of the *whole* optimiser step, over all
micro-batches and devices, known before the first of them runs. The step's loss is then a plain sum

.. math:: \frac{1}{N} \sum_{\text{all tokens}} \ell_t
          = \sum_{\text{micro-batches}} \frac{1}{N} \sum_{t \in \text{micro-batch}} \ell_t ,

so gradients of micro-batches *add up* to the gradient of the full batch, however the rows are cut.
Dividing each micro-batch by its own token count instead, and averaging, weighs a token by how
empty the rest of its micro-batch happens to be. The metrics are divided the same way: they add up
too, and their sum over micro-batches is the mean over all loss tokens.

Masked positions (prompt, retrieved passages, padding) may hold any number, NaN included: they give
neither value nor gradient.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

KlKind = Literal["low_var_kl", "k1", "k2"]
TokenMask = Bool[Array, "B L"] | Num[Array, "B L"]
Normaliser = int | float | Num[Array, ""]
Width = float | Float[Array, ""]

# exp() of more is of no use: such a token is far outside any trust region (published codes: 20).
_MAX_LOG_RATIO = 20.0
# Largest penalty of one token in the low-variance estimator (published codes).
_MAX_LOW_VAR_KL = 10.0


def token_mean(
    value_BL: Float[Array, "B L"], mask_BL: TokenMask, normaliser: Normaliser
) -> Float[Array, ""]:
    """``sum(value * mask) / normaliser``: the share of this micro-batch in the global mean.

    An entropy bonus is ``-coefficient * token_mean(entropy_BL, mask_BL, normaliser)``.
    """
    _same_shape(value_BL, mask_BL)
    return jnp.where(mask_BL != 0, value_BL, 0.0).sum(dtype=jnp.float32) / normaliser


def cross_entropy(
    logp_BL: Float[Array, "B L"], mask_BL: TokenMask, normaliser: Normaliser
) -> Float[Array, ""]:
    """Behaviour cloning: mean negative log-probability of the target tokens, in nats per token.

    Args:
        logp_BL: log-probability of each target token under the policy.
        mask_BL: 1 at tokens to learn.
        normaliser: number of loss tokens of the whole optimiser step.
    """
    return -token_mean(logp_BL, mask_BL, normaliser)


def policy_gradient_loss(
    logp_new_BL: Float[Array, "B L"],
    logp_old_BL: Float[Array, "B L"],
    advantage_B: Float[Array, " B"] | Float[Array, "B L"],
    mask_BL: TokenMask,
    normaliser: Normaliser,
    clip_low: Width = 0.2,
    clip_high: Width = 0.2,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    r"""Clipped policy gradient (PPO's surrogate, used by GRPO and HRPO), averaged over tokens.

    .. math::
        \rho_t = \exp(\log\pi_{new}(a_t) - \log\pi_{old}(a_t)), \qquad
        L = -\frac{1}{N} \sum_t
            \min\bigl(\rho_t A_t,\; \mathrm{clip}(\rho_t, 1-c_{low}, 1+c_{high})\, A_t\bigr)

    Where the sampler's policy is the trained one (one update per batch) all ratios are 1 and the
    gradient is that of REINFORCE, :math:`-A_t \nabla \log\pi(a_t)`.

    Args:
        logp_new_BL: log-probabilities under the policy being trained; the gradient flows here.
        logp_old_BL: log-probabilities written down by the sampler.
        advantage_B: one advantage per row, or one per token as ``[B, L]``.
        mask_BL: 1 at tokens that the policy itself produced.
        normaliser: number of loss tokens of the whole optimiser step.
        clip_low, clip_high: width of the trust region below and above 1 (unequal: DAPO's
            "clip higher").

    Returns:
        The loss and metrics, each of which adds up over micro-batches:
        ``ratio`` mean of rho; ``clip_fraction`` share of tokens whose clipped term is the smaller
        (they have no gradient); ``kl_to_sampler`` the k3 estimate ``rho - 1 - log rho`` of
        KL(old || new), never negative; ``exp_abs_delta`` mean of ``exp(|log rho|)``, 1 where
        sampler and trainer agree exactly.

    Source: Schulman et al. 2017; GRPO, Shao et al. 2024; token-level mean, Yu et al. 2025.
    """
    _same_shape(logp_new_BL, logp_old_BL)
    _same_shape(logp_new_BL, mask_BL)
    if advantage_B.shape not in (logp_new_BL.shape, logp_new_BL.shape[:1]):
        raise ValueError(f"advantage {advantage_B.shape} fits not {logp_new_BL.shape}")
    advantage_BL = advantage_B if advantage_B.ndim == 2 else advantage_B[:, None]
    advantage_BL = jax.lax.stop_gradient(advantage_BL)

    log_ratio_BL = _log_ratio(logp_new_BL, jax.lax.stop_gradient(logp_old_BL), mask_BL)
    ratio_BL = jnp.exp(log_ratio_BL)
    free_BL = ratio_BL * advantage_BL
    clipped_BL = jnp.clip(ratio_BL, 1.0 - clip_low, 1.0 + clip_high) * advantage_BL
    loss = -token_mean(jnp.minimum(free_BL, clipped_BL), mask_BL, normaliser)

    metrics = {
        "ratio": ratio_BL,
        "clip_fraction": (clipped_BL < free_BL).astype(jnp.float32),
        "kl_to_sampler": _k3(log_ratio_BL),
        "exp_abs_delta": jnp.exp(jnp.abs(log_ratio_BL)),
    }
    metrics = {
        name: jax.lax.stop_gradient(token_mean(value_BL, mask_BL, normaliser))
        for name, value_BL in metrics.items()
    }
    return loss, metrics


def kl_penalty(
    logp_new_BL: Float[Array, "B L"],
    logp_reference_BL: Float[Array, "B L"],
    mask_BL: TokenMask,
    normaliser: Normaliser,
    kind: KlKind = "low_var_kl",
) -> Float[Array, ""]:
    r"""Estimate of KL(new || reference) from tokens of the policy, in nats per token.

    With :math:`d = \log\pi_{ref} - \log\pi_{new}`:

    * ``"low_var_kl"`` (k3): :math:`e^{d} - d - 1`, unbiased and never negative; the choice of
      Search-R1 and GRPO. A token's value is capped at 10, beyond which it has no gradient.
    * ``"k1"``: :math:`-d`, unbiased and noisy. To *watch* only: as a loss its gradient
      is that of the log-probability and has mean 0.
    * ``"k2"``: :math:`d^2 / 2`, biased as a value, with the KL's own gradient.

    Args:
        logp_new_BL: under the policy being trained; the gradient flows here.
        logp_reference_BL: under the frozen reference.
        mask_BL: 1 at tokens that the policy itself produced.
        normaliser: number of loss tokens of the whole optimiser step.
        kind: the estimator.

    Source: Schulman, "Approximating KL divergence", 2020; caps as in Search-R1.
    """
    _same_shape(logp_new_BL, logp_reference_BL)
    delta_BL = -_log_ratio(logp_new_BL, jax.lax.stop_gradient(logp_reference_BL), mask_BL)
    if kind == "low_var_kl":
        value_BL = jnp.minimum(_k3(delta_BL), _MAX_LOW_VAR_KL)
    elif kind == "k1":
        value_BL = -delta_BL
    elif kind == "k2":
        value_BL = jnp.square(delta_BL) / 2.0
    else:
        raise ValueError(f"unknown kind of KL penalty {kind!r}")
    return token_mean(value_BL, mask_BL, normaliser)


def _log_ratio(logp_new_BL: Array, logp_other_BL: Array, mask_BL: TokenMask) -> Array:
    """``log(new / other)`` at loss tokens, exactly 0 elsewhere: padding must not reach ``exp``."""
    difference_BL = jnp.where(mask_BL != 0, logp_new_BL - logp_other_BL, 0.0)
    return jnp.clip(difference_BL, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def _k3(log_r_BL: Array) -> Array:
    """``r - 1 - log r >= 0``; ``expm1`` keeps the digits where r is 1 up to rounding."""
    return jnp.expm1(log_r_BL) - log_r_BL


def _same_shape(one: Array, other: Array) -> None:
    if one.ndim != 2 or one.shape != other.shape:
        raise ValueError(f"expected two [B, L] arrays, got {one.shape} and {other.shape}")
