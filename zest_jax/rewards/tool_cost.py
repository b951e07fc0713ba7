r"""Task-local tool-aware solver rewards: right answers with fewer redundant searches earn more.

Shape letters: G group (rollouts of one question).

"Task-local" means that a rollout is measured against its own group: m* is the fewest searches by
which any rollout of the question was right, so that needed searches cost nothing. A wrong answer
gets 0 in every form.

Source: ZEST-Search names the idea and sweeps a coefficient; its formula is not published.
T1-T3 are forms that fit the description.

Note on group normalisation: in a group where all are right, dividing by the standard deviation
takes the coefficient out again. It then acts in mixed groups only, unless the advantage is taken
without std, or scaled afterwards.
"""

import math
from typing import Literal

import numpy as np
from jaxtyping import Float, Num

Form = Literal["T1", "T2", "T3"]


def tool_aware_reward(
    y_G: Float[np.ndarray, " G"],
    searches_G: Num[np.ndarray, " G"],
    *,
    form: Form = "T1",
    cost: float = 0.3,
    most: int | float | None = None,
    scale: int | float = 4,
) -> Float[np.ndarray, " G"]:
    r"""Shaped reward r of each rollout, in [0, 1].

    With :math:`m^* = \min\{m_j : y_j = 1\}`:

    .. math::
        (T1)\; r = y \left(1 - c \frac{m - m^*}{\max(1, M - m^*)}\right), \qquad
        (T2)\; r = y \left(1 - c \min\left(1, \frac{m - m^*}{K}\right)\right)

    .. math::
        (T3)\; r = y \cdot r_{tool}, \quad
        r_{tool} = 1 \;(m = m^* = 0), \quad
        \cos\frac{m \pi}{2m + c} \;(m^* = 0), \quad
        \sin\frac{f \pi}{2 m^*} \;(m^* > 0), \quad f = \frac{2 m m^*}{m + m^*}

    Args:
        y_G: correctness, 0 or 1.
        searches_G: searches m of each rollout.
        form: T1 spreads the cost over the group, T2 over a fixed number K of extra searches, T3 is
            OTC-GRPO's product; its f is recalled from the paper and not verified.
        cost: coefficient c. T1 and T2: largest share of the reward that searches can cost, in
            [0, 1). T3: smoothing constant > 0, larger is milder.
        most: M of T1. None: the most searches among the *right* rollouts of the group, so that
            a wrong rollout cannot make searching cheaper for the right ones. A turn limit makes the
            cost per search the same in all groups.
        scale: K of T2.
    """
    if form not in ("T1", "T2", "T3"):
        raise ValueError(f"unknown form {form!r} of the tool-aware reward; choose T1, T2 or T3")
    if form != "T3" and not 0.0 <= cost < 1.0:
        raise ValueError(
            f"cost must lie in [0, 1), got {cost}: a right answer must stay worth more"
        )
    if form == "T3" and cost <= 0.0:
        raise ValueError(f"the smoothing constant of T3 must be above 0, got {cost}")
    y_G, m_G = np.asarray(y_G, np.float64), np.asarray(searches_G, np.float64)
    right_G = y_G >= 1.0
    if not right_G.any():
        return np.zeros_like(y_G)
    fewest = m_G[right_G].min()
    if form == "T1":
        most = m_G[right_G].max() if most is None else most
        share_G = np.clip((m_G - fewest) / max(1.0, most - fewest), 0.0, 1.0)
        factor_G = 1.0 - cost * share_G
    elif form == "T2":
        factor_G = 1.0 - cost * np.clip((m_G - fewest) / scale, 0.0, 1.0)
    elif fewest == 0:
        factor_G = np.cos(m_G * math.pi / (2.0 * m_G + cost))
    else:
        optimum_G = 2.0 * m_G * fewest / (m_G + fewest)
        factor_G = np.sin(optimum_G * math.pi / (2.0 * fewest))
    return np.where(right_G, factor_G, 0.0)
