"""Parsing a proposal, and the gates it must pass."""

import pytest

from zest_jax.tasks import gates

OUTPUT = (
    "<think> France, capital, river</think><question> What is the river of the capital of France?"
    "</question><answer> Seine</answer>"
)
ANSWERS = ("Seine", "Sequana")
PASSAGES = (
    "France: a country; its capital is Paris.",
    "Paris: a city on the Seine.",
    "Seine: a river of France.",
)


def test_parse_proposal():
    got = gates.parse_proposal(OUTPUT)
    assert got.question == "What is the river of the capital of France?"
    assert (got.answer, got.think, got.problem) == ("Seine", "France, capital, river", "")
    assert got.parseable
    assert gates.parse_proposal("noise\n" + OUTPUT + "<|endoftext|>").parseable


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        ("", "no question"),
        ("<think>x</think><answer>y</answer>", "no question"),
        ("<question>x</question>", "no answer"),
        ("<question>x</question><answer>y", "not exactly one answer"),
        (OUTPUT + "<question>z</question>", "not exactly one question"),
        (OUTPUT + "<answer>z</answer>", "not exactly one answer"),
        ("<question> </question><answer>y</answer>", "blank question"),
        ("<question>x</question><answer>\n</answer>", "blank answer"),
        ("<question>x<answer>y</answer></question>", "tag inside the question"),
        ("</question>x<question><answer>y</answer>", "not exactly one question"),
        ("<answer>y</answer><question>x</question>", "answer before question"),
        ("<question>x <think>y</think></question><answer>z</answer>", "tag inside the question"),
    ],
)
def test_unreadable_pairs(output, problem):
    got = gates.parse_proposal(output)
    assert (got.question, got.answer, got.problem) == (None, None, problem)
    assert not got.parseable


def test_reasoning_must_come_before_the_question():
    late = "<question>x</question><think>y</think><answer>z</answer>"
    assert gates.parse_proposal(late).think is None
    assert gates.parse_proposal("<think>a</think> no pair").think == "a"
    assert gates.parse_proposal(OUTPUT.replace("</think>", "")).think is None


def test_leak():
    assert gates.leaks_answer("Is the sequana long?", ANSWERS)
    assert not gates.leaks_answer("Is the Seinelike river long?", ANSWERS)
    verdict = gates.hides_answer("Is the Seine long?", ANSWERS)
    assert not verdict and verdict.reason == "answer in question"
    assert gates.hides_answer("Is it long?", ANSWERS)


def test_lengths():
    assert gates.question_length("Who wrote it?")
    assert gates.question_length("Who?").reason == "question too short"
    assert gates.question_length("Who wrote it?", min_words=4).reason == "question too short"
    assert gates.question_length("w " * 50)
    assert gates.question_length("w " * 51).reason == "question too long"
    assert gates.question_length("x" * 1001).reason == "question too long"
    assert gates.answer_length("the Seine")
    assert gates.answer_length("the").reason == "answer blank"
    assert gates.answer_length("b c d", max_words=2).reason == "answer too long"


def test_grounded():
    assert gates.grounded(ANSWERS, PASSAGES, 2)
    seed_only = ("France: the Seine flows here.", "Paris: a city.", "Loire: a river.")
    verdict = gates.grounded(ANSWERS, seed_only, 2)
    assert not verdict and verdict.reason == "answer not beyond the seed"
    # one hop: the seed may support it
    assert gates.grounded(ANSWERS, seed_only[:2], 1)
    assert gates.grounded(("Rhone",), PASSAGES[:2], 1).reason == "answer not in evidence"
    assert gates.grounded(("Rhone", "sequana"), ("x", "y", "the Sequana"), 2)  # by an alias
    with pytest.raises(ValueError, match="3 passages"):
        gates.grounded(ANSWERS, PASSAGES[:2], 2)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Which river flows through Paris's centre?", "Paris"),
        ("Which Paris-based painter is meant?", "Paris"),
        ("Who wrote Hamlet’s last scene?", "Hamlet"),
        ("Who wrote “Hamlet”?", "Hamlet"),
        ("Кто написал «Париж»?", "Париж"),
        ("Where does San Jose lie?", "San José"),
        ("東京の川は何ですか", "東京"),
    ],
)
def test_an_answer_is_found_however_it_is_written(question, answer):
    assert gates.leaks_answer(question, (answer,))


def test_a_word_within_a_word_is_no_leak():
    assert not gates.leaks_answer("What is the capital of Parisia?", ("Paris",))
