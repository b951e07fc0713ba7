"""Nested questions and the tasks made of them."""

import numpy as np
from tiny_world import tiny_world

from zest_jax.tasks.templates import chain_task, nested_question, reveals_answer
from zest_jax.tasks.types import Chain, Task

CHAIN = Chain("fr|capital|pa|river|se", (0, 1, 2), (0, 1))


def test_phrases_are_nested(tmp_path):
    world, rng = tiny_world(tmp_path), np.random.default_rng(0)
    assert nested_question(CHAIN, world, rng) == "What is the river of the capital of France?"
    assert nested_question(CHAIN, world, rng, first_hop=1) == "What is the river of Paris?"
    renamed = nested_question(CHAIN, world, rng, names={0: "Blub"})
    assert renamed == "What is the river of the capital of Blub?"


def test_a_name_with_braces_is_left_alone(tmp_path):
    world = tiny_world(tmp_path)
    question = nested_question(CHAIN, world, np.random.default_rng(0), names={0: "{0}"})
    assert question == "What is the river of the capital of {0}?"


def test_chain_task(tmp_path):
    task = chain_task(CHAIN, tiny_world(tmp_path), np.random.default_rng(0), "t1")
    assert task == Task(
        id="t1",
        question="What is the river of the capital of France?",
        answers=("Seine",),
        hops=2,
        source_id="fr",
        evidence=("fr", "pa", "se"),
        chain_id="fr|capital|pa|river|se",
    )


def test_reveals_answer_looks_for_whole_words():
    def task(question, *answers):
        return Task("t", question, answers)

    assert reveals_answer(task("What is the country of Mexico City?", "Mexico"))
    assert reveals_answer(task("What is the river of são paulo?", "Sao Paulo"))
    assert reveals_answer(task("What is near Kiev?", "Kyiv", "Kiev"))
    assert not reveals_answer(task("What is the region of Nigeria?", "Niger"))
