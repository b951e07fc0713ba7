"""Episodes known by hand: the real engine, driven by a policy whose every token is written down."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from zest_jax.errors import UserError
from zest_jax.models import PolicyConfig
from zest_jax.retrieval import Retriever
from zest_jax.rollout import engine as engine_lib
from zest_jax.rollout import trajectories
from zest_jax.rollout.engine import Engine
from zest_jax.rollout.observing import Observed
from zest_jax.rollout.protocols import PLAIN_SEARCH
from zest_jax.rollout.sampler import Sampler
from zest_jax.rollout.sampling import Draws
from zest_jax.rollout.state import RolloutSpec
from zest_jax.rollout.stops import build_stop_table
from zest_jax.rollout.trajectories import Finish, Role
from zest_jax.tracing import TraceCounter

# A vocabulary by hand: tags as one token each, and a search written across token borders.
EOS, SEARCH, _SEARCH, ANSWER, _ANSWER, AB, CD, X, NO, S1, S2, S3, S4, THINK, OBS, _OBS = range(16)
TOKENS = [
    *(None, b"<search>", b"</search>", b"<answer>", b"</answer>", b" ab", b" cd", b" x", b"!"),
    *(b"<sea", b"rch> a", b"b</sea", b"rch>\n", b"<think>", b"<information>", b"</information>"),
]
LIFT = 3.0  # logit of the token that is written down; the others have 0
LOGP = LIFT - np.log(np.exp(LIFT) + len(TOKENS) - 1)
SPEC = RolloutSpec(
    slots=16,
    prompt_length=3,
    action_length=6,
    observation_length=5,
    searches=2,
    query_length=2,
)
SHAPE = PolicyConfig(len(TOKENS), width=4, layers=1, heads=1, kv_heads=1, head_dim=2, mlp_width=2)


class Scripted:
    """A policy that writes script[s, p] at position p of slot s, whatever stands before it."""

    def __init__(self, script_SL, config):
        self.script_SL, self.config, self.vocab = script_SL, config, config.vocab_size

    def unstack(self):
        return []

    def extend(self, layers, cache, ids_SC, start_S):
        next_S = jnp.minimum(start_S + ids_SC.shape[1], self.script_SL.shape[1] - 1)
        token_S = jnp.take_along_axis(self.script_SL, next_S[:, None], axis=1)
        return LIFT * jax.nn.one_hot(token_S, self.vocab), cache

    def logits(self, hidden):
        return hidden


class Echo:
    """A retriever whose passages say what was asked: rows (first id, length), shown as one id."""

    retrieved = 2

    def search(self, query_SUQ, length_SU):
        row_SUR = jnp.stack([query_SUQ[..., 0], length_SU], axis=2)
        return row_SUR, jnp.ones(row_SUR.shape) * jnp.array([1.0, 0.5])

    def observe(self, row_SUR, asked_S):
        S = row_SUR.shape[0]
        column = functools.partial(jnp.full, (S,))
        said = row_SUR[:, 0, 0]
        ids = jnp.stack([column(OBS), said, column(_OBS), column(CD), column(CD)], axis=1)
        return ids, jnp.full(S, 3)  # what stands past the length must not be shown


@dataclasses.dataclass(frozen=True)
class Episode:
    """What must come out: pieces (ids, sampled, turn); the sampled ones are the policy's script."""

    pieces: list
    finish: Finish
    queries: list = dataclasses.field(default_factory=list)
    asked: list = dataclasses.field(default_factory=list)
    answer: tuple = (0, 0)

    def flat(self):
        ids = [i for piece, _, _ in self.pieces for i in piece]
        mask = [sampled for piece, sampled, _ in self.pieces for _ in piece]
        turns = [turn for piece, _, turn in self.pieces for _ in piece]
        return ids, mask, turns


def prompt(*ids):
    return (list(ids), False, 0)


def wrote(turn, *ids):
    return (list(ids), True, turn)


def shown(turn, *ids):
    return (list(ids), False, turn)


EPISODES = {
    "search, then answer": Episode(
        [
            prompt(AB, CD),
            wrote(0, SEARCH, AB, CD, _SEARCH),
            shown(1, OBS, AB, _OBS),
            wrote(1, ANSWER, X, _ANSWER),
        ],
        Finish.ANSWERED,
        queries=[(3, 5)],
        asked=[(AB, 2)],
        answer=(10, 11),
    ),
    "answer at once": Episode(
        [prompt(X), wrote(0, THINK, NO, ANSWER, CD, _ANSWER)], Finish.ANSWERED, answer=(4, 5)
    ),
    "tags across tokens": Episode(
        [
            prompt(NO, NO, NO),
            wrote(0, S1, S2, S3, S4),
            shown(1, OBS, S2, _OBS),
            wrote(1, ANSWER, AB, _ANSWER),
        ],
        Finish.ANSWERED,
        queries=[(4, 6)],  # both tokens that hold a byte of " ab"
        asked=[(S2, 2)],
        answer=(11, 12),
    ),
    "a tag is not read across an observation": Episode(
        [
            prompt(AB),
            wrote(0, SEARCH, S1, _SEARCH),
            shown(1, OBS, S1, _OBS),
            wrote(1, S2, S3, S4),
        ],
        Finish.INVALID,  # "rch> a b</search>" opens nothing
        queries=[(2, 3)],
        asked=[(S1, 1)],
    ),
    "out of turns": Episode(
        [
            prompt(AB),
            wrote(0, SEARCH, AB, _SEARCH),
            shown(1, OBS, AB, _OBS),
            wrote(1, SEARCH, CD, _SEARCH),
            shown(2, OBS, CD, _OBS),
            wrote(2, SEARCH, X, _SEARCH),
        ],
        Finish.OUT_OF_TURNS,
        queries=[(2, 3), (8, 9)],
        asked=[(AB, 1), (CD, 1)],
    ),
    "no action within its length": Episode([prompt(AB), wrote(0, *[X] * 6)], Finish.TOO_LONG),
    "an action of full length": Episode(
        [prompt(AB), wrote(0, THINK, X, X, ANSWER, X, _ANSWER)], Finish.ANSWERED, answer=(5, 6)
    ),
    "end of text": Episode([prompt(AB), wrote(0, X, EOS)], Finish.NO_ANSWER),
    "closed, never opened": Episode([prompt(AB), wrote(0, AB, _SEARCH)], Finish.INVALID),
    "opened in the prompt": Episode([prompt(SEARCH), wrote(0, AB, _SEARCH)], Finish.INVALID),
    "opened as one, closed as another": Episode(
        [prompt(AB), wrote(0, SEARCH, AB, _ANSWER)], Finish.INVALID
    ),
    "a long query is embedded in part": Episode(
        [
            prompt(AB),
            wrote(0, SEARCH, CD, AB, X, _SEARCH),
            shown(1, OBS, CD, _OBS),
            wrote(1, ANSWER, X, _ANSWER),
        ],
        Finish.ANSWERED,
        queries=[(2, 5)],
        asked=[(CD, 2)],
        answer=(10, 11),
    ),
    "the first complete pair decides": Episode(
        [
            prompt(AB),
            wrote(0, ANSWER, SEARCH, CD, _SEARCH),
            shown(1, OBS, CD, _OBS),
            wrote(1, ANSWER, X, _ANSWER),
        ],
        Finish.ANSWERED,
        queries=[(3, 4)],
        asked=[(CD, 1)],
        answer=(9, 10),
    ),
    "opened twice": Episode(
        [
            prompt(AB),
            wrote(0, SEARCH, CD, SEARCH, X, _SEARCH),
            shown(1, OBS, CD, _OBS),
            wrote(1, NO, EOS),
        ],
        Finish.NO_ANSWER,
        queries=[(2, 5)],
        asked=[(CD, 2)],
    ),
    "an empty answer": Episode(
        [prompt(AB), wrote(0, ANSWER, _ANSWER)], Finish.ANSWERED, answer=(2, 2)
    ),
    "an answer inside an observation is none": Episode(
        [
            prompt(AB),
            wrote(0, SEARCH, ANSWER, _SEARCH),
            shown(1, OBS, ANSWER, _OBS),
            wrote(1, X, _ANSWER),
        ],
        Finish.INVALID,
        queries=[(2, 3)],
        asked=[(ANSWER, 1)],
    ),
}
CORRECTED = {
    "corrected, then searching": Episode(
        [
            prompt(AB),
            wrote(0, X, EOS),
            shown(1, NO, NO),
            wrote(1, SEARCH, AB, _SEARCH),
            shown(2, OBS, AB, _OBS),
            wrote(2, ANSWER, CD, _ANSWER),
        ],
        Finish.ANSWERED,
        queries=[(6, 7)],
        asked=[(AB, 1)],
        answer=(12, 13),
    ),
    "a correction takes a turn": Episode(
        [
            prompt(AB),
            wrote(0, SEARCH, AB, _SEARCH),
            shown(1, OBS, AB, _OBS),
            wrote(1, *[X] * 6),
            shown(2, NO, NO),
            wrote(2, SEARCH, AB, _SEARCH),
        ],
        Finish.OUT_OF_TURNS,
        queries=[(2, 3)],
        asked=[(AB, 1)],
    ),
    "a tag is not read across a correction": Episode(
        [
            prompt(AB),
            wrote(0, X, X, X, X, X, S1),
            shown(1, NO, NO),
            wrote(1, S2, S3, S4),  # "rch> ab</search>" opens nothing
            shown(2, NO, NO),
            wrote(2, ANSWER, CD, _ANSWER),
        ],
        Finish.ANSWERED,
        answer=(15, 16),
    ),
    "never an action": Episode(
        [
            prompt(AB),
            wrote(0, X, EOS),
            shown(1, NO, NO),
            wrote(1, X, EOS),
            shown(2, NO, NO),
            wrote(2, X, EOS),
        ],
        Finish.NO_ANSWER,
    ),
}


def set_up(episodes, correction_ids=()):
    spec = dataclasses.replace(SPEC, slots=len(episodes))
    protocol = dataclasses.replace(PLAIN_SEARCH, correction="!!" if correction_ids else None)
    engine = Engine(SHAPE, spec, protocol, (EOS,), correction_ids)
    table = build_stop_table(TOKENS, PLAIN_SEARCH.opening, PLAIN_SEARCH.closing)
    script = np.zeros((len(episodes), spec.length), np.int32)
    prompts = np.zeros((len(episodes), spec.prompt_length), np.int32)
    lengths = np.zeros(len(episodes), np.int32)
    for n, episode in enumerate(episodes):
        ids, _, _ = episode.flat()
        script[n, : len(ids)] = ids
        lengths[n] = len(episode.pieces[0][0])
        prompts[n, : lengths[n]] = ids[: lengths[n]]
    draws = Draws(jax.random.key(0), jnp.float32(0.0))
    return engine, jax.tree.map(jnp.asarray, table), script, prompts, lengths, draws


def scripted(config, params):
    return Scripted(params["script_SL"], config)


@pytest.fixture(scope="module")
def played():
    """Every episode above, by name, with its row of the trajectories."""
    rows = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_lib, "bind", scripted)
        for episodes, correction_ids in ((EPISODES, ()), (CORRECTED, (NO, NO))):
            parts = set_up(list(episodes.values()), correction_ids)
            engine, table, script, prompts, lengths, draws = parts

            def run(script, table, prompts, lengths, draws, engine=engine):
                params = {"script_SL": script}
                return engine.rollout(params, table, Echo(), prompts, lengths, draws)[0]

            got = jax.jit(run)(script, table, prompts, lengths, draws).to_host()
            rows |= {name: (got, n) for n, name in enumerate(episodes)}
    return rows


@pytest.mark.parametrize("name", [*EPISODES, *CORRECTED])
def test_an_episode_known_by_hand(played, name):
    want = (EPISODES | CORRECTED)[name]
    got, n = played[name]
    ids, mask, turns = want.flat()
    length, searches = len(ids), len(want.queries)
    assert got.length_N[n] == length
    assert got.prompt_length_N[n] == len(want.pieces[0][0])
    assert got.ids_NL[n, :length].tolist() == ids
    assert got.mask_NL[n, :length].tolist() == mask, "exactly what was sampled is trained on"
    assert got.turn_NL[n, :length].tolist() == turns
    roles = [Role.PROMPT] * len(want.pieces[0][0])
    for piece, sampled, _ in want.pieces[1:]:
        tool = Role.TOOL if piece[0] == OBS else Role.INJECTED
        roles += [Role.POLICY if sampled else tool] * len(piece)
    assert got.role_NL[n, :length].tolist() == roles
    assert np.array_equal(got.role_NL == Role.POLICY, got.mask_NL)
    for name in ("ids_NL", "mask_NL", "turn_NL", "logp_NL", "role_NL"):
        assert not getattr(got, name)[n, length:].any(), "nothing stands past the end"
    np.testing.assert_allclose(got.logp_NL[n, :length], np.where(mask, LOGP, 0), atol=1e-5)
    assert Finish(got.finish_N[n]) == want.finish
    assert got.searches_N[n] == searches
    assert got.asked_NT[n].tolist() == [1] * searches + [0] * (2 - searches)
    assert got.asked_N[n] == searches
    assert got.queries_NTU2[n, :, 0].tolist() == [
        list(span) for span in [*want.queries, (0, 0), (0, 0)][:2]
    ]
    rows = [list(a) for a in [*want.asked, (-1, -1), (-1, -1)][:2]]
    assert got.rows_NTUR[n, :, 0].tolist() == rows
    assert got.scores_NTUR[n, :, 0].tolist() == [[1.0, 0.5]] * searches + [[0.0, 0.0]] * (
        2 - searches
    )
    assert got.answer_N2[n].tolist() == list(want.answer)


def test_sampled_ids_by_turn(played):
    got, n = played["search, then answer"]
    first, last = [SEARCH, AB, CD, _SEARCH], [ANSWER, X, _ANSWER]
    assert got.sampled_ids(n) == first + last
    assert got.sampled_ids(n, turn=0) == first
    assert got.sampled_ids(n, turn=1) == got.last_action_ids(n) == last
    assert trajectories.empty(1, 4, 0, 1).last_action_ids(0) == []


def test_the_pieces_called_one_at_a_time_give_the_same(played):
    """What a driver on the host may do between them: look, and bring observations of its own."""
    engine, table, script, prompts, lengths, draws = setup = set_up(list(EPISODES.values()))
    assert len(setup) == 6
    policy, retriever = Scripted(jnp.asarray(script), engine.config), Echo()
    extend = jax.jit(functools.partial(engine.extend, policy, []))
    decode = jax.jit(functools.partial(engine.decode, policy, [], table, draws))
    queries, has_work = jax.jit(engine.queries), jax.jit(engine.has_work)
    should_write = jax.jit(engine.should_write)
    state = engine.start(len(EPISODES), Echo.retrieved, len(EPISODES))
    steps = 0
    while has_work(state):
        ids_SUQ, length_SU, asked_S = queries(state)
        row_SUR, score_SUR = retriever.search(ids_SUQ, length_SU)
        observed = Observed(row_SUR, score_SUR, *retriever.observe(row_SUR, asked_S))
        state = extend(state, prompts, lengths, observed)
        while should_write(state):
            state, steps = decode(state), steps + 1
    got = jax.device_get(engine_lib._hand_in(state))
    want, _ = played["answer at once"]
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert steps == state.work.decode_steps


def test_an_observation_is_cut_to_its_size(monkeypatch):
    """The passage is cut, its frame is not, so that the policy always sees where it ends."""
    words = tiny.tokenizer()
    protocol, size = PLAIN_SEARCH, 14
    spec = RolloutSpec(
        slots=1, prompt_length=2, action_length=6, observation_length=size, searches=1
    )
    retriever = Retriever.build(
        words,
        ["ab", "cd"],
        ["x", "a text that is much too long to be shown whole"],
        layout=protocol.layout,
        retrieved=1,
        observation_length=size,
    )
    asked, passage, answered, opened, closed = tiny.encode(
        [
            "<search> cd</search>",
            " cd: a text that is much too long to be shown whole",
            "<answer> x</answer>",
            "<information>",
            "</information>",
        ]
    )
    assert len(passage) > size
    observation = opened + passage[: size - 2] + closed
    want = [5, *asked, *observation, *answered]
    engine = Engine.build(tiny.shape(len(words)), spec, protocol, words)
    script = np.zeros((1, spec.length), np.int32)
    script[0, : len(want)] = want
    monkeypatch.setattr(engine_lib, "bind", scripted)
    got, _ = jax.jit(engine.rollout)(
        {"script_SL": script},
        engine.stop_table(words),
        retriever,
        np.array([[5, 0]], np.int32),
        np.array([1], np.int32),
        Draws(jax.random.key(0), jnp.float32(0.0)),
    )
    got = got.to_host()
    assert got.ids_NL[0, : got.length_N[0]].tolist() == want
    mask = [False] + [True] * len(asked) + [False] * size + [True] * len(answered)
    assert got.mask_NL[0, : got.length_N[0]].tolist() == mask
    assert got.rows_NTUR.tolist() == [[[[1]]]]


def test_a_correction_must_fit_an_observation():
    with pytest.raises(ValueError, match="6 tokens, more than observation_length=5"):
        Engine(SHAPE, SPEC, PLAIN_SEARCH, (EOS,), (NO,) * 6)


# -------------------------------------------------------------------------------------- sampler


@pytest.fixture
def sampler():
    words = tiny.tokenizer()
    spec = RolloutSpec(slots=2, prompt_length=4, action_length=3)
    config, args = tiny.shape(len(words)), (PLAIN_SEARCH, words, None, 4, TraceCounter())
    return Sampler("test", config, spec, *args)


def test_an_answer_is_read_from_the_last_action_alone(sampler):
    texts = [
        [("Q", False, 0), ("<answer> no", True, 0), ("<answer> it</answer>", True, 1)],
        [("Q", False, 0), ("<answer> bad</answer>", False, 1), ("<answer> it", True, 1)],
        [("<answer> bad</answer>", False, 0), ("<think> ah</think><answer> a b</answer>", True, 0)],
        [("Q", False, 0), ("<answer> it</answer>", True, 0)],  # then out of turns
    ]
    episodes = trajectories.empty(len(texts), 80, 1, 1)
    episodes.finish_N[:] = [Finish.ANSWERED] * 3 + [Finish.OUT_OF_TURNS]
    for n, pieces in enumerate(texts):
        at = 0
        for text, sampled, turn in pieces:
            (ids,) = tiny.encode([text])
            part = slice(at, at + len(ids))
            episodes.ids_NL[n, part], episodes.mask_NL[n, part] = ids, sampled
            episodes.turn_NL[n, part] = turn
            at += len(ids)
            if text == pieces[0][0]:
                episodes.prompt_length_N[n] = at
        episodes.length_N[n] = at
    assert sampler.answers(episodes) == ["it", None, "a b", None]
    assert sampler.texts(episodes) == ["".join(t for t, _, _ in p[1:]) for p in texts]


def test_prompts_beyond_the_capacity_are_done_in_several_calls(sampler, monkeypatch):
    """Scripts are by slot, so all prompts write the same; only their number and order matter."""
    monkeypatch.setattr(engine_lib, "bind", scripted)
    (ids,) = tiny.encode(["<answer> </answer>"])
    script = np.zeros((2, sampler.spec.length), np.int32)
    script[:, 1 : 1 + len(ids)] = ids
    prompts = [[20 + n] for n in range(6)]
    got = sampler({"script_SL": script}, prompts, jax.random.key(0), 0.0)
    assert got.count == 6
    assert got.ids_NL[:, :4].tolist() == [[20 + n, *ids] for n in range(6)]
    assert got.finish_N.tolist() == [Finish.ANSWERED] * 6
    assert sampler.counters["decode_steps"] == 9  # three for every two prompts, in two calls
    with pytest.raises(UserError, match="5 tokens, more than prompt_length=4"):
        sampler({"script_SL": script}, [[1] * 5], jax.random.key(0), 0.0)


def test_a_wait_fraction_of_0_sees_to_slots_at_once_and_hangs_nothing(sampler, monkeypatch):
    monkeypatch.setattr(engine_lib, "bind", scripted)
    spec = dataclasses.replace(sampler.spec, wait_fraction=0.0)
    words = sampler.tokenizer
    config, args = tiny.shape(len(words)), (PLAIN_SEARCH, words, None, 4, TraceCounter())
    (ids,) = tiny.encode(["<answer> </answer>"])
    script = np.zeros((2, spec.length), np.int32)
    script[:, 1 : 1 + len(ids)] = ids
    got = Sampler("test", config, spec, *args)(
        {"script_SL": script}, [[20]], jax.random.key(0), 0.0
    )
    assert got.finish_N.tolist() == [Finish.ANSWERED]
