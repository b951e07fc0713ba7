"""The compiled rollout with its fixed parts in hand: prompts in, trajectories on the host out.

Shape letters: N episodes, P prompt length.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zest_jax.errors import UserError
from zest_jax.models import PolicyConfig
from zest_jax.models.policy import Params
from zest_jax.parallel import Placement, hosts
from zest_jax.rollout import side_by_side
from zest_jax.rollout.engine import Engine, compiler_options
from zest_jax.rollout.protocols import ANSWER, SEARCH, Protocol
from zest_jax.rollout.sampling import Draws
from zest_jax.rollout.state import RolloutSpec, Searcher
from zest_jax.rollout.trajectories import Finish, Trajectories
from zest_jax.text import last_tag
from zest_jax.tracing import TraceCounter


class Sampler:
    """Samples episodes of one protocol with one compiled program.

    Args:
      name: under which its traces are counted.
      config: shape of the policy.
      spec: sizes of an episode.
      protocol: its grammar.
      tokenizer: the policy's.
      retriever: answers the searches; None for protocols without.
      capacity: most prompts of one call; more are done in several calls.
      traces: counts the traces.
      eos_ids: tokens that end a turn beside the tokenizer's own.
      placement: the devices that share the episodes; the retriever is placed on them by
        `side_by_side.place_retriever`.
    """

    def __init__(
        self,
        name: str,
        config: PolicyConfig,
        spec: RolloutSpec,
        protocol: Protocol,
        tokenizer,
        retriever: Searcher | None,
        capacity: int,
        traces: TraceCounter,
        eos_ids: Sequence[int] = (),
        placement: Placement = Placement(),  # noqa: B008 (frozen)
    ):
        if spec.searches and protocol.tag(SEARCH) and not self._may_search(retriever):
            raise ValueError(f"protocol {protocol.name} searches, and there is no retriever")
        self.spec, self.protocol, self.tokenizer = spec, protocol, tokenizer
        self.capacity = capacity
        self._retriever, self._vocabulary = retriever, config.vocab_size
        engine = Engine.build(config, spec, protocol, tokenizer, eos_ids)
        self._placement = placement
        self._table = placement.whole(engine.stop_table(tokenizer))
        run = engine.rollout
        if placement.mesh is not None:
            run = side_by_side.rollout_on(
                side_by_side.share_engine(engine, placement.mesh), placement.mesh
            )
        self._rollout = traces.jit(name, run, compiler_options=compiler_options())
        # Of the last call: see `Engine.counters`.
        self.counters: dict[str, float] = {}

    def _may_search(self, retriever: Searcher | None) -> bool:
        return retriever is not None

    def __call__(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        key: jax.Array,
        temperature: float,
        streams: Sequence[int] | None = None,
    ) -> Trajectories:
        """One episode per prompt, in order, on the host.

        Args:
          params: the policy's, all of them.
          prompts: token ids.
          key: of all draws.
          temperature: of the softmax; 0 is greedy.
          streams: a number below 2^32 for each prompt: its draws are a function of the key and that
            number, in whatever call it stands. Without them they follow from its place.

        Raises:
          UserError: a prompt is longer than the spec allows.
          ValueError: there is no prompt, or an empty one, or an id that the policy has not.
        """
        if not prompts:
            raise ValueError("there is no prompt to write on from")
        vocabulary = self._vocabulary
        for ids in prompts:
            if not len(ids):
                raise ValueError("a prompt has no token: nothing would predict the first one")
            if min(ids) < 0 or max(ids) >= vocabulary:
                raise ValueError(f"a prompt has an id outside the policy's 0 to {vocabulary - 1}")
        parts, counted = [], []
        for at in range(0, len(prompts), self.capacity):
            chunk = prompts[at : at + self.capacity]
            here = None if streams is None else streams[at : at + len(chunk)]
            out, counters = self._call(params, chunk, here, key, at, temperature)
            parts.append(out)
            counted.append(counters)
        self.counters = _together(counted)
        return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)

    def _call(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        streams: Sequence[int] | None,
        key: jax.Array,
        at: int,
        temperature: float,
    ) -> tuple[Trajectories, dict[str, float]]:
        """One call of the compiled rollout, for at most `capacity` prompts."""
        shards = self._placement.shards
        share = -(-self.capacity // shards)
        dealt_X = side_by_side.deal(len(prompts), shards)
        # The rows of a shard stand together, those without a prompt behind the others.
        row_N = np.concatenate([x * share + np.arange(n) for x, n in enumerate(dealt_X)])
        prompt_NP = np.zeros((shards * share, self.spec.prompt_length), np.int32)
        length_N = np.zeros(shards * share, np.int32)
        for n, ids in zip(row_N, prompts, strict=True):
            if len(ids) > self.spec.prompt_length:
                raise UserError(
                    f"a prompt of the {self.protocol.name} protocol has {len(ids)} tokens, "
                    f"more than prompt_length={self.spec.prompt_length}; raise it in the "
                    "config."
                )
            prompt_NP[n, : len(ids)] = ids
            length_N[n] = len(ids)
        numbers = np.arange(len(prompts)) if streams is None else streams
        stream_N = None
        if streams is not None or self._placement.mesh is not None:
            stream_N = np.zeros(shards * share, np.uint32)
            stream_N[row_N] = numbers
        drawn = jax.random.fold_in(key, at) if streams is None else key
        if self._placement.mesh is None:
            count: Any = jnp.int32(len(prompts))
            draws = Draws(
                drawn,
                jnp.float32(temperature),
                None if stream_N is None else jnp.asarray(stream_N),
            )
            prompt, length = jnp.asarray(prompt_NP), jnp.asarray(length_N)
        else:
            place = self._placement
            prompt, length, stream, count = place.rows((prompt_NP, length_N, stream_N, dealt_X))
            drawn, heat = place.whole((drawn, np.float32(temperature)))
            draws = Draws(drawn, heat, stream)
        out, counters = self._rollout(
            params, self._table, self._retriever, prompt, length, draws, count
        )
        out, counters = hosts.fetch((out, counters))
        out = jax.tree.map(lambda x: x[row_N], out)
        return out, of_shards(counters, shards)

    def on(self, device: jax.Device) -> "Sampler":
        """The same sampler with its arrays on a device; it runs where its params are."""
        out = copy.copy(self)
        out._table, out._retriever = jax.device_put((self._table, self._retriever), device)
        out.counters = {}
        return out

    def answers(self, episodes: Trajectories) -> list[str | None]:
        """The answer of each episode, read from its last action alone; None without one. It is a
        question where the protocol ends with one.

        No passage can stand in the last action, so nothing that was retrieved counts as an answer.
        """
        tag = self.protocol.tag(ANSWER) or "answer"
        texts = self.tokenizer.batch_decode(
            [episodes.last_action_ids(n) for n in range(episodes.count)],
            clean_up_tokenization_spaces=False,
        )
        return [
            last_tag(text, tag) if finish == Finish.ANSWERED else None
            for text, finish in zip(texts, episodes.finish_N, strict=True)
        ]

    def texts(self, episodes: Trajectories) -> list[str]:
        """Everything after the prompt of each episode, for people."""
        return self.tokenizer.batch_decode(
            [
                episodes.ids_NL[n, episodes.prompt_length_N[n] : episodes.length_N[n]]
                for n in range(episodes.count)
            ],
            clean_up_tokenization_spaces=False,
        )


def of_shards(counters: Mapping[str, Any], shards: int) -> dict[str, float]:
    """The counters of shards that ran side by side, as of one: the longest tells the steps."""
    each = {name: np.reshape(value, -1).astype(float) for name, value in counters.items()}
    steps = max(each["decode_steps"].max(), 1.0)
    out = {}
    for name, values in each.items():
        if name.startswith("slot_"):
            out[name] = float((values * each["decode_steps"]).sum() / (shards * steps))
        else:
            out[name] = float(values.sum() if name == "prefilled" else values.max())
    return out


def _together(calls: Sequence[dict[str, float]]) -> dict[str, float]:
    """The counters of several calls as of one: counts add up, shares are weighted by steps."""
    steps = sum(call["decode_steps"] for call in calls)
    out = {}
    for name in calls[0] if calls else ():
        if name.startswith("slot_"):
            weighted = sum(call[name] * call["decode_steps"] for call in calls)
            out[name] = weighted / max(steps, 1.0)
        else:
            out[name] = sum(call[name] for call in calls)
    return out
