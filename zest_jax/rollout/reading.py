"""What a sampled token does to its episode: opens a tag, completes an action, ends it, or nothing.

Shape letters: S slots, L episode length, V vocabulary, T searches, U queries, X automaton states,
A actions, W tokens looked back.
"""

import dataclasses

import jax
import jax.numpy as jnp

from zest_jax.rollout import json_strings, stops
from zest_jax.rollout.protocols import ANSWER, SEARCH, Protocol
from zest_jax.rollout.state import DONE, INVALID, READING, SEARCHING, RolloutSpec, State
from zest_jax.rollout.stops import StopTable
from zest_jax.rollout.trajectories import Finish

TAG_WINDOW = 16  # tokens looked back for the start of a closing tag (no tag has more bytes)


@dataclasses.dataclass(frozen=True)
class Grammar:
    """A protocol in a tokenizer's ids.

    Attributes:
      protocol: tags, effects and texts.
      eos_ids: tokens that end a turn without a tag (then the action is none).
      correction_ids: the protocol's correction, tokenised; empty where it says nothing.
    """

    protocol: Protocol
    eos_ids: tuple[int, ...]
    correction_ids: tuple[int, ...] = ()


def read_token(
    grammar: Grammar,
    spec: RolloutSpec,
    table: StopTable,
    state: State,
    token_S: jax.Array,
    writing_S: jax.Array,
) -> State:
    """What the token just written does: opens a tag, completes an action, or nothing.

    An action that is a call is read later (`read_calls`), once for all slots that wait.
    """
    protocol = grammar.protocol
    rows, q_S = state.rows, state.automaton_S
    length_S, kinds_A = rows.length_N, jnp.arange(1, len(protocol.actions) + 1)
    opened_S, closed_S = table.opened_XV[q_S, token_S], table.closed_XV[q_S, token_S]

    # The content begins in this token if bytes follow the tag in it, else with the next.
    tail_S = table.open_tail_XV[q_S, token_S].astype(jnp.int32)
    begin_S = length_S - (tail_S > 0)
    first_SA = (opened_S[:, None] == kinds_A) & (state.opened_SA < 0) & writing_S[:, None]
    opened_SA = jnp.where(first_SA, begin_S[:, None], state.opened_SA)
    skip_SA = state.skip_SA
    if protocol.call is not None:
        skip_S = jnp.where(tail_S > 0, table.bytes_V[token_S] - tail_S, 0)
        skip_SA = jnp.where(first_SA, skip_S[:, None], skip_SA)

    # The content ends before the tokens that lie wholly within the closing tag and what
    # follows.
    back_SW = length_S[:, None] - 1 - jnp.arange(TAG_WINDOW)
    window_SW = jnp.take_along_axis(rows.ids_NL, jnp.maximum(back_SW, 0), axis=1)
    covered_SW = jnp.cumsum(table.bytes_V[window_SW], axis=1)
    span_S = table.close_span_XV[q_S, token_S]
    end_S = length_S - jnp.sum(covered_SW <= span_S[:, None], axis=1)

    begin_S = jnp.take_along_axis(opened_SA, jnp.maximum(closed_S - 1, 0)[:, None], axis=1)[:, 0]
    complete_S = writing_S & (closed_S != stops.NONE) & (begin_S >= 0)
    stopped_S = jnp.isin(token_S, jnp.array(grammar.eos_ids, jnp.int32))
    full_S = state.written_S >= spec.action_length
    if spec.response_length:
        full_S |= length_S - rows.prompt_length_N >= spec.response_length
    ended_S = (closed_S != stops.NONE) | stopped_S | full_S
    is_search_S = complete_S & (closed_S == protocol.kind(SEARCH))
    is_answer_S = complete_S & (closed_S == protocol.kind(ANSWER))
    may_search_S = state.turn_S < spec.searches
    search_S = is_search_S & may_search_S
    none_S = writing_S & ended_S & ~complete_S
    # A correction takes a turn, as a search does, so that there are only so many.
    corrected_S = none_S & may_search_S & (protocol.correction is not None)
    no_action = jnp.select(
        [closed_S != stops.NONE, stopped_S],
        [Finish.INVALID, Finish.NO_ANSWER],
        Finish.TOO_LONG,
    )

    finish_S = jnp.select(
        [is_answer_S, is_search_S & ~may_search_S, none_S & ~corrected_S],
        [Finish.ANSWERED, Finish.OUT_OF_TURNS, no_action],
        Finish.UNFINISHED,
    )
    phase_S = jnp.select(
        [search_S, corrected_S, finish_S != Finish.UNFINISHED],
        [SEARCHING if protocol.call is None else READING, INVALID, DONE],
        state.phase_S,
    )
    span_S2 = jnp.stack([begin_S, jnp.maximum(end_S, begin_S)], axis=1)
    rows = dataclasses.replace(
        rows,
        answer_N2=jnp.where(is_answer_S[:, None], span_S2, rows.answer_N2),
        corrections_N=rows.corrections_N + corrected_S,
        finish_N=jnp.where(writing_S, finish_S, rows.finish_N),
    )
    if protocol.call is None:
        slot_S, T = jnp.arange(spec.slots), rows.asked_NT.shape[1]
        at_S = jnp.where(search_S, rows.searches_N, T)
        rows = dataclasses.replace(
            rows,
            queries_NTU2=rows.queries_NTU2.at[slot_S, at_S, 0].set(span_S2, mode="drop"),
            asked_NT=rows.asked_NT.at[slot_S, at_S].set(1, mode="drop"),
            searches_N=rows.searches_N + search_S,
        )
    return dataclasses.replace(
        state,
        rows=rows,
        phase_S=phase_S,
        automaton_S=jnp.where(writing_S, table.next_XV[q_S, token_S], q_S).astype(jnp.int32),
        opened_SA=opened_SA,
        skip_SA=skip_SA,
    )


def read_calls(grammar: Grammar, spec: RolloutSpec, table: StopTable, state: State) -> State:
    """Cuts the queries out of the calls that slots have completed.

    A slot with a good call searches now; one with a bad call is corrected or done, or searches for
    nothing, as the protocol says. Changes nothing in protocols without calls.
    """
    protocol = grammar.protocol
    if protocol.call is None:
        return state
    rows, reading_S = state.rows, state.phase_S == READING
    kind = protocol.kind(SEARCH) - 1
    calls = json_strings.read_calls(
        json_strings.build_tables(protocol.call, protocol.closing[kind]),
        table,
        rows.ids_NL,
        state.opened_SA[:, kind],
        state.skip_SA[:, kind],
        rows.length_N,
        reading_S,
        spec.queries,
    )
    search_S = reading_S if not protocol.call.strict else calls.valid_S
    none_S = reading_S & ~search_S
    corrected_S = none_S & (protocol.correction is not None)
    slot_S, T = jnp.arange(spec.slots), rows.asked_NT.shape[1]
    at_S = jnp.where(search_S, rows.searches_N, T)
    rows = dataclasses.replace(
        rows,
        queries_NTU2=rows.queries_NTU2.at[slot_S, at_S].set(calls.span_SU2, mode="drop"),
        asked_NT=rows.asked_NT.at[slot_S, at_S].set(calls.count_S, mode="drop"),
        searches_N=rows.searches_N + search_S,
        corrections_N=rows.corrections_N + corrected_S,
        finish_N=jnp.where(none_S & ~corrected_S, Finish.INVALID, rows.finish_N),
    )
    phase_S = jnp.select([search_S, corrected_S, none_S], [SEARCHING, INVALID, DONE], state.phase_S)
    return dataclasses.replace(state, rows=rows, phase_S=phase_S)
