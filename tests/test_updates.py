"""The jitted updates: sampler against trainer, accumulation, directions, Dr. Free's whole step."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import written

from zest_jax.learning import updates
from zest_jax.learning.advantages import HRPO
from zest_jax.learning.packing import Item, PackSpec, pack
from zest_jax.learning.updates import ProposalBatch, UpdateSpec
from zest_jax.models import param_shapes
from zest_jax.rewards.information_gain import (
    FULL,
    HOP_1,
    NONE,
    ONE_SHOT,
    SOURCE,
)
from zest_jax.rewards.terms import Signals, proposer_reward
from zest_jax.rollout.protocols import PLAIN_SEARCH
from zest_jax.rollout.state import RolloutSpec
from zest_jax.solving import sampled_items

# One shape for (almost) all tests, since every other one is another program to compile.
VOCAB, LENGTH, COUNT, EPISODES = 40, 16, 9, 16
PACKS = PackSpec(rows=2, length=LENGTH, targets=LENGTH, micro_batches=5)
SPEC = UpdateSpec(learning_rate=1e-3, max_grad_norm=1e9)
policy_update = jax.jit(updates.policy_update, static_argnums=(0, 1))
cloning_update = jax.jit(updates.cloning_update, static_argnums=(0, 1))


@pytest.fixture(scope="module")
def model():
    return tiny.policy(VOCAB, layers=1)


def random_items(config, params, count, seed=0):
    """Sequences with the log-probabilities that a sampler of these parameters would have noted."""
    rng = np.random.default_rng(seed)
    items = []
    for _ in range(count):
        ids = rng.integers(0, config.vocab_size, rng.integers(3, 12)).astype(np.int32)
        item = Item(ids, np.arange(2, len(ids)), np.zeros(0, np.float32))
        logp = tiny.target_log_probs(config, params, item, LENGTH).astype(np.float32)
        items.append(dataclasses.replace(item, logp=logp))
    return items


def total_log_prob(config, params, item):
    return tiny.target_log_probs(config, params, item, LENGTH).sum()


def gradients(state):
    """The last gradient of a fresh state's first step, from Adam's first moment."""
    (adam,) = [s for s in jax.tree.leaves(state.opt_state, is_leaf=_is_adam) if _is_adam(s)]
    return jax.tree.map(lambda m: np.asarray(m) / (1 - SPEC.b1), adam.mu)


def _is_adam(x):
    return hasattr(x, "mu")


def gap(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)


# ------------------------------------------------------------------------- sampler and trainer


@pytest.fixture(scope="module")
def sampled():
    world = tiny.search_world()
    spec = RolloutSpec(
        slots=5,
        prompt_length=4,
        action_length=10,
        observation_length=60,
        searches=2,
        query_length=6,
        wait_fraction=0.4,
    )
    prompts = [[5 + i, 9, 11 + 2 * i][: 1 + i % 3] for i in range(EPISODES)]
    episodes = {}
    for temperature in (1.0, 0.7):
        _, _, _, got, _ = tiny.roll_out(world, PLAIN_SEARCH, spec, prompts, temperature)
        assert got.searches_N.sum() > 0
        episodes[temperature] = got
    return world[1], world[2], episodes, spec


def first_update(sampled, items, temperature):
    config, params, _, spec = sampled
    packs = PackSpec.for_items(EPISODES, 4, spec.length, spec.length // 2)
    settings = dataclasses.replace(SPEC, temperature=temperature)
    advantage_B = np.linspace(-1, 1, EPISODES, dtype=np.float32) ** 3
    state = settings.init(params)
    _, metrics = policy_update(config, settings, state, pack(items, packs), advantage_B)
    return jax.device_get(metrics), advantage_B


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_trainer_gives_every_token_the_probability_it_was_drawn_with(sampled, temperature):
    episodes = sampled[2][temperature]
    items = sampled_items(episodes)
    metrics, advantage_B = first_update(sampled, items, temperature)
    assert abs(metrics["kl_to_sampler"]) < 1e-6
    assert metrics["exp_abs_delta"] < 1.001
    assert metrics["ratio"] == pytest.approx(1, abs=1e-4)
    assert metrics["clip_fraction"] == 0
    # With all ratios at 1 the loss is the token-weighted mean advantage, whatever the policy.
    tokens_B = np.array([len(i.targets) for i in items])
    want = -(advantage_B * tokens_B).sum() / tokens_B.sum()
    assert metrics["loss"] == pytest.approx(want, abs=1e-5)
    assert tokens_B.sum() == episodes.mask_NL.sum()


def test_another_temperature_or_one_token_off_would_be_seen(sampled):
    metrics, _ = first_update(sampled, sampled_items(sampled[2][0.7]), 1.0)
    assert metrics["kl_to_sampler"] > 1e-3 and metrics["exp_abs_delta"] > 1.01
    shifted = [
        dataclasses.replace(i, targets=np.maximum(i.targets - 1, 1))
        for i in sampled_items(sampled[2][1.0])
    ]
    metrics, _ = first_update(sampled, shifted, 1.0)
    assert metrics["kl_to_sampler"] > 1e-2


def test_a_choice_of_rows_is_packed_as_such(sampled):
    episodes = sampled[2][1.0]
    one, two = sampled_items(episodes, [7, 2])
    assert one.ids.tolist() == episodes.ids_NL[7, : episodes.length_N[7]].tolist()
    assert two.ids[two.targets].tolist() == episodes.sampled_ids(2)
    assert two.logp.tolist() == episodes.logp_NL[2][episodes.mask_NL[2]].tolist()


# ------------------------------------------------------------------------- the step itself


def padded(*advantages):
    """Advantages of the first rows; 0 for the rest."""
    return np.array([*advantages, *[0] * (COUNT - len(advantages))], np.float32)


def test_accumulation_changes_nothing(model):
    config, params = model
    items = random_items(config, params, COUNT)
    advantage_B = np.random.default_rng(1).normal(size=COUNT).astype(np.float32)
    results, used = [], []
    for packs in (PACKS, PackSpec(COUNT, LENGTH, LENGTH, 1), PackSpec(1, LENGTH, LENGTH, 9)):
        batch = pack(items, packs)
        used.append(int(batch.micro_batches))
        results.append(policy_update(config, SPEC, SPEC.init(params), batch, advantage_B))
    assert used[1] == 1 < used[0] < used[2], used
    (state, metrics), *others = results
    assert metrics["grad_norm"] > 0.1
    for other, other_metrics in others:
        assert gap(gradients(state), gradients(other)) < 1e-6
        assert gap(metrics, other_metrics) < 2e-6
        assert gap(state.params, other.params) < 1e-6


def test_two_halves_add_up_only_with_the_whole_steps_normaliser(model):
    """Unequal halves: the mean of their means is another gradient than the mean over all tokens."""
    config, params = model
    items = random_items(config, params, 6, seed=3)

    def grads(part, owners):
        batch = pack(part, PACKS, owners)
        return gradients(policy_update(config, SPEC, SPEC.init(params), batch, padded(*[1] * 6))[0])

    whole, one, two = grads(items, range(6)), grads(items[:1], [0]), grads(items[1:], range(1, 6))
    n, m = (sum(len(i.targets) for i in part) for part in (items[:1], items[1:]))
    weighted = jax.tree.map(lambda a, b: (n * a + m * b) / (n + m), one, two)
    assert gap(whole, weighted) < 1e-6
    assert gap(whole, jax.tree.map(lambda a, b: (a + b) / 2, one, two)) > 1e-3


def test_no_advantage_no_change(model):
    config, params = model
    batch = pack(random_items(config, params, 4), PACKS)
    state, metrics = policy_update(config, SPEC, SPEC.init(params), batch, padded())
    assert gap(state.params, params) == 0.0
    assert metrics["grad_norm"] == 0 and metrics["loss"] == 0 and state.step == 1


def test_what_is_rewarded_becomes_likelier_and_what_is_not_less(model):
    config, params = model
    items = random_items(config, params, 3, seed=5)
    batch = pack(items, PACKS)
    state, _ = policy_update(config, SPEC, SPEC.init(params), batch, padded(1, -1))
    before = [total_log_prob(config, params, item) for item in items]
    after = [total_log_prob(config, state.params, item) for item in items]
    rise = np.array(after) - before
    assert rise[0] > 0.01 and rise[1] < -0.01
    assert abs(rise[2]) < min(rise[0], -rise[1]), "the third moves only along with the others"


def test_weight_decay_is_of_matrices_only():
    config = tiny.shape(VOCAB, qkv_bias=True)
    params = jax.tree.map(lambda x: np.full(x.shape, 2, np.float32), param_shapes(config))
    spec = UpdateSpec(learning_rate=0.1, weight_decay=0.5)
    optimizer = spec.optimizer()

    @jax.jit
    def first_change(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optimizer.update(zeros, optimizer.init(params), params)[0]

    for path, moved in jax.tree_util.tree_leaves_with_path(first_change(params)):
        name = path[-1].key
        want = 0.0 if "norm" in name or "bias" in name else -0.1 * 0.5 * 2
        np.testing.assert_allclose(moved, want, rtol=1e-6, err_msg=name)


def test_gradients_are_scaled_down_to_their_largest_norm():
    gradient, weight = {"w": jnp.array([3.0, 4.0])}, {"w": jnp.zeros(2)}
    for limit, want in ((10.0, [3.0, 4.0]), (1.0, [0.6, 0.8])):
        spec = UpdateSpec(learning_rate=1.0, max_grad_norm=limit)
        optimizer = spec.optimizer()
        _, opt_state = optimizer.update(gradient, optimizer.init(weight), weight)
        state = updates.TrainState(weight, opt_state, jnp.int32(1))
        np.testing.assert_allclose(gradients(state)["w"], want, rtol=1e-5)


def test_cloning_lowers_its_loss_and_says_what_it_is(model):
    config, params = model
    items = random_items(config, params, 5, seed=6)
    batch = pack(items, PACKS)
    state, metrics = cloning_update(config, SPEC, SPEC.init(params), batch)
    logp = np.concatenate([tiny.target_log_probs(config, params, i, LENGTH) for i in items])
    assert metrics["loss"] == pytest.approx(-logp.mean(), abs=1e-5)
    _, later = cloning_update(config, SPEC, state, batch)
    assert later["loss"] < metrics["loss"] - 0.01


@pytest.mark.parametrize(
    ("fields", "rates"),
    [
        ({}, {0: 1.0, 7: 1.0}),
        ({"warmup_steps": 4}, {0: 0.0, 1: 0.25, 4: 1.0, 9: 1.0}),
        ({"total_steps": 10}, {0: 1.0, 5: 0.55, 10: 0.1, 20: 0.1}),
        ({"warmup_steps": 2, "total_steps": 12}, {0: 0.0, 1: 0.5, 2: 1.0, 7: 0.55, 12: 0.1}),
    ],
)
def test_schedules_by_hand(fields, rates):
    """The size of Adam's step on a constant gradient is the rate."""
    optimizer = UpdateSpec(learning_rate=1.0, **fields).optimizer()
    weight = {"w": jnp.zeros(())}
    state, step = optimizer.init(weight), jax.jit(optimizer.update)
    for n in range(max(rates) + 1):
        change, state = step({"w": jnp.float32(0.5)}, state, weight)
        if n in rates:
            assert -change["w"] == pytest.approx(rates[n], abs=1e-4), n


# ------------------------------------------------------------------------- no numbers

BREAKS = ("weight", "sampler", "advantage")


@pytest.mark.parametrize("moments", ["float32", "int8"])
@pytest.mark.parametrize("broken", BREAKS)
def test_an_update_that_is_not_finite_leaves_the_state_as_it_was(model, broken, moments):
    config, params = model
    spec = dataclasses.replace(SPEC, moments=moments)
    items = random_items(config, params, 4, seed=8)
    state, metrics = policy_update(config, spec, spec.init(params), pack(items, PACKS), padded(1))
    assert state.step == 1 and metrics["not_finite_logp"] == 0  # moments are not all zeros
    advantage_B = padded(1, -1)
    if broken == "weight":
        poisoned = jax.tree.map(jnp.array, state.params)
        poisoned["final_norm_D"] = poisoned["final_norm_D"].at[3].set(jnp.nan)
        state = dataclasses.replace(state, params=poisoned)
    elif broken == "sampler":  # which the bounded ratio would hide
        items[2].logp[1] = -np.inf
    else:
        advantage_B[1] = np.nan
    before = jax.tree.map(np.array, state)
    after, metrics = policy_update(config, spec, state, pack(items, PACKS), advantage_B)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), before)
    assert metrics["not_finite_sampler_logp"] == (broken == "sampler")
    tokens = sum(len(i.targets) for i in items)
    assert metrics["not_finite_logp"] == (tokens if broken == "weight" else 0)
    assert np.isfinite(metrics["loss"]) == (broken == "sampler")


# ------------------------------------------------------------------------- Dr. Free's step

HOPS = np.array([1, 2, 2, 1, 2, 3, 2, 1, 2], np.int32)
COLUMNS = HOP_1 + 3


def dr_free(signals, loglik_BC):
    return proposer_reward(signals, loglik_BC, options=written.CONFIG.reward)


def proposal_batch(config, params, anchor, seed, hops=HOPS, order=None):
    """A batch whose contexts are random sequences, and the items behind it."""
    rng = np.random.default_rng(seed)
    B = len(hops)
    valid_BC = np.zeros((B, COLUMNS), bool)
    for b, h in enumerate(hops):
        valid_BC[b, [NONE, ONE_SHOT] if h == 1 else [FULL, NONE, SOURCE, ONE_SHOT]] = True
        if h > 1:
            valid_BC[b, HOP_1 : HOP_1 + h] = True
    format_B = rng.choice([0.5, 1.0, 1.0, 1.0], B).astype(np.float32)
    grounded_B = rng.random(B) < 0.8
    valid_BC[rng.integers(B)] = False  # one that did not pass has no contexts at all
    owners = np.flatnonzero(valid_BC)
    contexts = random_items(config, anchor, len(owners), seed + 50)
    proposals = random_items(config, params, B, seed + 100)
    batch = ProposalBatch(
        proposals=pack(proposals, PACKS),
        contexts=pack(contexts, PackSpec(4, 2 * LENGTH, 32, 16), owners),
        signals=Signals(
            format_B=format_B,
            passed_B=(format_B == 1) & grounded_B,
            hops_B=hops,
            probed_B=np.zeros(B, bool),
            difficulty_B=np.zeros(B, np.float32),
            valid_BC=valid_BC,
        ),
        group_B=hops,
        reward_order_B=np.arange(B) if order is None else order,
    )
    loglik_BC = np.zeros(B * COLUMNS)
    for owner, item in zip(owners, contexts, strict=True):
        loglik_BC[owner] = tiny.target_log_probs(config, anchor, item, LENGTH).mean()
    return batch, loglik_BC.reshape(B, COLUMNS)


def by_hand(loglik_BC, batch):
    """Gain and reward of every proposal, in plain Python from the formulas of the paper."""
    gains, rewards = [], []
    for b, hops in enumerate(batch.signals.hops_B):
        valid = batch.signals.valid_BC[b]
        evidence = ONE_SHOT if hops == 1 else FULL
        shortcuts = [NONE] if hops == 1 else [NONE, SOURCE, ONE_SHOT, *range(HOP_1, HOP_1 + hops)]
        gain = 0.0
        if valid[evidence]:
            gain = loglik_BC[b, evidence] - max(loglik_BC[b, c] for c in shortcuts if valid[c])
        reward = 0.2 * batch.signals.format_B[b]
        if batch.signals.passed_B[b]:
            reward += 3 * np.tanh(max(0.0, gain) / 3)
        gains.append(gain)
        rewards.append(reward)
    return np.array(gains), np.array(rewards)


def advantages_by_hand(rewards, hops):
    out = np.zeros(len(rewards))
    for h in set(hops.tolist()):
        own = np.flatnonzero(hops == h)
        if len(own) > 1 and np.ptp(rewards[own]) > 0:
            centred = rewards[own] - rewards[own].mean()
            out[own] = centred / (rewards[own].std(ddof=1) + 1e-6)
    return out


@pytest.fixture(scope="module")
def proposer_step(model):
    """The whole step as one program that may be traced once; and a proposer that has moved on."""
    config, anchor = model
    params = jax.tree.map(lambda x: x * 1.02, anchor)
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(state, anchor, batch):
        return updates.proposer_update(config, config, SPEC, HRPO, dr_free, state, anchor, batch)

    return config, anchor, params, step


@pytest.mark.parametrize("seed", [0, 1])
def test_likelihood_gain_reward_and_advantage_by_hand(proposer_step, seed):
    config, anchor, params, step = proposer_step
    batch, loglik_BC = proposal_batch(config, params, anchor, seed)
    state, metrics, per_row = step(SPEC.init(params), anchor, batch)
    np.testing.assert_allclose(per_row["loglik_BC"], loglik_BC, atol=5e-6)
    gains, rewards = by_hand(loglik_BC, batch)
    assert (gains > 0.05).any() and (gains < 0).any()
    np.testing.assert_allclose(per_row["gain"], gains, atol=1e-5)
    np.testing.assert_allclose(per_row["reward"], rewards, atol=1e-5)
    advantage_B = advantages_by_hand(rewards, HOPS)
    assert advantage_B[5] == 0, "the only chain of three hops has nothing to be compared with"
    np.testing.assert_allclose(per_row["advantage"], advantage_B, atol=1e-3)
    # A frozen proposer is scored alike.
    score = jax.jit(lambda a, b: updates.proposer_score(config, HRPO, dr_free, a, b))
    scored = score(anchor, batch)
    for name, value in scored.items():
        np.testing.assert_allclose(value, per_row[name], atol=1e-5, err_msg=name)
    # The update is the policy's own with these advantages.
    want, want_metrics = policy_update(
        config, SPEC, SPEC.init(params), batch.proposals, per_row["advantage"]
    )
    assert gap(gradients(state), gradients(want)) < 1e-6
    assert metrics["grad_norm"] == pytest.approx(float(want_metrics["grad_norm"]), rel=1e-5)
    assert metrics["kl_to_sampler"] < 1e-6


def test_the_shuffled_control_permutes_the_advantages(proposer_step):
    config, anchor, params, step = proposer_step
    hops = np.full(COUNT, 2, np.int32)
    order = np.random.default_rng(9).permutation(COUNT)
    assert (order != np.arange(COUNT)).sum() > 4
    plain, _ = proposal_batch(config, params, anchor, 2, hops)
    mixed, _ = proposal_batch(config, params, anchor, 2, hops, order)
    _, _, one = step(SPEC.init(params), anchor, plain)
    state, _, two = step(SPEC.init(params), anchor, mixed)
    np.testing.assert_array_equal(one["reward"], two["reward"])
    assert np.ptp(one["advantage"]) > 0.5
    np.testing.assert_allclose(two["advantage"], np.asarray(one["advantage"])[order], atol=1e-5)
    want, _ = policy_update(config, SPEC, SPEC.init(params), plain.proposals, two["advantage"])
    assert gap(gradients(state), gradients(want)) < 1e-6


def test_a_likelihood_that_is_no_number_leaves_the_proposer_as_it_was(proposer_step):
    """The gain is bounded, so that reward, loss and gradient would all be finite."""
    config, anchor, params, step = proposer_step
    batch, _ = proposal_batch(config, params, anchor, 0)
    start = SPEC.init(params)
    # A head that lets one token have no probability at all.
    never = anchor | {"head_DV": anchor["head_DV"].at[:, 7].set(jnp.inf)}
    state, metrics, per_row = step(start, never, batch)
    assert not np.isfinite(np.asarray(per_row["loglik_BC"])[batch.signals.valid_BC]).all()
    assert metrics["not_finite_loglik"] > 0 and metrics["not_finite_logp"] == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), jax.device_get(start))
