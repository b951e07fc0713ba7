"""What a sampled token does to its episode: opens a tag, completes an action, ends it, or nothing.

Shape letters: S slots, L episode length, V vocabulary, T searches, X automaton states, A actions,
W tokens looked back.
"""

import dataclasses

import jax
import jax.numpy as jnp

from zest_jax.rollout import stops
from zest_jax.rollout.protocols import ANSWER, SEARCH, Protocol
from zest_jax.rollout.state import DONE, INVALID, SEARCHING, RolloutSpec, State
from zest_jax.rollout.stops import StopTable
from zest_jax.rollout.trajectories import Finish

TAG_WINDOW = 16  # tokens looked back for the start of a closing tag (no tag has more bytes)


@dataclasses.dataclass(frozen=True)
class Grammar:
    """A protocol in a tokenizer's ids.

    Attributes:
      protocol: tags, effects and texts.
      eos_ids: tokens that end a turn without a tag (then the action is none).
      correction_ids: the protocol's correction, tokenised; empty where there is none.
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
    """What the token just written does: opens a tag, completes an action, or nothing."""
    protocol = grammar.protocol
    rows, q_S = state.rows, state.automaton_S
    length_S, kinds_A = rows.length_N, jnp.arange(1, len(protocol.actions) + 1)
    opened_S, closed_S = table.opened_XV[q_S, token_S], table.closed_XV[q_S, token_S]

    # The content begins in this token if bytes follow the tag in it, else with the next.
    begin_S = length_S - (table.open_tail_XV[q_S, token_S] > 0)
    first_SA = (opened_S[:, None] == kinds_A) & (state.opened_SA < 0) & writing_S[:, None]
    opened_SA = jnp.where(first_SA, begin_S[:, None], state.opened_SA)

    # The content ends before the tokens that lie wholly within the closing tag and what
    # follows.
    back_SW = length_S[:, None] - 1 - jnp.arange(TAG_WINDOW)
    window_SW = jnp.take_along_axis(rows.ids_NL, jnp.maximum(back_SW, 0), axis=1)
    covered_SW = jnp.cumsum(table.bytes_V[window_SW], axis=1)
    span_S = table.close_span_XV[q_S, token_S]
    end_S = length_S - jnp.sum(covered_SW <= span_S[:, None], axis=1)

    begin_S = jnp.take_along_axis(opened_SA, jnp.maximum(closed_S - 1, 0)[:, None], axis=1)[:, 0]
    complete_S = writing_S & (closed_S != stops.NONE) & (begin_S >= 0)
    ended_S = (
        (closed_S != stops.NONE)
        | jnp.isin(token_S, jnp.array(grammar.eos_ids, jnp.int32))
        | (state.written_S >= spec.action_length)
    )
    is_search_S = complete_S & (closed_S == protocol.kind(SEARCH))
    is_answer_S = complete_S & (closed_S == protocol.kind(ANSWER))
    may_search_S = state.turn_S < spec.searches
    search_S = is_search_S & may_search_S
    none_S = writing_S & ended_S & ~complete_S
    corrected_S = none_S & may_search_S & bool(grammar.correction_ids)

    finish_S = jnp.select(
        [is_answer_S, is_search_S & ~may_search_S, none_S & ~corrected_S],
        [Finish.ANSWERED, Finish.OUT_OF_TURNS, Finish.INVALID],
        Finish.UNFINISHED,
    )
    phase_S = jnp.select(
        [search_S, corrected_S, finish_S != Finish.UNFINISHED],
        [SEARCHING, INVALID, DONE],
        state.phase_S,
    )
    span_S2 = jnp.stack([begin_S, jnp.maximum(end_S, begin_S)], axis=1)
    slot_S = jnp.arange(spec.slots)
    at_S = jnp.where(search_S, rows.searches_N, rows.queries_NT2.shape[1])
    rows = dataclasses.replace(
        rows,
        queries_NT2=rows.queries_NT2.at[slot_S, at_S].set(span_S2, mode="drop"),
        searches_N=rows.searches_N + search_S,
        answer_N2=jnp.where(is_answer_S[:, None], span_S2, rows.answer_N2),
        finish_N=jnp.where(writing_S, finish_S, rows.finish_N),
    )
    return dataclasses.replace(
        state,
        rows=rows,
        phase_S=phase_S,
        automaton_S=jnp.where(writing_S, table.next_XV[q_S, token_S], q_S).astype(jnp.int32),
        opened_SA=opened_SA,
    )
