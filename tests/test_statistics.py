"""Bootstrap intervals."""

import numpy as np
import pytest

from zest_jax.statistics import (
    bootstrap_ci,
    paired_bootstrap_ci,
    paired_bootstrap_cis,
    wilson_ci,
)


def test_interval_of_a_share():
    """400 answers, 30 % right: the normal interval is .3 +- 1.96 sqrt(.21 / 400) = .3 +- .0449."""
    low, high = bootstrap_ci([1] * 120 + [0] * 280)
    assert low == pytest.approx(0.3 - 0.0449, abs=0.005)
    assert high == pytest.approx(0.3 + 0.0449, abs=0.005)
    narrow = bootstrap_ci([1] * 120 + [0] * 280, level=0.5)
    assert low < narrow[0] < 0.3 < narrow[1] < high


def test_two_values_can_be_enumerated():
    """Means of two draws from {0, 1}: 0, .5, .5, 1, each with chance 1/4."""
    assert bootstrap_ci([0, 1]) == (0.0, 1.0)
    assert bootstrap_ci([0, 1], level=0.4) == (0.5, 0.5)  # the middle half is .5


def test_equal_values_and_repeatability():
    assert bootstrap_ci([0.5, 0.5, 0.5]) == (0.5, 0.5)
    assert bootstrap_ci([1.0]) == (1.0, 1.0)
    values = np.arange(30) / 30
    assert bootstrap_ci(values, seed=1) == bootstrap_ci(values, seed=1)
    assert bootstrap_ci(values, seed=1) != bootstrap_ci(values, seed=2)


def test_pairing_removes_what_both_sides_share():
    random = np.random.default_rng(0)
    before = (random.random(300) < 0.4).astype(float)
    after = before.copy()
    after[np.flatnonzero(before == 0)[:30]] = 1.0  # thirty questions gained, none lost
    low, high = paired_bootstrap_ci(before, after)
    # gain .1 with deviation sqrt(.1 * .9 / 300) = .0173
    assert low == pytest.approx(0.1 - 1.96 * 0.0173, abs=0.005)
    assert high == pytest.approx(0.1 + 1.96 * 0.0173, abs=0.005)
    # Unpaired, the same gain is not clear of 0 by nearly as much: the two intervals overlap.
    assert bootstrap_ci(before)[1] > bootstrap_ci(after)[0]
    assert paired_bootstrap_ci(before, before) == (0.0, 0.0)


def test_chunks_give_all_draws(monkeypatch):
    from zest_jax import statistics

    monkeypatch.setattr(statistics, "_CHUNK", 70)
    scores = np.arange(10.0)
    assert len(statistics._resampled_means(scores, 25, 0)) == 25


def test_bad_scores_are_refused():
    for values in ([], [[1.0]], [np.nan]):
        with pytest.raises(ValueError):
            bootstrap_ci(values)
    with pytest.raises(ValueError, match="differ in number"):
        paired_bootstrap_ci([1, 0], [1])
    with pytest.raises(ValueError, match="level"):
        bootstrap_ci([1, 0], level=95)


def test_several_scores_share_their_draws(monkeypatch):
    rng = np.random.default_rng(5)
    before, after = rng.random((2, 40, 3))
    monkeypatch.setattr("zest_jax.statistics._CHUNK", 90)  # two draws at once, the last alone
    got = paired_bootstrap_cis(before, after, draws=301)
    assert got.shape == (3, 2)
    for f in range(3):
        alone = paired_bootstrap_ci(before[:, f], after[:, f], draws=301)
        np.testing.assert_allclose(got[f], alone, rtol=1e-12)
    for bad, other in [
        (before[:, 0], after[:, 0]),
        (before[:5], after),
        (before * np.nan, after),
        (before[:0], after[:0]),
    ]:
        with pytest.raises(ValueError, match="expected"):
            paired_bootstrap_cis(bad, other)


def test_wilson():
    # 4 of 10: (.4 + .19207) / 1.38415 = .42772; half 1.95996 sqrt(.024 + .0096036) / 1.38415
    assert wilson_ci(4, 10) == pytest.approx((0.16818, 0.68733), abs=1e-4)
    low, high = wilson_ci(0, 100)
    assert low == 0 and high == pytest.approx(0.03699, abs=1e-4)
    assert wilson_ci(4, 4)[0] == pytest.approx(0.51011, abs=1e-4) and wilson_ci(4, 4)[1] == 1
    with pytest.raises(ValueError, match="trials"):
        wilson_ci(1, 0)
