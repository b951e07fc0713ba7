"""Difficulty curves: a proposer's reward as a function of the solver's success on its question.

Every curve reads correctness ``y`` (never a shaped reward) and works on numbers or numpy arrays.
p or acc is the share of right answers among n solver rollouts, k their count.

Whichever curve is chosen, rejected or malformed proposals get 0, not a negative value.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from zest_jax.registry import Registry

Values = float | int | Float[np.ndarray, "..."] | np.ndarray


def dr_zero(k: Values, n: int) -> np.ndarray:
    """``1[0 < k < n] (n - k) / (n - 1)``: best at exactly one right answer."""
    if n < 2:
        raise ValueError(f"Dr. Zero's difficulty needs at least 2 rollouts, got {n}")
    k = np.asarray(k, np.float64)
    return np.where((k > 0) & (k < n), (n - k) / (n - 1), 0.0)


def intermediate(acc: Values) -> np.ndarray:
    """``4 acc (1 - acc)``: 1 at half right, 0 at none and all (ZEST-Search)."""
    acc = np.asarray(acc, np.float64)
    return 4.0 * acc * (1.0 - acc)


def failure(acc: Values) -> np.ndarray:
    """``1 - acc`` (SSP): highest where nobody answers, thus also for unanswerable questions."""
    return 1.0 - np.asarray(acc, np.float64)


def solvable_failure(acc: Values) -> np.ndarray:
    """``1 - acc`` if ``acc > 0`` else 0 (Absolute Zero)."""
    acc = np.asarray(acc, np.float64)
    return np.where(acc > 0, 1.0 - acc, 0.0)


def uncertainty(p: Values) -> np.ndarray:
    """``min(p, 1 - p)``, at most 1/2 (R-Zero's code)."""
    p = np.asarray(p, np.float64)
    return np.minimum(p, 1.0 - p)


def spice(p: Values) -> np.ndarray:
    """``exp(-(p(1-p) - 0.25)^2 / (2 * 0.01))`` (SPICE).

    A Gaussian in the variance p(1-p) around its largest value 1/4. At p = 0 and 1 it is 0.044,
    not 0.
    """
    p = np.asarray(p, np.float64)
    return np.exp(-((p * (1.0 - p) - 0.25) ** 2) / (2.0 * 0.01))


def moving_bell(acc: Values, target: float, sigma: float = 0.15) -> np.ndarray:
    """``exp(-(acc - t)^2 / (2 sigma^2))``: wanted success rate t (CoEvoKG)."""
    acc = np.asarray(acc, np.float64)
    return np.exp(-((acc - target) ** 2) / (2.0 * sigma**2))


def bell_target(progress: float, start: float = 0.7, end: float = 0.2) -> float:
    """Target of ``moving_bell`` at a share of the training in [0, 1].

    The source gives the two ends; that the way between is straight is our assumption.
    """
    return start + (end - start) * min(max(progress, 0.0), 1.0)


def depth(fewest_searches: Values, cap: int = 10, floor: float = 0.2) -> np.ndarray:
    """``0.2 + 0.8 min(h_min / 10, 1)`` (SearchMaster's r_sdr).

    Args:
        fewest_searches: h_min, fewest searches among the *correct* rollouts; defined for mixed
            groups only, the others have fixed values of their own.
        cap: searches from which on the reward is 1.
        floor: reward at 0 searches.
    """
    h = np.asarray(fewest_searches, np.float64)
    return floor + (1.0 - floor) * np.minimum(h / cap, 1.0)


Curve = Callable[[np.ndarray, int, float], np.ndarray]

CURVES: Registry[Curve] = Registry("difficulty curve", "reward.difficulty")
"""By the names that a config uses: right answers k of each question, rollouts n, and the share of
the training that is done."""

CURVES.register("dr_zero")(lambda k, n, progress: dr_zero(k, n))
CURVES.register("intermediate")(lambda k, n, progress: intermediate(k / n))
CURVES.register("failure")(lambda k, n, progress: failure(k / n))
CURVES.register("solvable_failure")(lambda k, n, progress: solvable_failure(k / n))
CURVES.register("uncertainty")(lambda k, n, progress: uncertainty(k / n))
CURVES.register("spice")(lambda k, n, progress: spice(k / n))
CURVES.register("moving_bell")(lambda k, n, progress: moving_bell(k / n, bell_target(progress)))
CURVES.register("always")(lambda k, n, progress: np.ones_like(k, np.float64))
