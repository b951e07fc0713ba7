"""The search episode as one compiled program.

A fixed set of slots works through a queue of prompts. Two kinds of work alternate until the queue
is done:

  decode  one token for every slot that is writing; a token that completes an action sends its slot
          to SEARCHING, INVALID or DONE, or to READING where the action is a call. Repeated while
          enough slots are writing.
  cut     the queries are cut out of the calls that have been completed; a bad one sends its slot to
          INVALID or DONE.
  extend  everything that writes many tokens at once: finished slots hand in their episode and take
          the next prompt, searching slots have their query embedded, searched and the passages
          spliced in, misled slots get the protocol's correction; then one pass over the new tokens
          fills the cache.

Nothing leaves the device between the first and the last token. The pieces are separate functions,
so that a driver on the host (`host_driver.py`) can call them one at a time for retrievers that live
elsewhere, with the same ids for the same draws and passages. Every episode has its
own random key (folded from its number), so neither slots nor refilling change what is drawn.

Invariant: a writing slot's cache holds every token but its last, which the next decode step feeds.

Shape letters: S slots, L episode length, P prompt length, U queries of a search, Q query length,
R retrieved, C chunk, N episodes.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zest_jax.errors import UserError
from zest_jax.models.cache import empty_cache, grow
from zest_jax.models.config import PolicyConfig
from zest_jax.models.policy import Block, Params, Policy, bind
from zest_jax.rollout import stops, trajectories
from zest_jax.rollout.filling import copy_prompts, fill_cache, share_prompts
from zest_jax.rollout.observing import (
    Observed,
    current_queries,
    note_searches,
    pad_to,
    what_follows,
)
from zest_jax.rollout.protocols import Protocol
from zest_jax.rollout.reading import TAG_WINDOW, Grammar, read_calls, read_token
from zest_jax.rollout.sampling import Draws, sample
from zest_jax.rollout.state import (
    DONE,
    IDLE,
    INVALID,
    READING,
    SEARCHING,
    WRITING,
    RolloutSpec,
    Searcher,
    State,
    Work,
)
from zest_jax.rollout.stops import StopTable
from zest_jax.rollout.trajectories import Finish, Role, Trajectories


@dataclasses.dataclass(frozen=True)
class Engine:
    """The compiled pieces for one policy shape, protocol and set of sizes.

    Attributes:
      config: the policy's shape.
      spec: the episode's sizes.
      protocol: the grammar.
      eos_ids: tokens that end a turn without a tag (then the action is none).
      correction_ids: the protocol's correction, tokenised; empty where it says nothing.
      axes: axes of a mesh over which engines work side by side, each within `jax.shard_map`; all
        of them search as often as the one that does most. () for one engine.
      lockstep: whether every loop of theirs makes as many turns as the longest, as it must where
        devices exchange something within a step (the mesh's tensor axis).
    """

    config: PolicyConfig
    spec: RolloutSpec
    protocol: Protocol
    eos_ids: tuple[int, ...]
    correction_ids: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    lockstep: bool = False

    def __post_init__(self):
        longest = max(map(len, self.protocol.closing))
        if longest > TAG_WINDOW:
            raise ValueError(
                f"a closing tag of protocol {self.protocol.name} has {longest} bytes, more than "
                f"the {TAG_WINDOW} tokens that are looked back for its start"
            )
        if len(self.correction_ids) > self.spec.observation_length:
            raise ValueError(
                f"the correction has {len(self.correction_ids)} tokens, more than "
                f"observation_length={self.spec.observation_length}"
            )
        if self.spec.queries > 1 and self.protocol.call is None:
            raise ValueError(f"an action of protocol {self.protocol.name} has one query")

    @property
    def grammar(self) -> Grammar:
        return Grammar(self.protocol, self.eos_ids, self.correction_ids)

    @classmethod
    def build(
        cls,
        config: PolicyConfig,
        spec: RolloutSpec,
        protocol: Protocol,
        tokenizer,
        eos_ids: Sequence[int] = (),
    ) -> "Engine":
        """Tokenises what the protocol adds; `eos_ids` end a turn beside the tokenizer's own.

        Raises:
          UserError: a special token of the protocol is none of the tokenizer's.
        """
        for token in protocol.special:
            if len(tokenizer(token, add_special_tokens=False)["input_ids"]) != 1:
                raise UserError(
                    f"protocol {protocol.name} writes {token}, which the policy's tokenizer has no "
                    "token for; take a protocol without turns (search_r1) or another policy."
                )
        correction = protocol.correction
        ids = tokenizer(correction, add_special_tokens=False)["input_ids"] if correction else []
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        ends = tuple(dict.fromkeys([*own, *eos_ids]))
        return cls(config, spec, protocol, ends, tuple(ids))

    def stop_table(self, tokenizer) -> StopTable:
        """The automaton's table over the protocol's tags, on device."""
        table = stops.build_stop_table(
            stops.token_bytes(tokenizer),
            self.protocol.opening,
            self.protocol.closing,
            self.config.vocab_size,
            with_text=self.protocol.call is not None,
        )
        return jax.tree.map(jnp.asarray, table)

    # ------------------------------------------------------------------------------ drivers

    def rollout(
        self,
        params: Params,
        table: StopTable,
        retriever: Searcher | None,
        prompt_NP: jax.Array,
        prompt_length_N: jax.Array,
        draws: Draws,
        count: jax.Array | int | None = None,
    ) -> tuple[Trajectories, dict[str, jax.Array]]:
        """Runs all prompts to their end; meant to be jitted with `self` fixed.

        Args:
          params: the policy's parameters.
          table: from `stop_table`.
          retriever: answers queries on device; None for protocols that never search.
          prompt_NP: prompts, right-padded to the spec's prompt_length.
          prompt_length_N: their lengths.
          draws: randomness.
          count: prompts that are there, if fewer than N, so that one program serves every number of
            them; the rows behind stay empty.

        Returns:
          N trajectories in the order of the prompts, and counters (`counters`).
        """
        policy = bind(self.config, params)
        layers = policy.unstack()
        retrieved = retriever.retrieved if retriever is not None else 1
        episodes = prompt_length_N.shape[0]
        state = self.start(episodes, retrieved, episodes if count is None else count)

        def extend(engine: Engine, state: State) -> State:
            observed = None
            if retriever is not None:
                with jax.named_scope("search"):
                    ids_SUQ, length_SU, asked_S = engine.queries(state)
                    row_SUR, score_SUR = retriever.search(ids_SUQ, length_SU)
                    there_SU = jnp.arange(engine.spec.queries) < asked_S[:, None]
                    row_SUR = jnp.where(there_SU[..., None], row_SUR, -1)
                    observed = Observed(row_SUR, score_SUR, *retriever.observe(row_SUR, asked_S))
            with jax.named_scope("extend"):
                return engine.extend(policy, layers, state, prompt_NP, prompt_length_N, observed)

        def decode(engine: Engine, state: State) -> State:
            with jax.named_scope("decode"):  # a name for profiles and for `zest_jax.plan`
                return engine.decode(policy, layers, table, draws, state)

        widths = (self.spec.slots, *self.spec.narrower)
        stages = [(widths[0], length) for length in self.spec.cache_lengths]
        stages += [(slots, self.spec.cache_lengths[-1]) for slots in widths[1:]]
        for stage, (slots, length) in enumerate(stages):
            engine = dataclasses.replace(self, spec=dataclasses.replace(self.spec, slots=slots))
            state = dataclasses.replace(state, cache=grow(self.config, state.cache, length))
            if slots < len(state.phase_S):
                state = engine.narrowed(state)
            state = engine._run(
                state,
                functools.partial(extend, engine),
                functools.partial(decode, engine),
                table,
                length,
                enough=next((n for n, _ in stages[stage + 1 :] if n < slots), 0),
            )
        return self.finish(state)

    def _run(
        self,
        state: State,
        extend: Callable[[State], State],
        decode: Callable[[State], State],
        table: StopTable,
        length: int,
        enough: int,
    ) -> State:
        """Goes on until the queue is done, this cache may not hold what follows, or `enough` slots
        would do for what is left."""
        last = length == self.spec.cache_lengths[-1]

        def fits(state: State) -> jax.Array | bool:
            return last or self.fits(state, length)

        def few(state: State) -> jax.Array | bool:
            return last and enough > 0 and self.few(state, enough)

        def write(state: State) -> State:
            def more(state: State) -> jax.Array:
                axes = self.axes if self.lockstep else ()
                going = _any(self.should_write(state), axes) & _all(fits(state), axes)
                # Engines side by side become narrower together, between two passes.
                return going if self.axes else going & ~jnp.asarray(few(state))

            return self.cut(table, jax.lax.while_loop(more, decode, state))

        def goes_on(state: State) -> jax.Array:
            going = _any(self.has_work(state), self.axes) & _all(fits(state), self.axes)
            return going & ~jnp.asarray(_all(few(state), self.axes))

        return jax.lax.while_loop(goes_on, lambda state: write(extend(state)), state)

    # ------------------------------------------------------------------------------ pieces

    def start(self, episodes: int, retrieved: int, count: jax.Array | int) -> State:
        """All slots empty, so that the first `extend` fills them with the first of `count`
        prompts."""
        s, S = self.spec, self.spec.slots
        return State(
            cache=empty_cache(self.config, S, s.cache_lengths[0]),
            rows=_device(trajectories.empty(S, s.length, s.searches, retrieved, s.queries)),
            episode_S=jnp.full(S, episodes, jnp.int32),
            phase_S=jnp.full(S, DONE, jnp.int32),
            automaton_S=jnp.zeros(S, jnp.int32),
            opened_SA=jnp.full((S, len(self.protocol.actions)), -1, jnp.int32),
            skip_SA=jnp.zeros((S, len(self.protocol.actions)), jnp.int32),
            written_S=jnp.zeros(S, jnp.int32),
            turn_S=jnp.zeros(S, jnp.int32),
            next_episode=jnp.zeros((), jnp.int32),
            count=jnp.asarray(count, jnp.int32),
            out=_device(trajectories.empty(episodes, s.length, s.searches, retrieved, s.queries)),
            work=Work(*(jnp.zeros((), jnp.int32) for _ in dataclasses.fields(Work))),
        )

    def has_work(self, state: State) -> jax.Array:
        """Whether a slot is under way or a prompt is left in the queue."""
        return jnp.any((state.phase_S == WRITING) | _waits(state)) | (
            state.next_episode < state.count
        )

    def few(self, state: State, slots: int) -> jax.Array:
        """Whether the queue is empty and so many slots would do for those under way."""
        going = jnp.sum((state.phase_S == WRITING) | _waits(state))
        return (state.next_episode >= state.count) & (going <= slots)

    def narrowed(self, state: State) -> State:
        """A state of more slots, of which no more are under way than this engine has, as one of
        this engine; finished episodes are handed in."""
        phase_S, N = state.phase_S, len(state.out.length_N)
        going_S = (phase_S == WRITING) | _waits(state)
        kept_W = jnp.argsort(~going_S, stable=True)[: self.spec.slots]
        there_W = going_S[kept_W]
        per_slot = {
            name: jax.tree.map(lambda x: x[kept_W], getattr(state, name))
            for name in ("cache", "rows", "automaton_S", "opened_SA", "skip_SA")
            + ("written_S", "turn_S")
        }
        return dataclasses.replace(
            state,
            **per_slot,
            episode_S=jnp.where(there_W, state.episode_S[kept_W], N),
            phase_S=jnp.where(there_W, phase_S[kept_W], IDLE),
            out=_hand_in(state),
        )

    def fits(self, state: State, length: int) -> jax.Array:
        """Whether a cache of that length has room for what the next piece may write."""
        there_S = state.episode_S < len(state.out.length_N)
        longest = jnp.max(jnp.where(there_S, state.rows.length_N, 0))
        return longest + 1 + self.spec.chunk <= length

    def counters(self, state: State) -> dict[str, jax.Array]:
        """What a rollout did: `decode_steps`, `passes` (interruptions of decoding), `prefilled`
        (tokens that went through the policy in them), and the shares of all slots and steps in
        which a slot was writing (`slot_utilisation`) or waiting (`slot_waiting`)."""
        work = state.work
        whole = jnp.maximum(work.slot_steps, 1)
        return {
            "decode_steps": work.decode_steps,
            "passes": work.passes,
            "prefilled": work.prefilled,
            "slot_utilisation": work.writing / whole,
            "slot_waiting": work.waiting / whole,
        }

    def finish(self, state: State) -> tuple[Trajectories, dict[str, jax.Array]]:
        """What `rollout` returns, from the state in which no work is left."""
        return _hand_in(state), self.counters(state)

    def should_write(self, state: State) -> jax.Array:
        """Whether to go on decoding, or to see to the slots that wait."""
        writing = jnp.sum(state.phase_S == WRITING)
        left = state.count - state.next_episode
        refillable = jnp.minimum(jnp.sum(state.phase_S == DONE), left)
        # At least one, or decoding would never begin.
        enough = max(self.spec.wait_fraction * self.spec.slots, 1.0)
        return (writing > 0) & (jnp.sum(_waits(state)) + refillable < enough)

    def cut(self, table: StopTable, state: State) -> State:
        """The state with no call left unread; to be called before `queries` and `extend`."""
        return read_calls(self.grammar, self.spec, table, state)

    def queries(self, state: State) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Token ids [S, U, Q], lengths [S, U] and number [S] of the queries of the slots that
        search."""
        return current_queries(self.spec, state)

    def decode(
        self,
        policy: Policy,
        layers: list[Block],
        table: StopTable,
        draws: Draws,
        state: State,
    ) -> State:
        """Samples one token for every writing slot and moves slots whose action it completes."""
        rows, length_S = state.rows, state.rows.length_N
        slot_S = jnp.arange(self.spec.slots)
        last_S = jnp.maximum(length_S - 1, 0)
        hidden_S1D, cache = policy.extend(
            layers, state.cache, rows.ids_NL[slot_S, last_S][:, None], last_S
        )
        token_S, logp_S, drawn_logp_S = sample(
            policy.logits(hidden_S1D[:, 0]),
            draws,
            state.episode_S,
            length_S,
            self.spec.truncation,
        )
        writing_S = state.phase_S == WRITING
        # Out of bounds for slots that do not write, where a scatter drops the update.
        at_S = jnp.where(writing_S, length_S, self.spec.length)
        put = functools.partial(_put, slot_S, at_S)
        rows = dataclasses.replace(
            rows,
            ids_NL=put(rows.ids_NL, token_S),
            logp_NL=put(rows.logp_NL, logp_S),
            drawn_logp_NL=put(rows.drawn_logp_NL, drawn_logp_S),
            mask_NL=put(rows.mask_NL, True),
            turn_NL=put(rows.turn_NL, state.turn_S),
            role_NL=put(rows.role_NL, Role.POLICY),
            length_N=length_S + writing_S,
        )
        state = dataclasses.replace(
            state,
            cache=cache,
            rows=rows,
            written_S=state.written_S + writing_S,
            work=dataclasses.replace(
                state.work,
                decode_steps=state.work.decode_steps + 1,
                slot_steps=state.work.slot_steps + self.spec.slots,
                writing=state.work.writing + jnp.sum(writing_S, dtype=jnp.int32),
                waiting=state.work.waiting + jnp.sum(_waits(state), dtype=jnp.int32),
            ),
        )
        return read_token(self.grammar, self.spec, table, state, token_S, writing_S)

    def extend(
        self,
        policy: Policy,
        layers: list[Block],
        state: State,
        prompt_NP: jax.Array,
        prompt_length_N: jax.Array,
        observed: Observed | None,
    ) -> State:
        """Hands in and refills finished slots, shows passages and corrections, fills the cache.

        Args:
          policy: the policy.
          layers: its unstacked layers.
          state: the state.
          prompt_NP: the queue's prompts.
          prompt_length_N: their lengths.
          observed: what the slots that search are told; None for protocols that never search.

        Returns:
          The state, with every slot that waited writing again (or done, if it has no room for what
          follows; or idle, if the queue is empty).
        """
        S, N = self.spec.slots, prompt_length_N.shape[0]
        out, rows = _hand_in(state), state.rows
        done_S = state.phase_S == DONE
        rank_S = jnp.cumsum(done_S) - 1
        taken_S = done_S & (state.next_episode + rank_S < state.count)
        episode_S = jnp.where(taken_S, state.next_episode + rank_S, state.episode_S)
        episode_S = jnp.where(done_S & ~taken_S, N, episode_S).astype(jnp.int32)
        searching_S, invalid_S = state.phase_S == SEARCHING, state.phase_S == INVALID

        # What is appended to each slot, and where the pass over new tokens begins.
        mine_S = jnp.minimum(episode_S, N - 1)
        added = what_follows(self.grammar, self.spec, state, observed)
        prompt_SC = pad_to(prompt_NP, self.spec.chunk)[mine_S]
        new_SC = jnp.where(taken_S[:, None], prompt_SC, added.ids_SC)
        new_length_S = jnp.where(taken_S, prompt_length_N[mine_S], added.length_S)
        role_S = jnp.where(taken_S, jnp.int8(Role.PROMPT), added.role_S)
        if observed is not None:
            rows = note_searches(self.spec, state, observed, searching_S & ~added.full_S)
        rows = dataclasses.replace(
            rows, finish_N=jnp.where(added.full_S, Finish.TOO_LONG, rows.finish_N)
        )
        rows = jax.tree.map(
            lambda fresh, old: jnp.where(_like(taken_S, old), fresh, old),
            _device(
                trajectories.empty(
                    S,
                    self.spec.length,
                    self.spec.searches,
                    rows.rows_NTUR.shape[3],
                    self.spec.queries,
                )
            ),
            rows,
        )
        begin_S = rows.length_N
        turn_S = jnp.where(taken_S, 0, state.turn_S + searching_S + invalid_S)
        at_SC = begin_S[:, None] + jnp.arange(self.spec.chunk)
        at_SC = jnp.where(
            jnp.arange(self.spec.chunk) < new_length_S[:, None], at_SC, self.spec.length
        )
        put = functools.partial(_put, jnp.arange(S)[:, None], at_SC)
        rows = dataclasses.replace(
            rows,
            ids_NL=put(rows.ids_NL, new_SC),
            turn_NL=put(rows.turn_NL, jnp.broadcast_to(turn_S[:, None], at_SC.shape)),
            role_NL=put(rows.role_NL, jnp.broadcast_to(role_S[:, None], at_SC.shape)),
            length_N=begin_S + new_length_S,
            prompt_length_N=jnp.where(taken_S, new_length_S, rows.prompt_length_N),
        )

        # An action's last token is not in the cache yet, so the pass begins one token early. A slot
        # whose prompt is copied has all of it.
        shared = share_prompts(prompt_NP, prompt_length_N, state.episode_S, episode_S, taken_S)
        copied_S = shared.held_S | shared.follows_S
        start_S = jnp.maximum(jnp.where(copied_S, rows.length_N, begin_S) - 1, 0)
        chunk_SC = jnp.minimum(start_S[:, None] + jnp.arange(self.spec.chunk), self.spec.length - 1)
        chunk_SC = jnp.take_along_axis(rows.ids_NL, chunk_SC, axis=1)
        resumed_S = taken_S | ((searching_S | invalid_S) & ~added.full_S)
        fill_S = jnp.where(resumed_S & ~copied_S, rows.length_N - start_S, 0)
        # Holders first: they may be filled with a prompt of their own.
        axes = self.axes if self.lockstep else ()
        copy = functools.partial(copy_prompts, self.config, length=prompt_NP.shape[1], axes=axes)
        cache = copy(state.cache, shared.holder_S, shared.held_S)
        cache = fill_cache(self.spec, policy, layers, cache, chunk_SC, start_S, fill_S, axes)
        cache = copy(cache, shared.leader_S, shared.follows_S)
        work = dataclasses.replace(
            state.work,
            passes=state.work.passes + 1,
            prefilled=state.work.prefilled + jnp.sum(fill_S, dtype=jnp.int32),
        )
        return dataclasses.replace(
            state,
            cache=cache,
            rows=rows,
            work=work,
            episode_S=episode_S,
            phase_S=jnp.select(
                [resumed_S, added.full_S, done_S], [WRITING, DONE, IDLE], state.phase_S
            ),
            automaton_S=jnp.where(resumed_S, 0, state.automaton_S),
            opened_SA=jnp.where(resumed_S[:, None], -1, state.opened_SA),
            written_S=jnp.where(resumed_S, 0, state.written_S),
            turn_S=turn_S,
            next_episode=jnp.minimum(state.next_episode + jnp.sum(done_S), state.count).astype(
                jnp.int32
            ),
            out=out,
        )


def compiler_options() -> dict[str, Any]:
    """Options to compile a rollout with on this machine, for `jax.jit`.

    On NVIDIA GPUs a decoding step's products of few rows are 6 % faster from cuBLAS than from the
    Triton kernels that XLA's autotuner prefers (docs/performance.md).
    """
    return {"xla_gpu_enable_triton_gemm": False} if jax.default_backend() == "gpu" else {}


def _hand_in(state: State) -> Trajectories:
    """Copies finished episodes to their place in the output; other slots write out of bounds."""
    episodes = state.out.length_N.shape[0]
    at_S = jnp.where(state.phase_S == DONE, state.episode_S, episodes)
    return jax.tree.map(
        lambda out, rows: out.at[at_S].set(rows, mode="drop"), state.out, state.rows
    )


def _put(row: jax.Array, at: jax.Array, x: jax.Array, value: Any) -> jax.Array:
    return x.at[row, at].set(value, mode="drop")


def _waits(state: State) -> jax.Array:
    """Slots that wait for `cut` or `extend`, [S]."""
    phase_S = state.phase_S
    return (phase_S == READING) | (phase_S == SEARCHING) | (phase_S == INVALID)


def _any(there: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Whether it is so on one of the shards."""
    return jax.lax.psum(there.astype(jnp.int32), axes) > 0 if axes else there


def _all(there: jax.Array | bool, axes: tuple[str, ...]) -> jax.Array | bool:
    """Whether it is so on all shards."""
    if not axes or isinstance(there, bool):
        return there
    return jax.lax.psum(1 - there.astype(jnp.int32), axes) == 0


def _like(mask_S: jax.Array, x: jax.Array) -> jax.Array:
    return mask_S.reshape(mask_S.shape + (1,) * (x.ndim - 1))


def _device(x: Any) -> Any:
    return jax.tree.map(jnp.asarray, x)
