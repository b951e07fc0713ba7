"""Waypoint coverage: partial credit for a wrong answer that got part of the way (KG Paths)."""

from collections.abc import Sequence

from zest_jax import text


def waypoints(
    path: Sequence[Sequence[str]], answers: Sequence[str] = ()
) -> tuple[tuple[str, ...], ...]:
    """Entities W of a path that earn credit: those between its start and its end.

    The start stands in the question and the end is the answer itself: crediting either would be
    free reward. An intermediate entity that shares a name with one of them is left out as well.

    Args:
        path: names (label and aliases) of each entity e0..eh in order.
        answers: further accepted names of the answer.
    """
    if len(path) < 3:
        return ()
    excluded = {text.normalize_answer(name) for name in (*path[0], *path[-1], *answers)}
    return tuple(
        tuple(names)
        for names in path[1:-1]
        if excluded.isdisjoint(text.normalize_answer(name) for name in names)
    )


def waypoint_reward(
    correct: bool,
    entities: Sequence[Sequence[str]],
    texts: Sequence[str],
    alpha: float = 0.3,
) -> float:
    """``r = 1`` if correct, else ``alpha |covered| / |W|``; in [0, 1].

    Covered: a name of the entity stands, normalised and as whole words, in a query or a tool result
    of the trajectory. Success elsewhere (pass rates, difficulty) must be read at ``r >= 1``.

    Args:
        correct: exact match of the answer.
        entities: names of each entity of W, from ``waypoints``. None: a wrong answer gets 0.
        texts: queries and tool results of the trajectory; not the solver's own musings.
        alpha: most that a wrong answer can earn, < 1.

    Source: KG Paths; coefficient and matching rule are not published, these are ours.
    """
    if not 0.0 <= alpha < 1.0:
        raise ValueError(f"alpha must lie in [0, 1), got {alpha}")
    if correct:
        return 1.0
    if not entities:
        return 0.0
    covered = sum(any(text.contains_any(seen, names) for seen in texts) for names in entities)
    return alpha * covered / len(entities)
