"""Reading sampled episodes back as text: the policy's own words, what its searches found."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from zest_jax.rollout.trajectories import Role, Trajectories
from zest_jax.tasks.types import Passage


def turns_of(episodes: Trajectories, tokenizer: Any) -> list[tuple[str, ...]]:
    """The policy's own words of every turn of every episode."""
    ids, owners = [], []
    for n in range(episodes.count):
        mask_L = np.asarray(episodes.mask_NL[n])
        for turn in np.unique(np.asarray(episodes.turn_NL[n])[mask_L]):
            owners.append(n)
            ids.append(episodes.sampled_ids(n, int(turn)))
    texts = tokenizer.batch_decode(ids, clean_up_tokenization_spaces=False) if ids else []
    out: list[list[str]] = [[] for _ in range(episodes.count)]
    for n, text in zip(owners, texts, strict=True):
        out[n].append(text)
    return [tuple(words) for words in out]


def found_by(
    episodes: Trajectories, n: int, search: int, passages: Sequence[Passage], tokenizer: Any
) -> tuple[Passage, ...]:
    """The passages that a search of an episode brought, best first.

    A server's have no rows in a corpus: they come as one passage, the text that was shown.
    """
    rows = np.asarray(episodes.rows_NTUR[n, search]).ravel()
    rows = rows[rows >= 0]
    if len(rows) and len(passages):
        return tuple(passages[int(row)] for row in dict.fromkeys(rows.tolist()))
    role_L, turn_L = np.asarray(episodes.role_NL[n]), np.asarray(episodes.turn_NL[n])
    tool = [int(turn) for turn in np.unique(turn_L[role_L == Role.TOOL])]
    if search >= len(tool):
        return ()
    shown_L = (role_L == Role.TOOL) & (turn_L == tool[search])
    text = tokenizer.decode(np.asarray(episodes.ids_NL[n])[shown_L].tolist())
    return (Passage(f"search {search + 1}", "", text),)
