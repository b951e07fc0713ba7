"""Prompts that several episodes share, and a cache that grows: nothing but the work changes."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from zest_jax.rollout.filling import share_prompts
from zest_jax.rollout.protocols import PLAIN_SEARCH
from zest_jax.rollout.state import RolloutSpec

SPEC = RolloutSpec(
    slots=3, prompt_length=4, action_length=8, observation_length=40, searches=1, wait_fraction=0.4
)
# Groups of three: their rollouts are neighbours, and a group does not fit three slots evenly.
PROMPTS = [[7, 5 + group, 9][: 2 + group % 2] for group in range(4) for _ in range(3)]


@pytest.fixture(scope="module")
def world():
    return tiny.search_world()


def test_who_copies_a_prompt_and_from_whom():
    prompt_NP = np.array([[1, 2], [1, 2], [1, 2], [3, 0], [3, 4], [3, 4]])
    length_N = np.array([2, 2, 2, 1, 2, 2])
    # Slot 0 goes on with episode 1; slot 1 had 0 and takes 2; the others take 3, 4, 5.
    before_S, episode_S = np.array([1, 0, 6, 6, 6]), np.array([1, 2, 3, 4, 5])
    taken_S = np.array([False, True, True, True, True])
    got = share_prompts(prompt_NP, length_N, before_S, episode_S, taken_S)
    assert got.held_S.tolist() == [False, True, False, False, False]
    assert got.holder_S[1] == 0  # the first of two that hold it
    assert got.follows_S.tolist() == [False, False, False, False, True]
    assert got.leader_S[4] == 3


def same(one, two):
    np.testing.assert_array_equal(one.ids_NL, two.ids_NL)
    np.testing.assert_array_equal(one.finish_N, two.finish_N)
    np.testing.assert_allclose(one.logp_NL, two.logp_NL, atol=2e-5)
    assert one.searches_N.sum() > 0


def test_a_growing_cache_changes_nothing(world):
    _, _, _, got, _ = tiny.roll_out(world, PLAIN_SEARCH, SPEC, PROMPTS, 1.0)
    growing = dataclasses.replace(SPEC, cache_stages=3)
    assert len(growing.cache_lengths) == 3 and growing.cache_lengths[-1] == SPEC.cache_lengths[0]
    _, _, _, grown, _ = tiny.roll_out(world, PLAIN_SEARCH, growing, PROMPTS, 1.0)
    same(got, grown)


def test_slots_are_filled_the_same_in_blocks_of_any_size(world, monkeypatch):
    """Tokens of all slots one after the other, against those of each slot on their own."""
    tokenizer, config, *rest = world
    _, _, _, want, counters = tiny.roll_out(world, PLAIN_SEARCH, SPEC, PROMPTS, 1.0)
    monkeypatch.setattr("zest_jax.models.attention_tiles._ROWS", 16)
    packed = (tokenizer, dataclasses.replace(config, decoding="pallas"), *rest)
    for tokens in (9, 1000):  # blocks of one tile and a rest, and one block for all
        spec = dataclasses.replace(SPEC, packed_tokens=tokens)
        _, _, _, got, filled = tiny.roll_out(packed, PLAIN_SEARCH, spec, PROMPTS, 1.0)
        same(got, want)
        assert int(filled["prefilled"]) == int(counters["prefilled"])


def test_shared_prompts_change_the_work_alone(world, monkeypatch):
    """With the kernels' layout of the cache; the one of XLA is compared with a Python loop."""
    tokenizer, config, *rest = world
    world = (tokenizer, dataclasses.replace(config, decoding="pallas"), *rest)
    _, _, _, got, counters = tiny.roll_out(world, PLAIN_SEARCH, SPEC, PROMPTS, 1.0)

    def alone(*args):
        shared = share_prompts(*args)
        nobody = jax.numpy.zeros_like(shared.held_S)
        return dataclasses.replace(shared, held_S=nobody, follows_S=nobody)

    monkeypatch.setattr("zest_jax.rollout.engine.share_prompts", alone)
    other = dataclasses.replace(SPEC, wait_fraction=0.41)  # or the compiled program would be reused
    _, _, _, separate, all_counters = tiny.roll_out(world, PLAIN_SEARCH, other, PROMPTS, 1.0)
    same(got, separate)
    saved = sum(map(len, PROMPTS)) - sum(len(PROMPTS[i]) for i in range(0, 12, 3))
    assert int(all_counters["prefilled"]) - int(counters["prefilled"]) == saved
