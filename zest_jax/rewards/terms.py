"""A proposer's reward: a weighted sum of named terms, as a config's group `reward.weights` says.

    R = sum_t w_t * term_t + 1[refused] * invalid

Terms are functions of arrays, so that the whole reward runs inside the jitted proposer step,
after the likelihoods. Each term decides itself for which proposals it is paid.

Dr. Free is {format: 0.2, information_gain: 1}, Dr. Zero {format: 0.5, difficulty: 1}, SSP and
ZEST-Search {difficulty: 1} with different curves.

Shape letters: B proposals, C contexts.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zest_jax.registry import Registry
from zest_jax.rewards.information_gain import information_gain, squash


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Signals:
    """What a proposer's reward may look at.

    Attributes:
      format_B: format score s_fmt in [0, 1]. float32 [B].
      passed_B: the proposal passed all gates. bool [B].
      hops_B: hops asked for, the group of HRPO. int32 [B].
      probed_B: a solver was asked. bool [B].
      difficulty_B: the curve's value at its success; anything where nobody was asked. float32 [B].
      valid_BC: contexts that have a likelihood, columns as in `information_gain`. bool [B, C].
      more: further columns [B] by name, for terms of your own.
    """

    format_B: Any
    passed_B: Any
    hops_B: Any
    probed_B: Any
    difficulty_B: Any
    valid_BC: Any
    more: dict[str, Any] = dataclasses.field(default_factory=dict)


# signals, log-likelihoods [B, C] (zeros where nothing needs them), the config's group `reward`.
Term = Callable[[Signals, jax.Array, Any], jax.Array]

TERMS: Registry[Term] = Registry("reward term", "reward.weights")

# Terms whose log-likelihoods, or whose solver rollouts, have to be computed first.
NEEDS_LIKELIHOOD = {"information_gain"}
NEEDS_DIFFICULTY = {"difficulty"}


@TERMS.register("format")
def format_term(signals: Signals, loglik_BC: jax.Array, options: Any) -> jax.Array:
    """s_fmt, whether or not the proposal passed."""
    return signals.format_B


@TERMS.register("difficulty")
def difficulty_term(signals: Signals, loglik_BC: jax.Array, options: Any) -> jax.Array:
    """The curve `reward.difficulty` at the solver's success, where a solver was asked."""
    return jnp.where(signals.passed_B & signals.probed_B, signals.difficulty_B, 0.0)


@TERMS.register("information_gain")
def information_gain_term(signals: Signals, loglik_BC: jax.Array, options: Any) -> jax.Array:
    """R_IG of the margin of the full evidence over its shortcuts, where the gates were passed."""
    gain_B = gains(signals, loglik_BC, options)
    return jnp.where(signals.passed_B, squash(gain_B, options.tau, options.squash), 0.0)


def gains(signals: Signals, loglik_BC: jax.Array, options: Any) -> jax.Array:
    """The margin itself, nats per answer token; 0 where a context is missing. [B]."""
    return information_gain(
        loglik_BC, signals.hops_B, signals.valid_BC, without=tuple(options.without)
    )


def weights_of(options: Any) -> dict[str, float]:
    """The terms that count: name -> weight, without those of weight 0.

    Raises:
      UserError: there is no term of a name.
    """
    named = {name: float(weight) for name, weight in options.weights.items()}
    for name in named:
        TERMS.find(name)
    return {name: weight for name, weight in named.items() if weight}


def needs(options: Any, kind: set[str]) -> bool:
    """Whether a term that counts is one of `kind`."""
    return any(name in kind for name in weights_of(options))


def proposer_reward(
    signals: Signals, loglik_BC: jax.Array, options: Any
) -> Mapping[str, jax.Array]:
    """The reward and its parts; jittable.

    Args:
      signals: what is known of the proposals.
      loglik_BC: log-likelihood of the answer under each context, nats per token. [B, C].
      options: the config's group `reward`.

    Returns:
      `reward`, `gain`, and `term_NAME` (weighted) for each term that counts. [B] each.
    """
    parts = {
        f"term_{name}": weight * TERMS.find(name)(signals, loglik_BC, options)
        for name, weight in weights_of(options).items()
    }
    refused_B = jnp.where(signals.passed_B, 0.0, options.invalid)
    total_B = sum(parts.values(), refused_B)
    return {"reward": total_B, "gain": gains(signals, loglik_BC, options)} | parts
