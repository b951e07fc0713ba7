"""EviBack's evidence-constrained teacher: does the evidence suffice, and for which answer?

Two questions to a frozen teacher. *Stage A* judges without the references whether the evidence
suffices; *stage B*, asked only where A did not say "insufficient", sees the references as
candidates and settles the form of the answer. Their replies are merged by fixed rules (`merge`).
B can never overturn an "insufficient" of A: that is the hard boundary. Prompts may have a third
call, before stage A, whose notes stage A is shown (`Prompts.notes`).

A reply is three blocks, <reason>, <status>, <answer>, and nothing else (`parse_reply`). Any breach
makes it worth nothing, as does a teacher that does not answer; the two are told apart.

Source: EviBack (arXiv 2607.23955). The prompts are ours (`prompts.py`).

Shape letters: G rollouts.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from zest_jax.retrieval.interface import Passage
from zest_jax.teachers.interface import Failure, Message, Reply, Teacher
from zest_jax.teachers.prompts import DEFAULT, PLACEHOLDER, Prompts
from zest_jax.text import contains_answer, token_f1

RULES_VERSION = "evidence-1"  # of the grammar and the merge rules below

BLOCKS = ("reason", "status", "answer")


class Status(enum.StrEnum):
    """What a stage says of the evidence."""

    SUPPORTED = "supported_answer"
    INSUFFICIENT = "insufficient_evidence"
    AMBIGUOUS = "ambiguous_evidence"


class Breach(enum.StrEnum):
    """How a reply breaks the grammar."""

    BLOCKS = "not_three_blocks"  # one lacks, stands twice or elsewhere, or there is other text
    REASON = "no_reason"
    LONG_REASON = "long_reason"
    STATUS = "unknown_status"
    NO_ANSWER = "supported_without_answer"  # it is empty or the placeholder
    ANSWER = "answer_without_support"  # a negative status with another answer than the placeholder


class Rule(enum.StrEnum):
    """Which rule of the merge decided."""

    NOT_ASKED = "not_asked"
    A_INVALID = "a_invalid"
    A_INSUFFICIENT = "a_insufficient"  # the hard boundary
    B_UNUSABLE = "b_unusable"  # missing, invalid or insufficient
    B_WITHDREW = "b_withdrew"  # A supported, B not
    A_CLOSER = "a_closer"  # both supported, A's answer has the larger F1
    B = "b"


class Skip(enum.StrEnum):
    """Why a rollout was not asked about."""

    NONE = ""
    NO_EVIDENCE = "no_evidence"
    GROUP_SCORED = "group_scored"  # somebody in its group is right


@dataclasses.dataclass(frozen=True)
class Round:
    """One search of a rollout: its query and what the rollout saw of the result, best first."""

    query: str
    passages: tuple[Passage, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """What a teacher is asked about: one rollout.

    Attributes:
      question: as asked.
      references: accepted answers.
      rounds: searches in order.
      id: of the rollout, for the record.
    """

    question: str
    references: tuple[str, ...]
    rounds: tuple[Round, ...]
    id: str = ""

    @property
    def passages(self) -> tuple[Passage, ...]:
        """Of all rounds, in order."""
        return tuple(passage for each in self.rounds for passage in each.passages)


@dataclasses.dataclass(frozen=True)
class Stage:
    """The outcome of one stage.

    Attributes:
      status, answer, reason: of a valid reply; None and "" otherwise. The answer is "" where the
        status is negative.
      breach: how the reply breaks the grammar; None where it does not, or there is none.
      failure: why the teacher gave no reply; None where it gave one.
      detail: the failure in words.
      cached: the reply came from a cache.
    """

    status: Status | None = None
    answer: str = ""
    reason: str = ""
    breach: Breach | None = None
    failure: Failure | None = None
    detail: str = ""
    cached: bool = False

    @property
    def valid(self) -> bool:
        return self.status is not None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the teacher makes of a rollout, with where it comes from.

    Attributes:
      id: of the rollout.
      status: the merged one; None where there is no valid verdict.
      answer: the merged one; "" unless supported.
      f1: token F1 of the answer with the references; 0 unless supported.
      rule: what decided the merge.
      literal: the answer was replaced by a reference that stands in the evidence.
      skip: why nothing was asked.
      stage_a, stage_b: None where a stage was not asked. Where the notes before it failed, stage A
        has their failure.
      notes: the text of the call before stage A; "" without one.
      versions: of the rules and prompts, and the teacher's card.
    """

    id: str
    status: Status | None
    answer: str
    f1: float
    rule: Rule
    literal: bool = False
    skip: Skip = Skip.NONE
    stage_a: Stage | None = None
    stage_b: Stage | None = None
    notes: str = ""
    versions: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def supported(self) -> bool:
        """The evidence is worth something: supported or ambiguous."""
        return self.status in (Status.SUPPORTED, Status.AMBIGUOUS)

    @property
    def unanswered(self) -> bool:
        """Some stage that was asked got no reply, so that a 0 here is no verdict."""
        return any(s is not None and s.failure is not None for s in (self.stage_a, self.stage_b))

    def to_json(self) -> dict[str, Any]:
        """As a record, for the provenance of a reward."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class EvidenceSettings:
    """How cases are shown and replies are read.

    Attributes:
      documents: passages shown of each round.
      document_characters: of a passage's text that are shown; 0 for all.
      reason_words: longest reason of stage B that is accepted; 0 for any. The paper only asks for
        60 in its prompt.
      literal: replace a supported answer by a reference that stands in the evidence.
    """

    documents: int = 5
    document_characters: int = 0
    reason_words: int = 0
    literal: bool = True


class EvidenceTeacher:
    """Asks a teacher about rollouts in two stages.

    Args:
      teacher: who is asked.
      prompts: with which words.
      settings: see `EvidenceSettings`.
    """

    def __init__(
        self,
        teacher: Teacher,
        prompts: Prompts = DEFAULT,
        settings: EvidenceSettings | None = None,
    ) -> None:
        self.teacher, self.prompts = teacher, prompts
        self.settings = settings or EvidenceSettings()

    @property
    def versions(self) -> dict[str, Any]:
        """What a verdict depends on beside its case."""
        return {
            "rules": RULES_VERSION,
            "prompts": self.prompts.name,
            "prompts_sha256": self.prompts.version,
            "settings": dataclasses.asdict(self.settings),
            "teacher": self.teacher.card,
        }

    def judge(self, cases: Sequence[Case]) -> list[Verdict]:
        """A verdict on each case, in order; one call of the teacher for each stage. Never raises
        for a fault of the teacher."""
        s = self.settings
        asked = [n for n, case in enumerate(cases) if case.passages]
        stage_a: dict[int, Stage] = {}
        notes: dict[int, str] = {}
        if self.prompts.notes:
            replies = self.teacher.ask([self._conversation(cases[n], "notes") for n in asked])
            for n, reply in zip(asked, replies, strict=True):
                if reply.text is None:
                    stage_a[n] = Stage(failure=reply.failure, detail=f"notes: {reply.detail}")
                else:
                    notes[n] = reply.text.strip()
            asked = list(notes)
        replies = self.teacher.ask(
            [self._conversation(cases[n], "stage_a", notes.get(n, "")) for n in asked]
        )
        for n, reply in zip(asked, replies, strict=True):
            stage_a[n] = parse_reply(reply)
        stage_b: dict[int, Stage] = {}
        open_ = [n for n, a in stage_a.items() if a.valid and a.status != Status.INSUFFICIENT]
        replies = self.teacher.ask([self._conversation(cases[n], "stage_b") for n in open_])
        for n, reply in zip(open_, replies, strict=True):
            stage_b[n] = parse_reply(reply, s.reason_words)
        versions = self.versions
        return [
            dataclasses.replace(
                self._verdict(case, stage_a[n], stage_b.get(n)),
                notes=notes.get(n, ""),
                versions=versions,
            )
            if n in stage_a
            else skipped(case.id, Skip.NO_EVIDENCE)
            for n, case in enumerate(cases)
        ]

    def _verdict(self, case: Case, a: Stage, b: Stage | None) -> Verdict:
        rule, chosen = merge(a, b, case.references)
        answer, literal = chosen.answer, False
        if self.settings.literal and chosen.status == Status.SUPPORTED:
            found = literal_reference(answer, case.references, self._shown(case))
            answer, literal = (found, True) if found is not None else (answer, False)
        supported = chosen.status == Status.SUPPORTED
        return Verdict(
            id=case.id,
            status=chosen.status,
            answer=answer,
            f1=token_f1(answer, case.references) if supported else 0.0,
            rule=rule,
            literal=literal,
            stage_a=a,
            stage_b=b,
        )

    def _conversation(self, case: Case, stage: str, notes: str = "") -> tuple[Message, ...]:
        fields = {
            "question": case.question,
            "evidence": show_evidence(case, self.settings, queries=stage != "stage_b"),
            "references": json.dumps(list(case.references), ensure_ascii=False),
            "notes": notes,
        }
        return self.prompts.conversation(stage, fields)

    def _shown(self, case: Case) -> list[Passage]:
        return [p for each in case.rounds for p in _visible(each, self.settings)]


def parse_reply(reply: Reply, reason_words: int = 0) -> Stage:
    """Reads a reply by the grammar, to the letter.

    Args:
      reply: of the teacher.
      reason_words: longest reason; 0 for any.
    """
    if reply.text is None:
        return Stage(failure=reply.failure, detail=reply.detail)

    def breach(kind: Breach) -> Stage:
        return Stage(breach=kind, cached=reply.cached)

    shape = r"\s*".join(rf"<{name}>(.*?)</{name}>" for name in BLOCKS)
    found = re.fullmatch(rf"\s*{shape}\s*", reply.text, re.DOTALL)
    if found is None or re.search(rf"</?({'|'.join(BLOCKS)})>", "\0".join(found.groups())):
        return breach(Breach.BLOCKS)
    reason, said, answer = (part.strip() for part in found.groups())
    if not reason:
        return breach(Breach.REASON)
    if reason_words and len(reason.split()) > reason_words:
        return breach(Breach.LONG_REASON)
    if said not in list(Status):
        return breach(Breach.STATUS)
    status = Status(said)
    if status == Status.SUPPORTED:
        if answer in ("", PLACEHOLDER):
            return breach(Breach.NO_ANSWER)
    elif answer != PLACEHOLDER:
        return breach(Breach.ANSWER)
    answer = answer if status == Status.SUPPORTED else ""
    return Stage(status, answer, reason, cached=reply.cached)


def merge(a: Stage, b: Stage | None, references: Sequence[str]) -> tuple[Rule, Stage]:
    """Which stage counts, by the first rule that applies.

    ==============================================  =======
    A invalid                                       A
    A insufficient (the hard boundary)              A
    B missing, invalid or insufficient              A
    A supported, B ambiguous                        A
    both supported, A's answer of strictly larger   A
    F1 with the references
    otherwise                                       B
    ==============================================  =======
    """
    if not a.valid:
        return Rule.A_INVALID, a
    if a.status == Status.INSUFFICIENT:
        return Rule.A_INSUFFICIENT, a
    if b is None or not b.valid or b.status == Status.INSUFFICIENT:
        return Rule.B_UNUSABLE, a
    if a.status == Status.SUPPORTED:
        if b.status != Status.SUPPORTED:
            return Rule.B_WITHDREW, a
        if token_f1(a.answer, references) > token_f1(b.answer, references):
            return Rule.A_CLOSER, a
    return Rule.B, b


def literal_reference(
    answer: str, references: Sequence[str], passages: Sequence[Passage]
) -> str | None:
    """The first reference that stands in a passage as whole normalised words and scores higher
    than the answer; None where there is none. A reference such as "no" stands nearly everywhere."""
    own = token_f1(answer, references)
    for reference in references:
        if token_f1(reference, references) > own and any(
            contains_answer(f"{p.title}\n{p.text}", reference) for p in passages
        ):
            return reference
    return None


def show_evidence(case: Case, settings: EvidenceSettings, *, queries: bool) -> str:
    """The rounds of a case as JSON, one a line.

    Args:
      case: of a rollout.
      settings: how much of it.
      queries: show what was searched for; stage B must not see it.
    """
    lines = []
    for number, each in enumerate(case.rounds, 1):
        most = settings.document_characters or None
        documents = [
            {"title": p.title, "contents": p.text[:most]} for p in _visible(each, settings)
        ]
        head = {"round": number, "sub_query": each.query} if queries else {}
        lines.append(json.dumps(head | {"documents": documents}, ensure_ascii=False))
    return "\n".join(lines)


def _visible(each: Round, settings: EvidenceSettings) -> tuple[Passage, ...]:
    return each.passages[: settings.documents]


def skipped(id: str, why: Skip) -> Verdict:
    """The verdict on a rollout that was not asked about."""
    return Verdict(id, None, "", 0.0, Rule.NOT_ASKED, skip=why)


def arrays(
    verdicts: Sequence[Verdict],
) -> tuple[Bool[np.ndarray, " G"], Float[np.ndarray, " G"]]:
    """What `rewards.fallback.fallback_scores` takes: supported_G and teacher_f1_G."""
    return (
        np.array([v.supported for v in verdicts], bool),
        np.array([v.f1 for v in verdicts], np.float64),
    )


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Counts for a report: verdicts by status, rule and skip reason, breaches and failures by
    stage, and the share of the asked that stayed unanswered."""
    asked = [v for v in verdicts if v.skip == Skip.NONE]
    unanswered = sum(v.unanswered for v in asked)
    stages = {"a": [v.stage_a for v in asked], "b": [v.stage_b for v in asked]}
    told: dict[str, Any] = {
        "rollouts": len(verdicts),
        "asked": len(asked),
        "unanswered": unanswered,
        "unanswered_share": unanswered / len(asked) if asked else 0.0,
        "literal": sum(v.literal for v in asked),
        "status": _count(v.status or "none" for v in asked),
        "rule": _count(v.rule for v in asked),
        "skip": _count(v.skip for v in verdicts if v.skip),
    }
    for name, outcomes in stages.items():
        told[f"breach_{name}"] = _count(s.breach for s in outcomes if s and s.breach)
        told[f"failure_{name}"] = _count(s.failure for s in outcomes if s and s.failure)
    return told


def step_metrics(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """A training step's counts under their metric keys: how many were asked about, the share
    without an answer, the share with support, and how many there are of each status, failure and
    breach. `totals` adds them up."""
    told = summary(verdicts)
    out = {
        "teacher/asked": float(told["asked"]),
        "teacher/unanswered": told["unanswered_share"],
        "teacher/supported": float(np.mean([v.supported for v in verdicts] or [False])),
    }
    kinds = {"status": [told["status"]]}
    kinds |= {name: [told[f"{name}_a"], told[f"{name}_b"]] for name in ("failure", "breach")}
    for name, parts in kinds.items():
        counts: Counter[str] = sum(map(Counter, parts), Counter())
        out |= {f"teacher/{name}_{kind}": float(count) for kind, count in counts.items()}
    return out


def totals(metrics: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """A run's teacher in numbers, of all steps together; None where none was asked.

    Args:
      metrics: records with the keys of `step_metrics`.

    Returns:
      "asked", "unanswered", "unanswered_share", and "status", "failure", "breach" by kind. Counts
      are of rollouts; one of which both stages failed has two failures.
    """
    steps = [record for record in metrics if record.get("teacher/asked")]
    if not steps:
        return None
    asked = sum(record["teacher/asked"] for record in steps)
    silent = sum(record["teacher/asked"] * record["teacher/unanswered"] for record in steps)
    told: dict[str, Any] = {
        "asked": round(asked),
        "unanswered": round(silent),
        "unanswered_share": silent / asked,
    }
    for name in ("status", "failure", "breach"):
        head = f"teacher/{name}_"
        counts: Counter[str] = Counter()
        for record in steps:
            for key, value in record.items():
                if key.startswith(head) and value:
                    counts[key.removeprefix(head)] += round(value)
        told[name] = dict(sorted(counts.items()))
    return told


def _count(values) -> dict[str, int]:
    return dict(sorted(Counter(str(value) for value in values).items()))
