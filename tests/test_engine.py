"""The compiled rollout against the plain Python loop, and the masks of its trajectories."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from reference_rollout import reference_episode

from zest_jax.rollout.protocols import PLAIN_SEARCH
from zest_jax.rollout.protocols.dr_zero import SOLVER as DR_ZERO_SOLVER
from zest_jax.rollout.state import RolloutSpec
from zest_jax.rollout.stops import token_bytes
from zest_jax.rollout.trajectories import Finish

CORRECTING = dataclasses.replace(PLAIN_SEARCH, name="correcting", correction=" no!")

# A protocol of turns and calls, with texts so short that a tiny policy gets through several turns.
TURNS = ("<|im_start|>", "<|im_end|>")
CALLING = dataclasses.replace(
    DR_ZERO_SOLVER,
    name="calling",
    most_queries=2,
    observation="<|im_end|>{passages}<|im_start|>",
    between_results="|",
    passage="{title}:{text}",
    between_passages=";",
    correction="<|im_end|> no!<|im_start|>",
)
CALL, LIST = (
    '{"name": "search", "arguments": {"query',
    '{"name": "search", "arguments": {"query_list',
)
WRITES = {
    f'<tool_call>{CALL}": "ab"}}}}</tool_call>': 1.9,  # tags, call and query in one token
    f'<tool_call>{LIST}": ["ab", "': 1.4,
    f'<tool_call>{LIST}": ["a': 1.2,
    f'<tool_call>{LIST}": ["cd", "ef", "gh': 1.2,
    '", "b': 0.9,
    'c"]}}</tool_call>': 1.4,
    '"]}}</tool': 1.2,
    "_call>": 1.2,
    "<answer>ab</answer>": 1.6,
    "</answer>": 1.1,
    "<|im_end|>": 0.7,
}


@pytest.fixture(scope="module")
def world():
    return tiny.search_world()


@pytest.fixture(scope="module")
def calling_world():
    return tiny.search_world(WRITES, [t for t in WRITES if t not in (*tiny.TAGS, *TURNS)], TURNS)


def spec_of(**sizes):
    return RolloutSpec(
        prompt_length=8,
        action_length=12,
        observation_length=80,
        searches=2,
        query_length=6,
        **sizes,
    )


def compare(world, protocol, spec, prompts, **fields):
    """The compiled episodes, each the same as the Python loop's."""
    tokenizer, _, params, titles, texts = world
    engine, retriever, draws, got, _ = tiny.roll_out(
        world, protocol, spec, prompts, temperature=1.0, **fields
    )

    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def retrieve(queries):
        padded = np.zeros((1, spec.queries, spec.query_length), np.int32)
        length = np.zeros((1, spec.queries), np.int32)
        for u, query in enumerate(queries):
            padded[0, u, : len(query)], length[0, u] = query, len(query)
        rows = np.asarray(retriever.search(padded, length)[0])[0, : len(queries)]
        # Every piece is tokenised apart; written anew here, from the protocol's texts.
        before, after = protocol.observation.split("{passages}")
        ids = []
        for u, found in enumerate(rows):
            ids += encode(before if u == 0 else protocol.between_results)
            for r, row in enumerate(found):
                ids += encode(protocol.between_passages) if r and protocol.between_passages else []
                ids += encode(protocol.passage.format(title=titles[row], text=texts[row]))
        return ids + encode(after)

    reference = functools.partial(
        reference_episode,
        engine,
        params,
        tokenizer,
        token_bytes(tokenizer),
        retrieve,
        key=draws.key,
        temperature=1.0,
    )
    for n, prompt in enumerate(prompts):
        want = reference(prompt=prompt, episode=n)
        length = len(want.ids)
        assert got.length_N[n] == length
        assert got.ids_NL[n, :length].tolist() == want.ids
        assert got.mask_NL[n, :length].tolist() == want.mask
        assert got.role_NL[n, :length].tolist() == want.roles
        assert not got.mask_NL[n, length:].any() and not got.role_NL[n, length:].any()
        np.testing.assert_allclose(got.logp_NL[n, :length], want.logps, atol=2e-4)
        assert got.finish_N[n] == want.finish
        assert got.searches_N[n] == len(want.queries)
        assert got.duplicates_N[n] == want.duplicates
        assert got.corrections_N[n] == want.corrections
        for t, asked in enumerate(want.queries):
            assert got.asked_NT[n, t] == len(asked)
            for (begin, end), query in zip(got.queries_NTU2[n, t], asked, strict=False):
                assert got.ids_NL[n, begin:end].tolist()[: spec.query_length] == query
    return got


@pytest.mark.parametrize("protocol", [PLAIN_SEARCH, CORRECTING], ids=lambda p: p.name)
@pytest.mark.parametrize(("slots", "wait", "narrowings"), [(8, 1.0, 0), (3, 0.4, 0), (7, 0.3, 1)])
def test_the_compiled_rollout_writes_the_same_ids_as_a_python_loop(
    world, protocol, slots, wait, narrowings
):
    # Neighbours that share a prompt, and others.
    prompts = [[5 + i, 9, 11 + 2 * i][: 1 + i % 3] for i in (0, 1, 1, 2, 3, 4, 4, 4, 5, 6, 7, 8)]
    spec = spec_of(slots=slots, wait_fraction=wait, narrowings=narrowings)
    got = compare(world, protocol, spec, prompts)
    assert len(set(got.finish_N.tolist())) > 1, "the draws should cover several ends"
    assert got.searches_N.sum() > 0


def test_calls_with_several_queries_as_in_a_python_loop(calling_world):
    """In turns of a chat, with corrections, within a length in all; tokens across all borders."""
    spec = spec_of(slots=6, wait_fraction=0.5, queries=2, response_length=28)
    prompts = [[5 + i, 9, 11 + 2 * i][: 1 + i % 3] for i in range(20)]
    got = compare(calling_world, CALLING, spec, prompts, top_k=1)
    assert (got.asked_NT == 2).any() and (got.asked_NT == 1).any()
    assert got.corrections_N.any() and got.duplicates_N.any()
    assert {Finish.ANSWERED, Finish.TOO_LONG} < set(got.finish_N.tolist())
    assert (got.length_N - got.prompt_length_N).max() <= 28
    rows = got.rows_NTUR[got.asked_NT == 1]
    assert (rows[:, 1] == -1).all() and (rows[:, 0] >= 0).any()


def test_greedy_takes_the_most_probable_token_and_ignores_the_key(world):
    spec = RolloutSpec(slots=2, prompt_length=4, action_length=6, observation_length=80, searches=1)
    prompts, config, params = [[5, 6], [7]], world[1], world[2]
    _, _, _, got, _ = tiny.roll_out(world, PLAIN_SEARCH, spec, prompts, temperature=0.0)
    for n in range(2):
        ids = got.ids_NL[n, : got.length_N[n]]
        rows = tiny.log_probs(config, params, ids, spec.length)
        for at in np.flatnonzero(got.mask_NL[n]):
            assert ids[at] == np.argmax(rows[at - 1])
            assert got.logp_NL[n, at] == pytest.approx(rows[at - 1].max(), abs=2e-4)
    _, _, _, again, _ = tiny.roll_out(world, PLAIN_SEARCH, spec, prompts, 0.0, seed=8)
    assert np.array_equal(got.ids_NL, again.ids_NL)


def test_slots_and_refilling_change_nothing_but_the_utilisation(world):
    prompts = [[5 + i] for i in range(7)]
    base = RolloutSpec(slots=7, prompt_length=4, action_length=8, observation_length=80, searches=2)
    _, _, _, one, _ = tiny.roll_out(world, PLAIN_SEARCH, base, prompts, 1.0)
    few = dataclasses.replace(base, slots=2, wait_fraction=0.5)
    _, _, _, two, counters = tiny.roll_out(world, PLAIN_SEARCH, few, prompts, 1.0)
    assert np.array_equal(one.ids_NL, two.ids_NL)
    assert np.array_equal(one.mask_NL, two.mask_NL)
    assert 0 < float(counters["slot_utilisation"]) <= 1


def test_fewer_slots_at_the_end_change_nothing_but_the_utilisation(world):
    prompts = [[5 + i] for i in range(12)]
    base = spec_of(slots=8, wait_fraction=0.25)
    assert dataclasses.replace(base, narrowings=3).narrower == (4, 2, 1)
    assert dataclasses.replace(base, slots=5, narrowings=4).narrower == (3, 2, 1)
    _, _, _, one, wide = tiny.roll_out(world, PLAIN_SEARCH, base, prompts, 1.0)
    narrowing = dataclasses.replace(base, narrowings=2)
    _, _, _, two, narrow = tiny.roll_out(world, PLAIN_SEARCH, narrowing, prompts, 1.0)
    for name in ("ids_NL", "mask_NL", "rows_NTUR", "finish_N", "length_N"):
        assert np.array_equal(getattr(one, name), getattr(two, name)), name
    np.testing.assert_allclose(one.logp_NL, two.logp_NL, atol=1e-5)
    assert narrow["decode_steps"] == wide["decode_steps"]
    assert narrow["slot_utilisation"] > 1.2 * wide["slot_utilisation"]


def test_truncated_draws_are_written_down_twice(world):
    """As the trainer will see them, and as they were drawn."""
    from zest_jax.rollout.sampling import Truncation

    spec = RolloutSpec(
        slots=3,
        prompt_length=4,
        action_length=8,
        observation_length=80,
        searches=1,
        truncation=Truncation(top_k=5),
    )
    prompts, config, params = [[5], [6], [7], [8]], world[1], world[2]
    _, _, _, got, _ = tiny.roll_out(world, PLAIN_SEARCH, spec, prompts, 1.0)
    for n in range(len(prompts)):
        ids = got.ids_NL[n, : got.length_N[n]]
        rows = tiny.log_probs(config, params, ids, spec.length)
        for at in np.flatnonzero(got.mask_NL[n]):
            top = np.sort(rows[at - 1])[::-1][:5]
            assert rows[at - 1][ids[at]] >= top[-1] - 1e-4
            assert got.logp_NL[n, at] == pytest.approx(rows[at - 1][ids[at]], abs=2e-4)
            mass = np.log(np.exp(top).sum())
            assert got.drawn_logp_NL[n, at] == pytest.approx(got.logp_NL[n, at] - mass, abs=3e-4)


def test_nothing_leaves_the_device_within_a_rollout(world):
    """Proven by the program, which holds no call to the host, and by JAX's guard while it runs."""
    spec = RolloutSpec(slots=7, prompt_length=4, action_length=8, observation_length=80, searches=2)
    engine, retriever, draws, _, _ = tiny.roll_out(world, PLAIN_SEARCH, spec, [[5]] * 7, 1.0)
    prompts, lengths = jnp.full((7, 4), 5, jnp.int32), jnp.ones(7, jnp.int32)
    arguments = (world[2], engine.stop_table(world[0]), retriever, prompts, lengths, draws)
    run = tiny._rollout(engine)
    text = run.lower(*arguments).as_text()
    assert "stablehlo.while" in text
    for word in ("callback", "infeed", "outfeed", "stablehlo.send", "stablehlo.recv"):
        assert word not in text
    with jax.transfer_guard("disallow_explicit"):
        out, _ = run(*arguments)
        jax.block_until_ready(out)
    assert (np.asarray(out.length_N) > 1).all()
