"""Format scores: Search-R1's for the solver, Dr. Free's and Dr. Zero's for the proposer.

They are graded, so that a policy which gets only some of the form right feels the way to the rest,
and never negative: a penalty for malformed proposals can drive the share of valid ones to zero.
"""

import dataclasses
import re
from collections.abc import Sequence

from zest_jax import text

# ------------------------------------------------------------------ Search-R1

SEARCH_R1_TAGS = ("think", "search", "information", "answer")


def valid_sequence(response: str, tags: Sequence[str] = SEARCH_R1_TAGS) -> tuple[bool, str]:
    """Whether a response is think (search information think)* answer, and why not.

    A state machine over tags; between tags only white space may stand, after the answer nothing.
    Inside a tag any text may stand, but no other of the four tags.

    Args:
        response: the solver's own text with the retrieved blocks, without prompt and without the
            end-of-turn token.
        tags: names of the four tags in the order think, search, information, answer.

    Returns:
        ``(True, "")`` or ``(False, reason)``.
    """
    think, search, information, answer = tags
    # state -> tag that may come next -> state after it. None is between tags.
    opens = {
        "start": {think},
        think: {search, answer},
        search: {information},
        information: {think},
        answer: set(),
    }
    names = "|".join(map(re.escape, tags))
    last, inside = "start", None
    for part in re.split(f"(</?(?:{names})>)", response):
        if not part.strip():
            continue
        is_tag = re.fullmatch(f"<(/?)({names})>", part)
        if is_tag is None:
            if inside is None:
                where = "before the first tag" if last == "start" else f"after </{last}>"
                return False, f"text outside tags {where}"
        elif is_tag[1]:
            if inside != is_tag[2]:
                return False, f"{part} closes nothing"
            last, inside = is_tag[2], None
        else:
            if inside is not None:
                return False, f"{part} inside <{inside}>"
            if is_tag[2] not in opens[last]:
                return False, f"{part} after {last if last == 'start' else f'</{last}>'}"
            inside = is_tag[2]
    if inside is not None:
        return False, f"<{inside}> is never closed"
    return (True, "") if last == answer else (False, f"ends without <{answer}>")


def search_r1_reward(
    correct: bool,
    answered: bool,
    valid: bool,
    gold_retrieved: bool = False,
    *,
    structure_score: float = 0.2,
    answer_score: float = 0.1,
    retrieval_score: float = 0.0,
) -> float:
    """Search-R1's reward with format (v0.3), in [0, 1].

    ==========================  ==========================================
    correct, valid              1
    correct, invalid            1 - structure_score
    not correct, valid          structure_score (+ retrieval_score if the gold was retrieved)
    wrong, invalid              answer_score
    no answer, invalid          0
    ==========================  ==========================================

    Args:
        correct: exact match of the answer.
        answered: the response has a complete answer tag.
        valid: ``valid_sequence``.
        gold_retrieved: a gold stands in a retrieved block (counts for valid sequences only).
        structure_score, answer_score, retrieval_score: the published defaults.
    """
    if correct and answered:
        return 1.0 if valid else 1.0 - structure_score
    if valid:
        return structure_score + (retrieval_score if gold_retrieved else 0.0)
    return answer_score if answered else 0.0


# ------------------------------------------------------------------ Dr. Free


@dataclasses.dataclass(frozen=True)
class DrFreeFormat:
    """The four parts of Dr. Free's format score, each worth the same.

    Attributes:
        parseable: a question and an answer can be read.
        no_leak: the question does not reveal the answer.
        think: the required reasoning block is there.
        target: the answer equals the chain's target entity.
    """

    parseable: bool
    no_leak: bool
    think: bool
    target: bool

    @property
    def score(self) -> float:
        """``s_fmt``, one of 0, 1/4, 1/2, 3/4, 1 (exact in binary, so ``s_fmt == 1`` is safe)."""
        return (self.parseable + self.no_leak + self.think + self.target) / 4.0


def dr_free_format(
    question: str | None, answer: str | None, think: str | None, targets: Sequence[str]
) -> DrFreeFormat:
    """Scores a proposal's form (components from the paper, equal weights by our choice).

    Without a readable pair there is nothing that could leak or match: both parts are then 0, or an
    empty output would earn the part for not leaking.

    Args:
        question, answer: the parsed pair; None (or blank) where it could not be read.
        think: the reasoning block; None or blank where it is missing.
        targets: accepted names of the chain's last entity, none of which the question may contain
            (nor the answer as the proposal writes it).
    """
    if not (question and question.strip() and answer and answer.strip()):
        return DrFreeFormat(False, False, _filled(think), False)
    return DrFreeFormat(
        parseable=True,
        no_leak=not text.contains_any(question, [answer, *targets]),
        think=_filled(think),
        target=text.exact_match(answer, targets),
    )


def _filled(block: str | None) -> bool:
    return bool(block and block.strip())


# ------------------------------------------------------------------ Dr. Zero


@dataclasses.dataclass(frozen=True)
class DrZeroFormat:
    """The parts of Dr. Zero's format score.

    Attributes:
        integrity: question and answer are there and the answer is not part of the question.
        think: share of assistant turns that open with a think block, in [0, 1].
        tool: searches made against searches asked for, in [0, 1].
        answer: 1 for a short answer found in the evidence, 0.5 for a longer one, else 0.
    """

    integrity: bool
    think: float
    tool: float
    answer: float

    @property
    def score(self) -> float:
        """``s_fmt = integrity * (1 + think + tool + answer) / 4``."""
        return self.integrity * (1.0 + self.think + self.tool + self.answer) / 4.0


def dr_zero_format(
    question: str | None,
    answer: str | None,
    *,
    hops: int,
    turns: Sequence[str],
    evidence: str,
    calls: int,
    responses: int,
    think_tag: str = "think",
) -> DrZeroFormat:
    """Dr. Zero's format score as its code computes it, weaknesses included.

    Kept for reproduction: the substring tests know no word boundaries, and a "three-hop" question
    without any search loses only a quarter (nearly all of its multi-hop questions were then
    written so).

    Args:
        question, answer: last question and answer of the proposal; None where there is none.
        hops: hop count asked for.
        turns: text of each assistant turn.
        evidence: source document and tool results, joined.
        calls: well-formed search calls.
        responses: tool results received. If they are not as many as the calls, none count.
        think_tag: name of the reasoning tag.
    """
    answer_key = text.normalize_answer(answer or "")
    question_key = text.normalize_answer(question or "")
    opening = re.compile(rf"\s*<{re.escape(think_tag)}>.*?</{re.escape(think_tag)}>", re.DOTALL)

    tool = 1.0 if hops == 1 else 0.0
    if calls == responses and calls > 0:
        tool = min((1 + calls) / hops, 1.0)

    words = len(answer_key.split())
    found = answer_key in ("yes", "no") or answer_key in text.normalize_answer(evidence)
    short = 1.0 if words <= 5 else 0.5 if words <= 10 else 0.0
    return DrZeroFormat(
        integrity=_filled(question) and _filled(answer) and answer_key not in question_key,
        think=sum(bool(opening.match(turn)) for turn in turns) / max(1, len(turns)),
        tool=tool,
        answer=short if found and words > 0 else 0.0,
    )


def dr_zero_reward(s_fmt: float, difficulty: float, format_weight: float = 0.5) -> float:
    """Dr. Zero's proposer reward ``0.5 s_fmt + difficulty``, in [0, 1.5].

    A proposal with ``s_fmt = 0`` never meets the solver, so its difficulty does not count.
    """
    return format_weight * s_fmt + (difficulty if s_fmt > 0 else 0.0)
