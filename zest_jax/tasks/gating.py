"""Gates by name: what a config lists under `proposer.gates`, in order, and how they are applied.

A gate sees all proposals that passed the gates before it, since some ask a model, which answers
many questions at once. Most look at one proposal alone: `each` makes a gate of such a function.

A gate that cannot decide refuses; the one exception is a named switch of a published system
(`gates.rag_fail_open`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zest_jax.registry import Registry
from zest_jax.tasks import gates
from zest_jax.tasks.gates import PASS, Verdict
from zest_jax.tasks.names import named
from zest_jax.tasks.seeds import Proposal, Written
from zest_jax.tasks.types import Passage
from zest_jax.text import exact_match, normalize_answer

Read = Callable[[Sequence[str], Sequence[Sequence[Passage]]], list[str | None]]


@dataclasses.dataclass(frozen=True)
class Judged:
    """A proposal with its format score, before the gates.

    Attributes: see `Proposal`.
    """

    written: Written
    format: float
    format_parts: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Means:
    """What gates may use beside the proposals.

    Attributes:
      options: the config's group `gates`.
      read: answers questions from given passages, without searching, greedily: one answer a
        question, None where none was given. None where no model is at hand.
      rng: the only source of chance.
      others: passages of other proposals of the batch, for gates that add noise.
    """

    options: Any
    read: Read | None = None
    rng: np.random.Generator | None = None
    others: tuple[Passage, ...] = ()


Gate = Callable[[Sequence[Judged], Means], list[Verdict]]

GATES: Registry[Gate] = Registry("gate", "proposer.gates")


def each(function: Callable[[Judged, Any], Verdict]) -> Gate:
    """A gate of a function that looks at one proposal and the options."""

    def gate(judged: Sequence[Judged], means: Means) -> list[Verdict]:
        return [function(one, means.options) for one in judged]

    return gate


def asks_reader(gate: Gate) -> Gate:
    """Marks a gate that needs `Means.read`: a run that has one compiles a reader for it."""
    gate.asks_reader = True  # type: ignore[attr-defined]
    return gate


def apply_gates(judged: Sequence[Judged], names: Sequence[str], means: Means) -> list[Proposal]:
    """Puts proposals through the named gates; a proposal's reason is that of the first refusal.

    Without a question and an answer there is nothing to ask, whatever the gates are.

    Raises:
      UserError: there is no gate of a name.
    """
    found = [GATES.find(name) for name in names]
    reasons = [_unreadable(one.written) for one in judged]
    for gate in found:
        left = [i for i, reason in enumerate(reasons) if not reason]
        if not left:
            break
        verdicts = gate([judged[i] for i in left], means)
        for i, verdict in zip(left, verdicts, strict=True):
            reasons[i] = "" if verdict else verdict.reason
    return [
        Proposal(j.written, j.format, j.format_parts, reason)
        for j, reason in zip(judged, reasons, strict=True)
    ]


def _unreadable(written: Written) -> str:
    if written.question and written.answers:
        return ""
    return written.parsed.problem or "no pair"


# ── Gates that look at one proposal ────────────────────────────────────────────────────────────


@GATES.register("pair")
@each
def pair(one: Judged, options: Any) -> Verdict:
    """The question (and the answer, where the proposer has to give one) can be read."""
    problem = one.written.parsed.problem
    return Verdict(False, problem) if problem else PASS


@GATES.register("leakage")
@each
def leakage(one: Judged, options: Any) -> Verdict:
    """No name of the answer, nor the answer as the proposer writes it, stands in the question."""
    claimed = one.written.parsed.answer
    names = (*one.written.answers, *(() if claimed is None else (claimed,)))
    return gates.hides_answer(one.written.question or "", names)


@GATES.register("target")
@each
def target(one: Judged, options: Any) -> Verdict:
    """The proposer's answer is the one that it was to ask for."""
    right = exact_match(one.written.parsed.answer, one.written.seed.answers)
    return PASS if right else Verdict(False, "answer is not the target")


@GATES.register("think")
@each
def think(one: Judged, options: Any) -> Verdict:
    """There is a thought before the question."""
    thought = one.written.parsed.think
    return PASS if thought and thought.strip() else Verdict(False, "no reasoning")


@GATES.register("length")
@each
def length(one: Judged, options: Any) -> Verdict:
    """The question is neither a stub nor an essay."""
    return gates.question_length(
        one.written.question or "",
        min_words=options.min_words,
        max_words=options.max_words,
        min_characters=options.min_characters,
        max_characters=options.max_characters,
    )


@GATES.register("answer_length")
@each
def answer_length(one: Judged, options: Any) -> Verdict:
    """The answer is a name, not a paragraph."""
    return gates.answer_length(next(iter(one.written.answers), ""), max_words=options.answer_words)


@GATES.register("grounded")
@each
def grounded(one: Judged, options: Any) -> Verdict:
    """The answer stands in the evidence: the source's passage or anything that was found."""
    return _stands_in(one.written, 0, "answer not in evidence")


@GATES.register("grounded_beyond_source")
@each
def grounded_beyond_source(one: Judged, options: Any) -> Verdict:
    """As `grounded`; for several hops in evidence other than the source's passage (Dr. Free)."""
    if one.written.seed.hops == 1:
        return _stands_in(one.written, 0, "answer not in evidence")
    return _stands_in(one.written, 1, "answer not beyond the seed")


def _stands_in(written: Written, first: int, reason: str) -> Verdict:
    # Texts without titles: with its title, the answer's own passage would ground anything.
    texts = [passage.text for part in written.evidence[first:] for passage in part]
    found = any(named(text, written.answers) for text in texts)
    return PASS if found else Verdict(False, reason)


@GATES.register("searches")
@each
def searches(one: Judged, options: Any) -> Verdict:
    """As many searches as the hops need beyond the source: h - 1, exactly.

    Where there is no source to start from, h.
    """
    wanted = one.written.seed.hops - (1 if one.written.seed.passages else 0)
    made = one.written.searches
    if made == wanted:
        return PASS
    return Verdict(False, "too few searches" if made < wanted else "too many searches")


@GATES.register("distinct_queries")
@each
def distinct_queries(one: Judged, options: Any) -> Verdict:
    """At least `gates.least_queries` searches, none of which repeats another (SSP: two)."""
    keys = [normalize_answer(query) for query in one.written.queries]
    if len(set(keys)) < len(keys):
        return Verdict(False, "repeated query")
    return PASS if len(keys) >= options.least_queries else Verdict(False, "too few searches")


@GATES.register("retrieved")
@each
def retrieved(one: Judged, options: Any) -> Verdict:
    """Something was found (SSP)."""
    texts = [passage.text for part in one.written.found for passage in part]
    return PASS if any(text.strip() for text in texts) else Verdict(False, "nothing retrieved")


@GATES.register("format_positive")
@each
def format_positive(one: Judged, options: Any) -> Verdict:
    """The format score is above 0: the whole of what Dr. Zero's code asks for."""
    return PASS if one.format > 0 else Verdict(False, one.written.parsed.problem or "format 0")


@GATES.register("format_full")
@each
def format_full(one: Judged, options: Any) -> Verdict:
    """The format score is 1."""
    return PASS if one.format >= 1 else Verdict(False, "format below 1")


# ── Gates that ask a model ─────────────────────────────────────────────────────────────────────


@GATES.register("rag")
@asks_reader
def rag(judged: Sequence[Judged], means: Means) -> list[Verdict]:
    """A reader finds the answer in the proposal's own evidence among passages of others (SSP).

    `gates.rag_noise` passages of other proposals are mixed in and all are shuffled. A reader that
    gives no answer refuses; with `gates.rag_fail_open` it passes, as in the published code.
    """
    rng = means.rng
    if means.read is None or rng is None:
        raise ValueError("the gate rag needs a reader and a source of chance")
    shown = []
    for one in judged:
        own = [passage for part in one.written.evidence for passage in part]
        ids = {passage.id for passage in own}
        noise = [passage for passage in means.others if passage.id not in ids]
        drawn = rng.permutation(len(noise))[: means.options.rag_noise]
        mixed = own + [noise[i] for i in drawn]
        shown.append([mixed[i] for i in rng.permutation(len(mixed))])
    answers = means.read([one.written.question or "" for one in judged], shown)
    verdicts = []
    for one, answer in zip(judged, answers, strict=True):
        if answer is None:
            passed = bool(means.options.rag_fail_open)
        else:
            passed = exact_match(answer, one.written.answers)
        verdicts.append(PASS if passed else Verdict(False, "not answerable from its evidence"))
    return verdicts


@GATES.register("closed_book")
@asks_reader
def closed_book(judged: Sequence[Judged], means: Means) -> list[Verdict]:
    """A reader without any passage does not know the answer."""
    if means.read is None:
        raise ValueError("the gate closed_book needs a reader")
    answers = means.read([one.written.question or "" for one in judged], [()] * len(judged))
    return [
        Verdict(False, "answered without evidence")
        if exact_match(answer, one.written.answers)
        else PASS
        for one, answer in zip(judged, answers, strict=True)
    ]
