"""One advantage estimator; GRPO, HRPO and REINFORCE are settings of it.

Shape letters: B batch (one row per rollout or proposal).

What differs between the methods is only which rows are compared with one another:

* GRPO: rows of one prompt. A rollout is judged against the other answers to its own question.
* HRPO: rows of one hop count. One question per chain is enough, since a proposal is judged against
  all proposals of the same hop count in the batch.

So the group is *data* (an integer key per row), and the estimator is one function.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Baseline = Literal["mean", "none"]
Singleton = Literal["zero", "raw"]
GroupKey = Literal["prompt", "hop", "role", "batch"]


def group_advantages(
    reward_B: Float[Array, " B"],
    group_B: Int[Array, " B"],
    *,
    baseline: Baseline = "mean",
    std: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
    eps_inside: bool = False,
    singleton: Singleton = "zero",
    post_scale_B: Float[Array, " B"] | None = None,
    valid_B: Bool[Array, " B"] | None = None,
) -> Float[Array, " B"]:
    r"""Advantage of each row among the valid rows that share its group key.

    .. math::
        A_i = s_i \, \frac{r_i - b_g}{\sigma_g + \epsilon}
        \qquad\text{or}\qquad
        A_i = s_i \, \frac{r_i - b_g}{\sqrt{\sigma_g^2 + \epsilon}}

    with :math:`b_g` the group's mean reward (or 0) and
    :math:`\sigma_g^2 = \sum_{j \in g} (r_j - \bar r_g)^2 / (n_g - \mathrm{ddof})`.

    Two properties that plain arithmetic would break:

    * A group whose rewards are all equal gives exactly 0. The rounding error of the mean, divided
      by ``eps``, would otherwise be a small random advantage.
    * Rows outside ``valid_B`` give 0 and count in no statistic, whatever their reward holds (NaN
      included). They are the padding of a batch, or proposals that never got a reward.

    Groups cross devices: the arrays may be sharded over a mesh with automatic axes. Over explicit
    axes they must be handed in replicated, since keys are sorted.

    Args:
        reward_B: scalar reward per row, any unit.
        group_B: integer key per row. Any values; the number of groups may change between calls
            without a new trace.
        baseline: ``"mean"`` subtracts the group mean, ``"none"`` subtracts nothing (REINFORCE).
        std: divide by the group's standard deviation. Without it: Dr. GRPO.
        ddof: 1 is the sample deviation (as in the published codes), 0 the population deviation.
        eps: keeps the denominator away from 0; in units of the reward outside the root, of its
            square inside.
        eps_inside: True is ``sqrt(var + eps)`` (the HRPO paper), False ``std + eps`` (its code,
            and GRPO).
        singleton: a group of one has no spread and no peers. ``"raw"`` gives its reward (published
            codes: mean 0, std 1), ``"zero"`` gives 0, which is safer where a rare hop count
            may come alone. Without baseline and std nothing is undefined and the rule is unused.
        post_scale_B: multiplier applied *after* normalisation, constant in a group (EviBack's
            lambda): any factor on the reward itself is divided out again by the deviation.
        valid_B: False marks rows to leave out.

    Returns:
        Advantages, without gradient.

    Source: GRPO, Shao et al. 2024; HRPO, Dr. Zero and Dr. Free;
    scale after normalisation, EviBack.
    """
    if reward_B.ndim != 1 or group_B.shape != reward_B.shape:
        raise ValueError(f"expected two [B] arrays, got {reward_B.shape} and {group_B.shape}")
    if baseline not in ("mean", "none") or singleton not in ("zero", "raw"):
        raise ValueError(f"unknown baseline {baseline!r} or singleton rule {singleton!r}")
    size = reward_B.shape[0]
    if valid_B is None:
        valid_B = jnp.ones(size, bool)
    reward_B = jnp.where(valid_B, reward_B, 0.0).astype(jnp.float32)

    # Any keys -> 0..B-1, so that one compiled program serves every number of groups.
    _, row_group_B = jnp.unique(group_B, return_inverse=True, size=size)

    def total(value_B: Array) -> Array:
        """Sum over the row's group, handed back to each of its rows."""
        return jax.ops.segment_sum(value_B, row_group_B, num_segments=size)[row_group_B]

    weight_B = valid_B.astype(jnp.float32)
    count_B = total(weight_B)
    mean_B = total(reward_B) / jnp.maximum(count_B, 1.0)
    deviation_B = (reward_B - mean_B) * weight_B
    variance_B = total(jnp.square(deviation_B)) / jnp.maximum(count_B - ddof, 1.0)

    highest_B = _group_extreme(jax.ops.segment_max, reward_B, -jnp.inf, valid_B, row_group_B)
    lowest_B = _group_extreme(jax.ops.segment_min, reward_B, jnp.inf, valid_B, row_group_B)
    flat_B = highest_B == lowest_B
    variance_B = jnp.where(flat_B, 0.0, variance_B)

    advantage_B = reward_B
    if baseline == "mean":
        advantage_B = jnp.where(flat_B, 0.0, deviation_B)
    if std:
        spread_B = jnp.sqrt(variance_B + eps) if eps_inside else jnp.sqrt(variance_B) + eps
        advantage_B = advantage_B / spread_B
    if baseline == "mean" or std:
        alone_B = reward_B if singleton == "raw" else jnp.zeros_like(reward_B)
        advantage_B = jnp.where(count_B == 1.0, alone_B, advantage_B)
    if post_scale_B is not None:
        # A scale may hold anything where the row is left out, NaN too.
        advantage_B = advantage_B * jnp.where(valid_B, post_scale_B, 0.0)
    return jax.lax.stop_gradient(jnp.where(valid_B, advantage_B, 0.0))


def _group_extreme(segment_reduce, reward_B, neutral, valid_B, row_group_B):
    value_B = jnp.where(valid_B, reward_B, neutral)
    return segment_reduce(value_B, row_group_B, num_segments=reward_B.shape[0])[row_group_B]


@dataclasses.dataclass(frozen=True)
class AdvantageSpec:
    """A named setting of ``group_advantages``: hashable, so it may be static in a jitted step.

    Attributes:
        group: what the integer keys of a batch stand for. The caller makes the keys; this field
            says which: ``prompt`` the task, ``hop`` its hop count, ``role`` proposer or solver
            (times the kind of task), ``batch`` one key for all rows.
        baseline, std, ddof, eps, eps_inside, singleton: see ``group_advantages``.
    """

    group: GroupKey
    baseline: Baseline = "mean"
    std: bool = True
    ddof: int = 1
    eps: float = 1e-6
    eps_inside: bool = False
    singleton: Singleton = "zero"

    def __call__(
        self,
        reward_B: Float[Array, " B"],
        group_B: Int[Array, " B"],
        post_scale_B: Float[Array, " B"] | None = None,
        valid_B: Bool[Array, " B"] | None = None,
    ) -> Float[Array, " B"]:
        """Advantages of a batch whose keys mean ``self.group``."""
        return group_advantages(
            reward_B,
            group_B,
            baseline=self.baseline,
            std=self.std,
            ddof=self.ddof,
            eps=self.eps,
            eps_inside=self.eps_inside,
            singleton=self.singleton,
            post_scale_B=post_scale_B,
            valid_B=valid_B,
        )


GRPO = AdvantageSpec(group="prompt")
"""Group-relative policy optimisation: ``(r - mean) / (std + eps)`` among answers to one prompt."""

HRPO = AdvantageSpec(group="hop")
"""Hop-grouped relative policy optimisation: the same among all proposals with one hop count.

``dataclasses.replace(HRPO, eps_inside=True)`` is the formula printed in the Dr. Zero paper;
``singleton="raw"`` is its code.
"""

REINFORCE = AdvantageSpec(group="batch", baseline="none", std=False)
"""The reward itself: no baseline, no scale (SSP's proposer)."""
