"""EviBack's fallback: in a group where nobody is right, gathered evidence is what is paid for.

Shape letters: G group (rollouts of one question).
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float


@dataclasses.dataclass(frozen=True)
class FallbackScores:
    """Scores of one group.

    Attributes:
        score_G: reward of each rollout: EM, or the fallback value in [0, beta + gamma].
        scale: multiplier of the advantage *after* normalisation, one number for the group.
        used: the group was all-zero and the fallback spoke.
    """

    score_G: Float[np.ndarray, " G"]
    scale: float
    used: bool


def needs_teacher(em_G: Float[np.ndarray, " G"]) -> bool:
    """All-zero group: no rollout with EM >= 1. Only then may the teacher be asked."""
    return not (np.asarray(em_G) >= 1.0).any()


def fallback_scores(
    em_G: Float[np.ndarray, " G"],
    supported_G: Bool[np.ndarray, " G"],
    teacher_f1_G: Float[np.ndarray, " G"],
    bonus_allowed_G: Bool[np.ndarray, " G"],
    *,
    beta: float = 0.1,
    gamma: float = 0.1,
    lam: float = 0.1,
) -> FallbackScores:
    r"""Scores and advantage scale of a group (EviBack).

    Some rollout right: ``score = EM``, scale 1. Nobody right:

    .. math::
        score_i = \beta \, supported_i
                + \gamma \, F1(\text{teacher's answer}_i) \, supported_i \, allowed_i,
        \qquad scale = \lambda

    What is paid for is the *evidence*: the F1 is that of the answer which the teacher finds in the
    rollout's evidence, not of the rollout's own answer.

    Args:
        em_G: exact match of each rollout, already 0 where its grammar is invalid.
        supported_G: the teacher's reply is valid and says supported or ambiguous; False where there
            was no evidence to ask about, or the teacher failed.
        teacher_f1_G: F1 of the teacher's answer against the references; unused where not supported.
        bonus_allowed_G: the rollout is grammatical and gave a non-empty answer. Only the bonus
            needs it; beta does not.
        beta, gamma: pay for evidence and for its answer.
        lam: scale of the group's advantages. It acts after normalisation, which would cancel it.
    """
    em_G = np.asarray(em_G, np.float64)
    if not needs_teacher(em_G):
        return FallbackScores(em_G, 1.0, False)
    supported_G = np.asarray(supported_G, bool)
    bonus_G = np.where(supported_G & np.asarray(bonus_allowed_G, bool), teacher_f1_G, 0.0)
    return FallbackScores(beta * supported_G + gamma * bonus_G, lam, True)
