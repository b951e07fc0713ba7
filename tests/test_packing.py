"""Packing: a layout worked by hand, its errors, and nothing lost or mixed for any items."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zest_jax.learning.packing import Item, PackSpec, pack


def item(ids, targets, logp=None):
    logp = np.zeros(len(targets)) if logp is None else np.array(logp)
    return Item(np.array(ids, np.int32), np.array(targets, np.int64), logp.astype(np.float32))


A = item([1, 2, 3], [1, 2], [-0.1, -0.2])
B = item([4, 5, 6, 7], [3], [-0.3])
C = item([8, 9], [1], [-0.4])


def test_a_layout_worked_by_hand():
    # Longest first: B opens row 0, A does not fit beside it and opens row 1, C fits behind B.
    got = pack([A, B, C], PackSpec(rows=2, length=6, targets=3, micro_batches=2))
    assert got.ids_MRL[0].tolist() == [[4, 5, 6, 7, 8, 9], [1, 2, 3, 0, 0, 0]]
    assert got.position_MRL[0].tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 0]]
    assert got.segment_MRL[0].tolist() == [[1, 1, 1, 1, 2, 2], [1, 1, 1, 0, 0, 0]]
    assert got.at_MRX[0].tolist() == [[2, 4, 0], [0, 1, 0]]
    assert got.target_MRX[0].tolist() == [[7, 9, 0], [2, 3, 0]]
    assert got.owner_MRX[0].tolist() == [[1, 2, 0], [0, 0, 0]]
    assert got.mask_MRX[0].tolist() == [[True, True, False], [True, True, False]]
    np.testing.assert_array_equal(
        got.logp_MRX[0], np.array([[-0.3, -0.4, 0], [-0.1, -0.2, 0]], np.float32)
    )
    assert got.micro_batches == 1 and got.loss_tokens == 4
    for name in ("ids_MRL", "segment_MRL", "mask_MRX"):
        assert not getattr(got, name)[1].any(), "the second micro-batch holds nothing"


def test_owners_are_as_given():
    got = pack([A, B, C], PackSpec(2, 6, 3, 1), owners=[30, 10, 20])
    assert got.owner_MRX[0].tolist() == [[10, 20, 0], [30, 30, 0]]


def test_a_row_is_full_when_its_targets_are():
    # C's two tokens would fit behind B, its target does not.
    got = pack([B, C], PackSpec(rows=2, length=6, targets=1, micro_batches=1))
    assert got.ids_MRL[0].tolist() == [[4, 5, 6, 7, 0, 0], [8, 9, 0, 0, 0, 0]]


def test_micro_batches_in_use_are_counted():
    counts = [pack([A] * n, PackSpec(2, 3, 2, 3)).micro_batches for n in (0, 1, 2, 3, 5)]
    assert counts == [0, 1, 1, 2, 3]


def test_an_item_without_targets_takes_room_and_gives_no_loss():
    got = pack([item([1, 2], []), C], PackSpec(1, 4, 1, 1))
    assert got.ids_MRL[0, 0].tolist() == [1, 2, 8, 9]
    assert got.loss_tokens == 1 and got.at_MRX[0, 0, 0] == 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (PackSpec(2, 3, 3, 2), "4 tokens with 1 targets does not fit rows of 3"),
        (PackSpec(2, 6, 1, 2), "3 tokens with 2 targets does not fit rows of 6 with 1"),
        (PackSpec(1, 4, 3, 2), "3 sequences need more than 2 x 1 rows"),
    ],
)
def test_what_does_not_fit_is_an_error(spec, message):
    with pytest.raises(ValueError, match=message):
        pack([A, B, C], spec)


def test_a_spec_for_items_holds_them_even_alone_in_their_rows():
    assert PackSpec.for_items(5, rows=2, length=4, targets=3) == PackSpec(2, 4, 3, 3)
    pack([B] * 5, PackSpec.for_items(5, rows=2, length=4, targets=3))


@st.composite
def many_items(draw):
    items = []
    for _ in range(draw(st.integers(0, 9))):
        ids = draw(st.lists(st.integers(0, 50), min_size=1, max_size=7))
        targets = sorted(draw(st.sets(st.integers(1, 6), max_size=4)))
        targets = [t for t in targets if t < len(ids)]
        logp = draw(st.lists(st.floats(-9, 0, width=32), min_size=7, max_size=7))
        items.append(item(ids, targets, logp[: len(targets)]))
    return items


@given(many_items(), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_unpacking_gives_the_items_back(items, rows):
    spec = PackSpec.for_items(max(1, len(items)), rows, length=9, targets=5)
    owners = [100 + i for i in range(len(items))]
    got = pack(items, spec, owners)
    assert got.loss_tokens == sum(len(i.targets) for i in items)
    found, sequences = {}, []
    for m in range(spec.micro_batches):
        for r in range(rows):
            segment_L, position_L = got.segment_MRL[m, r], got.position_MRL[m, r]
            assert m < got.micro_batches or not segment_L.any()
            for s in range(1, segment_L.max(initial=0) + 1):
                own = np.flatnonzero(segment_L == s)
                assert position_L[own].tolist() == list(range(len(own)))
                assert np.array_equal(own, np.arange(own[0], own[0] + len(own))), "in one piece"
                ids = got.ids_MRL[m, r, own]
                # A target belongs to the sequence that its predicting position lies in.
                here = got.mask_MRX[m, r] & np.isin(got.at_MRX[m, r], own)
                targets = got.at_MRX[m, r, here] - own[0] + 1
                assert got.target_MRX[m, r, here].tolist() == ids[targets].tolist()
                assert len(set(got.owner_MRX[m, r, here])) <= 1
                sequences.append(
                    (ids.tolist(), targets.tolist(), got.logp_MRX[m, r, here].tolist())
                )
                for owner in got.owner_MRX[m, r, here]:
                    found[int(owner)] = sequences[-1]
    want = [(i.ids.tolist(), i.targets.tolist(), i.logp.tolist()) for i in items]
    assert sorted(sequences) == sorted(want)
    assert found == {100 + n: w for n, w in enumerate(want) if w[1]}


def test_a_row_holds_no_more_sequences_than_it_may():
    items = [Item(np.arange(2), np.array([1]), np.zeros(1)) for _ in range(5)]
    packed = pack(items, PackSpec(rows=3, length=10, targets=5, micro_batches=1, segments=2))
    assert packed.segment_MRL.max(-1).tolist() == [[2, 2, 1]]
    assert packed.segments == 2
