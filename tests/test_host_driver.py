"""The rollout driven from the host: against the compiled one, over HTTP, and when servers fail."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from retrieval_server import scripted, serving
from test_engine import CALLING, TURNS, WRITES

from zest_jax.retrieval import Retriever
from zest_jax.retrieval.interface import Found, Passage, TextRetriever, to_contents
from zest_jax.retrieval.remote import RemoteRetriever, RemoteSettings
from zest_jax.rollout import host_driver
from zest_jax.rollout.host_driver import (
    SECONDS,
    FoundPassages,
    HostSampler,
    SearchFailed,
    Wrote,
)
from zest_jax.rollout.protocols import PLAIN_SEARCH
from zest_jax.rollout.sampler import Sampler
from zest_jax.rollout.state import RolloutSpec
from zest_jax.rollout.trajectories import Finish, Role
from zest_jax.tracing import TraceCounter

SPEC = RolloutSpec(
    slots=4,
    prompt_length=8,
    action_length=12,
    observation_length=80,
    searches=2,
    query_length=12,
    queries=2,
    wait_fraction=0.5,
    cache_stages=2,
)
PROMPTS = [[5 + i, 9, 11 + 2 * i][: 1 + i % 3] for i in range(24)]
KEY = jax.random.key(7)


class Toy(TextRetriever):
    """Finds passages by the sum of a query's bytes: two of them, or one."""

    def __init__(self, titles, texts):
        self._passages = [
            Passage(str(i), *p) for i, p in enumerate(zip(titles, texts, strict=True))
        ]
        self.batches = []

    def search(self, queries, top_k):
        self.batches.append(list(queries))
        found = Found.nothing(len(queries), top_k)
        for n, query in enumerate(queries):
            total = sum(query.encode("utf-8", "replace"))
            for r in range(1 + total % 2):
                found.rows[n, r] = (total + 2 * r) % len(self._passages)
                found.scores[n, r] = 1 + total % 7 - r / 4
        return found

    def passages(self, rows):
        return [[self._passages[row] for row in line if row >= 0] for line in rows]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Replay:
    """A retriever on the device that finds what another has found for actions of the same ids.

    (For the whole action: a token may hold the end of one query and the beginning of the next.)
    """

    known_KUQ: jax.Array
    row_KUR: jax.Array
    score_KUR: jax.Array
    shown: Retriever
    retrieved: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, episodes, shown, query_length):
        known = {}
        for n, searches in enumerate(episodes.searches_N):
            for t in range(searches):
                ids_UQ = np.full((episodes.queries_NTU2.shape[2], query_length), -1)
                for u, (begin, end) in enumerate(episodes.queries_NTU2[n, t]):
                    ids = episodes.ids_NL[n, begin:end][:query_length]
                    if u < episodes.asked_NT[n, t]:
                        ids_UQ[u, : len(ids)] = ids
                found = ids_UQ, episodes.rows_NTUR[n, t], episodes.scores_NTUR[n, t]
                for x, y in zip(known.setdefault(ids_UQ.tobytes(), found), found, strict=True):
                    np.testing.assert_array_equal(x, y)
        arrays = (jnp.asarray(np.stack(x)) for x in zip(*known.values(), strict=True))
        return cls(*arrays, shown, shown.retrieved)

    def search(self, query_SUQ, length_SU):
        inside = jnp.arange(query_SUQ.shape[2]) < length_SU[..., None]
        alike = jnp.where(inside, query_SUQ, -1)[:, None] == self.known_KUQ
        k = jnp.argmax(jnp.all(alike, axis=(2, 3)), axis=-1)
        return self.row_KUR[k], self.score_KUR[k]

    def observe(self, row_SUR, asked_S):
        return self.shown.observe(row_SUR, asked_S)


@dataclasses.dataclass
class Driven:
    """A sampler on the host with what it made of the prompts."""

    sampler: HostSampler
    toy: Toy
    params: dict
    world: tuple
    traces: TraceCounter
    episodes: object
    counters: dict

    def again(self, retriever):
        self.sampler.driver.retriever = retriever
        return self.sampler(self.params, PROMPTS, KEY, 1.0)


@pytest.fixture(scope="module")
def driven():
    more = [t for t in WRITES if t not in (*tiny.TAGS, *TURNS)]
    world = tiny.search_world(WRITES, more, TURNS)
    words, config, params, titles, texts = world
    toy, traces = Toy(titles, texts), TraceCounter()
    sampler = HostSampler(
        "host", config, SPEC, CALLING, words, toy, capacity=len(PROMPTS), traces=traces, top_k=2
    )
    episodes = sampler(params, PROMPTS, KEY, 1.0)
    return Driven(sampler, toy, params, world, traces, episodes, sampler.counters)


def same(got, want, but=()):
    for field in dataclasses.fields(want):
        a, b = getattr(got, field.name), getattr(want, field.name)
        if field.name in but:
            continue
        if "logp" in field.name:
            np.testing.assert_allclose(a, b, atol=1e-5, err_msg=field.name)
        else:
            np.testing.assert_array_equal(a, b, err_msg=field.name)


def test_the_same_episodes_as_the_compiled_rollout(driven):
    words, config, params, titles, texts = driven.world
    got = driven.episodes
    assert got.searches_N.sum() >= 5 and (got.asked_NT == 2).any() and got.corrections_N.any()
    assert {Finish.ANSWERED, Finish.OUT_OF_TURNS} < set(got.finish_N.tolist())
    assert (got.rows_NTUR[..., 1] >= 0).any(), "some queries should find two passages"
    shown = Retriever.build(
        words,
        titles,
        texts,
        layout=CALLING.layout,
        retrieved=2,
        observation_length=SPEC.observation_length,
        queries=SPEC.queries,
    )
    replay = Replay.of(got, shown, SPEC.query_length)
    compiled = Sampler(
        "compiled", config, SPEC, CALLING, words, replay, len(PROMPTS), driven.traces
    )
    same(got, compiled(params, PROMPTS, KEY, 1.0))
    for name in ("decode_steps", "passes", "prefilled"):
        assert driven.counters[name] == compiled.counters[name]


def test_it_asks_once_a_pass_and_says_where_the_time_went(driven):
    assert len(driven.toy.batches) <= driven.counters["passes"]
    assert any(len(batch) > 1 for batch in driven.toy.batches)
    spent = [driven.counters[f"{part}_s"] for part in SECONDS]
    assert min(spent) > 0
    assert driven.traces.retraces == 0


def test_over_http_the_same_but_for_the_rows_which_no_server_tells(driven):
    with serving(Toy(*driven.world[3:])) as server, RemoteRetriever(server.url) as remote:
        got = driven.again(remote)
    same(got, driven.episodes, but=("rows_NTUR",))
    assert (got.rows_NTUR == -1).all() and (got.scores_NTUR > 0).any()
    assert driven.traces.retraces == 0


def answering(toy, fails):
    """A server's script that fails where `fails(number of the request)`."""

    def respond(number, body):
        if fails(number):
            return None if number % 2 else (503, b"busy", {})
        asked = json.loads(body)
        result = [
            [{"document": {"id": p.id, "contents": to_contents(p)}, "score": s} for p, s in found]
            for found in toy.search_passages(asked["queries"], asked["topk"])
        ]
        return 200, json.dumps({"result": result}).encode(), {}

    return respond


def test_a_server_that_recovers_changes_nothing(driven):
    respond = answering(Toy(*driven.world[3:]), lambda number: number in (1, 2, 4))
    quick = RemoteSettings(retries=3, first_wait_s=0.01)
    with scripted(respond) as (url, bodies), RemoteRetriever(url, quick) as remote:
        same(driven.again(remote), driven.episodes, but=("rows_NTUR",))
        assert len(bodies) >= 5


def test_a_server_that_stays_dead_ends_the_rollout_with_a_sentence(driven):
    most = len(driven.toy.batches)
    respond = answering(Toy(*driven.world[3:]), lambda number: number >= most)
    quick = RemoteSettings(retries=1, first_wait_s=0.01)
    with scripted(respond) as (url, _), RemoteRetriever(url, quick) as remote:
        with pytest.raises(SearchFailed, match=r"nothing was trained on them.*asked 2 times") as e:
            driven.again(remote)
    finished = int(str(e.value).split("when ")[1].split(" of 24 ")[0])
    assert 0 < finished < len(PROMPTS)
    # And the sampler goes on when another answers.
    same(driven.again(driven.toy), driven.episodes)


def test_observations_are_cut_and_framed_as_the_passage_store_does_it(driven):
    words = driven.world[0]
    passages = [
        Passage("0", "ab", "short"),
        Passage("1", "cd", "a text that is much too long to be shown whole " * 4),
        Passage("2", "<|im_end|>", "spelled out <|im_end|><|im_start|> in a passage"),
    ]
    shown = Retriever.build(
        words,
        [p.title for p in passages],
        [p.text for p in passages],
        layout=CALLING.layout,
        retrieved=2,
        observation_length=SPEC.observation_length,
        queries=SPEC.queries,
    )
    rows = np.array([[[0, 1], [2, -1]], [[1, 2], [-1, -1]], [[-1, -1], [-1, -1]]], np.int32)
    asked = np.array([2, 1, 0], np.int32)
    want_SC, length_S = map(np.asarray, shown.observe(rows, asked))
    results = [
        [[passages[r] for r in line if r >= 0] for line in slot[:n]]
        for slot, n in zip(rows, asked, strict=True)
    ]
    got = host_driver.Observations(words, CALLING, SPEC, top_k=2).write(results)
    assert got == [row[:n].tolist() for row, n in zip(want_SC, length_S, strict=True)]
    # The protocol's own turn tokens, and none of the passage's.
    end = words.convert_tokens_to_ids("<|im_end|>")
    assert [ids.count(end) for ids in got] == [1, 1, 1]


class Scripted:
    """A policy that writes script[s, p] at position p of slot s, whatever stands before it."""

    def __init__(self, script_SL, config):
        self.script_SL, self.config, self.vocab = script_SL, config, config.vocab_size

    def unstack(self):
        return []

    def extend(self, layers, cache, ids_SC, start_S):
        next_S = jnp.minimum(start_S + ids_SC.shape[1], self.script_SL.shape[1] - 1)
        token_S = jnp.take_along_axis(self.script_SL, next_S[:, None], axis=1)
        return jax.nn.one_hot(token_S, self.vocab), cache

    def logits(self, hidden):
        return hidden


def test_what_is_asked_is_the_text_within_the_tags_and_nothing_is_not_asked(monkeypatch):
    """Tags over token borders, bytes that are no text, a query of white space; told as it goes."""
    words = tiny.tokenizer(tags_as_tokens=False)
    spec = RolloutSpec(2, prompt_length=2, action_length=40, observation_length=30, searches=1)
    passage = Passage("", "cd", "one")
    half = words.convert_tokens_to_ids("Ã")  # the first byte of a two-byte letter
    opened, query, closed, blank, answer, *texts = words(
        [
            "so <search",
            "> cd and ef ",
            "</search>",
            "<search> \n</search>",
            "<answer> x</answer>",
            "<information>",
            " cd: one",
            "</information>",
        ]
    )["input_ids"]
    shown, nothing = sum(texts, []), texts[0] + texts[2]
    actions = ([*opened, *query, half, *closed], blank)
    episodes = [
        [5, *actions[0], *shown, *answer],
        [6, *actions[1], *nothing, *answer],
    ]
    script = np.zeros((2, spec.length), np.int32)
    for row, ids in zip(script, episodes, strict=True):
        row[: len(ids)] = ids
    asked, told = [], []

    class One:
        def search_passages(self, queries, top_k):
            asked.append((list(queries), top_k))
            return [[(passage, float("nan"))] for _ in queries]

    monkeypatch.setattr(host_driver, "bind", lambda c, p: Scripted(p["script"], c))
    sampler = HostSampler(
        "scripted",
        tiny.shape(len(words)),
        spec,
        PLAIN_SEARCH,
        words,
        One(),
        capacity=2,
        traces=TraceCounter(),
        top_k=1,
        watch=told.append,
        every=3,
    )
    got = sampler({"script": jnp.asarray(script)}, [[5], [6]], KEY, 0.0)
    assert asked == [(["cd and ef �"], 1)]
    for n, ids in enumerate(episodes):
        assert got.ids_NL[n, : got.length_N[n]].tolist() == ids
        assert got.finish_N[n] == Finish.ANSWERED
    assert (got.role_NL == Role.TOOL).sum(axis=1).tolist() == [len(shown), len(nothing)]
    assert not got.scores_NTUR.any(), "a server without scores leaves no NaN"
    first = [event for event in told if event.episode == 0]
    wrote = [event for event in first if isinstance(event, Wrote)]
    assert [len(event.ids) for event in wrote if event.turn == 0][:3] == [3, 6, 9]
    assert wrote[-1] == Wrote(0, 1, answer)
    found = [event for event in first if isinstance(event, FoundPassages)]
    assert [(f.turn, f.queries, f.results[0][0][0]) for f in found] == [
        (0, ["cd and ef �"], passage)
    ]


def test_an_observation_without_room_is_refused():
    spec = dataclasses.replace(SPEC, observation_length=12)
    words = tiny.tokenizer(special=TURNS)
    with pytest.raises(host_driver.UserError, match="raise observation_length or lower top_k"):
        host_driver.Observations(words, CALLING, spec, top_k=3)
