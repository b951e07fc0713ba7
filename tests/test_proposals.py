"""Proposals on a world written by hand: judged, audited, turned into tasks; shares of chains."""

import numpy as np
import pytest
from tiny_world import tiny_world

from zest_jax.errors import UserError
from zest_jax.tasks.atlas import load_atlas
from zest_jax.tasks.proposals import answer_in_source, draw_chains, judge, tasks_of
from zest_jax.tasks.types import Chain

FRANCE, PARIS, SEINE, LOIRE, BERLIN = range(5)
CAPITAL, RIVER, HOME, FRIEND = range(4)
TWO = Chain("fr|capital|pa|river|se", (FRANCE, PARIS, SEINE), (CAPITAL, RIVER))
ONE = Chain("fr|capital|pa", (FRANCE, PARIS), (CAPITAL,))


@pytest.fixture
def world(tmp_path):
    return tiny_world(tmp_path)


def output(question, answer, think="<think> so</think>"):
    return f"{think}<question> {question}</question><answer> {answer}</answer>"


GOOD = output("What is the river of the capital of France?", "Seine")


def test_a_good_proposal_passes(world):
    got = judge(TWO, GOOD, world)
    assert got.gate.passed and got.gate.s_fmt == 1.0 and got.gate.reason == ""
    assert got.parsed.question == "What is the river of the capital of France?"
    assert (got.chain, got.output, got.parsed.answer) == (TWO, GOOD, "Seine")


@pytest.mark.parametrize(
    ("text", "s_fmt", "reason"),
    [
        (output("What is the Seine?", "Seine"), 0.75, "answer in question"),
        (output("What river is it?", "Loire"), 0.75, "answer is not the target"),
        (output("What river is it?", "Seine", think=""), 0.75, "no reasoning"),
        ("<think> so</think>", 0.25, "no question"),
        ("", 0.0, "no question"),
    ],
)
def test_a_bad_one_does_not(world, text, s_fmt, reason):
    got = judge(TWO, text, world)
    assert (got.gate.s_fmt, got.gate.reason, got.gate.passed) == (s_fmt, reason, False)


def test_the_answers_own_title_grounds_nothing(world):
    # Berlin's passage ("A town.") and those before it do not name Berlin; its title would.
    chain = Chain("pa|country|fr|friend|be", (PARIS, FRANCE, BERLIN), (HOME, FRIEND))
    got = judge(chain, output("Who is the friend of the home of Paris?", "Berlin"), world)
    assert got.gate.s_fmt == 1.0
    assert not got.gate.grounded and not got.gate.passed
    assert got.gate.reason == "answer not beyond the seed"


def test_a_question_that_does_not_fit_cannot_be_asked(world):
    asked = []

    def fits(question):
        asked.append(question)
        return len(question) < 20

    got = judge(TWO, GOOD, world, fits)
    assert asked == ["What is the river of the capital of France?"]
    assert got.parsed.question is None and got.parsed.think == "so"
    assert (got.gate.s_fmt, got.gate.reason) == (0.25, "question too long")
    assert judge(TWO, output("What river is it?", "Seine"), world, fits).gate.passed
    judge(TWO, "no question", world, fits)
    assert len(asked) == 2, "without a question there is nothing to measure"


def test_answer_in_source(world):
    assert answer_in_source(ONE, world)  # France's passage names its capital
    assert not answer_in_source(TWO, world)
    # Seine's passage names Loire, so that the question needs no second passage.
    shortcut = Chain("se|friend|pa|x|lo", (SEINE, PARIS, LOIRE), (FRIEND, FRIEND))
    assert answer_in_source(shortcut, world)


def test_tasks_are_those_that_passed_and_each_question_once(world):
    proposed = [
        judge(TWO, GOOD, world),
        judge(TWO, output("What is the Seine?", "Seine"), world),  # leaks
        judge(ONE, output("What is the capital of France?", "Paris"), world),
        judge(TWO, GOOD, world),  # twice
        judge(ONE, output("What is France's capital?", "Paris"), world),
        judge(ONE, output("What is the capital of France?", "Paris"), world),  # twice
    ]
    tasks, duplicates = tasks_of(proposed, world, iteration=3, most=9)
    assert duplicates == 2
    assert [t.question for t in tasks] == [
        "What is the river of the capital of France?",
        "What is the capital of France?",
        "What is France's capital?",
    ]
    first = tasks[0]
    assert first.id == "iteration3-0" and tasks[2].id == "iteration3-2"
    assert (first.answers, first.hops, first.source_id) == (("Seine",), 2, "fr")
    assert first.evidence == ("fr", "pa", "se")
    assert (first.iteration, first.chain_id) == (3, TWO.id)
    assert first.meta == {"proposal": GOOD, "answer_in_source": False}
    assert tasks[1].meta["answer_in_source"] is True


def test_no_more_tasks_than_wanted_but_all_duplicates_are_counted(world):
    proposed = [
        judge(ONE, output(f"What is the capital of France, {n}?", "Paris"), world)
        for n in (0, 1, 2, 2)
    ]
    tasks, duplicates = tasks_of(proposed, world, iteration=0, most=2)
    assert [t.id for t in tasks] == ["iteration0-0", "iteration0-1"]
    assert duplicates == 1


def test_chains_are_drawn_in_equal_shares_and_mixed():
    atlas = load_atlas()
    chains = draw_chains(atlas, 31, 3, np.random.default_rng(0))
    hops = [c.hops for c in chains]
    assert [hops.count(h) for h in (1, 2, 3)] == [10, 10, 11]
    assert hops != sorted(hops)
    assert all(atlas.train[list(c.entities)].all() for c in chains)
    assert chains == draw_chains(atlas, 31, 3, np.random.default_rng(0))
    assert chains != draw_chains(atlas, 31, 3, np.random.default_rng(1))
    assert {c.hops for c in draw_chains(atlas, 5, 1, np.random.default_rng(0))} == {1}


def test_chains_that_do_not_fit_are_replaced_by_others():
    atlas = load_atlas()
    rng = np.random.default_rng(4)
    odd = lambda chain: chain.entities[0] % 2 == 1  # noqa: E731
    chains = draw_chains(atlas, 30, 3, rng, odd)
    assert [sum(c.hops == h for c in chains) for h in (1, 2, 3)] == [10, 10, 10]
    assert all(odd(c) for c in chains)
    assert len({c.id for c in chains}) == 30
    with pytest.raises(UserError, match="proposer.prompt_length"):
        draw_chains(atlas, 30, 3, rng, lambda chain: False)
