"""Static verification of questions from evidence paths, item by item."""

import pytest
from written import judge_one, output, written

from zest_jax.tasks.seeds import Seed
from zest_jax.tasks.types import Passage

SEED = Seed(
    id="s",
    source_id="d1",
    hops=2,
    fields={"reference": "What is the capital of Spain?"},
    passages=(
        Passage("d1", "New York", "The team is York Yankees."),
        Passage("d2", "York Yankees", "The ground is São Paulo Park."),
    ),
    answers=("São Paulo Park", "The Park"),
    nodes=(("New York", "NYC"), ("York", "York Yankees"), ("São Paulo Park", "The Park")),
)


def reason(gate, question, seed=SEED, answer="São Paulo Park"):
    return judge_one(written(seed, output(question, answer)), "pair", (gate,)).reason


@pytest.mark.parametrize(
    ("question", "good"),
    [
        ("What is the ground of the team of New York?", True),
        ("What is the ground of the team of NYC?", True),
        ("what is the ground of the team of NEW YORK", True),
        ("What is the ground of the team of York?", False),
        ("What is the ground?", False),
        ("What is the ground of New Yorkers?", False),
    ],
)
def test_the_start_is_named(question, good):
    assert reason("start_named", question) == ("" if good else "start not in question")


@pytest.mark.parametrize(
    ("question", "good"),
    [
        ("What is the ground of the team of New York?", True),  # "York" is part of the start
        ("What is the ground of the team of NYC?", True),
        ("What is the ground of the York Yankees of New York?", False),
        ("What is the ground of york?", False),
        ("Where do the Yankees of New York play?", True),
    ],
)
def test_entities_between_are_hidden(question, good):
    assert reason("between_hidden", question) == ("" if good else "entity between in question")


def test_the_answer_stands_in_the_last_document():
    import dataclasses

    assert reason("answer_in_last", "Where?") == ""
    other = dataclasses.replace(SEED, answers=("Camp Nou",))
    assert reason("answer_in_last", "Where?", other) == "answer not in the last document"
    none = dataclasses.replace(SEED, passages=())
    assert reason("answer_in_last", "Where?", none) == "answer not in the last document"
    plain = dataclasses.replace(SEED, answers=("Sao Paulo Park",))
    assert reason("answer_in_last", "Where?", plain) == ""
    turned = dataclasses.replace(SEED, passages=SEED.passages[::-1])
    assert reason("answer_in_last", "Where?", turned) == "answer not in the last document"


@pytest.mark.parametrize(
    ("question", "good"),
    [
        ("What is the ground of New York?", True),
        ("What is the capital of Spain?", False),
        ("what is the CAPITAL of Spain", False),
        ("What is the capital of Spain and France?", True),
        ("Spain's capital is what?", True),
    ],
)
def test_the_question_is_not_its_reference(question, good):
    assert reason("new_question", question) == ("" if good else "question is its reference")


def test_without_a_path_nothing_can_be_started_from():
    seed = Seed(id="s", source_id="d", hops=1, fields={}, answers=("A",))
    assert reason("start_named", "Who?", seed) == "no path"
