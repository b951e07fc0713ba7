"""How an episode is written down: tags, observations, corrections and limits, as data.

A protocol says which tag pairs are actions and what each does, how passages are shown, and what
follows an action that is none. Adding one is adding a constant here.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from zest_jax.errors import UserError

SEARCH, ANSWER = "search", "answer"


@dataclasses.dataclass(frozen=True)
class Protocol:
    """One way to write an episode.

    Attributes:
      name: as configs call it.
      prompt: what the policy is given; `{question}` stands for the question (or the task's text).
      actions: tag name and effect of each action; the first complete pair decides. SEARCH asks the
        retriever, ANSWER ends the episode.
      observation: text around the passages of a search, `{passages}` standing for them.
      passage: one passage, from `{title}` and `{text}`; `{rank}` counts from 1.
      correction: what is said after an action that is none; None ends the episode instead.
    """

    name: str
    prompt: str
    actions: tuple[tuple[str, str], ...]
    observation: str = "<information>{passages}</information>"
    passage: str = " {title}: {text}"
    correction: str | None = None

    @property
    def opening(self) -> list[bytes]:
        return [f"<{tag}>".encode() for tag, _ in self.actions]

    @property
    def closing(self) -> list[bytes]:
        return [f"</{tag}>".encode() for tag, _ in self.actions]

    def show(self, passages: Sequence[tuple[str, str]]) -> str:
        """The text of an observation that shows these (title, text) passages."""
        shown = [
            self.passage.format(rank=rank, title=title, text=text)
            for rank, (title, text) in enumerate(passages, start=1)
        ]
        return self.observation.format(passages="".join(shown))

    def kind(self, effect: str) -> int:
        """Number (from 1) of the action with this effect, 0 if the protocol has none."""
        return next((i + 1 for i, (_, e) in enumerate(self.actions) if e == effect), 0)


# Search-R1 (arXiv 2503.09516): one user turn.
SEARCH_R1 = Protocol(
    name="search_r1",
    prompt=(
        "Answer the question below. Whenever you get new information, first reason about it "
        "between <think> and </think>. If you lack a fact, look it up with <search> query "
        "</search>; what is found comes back between <information> and </information>, and you may "
        "search as often as you need. Once nothing is missing, give the answer itself, without "
        "explanation, between <answer> and </answer>, for example <answer> Beijing </answer>. "
        "Question: {question}\n"
    ),
    actions=(("search", SEARCH), ("answer", ANSWER)),
    observation="\n\n<information>{passages}</information>\n\n",
    passage="Doc {rank}(Title: {title}) {text}\n",
    correction=(
        "\nThat was not a valid action. To look something up, put the query between <search> and "
        "</search>; to answer, put the answer between <answer> and </answer>. Try again.\n"
    ),
)

# The same episode without the instructions, for a small policy that was warm-started on it. Names
# stand after a space everywhere, so that a byte-level tokenizer writes them with the same ids.
PLAIN_SEARCH = Protocol(
    name="plain_search",
    prompt="Q: {question}\n",
    actions=(("search", SEARCH), ("answer", ANSWER)),
)

# A proposer that is given its evidence writes one reply: <think>, <question>, <answer>.
PLAIN_PROPOSER = Protocol(
    name="plain_proposer",
    prompt="Write a question.\nChain: {chain}\n{passages}",
    actions=(("answer", ANSWER),),
)

PROTOCOLS = {p.name: p for p in (SEARCH_R1, PLAIN_SEARCH, PLAIN_PROPOSER)}


def in_chat_template(protocol: Protocol, tokenizer: Any, system: str = "") -> Protocol:
    """The protocol for an instruct model: its prompt as a user's turn of the tokenizer's chat
    template, up to where the assistant's turn begins.

    Args:
      protocol: its prompt keeps its placeholders.
      tokenizer: a transformers tokenizer with a chat template.
      system: a system message; "" leaves it to the template, some of which have one of their own.

    Raises:
      UserError: the tokenizer has no chat template, or it fails.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "the policy's tokenizer has no chat template, so it is a base model's; "
            "set policy.chat=False."
        )
    # A template may write braces of its own (tool schemas do), which `format` must not touch.
    names = re.findall(r"{(\w+)}", protocol.prompt)
    marks = {name: f"«{name}»" for name in names}
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": protocol.prompt.format(**marks)})
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # whatever the template raises, a system turn it does not know say
        raise UserError(
            f"the policy's chat template cannot write this conversation ({error}); "
            "set policy.chat=False, or leave policy.system empty."
        ) from error
    text = text.replace("{", "{{").replace("}", "}}")
    for name, mark in marks.items():
        text = text.replace(mark, f"{{{name}}}")
    return dataclasses.replace(protocol, prompt=text)
