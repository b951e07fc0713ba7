"""What is appended to the slots that wait, and what is noted about their searches.

Shape letters: S slots, T searches, U queries of a search, Q query length, R retrieved, C chunk,
L episode length.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zest_jax.rollout.reading import Grammar
from zest_jax.rollout.state import INVALID, SEARCHING, RolloutSpec, State
from zest_jax.rollout.trajectories import Role, Trajectories


class Observed(NamedTuple):
    """What a retriever says to the slots that search.

    Attributes:
      row_SUR: passages of each query, -1 where there is none.
      score_SUR: their scores.
      ids_SC: the observations' ids, as wide as it likes.
      length_S: their lengths.
    """

    row_SUR: jax.Array
    score_SUR: jax.Array
    ids_SC: jax.Array
    length_S: jax.Array


class Appended(NamedTuple):
    """New tokens of each slot.

    Attributes:
      ids_SC: the tokens.
      length_S: how many; 0 for slots that get none.
      role_S: who wrote them.
      full_S: slots whose episode ends because they have no room.
    """

    ids_SC: jax.Array
    length_S: jax.Array
    role_S: jax.Array
    full_S: jax.Array


def current_queries(spec: RolloutSpec, state: State) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Token ids [S, U, Q], lengths [S, U] and number [S] of the queries of the slots that search;
    no length and number for the others."""
    rows, searching_S = state.rows, state.phase_S == SEARCHING
    at_S = jnp.maximum(rows.searches_N - 1, 0)
    span_SU2 = jnp.take_along_axis(rows.queries_NTU2, at_S[:, None, None, None], axis=1)[:, 0]
    asked_S = jnp.take_along_axis(rows.asked_NT, at_S[:, None], axis=1)[:, 0]
    asked_S = jnp.where(searching_S, asked_S, 0)
    ids_SUQ, length_SU = _cut(spec, rows.ids_NL, span_SU2)
    there_SU = jnp.arange(spec.queries) < asked_S[:, None]
    return ids_SUQ, jnp.where(there_SU, length_SU, 0), asked_S


def note_searches(
    spec: RolloutSpec, state: State, observed: Observed, shown_S: jax.Array
) -> Trajectories:
    """Writes down what the slots that search have found, and which queries they repeat."""
    rows, searching_S = state.rows, state.phase_S == SEARCHING
    S, T = rows.asked_NT.shape
    slot_S, turn_S = jnp.arange(S), rows.searches_N - 1
    at_S = jnp.where(shown_S, turn_S, T)
    ids_SUQ, length_SU, asked_S = current_queries(spec, state)
    there_SU = jnp.arange(spec.queries) < asked_S[:, None]
    row_SUR = jnp.where(there_SU[..., None], observed.row_SUR, -1)
    # A server tells scores and no rows; where nothing was found the score is -inf.
    told_SUR = there_SU[..., None] & jnp.isfinite(observed.score_SUR)
    score_SUR = jnp.where(told_SUR, observed.score_SUR, 0.0)

    # Every query against those before it: of earlier searches, and of this one.
    U = spec.queries
    past_SXQ, past_length_SX = _cut(spec, rows.ids_NL, rows.queries_NTU2.reshape(S, T * U, 2))
    turn_X, place_X = jnp.arange(T * U) // U, jnp.arange(T * U) % U
    asked_SX = place_X < rows.asked_NT[:, turn_X]
    earlier_SUX = (turn_X < turn_S[:, None])[:, None] | (
        (turn_X == turn_S[:, None])[:, None] & (place_X < jnp.arange(U)[:, None])
    )
    inside_SUQ = jnp.arange(spec.query_length) < length_SU[..., None]
    alike_SUX = jnp.all(
        (ids_SUQ[:, :, None] == past_SXQ[:, None]) | ~inside_SUQ[:, :, None], axis=-1
    )
    alike_SUX &= length_SU[..., None] == past_length_SX[:, None]
    repeats_SU = jnp.any(alike_SUX & earlier_SUX & asked_SX[:, None], axis=-1) & there_SU
    return dataclasses.replace(
        rows,
        rows_NTUR=rows.rows_NTUR.at[slot_S, at_S].set(row_SUR, mode="drop"),
        scores_NTUR=rows.scores_NTUR.at[slot_S, at_S].set(score_SUR, mode="drop"),
        duplicates_N=rows.duplicates_N
        + jnp.where(searching_S, jnp.sum(repeats_SU, axis=1, dtype=jnp.int32), 0),
    )


def what_follows(
    grammar: Grammar,
    spec: RolloutSpec,
    state: State,
    observed: Observed | None,
) -> Appended:
    """The tokens that a search or an action that was none is followed by."""
    rows, C = state.rows, spec.chunk
    searching_S, invalid_S = state.phase_S == SEARCHING, state.phase_S == INVALID
    ids_SC = jnp.zeros((spec.slots, C), jnp.int32)
    length_S = jnp.zeros(spec.slots, jnp.int32)
    if observed is not None:
        ids_SC = jnp.where(searching_S[:, None], pad_to(observed.ids_SC, C), ids_SC)
        length_S = jnp.where(searching_S, observed.length_S, length_S)
    said = grammar.correction_ids
    if said:
        said_SC = jnp.broadcast_to(pad_to(jnp.array(said, jnp.int32)[None], C), ids_SC.shape)
        said_S = jnp.full(spec.slots, len(said), jnp.int32)
        if said[0] in grammar.eos_ids:
            # The policy may have ended its turn itself.
            last_S = rows.ids_NL[jnp.arange(spec.slots), jnp.maximum(rows.length_N - 1, 0)]
            ended_S = last_S == said[0]
            said_SC = jnp.where(ended_S[:, None], jnp.roll(said_SC, -1, axis=1), said_SC)
            said_S -= ended_S
        ids_SC = jnp.where(invalid_S[:, None], said_SC, ids_SC)
        length_S = jnp.where(invalid_S, said_S, length_S)
    full_S = jnp.zeros(spec.slots, bool)
    if spec.response_length:
        response_S = rows.length_N + length_S - rows.prompt_length_N
        full_S = (searching_S | invalid_S) & (response_S >= spec.response_length)
    role_S = jnp.where(searching_S, Role.TOOL, Role.INJECTED).astype(jnp.int8)
    return Appended(ids_SC, jnp.where(full_S, 0, length_S), role_S, full_S)


def pad_to(x_SC: jax.Array, width: int) -> jax.Array:
    """The last axis cut, or padded with zeros, to a width."""
    return jnp.pad(x_SC, ((0, 0), (0, max(0, width - x_SC.shape[1]))))[:, :width]


def _cut(spec: RolloutSpec, ids_SL: jax.Array, span_SX2: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Ids [S, X, Q] and lengths [S, X] of spans of tokens, as far as they are embedded."""
    S, X, _ = span_SX2.shape
    begin_SX = span_SX2[..., 0]
    at_SXQ = begin_SX[..., None] + jnp.arange(spec.query_length)
    at_SXQ = jnp.minimum(at_SXQ, ids_SL.shape[1] - 1)
    ids_SXQ = jnp.take_along_axis(ids_SL, at_SXQ.reshape(S, -1), axis=1)
    length_SX = jnp.clip(span_SX2[..., 1] - begin_SX, 0, spec.query_length)
    return ids_SXQ.reshape(S, X, spec.query_length), length_SX
