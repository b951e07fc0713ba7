"""The partitioned index: its training against worked numbers and loops, its search against numpy.

Clustered vectors, as in test_scann_index.py.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_scann_index import brute_force, clustered, recall

from zest_jax.errors import UserError
from zest_jax.retrieval import partition_training as training
from zest_jax.retrieval import partitioned_build
from zest_jax.retrieval.partitioned import PartitionSettings, score_ah
from zest_jax.retrieval.partitioned_build import block_rows, build, load, quantise_remainder, save

TREE = PartitionSettings(
    num_leaves=30, num_leaves_to_search=10, training_sample_size=3000, reorder=60
)
KINDS = {
    "bfloat16": TREE,
    "int8": dataclasses.replace(TREE, reorder_type="int8", spherical=True),
    "int4": dataclasses.replace(TREE, reorder_type="int4", soar_lambda=1.0),
    "codes only": dataclasses.replace(TREE, reorder=0, soar_lambda=1.5),
    "no tree": dataclasses.replace(TREE, num_leaves=0, num_leaves_to_search=0),
    "odd blocks": dataclasses.replace(TREE, dimensions_per_block=3, reorder_type="int4"),
    "brute force": PartitionSettings(dimensions_per_block=0, reorder_type="int8"),
}


@pytest.fixture(scope="module")
def data():
    return clustered(3001)


@pytest.fixture(scope="module")
def built(data):
    """Indexes by kind, each built once."""
    made = {}

    def get(kind):
        if kind not in made:
            made[kind] = build(data[0], KINDS[kind])
        return made[kind]

    return get


# --------------------------------------------------------------------------------------- training


def test_leaves_worked_by_hand():
    points = jnp.array([[0.0, 0]] * 6 + [[10, 0], [10, 2]])
    for seed in range(4):  # begins with equal vectors mostly; the leaf that gets none goes far
        centres = training.train_leaves(points, 2, seed=seed)
        assert sorted(centres.tolist()) == [[0, 0], [10, 1]]
    # In chunks, with a rest, the sums are the same.
    training._SCORES, before = 6, training._SCORES
    try:
        again = training.train_leaves(points, 2, iterations=11)
    finally:
        training._SCORES = before
    assert sorted(again.tolist()) == [[0, 0], [10, 1]]


def test_spherical_leaves_go_by_direction():
    points = jnp.array([[1.0, 0], [4, 0], [0, 1], [0, 9]])
    centres = training.train_leaves(points, 2, spherical=True, seed=1)
    np.testing.assert_allclose(sorted(centres.tolist()), [[0, 1], [1, 0]], atol=1e-6)
    leaf = training.assign(jnp.array([[9.0, 1], [0.1, 0.2]]), jnp.eye(2), None, True)
    assert leaf.tolist() == [[0], [1]]


def test_soar_worked_by_hand():
    """x = (3, 0) is nearest to (2, 0), r = (1, 0). The others by |r'|^2 + lambda (r' . r)^2:
    (5.5, 0): r' = (-2.5, 0), 6.25 + 6.25 lambda; (3, 3): r' = (0, -3), 9 + 0 lambda."""
    centres = jnp.array([[5.5, 0], [2, 0], [3, 3]])
    x = jnp.array([[3.0, 0]])
    assert training.assign(x, centres, None).tolist() == [[1]]
    assert training.assign(x, centres, 0.4).tolist() == [[1, 0]]  # 8.75 < 9
    assert training.assign(x, centres, 0.5).tolist() == [[1, 2]]  # 9.375 > 9


def test_soar_against_a_loop(data):
    points = data[0][:50].astype(np.float64)
    centres = data[0][100:120].astype(np.float64)
    leaf = np.asarray(training.assign(points, centres.astype(np.float32), 1.5))
    for x, (first, second) in zip(points, leaf, strict=True):
        assert first == np.argmin(((x - centres) ** 2).sum(1))
        r = x - centres[first]
        losses = [
            math.inf if c == first else (x - centre) @ (x - centre)
            + 1.5 * ((x - centre) @ r / np.linalg.norm(r)) ** 2
            for c, centre in enumerate(centres)
        ]  # fmt: skip
        assert second == np.argmin(losses)


def test_the_weight_of_the_error_along_a_vector():
    """eta = (E - 1) T^2 / (|x|^2 - T^2): 3 * 0.04 / 0.96 = 0.125 is less than 1, so 1; with
    T = 0.8, 3 * 0.64 / 0.36 = 5.33."""
    x = jnp.array([[0.5, 0.5, 0.5, 0.5], [0.1, 0, 0, 0]])
    assert training.parallel_weight(x, 0.2).tolist() == [0, 0]
    np.testing.assert_allclose(training.parallel_weight(x, 0.8), [16 / 3 - 1, 0], rtol=1e-6)
    assert training.parallel_weight(x, 0.0).tolist() == [0, 0]


def test_codes_are_a_minimum_over_every_block(data):
    """No block's code can be changed for the better: checked against the loss itself."""
    points = data[0][:300]
    residual = points - points.mean(0)
    codebook = np.asarray(training.train_codebook(residual, points, 8, 4, 0.3, rounds=2))
    packed = training.encode(residual, points, codebook, 0.3, passes=12)
    codes = np.asarray(packed)
    unit = points / np.linalg.norm(points, axis=1, keepdims=True)
    weight = 31 * 0.09 / (1 - 0.09) - 1
    blocks = np.arange(8)
    for r in range(0, 300, 29):

        def loss(code, r=r):
            error = residual[r] - codebook[blocks, code].reshape(-1)
            return error @ error + weight * (error @ unit[r]) ** 2

        reached = loss(codes[:, r])
        for m in blocks:
            for c in range(16):
                other = codes[:, r].copy()
                other[m] = c
                assert loss(other) >= reached - 1e-5
    # The other way round: the codes of vectors that are made of centres are those centres.
    picked = np.random.default_rng(0).integers(0, 16, (8, 40))
    made = codebook[blocks[:, None], picked].transpose(1, 0, 2).reshape(40, 32)
    assert (np.asarray(training.encode(made, made, codebook, 0.0)) == picked).all()
    decoded = training.decode(training.pack_codes(packed), codebook)
    np.testing.assert_allclose(decoded[7], codebook[blocks, codes[:, 7]].reshape(-1))


def test_training_lowers_the_loss_and_the_error_along_the_vector(data):
    points = data[0][:2000]
    unit = points / np.linalg.norm(points, axis=1, keepdims=True)
    weight = training.parallel_weight(points, 0.5)

    def losses(threshold, rounds):
        codebook = training.train_codebook(points, points, 16, 2, threshold, plain=6, rounds=rounds)
        codes = training.encode(points, points, codebook, threshold)
        error = points - training.decode(training.pack_codes(codes), codebook)
        along = np.abs(np.sum(np.asarray(error) * unit, axis=1)).mean()
        return float(training.anisotropic_loss(error, unit, weight).mean()), along

    plain, some, more = losses(0.0, 0), losses(0.5, 1), losses(0.5, 4)
    assert more[0] <= some[0] < plain[0]
    assert more[1] < 0.5 * plain[1]


def test_a_centre_is_the_minimum_of_its_vectors():
    """One block: after a round with all vectors in one code the gradient of the loss is 0."""
    rng = np.random.default_rng(1)
    points = (5 + rng.standard_normal((40, 2))).astype(np.float32)
    data = training._blocked(points, points, 1, 2, 3.0)
    far = np.full((1, 16, 2), 1e4, np.float32)
    far[0, 3] = 4
    state = training._start(jnp.asarray(far), data)
    codebook, (codes, _, total) = training._sweep(jnp.asarray(far), state, data, True)
    assert (codes == 3).all() and (codebook[0, 4] == 1e4).all()

    def loss(centre):
        unit = points / np.linalg.norm(points, axis=1, keepdims=True)
        return training.anisotropic_loss(points - centre, unit, data[2]).mean()

    np.testing.assert_allclose(jax.grad(loss)(codebook[0, 3]), 0, atol=1e-4)
    assert float(data[2].max()) > 0
    unit = points / np.linalg.norm(points, axis=1, keepdims=True)
    np.testing.assert_allclose(total, np.sum((points - codebook[0, 3]) * unit, 1), atol=1e-4)


def test_packing_worked_by_hand():
    packed = training.pack_codes(jnp.array([[1, 15], [2, 0], [3, 4]]))
    assert packed.dtype == jnp.uint8 and packed.tolist() == [[0x21, 0x0F], [0x03, 0x04]]
    codebook = jnp.arange(3 * 16.0).reshape(3, 16, 1)
    assert training.decode(packed, codebook).tolist() == [[1, 18, 35], [15, 16, 36]]


def test_remainder_worked_by_hand():
    """Levels lie half a step off zero; the step is 0.385 root mean squares, here 1."""
    row = np.array([0.1, -0.1, 1.2, -9, 9], np.float32)
    scaled = row / (0.385 * np.sqrt(np.mean(row**2)))
    code, step = quantise_remainder(jnp.asarray(scaled[None]))
    np.testing.assert_allclose(step, [1], rtol=1e-5)
    levels = [int(np.clip(math.floor(x) + 8, 0, 15)) for x in scaled]
    assert code.tolist() == [[levels[0] | levels[1] << 4, levels[2] | levels[3] << 4, levels[4]]]


# ----------------------------------------------------------------------------------------- search


@pytest.mark.parametrize("kind", KINDS)
def test_recall(data, built, kind):
    points, queries = data
    index = built(kind)
    found = index.search(queries, 10)
    rows, scores = brute_force(points, queries, 10)
    assert recall(found.rows, rows) > {"codes only": 0.6, "odd blocks": 0.92}.get(kind, 0.95)
    assert found.rows.dtype == np.int32 and found.scores.dtype == np.float32
    for line in found.rows:
        assert len(np.unique(line)) == 10, "a vector was found twice"
    tolerance = {"codes only": 0.25, "int4": 0.06, "odd blocks": 0.06}.get(kind, 0.02)
    exact = np.einsum("BE,BkE->Bk", queries, points[found.rows])
    np.testing.assert_allclose(found.scores, exact, atol=tolerance)
    assert (np.diff(found.scores) <= 0).all()


def test_scores_by_codes_against_a_loop(data, built):
    """Every score is centre and decoded code times the query, for just the leaves that are best,
    and each vector once."""
    index = built("codes only")
    queries = data[1][:3]
    leaf, row = np.asarray(index.leaf_G), np.asarray(index.row_GW)
    decoded = [training.decode(code, index.codebook_MCD) for code in index.code_GPW]
    for query, rows, scores in zip(queries, *score_ah(index, queries, 3001), strict=True):
        visited = np.argsort(-np.asarray(index.centre_LE) @ query)[:10].tolist()
        expected = {}
        for g, (leaf_g, row_W) in enumerate(zip(leaf, row, strict=True)):
            if leaf_g not in visited:
                continue
            vectors = np.asarray(index.centre_LE[leaf_g] + decoded[g][:, :32])
            for w, r in enumerate(row_W):
                if r >= 0:
                    expected.setdefault(int(r), []).append((int(leaf_g), float(query @ vectors[w])))
        present = np.asarray(rows) >= 0
        got = dict(
            zip(np.asarray(rows)[present].tolist(), np.asarray(scores)[present], strict=True)
        )
        assert len(got) == present.sum() and got.keys() == expected.keys()
        assert any(len(copies) == 2 for copies in expected.values())
        for r, score in got.items():
            first = training.assign(data[0][r : r + 1], index.centre_LE)[0, 0]
            wanted = dict(expected[r]).get(int(first), expected[r][0][1])
            assert score == pytest.approx(wanted, abs=1e-4)


def test_every_vector_stands_in_its_leaves(data, built):
    index = built("codes only")
    rows = np.asarray(index.row_GW)
    assert np.array_equal(np.sort(rows[rows >= 0]), np.repeat(np.arange(3001), 2))
    leaves = np.asarray(training.assign(data[0], index.centre_LE, 1.5))
    leaf = np.broadcast_to(np.asarray(index.leaf_G)[:, None], rows.shape)[rows >= 0]
    order = np.argsort(rows[rows >= 0], kind="stable")
    np.testing.assert_array_equal(np.sort(leaf[order].reshape(-1, 2)), np.sort(leaves))
    first = np.asarray(index.first_leaf_GW)
    assert (first >= 0).sum() == 3001 and (leaf != first[rows >= 0]).all()
    assert index.padding == pytest.approx(rows.size / 6002 - 1)


def test_what_is_not_found(data, built):
    points, queries = data
    index = built("int4")
    few = index.search(queries[:5], 900, num_leaves_to_search=1)
    assert (few.rows[:, 0] >= 0).all() and (few.rows[:, -1] == -1).all()
    assert (few.scores[few.rows < 0] == -np.inf).all()
    bad = queries[:2].copy()
    bad[0, 3] = np.nan
    found = index.search(bad, 2)
    assert found.rows[0].tolist() == [-1, -1] and found.rows[1, 0] >= 0
    assert index.search(queries[:0], 2).rows.shape == (0, 2)
    with pytest.raises(UserError, match="32 components"):
        index.search(queries[:, :8], 2)
    with pytest.raises(UserError, match="num_leaves_to_search"):
        index.search(queries, 2, num_leaves_to_search=31)


def test_inside_a_compiled_loop(data, built):
    points, queries = data
    index = built("bfloat16")

    @jax.jit
    def walk(index, q):
        def step(_, q):
            return jnp.asarray(points)[index.search_in_jit(q, 2)[0][:, 1]]

        return jax.lax.fori_loop(0, 3, step, q)

    expected = queries[:4]
    for _ in range(3):
        expected = points[index.search(expected, 2).rows[:, 1]]
    np.testing.assert_array_equal(walk(index, queries[:4]), expected)
    gradient = jax.grad(lambda q: index.search_in_jit(q, 2)[1].sum() + (q**2).sum())(queries[:2])
    np.testing.assert_allclose(gradient, 2 * queries[:2])


@pytest.mark.slow
def test_five_times_fewer_bytes(data):
    """At 768 components, with codes and 4-bit remainders: see docs/retrieval.md for recall."""
    # Clusters that spread in 16 directions each; in all 768, neighbours differ by rounding.
    rng = np.random.default_rng(0)
    cluster = rng.integers(60, size=2000)
    spread = rng.standard_normal((60, 16, 768))
    within = np.einsum("Nr,NrE->NE", rng.standard_normal((2000, 16)), spread[cluster])
    points = rng.standard_normal((60, 768))[cluster] + 0.15 * within
    points = (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)
    queries = points[:100] + 0.01 * rng.standard_normal((100, 768)).astype(np.float32)
    settings = PartitionSettings(
        num_leaves=12, num_leaves_to_search=5, reorder=60, reorder_type="int4"
    )
    index = build(points, settings)
    arrays = (index.row_GW, index.code_GPW, index.vectors)  # centres and tables weigh little later
    stored = sum(x.nbytes for x in jax.tree.leaves(arrays)) / 2000
    assert stored <= 768 * 4 / 5
    rows, _ = brute_force(points, queries, 10)
    assert recall(index.search(queries, 10).rows, rows) >= 0.95


# ------------------------------------------------------------------------------ settings, storage


@pytest.mark.parametrize("kind", ["int8", "int4", "codes only", "brute force"])
def test_a_moved_folder_loads(data, built, tmp_path, kind):
    index = built(kind)
    names = save(index, tmp_path / "one" / "index")
    assert sorted(p.name for p in (tmp_path / "one" / "index").iterdir()) == sorted(names)
    (tmp_path / "one").rename(tmp_path / "two")
    again = load(tmp_path / "two" / "index")
    assert (again.settings, again.size, again.dimension) == (index.settings, 3001, 32)
    for a, b in zip(again.search(data[1], 3), index.search(data[1], 3), strict=True):
        np.testing.assert_array_equal(a, b)


def test_folders_that_cannot_be(built, tmp_path):
    with pytest.raises(UserError, match="no partitioned index"):
        load(tmp_path)
    save(built("int4"), tmp_path)
    path = tmp_path / "code_GPW.npy"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match="code_GPW.npy cannot be read"):
        load(tmp_path)
    (tmp_path / "settings.json").write_text('{"format": 2}')
    with pytest.raises(UserError, match="format 2"):
        load(tmp_path)


@pytest.mark.slow
def test_the_same_seed_builds_the_same(data):
    small = dataclasses.replace(TREE, num_leaves=4, num_leaves_to_search=2, reorder=0)
    one, two = (build(data[0][:400], small) for _ in range(2))
    other = build(data[0][:400], dataclasses.replace(small, seed=1))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(one.codebook_MCD, other.codebook_MCD)


def test_vectors_in_parts_build_the_same(data, monkeypatch):
    """As the shards of an index folder are: the chunks differ, the index does not."""

    class Parts(partitioned_build.ArrayVectors):
        def blocks(self):
            for at in range(0, 3001, 1000):
                yield at, self._vector_NE[at : at + 1000]

    settings = KINDS["int8"]
    whole = build(data[0], settings)
    monkeypatch.setattr(partitioned_build, "_CHUNK", 700)
    parts = build(Parts(data[0]), settings)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_advice_is_that_of_scann():
    assert PartitionSettings.for_size(19_999).dimensions_per_block == 0
    assert PartitionSettings.for_size(100_000) == PartitionSettings()
    assert PartitionSettings.for_size(1_000_000).num_leaves == 1000
    assert [block_rows(n) for n in (1, 300, 1000, 5000)] == [16, 32, 128, 128]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (dict(num_leaves=9, num_leaves_to_search=1), "more than the 8 vectors"),
        (dict(reorder_type="int2"), "reorder_type"),
        (dict(num_leaves=2, num_leaves_to_search=1, dimensions_per_block=0), "need codes"),
        (dict(reorder_type="int4", dimensions_per_block=0), "need codes"),
        (dict(num_leaves=1, num_leaves_to_search=1, soar_lambda=1.0), "at least 2 leaves"),
    ],
)
def test_settings_that_cannot_be(settings, said):
    with pytest.raises(UserError, match=said):
        build(np.eye(8), PartitionSettings(**settings))


def test_vectors_that_cannot_be():
    for vectors in (np.zeros((0, 4)), np.zeros((4, 0)), np.zeros(4)):
        with pytest.raises(UserError, match="needs vectors"):
            build(vectors)
    vectors = np.eye(8)
    vectors[6, 2] = np.nan
    for settings in (None, PartitionSettings()):
        with pytest.raises(UserError, match="row 6 is not finite"):
            build(vectors, settings)


@pytest.mark.slow
def test_few_and_equal_vectors():
    """Fewer vectors than centres of a code, all the same, some of them zero."""
    for vectors in (np.ones((5, 6)), np.zeros((5, 6))):
        index = build(vectors, PartitionSettings(num_leaves=2, num_leaves_to_search=2, reorder=5))
        found = index.search(np.ones((1, 6)), 7)
        assert found.rows.tolist() == [[0, 1, 2, 3, 4, -1, -1]]
        assert found.scores[0, :5].tolist() == [vectors[0].sum()] * 5
