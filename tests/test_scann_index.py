"""ScaNN from Python and from a compiled step, against numpy; and what stands in where it lacks.

Clustered vectors only: a tree on vectors without clusters finds a part of the neighbours at best.
"""

import logging
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zest_jax.errors import UserError
from zest_jax.retrieval import scann_index
from zest_jax.retrieval.scann_index import ExactIndex, ScannIndex, ScannSettings

HAVE = scann_index.import_scann() is not None
needs_scann = pytest.mark.skipif(not HAVE, reason="scann is not installed")
AH = ScannSettings(reorder=100)
TREE = ScannSettings(num_leaves=40, num_leaves_to_search=12, training_sample_size=4000, reorder=100)


def clustered(count, size=32, centres=200, seed=0):
    """Unit vectors around centres, and queries beside some of them."""
    rng = np.random.default_rng(seed)
    centre = rng.standard_normal((centres, size))
    points = centre[rng.integers(centres, size=count)] + 0.5 * rng.standard_normal((count, size))
    queries = points[rng.choice(count, 100)] + 0.3 * rng.standard_normal((100, size))
    return tuple(
        (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32) for x in (points, queries)
    )


def brute_force(points, queries, k):
    scores = queries.astype(np.float64) @ points.T.astype(np.float64)
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return rows, np.take_along_axis(scores, rows, axis=1)


def recall(rows, expected):
    return np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(rows, expected, strict=True)])


@pytest.fixture(scope="module")
def data():
    return clustered(4000)


@pytest.fixture
def no_scann(monkeypatch):
    monkeypatch.setattr(scann_index, "import_scann", lambda: None)


@needs_scann
def test_brute_force_is_exact(data):
    points, queries = data
    index = scann_index.build(points)  # the advice for so few
    assert isinstance(index, ScannIndex) and index.settings.dimensions_per_block == 0
    found = index.search(queries, 5)
    rows, scores = brute_force(points, queries, 5)
    np.testing.assert_allclose(found.scores, scores, atol=1e-5)
    assert recall(found.rows, rows) > 0.999
    assert found.rows.dtype == np.int32 and found.scores.dtype == np.float32


@needs_scann
@pytest.mark.parametrize(
    "settings", [AH, TREE, ScannSettings(**{**TREE.__dict__, "soar_lambda": 1.5})]
)
def test_recall(data, settings):
    points, queries = data
    found = scann_index.build(points, settings).search(queries, 3)
    rows, _ = brute_force(points, queries, 3)
    assert recall(found.rows, rows) > 0.95
    # What it finds it scores exactly, since the best are reordered.
    exact = np.einsum("BE,BkE->Bk", queries, points[found.rows])
    np.testing.assert_allclose(found.scores, exact, atol=1e-4)


@needs_scann
def test_fewer_leaves_find_less(data):
    points, queries = data
    index = scann_index.build(points, TREE)
    rows, _ = brute_force(points, queries, 10)
    few = index.search(queries, 10, num_leaves_to_search=1).rows
    many = index.search(queries, 10, num_leaves_to_search=40).rows
    assert recall(few, rows) < recall(many, rows) > 0.99


@needs_scann
def test_leaves_with_too_few(data):
    """ScaNN fills up with row 0; we say that there is none."""
    points, queries = data
    found = scann_index.build(points, TREE).search(queries[:4], 1000, num_leaves_to_search=1)
    missing = found.rows < 0
    assert missing.any() and not missing[:, 0].any()
    assert (found.scores[missing] == -np.inf).all() and np.isfinite(found.scores[~missing]).all()
    for rows in found.rows:
        present = rows[rows >= 0]
        assert len(np.unique(present)) == len(present)


def kinds():
    return [pytest.param("scann", marks=needs_scann), "exact"]


@pytest.fixture(params=kinds())
def small(request, monkeypatch):
    """Five vectors: e1, 2 e2, …, 5 e5, in both kinds of index."""
    if request.param == "exact":
        monkeypatch.setattr(scann_index, "import_scann", lambda: None)
    index = scann_index.build(np.diag(np.arange(1.0, 6.0)))
    assert isinstance(index, ScannIndex if request.param == "scann" else ExactIndex)
    return index


def test_padding(small):
    """Fewer vectors than asked for, queries that are not finite, no queries."""
    queries = np.array([[1, 1, 1, 1, 1], [np.nan, 0, 0, 0, 1], [0, np.inf, 0, 0, 0]], np.float32)
    for rows, scores in (
        small.search(queries, 7),
        jax.jit(lambda index, q: index.search_in_jit(q, 7))(small, queries),
    ):
        rows, scores = np.asarray(rows), np.asarray(scores)
        assert rows.shape == scores.shape == (3, 7)
        assert (rows.dtype, scores.dtype) == (np.int32, np.float32)
        assert rows[0].tolist() == [4, 3, 2, 1, 0, -1, -1]
        assert scores[0].tolist() == [5, 4, 3, 2, 1, -np.inf, -np.inf]
        assert (rows[1:] == -1).all() and (scores[1:] == -np.inf).all()
    assert small.search(queries[1:], 2).rows.tolist() == [[-1, -1]] * 2
    assert small.search(queries[:0], 2).rows.shape == (0, 2)
    rows, scores = jax.jit(lambda q: small.search_in_jit(q, 2))(queries[:0])
    assert rows.shape == scores.shape == (0, 2)


def test_wrong_width(small):
    with pytest.raises(UserError, match="5 components"):
        small.search(np.zeros((2, 4), np.float32), 1)
    with pytest.raises(UserError, match="5 components"):
        jax.jit(lambda q: small.search_in_jit(q, 1))(np.zeros((2, 4), np.float32))


def test_float_types_and_gradient(small):
    queries = jnp.eye(5, dtype=jnp.bfloat16)
    rows, _ = jax.jit(lambda q: small.search_in_jit(q, 1))(queries)
    assert rows[:, 0].tolist() == [0, 1, 2, 3, 4]

    def loss(q):
        _, scores = small.search_in_jit(q, 1)
        return (q**2).sum() + scores.sum()

    grad = jax.jit(jax.grad(loss))(jnp.ones((2, 5)))
    assert (grad == 2).all()


@needs_scann
def test_in_jit_equals_direct_in_loops_and_vmap(data):
    points, queries = data
    index = scann_index.build(points, TREE)
    for B in (1, 64, 100):
        direct = index.search(queries[:B], 3)
        rows, scores = jax.jit(lambda q: index.search_in_jit(q, 3))(queries[:B])
        np.testing.assert_array_equal(rows, direct.rows)
        np.testing.assert_array_equal(scores, direct.scores)

    @jax.jit
    def walk(q):  # the next query is the vector found
        def step(_, q):
            rows, _ = index.search_in_jit(q, 2)
            return jnp.asarray(points)[rows[:, 1]]

        return jax.lax.fori_loop(0, 4, step, q)

    expected = queries[:3]
    for _ in range(4):
        expected = points[index.search(expected, 2).rows[:, 1]]
    np.testing.assert_allclose(walk(queries[:3]), expected)

    rows, _ = jax.jit(jax.vmap(lambda q: index.search_in_jit(q, 3)))(queries.reshape(5, 20, 32))
    np.testing.assert_array_equal(rows.reshape(100, 3), index.search(queries, 3).rows)


@needs_scann
@pytest.mark.parametrize("settings", [None, AH, TREE])
def test_a_moved_folder_loads(data, tmp_path, settings):
    points, queries = data
    index = scann_index.build(points, settings)
    index.save(tmp_path / "one" / "index")
    (tmp_path / "one").rename(tmp_path / "two")
    again = scann_index.load(tmp_path / "two" / "index")
    assert (again.settings, again.size, again.dimension) == (index.settings, 4000, 32)
    for a, b in zip(again.search(queries, 3), index.search(queries, 3), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(UserError, match="exists already"):
        index.save(tmp_path / "two" / "index")


@needs_scann
def test_a_saved_index_without_scann(data, tmp_path, monkeypatch, caplog):
    """Elsewhere the exact vectors in it serve, and the log says so."""
    points, queries = data
    scann_index.build(points, TREE).save(tmp_path / "index")
    scann_index.build(points, ScannSettings(reorder=0)).save(tmp_path / "codes")
    monkeypatch.setattr(scann_index, "import_scann", lambda: None)
    with caplog.at_level(logging.WARNING):
        index = scann_index.load(tmp_path / "index")
    assert "scann is not installed" in caplog.text and "exactly on cpu" in caplog.text
    assert isinstance(index, ExactIndex)
    assert recall(index.search(queries, 3).rows, brute_force(points, queries, 3)[0]) > 0.999
    with pytest.raises(UserError, match="codes only"):
        scann_index.load(tmp_path / "codes")


def test_no_scann_is_exact_and_said(data, no_scann, caplog):
    points, queries = data
    with caplog.at_level(logging.WARNING):
        index = scann_index.build(points, TREE)
    assert isinstance(index, ExactIndex) and "scann is not installed" in caplog.text
    rows, scores = brute_force(points, queries, 7)
    found = index.search(queries, 7)
    np.testing.assert_allclose(found.scores, scores, atol=1e-5)
    assert recall(found.rows, rows) > 0.999


def test_advice_by_size():
    assert ScannSettings.for_size(19_999).dimensions_per_block == 0
    assert ScannSettings.for_size(100_000) == ScannSettings()
    large = ScannSettings.for_size(21_015_324)
    assert (large.num_leaves, large.num_leaves_to_search) == (4584, 458)
    assert large.training_sample_size == 229_200


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (ScannSettings(num_leaves=9, num_leaves_to_search=1), "more than the 8 vectors"),
        (ScannSettings(num_leaves=4, num_leaves_to_search=5), "num_leaves_to_search"),
        (ScannSettings(num_leaves=4), "num_leaves_to_search"),
        (ScannSettings(soar_lambda=1.0), "soar_lambda needs a tree"),
    ],
)
def test_settings_that_cannot_be(settings, said):
    with pytest.raises(UserError, match=said):
        scann_index.build(np.eye(8), settings)


def test_vectors_that_cannot_be():
    for vectors in (np.zeros((0, 4)), np.zeros((4, 0)), np.zeros(4)):
        with pytest.raises(UserError, match="needs vectors"):
            scann_index.build(vectors)
    vectors = np.eye(8)
    vectors[6, 2] = np.nan
    with pytest.raises(UserError, match="row 6 is not finite"):
        scann_index.build(vectors)


@needs_scann
def test_folders_that_cannot_be(tmp_path):
    with pytest.raises(UserError, match="no ScaNN index of ours"):
        scann_index.load(tmp_path)
    scann_index.build(np.eye(8)).save(tmp_path / "index")
    (tmp_path / "index" / "scann_docids.pkl").write_bytes(b"")
    with pytest.raises(UserError, match="could run any program"):
        scann_index.load(tmp_path / "index")
    (tmp_path / "index" / "scann_docids.pkl").unlink()
    (tmp_path / "index" / "dataset.npy").write_bytes(b"no array")
    with pytest.raises(UserError, match="damaged"):
        scann_index.load(tmp_path / "index")


@needs_scann
def test_building_is_silent(data, capfd):
    scann_index.build(data[0], TREE)
    assert capfd.readouterr().err == ""


@needs_scann
@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "import tensorflow"])
def test_import_never_meets_another_tensorflow(tmp_path, before):
    """A TensorFlow of another release, here one whose use fails, is left alone and stays."""
    package = tmp_path / "tensorflow"
    (package / "python").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "answer = 42\ndef __getattr__(name):\n    raise ImportError('undefined symbol')\n"
    )
    (package / "python" / "__init__.py").write_text("raise ImportError('undefined symbol')")
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
{before}
from zest_jax.retrieval.scann_index import import_scann
assert import_scann() is not None
assert ("tensorflow" in sys.modules) == {bool(before)}
import tensorflow
assert tensorflow.answer == 42
"""
    subprocess.run([sys.executable, "-c", script], check=True)
