"""The fused kernel, interpreted on the CPU, against the plain search."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zest_jax.retrieval import exact_triton
from zest_jax.retrieval.exact import Int8Rows, exact_search, fused, fused_search, quantise_rows

N, E = 5 * 128 + 37, 128


def data(queries, seed=0, ties=False):
    rng = np.random.default_rng(seed)
    vector_NE = rng.standard_normal((N, E)).astype(np.float32)
    if ties:  # whole numbers: equal sums in any order
        vector_NE = rng.integers(-1, 2, (N, E)).astype(np.float32)
        vector_NE[400:] = vector_NE[: N - 400]
    query_SE = rng.integers(-2, 3, (queries, E)).astype(np.float32)
    return jnp.asarray(vector_NE, jnp.bfloat16), jnp.asarray(query_SE, jnp.bfloat16)


@pytest.mark.parametrize(("queries", "top_k"), [(1, 1), (5, 3), (40, 10)])
@pytest.mark.parametrize("ties", [False, True])
def test_the_same_rows_and_scores_as_the_plain_search(queries, top_k, ties):
    vector_NE, query_SE = data(queries, ties=ties)
    want_row, want_score = exact_search(vector_NE, query_SE, top_k)
    row_SR, score_SR = fused_search(vector_NE, query_SE, top_k, interpret=True)
    np.testing.assert_array_equal(row_SR, want_row)
    np.testing.assert_allclose(score_SR, want_score, rtol=1e-5)


@pytest.mark.parametrize("valid", [N, 500, 128, 2, 0])
def test_padding_is_never_found(valid):
    vector_NE, query_SE = data(5, seed=1)
    search = functools.partial(fused_search, interpret=True)
    row_SR, score_SR = jax.jit(lambda v, q, n: search(v, q, 3, valid=n))(vector_NE, query_SE, valid)
    want_row, want_score = exact_search(vector_NE, query_SE, 3, valid=valid)
    np.testing.assert_array_equal(row_SR, want_row)
    np.testing.assert_allclose(score_SR, want_score, rtol=1e-5)


def test_codes_of_8_bits_find_what_they_are_scored_with():
    vector_NE, query_SE = data(40, seed=2)
    codes = quantise_rows(vector_NE)
    row_SR, _ = fused_search(codes, query_SE, 3, vector_NE, interpret=True)
    want, _ = exact_search(vector_NE, query_SE, 3)
    assert (np.asarray(row_SR) == np.asarray(want)).mean() > 0.99
    # Without the vectors, the codes themselves are the measure.
    row_SR, score_SR = fused_search(codes, query_SE, 3, interpret=True)
    want, scores = exact_search(Int8Rows(codes.code_NE, codes.scale_N), query_SE, 3)
    np.testing.assert_array_equal(row_SR, want)
    np.testing.assert_allclose(score_SR, scores, rtol=1e-2)


def test_several_programs_share_the_queries():
    vector_NE, query_SE = data(40, seed=3)
    tile = exact_triton.Tile(vectors=64, queries=16, components=32)
    row_SK = exact_triton.candidates(vector_NE, query_SE, 3, tile=tile, interpret=True)
    want, _ = exact_search(vector_NE, query_SE, 3)
    assert (np.asarray(want)[..., None] == np.asarray(row_SK)[:, None]).any(-1).all()
    assert (np.diff(np.asarray(row_SK), axis=1) > 0).all(), "rising, each once"
    assert row_SK.shape[1] < N / 1.5


def test_the_best_blocks_of_many():
    maxima_GS = np.random.default_rng(0).integers(0, 40, (1000, 7)).astype(np.float32)
    got = np.asarray(exact_triton.best_blocks(jnp.asarray(maxima_GS), 5))
    for s in range(7):
        want = np.sort(np.argsort(-maxima_GS[:, s], kind="stable")[:5])
        np.testing.assert_array_equal(got[s], want)


def test_a_machine_without_a_gpu_is_told_so():
    good, why = exact_triton.usable()
    assert not good and "no kernel for a CPU" in why
    assert not fused(jnp.zeros((100_000, 128), jnp.bfloat16))
