"""What a rollout leaves behind: everything was written by the sampler, nothing is re-tokenised.

Shape letters: N episodes, L episode length, T searches, U queries of a search, R retrieved.
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
    INVALID = 2  # an action that was none, where the protocol does not correct (any longer)
    OUT_OF_TURNS = 3  # asked to search again after the last search
    TOO_LONG = 4  # no action within its length, or no room for what would follow
    NO_ANSWER = 5  # the policy ended its turn without an action


class Role(enum.IntEnum):
    """Who wrote a token."""

    NONE = 0  # past the end
    PROMPT = 1
    POLICY = 2
    TOOL = 3  # what a search brought
    INJECTED = 4  # corrections


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Trajectories:
    """Episodes, one a row (a group's rollouts are neighbouring rows).

    Attributes:
      ids_NL: prompt, then actions and observations, as sampled and spliced; zero past the end.
        int32 [N, L].
      length_N: tokens of the episode. Nothing is inferred from ids. int32 [N].
      prompt_length_N: tokens of the prompt. int32 [N].
      logp_NL: log-probability of each sampled token under the softmax at the sampling temperature,
        as a trainer computes it anew; 0 else. float32 [N, L].
      drawn_logp_NL: the same under the truncated distribution that it was drawn from; equal to
        `logp_NL` where nothing was truncated. float32 [N, L].
      mask_NL: True where the policy sampled the token: the only tokens ever trained on; the same as
        `role_NL == Role.POLICY`. bool [N, L].
      turn_NL: turn of each token (the prompt belongs to turn 0; an observation to the turn after
        it). int32 [N, L].
      role_NL: a `Role` for each token. int8 [N, L].
      rows_NTUR: passages found by each query of each search, best first; -1 where there was none,
        and where there was no room to show them. int32 [N, T, U, R].
      scores_NTUR: their scores, 0 where there was none; a server tells these without rows. float32
        [N, T, U, R].
      queries_NTU2: first and one-past-last token of each query: every token with a byte of it.
        int32 [N, T, U, 2].
      asked_NT: queries of each search, at most U. int32 [N, T].
      answer_N2: first and one-past-last token of the answer, zeros without one. int32 [N, 2].
      searches_N: searches made. int32 [N].
      duplicates_N: queries with the ids of an earlier query of the episode (as far as they are
        embedded). int32 [N].
      corrections_N: actions that were none and did not end the episode. int32 [N].
      finish_N: a `Finish`. int32 [N].
    """

    ids_NL: jax.Array
    length_N: jax.Array
    prompt_length_N: jax.Array
    logp_NL: jax.Array
    drawn_logp_NL: jax.Array
    mask_NL: jax.Array
    turn_NL: jax.Array
    role_NL: jax.Array
    rows_NTUR: jax.Array
    scores_NTUR: jax.Array
    queries_NTU2: jax.Array
    asked_NT: jax.Array
    answer_N2: jax.Array
    searches_N: jax.Array
    duplicates_N: jax.Array
    corrections_N: jax.Array
    finish_N: jax.Array

    @property
    def asked_N(self) -> jax.Array:
        """Queries of each episode, [N]."""
        return self.asked_NT.sum(axis=1)

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


def empty(rows: int, length: int, searches: int, retrieved: int, queries: int = 1) -> Trajectories:
    """All-zero trajectories, as numpy, to be filled."""
    T, U = max(searches, 1), queries  # no zero-sized arrays for protocols that never search
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
        role_NL=zeros((rows, length), np.int8),
        rows_NTUR=full((rows, T, U, retrieved), -1, np.int32),
        scores_NTUR=zeros((rows, T, U, retrieved), np.float32),
        queries_NTU2=zeros((rows, T, U, 2), np.int32),
        asked_NT=zeros((rows, T), np.int32),
        answer_N2=zeros((rows, 2), np.int32),
        searches_N=zeros(rows, np.int32),
        duplicates_N=zeros(rows, np.int32),
        corrections_N=zeros(rows, np.int32),
        finish_N=zeros(rows, np.int32),
    )
