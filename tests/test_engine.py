"""The compiled rollout against the plain Python loop, and the masks of its trajectories."""

import dataclasses
import functools

import numpy as np
import pytest
import tiny
from reference_rollout import reference_episode

from zest_jax.rollout.protocols import PLAIN_SEARCH
from zest_jax.rollout.state import RolloutSpec
from zest_jax.rollout.stops import token_bytes

CORRECTING = dataclasses.replace(PLAIN_SEARCH, name="correcting", correction=" no!")


@pytest.fixture(scope="module")
def world():
    return tiny.search_world()


@pytest.mark.parametrize("protocol", [PLAIN_SEARCH, CORRECTING], ids=lambda p: p.name)
@pytest.mark.parametrize(("slots", "wait"), [(8, 1.0), (3, 0.4)])
def test_the_compiled_rollout_writes_the_same_ids_as_a_python_loop(world, protocol, slots, wait):
    tokenizer, _, params, _, _ = world
    spec = RolloutSpec(
        slots=slots,
        prompt_length=8,
        action_length=12,
        observation_length=80,
        searches=2,
        query_length=6,
        wait_fraction=wait,
    )
    prompts = [[5 + i, 9, 11 + 2 * i][: 1 + i % 3] for i in range(12)]
    engine, retriever, draws, got, _ = tiny.roll_out(
        world, protocol, spec, prompts, temperature=1.0
    )
    as_bytes = token_bytes(tokenizer)

    def retrieve(query):
        padded = np.zeros((1, 1, spec.query_length), np.int32)
        padded[0, 0, : len(query)] = query
        rows, _ = retriever.search(padded, np.array([[len(query)]]))
        heads, tail = "<information>", "</information>"
        shown = heads + "".join(
            protocol.passage.format(title=world[3][r], text=world[4][r])
            for r in np.asarray(rows)[0, 0]
        )
        return tokenizer(shown + tail, add_special_tokens=False)["input_ids"]

    reference = functools.partial(
        reference_episode,
        engine,
        params,
        tokenizer,
        as_bytes,
        retrieve,
        key=draws.key,
        temperature=1.0,
    )
    finishes = []
    for n, prompt in enumerate(prompts):
        ids, mask, logps, finish, searches, queries = reference(prompt=prompt, episode=n)
        assert got.length_N[n] == len(ids)
        assert got.ids_NL[n, : len(ids)].tolist() == ids
        assert got.mask_NL[n, : len(ids)].tolist() == mask
        assert not got.mask_NL[n, len(ids) :].any()
        np.testing.assert_allclose(got.logp_NL[n, : len(ids)], logps, atol=2e-4)
        assert got.finish_N[n] == finish
        assert got.searches_N[n] == searches
        for t, query in enumerate(queries):
            begin, end = got.queries_NTU2[n, t, 0]
            assert got.ids_NL[n, begin:end].tolist() == query
        finishes.append(finish)
    assert len(set(finishes)) > 1, "the draws should cover several ends"
    assert got.searches_N.sum() > 0


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
