"""Bootstrap intervals of a mean, and of a mean difference on the same questions."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

# Index draws held in memory at once: 10,000 draws over 50,000 questions would be 4 GB.
_CHUNK = 4_000_000


def bootstrap_ci(
    values: ArrayLike, draws: int = 10_000, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean.

    Questions are drawn with replacement, as many as there are; the interval holds the middle
    ``level`` of the means of all draws. It speaks of the choice of *questions* only: seeds of the
    training and draws of the sampler are another source of spread.

    Args:
        values: one score per question, any order.
        draws: number of resampled sets.
        level: share of the means inside, in (0, 1).
        seed: the same seed gives the same interval.

    Returns:
        (low, high). Both are the mean where all values are equal, or where there is only one.
    """
    means = _resampled_means(_scores(values), draws, seed)
    return _middle(means, level)


def mean_of_means_ci(
    groups: Sequence[ArrayLike], draws: int = 10_000, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the unweighted mean of the means of several sets.

    Questions are drawn with replacement within each set, as many as it has. Of one set it is the
    interval of its mean. What is drawn is how often each distinct score comes up, which has the
    same distribution and takes no time for scores that are mostly 0 or 1.

    Args:
        groups: the scores of each set, one per question.
        draws, level, seed: see ``bootstrap_ci``.

    Returns:
        (low, high).
    """
    if not groups:
        raise ValueError("there is no set of scores")
    total = np.zeros(draws)
    for number, values in enumerate(groups):
        scores = _scores(values)
        distinct, counts = np.unique(scores, return_counts=True)
        random = np.random.default_rng([seed, number])
        rows = max(1, _CHUNK // len(distinct))
        for start in range(0, draws, rows):
            size = min(rows, draws - start)
            times = random.multinomial(len(scores), counts / len(scores), size=size)
            total[start : start + size] += times @ distinct / len(scores)
    return _middle(total / len(groups), level)


def wilson_ci(successes: int, trials: int, level: float = 0.95) -> tuple[float, float]:
    r"""Wilson's score interval of a share, which says something at 0 and 1 as well.

    .. math::
        \frac{p + z^2 / 2n \pm z \sqrt{p (1 - p) / n + z^2 / 4 n^2}}{1 + z^2 / n}

    Args:
        successes: of the trials.
        trials: n, at least 1.
        level: of confidence, in (0, 1); z is the normal quantile of (1 + level) / 2.

    Raises:
        ValueError: there is no trial, or more successes than trials.

    Source: Wilson 1927.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"expected 0 <= successes <= trials, got {successes} of {trials}")
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, scale = successes / trials, 1 + z * z / trials
    middle = (share + z * z / (2 * trials)) / scale
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials**2)) / scale
    return max(0.0, middle - half), min(1.0, middle + half)


def paired_bootstrap_ci(
    before: ArrayLike,
    after: ArrayLike,
    draws: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of ``mean(after) - mean(before)`` on the same questions.

    Each draw takes the same questions on both sides, so what makes a question easy or hard for both
    cancels. An interval above 0 says that the gain is not owed to the choice of questions.

    Args:
        before, after: scores of the same questions in the same order.
        draws, level, seed: see ``bootstrap_ci``.
    """
    before, after = _scores(before), _scores(after)
    if before.shape != after.shape:
        raise ValueError(f"paired scores differ in number: {before.size} and {after.size}")
    return _middle(_resampled_means(after - before, draws, seed), level)


def paired_bootstrap_cis(
    before_BF: ArrayLike,
    after_BF: ArrayLike,
    draws: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
) -> Float[np.ndarray, "F 2"]:
    """``paired_bootstrap_ci`` of several scores of the same questions: every draw serves them all.

    Args:
        before_BF, after_BF: one row a question, one column a score.
        draws, level, seed: see ``bootstrap_ci``.

    Returns:
        (low, high) of each score, equal to what it has alone but for rounding.
    """
    before_BF, after_BF = np.asarray(before_BF, np.float64), np.asarray(after_BF, np.float64)
    if before_BF.shape != after_BF.shape or before_BF.ndim != 2:
        raise ValueError(f"expected two [B, F], got {before_BF.shape} and {after_BF.shape}")
    gain_BF = after_BF - before_BF
    if not gain_BF.size or not np.isfinite(gain_BF).all():
        raise ValueError("expected finite scores of one question or more")
    random, size = np.random.default_rng(seed), len(gain_BF)
    rows = max(1, _CHUNK // size)
    means = []
    for start in range(0, draws, rows):
        count = min(rows, draws - start)
        index = random.integers(size, size=(count, size)) + size * np.arange(count)[:, None]
        # How often each question was drawn, so that the scores are one product.
        times = np.bincount(index.ravel(), minlength=count * size).reshape(count, size)
        means.append(times.astype(np.float64) @ gain_BF / size)
    together = np.concatenate(means)
    return np.array([_middle(together[:, f], level) for f in range(gain_BF.shape[1])])


def _scores(values: ArrayLike) -> Float[np.ndarray, " B"]:
    scores = np.asarray(values, np.float64)
    if scores.ndim != 1 or scores.size == 0:
        raise ValueError(f"expected a non-empty list of scores, got shape {scores.shape}")
    if not np.isfinite(scores).all():
        raise ValueError("scores must be finite")
    return scores


def _resampled_means(scores: Float[np.ndarray, " B"], draws: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    rows = max(1, _CHUNK // scores.size)
    means = [
        scores[random.integers(scores.size, size=(min(rows, draws - start), scores.size))].mean(1)
        for start in range(0, draws, rows)
    ]
    return np.concatenate(means)


def _middle(means: np.ndarray, level: float) -> tuple[float, float]:
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie in (0, 1), got {level}")
    low, high = np.quantile(means, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return float(low), float(high)
