"""Packed log-probabilities against one sequence at a time, and the contexts that they score."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny_world import tiny_world
from written import judge_chain

from zest_jax.learning.likelihood import as_rows, sequence_log_likelihood, target_log_probs
from zest_jax.learning.packing import Item, PackSpec, pack
from zest_jax.models import bind
from zest_jax.rewards.information_gain import FULL, HOP_1, NONE, ONE_SHOT, SOURCE
from zest_jax.rollout.protocols import PLAIN_SEARCH
from zest_jax.tasks.proposals import context_items
from zest_jax.tasks.types import Chain

LENGTH = 24


@pytest.fixture(scope="module")
def model():
    return tiny.policy(vocab_size=40)


def random_items(count, seed=0):
    rng = np.random.default_rng(seed)
    items = []
    for _ in range(count):
        ids = rng.integers(0, 40, rng.integers(2, 12)).astype(np.int32)
        targets = np.flatnonzero(rng.random(len(ids)) < 0.5)
        targets = targets[targets > 0]
        items.append(Item(ids, targets, np.zeros(len(targets), np.float32)))
    return items


@functools.partial(jax.jit, static_argnums=(0, 3))
def scored(config, params, packed, temperature=1.0):
    """Log-probabilities and entropies of all targets, [M, R, X] each."""
    policy = bind(config, params)
    rows = as_rows(packed)
    each = [
        target_log_probs(policy, jax.tree.map(lambda x, m=m: x[m], rows), temperature=temperature)
        for m in range(packed.ids_MRL.shape[0])
    ]
    return tuple(jnp.stack(parts) for parts in zip(*each, strict=True))


likelihood = jax.jit(sequence_log_likelihood, static_argnums=(0, 3))
SPEC = PackSpec(rows=2, length=LENGTH, targets=16, micro_batches=3)


def test_packed_targets_score_as_in_a_forward_pass_of_their_own(model):
    config, params = model
    items = random_items(9)
    packed = pack(items, SPEC)
    assert packed.segment_MRL.max() > 1, "some rows must hold several sequences"
    logp_MRX, entropy_MRX = (np.asarray(x) for x in scored(config, params, packed))
    assert packed.mask_MRX.sum() == sum(len(i.targets) for i in items) > 20
    seen = [0] * len(items)
    for at in zip(*np.nonzero(packed.mask_MRX), strict=True):
        owner = packed.owner_MRX[at]
        item, k = items[owner], seen[owner]
        seen[owner] += 1  # targets of an item keep their order
        rows = tiny.log_probs(config, params, item.ids, LENGTH)
        row = rows[item.targets[k] - 1]
        assert logp_MRX[at] == pytest.approx(row[item.ids[item.targets[k]]], abs=5e-6)
        assert entropy_MRX[at] == pytest.approx(-(np.exp(row) * row).sum(), abs=5e-6)


def test_neighbours_do_not_matter(model):
    config, params = model
    item, *others = random_items(7, seed=1)
    item = Item(item.ids, np.arange(1, len(item.ids)), np.zeros(len(item.ids) - 1, np.float32))

    def of_item(items):
        packed = pack(items, SPEC)
        mask = packed.mask_MRX & (packed.owner_MRX == len(items) - 1)
        return np.asarray(scored(config, params, packed)[0])[mask], packed

    alone, _ = of_item([item])
    for company in (others, others[::-1], others[:2]):
        together, packed = of_item([*company, item])
        assert packed.segment_MRL.max() > 1
        np.testing.assert_allclose(together, alone, atol=2e-6)


def test_temperature_divides_the_logits(model):
    config, params = model
    (item,) = random_items(1, seed=4)
    packed = pack([item], SPEC)
    got = np.asarray(scored(config, params, packed, 0.5)[0])[packed.mask_MRX]
    rows = 2 * tiny.log_probs(config, params, item.ids, LENGTH)  # logits up to a constant, / 0.5
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    want = [rows[t - 1, item.ids[t]] for t in item.targets]
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_sequence_log_likelihood_is_the_mean_over_the_targets(model):
    config, params = model
    items = random_items(6, seed=2)
    items[3] = Item(items[3].ids, np.zeros(0, int), np.zeros(0, np.float32))
    owners = [11, 3, 5, 7, 0, 2]
    got = np.asarray(likelihood(config, params, pack(items, SPEC, owners), 12))
    want = np.zeros(12)
    for owner, item in zip(owners, items, strict=True):
        if len(item.targets):
            want[owner] = tiny.target_log_probs(config, params, item, LENGTH).mean()
    np.testing.assert_allclose(got, want, atol=5e-6)
    assert got[7] == 0  # no targets
    assert not np.asarray(likelihood(config, params, pack([], SPEC), 12)).any()


# ------------------------------------------------------------------------- contexts of a proposal

FRANCE, PARIS, SEINE = (
    f"<information> {text}</information>"
    for text in (
        "France: Its capital is Paris. Old.",
        "Paris: Its river is Seine. Its home is France.",
        "Seine: It has friends, Paris and Loire.",
    )
)
TWO = Chain("fr|capital|pa|river|se", (0, 1, 2), (0, 1))
ONE = Chain("pa|river|se", (1, 2), (1,))
LONGEST = 400


def proposal(chain, world, question, answer="Seine"):
    output = f"<think> so</think><question> {question}</question><answer> {answer}</answer>"
    return judge_chain(chain, output, world)


@pytest.fixture
def contexts(tmp_path):
    world = tiny_world(tmp_path)
    proposals = [
        proposal(TWO, world, "What is the river of the capital of France?"),
        proposal(TWO, world, "What is the Seine?"),  # gives the answer away
        proposal(ONE, world, "What is the river of Paris?"),
    ]
    shown = [SEINE, FRANCE, PARIS]
    return context_items(proposals, shown, PLAIN_SEARCH, tiny.encode, columns=6, longest=LONGEST)


def test_contexts_are_the_solvers_own_words(contexts):
    items, owners, valid_BC = contexts
    two, one = (f"Q: What is the river of {x}?\n" for x in ("the capital of France", "Paris"))
    want = {
        FULL: f"{two}{FRANCE}{PARIS}{SEINE}<answer> Seine",
        NONE: f"{two}<answer> Seine",
        SOURCE: f"{two}{FRANCE}<answer> Seine",
        ONE_SHOT: f"{two}{SEINE}<answer> Seine",
        HOP_1: f"{two}{PARIS}<answer> Seine",
        HOP_1 + 1: f"{two}{SEINE}<answer> Seine",
        12 + ONE_SHOT: f"{one}{PARIS}<answer> Seine",
        12 + NONE: f"{one}<answer> Seine",
    }
    got = {o: tiny.tokenizer().decode(i.ids) for o, i in zip(owners, items, strict=True)}
    assert got == want
    assert valid_BC.tolist() == [
        [True] * 6,
        [False] * 6,
        [c in (NONE, ONE_SHOT) for c in range(6)],
    ]


def test_only_the_answers_tokens_are_scored_and_they_are_the_same_everywhere(contexts):
    items, _, _ = contexts
    (answer,) = tiny.encode([" Seine"])
    (tag,) = tiny.encode(["<answer>"])
    for item in items:
        assert item.ids[item.targets].tolist() == answer
        assert item.targets.tolist() == list(range(len(item.ids) - len(answer), len(item.ids)))
        assert item.ids[: item.targets[0]].tolist()[-len(tag) :] == tag


def test_contexts_score_as_sequences_of_their_own(contexts):
    items, owners, valid_BC = contexts
    config, params = tiny.policy(len(tiny.tokenizer()), seed=5)
    longest = max(len(i.ids) for i in items)
    spec = PackSpec(rows=2, length=longest + 8, targets=64, micro_batches=4)
    loglik = np.asarray(likelihood(config, params, pack(items, spec, owners), valid_BC.size))
    want = np.zeros(valid_BC.size)
    for owner, item in zip(owners, items, strict=True):
        want[owner] = tiny.target_log_probs(config, params, item, longest).mean()
    np.testing.assert_allclose(loglik, want, atol=1e-5)
    assert np.ptp(want[owners]) > 0.01, "contexts that all score alike would prove nothing"


def test_a_context_that_is_too_long_loses_passages_and_no_word_of_the_answer(tmp_path):
    world = tiny_world(tmp_path)
    one = proposal(TWO, world, "What is the river of the capital of France?")
    longest = 60
    items, owners, _ = context_items([one], [SEINE], PLAIN_SEARCH, tiny.encode, 6, longest)
    (answer,) = tiny.encode([" Seine"])
    (tag,) = tiny.encode(["<answer>"])
    full = items[owners.index(FULL)]
    assert len(full.ids) == longest and full.ids[full.targets].tolist() == answer
    assert full.ids[: full.targets[0]].tolist()[-len(tag) :] == tag
    (whole,) = tiny.encode(["Q: What is the river of the capital of France?\n"])
    assert full.ids[: len(whole)].tolist() == whole
