"""Exact search in 8 bits, with reorder, and split over eight virtual devices, against numpy."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import virtual_devices
from test_scann_index import brute_force, clustered, recall

from zest_jax.errors import UserError
from zest_jax.retrieval.exact import (
    ExactIndex,
    Int8Rows,
    exact_search,
    quantise_rows,
    rescore,
)


def test_codes_worked_by_hand():
    rows = quantise_rows(jnp.array([[1.27, -0.635, 0.004], [0, 0, 0], [-254, 3, 2.9]]))
    assert rows.code_NE.tolist() == [[127, -64, 0], [0, 0, 0], [-127, 2, 1]]  # half goes to even
    np.testing.assert_allclose(rows.scale_N, [0.01, 0, 2], rtol=1e-6)
    assert (rows.code_NE.dtype, rows.shape) == (jnp.int8, (3, 3))


def test_scores_of_8_bits_worked_by_hand():
    index = Int8Rows(
        jnp.array([[127, 0], [100, 100], [0, -50]], jnp.int8), jnp.array([0.01, 0.02, 0.5])
    )
    # Scores for (1, 2): 1.27, 6, -50; in chunks of two, one row is left over.
    for chunk in (8, 2):
        rows, scores = exact_search(index, jnp.array([[1.0, 2.0]]), 3, chunk)
        assert rows.tolist() == [[1, 0, 2]]
        np.testing.assert_allclose(scores, [[6, 1.27, -50]], rtol=1e-6)


@pytest.mark.parametrize("chunk", [100, 4000])
def test_8_bits_with_reorder(chunk):
    points, queries = clustered(2500)
    expected, scores = brute_force(points, queries, 3)
    codes = quantise_rows(points)
    plain, _ = exact_search(codes, queries, 3, chunk)
    assert recall(np.asarray(plain), expected) > 0.9
    candidates, _ = exact_search(codes, queries, 50, chunk)
    rows, found = rescore(jnp.asarray(points), jnp.asarray(queries), candidates, 3)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(found, scores, atol=1e-5)
    index = ExactIndex(codes, jnp.asarray(points), reorder=50)
    np.testing.assert_array_equal(index.search(queries, 3).rows, expected)


def test_ties_go_to_the_lower_row_after_reorder_too():
    points = jnp.ones((9, 4))
    for index in (ExactIndex(points), ExactIndex(quantise_rows(points), points, reorder=7)):
        assert index.search(np.ones((1, 4)), 3).rows.tolist() == [[0, 1, 2]]
    rows, scores = rescore(points, jnp.ones((1, 4)), jnp.array([[8, -1, 3, 5]]), 4)
    assert rows.tolist() == [[3, 5, 8, -1]]
    assert scores.tolist() == [[4, 4, 4, -np.inf]]


def test_padding_rows_are_never_found():
    points = -jnp.arange(1.0, 8.0)[:, None]  # padding, if scored at all, would be the best
    index = jnp.concatenate([points, jnp.zeros((5, 1))])
    for chunk in (12, 5):
        rows, scores = jax.jit(
            lambda n, c=chunk: exact_search(index, jnp.ones((1, 1)), 4, c, valid=n)
        )(3)
        assert rows.tolist() == [[0, 1, 2, -1]]
        assert scores.tolist() == [[-1, -2, -3, -np.inf]]


@pytest.mark.parametrize("chunk", [150, 4000])
def test_approximate_maxima(chunk):
    """A CPU computes them exactly; that the two ways agree is all that can be seen here."""
    points, queries = clustered(1000)
    rows, scores = exact_search(points, queries, 5, chunk, recall_target=0.95)
    expected, best = brute_force(points, queries, 5)
    assert recall(np.asarray(rows), expected) > 0.95
    np.testing.assert_allclose(scores[:, 0], best[:, 0], atol=1e-5)


def test_another_width_is_refused():
    with pytest.raises(UserError, match="components"):
        ExactIndex(quantise_rows(jnp.eye(4))).search(np.ones((2, 3)), 1)


PROGRAM = """
    import json
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from test_scann_index import clustered
    from zest_jax.parallel import make_mesh
    from zest_jax.retrieval.exact import ExactIndex, exact_search, quantise_rows, shard_rows

    points, queries = clustered(1003)
    points[500:504] = points[7]  # ties on other devices
    queries[0] = points[7]
    mesh = make_mesh(data=2, fsdp=4)
    expected = exact_search(jnp.asarray(points), jnp.asarray(queries), 6)
    split = shard_rows(points, mesh)
    codes = jax.jit(quantise_rows)(split)
    search = jax.jit(lambda index, q: index.search_in_jit(q, 6))
    out = {
        "devices": len({s.device for s in split.addressable_shards}),
        "share": split.addressable_shards[0].data.shape,
        "codes": len({s.device for s in codes.code_NE.addressable_shards}),
        "tied": np.asarray(expected[0][0]).tolist(),
    }

    def same(index, queries=queries):
        rows, scores = search(index, queries)
        return [bool((rows == expected[0]).all()), float(jnp.abs(scores - expected[1]).max())]

    out["plain"] = same(ExactIndex(split, mesh=mesh, vectors=1003))
    out["reorder"] = same(ExactIndex(codes, split, 40, mesh=mesh, vectors=1003))
    by_batch = jax.device_put(queries, NamedSharding(mesh, P("data")))
    out["queries split"] = same(ExactIndex(split, mesh=mesh, vectors=1003), by_batch)

    @jax.jit
    def walk(index, q):  # inside a loop, as a rollout searches
        return jax.lax.fori_loop(
            0, 3, lambda _, q: jnp.asarray(points)[index.search_in_jit(q, 2)[0][:, 1]], q)

    one, many = ExactIndex(jnp.asarray(points)), ExactIndex(split, mesh=mesh, vectors=1003)
    out["loop"] = float(jnp.abs(walk(one, queries[:4]) - walk(many, queries[:4])).max())
    few = ExactIndex(shard_rows(points[:3], mesh), mesh=mesh, vectors=3).search(queries[:1], 5)
    out["few"] = sorted(few.rows[0].tolist())
    print(json.dumps(out))
"""


def test_split_over_eight_devices():
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {
        "PYTHONPATH": path,
        "XLA_FLAGS": virtual_devices.flags(8),
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads(done.stdout.splitlines()[-1])
    assert (out["devices"], out["codes"], out["share"]) == (8, 8, [126, 32])
    assert out["tied"][:5] == [7, 500, 501, 502, 503]
    for name in ("plain", "reorder", "queries split"):
        equal, gap = out[name]
        assert equal and gap < 1e-5, name
    assert out["loop"] == 0
    assert out["few"] == [-1, -1, 0, 1, 2]
