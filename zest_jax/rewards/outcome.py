"""What the solver's answers are worth: correctness y of each rollout of one question's group.

Shape letters: G group (rollouts of one question).

``y`` is kept apart from any shaped reward ``r``: difficulty, group kinds and pass rates read y
only, since a shaped reward would count partial credit as success.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float

from zest_jax import text

GroupKind = Literal["mixed", "all_right", "all_wrong"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Scores of the rollouts of one question.

    Attributes:
        y_G: exact match, 0 or 1.
        f1_G: token F1 in [0, 1], for reports.
        answered_G: an answer with something in it was given.
    """

    y_G: Float[np.ndarray, " G"]
    f1_G: Float[np.ndarray, " G"]
    answered_G: Bool[np.ndarray, " G"]

    @property
    def accuracy(self) -> float:
        """``Acc(q) = (1/n) sum_i y_i``, the solver's pass rate on this question."""
        return float(self.y_G.mean())


def outcome(predictions: Sequence[str | None], golds: Sequence[str]) -> Outcome:
    """Scores a group of answers to one question.

    Args:
        predictions: text inside the last answer tag of each rollout; None where there is none.
        golds: accepted names of the answer.
    """
    return Outcome(
        y_G=np.array([text.exact_match(p, golds) for p in predictions], np.float32),
        f1_G=np.array([text.token_f1(p, golds) for p in predictions], np.float32),
        answered_G=np.array([bool(p and p.strip()) for p in predictions], bool),
    )


def group_kind(y_G: Float[np.ndarray, " G"]) -> GroupKind:
    """Only a mixed group teaches: in the others every advantage is 0."""
    right = int((np.asarray(y_G) >= 1.0).sum())
    if right == 0:
        return "all_wrong"
    return "all_right" if right == len(y_G) else "mixed"
