"""The jitted updates: behaviour cloning, the solver's step, and the whole proposer step.

Each takes a train state and a packed batch, adds up gradients over the micro-batches that hold
anything, and applies one optimiser step. Losses are normalised by the loss tokens of the whole
step, so neither packing nor accumulation nor data parallelism changes the result.

What is trained is the whole policy, or, with `frozen` given, its adapters: gradients and moments
are then of those alone, and no gradient of a frozen matrix is computed.

An update whose loss, gradient norm or log-probabilities are not all finite is made by nobody: the
state comes back as it was, and the metrics say why (`not_finite_*` count log-probabilities). The
choice between old and new is part of the same elementwise pass that writes the new state over the
donated one.

Shape letters: B rollouts or proposals, C contexts, R rows, X targets per row.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zest_jax.learning.likelihood import as_rows, sequence_log_likelihood, target_log_probs
from zest_jax.learning.losses import (
    KlKind,
    cross_entropy,
    kl_penalty,
    policy_gradient_loss,
    token_mean,
)
from zest_jax.learning.moments import Adam8BitState, adamw_8bit
from zest_jax.learning.packing import Array, Packed
from zest_jax.models import PolicyConfig, bind
from zest_jax.models.lora import join
from zest_jax.models.policy import Params
from zest_jax.parallel.sharding import keep_placed

Metrics = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What an update changes, and what a checkpoint holds of a role.

    Attributes:
      params: float32 master weights of what is trained: a whole policy, or its adapters.
      opt_state: the optimiser's moments and counts.
      step: updates made.
    """

    params: Params
    opt_state: Any
    step: jax.Array


@dataclasses.dataclass(frozen=True)
class UpdateSpec:
    """How a role is updated; static in the compiled step.

    Attributes:
      learning_rate: peak.
      warmup_steps: steps from 0 to the peak.
      total_steps: steps over which a cosine falls to `final_scale` of the peak; 0 holds the peak.
      final_scale: see `total_steps`.
      b1: decay of Adam's first moment.
      b2: decay of Adam's second moment.
      weight_decay: decoupled, on matrices only.
      max_grad_norm: gradients are scaled down to this global norm.
      clip_low: policy-gradient ratio clip below 1.
      clip_high: policy-gradient ratio clip above 1.
      temperature: of the sampler's softmax.
      remat: what the backward pass keeps, see `Policy`.
      moments: how Adam's moments are stored, "float32" or "int8" (see `moments`).
      kl_weight: weight of the KL penalty toward a frozen reference; 0 leaves it out.
      kl_kind: its estimator, see `losses.kl_penalty`.
    """

    learning_rate: float
    warmup_steps: int = 0
    total_steps: int = 0
    final_scale: float = 0.1
    b1: float = 0.9
    b2: float = 0.98
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    temperature: float = 1.0
    remat: str = "none"
    moments: str = "float32"
    kl_weight: float = 0.0
    kl_kind: KlKind = "low_var_kl"

    def optimizer(self) -> optax.GradientTransformation:
        """Clipping, then AdamW on the schedule."""
        if self.total_steps:
            rate = optax.warmup_cosine_decay_schedule(
                0.0 if self.warmup_steps else self.learning_rate,
                self.learning_rate,
                self.warmup_steps,
                max(self.total_steps, self.warmup_steps + 1),
                self.learning_rate * self.final_scale,
            )
        elif self.warmup_steps:
            rate = optax.linear_schedule(0.0, self.learning_rate, self.warmup_steps)
        else:
            rate = optax.constant_schedule(self.learning_rate)
        adamw = {"float32": optax.adamw, "int8": adamw_8bit}[self.moments]
        return optax.chain(
            optax.clip_by_global_norm(self.max_grad_norm),
            adamw(
                rate,
                b1=self.b1,
                b2=self.b2,
                weight_decay=self.weight_decay,
                mask=_matrices,
            ),
        )

    def init(self, params: Params) -> TrainState:
        """A fresh optimiser around a copy of the parameters (updates donate theirs)."""
        params = jax.tree.map(jnp.copy, params)
        return TrainState(params, self.optimizer().init(params), jnp.zeros((), jnp.int32))


def cloning_update(
    config: PolicyConfig,
    spec: UpdateSpec,
    state: TrainState,
    batch: Packed,
    frozen: Params | None = None,
) -> tuple[TrainState, Metrics]:
    """One step of behaviour cloning: the mean of -log pi(target) over all targets.

    `frozen` is as in `policy_update`.
    """
    return _step(config, spec, state, batch, _cloning_loss(spec, batch), frozen)


def policy_update(
    config: PolicyConfig,
    spec: UpdateSpec,
    state: TrainState,
    batch: Packed,
    advantage_B: jax.Array,
    frozen: Params | None = None,
    reference: Params | None = None,
) -> tuple[TrainState, Metrics]:
    """One clipped policy-gradient step (GRPO's and HRPO's alike: they differ in the advantages).

    With `spec.kl_weight`, the loss has the KL penalty toward `reference` beside it.

    Args:
      config: shape of the policy.
      spec: how to update.
      state: donated by the caller's jit.
      batch: sampled sequences; a target's owner is its row in `advantage_B`.
      advantage_B: advantage of each sequence.
      frozen: parameters that the policy has beside the state's and that stay as they are, of any
        type; never donated, since roles share them.
      reference: what the KL penalty pulls toward (its adapters where `frozen` is given).

    Returns:
      The new state and metrics (loss, ratio, clip_fraction, kl_to_sampler, exp_abs_delta, entropy,
      grad_norm, kl_to_reference where it is penalised, and counts of log-probabilities that are no
      numbers: `not_finite_logp` of the policy's own, `not_finite_sampler_logp` of the batch's).

    Raises:
      ValueError: a weight without a reference.
    """
    loss = _policy_loss(config, spec, batch, advantage_B, frozen, reference)
    return _step(config, spec, state, batch, loss, frozen)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ProposalBatch:
    """Everything the host supplies to a proposer step: tokens, and what the reward looks at.

    Attributes:
      proposals: the sampled proposals; owners are rows of the arrays below.
      contexts: answer sequences under each context, owner b * C + c; None where the reward looks
        at no likelihood.
      signals: a pytree of arrays for the reward (`rewards.terms.Signals`), with `valid_BC`.
      group_B: key of each proposal's group (its hop count for HRPO).
      reward_order_B: rewards are taken in this order; the identity, but for the shuffled control.
    """

    proposals: Packed
    contexts: Packed | None
    signals: Any
    group_B: Array
    reward_order_B: Array


def proposer_score(
    anchor_config: PolicyConfig,
    advantage: Callable[[jax.Array, jax.Array], jax.Array],
    reward: Callable[[Any, jax.Array], Mapping[str, jax.Array]],
    anchor_params: Params,
    batch: ProposalBatch,
    frozen: Params | None = None,
) -> dict[str, jax.Array]:
    """Likelihoods of all contexts, reward and advantage of a batch of proposals.

    Args: see `proposer_update`.

    Returns:
      Per proposal: `loglik_BC`, `advantage`, and whatever `reward` gave.
    """
    B, C = batch.signals.valid_BC.shape
    if batch.contexts is None:
        loglik_BC = jnp.zeros((B, C), jnp.float32)
    else:
        loglik_BC = sequence_log_likelihood(
            anchor_config, join(frozen, anchor_params), batch.contexts, B * C
        ).reshape(B, C)
    parts = dict(reward(batch.signals, loglik_BC))
    advantage_B = advantage(parts["reward"][batch.reward_order_B], batch.group_B)
    return parts | {"loglik_BC": loglik_BC, "advantage": advantage_B}


def proposer_update(
    config: PolicyConfig,
    anchor_config: PolicyConfig,
    spec: UpdateSpec,
    advantage: Callable[[jax.Array, jax.Array], jax.Array],
    reward: Callable[[Any, jax.Array], Mapping[str, jax.Array]],
    state: TrainState,
    anchor_params: Params,
    batch: ProposalBatch,
    frozen: Params | None = None,
    reference: Params | None = None,
    anchor_frozen: Params | None = None,
) -> tuple[TrainState, Metrics, dict[str, jax.Array]]:
    """Likelihoods of all contexts, reward, advantage and update, in one program.

    Args:
      config: shape of the proposer.
      anchor_config: shape of the frozen anchor.
      spec: how to update.
      advantage: the estimator, of rewards and group keys; Dr. Zero's and Dr. Free's is HRPO.
      reward: from the signals and likelihoods [B, C] to a dict of [B] arrays with at least
        `reward`.
      state: the proposer, donated by the caller's jit.
      anchor_params: the frozen anchor; its adapters where `anchor_frozen` is given.
      batch: what the host supplies.
      frozen: of the proposer, see `policy_update`.
      reference: see `policy_update`.
      anchor_frozen: what the anchor has beside its adapters; the same arrays as `frozen` where
        proposer and anchor began as one policy.

    Returns:
      The new state, the update's metrics (`not_finite_loglik` counts likelihoods that are no
      numbers), and what `proposer_score` gives.
    """
    per_row = proposer_score(anchor_config, advantage, reward, anchor_params, batch, anchor_frozen)
    # A bounded gain would make a finite reward of a likelihood that is none.
    unread_BC = ~jnp.isfinite(per_row["loglik_BC"]) & batch.signals.valid_BC
    unread = {"not_finite_loglik": jnp.sum(unread_BC, dtype=jnp.float32)}
    loss = _policy_loss(config, spec, batch.proposals, per_row["advantage"], frozen, reference)
    state, metrics = _step(config, spec, state, batch.proposals, loss, frozen, unread)
    return state, metrics, per_row


Loss = Callable[[Any, Packed], tuple[jax.Array, Metrics]]


def policy_gradients(
    config: PolicyConfig,
    spec: UpdateSpec,
    params: Params,
    batch: Packed,
    advantage_B: jax.Array,
    frozen: Params | None = None,
    reference: Params | None = None,
) -> tuple[Metrics, Params]:
    """Metrics and gradients of `policy_update`, without making it."""
    loss = _policy_loss(config, spec, batch, advantage_B, frozen, reference)
    return _gradients(config, params, batch, loss, frozen)


def cloning_gradients(
    config: PolicyConfig,
    spec: UpdateSpec,
    params: Params,
    batch: Packed,
    frozen: Params | None = None,
) -> tuple[Metrics, Params]:
    """Metrics and gradients of `cloning_update`, without making it."""
    return _gradients(config, params, batch, _cloning_loss(spec, batch), frozen)


def _cloning_loss(spec: UpdateSpec, batch: Packed) -> Loss:
    normaliser = _count(batch)

    def loss(policy: Any, micro: Packed) -> tuple[jax.Array, Metrics]:
        logp_RX, entropy_RX = target_log_probs(policy, micro, remat=spec.remat)
        return cross_entropy(logp_RX, micro.mask_MRX, normaliser), {
            "entropy": token_mean(entropy_RX, micro.mask_MRX, normaliser),
            "not_finite_logp": _not_finite(logp_RX, micro.mask_MRX),
        }

    return loss


def _policy_loss(
    config: PolicyConfig,
    spec: UpdateSpec,
    batch: Packed,
    advantage_B: jax.Array,
    frozen: Params | None,
    reference: Params | None,
) -> Loss:
    normaliser = _count(batch)
    if spec.kl_weight and reference is None:
        raise ValueError("a KL penalty needs a reference to pull toward")

    def loss(policy: Any, micro: Packed) -> tuple[jax.Array, Metrics]:
        logp_RX, entropy_RX = target_log_probs(
            policy, micro, temperature=spec.temperature, remat=spec.remat
        )
        value, metrics = policy_gradient_loss(
            logp_RX,
            micro.logp_MRX,
            advantage_B[micro.owner_MRX],
            micro.mask_MRX,
            normaliser,
            spec.clip_low,
            spec.clip_high,
        )
        if reference is not None and spec.kl_weight:
            anchored, _ = target_log_probs(
                bind(config, join(frozen, reference)), micro, temperature=spec.temperature
            )
            kl = kl_penalty(logp_RX, anchored, micro.mask_MRX, normaliser, spec.kl_kind)
            value += spec.kl_weight * kl
            metrics = metrics | {"kl_to_reference": jax.lax.stop_gradient(kl)}
        return value, metrics | {
            "entropy": token_mean(entropy_RX, micro.mask_MRX, normaliser),
            # Ratios are bounded, so that an infinite log-probability would leave the loss finite.
            "not_finite_logp": _not_finite(logp_RX, micro.mask_MRX),
            "not_finite_sampler_logp": _not_finite(micro.logp_MRX, micro.mask_MRX),
        }

    return loss


def _step(
    config: PolicyConfig,
    spec: UpdateSpec,
    state: TrainState,
    batch: Packed,
    loss: Loss,
    frozen: Params | None,
    unread: Metrics | None = None,
) -> tuple[TrainState, Metrics]:
    """One optimiser step, where loss and gradient norm are finite and no `not_finite_*` of the
    metrics (`unread` among them) counts anything; else the state as it is."""
    metrics, grads = _gradients(config, state.params, batch, loss, frozen)
    metrics |= unread or {}
    sound = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    for name, value in metrics.items():
        if name.startswith("not_finite"):
            sound &= value == 0
    updates, opt_state = spec.optimizer().update(
        grads, state.opt_state, state.params, applies=sound
    )
    params = optax.apply_updates(state.params, updates)
    new = TrainState(params, opt_state, state.step + 1)
    return keep_placed(_chosen(sound, new, state)), metrics


def _chosen(sound: jax.Array, new: TrainState, old: TrainState) -> TrainState:
    """The new state where the update is sound, else the old one."""

    def one(new: Any, old: Any) -> Any:
        # 8-bit moments choose for themselves, a layer at a time: chosen here, a second copy of
        # them would have to wait for the end of their loop.
        return new if isinstance(new, Adam8BitState) else jnp.where(sound, new, old)

    return jax.tree.map(one, new, old, is_leaf=lambda x: isinstance(x, Adam8BitState))


def _gradients(
    config: PolicyConfig, params: Params, batch: Packed, loss: Loss, frozen: Params | None
) -> tuple[Metrics, Params]:
    """Metrics (with `loss` and `grad_norm`) and gradients, added up over the micro-batches."""

    def value(params: Params, micro: Packed) -> tuple[jax.Array, Metrics]:
        return loss(bind(config, join(frozen, params)), micro)

    value_and_grad = jax.value_and_grad(value, has_aux=True)
    rows = as_rows(batch)
    micro_0 = jax.tree.map(lambda x: x[0], rows)
    if len(batch.ids_MRL) == 1:  # nothing to add up: no loop and no second copy of the gradient
        total = value_and_grad(params, micro_0)
    else:

        def add(i: jax.Array, total: Any) -> Any:
            micro = jax.tree.map(lambda x: x[i], rows)
            return jax.tree.map(jnp.add, total, value_and_grad(params, micro))

        shapes = jax.eval_shape(value_and_grad, params, micro_0)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        total = jax.lax.fori_loop(0, batch.micro_batches, add, zeros)
    (value_sum, metrics), grads = total
    return metrics | {"loss": value_sum, "grad_norm": optax.tree.norm(grads)}, grads


def _not_finite(value_RX: jax.Array, mask_RX: jax.Array) -> jax.Array:
    """How many values at targets are no numbers; counts add up over micro-batches."""
    return jnp.sum(~jnp.isfinite(value_RX) & (mask_RX != 0), dtype=jnp.float32)


def _matrices(params: Params) -> Any:
    """True for matrices, False for norms and biases (whose stacked layers have two axes as
    well)."""

    def is_matrix(path: tuple[Any, ...], _: Any) -> bool:
        name = str(getattr(path[-1], "key", path[-1]))
        return "norm" not in name and "bias" not in name

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def _count(batch: Packed) -> jax.Array:
    """Loss tokens of the whole step, at least 1."""
    return jnp.maximum(jnp.sum(batch.mask_MRX, dtype=jnp.float32), 1.0)
