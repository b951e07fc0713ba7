"""How an episode is written down: tags, calls, observations, corrections and limits, as data.

A protocol says which tag pairs are actions and what each does, how queries are cut out of an
action, how what they found is shown, and what follows an action that is none. The compiled rollout
reads it while it is traced; the methods here do the same to text on the host.
"""

import dataclasses
import json
import re
import string
from collections.abc import Iterator, Sequence
from typing import Any

from zest_jax.errors import UserError
from zest_jax.retrieval.layout import Layout, Results

SEARCH, ANSWER = "search", "answer"


@dataclasses.dataclass(frozen=True)
class Call:
    """How queries stand in a JSON object, where an action's content is one.

    Attributes:
      tool: what the object's `name` must be.
      argument: the name of the object that holds the queries.
      keys: the names of the queries in it: exactly one of them must be there, and holds one string
        or a list of strings. Other names may stand beside it.
      strict: whether a call that is broken, names another tool or holds no query is an action that
        is none. If not, it is a search that finds nothing: an empty observation follows.
    """

    tool: str = "search"
    argument: str = "arguments"
    keys: tuple[str, ...] = ("query", "query_list")
    strict: bool = True


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a method fixes about lengths; 0 where it leaves it to the config.

    Attributes:
      turns: actions that are followed by something: searches and corrections together.
      action: tokens of one action.
      observation: tokens of one observation.
      response: tokens after the prompt, observations included.
    """

    turns: int = 0
    action: int = 0
    observation: int = 0
    response: int = 0


@dataclasses.dataclass(frozen=True)
class Protocol:
    """One way to write an episode.

    Attributes:
      name: as configs call it.
      prompt: what the policy is given; `{question}` stands for the question, other names for the
        parts of a proposer's task.
      actions: tag name and effect of each action; the first complete pair decides. SEARCH asks the
        retriever, ANSWER ends the episode.
      call: how queries stand in the content of a search; None where the content is the query.
      most_queries: most queries of one action, U; those beyond are not asked.
      observation, result, passage, between_results, between_passages, escape: see `Layout`.
      correction: what is said after an action that is none, and a turn goes by. "" says nothing
        and lets the policy go on; None ends the episode instead.
      final_action: whether one more action may follow the last turn (in which a search is no longer
        answered). If not, the last of `limits.turns` actions is that one.
      thought: tags of which every action begins with exactly one block, neither empty nor followed
        by anything but the action; () where the method does not ask for it. `well_formed` checks
        it; a rollout does not end over it.
      special: special tokens that stand in the texts above; each must be one id of the tokenizer.
      tools: the tools as JSON for a chat template; "" for none.
      limits: what the method fixes.
    """

    name: str
    prompt: str
    actions: tuple[tuple[str, str], ...]
    observation: str = "<information>{passages}</information>"
    passage: str = " {title}: {text}"
    correction: str | None = None
    call: Call | None = None
    most_queries: int = 1
    result: str = "{passages}"
    between_results: str = ""
    between_passages: str = ""
    escape: bool = False
    final_action: bool = True
    thought: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    tools: str = ""
    limits: Limits = Limits()

    def __post_init__(self):
        for problem in self._problems():
            raise ValueError(f"protocol {self.name}: {problem}")
        if self.most_queries < 1 or (self.most_queries > 1 and self.call is None):
            raise ValueError(
                f"protocol {self.name}: an action has one query, or several in a JSON call"
            )

    def _problems(self) -> Iterator[str]:
        """What no rollout could work with, in words."""
        tags, effects = [tag for tag, _ in self.actions], [effect for _, effect in self.actions]
        if not self.actions or effects.count(ANSWER) != 1:
            yield "exactly one action ends the episode (ANSWER)"
        if effects.count(SEARCH) > 1:
            yield "one action at the most searches: a rollout asks one retriever"
        if unknown := set(effects) - {SEARCH, ANSWER}:
            yield f"an action searches or answers; {sorted(unknown)} is neither"
        if len(set(tags)) < len(tags):
            yield "two actions have the same tag"
        for tag in (*tags, *self.thought):
            if not re.fullmatch(r"[A-Za-z_][\w-]*", tag):
                yield f"{tag!r} is no name of a tag"
        allowed = {
            "observation": {"passages"},
            "result": {"passages"},
            "passage": {"title", "text", "rank"},
        }
        for part in ("prompt", *allowed):
            try:
                names = [name for _, name, _, _ in string.Formatter().parse(getattr(self, part))]
            except ValueError as error:
                yield f"its {part} has a brace that opens no name ({error}); write {{{{ or }}}}"
                continue
            for name in names:
                if name is not None and not re.fullmatch(r"[A-Za-z_]\w*", name):
                    yield f"its {part} has {{{name}}}, which is no name; write {{{{ for a brace"
                if name and part in allowed and name not in allowed[part]:
                    some = ", ".join(sorted(allowed[part]))
                    yield f"its {part} has {{{name}}}; there is only {some}"

    @property
    def opening(self) -> list[bytes]:
        return [f"<{tag}>".encode() for tag, _ in self.actions]

    @property
    def closing(self) -> list[bytes]:
        return [f"</{tag}>".encode() for tag, _ in self.actions]

    @property
    def layout(self) -> Layout:
        return Layout(
            passage=self.passage,
            between_passages=self.between_passages,
            result=self.result,
            between_results=self.between_results,
            observation=self.observation,
            escape=self.escape,
        )

    @property
    def placeholders(self) -> list[str]:
        """What the prompt is filled with."""
        return [name for _, name, _, _ in string.Formatter().parse(self.prompt) if name]

    @property
    def most_searches(self) -> int:
        """Searches that can be answered where the method fixes the turns; 0 where it does not."""
        turns = self.limits.turns
        return turns if self.final_action or not turns else turns - 1

    def tag(self, effect: str) -> str | None:
        """Name of the tag with this effect."""
        return next((tag for tag, e in self.actions if e == effect), None)

    def kind(self, effect: str) -> int:
        """Number (from 1) of the action with this effect, 0 if the protocol has none."""
        return next((i + 1 for i, (_, e) in enumerate(self.actions) if e == effect), 0)

    # ---------------------------------------------------------------------- text, on the host

    def show(self, passages: Sequence[tuple[str, str]]) -> str:
        """The text of an observation that shows these (title, text) passages of one query."""
        return self.layout.show([passages])

    def show_results(self, results: Results) -> str:
        """The text of an observation that shows the passages of each query of an action."""
        return self.layout.show(results)

    def action(self, text: str) -> tuple[str, str] | None:
        """Effect and content of the action that a turn's text completes first; None for none."""
        tags = "|".join(re.escape(tag) for tag, _ in self.actions)
        close = re.search(f"</({tags})>", text)
        if close is None:
            return None
        opened = text.find(f"<{close[1]}>", 0, close.start())
        if opened < 0:
            return None
        begin = opened + len(close[1]) + 2
        return dict(self.actions)[close[1]], text[begin : close.start()]

    def queries(self, text: str) -> list[str] | None:
        """The queries of a turn's text, as a retriever gets them.

        Args:
          text: what the policy wrote in the turn. Bytes that are no text may stand as any
            character that is no letter of a tag; a special token as "\\0", which no call may hold.

        Returns:
          At most U queries, in order: the content without outer white space, or the strings of the
          call with their escapes undone. None where the turn is no search, or a call that counts
          as an action that is none; [] for a bad call that is answered with nothing.
        """
        action = self.action(text)
        if action is None or action[0] != SEARCH:
            return None
        if self.call is None:
            return [action[1].strip()]
        spelled = strings_of_call(action[1], self.call)
        if spelled is None:
            return None if self.call.strict else []
        return [_unescape(each) for each in spelled[: self.most_queries]]

    def well_formed(self, text: str) -> bool:
        """Whether a turn's text is one thought, where the method asks for one, and one action.

        White space may stand around the two. End-of-turn tokens do not belong to the text.
        """
        action = self.action(text)
        if action is None or (action[0] == SEARCH and not self.queries(text)):
            return False
        if not self.thought:
            return True
        kinds = "|".join(map(re.escape, self.thought))
        tags = "|".join(re.escape(tag) for tag, _ in self.actions)
        shape = rf"\s*<({kinds})>(.*?)</\1>\s*<({tags})>(.*?)</\3>\s*"
        found = re.fullmatch(shape, text, re.DOTALL)
        if found is None or not found[2].strip():
            return False
        # Neither part may hold a tag of its own, or there would be several.
        inner = rf"</?({kinds}|{tags})>"
        return not any(re.search(inner, part) for part in (found[2], found[4]))


class _Pairs(list):
    """A JSON object as its pairs, so that a name that stands twice is seen."""


def strings_of_call(content: str, call: Call) -> list[str] | None:
    """The queries in a call's JSON, spelled as they stand there; None where it is no such call.

    A name (or the tool) that is spelled with escapes is another name.
    """
    # Doubling every backslash keeps the spelling through the parser; the JSON itself is checked
    # first, as it stands. Whole numbers are read as any other: Python refuses very long ones.
    kept = re.sub(r"\\(.)", lambda m: "\\\\" + _DOUBLED.get(m[1], m[1]), content, flags=re.DOTALL)
    try:
        json.loads(content, parse_constant=_refuse, parse_int=float)
        pairs = json.loads(kept, parse_constant=_refuse, parse_int=float, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError):
        return None
    (tool, *more), arguments = _values(pairs, "name") or [None], _values(pairs, call.argument)
    if more or tool != call.tool or len(arguments) != 1:
        return None
    values = [value for key in call.keys for value in _values(arguments[0], key)]
    if len(values) != 1:
        return None
    strings = [values[0]] if isinstance(values[0], str) else values[0]
    if not isinstance(strings, list) or isinstance(strings, _Pairs) or not strings:
        return None
    return strings if all(isinstance(each, str) for each in strings) else None


_DOUBLED = {"\\": "\\\\", '"': '\\"'}


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _values(pairs: Any, name: str) -> list[Any]:
    return [v for key, v in pairs if key == name] if isinstance(pairs, _Pairs) else []


def _unescape(spelled: str) -> str:
    # Half a surrogate pair is a legal escape and no text.
    return json.loads(f'"{spelled}"').encode("utf-8", "replace").decode()


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
    marks = {name: f"«{name}»" for name in protocol.placeholders}
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": protocol.prompt.format(**marks)})
    more = {"tools": json.loads(protocol.tools)} if protocol.tools else {}
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **more
        )
    except Exception as error:  # whatever the template raises, a system turn it does not know say
        raise UserError(
            f"the policy's chat template cannot write this conversation ({error}); "
            "set policy.chat=False, or leave policy.system empty."
        ) from error
    text = text.replace("{", "{{").replace("}", "}}")
    for name, mark in marks.items():
        text = text.replace(mark, f"{{{name}}}")
    return dataclasses.replace(protocol, prompt=text)
