"""Nothing hangs: policies that never do as they are asked end within their limits, and say why."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from zest_jax.models import PolicyConfig
from zest_jax.retrieval import Retriever
from zest_jax.rollout import engine as engine_lib
from zest_jax.rollout.engine import Engine
from zest_jax.rollout.protocols import PLAIN_SEARCH
from zest_jax.rollout.protocols.qwen_tools import QWEN_TOOLS
from zest_jax.rollout.sampling import Draws
from zest_jax.rollout.state import RolloutSpec
from zest_jax.rollout.stops import build_stop_table
from zest_jax.rollout.trajectories import Finish

EOS = 0
CALL = b'{"name": "search", "arguments": {"query": "'
TOKENS = [
    *(None, b"x", b" a", b" b", b" c", b" d", b" e", b"\xff", b"<search>", b"</search>"),
    *(b"<answer>", b"</answer>", b"<tool_call>" + CALL, b'"}}', b"</tool_call>", b"<tool_call>"),
    *(b"[1, 2", b'{"query_list": ["', b'"]', b"[" * 30, None),
]
X, A, B, C, D, E, FF, SEARCH, _SEARCH, ANSWER, _ANSWER, ASK, ASKED, _CALL, OPEN = range(1, 16)
BROKEN, OTHER, LIST_END, NESTED, SPECIAL = range(16, 21)
SHAPE = PolicyConfig(len(TOKENS), width=4, layers=1, heads=1, kv_heads=1, head_dim=2, mlp_width=2)
SPEC = RolloutSpec(
    slots=16,
    prompt_length=2,
    action_length=9,
    observation_length=40,
    searches=3,
    query_length=3,
    wait_fraction=0.3,
)


class Stubborn:
    """A policy that writes a circle of tokens of its own for ever, whatever it is told."""

    def __init__(self, next_SV, config):
        self.next_SV, self.config, self.vocab = next_SV, config, config.vocab_size

    def unstack(self):
        return []

    def extend(self, layers, cache, ids_SC, start_S):
        slot_S = jnp.arange(ids_SC.shape[0])
        slot_S = jnp.minimum(slot_S, len(self.next_SV) - 1)
        return 9.0 * jax.nn.one_hot(self.next_SV[slot_S[:, None], ids_SC], self.vocab), cache

    def logits(self, hidden):
        return hidden


# What it writes, again and again, how that ends, and how many searches, repeated queries and
# corrections there are, where actions that are none end the episode, and where they are corrected.
TAGS = {
    "never closes a tag": ([SEARCH, A, B], Finish.TOO_LONG, (0, 0, 0), (0, 0, 3)),
    "closes without opening": ([A, _SEARCH], Finish.INVALID, (0, 0, 0), (0, 0, 3)),
    "says nothing": ([EOS], Finish.NO_ANSWER, (0, 0, 0), (0, 0, 3)),
    "special tokens only": ([SPECIAL], Finish.TOO_LONG, (0, 0, 0), (0, 0, 3)),
    "one query for ever": ([SEARCH, A, _SEARCH], Finish.OUT_OF_TURNS, (3, 2, 0), (3, 2, 0)),
    "an empty query": ([SEARCH, _SEARCH], Finish.OUT_OF_TURNS, (3, 2, 0), (3, 2, 0)),
    "no text": ([SEARCH, FF, _SEARCH], Finish.OUT_OF_TURNS, (3, 2, 0), (3, 2, 0)),
    "a query too long": (
        [SEARCH, A, B, C, D, E, _SEARCH],
        Finish.OUT_OF_TURNS,
        (3, 2, 0),
        (3, 2, 0),
    ),
    "an answer": ([ANSWER, A, _ANSWER], Finish.ANSWERED, (0, 0, 0), (0, 0, 0)),
}
CALLS = {
    "never closes a call": ([ASK, A, B], Finish.TOO_LONG, (0, 0, 0), (0, 0, 3)),
    "one call for ever": ([ASK, A, ASKED, _CALL], Finish.OUT_OF_TURNS, (3, 2, 0), (3, 2, 0)),
    "an empty call": ([ASK, ASKED, _CALL], Finish.OUT_OF_TURNS, (3, 2, 0), (3, 2, 0)),
    "a call of no text": ([ASK, FF, ASKED, _CALL], Finish.OUT_OF_TURNS, (3, 2, 0), (3, 2, 0)),
    "a call too long": (
        [ASK, A, B, C, D, E, ASKED, _CALL],
        Finish.OUT_OF_TURNS,
        (3, 2, 0),
        (3, 2, 0),
    ),
    # A bad call in the last turn is one search too many, as a good one is.
    "broken": ([OPEN, BROKEN, _CALL], Finish.INVALID, (0, 0, 0), (0, 0, 3)),
    "no call": ([OPEN, OTHER, A, LIST_END, ASKED, _CALL], Finish.INVALID, (0, 0, 0), (0, 0, 3)),
    "nothing in it": ([OPEN, _CALL], Finish.INVALID, (0, 0, 0), (0, 0, 3)),
    "nested too deep": ([OPEN, NESTED, _CALL], Finish.INVALID, (0, 0, 0), (0, 0, 3)),
    "special tokens in it": ([ASK, SPECIAL, ASKED, _CALL], Finish.INVALID, (0, 0, 0), (0, 0, 3)),
    "ends in a call": ([ASK, A, EOS], Finish.NO_ANSWER, (0, 0, 0), (0, 0, 3)),
}
SHORT = {"observation": "<i>{passages}</i>", "passage": " {title}: {text}", "special": ()}


def play(cases, correction, monkeypatch):
    """Each case in a slot of its own; several rounds, so that slots are refilled too."""
    base = PLAIN_SEARCH if cases is TAGS else QWEN_TOOLS
    protocol = dataclasses.replace(base, correction=correction, **SHORT)
    said = {None: (), "": (), "no": (X, X)}[correction]
    engine = Engine(SHAPE, dataclasses.replace(SPEC, slots=len(cases)), protocol, (EOS,), said)
    table = build_stop_table(TOKENS, protocol.opening, protocol.closing, with_text=True)
    after = np.zeros((len(cases), len(TOKENS)), np.int32)
    for s, (circle, *_) in enumerate(cases.values()):
        after[s] = circle[0]
        after[s, circle[:-1]] = circle[1:]
    monkeypatch.setattr(
        engine_lib, "bind", lambda config, params: Stubborn(params["next_SV"], config)
    )
    retriever = Retriever.build(
        tiny.tokenizer(),
        ["ab", "cd"],
        ["x", "y"],
        layout=protocol.layout,
        retrieved=1,
        observation_length=SPEC.observation_length,
    )
    got, counters = jax.jit(engine.rollout)(
        {"next_SV": jnp.asarray(after)},
        jax.tree.map(jnp.asarray, table),
        _InVocabulary(retriever),
        np.ones((len(cases), 2), np.int32),
        np.full(len(cases), 2, np.int32),
        Draws(jax.random.key(0), jnp.float32(0.0)),
    )
    return engine, got.to_host(), counters


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _InVocabulary:
    """A retriever whose observations are written with tokens of the small vocabulary."""

    inner: Retriever
    retrieved: int = dataclasses.field(default=1, metadata={"static": True})

    def search(self, query_SUQ, length_SU):
        return self.inner.search(query_SUQ, length_SU)

    def observe(self, row_SUR, asked_S):
        ids_SC, length_S = self.inner.observe(row_SUR, asked_S)
        return jnp.full_like(ids_SC, X), length_S


@pytest.mark.parametrize(
    ("cases", "correction"),
    [(TAGS, None), (TAGS, ""), (CALLS, None), (CALLS, "no")],
    ids=["tags", "tags, silently corrected", "calls", "calls, corrected"],
)
def test_it_ends(cases, correction, monkeypatch):
    engine, got, counters = play(cases, correction, monkeypatch)
    # A slot may wait for others, but not for long.
    assert counters["decode_steps"] <= 2 * (SPEC.searches + 1) * SPEC.action_length
    for n, (name, (_, finish, ended, corrected)) in enumerate(cases.items()):
        wanted = ended if correction is None else corrected
        if cases is CALLS and correction is not None and finish == Finish.INVALID:
            finish = Finish.OUT_OF_TURNS  # the last call is not even looked into
        counts = (got.searches_N[n], got.duplicates_N[n], got.corrections_N[n])
        assert (Finish(got.finish_N[n]), counts) == (finish, wanted), name
        assert got.length_N[n] <= engine.spec.length
        turns = wanted[0] + wanted[2]
        assert got.turn_NL[n].max() == turns <= SPEC.searches
        begin, end = got.queries_NTU2[n, 0, 0]
        if name in ("an empty query", "an empty call"):
            assert begin == end and got.asked_NT[n, 0] == 1
        if name in ("a query too long", "a call too long"):
            assert end - begin == 5 > SPEC.query_length
