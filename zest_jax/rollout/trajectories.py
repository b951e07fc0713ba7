"""What a rollout leaves behind: everything was written by the sampler, nothing is re-tokenised.

Shape letters: N episodes, L episode length, T searches, R retrieved, S slots, Q query length.
"""

import dataclasses
import enum
from typing import Any

import jax
import numpy as np


class Finish(enum.IntEnum):
    """Why an episode ended."""

    UNFINISHED = 0
    ANSWERED = 1  # a complete answer
    INVALID = 2  # an action that was none, where the protocol does not correct
    OUT_OF_TURNS = 3  # asked to search again after the last search


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Trajectories:
    """Episodes, one a row (a group's rollouts are neighbouring rows).

    Attributes:
      ids_NL: prompt, then actions and observations, as sampled and spliced; zero past the end.
      length_N: tokens of the episode. Nothing is inferred from ids.
      prompt_length_N: tokens of the prompt.
      logp_NL: log-probability of each sampled token under the softmax at the sampling temperature,
        as a trainer computes it anew; 0 else.
      drawn_logp_NL: the same under the truncated distribution that it was drawn from; equal to
        `logp_NL` where nothing was truncated.
      mask_NL: True where the policy sampled the token: the only tokens ever trained on.
      turn_NL: turn of each token (the prompt belongs to turn 0; an observation to the turn after
        it).
      rows_NTR: passages shown after each search, -1 where there was none.
      scores_NTR: their scores.
      queries_NT2: first and one-past-last token of each query.
      answer_N2: first and one-past-last token of the answer, zeros without one.
      searches_N: searches made.
      finish_N: a `Finish`.
    """

    ids_NL: jax.Array
    length_N: jax.Array
    prompt_length_N: jax.Array
    logp_NL: jax.Array
    drawn_logp_NL: jax.Array
    mask_NL: jax.Array
    turn_NL: jax.Array
    rows_NTR: jax.Array
    scores_NTR: jax.Array
    queries_NT2: jax.Array
    answer_N2: jax.Array
    searches_N: jax.Array
    finish_N: jax.Array

    @property
    def count(self) -> int:
        return self.ids_NL.shape[0]

    def to_host(self) -> "Trajectories":
        """The same on the host, one transfer for all."""
        return jax.device_get(self)

    def sampled_ids(self, row: int, turn: int | None = None) -> list[int]:
        """Ids that the policy sampled in an episode, or in one of its turns (on the host)."""
        keep = np.asarray(self.mask_NL[row])
        if turn is not None:
            keep = keep & (np.asarray(self.turn_NL[row]) == turn)
        return np.asarray(self.ids_NL[row])[keep].tolist()

    def last_action_ids(self, row: int) -> list[int]:
        """Ids of the last action: where an answer is read from, since no passage can stand in
        it."""
        turns = np.asarray(self.turn_NL[row])[np.asarray(self.mask_NL[row])]
        return self.sampled_ids(row, int(turns[-1])) if len(turns) else []


def empty(rows: int, length: int, searches: int, retrieved: int) -> Trajectories:
    """All-zero trajectories, as numpy, to be filled."""
    T = max(searches, 1)  # no zero-sized arrays for protocols that never search
    zeros: Any = np.zeros
    full: Any = np.full
    return Trajectories(
        ids_NL=zeros((rows, length), np.int32),
        length_N=zeros(rows, np.int32),
        prompt_length_N=zeros(rows, np.int32),
        logp_NL=zeros((rows, length), np.float32),
        drawn_logp_NL=zeros((rows, length), np.float32),
        mask_NL=zeros((rows, length), bool),
        turn_NL=zeros((rows, length), np.int32),
        rows_NTR=full((rows, T, retrieved), -1, np.int32),
        scores_NTR=zeros((rows, T, retrieved), np.float32),
        queries_NT2=zeros((rows, T, 2), np.int32),
        answer_N2=zeros((rows, 2), np.int32),
        searches_N=zeros(rows, np.int32),
        finish_N=zeros(rows, np.int32),
    )
