"""Gates: what a proposal must pass before it may be paid for or trained on.

Host functions over text. Every gate answers with a ``Verdict``: passed or not, and a short reason
that is counted in the metrics, so that a run shows *why* proposals fall.

A gate that cannot decide refuses: one that lets pass what it failed to check was a flaw of earlier
systems.
"""

import dataclasses
from collections.abc import Sequence

from zest_jax import text
from zest_jax.tasks.names import named

PROPOSAL_TAGS = ("think", "question", "answer")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Outcome of one gate; true where it passed.

    Attributes:
        passed: the proposal may go on.
        reason: empty where passed, else a few fixed words (no text of the proposal), fit to count.
    """

    passed: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.passed


PASS = Verdict(True)


@dataclasses.dataclass(frozen=True)
class ParsedProposal:
    """A proposer's output taken apart.

    Attributes:
        question, answer: the pair, or both None where it could not be read.
        think: body of the first reasoning block, None where there is none.
        problem: why the pair could not be read; empty where it could.
    """

    question: str | None
    answer: str | None
    think: str | None
    problem: str = ""

    @property
    def parseable(self) -> bool:
        """The pair could be read."""
        return not self.problem


def parse_proposal(output: str, claims: bool = True) -> ParsedProposal:
    """Reads ``<think>…</think> <question>…</question> <answer>…</answer>``.

    The pair is readable if there is exactly one complete question and one complete answer, in this
    order, neither blank nor holding another tag of the protocol. One, because several questions
    leave open which of them is meant, and a proposer could otherwise have the gate choose.

    The reasoning block counts only where it stands before the question; text outside tags is
    allowed.

    Args:
        output: the proposer's own words.
        claims: the proposer has to give an answer as well; without, only the question is read.
    """
    question_at = output.find("<question>")
    before = output if question_at < 0 else output[:question_at]
    thoughts = text.tags(before, "think")
    think = thoughts[0] if thoughts else None
    problem = _problem(output, ("question", "answer") if claims else ("question",))
    if problem:
        return ParsedProposal(None, None, think, problem)
    question = text.tags(output, "question")[0]
    return ParsedProposal(question, text.tags(output, "answer")[0] if claims else None, think)


def _problem(output: str, names: Sequence[str]) -> str:
    for name in names:
        if (output.count(f"<{name}>"), output.count(f"</{name}>")) != (1, 1):
            found = output.count(f"<{name}>") + output.count(f"</{name}>")
            return f"no {name}" if found == 0 else f"not exactly one {name}"
        bodies = text.tags(output, name)
        if not bodies:
            return f"not exactly one {name}"  # closed before it is opened
        if not bodies[0]:
            return f"blank {name}"
        if any(f"<{tag}>" in bodies[0] or f"</{tag}>" in bodies[0] for tag in PROPOSAL_TAGS):
            return f"tag inside the {name}"
    if len(names) > 1 and output.index("<question>") > output.index("<answer>"):
        return "answer before question"
    return ""


def leaks_answer(question: str, answers: Sequence[str]) -> bool:
    """Some name of the answer stands in the question, however it is written (`names.named`)."""
    return named(question, answers)


def hides_answer(question: str, answers: Sequence[str]) -> Verdict:
    """Gate: no name of the answer stands in the question."""
    return Verdict(False, "answer in question") if leaks_answer(question, answers) else PASS


def question_length(
    question: str,
    *,
    min_words: int = 1,
    max_words: int = 50,
    min_characters: int = 10,
    max_characters: int = 1000,
) -> Verdict:
    """Gate: the question is neither a stub nor an essay (limits inclusive)."""
    words, characters = len(question.split()), len(question.strip())
    if words < min_words or characters < min_characters:
        return Verdict(False, "question too short")
    if words > max_words or characters > max_characters:
        return Verdict(False, "question too long")
    return PASS


def answer_length(answer: str, *, max_words: int = 10) -> Verdict:
    """Gate: the answer is a name, not a paragraph."""
    words = len(text.normalize_answer(answer).split())
    if words == 0:
        return Verdict(False, "answer blank")
    return Verdict(False, "answer too long") if words > max_words else PASS


def grounded(answers: Sequence[str], passages: Sequence[str], hops: int) -> Verdict:
    """Gate: the answer stands in an admissible supporting passage of the chain.

    One hop: any passage of the chain, the seed's own included. Several hops: at least one that is
    not the seed's, since a question which the seed alone supports needs no second hop. Normalised
    match on whole words.

    Args:
        answers: accepted names of the answer.
        passages: texts of the chain's passages in order e0..eh; the first is the seed's. Whether a
            text opens with its title is the caller's choice: with titles, the answer's own
            passage always contains it.
        hops: hop count h of the chain, so that ``h + 1`` passages are expected.
    """
    if hops < 1 or len(passages) != hops + 1:
        raise ValueError(f"a chain of {hops} hops has {hops + 1} passages, got {len(passages)}")
    admissible = passages if hops == 1 else passages[1:]
    if any(named(passage, answers) for passage in admissible):
        return PASS
    return Verdict(False, "answer not in evidence" if hops == 1 else "answer not beyond the seed")
