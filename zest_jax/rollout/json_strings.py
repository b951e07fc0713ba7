"""Finding the query strings of a JSON call in the bytes of sampled tokens, on device.

A call is `{"name": "search", "arguments": {"query": "..."}}`, or with a list of strings. It is read
byte by byte with an automaton of JSON's grammar, from the opening tag's end through the closing
tag: one look-up a byte for all slots that have just completed a call, and for no other step of a
rollout. Brackets are kept on a stack of bits. What a query is, is found by where it stands: names
are matched by a trie while they are read. Escapes stay as they are written.

It accepts what `protocols.protocol.strings_of_call` accepts on the host, brackets nested up to
DEPTH deep.

Shape letters: S slots, L episode length, U queries, Q grammar states, K trie nodes, V vocabulary,
W bytes of a token.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zest_jax.rollout.protocols import Call
from zest_jax.rollout.stops import StopTable

DEPTH = 24

# What a byte does beside moving the grammar on.
_NOTHING, _OPEN, _CLOSE, _OPEN_KEY, _CLOSE_KEY, _OBJECT, _ARRAY, _POP, _SCALAR = range(9)
_TOP, _IN_OBJECT, _IN_ARRAY = range(3)  # what the innermost open bracket is
_NAME, _ARGUMENT, _TOOL, _QUERY = 1, 2, 4, 8  # what a string may be, as bits
_BAD, _VALUE = 0, 1

_SPACE = b" \t\n\r"
_DIGITS = b"0123456789"
_HEX = b"0123456789abcdefABCDEF"


@dataclasses.dataclass(frozen=True)
class CallTables:
    """The automaton of one kind of call.

    Attributes:
      step_QC256: next grammar state, by innermost bracket and byte.
      event_QC256: what else the byte does.
      inside_Q: whether the state is inside a string.
      trie_K256: next node; node 1 is a string's beginning, 0 no watched word.
      word_K: what the string that ends in a node may be, as bits.
      end: the state after the closing tag.
    """

    step_QC256: np.ndarray
    event_QC256: np.ndarray
    inside_Q: np.ndarray
    trie_K256: np.ndarray
    word_K: np.ndarray
    end: int


class Calls(NamedTuple):
    """Calls as they were read.

    Attributes:
      valid_S: whether the slot's content is a call, [S].
      count_S: its queries, at most U, [S].
      span_SU2: first and one-past-last token of each query, [S, U, 2].
    """

    valid_S: jax.Array
    count_S: jax.Array
    span_SU2: jax.Array


@functools.lru_cache
def build_tables(call: Call, closing: bytes) -> CallTables:
    """The automaton of a call that ends with this closing tag."""
    names = ["bad", "value", "first_value", "first_key", "key", "colon", "after"]
    for kind in ("value", "key"):
        names += [f"{kind}_string", f"{kind}_escape", *(f"{kind}_hex{i}" for i in range(4))]
    names += ["minus", "zero", "integer", "dot", "fraction", "e", "sign", "exponent"]
    words = ("true", "false", "null")
    names += [f"{word}{i}" for word in words for i in range(1, len(word))]
    names += [f"tag{i}" for i in range(1, len(closing) + 1)]
    at = {name: q for q, name in enumerate(names)}
    step = np.full((len(names), 3, 256), _BAD, np.uint8)
    event = np.zeros(step.shape, np.uint8)

    def go(state: str, to: str, on: bytes, does: int = _NOTHING, within: int | None = None) -> None:
        for byte in on:
            step[at[state], slice(None) if within is None else within, byte] = at[to]
            event[at[state], slice(None) if within is None else within, byte] = does

    for state in ("value", "first_value", "first_key", "key", "colon", "after"):
        go(state, state, _SPACE)
    for state in ("value", "first_value"):
        go(state, "value_string", b'"', _OPEN)
        go(state, "first_key", b"{", _OBJECT)
        go(state, "first_value", b"[", _ARRAY)
        go(state, "minus", b"-", _SCALAR)
        go(state, "zero", b"0", _SCALAR)
        go(state, "integer", _DIGITS[1:], _SCALAR)
        for word in words:
            go(state, f"{word}1", word[:1].encode(), _SCALAR)
    go("first_value", "after", b"]", _POP, _IN_ARRAY)
    for state in ("first_key", "key"):
        go(state, "key_string", b'"', _OPEN_KEY)
    go("first_key", "after", b"}", _POP, _IN_OBJECT)
    go("colon", "value", b":")
    ends = ["after", "zero", "integer", "fraction", "exponent"]
    for state in ends:
        go(state, "after", _SPACE)
        go(state, "key", b",", within=_IN_OBJECT)
        go(state, "value", b",", within=_IN_ARRAY)
        go(state, "after", b"}", _POP, _IN_OBJECT)
        go(state, "after", b"]", _POP, _IN_ARRAY)
        go(state, "tag1", closing[:1], within=_TOP)
    go("minus", "zero", b"0")
    go("minus", "integer", _DIGITS[1:])
    go("integer", "integer", _DIGITS)
    for state in ("zero", "integer"):
        go(state, "dot", b".")
    for state in ("dot", "fraction"):
        go(state, "fraction", _DIGITS)
    for state in ("zero", "integer", "fraction"):
        go(state, "e", b"eE")
    go("e", "sign", b"+-")
    for state in ("e", "sign", "exponent"):
        go(state, "exponent", _DIGITS)
    for word in words:
        for i in range(1, len(word)):
            to = f"{word}{i + 1}" if i + 1 < len(word) else "after"
            go(f"{word}{i}", to, word[i : i + 1].encode())
    for kind, close, to in (("value", _CLOSE, "after"), ("key", _CLOSE_KEY, "colon")):
        go(f"{kind}_string", f"{kind}_string", bytes(range(32, 256)))
        go(f"{kind}_string", f"{kind}_escape", b"\\")
        go(f"{kind}_string", to, b'"', close)
        go(f"{kind}_escape", f"{kind}_string", b'"\\/bfnrt')
        go(f"{kind}_escape", f"{kind}_hex0", b"u")
        for i in range(4):
            go(f"{kind}_hex{i}", f"{kind}_hex{i + 1}" if i < 3 else f"{kind}_string", _HEX)
    for i in range(1, len(closing)):
        go(f"tag{i}", f"tag{i + 1}", closing[i : i + 1])
    inside = np.array(["_string" in n or "_escape" in n or "_hex" in n for n in names])
    watched = [("name", _NAME), (call.argument, _ARGUMENT), (call.tool, _TOOL)]
    trie, word_of = _trie([*watched, *((key, _QUERY) for key in call.keys)])
    return CallTables(step, event, inside, trie, word_of, at[f"tag{len(closing)}"])


def _trie(words: list[tuple[str, int]]) -> tuple[np.ndarray, np.ndarray]:
    rows, bits = [np.zeros(256, np.int32), np.zeros(256, np.int32)], [0, 0]
    for word, bit in words:
        node = 1
        for byte in word.encode():
            if not rows[node][byte]:
                rows[node][byte] = len(rows)
                rows.append(np.zeros(256, np.int32))
                bits.append(0)
            node = rows[node][byte]
        bits[node] |= bit
    return np.stack(rows), np.array(bits, np.int32)


class _Reading(NamedTuple):
    """Where each slot's reading stands, [S] each but the spans."""

    token: jax.Array  # next byte: token and place in it
    byte: jax.Array
    state: jax.Array  # of the grammar
    stack: jax.Array  # a bit for each open bracket, 1 for an object, the innermost last
    depth: jax.Array
    node: jax.Array  # of the trie
    key: jax.Array  # what the last name was, in the outermost object
    inner_key: jax.Array  # and in the arguments
    names: jax.Array  # how often each stood there
    arguments: jax.Array
    query_keys: jax.Array
    is_tool: jax.Array
    bad: jax.Array  # something stands where a query should
    begin: jax.Array  # token in which the string under way begins
    filled: jax.Array  # whether it has a byte
    seen: jax.Array
    span_SU2: jax.Array


def read_calls(
    tables: CallTables,
    table: StopTable,
    ids_SL: jax.Array,
    begin_S: jax.Array,
    skip_S: jax.Array,
    end_S: jax.Array,
    active_S: jax.Array,
    queries: int,
) -> Calls:
    """Reads the call of every active slot.

    Args:
      tables: the automaton.
      table: with the tokens' bytes.
      ids_SL: the episodes.
      begin_S: token in which the content begins.
      skip_S: bytes of it that stand before the content.
      end_S: tokens of the episode; the last one completes the closing tag.
      active_S: which slots to read.
      queries: U.
    """
    assert table.text_VW is not None, "the stop table was built without the tokens' bytes"
    step, event, inside, trie, word_of = map(
        jnp.asarray,
        (tables.step_QC256, tables.event_QC256, tables.inside_Q, tables.trie_K256, tables.word_K),
    )
    S, L = ids_SL.shape
    slot_S, zero = jnp.arange(S), jnp.zeros(S, jnp.int32)
    text_VW, bytes_V = jnp.asarray(table.text_VW), jnp.asarray(table.bytes_V)

    def goes_on(r: _Reading) -> jax.Array:
        return active_S & (r.state != _BAD) & (r.state != tables.end) & (r.token < end_S)

    def read(r: _Reading) -> _Reading:
        on = goes_on(r)
        id_S = ids_SL[slot_S, jnp.minimum(r.token, L - 1)]
        byte = text_VW[id_S, r.byte].astype(jnp.int32)
        object_ = (r.stack & 1) == 1
        within = jnp.where(r.depth == 0, _TOP, jnp.where(object_, _IN_OBJECT, _IN_ARRAY))
        state = step[r.state, within, byte].astype(jnp.int32)
        does = jnp.where(on, event[r.state, within, byte], _NOTHING)
        # A special token has no bytes and reads as one zero.
        last = r.byte + 1 >= bytes_V[id_S]
        token, place = r.token + last, jnp.where(last, 0, r.byte + 1)

        opens = (does == _OPEN) | (does == _OPEN_KEY)
        word = word_of[r.node]
        node = jnp.where(inside[r.state], trie[r.node, byte], r.node)
        in_arguments = (r.key & _ARGUMENT) > 0
        of_query = in_arguments & ((r.inner_key & _QUERY) > 0)
        at_query = of_query & (r.depth == 2) & object_
        in_list = of_query & (r.depth == 3) & ~object_

        named = does == _CLOSE_KEY
        outer, inner = named & (r.depth == 1), named & (r.depth == 2) & in_arguments
        found = (does == _CLOSE) & (at_query | in_list)
        spoils = (
            ((at_query | in_list) & ((does == _SCALAR) | (does == _OBJECT)))
            | (in_list & (does == _ARRAY))
        )  # fmt: skip
        end = jnp.where(r.filled, r.token + (r.byte > 0), r.begin)
        at_S = jnp.where(found, r.seen, queries)
        pushes, pops = (does == _OBJECT) | (does == _ARRAY), does == _POP
        depth = r.depth + pushes - pops
        stack = jnp.where(pushes, 2 * r.stack + (does == _OBJECT), r.stack)
        new = _Reading(
            token=token,
            byte=place,
            state=jnp.where(depth > DEPTH, _BAD, state),
            stack=jnp.where(pops, stack >> 1, stack),
            depth=depth,
            node=jnp.where(opens, 1, node),
            key=jnp.where(outer, word, r.key),
            inner_key=jnp.where(inner, word, r.inner_key),
            names=r.names + (outer & ((word & _NAME) > 0)),
            arguments=r.arguments + (outer & ((word & _ARGUMENT) > 0)),
            query_keys=r.query_keys + (inner & ((word & _QUERY) > 0)),
            is_tool=jnp.where(
                (does == _CLOSE) & (r.depth == 1) & ((r.key & _NAME) > 0),
                (word & _TOOL) > 0,
                r.is_tool,
            ),
            bad=r.bad | spoils,
            begin=jnp.where(opens, token, r.begin),
            filled=jnp.where(opens, False, r.filled | inside[r.state]),
            seen=r.seen + found,
            span_SU2=r.span_SU2.at[slot_S, at_S].set(
                jnp.stack([r.begin, end], axis=1), mode="drop"
            ),
        )
        return jax.tree.map(
            lambda a, b: jnp.where(on.reshape((S,) + (1,) * (a.ndim - 1)), a, b), new, r
        )

    no = jnp.zeros(S, bool)
    start = _Reading(
        *(begin_S.astype(jnp.int32), skip_S.astype(jnp.int32), jnp.full(S, _VALUE, jnp.int32)),
        *(zero, zero, zero, zero, zero, zero, zero, zero, no, no, zero, no, zero),
        jnp.zeros((S, queries, 2), jnp.int32),
    )
    r = jax.lax.while_loop(lambda r: jnp.any(goes_on(r)), read, start)
    valid_S = active_S & (r.state == tables.end) & ~r.bad & r.is_tool & (r.seen > 0)
    valid_S &= (r.names == 1) & (r.arguments == 1) & (r.query_keys == 1)
    count_S = jnp.where(valid_S, jnp.minimum(r.seen, queries), 0)
    there_SU = jnp.arange(queries) < count_S[:, None]
    return Calls(valid_S, count_S, jnp.where(there_SU[..., None], r.span_SU2, 0))
