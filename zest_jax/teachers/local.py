"""A policy in this process as a teacher: frozen, and answering greedily.

Shape letters: N conversations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from zest_jax.errors import UserError
from zest_jax.models import PolicyConfig
from zest_jax.models.backends import choose_attention
from zest_jax.models.hf import load_generation, load_pretrained, read_tokenizer
from zest_jax.models.lora import fingerprint
from zest_jax.models.policy import Params
from zest_jax.rollout.protocols import ANSWER, Protocol
from zest_jax.rollout.sampler import Sampler
from zest_jax.rollout.state import RolloutSpec
from zest_jax.rollout.trajectories import Finish
from zest_jax.teachers.interface import Conversation, Failure, Reply, Teacher, failed
from zest_jax.tracing import TraceCounter

# An answer is over at its first </answer>, whether the policy or the prompt opened the block.
JUDGE = Protocol(name="judge", prompt="{text}", actions=(("answer", ANSWER),))

_SHORTEST = 256  # prompts are compiled for this many tokens, four times as many, and so on


class LocalTeacher(Teacher):
    """Asks a policy of this process, many conversations at a time.

    A reply ends behind its first </answer>, at the end of the policy's turn, or after `max_tokens`
    (its `finish` is then "length"). A conversation that does not fit the policy's context has no
    answer; nothing is cut from it.

    Args:
      config, params, tokenizer: the policy. Parameters may be replaced by assigning to `params`;
        the teacher is then another one, and its card says so.
      eos_ids: tokens that end a turn beside the tokenizer's own.
      name: for provenance.
      chat: write conversations by the tokenizer's chat template; without, their texts are given to
        the policy as they stand, one after the other with an empty line between them.
      max_tokens: of a reply. It may be set anew before the first question.
      slots: conversations under way at once.

    Raises:
      UserError: `chat`, and the tokenizer has no template.
    """

    def __init__(
        self,
        config: PolicyConfig,
        params: Params,
        tokenizer: Any,
        eos_ids: Sequence[int] = (),
        *,
        name: str = "",
        chat: bool = False,
        max_tokens: int = 512,
        slots: int = 16,
    ) -> None:
        super().__init__()
        if chat and not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"the tokenizer of {name or 'the policy'} has no chat template, so it cannot be "
                "asked as a chat."
            )
        self.params, self.tokenizer = params, tokenizer
        self._config, _ = choose_attention(config)
        self._ends, self._name, self.chat = list(eos_ids), name, chat
        self.max_tokens, self._slots = max_tokens, slots
        if config.max_length <= max_tokens:
            raise UserError(
                f"a reply of {max_tokens} tokens leaves no room for a question in a context of "
                f"{config.max_length}; take fewer."
            )
        self._samplers: dict[int, Sampler] = {}
        self._traces = TraceCounter()

    @property
    def card(self) -> dict[str, Any]:
        return {
            "kind": "local",
            "name": self._name,
            "fingerprint": fingerprint(self.params),
            "chat": self.chat,
            "max_tokens": self.max_tokens,
        }

    @property
    def room(self) -> int:
        """Tokens that a conversation may have."""
        return self._config.max_length - self.max_tokens

    def text(self, conversation: Conversation) -> str:
        """A conversation as the policy is given it.

        Raises:
          UserError: the chat template refuses it.
        """
        if not self.chat:
            return "\n\n".join(message.content for message in conversation)
        try:
            return self.tokenizer.apply_chat_template(
                [message._asdict() for message in conversation],
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # whatever a template raises, a system turn it does not know say
            raise UserError(
                f"the chat template of {self._name} cannot write this conversation ({error})."
            ) from error

    def _answer(self, conversations: Sequence[Conversation]) -> list[Reply]:
        # What a policy wrote may hold half of a surrogate pair, which no tokenizer takes.
        texts = [self.text(c).encode("utf-8", "replace").decode() for c in conversations]
        encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        out = [
            failed(Failure.TOO_LONG, f"it has {len(ids)} tokens, and {self.room} have room")
            if len(ids) > self.room
            else None
            for ids in encoded
        ]
        # Those of about the same length go together: few shapes to compile, and little padding.
        fitting = [n for n, reply in enumerate(out) if reply is None]
        for length in sorted({self._length(encoded[n]) for n in fitting}):
            chosen = [n for n in fitting if self._length(encoded[n]) == length]
            replies = self._sample(length, [encoded[n] for n in chosen])
            for n, reply in zip(chosen, replies, strict=True):
                out[n] = reply
        return [reply for reply in out if reply is not None]

    def _sample(self, length: int, prompts: Sequence[Sequence[int]]) -> list[Reply]:
        sampler = self._sampler(length)
        # Greedy: the key decides nothing.
        episodes = sampler(self.params, prompts, jax.random.key(0), 0.0)
        ids = [episodes.sampled_ids(n) for n in range(episodes.count)]
        texts = self.tokenizer.batch_decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        with self._lock:
            self.counts.tokens_in += sum(map(len, prompts))
            self.counts.tokens_out += sum(map(len, ids))
        return [
            Reply(
                text,
                finish="length" if finish == Finish.TOO_LONG else "stop",
                tokens_in=len(prompt),
                tokens_out=len(own),
            )
            if text.strip()
            else failed(Failure.EMPTY, "the policy wrote nothing")
            for text, own, prompt, finish in zip(
                texts, ids, prompts, np.asarray(episodes.finish_N).tolist(), strict=True
            )
        ]

    def _length(self, ids: Sequence[int]) -> int:
        """The prompt length that a conversation is compiled for."""
        length = _SHORTEST
        while length < len(ids):
            length *= 4
        return min(length, self.room)

    def _sampler(self, length: int) -> Sampler:
        if length not in self._samplers:
            spec = RolloutSpec(self._slots, length, self.max_tokens)
            self._samplers[length] = Sampler(
                f"teacher_{length}",
                self._config,
                spec,
                JUDGE,
                self.tokenizer,
                None,
                self._slots,
                self._traces,
                self._ends,
            )
        return self._samplers[length]


def load_local(folder: str, *, chat: bool | None = None, **options: Any) -> LocalTeacher:
    """A teacher from a Hugging Face folder or hub id.

    Args:
      folder: of the policy.
      chat: see `LocalTeacher`; None uses a chat template where there is one.
      options: of `LocalTeacher`.

    Raises:
      UserError: no such policy, or one that cannot be read.
    """
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    config, params = load_pretrained(folder, dtype=dtype, param_dtype=dtype)
    tokenizer = read_tokenizer(folder, config.vocab_size)
    if chat is None:
        chat = bool(getattr(tokenizer, "chat_template", None))
    ends = load_generation(folder).get("eos_token_id")
    eos_ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    options.setdefault("name", folder)
    return LocalTeacher(config, params, tokenizer, eos_ids, chat=chat, **options)
