"""A reader: answers questions from given passages, without searching.

The prompt is the one whose likelihood is scored elsewhere: the question as the solver gets it, the
passages as the solver sees them, an opened answer tag. So what it measures is what the likelihood
measures, by sampling.
"""

from collections.abc import Callable, Sequence

import jax

from zest_jax.models.policy import Params
from zest_jax.rollout.protocols import ANSWER, Protocol
from zest_jax.rollout.sampler import Sampler
from zest_jax.tasks.types import Passage

Encode = Callable[[Sequence[str]], list[list[int]]]

# The tag is opened by the prompt, so that the policy closes what it never opened: such an episode
# ends there, and its text up to the closing tag is the answer.
READER = Protocol(name="reader", prompt="{context}", actions=(("answer", ANSWER),))


class Reader:
    """Reads with one compiled program.

    Args:
      sampler: of the protocol `READER`.
      protocol: the solver's, whose prompt and passages are shown.
      encode: texts -> token ids.
    """

    def __init__(self, sampler: Sampler, protocol: Protocol, encode: Encode):
        self.sampler, self.protocol, self.encode = sampler, protocol, encode

    def __call__(
        self,
        params: Params,
        key: jax.Array,
        questions: Sequence[str],
        passages: Sequence[Sequence[Passage]],
    ) -> list[str | None]:
        """The greedy answer to each question from its passages; None where the policy gives none.

        Passages that do not fit the prompt are left out, the last ones first.
        """
        if not questions:
            return []
        prompts = self._prompts(questions, passages)
        episodes = self.sampler(params, prompts, key, 0.0)
        texts = self.sampler.tokenizer.batch_decode(
            [episodes.last_action_ids(n) for n in range(episodes.count)],
            clean_up_tokenization_spaces=False,
        )
        out: list[str | None] = []
        for text in texts:
            answer, closed, _ = text.partition("</answer>")
            out.append(answer.strip() if closed and answer.strip() else None)
        return out

    def _prompts(
        self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]
    ) -> list[list[int]]:
        longest = self.sampler.spec.prompt_length
        count = [len(shown) for shown in passages]
        while True:
            texts = []
            for question, shown, n in zip(questions, passages, count, strict=True):
                seen = self.protocol.show([(p.title, p.text) for p in shown[:n]]) if n else ""
                texts.append(f"{self.protocol.prompt.format(question=question)}{seen}<answer>")
            prompts = self.encode(texts)
            over = [i for i, ids in enumerate(prompts) if len(ids) > longest and count[i]]
            if not over:
                return [ids[-longest:] for ids in prompts]
            for i in over:
                count[i] -= 1
