"""The rollout driven from the host, for retrievers that live elsewhere: BM25, ScaNN, a server.

The steps are the engine's own, each compiled: a pass is one loop of decoding, then the queries'
text leaves, is searched in one batch, and the observations' ids go in. Everything else stays on the
device. With the same draws and passages an episode has the same ids as in the compiled rollout; it
waits for the host once a pass, which the compiled one does not.

Queries are sent as whole texts (`RolloutSpec.query_length` only bounds what is compared to count
repeated ones). Passages are shown as `PassageStore` shows them: every piece tokenised apart, a
passage cut to its share of the observation, special tokens that it spells out as plain text.

Shape letters: S slots, U queries of a search, R retrieved, A action length, C observation length,
N prompts, P prompt length.
"""

import copy
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zest_jax.errors import UserError
from zest_jax.models import PolicyConfig
from zest_jax.models.cache import grow
from zest_jax.models.policy import Block, Params, bind
from zest_jax.parallel import Placement, hosts
from zest_jax.parallel.sharding import for_decoding
from zest_jax.retrieval.interface import Passage, PassageRetriever, TextRetriever
from zest_jax.retrieval.store import passage_room
from zest_jax.rollout.engine import Engine
from zest_jax.rollout.observing import Observed
from zest_jax.rollout.protocols import SEARCH, Protocol
from zest_jax.rollout.sampler import Sampler, of_shards
from zest_jax.rollout.sampling import Draws
from zest_jax.rollout.state import DONE, IDLE, SEARCHING, RolloutSpec, State
from zest_jax.rollout.stops import StopTable, read_text, token_bytes
from zest_jax.rollout.trajectories import Trajectories
from zest_jax.tracing import TraceCounter

SECONDS = ("decode", "extend", "search", "text")
_NO_LIMIT = np.int32(2**31 - 1)


@dataclasses.dataclass(frozen=True)
class Wrote:
    """A slot's action as far as it is written.

    Attributes:
      episode: number of the prompt in its call.
      turn: of the action.
      ids: its tokens so far.
    """

    episode: int
    turn: int
    ids: list[int]


@dataclasses.dataclass(frozen=True)
class FoundPassages:
    """What the queries of an action have found.

    Attributes:
      episode: number of the prompt in its call.
      turn: of the action.
      queries: as they were sent.
      results: passages and scores of each, best first.
    """

    episode: int
    turn: int
    queries: list[str]
    results: list[list[tuple[Passage, float]]]


Watch = Callable[[Wrote | FoundPassages], None]


class SearchFailed(UserError):
    """The retriever gave up in the middle of a rollout.

    Attributes:
      reason: what it said.
    """

    def __init__(self, reason: str, finished: int, episodes: int):
        super().__init__(
            f"the search failed when {finished} of {episodes} episodes were finished; they are "
            f"dropped and nothing was trained on them. {reason}"
        )
        self.reason = reason

    def __reduce__(self) -> Any:
        # As its sentence: another process is told no more.
        return UserError, (str(self),)


class Observations:
    """Turns what was found into the ids that a policy is shown.

    Args:
      tokenizer: the policy's.
      protocol: how passages are shown.
      spec: sizes of an episode.
      top_k: passages of a query, R.

    Raises:
      UserError: the spec's observation_length has no room for so many passages.
    """

    def __init__(self, tokenizer: Any, protocol: Protocol, spec: RolloutSpec, top_k: int):
        self._tokenizer, self._layout = tokenizer, protocol.layout
        self._frame = self._layout.frame(self._encode, spec.queries, top_k)
        self._room = passage_room(self._frame, spec.observation_length)

    def write(self, results: Sequence[Sequence[Sequence[Passage]]]) -> list[list[int]]:
        """Ids of the observations that show these passages: of each slot, of each of its queries.

        All passages are tokenised in one call, those that several slots are shown once.
        """
        found = list(dict.fromkeys(p for slot in results for query in slot for p in query))
        texts = [_clean(self._layout.write(p.title, p.text)) for p in found]
        # A passage that spells out a special token must not end the turn that shows it.
        tokens = self._encode(texts, split_special_tokens=True)
        shown = {p: ids[: self._room] for p, ids in zip(found, tokens, strict=True)}
        return [self._join([[shown[p] for p in query] for query in slot]) for slot in results]

    def _join(self, results: list[list[list[int]]]) -> list[int]:
        frame = self._frame
        out: list[int] = []
        # Where nothing was asked, the first result's frame stands, empty.
        for start, passages in zip(frame.starts, results or [[]], strict=False):
            out += start
            for head, ids in zip(frame.heads, passages, strict=False):
                out += [*head, *ids] if ids else []
            out += frame.ending
        return [*out, *frame.closing]

    def _encode(self, texts: list[str], **more: bool) -> list[list[int]]:
        if not texts:
            return []
        return self._tokenizer(texts, add_special_tokens=False, verbose=False, **more)["input_ids"]


class HostDriver:
    """The engine's steps, called from the host.

    Args:
      name: under which the steps' traces are counted.
      engine: the steps.
      tokenizer: the policy's.
      retriever: answers the searches; None for protocols that never search. May be exchanged
        between calls.
      top_k: passages of a query, R.
      traces: counts the traces.
      watch: is told what was written and found, as it goes.
      every: decoding steps between two reports of what was written.

    Attributes:
      finished: episodes finished since it was last set to 0.
      seconds: time spent since then, by `SECONDS`: decode and extend on the device, search in the
        retriever, text in reading queries and in tokenising observations.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        tokenizer: Any,
        retriever: PassageRetriever | None,
        top_k: int,
        traces: TraceCounter,
        watch: Watch | None = None,
        every: int = 16,
    ):
        self.retriever, self.watch, self.every = retriever, watch, every
        self.finished, self.total = 0, 0
        self.seconds = dict.fromkeys(SECONDS, 0.0)
        self._engine, self._top_k = engine, top_k if retriever is not None else 1
        self._observations = None
        if retriever is not None:
            self._observations = Observations(tokenizer, engine.protocol, engine.spec, top_k)
        # A head may have more rows than the tokenizer has tokens; those are none.
        known = token_bytes(tokenizer)
        self._tokens = known + [None] * (engine.config.vocab_size - len(known))

        one_at_a_time = threading.Lock()

        def jit(piece: str, function: Callable, **options: Any) -> Callable:
            step = traces.jit(f"{name}_{piece}", function, **options)

            def call(*args: Any) -> Any:
                # Threads that drive several devices would each trace it. The work itself goes on
                # beside theirs.
                with one_at_a_time:
                    return step(*args)

            return call

        self._start = jit("start", engine.start, static_argnums=(0, 1))
        self._layers = jit("layers", lambda params: bind(engine.config, params).unstack())
        self._extend = jit("extend", self._extend_step, donate_argnums=2)
        self._write = jit("decode", self._write_step, static_argnums=5, donate_argnums=3)
        self._cut = jit("cut", engine.cut, donate_argnums=1)
        self._look = jit("look", self._view, static_argnums=1)
        self._finish = jit("finish", engine.finish)
        self._grow = jit("grow", functools.partial(grow, engine.config), static_argnums=1)

    def rollout(
        self,
        params: Params,
        table: StopTable,
        _: None,
        prompt_NP: jax.Array,
        prompt_length_N: jax.Array,
        draws: Draws,
        count: jax.Array | int,
    ) -> tuple[Trajectories, dict[str, Any]]:
        """As `Engine.rollout`, from the host; the retriever is the driver's own.

        Raises:
          SearchFailed: the retriever raised a UserError (a server that stays dead, say).
        """
        spec = self._engine.spec
        # On the policy's device, where all that follows from it is made too.
        count = jax.device_put(jnp.int32(count), jax.tree.leaves(params)[0].sharding)
        # Taken apart once, not at every pass: on a GPU that copies the weights.
        weights = (params, self._layers(params))
        state = self._start(len(prompt_length_N), self._top_k, count)
        before = self.finished
        for length in spec.cache_lengths:
            if length != spec.cache_lengths[0]:
                state = dataclasses.replace(state, cache=self._grow(state.cache, length))
            view = jax.device_get(self._look(state, length))
            while view["has_work"] and view["fits"]:
                self.finished = before + int(view["finished"])
                observed = self._observe(view)
                with self._timed("extend"):
                    args = (*weights, state, prompt_NP, prompt_length_N, observed)
                    state = jax.block_until_ready(self._extend(*args))
                with self._timed("decode"):
                    state, view = self._decode(weights, table, draws, state, length)
        out, counters = self._finish(state)
        self.finished = before + int(count)
        return out, counters

    # ---------------------------------------------------------------------------- on device

    def _extend_step(
        self,
        params: Params,
        layers: list[Block],
        state: State,
        prompt_NP: jax.Array,
        prompt_length_N: jax.Array,
        observed: Observed | None,
    ) -> State:
        policy = bind(self._engine.config, params)
        return self._engine.extend(policy, layers, state, prompt_NP, prompt_length_N, observed)

    def _write_step(
        self,
        weights: tuple[Params, list[Block]],
        table: StopTable,
        draws: Draws,
        state: State,
        steps: jax.Array,
        length: int,
    ) -> State:
        """Decodes until the slots that wait are to be seen to, at most so many steps."""
        engine = self._engine
        policy = bind(engine.config, weights[0])
        decode = functools.partial(engine.decode, policy, weights[1], table, draws)
        begin = state.work.decode_steps

        def more(state: State) -> jax.Array:
            left = state.work.decode_steps - begin < steps
            return engine.should_write(state) & self._fits(state, length) & left

        return jax.lax.while_loop(more, decode, state)

    def _fits(self, state: State, length: int) -> jax.Array:
        last = length == self._engine.spec.cache_lengths[-1]
        return jnp.asarray(True) if last else self._engine.fits(state, length)

    def _view(self, state: State, length: int) -> dict[str, jax.Array]:
        """What the host looks at between two steps."""
        engine, rows = self._engine, state.rows
        begin_S = rows.length_N - state.written_S
        at_SA = begin_S[:, None] + jnp.arange(engine.spec.action_length)
        at_SA = jnp.clip(at_SA, 0, engine.spec.length - 1)
        fits = self._fits(state, length)
        there_S = state.episode_S < len(state.out.length_N)
        waiting = jnp.sum((state.phase_S == DONE) & there_S)
        return {
            "has_work": engine.has_work(state),
            "fits": fits,
            "more": engine.should_write(state) & fits,
            "finished": jnp.sum(state.out.length_N > 0) + waiting,
            "there_S": there_S & (state.phase_S != IDLE),
            "episode_S": state.episode_S,
            "turn_S": state.turn_S,
            "action_SA": jnp.take_along_axis(rows.ids_NL, at_SA, axis=1),
            "written_S": state.written_S,
            "asked_S": engine.queries(state)[2],
            "searches_S": state.phase_S == SEARCHING,
        }

    # ---------------------------------------------------------------------------- on the host

    def _decode(
        self,
        weights: tuple[Params, list[Block]],
        table: StopTable,
        draws: Draws,
        state: State,
        length: int,
    ) -> tuple[State, dict[str, np.ndarray]]:
        """Decodes until slots are to be seen to and reads their calls; the view after that."""
        steps = _NO_LIMIT if self.watch is None else np.int32(self.every)
        more = True
        while more:
            state = self._write(weights, table, draws, state, steps, length)
            view = jax.device_get(self._look(state, length))
            more = bool(view["more"])
            self._tell(view)
        if self._engine.protocol.call is None:
            return state, view
        state = self._cut(table, state)
        return state, jax.device_get(self._look(state, length))

    def _observe(self, view: dict[str, np.ndarray]) -> Observed | None:
        """Searches for all slots that wait for it, in one batch."""
        if self.retriever is None or self._observations is None:
            return None
        spec, R = self._engine.spec, self._top_k
        shape = (spec.slots, spec.queries, R)
        row_SUR, score_SUR = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
        ids_SC = np.zeros((spec.slots, spec.observation_length), np.int32)
        length_S = np.zeros(spec.slots, np.int32)
        arrays: Any = (row_SUR, score_SUR, ids_SC, length_S)
        slots = np.flatnonzero(view["searches_S"]).tolist()
        if not slots:
            return Observed(*arrays)
        with self._timed("text"):
            asked = [self._read(view, s) for s in slots]
        with self._timed("search"):
            found = self._search([query for queries in asked for query in queries])
        results, at = [], 0
        for s, queries in zip(slots, asked, strict=True):
            mine = found[at : at + len(queries)]
            at += len(queries)
            results.append([[p for p, _, _ in query] for query in mine])
            for u, query in enumerate(mine):
                row_SUR[s, u, : len(query)] = [row for _, row, _ in query]
                score_SUR[s, u, : len(query)] = [score for _, _, score in query]
            if self.watch is not None:
                pairs = [[(p, score) for p, _, score in query] for query in mine]
                where = int(view["episode_S"][s]), int(view["turn_S"][s])
                self.watch(FoundPassages(*where, queries, pairs))
        with self._timed("text"):
            for s, ids in zip(slots, self._observations.write(results), strict=True):
                ids_SC[s, : len(ids)] = ids
                length_S[s] = len(ids)
        return Observed(*arrays)

    def _read(self, view: dict[str, np.ndarray], s: int) -> list[str]:
        """The queries of a slot's action, as text."""
        if not view["asked_S"][s]:
            return []  # a call that cannot be read, answered with nothing
        ids = view["action_SA"][s, : view["written_S"][s]].tolist()
        text = read_text(self._tokens, ids)
        queries = (self._engine.protocol.queries(text) or [])[: self._engine.spec.queries]
        if len(queries) != view["asked_S"][s]:
            raise RuntimeError(
                f"the device has read {view['asked_S'][s]} queries in {text!r}, the host "
                f"{len(queries)}"
            )
        return queries

    def _search(self, queries: list[str]) -> list[list[tuple[Passage, int, float]]]:
        """Passages, rows (-1 where the retriever tells none) and scores of each query.

        A query of nothing finds nothing: servers differ in what they make of one, and some fail.
        """
        heard = [n for n, query in enumerate(queries) if query.strip()]
        out: list[list[tuple[Passage, int, float]]] = [[] for _ in queries]
        asked = [queries[n] for n in heard]
        if not asked:
            return out
        assert self.retriever is not None
        try:
            answers = _ask(self.retriever, asked, self._top_k)
        except UserError as error:
            raise SearchFailed(str(error), self.finished, self.total) from error
        for n, answer in zip(heard, answers, strict=True):
            out[n] = answer
        return out

    def _tell(self, view: dict[str, np.ndarray]) -> None:
        if self.watch is None:
            return
        for s in np.flatnonzero(view["there_S"] & (view["written_S"] > 0)):
            ids = view["action_SA"][s, : view["written_S"][s]].tolist()
            self.watch(Wrote(int(view["episode_S"][s]), int(view["turn_S"][s]), ids))

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - begin


class HostSampler(Sampler):
    """A `Sampler` whose searches are answered by any retriever of text.

    Its counters say more: the seconds of a call by `SECONDS` (decode_s, extend_s, …).

    Args:
      name, config, spec, protocol, tokenizer, capacity, traces, eos_ids: as of `Sampler`.
      retriever, top_k, watch, every: as of `HostDriver`.
    """

    def __init__(
        self,
        name: str,
        config: PolicyConfig,
        spec: RolloutSpec,
        protocol: Protocol,
        tokenizer: Any,
        retriever: PassageRetriever | None,
        capacity: int,
        traces: TraceCounter,
        eos_ids: Sequence[int] = (),
        *,
        top_k: int = 3,
        watch: Watch | None = None,
        every: int = 16,
        placement: Placement = Placement(),  # noqa: B008 (frozen)
    ):
        if spec.searches and protocol.tag(SEARCH) and retriever is None:
            raise ValueError(f"protocol {protocol.name} searches, and there is no retriever")
        if placement.mesh is not None:  # of each device, which drives a share alone
            slots = -(-spec.slots // placement.mesh.size)
            spec = dataclasses.replace(spec, slots=slots)
            capacity = -(-capacity // placement.mesh.size)
        super().__init__(name, config, spec, protocol, tokenizer, None, capacity, traces, eos_ids)
        engine = Engine.build(config, spec, protocol, tokenizer, eos_ids)
        self.driver = HostDriver(name, engine, tokenizer, retriever, top_k, traces, watch, every)
        self._rollout = self.driver.rollout
        self._spread = placement
        if placement.mesh is not None:
            self._table = hosts.fetch(self._table)  # to be put on each device alone
            whole = NamedSharding(placement.mesh, P())

            def gathered(params: Params, key: jax.Array) -> tuple[Params, jax.Array]:
                return for_decoding(params, config.dtype), key

            self._whole = jax.jit(gathered, out_shardings=whole)

    def _may_search(self, retriever: Any) -> bool:
        return True  # the host asks

    def on(self, device: jax.Device) -> "HostSampler":
        """See `Sampler`; the retriever is the same, and is asked from several threads if they
        are."""
        out = super().on(device)
        assert isinstance(out, HostSampler)
        out.driver = copy.copy(self.driver)
        out.driver.seconds = dict.fromkeys(SECONDS, 0.0)
        out._rollout = out.driver.rollout
        out._spread = Placement()
        return out

    def _call(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        streams: Sequence[int] | None,
        key: jax.Array,
        at: int,
        temperature: float,
    ) -> tuple[Trajectories, dict[str, float]]:
        """As `Sampler._call`; every local device of every process drives its share alone, with all
        of the policy."""
        if self._spread.mesh is None:
            return super()._call(params, prompts, streams, key, at, temperature)
        if streams is None:
            key, streams = jax.random.fold_in(key, at), range(len(prompts))
        params, key = self._whole(params, key)
        here = jax.local_devices()
        dealt = np.array_split(np.arange(len(prompts)), jax.process_count() * len(here))
        first = jax.process_index() * len(here)
        mine = dealt[first : first + len(here)]

        def drive(device: jax.Device, rows: np.ndarray) -> Any:
            if not len(rows):
                return None
            sampler = self.on(device)
            own = jax.tree.map(lambda x: _on(x, device), (params, key))
            out, counters = Sampler._call(
                sampler,
                own[0],
                [prompts[n] for n in rows],
                [streams[n] for n in rows],
                own[1],
                0,
                temperature,
            )
            return out, counters, sampler.driver.seconds

        def drive_all() -> list[Any]:
            with ThreadPoolExecutor(len(here)) as pool:
                return list(pool.map(drive, here, mine))

        parts = [p for each in hosts.gathered_or_raised(drive_all) for p in each if p is not None]
        for name in SECONDS:  # of the device that took longest
            self.driver.seconds[name] += max(seconds[name] for *_, seconds in parts)
        counters = {name: np.array([c[name] for _, c, _ in parts]) for name in parts[0][1]}
        episodes = jax.tree.map(lambda *xs: np.concatenate(xs), *(out for out, *_ in parts))
        return episodes, of_shards(counters, len(parts))

    def __call__(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        key: jax.Array,
        temperature: float,
        streams: Sequence[int] | None = None,
    ) -> Trajectories:
        """See `Sampler`.

        Raises:
          UserError: a prompt is too long.
          SearchFailed: the retriever gave up.
        """
        self.driver.finished, self.driver.total = 0, len(prompts)
        self.driver.seconds = dict.fromkeys(SECONDS, 0.0)
        out = super().__call__(params, prompts, key, temperature, streams)
        self.counters |= {f"{part}_s": value for part, value in self.driver.seconds.items()}
        return out


def _on(x: jax.Array, device: jax.Device) -> jax.Array:
    """A device's own copy of an array that all devices have whole."""
    part = next(shard.data for shard in x.addressable_shards if shard.device == device)
    return jax.device_put(part, device)


def _ask(
    retriever: PassageRetriever, queries: list[str], top_k: int
) -> list[list[tuple[Passage, int, float]]]:
    if not isinstance(retriever, TextRetriever):
        return [
            [(passage, -1, score) for passage, score in answer[:top_k]]
            for answer in retriever.search_passages(queries, top_k)
        ]
    found = retriever.search(queries, top_k)
    out = []
    for passages, rows, scores in zip(
        retriever.passages(found.rows), found.rows, found.scores, strict=True
    ):
        there = np.asarray(rows) >= 0
        numbers = np.asarray(rows)[there].tolist(), np.asarray(scores)[there].tolist()
        out.append(list(zip(passages, *numbers, strict=True)))
    return out


def _clean(text: str) -> str:
    # What a server sends may hold half of a surrogate pair, which is no text to a tokenizer.
    return text.encode("utf-8", "replace").decode()
