"""Teacher-forced log-probabilities: of sampled tokens (for the loss) and of answers (for the
reward).

One function of a packed batch serves both. The head is applied at the listed targets only.

Shape letters: M micro-batches, R rows, L row length, X targets per row, V vocabulary, D width,
B proposals, C contexts.
"""

import dataclasses

import jax
import jax.numpy as jnp

from zest_jax.learning.head import head_log_probs
from zest_jax.learning.packing import Packed
from zest_jax.models import Policy, PolicyConfig, bind
from zest_jax.models.policy import Params
from zest_jax.parallel.sharding import keep_rows_split


def target_log_probs(
    policy: Policy, micro: Packed, *, temperature: float = 1.0, remat: str = "none"
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy of each target of one micro-batch, in nats.

    Args:
      policy: the policy.
      micro: a `Packed` without its leading axis.
      temperature: of the softmax; the sampler's, so that both speak of the same distribution.
      remat: see `Policy`.

    Returns:
      log pi(target) [R, X] and the distribution's entropy [R, X], both float32; what stands at
      padding is of no use.
    """
    hidden_RLD = policy(
        micro.ids_MRL,
        micro.position_MRL,
        micro.segment_MRL,
        most_segments=micro.segments,
        remat=remat,
    )
    hidden_RXD = jnp.take_along_axis(hidden_RLD, micro.at_MRX[..., None], axis=1)
    tied = policy.config.tied
    weight = policy.embed_VD[...] if tied else policy.head_DV[...]
    return head_log_probs(
        keep_rows_split(hidden_RXD), weight, micro.target_MRX, tied=tied, temperature=temperature
    )


def sequence_log_likelihood(
    config: PolicyConfig, params: Params, packed: Packed, sequences: int
) -> jax.Array:
    """Length-normalised log-likelihood of every sequence's targets, in nats per token.

    l(A | q, c) = (1 / |A|) * sum_t log pi(a_t | q, c, a_<t)    (Dr. Free)

    Args:
      config: shape of the policy (the frozen anchor).
      params: its parameters.
      packed: sequences of context, question and answer, with the answer's tokens as targets.
      sequences: how many there are; a sequence's `owner` is its number.

    Returns:
      [sequences] float32; 0 where a sequence has no target.
    """
    policy = bind(config, params)

    def add(i, totals):
        micro = jax.tree.map(lambda x: x[i], as_rows(packed))
        logp_RX, _ = target_log_probs(policy, micro)
        weight_RX = micro.mask_MRX.astype(jnp.float32)
        owner = micro.owner_MRX.reshape(-1)
        return (
            totals[0].at[owner].add((logp_RX * weight_RX).reshape(-1)),
            totals[1].at[owner].add(weight_RX.reshape(-1)),
        )

    zeros = jnp.zeros(sequences)
    total, count = jax.lax.fori_loop(0, packed.micro_batches, add, (zeros, zeros))
    return total / jnp.maximum(count, 1.0)


def as_rows(packed: Packed) -> Packed:
    """The batch with a per-micro-batch copy of its scalar, so that every leaf can be indexed."""
    count = jnp.broadcast_to(packed.micro_batches, packed.ids_MRL.shape[:1])
    return dataclasses.replace(packed, micro_batches=count)
