"""Asks a policy one question and shows its episode: thoughts, queries, passages, the answer.

    python -m zest_jax.ask --model=Qwen/Qwen2.5-3B-Instruct --index=indexes/wiki18 "Who …?"
    python -m zest_jax.ask --model=my-solver --index=http://127.0.0.1:8000 "Who …?"
    python -m zest_jax.ask --workdir=runs/smoke "What is the currency of Germany?"

--index is a folder that build_index made, or a retrieval server's address. Without it the policy of
a --workdir searches the passages of its run, and one of --model answers from memory.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from zest_jax import assembly, cli, export
from zest_jax.errors import UserError
from zest_jax.models import PolicyConfig
from zest_jax.models.backends import choose_attention
from zest_jax.models.hf import load_generation, load_pretrained, read_tokenizer
from zest_jax.models.policy import Params
from zest_jax.players import end_ids, policy_folder
from zest_jax.retrieval import Retriever
from zest_jax.retrieval.interface import Found, Passage, PassageRetriever, TextRetriever
from zest_jax.retrieval.open_index import open_retriever
from zest_jax.retrieval.remote import RemoteSettings
from zest_jax.rollout.host_driver import FoundPassages, HostSampler, SearchFailed, Wrote
from zest_jax.rollout.protocols import SEARCH, Protocol, in_chat_template
from zest_jax.rollout.protocols.qwen_tools import QWEN_TOOLS
from zest_jax.rollout.state import RolloutSpec
from zest_jax.rollout.trajectories import Finish, Trajectories
from zest_jax.tracing import TraceCounter

EVERY = 8  # tokens between two looks at what is being written
PASSAGE_TOKENS = 200  # shown of each passage, where the protocol sets no limit
SHOWN = 160  # characters of a passage in the terminal

WHY = {
    Finish.ANSWERED: "it answered",
    Finish.INVALID: "its last action was none: neither a search nor an answer",
    Finish.OUT_OF_TURNS: "it wanted to search, and may not or not again (--index, --max_searches)",
    Finish.TOO_LONG: "it wrote no action within its length (--max_tokens), or had no room left",
    Finish.NO_ANSWER: "it ended its turn without an answer",
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """Who is asked.

    Attributes:
      name: for people.
      config, params, tokenizer, eos_ids: the policy.
      protocol: how the episode is written, its prompt as the policy is given it.
      sizes: of an episode, where a run has set them.
      world: what answered the searches of its run; None without one.
      retrieved: passages that its run had of a search.
    """

    name: str
    config: PolicyConfig
    params: Params
    tokenizer: Any
    eos_ids: list[int]
    protocol: Protocol
    sizes: RolloutSpec | None = None
    world: PassageRetriever | None = None
    retrieved: int = 3


class WorldRetriever(TextRetriever):
    """The retriever of a run, asked by text."""

    def __init__(self, retriever: Retriever, tokenizer: Any, passages: Sequence[Any]):
        self._retriever, self._tokenizer = retriever, tokenizer
        self._passages = [Passage(p.id, p.title, p.text) for p in passages]

    @property
    def retrieved(self) -> int:
        """Passages of a search, as the run has set them."""
        return self._retriever.retrieved

    def search(self, queries: Sequence[str], top_k: int) -> Found:
        """See `TextRetriever`."""
        # Names stand after a space in a run's episodes.
        asked = self._tokenizer([f" {q}" for q in queries], add_special_tokens=False)["input_ids"]
        length_BU = np.array([[len(ids)] for ids in asked], np.int32)
        ids_BUQ = np.zeros((len(asked), 1, max(1, length_BU.max())), np.int32)
        for n, ids in enumerate(asked):
            ids_BUQ[n, 0, : len(ids)] = ids
        retriever = dataclasses.replace(self._retriever, retrieved=top_k)
        found = retriever.search(jnp.asarray(ids_BUQ), jnp.asarray(length_BU))
        rows, scores = jax.device_get(found)
        return Found(rows[:, 0], scores[:, 0])

    def passages(self, rows: np.ndarray) -> list[list[Passage]]:
        """See `TextRetriever`."""
        return [[self._passages[row] for row in line if row >= 0] for line in rows]


class Transcript:
    """Prints an episode as it is written, and keeps what was found.

    Args:
      tokenizer: the policy's.
      protocol: of the episode.
      say: prints text as it stands, without a line's end.
    """

    def __init__(self, tokenizer: Any, protocol: Protocol, say: Callable[[str], None]):
        self.found: list[FoundPassages] = []
        self._tokenizer, self._protocol, self._say = tokenizer, protocol, say
        self._turn, self._text = -1, ""

    def __call__(self, event: Wrote | FoundPassages) -> None:
        if isinstance(event, FoundPassages):
            self.found.append(event)
            self._say(f"\n{_found(event)}")
            return
        if event.turn != self._turn:
            corrected = event.turn > 0 and all(f.turn != event.turn - 1 for f in self.found)
            if corrected and self._protocol.correction:
                self._say("\n    (no valid action, and the policy was told so)\n")
            self._turn, self._text = event.turn, ""
            self._say(f"\n[{event.turn + 1}] ")
        # The last character may still lack bytes.
        text = _decode(self._tokenizer, event.ids).rstrip("\ufffd")
        self._say(_plain(text[len(self._text) :]))
        self._text = text if len(text) > len(self._text) else self._text


def main(config: Any, workdir: str | None, values: flags.FlagValues) -> None:
    if config is not None:
        raise UserError("a question takes no config; name a --model or a --workdir.")
    # An argument that is no UTF-8 arrives with halves of surrogate pairs.
    question = (values.question or "").encode("utf-8", "replace").decode().strip()
    check(question, workdir, values)
    who = load_run(workdir, values) if workdir else load_model(values)
    retriever = open_index(who, values)
    name = values.index or ("the run's passages" if retriever else "")
    say = _silent if values.json else _say
    say(f"question: {question}\npolicy: {who.name}, protocol {who.protocol.name}\n")
    say(f"index: {name}\n" if name else "no --index is given: the policy answers from memory, and ")
    say("" if name else "a search would end the episode\n")

    ids = _encode(who.tokenizer, who.protocol.prompt.format(question=question))
    spec, top_k = sizes(who, len(ids), retriever is not None, values)
    transcript = Transcript(who.tokenizer, who.protocol, say)
    sampler = HostSampler(
        "ask",
        who.config,
        spec,
        who.protocol,
        who.tokenizer,
        retriever,
        1,
        TraceCounter(),
        who.eos_ids,
        top_k=top_k,
        watch=transcript,
        every=EVERY,
    )
    key = assembly.random_key(values.seed, "ask", 0)
    try:
        episode = sampler(who.params, [ids], key, values.temperature)
    except SearchFailed as error:
        say("\n")
        raise UserError(error.reason) from error
    record = {
        "question": question,
        "answer": sampler.answers(episode)[0],
        "finish": Finish(int(episode.finish_N[0])).name.lower(),
        "policy": who.name,
        "protocol": who.protocol.name,
        "index": name,
        "searches": int(episode.searches_N[0]),
        "tokens": int(episode.mask_NL.sum()),
        "turns": turns(episode, who.tokenizer, transcript.found),
        "seconds": {k[:-2]: round(v, 3) for k, v in sampler.counters.items() if k[-2:] == "_s"},
    }
    if values.json:
        print(json.dumps(record, ensure_ascii=False, indent=2, allow_nan=False))
    else:
        say(_ending(record, Finish(int(episode.finish_N[0]))))


def check(question: str, workdir: str | None, values: flags.FlagValues) -> None:
    """Refuses flags that do not go together, before anything is loaded.

    Raises:
      UserError: which.
    """
    if not question:
        raise UserError('no question is given; write it last, in quotes: "Who wrote Emma?".')
    if bool(values.model) == bool(workdir):
        raise UserError("say who is asked: either --model=FOLDER_OR_HUB_ID or --workdir=RUN.")
    if values.step is not None and not workdir:
        raise UserError("--step names a checkpoint of a run; say which run: --workdir=RUN.")
    least = {"top_k": 1, "max_searches": 0, "max_tokens": 1, "temperature": 0}
    for name, limit in least.items():
        value: float | None = values[name].value
        if value is not None and not limit <= value < math.inf:
            raise UserError(f"--{name}={value} is out of range; it is {limit} or more.")


def load_model(values: flags.FlagValues) -> Asked:
    """A policy from a folder or the hub, with the protocol that fits it."""
    folder = policy_folder(values.model)
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    config, params = load_pretrained(folder, dtype=dtype, param_dtype=dtype)
    tokenizer = read_tokenizer(folder, config.vocab_size)
    template = str(getattr(tokenizer, "chat_template", None) or "")
    turned = "tools" in template and set(QWEN_TOOLS.special) <= set(tokenizer.get_vocab())
    name = values.protocol or (QWEN_TOOLS.name if turned else "search_r1")
    protocol = _fill(assembly.protocol(name), tokenizer, values.chat)
    ends = end_ids(load_generation(folder))
    config, _ = choose_attention(config)
    return Asked(values.model, config, params, tokenizer, ends, protocol)


def load_run(workdir: str, values: flags.FlagValues) -> Asked:
    """The solver of a run, with its protocol and sizes unless another protocol is named."""
    parts, params, step = export.load_role(workdir, "solver", values.step)
    sampler = parts.solver_sampler
    protocol, spec = sampler.protocol, sampler.spec
    if values.protocol:
        protocol = _fill(assembly.protocol(values.protocol), parts.solver.tokenizer, values.chat)
    elif values.chat is not None:
        raise UserError("a run's policy is asked as it was trained; leave --chat out.")
    retriever = parts.retrieval.by_text
    if retriever is None:
        own = parts.retrieval.on_device["solver"]
        retriever = WorldRetriever(own, parts.solver.tokenizer, parts.world.passages)
    return Asked(
        f"{workdir}, step {step}",
        parts.solver.policy,
        params,
        parts.solver.tokenizer,
        parts.solver.end_ids,
        protocol,
        None if values.protocol else spec,
        retriever,
        parts.retrieval.top_k,
    )


def _fill(protocol: Protocol, tokenizer: Any, chat: bool | None) -> Protocol:
    if set(protocol.placeholders) != {"question"}:
        more = ", ".join(sorted(set(protocol.placeholders) - {"question"}))
        raise UserError(f"protocol {protocol.name} asks for {more}, and there is a question only.")
    turned = bool(protocol.special)
    if chat is False and turned:
        raise UserError(
            f"protocol {protocol.name} is written in a chat's turns; leave out --nochat."
        )
    return in_chat_template(protocol, tokenizer) if chat or turned else protocol


def open_index(who: Asked, values: flags.FlagValues) -> PassageRetriever | None:
    """What answers the searches; None where there is nothing to search."""
    if who.protocol.tag(SEARCH) is None:
        if values.index:
            raise UserError(f"protocol {who.protocol.name} never searches; leave --index out.")
        return None
    if values.index.startswith(("http://", "https://")):
        # Somebody waits: rather a clear word soon than a long silence.
        return open_retriever(values.index, settings=RemoteSettings(read_s=60, retries=2))
    if values.index:
        return open_retriever(values.index, encoder=values.encoder)
    return who.world


def sizes(
    who: Asked, prompt: int, searching: bool, values: flags.FlagValues
) -> tuple[RolloutSpec, int]:
    """Sizes of the episode, and passages of a search.

    Raises:
      UserError: more than the protocol allows, or a prompt that fills the policy's context.
    """
    protocol, run = who.protocol, who.sizes
    limits, U = protocol.limits, protocol.most_queries
    longest = run.action_length if run else limits.action or 512
    searches = run.searches if run else protocol.most_searches or 4
    most = {"max_tokens": limits.action, "max_searches": protocol.most_searches}
    for name, limit in most.items():
        value: int | None = values[name].value
        if limit and value is not None and value > limit:
            raise UserError(
                f"--{name}={value} is more than the {limit} of protocol {protocol.name}; lower it."
            )
    action = values.max_tokens if values.max_tokens is not None else longest
    searches = values.max_searches if values.max_searches is not None else searches
    top_k = values.top_k or who.retrieved
    frame = protocol.layout.frame(
        lambda texts: [_encode(who.tokenizer, t) for t in texts], U, top_k
    )
    observation = frame.length + PASSAGE_TOKENS * U * top_k
    observation = min(observation, limits.observation or observation)
    if run and who.world and top_k == who.retrieved:
        observation = run.observation_length
    if not searching:
        searches, observation = 0, 0
    room = who.config.max_length - prompt
    if room < 1:
        raise UserError(
            f"the question has {prompt} tokens with its prompt, more than the "
            f"{who.config.max_length} of the policy's context; shorten it."
        )
    correction = len(_encode(who.tokenizer, protocol.correction or ""))
    spec = RolloutSpec(
        slots=1,
        prompt_length=prompt,
        action_length=action,
        observation_length=max(observation, correction),
        searches=searches,
        query_length=64,
        queries=U,
        response_length=min(limits.response or room, room),
    )
    return spec, top_k


def turns(
    episode: Trajectories, tokenizer: Any, found: Sequence[FoundPassages]
) -> list[dict[str, Any]]:
    """What the policy wrote in each turn and what its searches found, as JSON."""
    out = []
    written = np.asarray(episode.turn_NL[0])[np.asarray(episode.mask_NL[0])]
    for turn in np.unique(written).tolist():
        searches = [
            {
                "query": query,
                "passages": [
                    dataclasses.asdict(p) | {"score": score if math.isfinite(score) else None}
                    for p, score in result
                ],
            }
            for event in found
            if event.turn == turn
            for query, result in zip(event.queries, event.results, strict=True)
        ]
        ids = episode.sampled_ids(0, turn)
        out.append({"text": _decode(tokenizer, ids), "searches": searches})
    return out


def _found(event: FoundPassages) -> str:
    lines = [] if event.queries else ["    search: nothing that can be asked\n"]
    for query, result in zip(event.queries, event.results, strict=True):
        lines.append(f"    search: {_line(query)}\n")
        lines += ["      nothing was found\n"] if not result else []
        for rank, (passage, score) in enumerate(result, 1):
            told = f" ({score:.2f})" if math.isfinite(score) else ""
            title = _line(passage.title) or "no title"
            lines.append(f"      {rank}. {title}{told}: {_line(passage.text, SHOWN)}\n")
    return "".join(lines)


def _ending(record: dict[str, Any], finish: Finish) -> str:
    answer = record["answer"]
    counts = {"turn": len(record["turns"]), "search": record["searches"], "token": record["tokens"]}
    plural = {"search": "searches"}
    told = [f"{n} {w if n == 1 else plural.get(w, w + 's')}" for w, n in counts.items()]
    spent = ", ".join(f"{name} {value:.1f}" for name, value in record["seconds"].items())
    return (
        f"\n\nanswer: {'none' if answer is None else _line(answer)}\n"
        f"ended: {WHY[finish]}; {', '.join(told)}\n"
        f"seconds, with compilation: {spent}\n"
    )


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def _plain(text: str) -> str:
    # What a policy writes must not steer the terminal.
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def _line(text: str, most: int = 400) -> str:
    text = _plain(" ".join(text.split()))
    return text[:most] + " …" if len(text) > most else text


def _say(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _silent(text: str) -> None:
    del text


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("question", "", "what is asked; may stand without the name", values)
    flags.DEFINE_string("model", "", "a policy: a Hugging Face folder or hub id", values)
    flags.DEFINE_integer("step", None, "of the run; its newest if not given", flag_values=values)
    flags.DEFINE_string("index", "", "folder of an index, or http://… of a server", values)
    flags.DEFINE_string("encoder", "", "the index's encoder, where it has moved", values)
    flags.DEFINE_string(
        "protocol",
        "",
        "how the episode is written; if not given, qwen_tools where the chat template knows tools, "
        "else search_r1; for a run its own",
        values,
    )
    flags.DEFINE_boolean("chat", None, "put the prompt in the chat template", values)
    flags.DEFINE_float("temperature", 0.0, "of sampling; 0 is greedy", flag_values=values)
    flags.DEFINE_integer("top_k", None, "passages of a search; 3, or the run's", flag_values=values)
    flags.DEFINE_integer("max_searches", None, "searches that are answered", flag_values=values)
    flags.DEFINE_integer("max_tokens", None, "tokens of one turn", flag_values=values)
    flags.DEFINE_integer("seed", 0, "of sampling", flag_values=values)
    flags.DEFINE_boolean("json", False, "print the record as JSON, when it is done", values)


entry = cli.program(
    main,
    define=define,
    needs_config=False,
    needs_workdir=False,
    memory_hint="take fewer --max_tokens, or a smaller policy",
    arguments=("question",),
)

if __name__ == "__main__":
    sys.exit(entry())
