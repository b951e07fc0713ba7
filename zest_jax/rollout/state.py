"""The sizes of an episode, and everything that a rollout carries from step to step.

Shape letters: S slots, L episode length, U queries of a search, Q query length, R retrieved,
T searches, C chunk, N episodes, A actions.
"""

import dataclasses
from typing import Protocol as Interface

import jax

from zest_jax.models.cache import Cache
from zest_jax.rollout.sampling import Truncation
from zest_jax.rollout.trajectories import Trajectories

# READING: a call is complete and has not been looked into yet.
IDLE, WRITING, SEARCHING, INVALID, DONE, READING = range(6)


class Searcher(Interface):
    """What the compiled rollout asks of a retriever: two jittable functions of arrays."""

    @property
    def retrieved(self) -> int: ...

    def search(self, query_SUQ: jax.Array, length_SU: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rows [S, U, R], -1 behind the last one found, and scores [S, U, R]."""
        ...

    def observe(self, row_SUR: jax.Array, asked_S: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Ids [S, C'] and lengths [S] of observations; a slot asked `asked_S` of its queries."""
        ...


@dataclasses.dataclass(frozen=True)
class RolloutSpec:
    """The fixed sizes of an episode; part of what is compiled.

    Attributes:
      slots: episodes under way at once, S.
      prompt_length: longest prompt.
      action_length: tokens one action may have.
      observation_length: tokens one observation may have (0 for protocols without search).
      searches: searches (or corrections) an episode may have, T; one more action may follow them.
      queries: most queries of one search, U.
      response_length: tokens after the prompt, observations included; 0 for as many as the other
        sizes allow.
      query_length: tokens of a query that are embedded, Q; the first ones count.
      wait_fraction: share of the slots that must wait before writing is interrupted for them; 1.0
        waits until none is writing.
      block_slots: slots whose new tokens go through the policy together, W; those with the most new
        tokens first, so that a pass over few or short ones is short.
      block_tokens: tokens of a slot that go through it at a time.
      packed_tokens: tokens of any slots that go through it at a time where a kernel reads the
        cache; the two sizes above do not count then.
      cache_stages: lengths of the cache that are compiled; it begins with the shortest and grows as
        the longest episode under way does. For readers that go over the whole of it (XLA).
      narrowings: how often the slots are halved at the end: when the queue is empty and no more
        than half of them are under way, those go on alone. Each is compiled.
      truncation: which tokens may be drawn.
    """

    slots: int
    prompt_length: int
    action_length: int
    observation_length: int = 0
    searches: int = 0
    query_length: int = 16
    queries: int = 1
    response_length: int = 0
    wait_fraction: float = 1.0
    block_slots: int = 32
    block_tokens: int = 32
    packed_tokens: int = 2048
    cache_stages: int = 1
    narrowings: int = 0
    truncation: Truncation = Truncation()

    def __post_init__(self):
        least = {"slots": 1, "prompt_length": 1, "action_length": 1, "observation_length": 0}
        least |= {"searches": 0, "query_length": 1, "queries": 1, "response_length": 0}
        least |= {"block_slots": 1, "block_tokens": 1, "packed_tokens": 1, "cache_stages": 1}
        least |= {"narrowings": 0}
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise ValueError(f"{name} is {limit} or more, not {getattr(self, name)}")
        if not 0.0 <= self.wait_fraction <= 1.0:
            raise ValueError(f"wait_fraction lies in [0, 1], not {self.wait_fraction}")

    @property
    def length(self) -> int:
        """Longest possible episode, L."""
        turns = self.searches
        response = (turns + 1) * self.action_length + turns * self.observation_length
        return self.prompt_length + min(response, self.response_length or response)

    @property
    def chunk(self) -> int:
        """Tokens one extend pass may write, C: a prompt, or an action's last token and what
        follows."""
        longest = max(self.prompt_length, self.observation_length + 1)
        return -(-longest // self.block_tokens) * self.block_tokens

    @property
    def narrower(self) -> tuple[int, ...]:
        """Slots after each halving."""
        halves = (-(-self.slots // 2**n) for n in range(1, self.narrowings + 1))
        return tuple(sorted({n for n in halves if n < self.slots}, reverse=True))

    @property
    def cache_lengths(self) -> tuple[int, ...]:
        """Lengths that the cache has one after the other.

        A chunk may be written behind the last token, so there is room for one more.
        """
        parts = range(1, self.cache_stages + 1)
        lengths = (-(-self.length * part // self.cache_stages) for part in parts)
        return tuple(sorted({self.chunk + max(n, self.prompt_length + 1) for n in lengths}))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Work:
    """Counts of what a rollout did, int32 scalars.

    Attributes:
      decode_steps: decoding steps.
      slot_steps: slots that there were, summed over the steps.
      writing: slots that wrote, summed over the steps.
      waiting: slots that waited for a search or a correction, summed over the steps.
      passes: `extend` calls.
      prefilled: tokens that went through the policy in them.
    """

    decode_steps: jax.Array
    slot_steps: jax.Array
    writing: jax.Array
    waiting: jax.Array
    passes: jax.Array
    prefilled: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Everything a rollout carries from step to step.

    Attributes:
      cache: keys and values per layer and slot; its lengths are `RolloutSpec.cache_lengths`.
      rows: the episodes under way, one a slot (`Trajectories` with S rows).
      episode_S: number of each slot's episode; N for a slot that has none.
      phase_S: IDLE, WRITING, READING, SEARCHING, INVALID or DONE.
      automaton_S: state of the stop automaton.
      opened_SA: token at which the content of the first tag of each kind began in this action, or
        -1.
      skip_SA: bytes of that token that stand before the content.
      written_S: tokens of the action under way.
      turn_S: turn of the action under way.
      next_episode: first prompt of the queue that no slot has taken.
      count: prompts in the queue.
      out: finished episodes.
      work: what has been done so far.
    """

    cache: Cache
    rows: Trajectories
    episode_S: jax.Array
    phase_S: jax.Array
    automaton_S: jax.Array
    opened_SA: jax.Array
    skip_SA: jax.Array
    written_S: jax.Array
    turn_S: jax.Array
    next_episode: jax.Array
    count: jax.Array
    out: Trajectories
    work: Work
