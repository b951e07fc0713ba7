"""Drawing tokens: temperature, top-k, top-p, min-p, and the log-probabilities that go with a draw.

No sort over the vocabulary. A truncation keeps the tokens above a probability, which is found by
bisection over the bits of a float32 (31 passes over the probabilities, exact); a token is found by
its block first and within the block then.

Shape letters: S slots, V vocabulary, B blocks, W tokens of a block.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

_BLOCK = 512


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draws:
    """Where the randomness of a rollout comes from.

    Attributes:
      key: a typed random key; token `position` of episode `n` uses
        fold_in(fold_in(key, n), position).
      temperature: of the softmax; 0 takes the most probable token (log-probabilities are then those
        at temperature 1).
      stream_N: numbers that stand for the episodes' own in the key, uint32 [N], so that an episode
        is drawn alike in whatever call and place it is; None for the episodes' own.
    """

    key: jax.Array
    temperature: jax.Array
    stream_N: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Truncation:
    """Which tokens may be drawn at all; applied in this order, each on what the one before left.

    Attributes:
      top_k: the k most probable; 0 for all.
      top_p: the fewest of the most probable that hold this mass; 1 for all.
      min_p: those at least this share as probable as the most probable; 0 for all.

    Tokens exactly as probable as the last one that is kept are kept too.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        if self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p < 1:
            raise ValueError(
                f"a truncation needs top_k >= 0, 0 < top_p <= 1 and 0 <= min_p < 1, not {self}"
            )

    @property
    def keeps_all(self) -> bool:
        return self == Truncation()


def sample(
    logits_SV: jax.Array,
    draws: Draws,
    episode_S: jax.Array,
    position_S: jax.Array,
    truncation: Truncation = Truncation(),  # noqa: B008 (frozen)
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token per slot, by inversion of the cumulative distribution.

    Token t is drawn where cumsum(p)[t-1] <= u < cumsum(p)[t], u uniform from the key of this
    episode and position. One uniform number a token, so a draw does not depend on the slot or on
    what other slots do.

    Returns:
      The tokens [S] int32; their log-probabilities under the softmax at the temperature, which is
      what a trainer computes anew; and those under the truncated distribution that they were drawn
      from (the same numbers where nothing is truncated). Float32, nats.
    """
    greedy = draws.temperature <= 0
    scaled_SV = logits_SV / jnp.where(greedy, 1.0, draws.temperature)

    def uniform(episode: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(draws.key, episode), position)
        return jax.random.uniform(key)

    if draws.stream_N is not None:  # idle slots point past the end, where the last one is read
        episode_S = draws.stream_N[jnp.minimum(episode_S, len(draws.stream_N) - 1)]
    u_S = jax.vmap(uniform)(episode_S, position_S)
    if truncation.keeps_all:
        token_S, logp_S = _draw_any(scaled_SV, u_S, greedy)
        return token_S, logp_S, logp_S
    logp_SV = jax.nn.log_softmax(scaled_SV, axis=-1)
    drawn_S, mass_S = invert(truncate(jnp.exp(logp_SV), truncation), u_S)
    token_S = jnp.where(greedy, jnp.argmax(logits_SV, axis=-1), drawn_S).astype(jnp.int32)
    logp_S = jnp.take_along_axis(logp_SV, token_S[:, None], axis=1)[:, 0]
    return token_S, logp_S, jnp.where(greedy, logp_S, logp_S - jnp.log(mass_S))


def _draw_any(
    scaled_SV: jax.Array, u_S: jax.Array, greedy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A token of the whole softmax, or the most probable, and its log-probability.

    The logits are read for their highest value and their mass by block; all else is about one
    number a block, and then about one block.
    """
    S, V = scaled_SV.shape
    W = next((w for w in range(_BLOCK, _BLOCK // 8, -1) if V % w == 0), min(V, _BLOCK))
    blocks = -(-V // W)
    padding = ((0, 0), (0, blocks * W - V))
    scaled_SBW = jnp.pad(scaled_SV, padding, constant_values=-jnp.inf).reshape(S, blocks, W)
    high_SB = jnp.max(scaled_SBW, axis=2)
    high_S = jnp.max(high_SB, axis=1)
    sum_SB = jnp.sum(jnp.exp(scaled_SBW - high_S[:, None, None]), axis=2)
    block_S, before_S, whole_S = _pick(sum_SB, u_S)
    block_S = jnp.where(greedy, jnp.argmax(high_SB, axis=1), block_S)
    at_SW = block_S[:, None] * W + jnp.arange(W)
    row_SW = jnp.take_along_axis(scaled_SV, jnp.minimum(at_SW, V - 1), axis=1)
    row_SW = jnp.where(at_SW < V, row_SW, -jnp.inf)
    weight_SW = jnp.exp(row_SW - high_S[:, None])
    drawn_S = _first_above(jnp.cumsum(weight_SW, axis=1), weight_SW, u_S * whole_S - before_S)
    place_S = jnp.where(greedy, jnp.argmax(row_SW, axis=1), drawn_S)
    picked_S = jnp.take_along_axis(row_SW, place_S[:, None], axis=1)[:, 0]
    token_S = (block_S * W + place_S).astype(jnp.int32)
    return token_S, picked_S - high_S - jnp.log(whole_S)


def truncate(probability_SV: jax.Array, truncation: Truncation) -> jax.Array:
    """The probabilities that a truncation keeps, 0 in place of the others (not renormalised)."""
    p_SV = probability_SV
    if truncation.top_k and truncation.top_k < p_SV.shape[1]:

        def many(t_S: jax.Array) -> jax.Array:
            return jnp.sum(probability_SV >= t_S[:, None], axis=1) >= truncation.top_k

        p_SV = jnp.where(p_SV >= _largest(many, len(p_SV))[:, None], p_SV, 0.0)
    if truncation.top_p < 1:
        some_SV = p_SV
        wanted_S = truncation.top_p * jnp.sum(some_SV, axis=1)

        def enough(t_S: jax.Array) -> jax.Array:
            kept_SV = jnp.where(some_SV >= t_S[:, None], some_SV, 0.0)
            return jnp.sum(kept_SV, axis=1) >= wanted_S

        p_SV = jnp.where(some_SV >= _largest(enough, len(p_SV))[:, None], some_SV, 0.0)
    if truncation.min_p:
        least_S = truncation.min_p * jnp.max(p_SV, axis=1)
        p_SV = jnp.where(p_SV >= least_S[:, None], p_SV, 0.0)
    return p_SV


def _largest(enough: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """The largest float32 in [0, 1] for which `enough` holds, row by row, [rows]; it must hold at 0
    and never again once it fails."""
    # Floats that are not negative are ordered as their bits are.
    low_S = jnp.zeros(rows, jnp.int32)
    high_S = jnp.full(rows, 0x3F800001, jnp.int32)  # just above 1.0

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_S, high_S = ends
        middle_S = low_S + (high_S - low_S) // 2
        holds_S = enough(jax.lax.bitcast_convert_type(middle_S, jnp.float32))
        return jnp.where(holds_S, middle_S, low_S), jnp.where(holds_S, high_S, middle_S)

    low_S, _ = jax.lax.fori_loop(0, 31, halve, (low_S, high_S))
    return jax.lax.bitcast_convert_type(low_S, jnp.float32)


def invert(weight_SV: jax.Array, u_S: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first token whose cumulated weight exceeds u times the whole, and the whole, [S] each.

    Args:
      weight_SV: non-negative weights, not all 0.
      u_S: in [0, 1).

    Returns:
      Token numbers, never one of weight 0; and the sums of the weights.
    """
    S, V = weight_SV.shape
    blocks = -(-V // _BLOCK)
    weight_SBW = jnp.pad(weight_SV, ((0, 0), (0, blocks * _BLOCK - V))).reshape(S, blocks, _BLOCK)
    block_S, before_S, whole_S = _pick(jnp.sum(weight_SBW, axis=2), u_S)
    weight_SW = jnp.take_along_axis(weight_SBW, block_S[:, None, None], axis=1)[:, 0]
    end_SW = jnp.cumsum(weight_SW, axis=1)
    return block_S * _BLOCK + _first_above(end_SW, weight_SW, u_S * whole_S - before_S), whole_S


def _pick(sum_SB: jax.Array, u_S: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The block in which the cumulated weight exceeds u times the whole, the weight before it, and
    the whole, [S] each."""
    end_SB = jnp.cumsum(sum_SB, axis=1)
    whole_S = end_SB[:, -1]
    block_S = _first_above(end_SB, sum_SB, u_S * whole_S)
    before_S = jnp.take_along_axis(end_SB - sum_SB, block_S[:, None], axis=1)[:, 0]
    return block_S, before_S, whole_S


def _first_above(end_SX: jax.Array, weight_SX: jax.Array, target_S: jax.Array) -> jax.Array:
    """The first place of positive weight whose end exceeds the target; the last such where rounding
    leaves none; 0 where no weight is a number, so that whoever looks at the numbers can tell."""
    place_X = jnp.arange(end_SX.shape[1])
    there_SX = weight_SX > 0
    first_S = jnp.argmax(there_SX & (end_SX > target_S[:, None]), axis=1)
    last_S = jnp.max(jnp.where(there_SX, place_X, 0), axis=1)
    above_S = jnp.any(there_SX & (end_SX > target_S[:, None]), axis=1)
    return jnp.where(above_S, first_S, last_S)
