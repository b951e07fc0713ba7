"""Proposals on a world written by hand: judged, audited, turned into tasks; shares of chains."""

import numpy as np
import pytest
from tiny_world import tiny_world
from written import judge_chain, judge_one, output, written

from zest_jax.errors import UserError
from zest_jax.tasks.atlas import load_atlas
from zest_jax.tasks.proposals import answer_in_source, best_of, tasks_of
from zest_jax.tasks.sources.chains import Chains, chain_seed
from zest_jax.tasks.types import Chain

FRANCE, PARIS, SEINE, LOIRE, BERLIN = range(5)
CAPITAL, RIVER, HOME, FRIEND = range(4)
TWO = Chain("fr|capital|pa|river|se", (FRANCE, PARIS, SEINE), (CAPITAL, RIVER))
ONE = Chain("fr|capital|pa", (FRANCE, PARIS), (CAPITAL,))


@pytest.fixture
def world(tmp_path):
    return tiny_world(tmp_path)


GOOD = output("What is the river of the capital of France?", "Seine")


def test_a_good_proposal_passes(world):
    got = judge_chain(TWO, GOOD, world)
    assert got.passed and got.format == 1.0 and got.reason == ""
    assert got.written.question == "What is the river of the capital of France?"
    assert (got.seed.chain_id, got.written.output) == (TWO.id, GOOD)
    assert got.written.answers == ("Seine",) and got.written.parsed.answer == "Seine"


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
    got = judge_chain(TWO, text, world)
    assert (got.format, got.reason, got.passed) == (s_fmt, reason, False)


def test_the_answers_own_title_grounds_nothing(world):
    # Berlin's passage ("A town.") and those before it do not name Berlin; its title would.
    chain = Chain("pa|country|fr|friend|be", (PARIS, FRANCE, BERLIN), (HOME, FRIEND))
    got = judge_chain(chain, output("Who is the friend of the home of Paris?", "Berlin"), world)
    assert got.format == 1.0 and not got.passed
    assert got.reason == "answer not beyond the seed"


def test_answer_in_source(world):
    def in_source(chain):
        return answer_in_source(written(chain_seed(chain, world), ""))

    assert in_source(ONE)  # France's passage names its capital
    assert not in_source(TWO)
    # Seine's passage names Loire, so that the question needs no second passage.
    shortcut = Chain("se|friend|pa|x|lo", (SEINE, PARIS, LOIRE), (FRIEND, FRIEND))
    assert in_source(shortcut)


def test_tasks_are_those_that_passed_and_each_question_once(world):
    proposed = [
        judge_chain(TWO, GOOD, world),
        judge_chain(TWO, output("What is the Seine?", "Seine"), world),  # leaks
        judge_chain(ONE, output("What is the capital of France?", "Paris"), world),
        judge_chain(TWO, GOOD, world),  # twice
        judge_chain(ONE, output("What is France's capital?", "Paris"), world),
        judge_chain(ONE, output("What is the capital of France?", "Paris"), world),  # twice
    ]
    tasks, duplicates = tasks_of(proposed, iteration=3, most=9)
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
    assert first.meta == {
        "proposal": GOOD,
        "answer_in_source": False,
        "probe": "",
        "seed": TWO.id,
        "nodes": [["France"], ["Paris"], ["Seine"]],
    }
    assert tasks[1].meta["answer_in_source"] is True


def test_no_more_tasks_than_wanted_but_all_duplicates_are_counted(world):
    proposed = [
        judge_chain(ONE, output(f"What is the capital of France, {n}?", "Paris"), world)
        for n in (0, 1, 2, 2)
    ]
    tasks, duplicates = tasks_of(proposed, iteration=0, most=2)
    assert [t.id for t in tasks] == ["iteration0-0", "iteration0-1"]
    assert duplicates == 1


def ANY(seed):  # noqa: N802
    return True


def test_refused_questions_stay_only_where_they_are_asked_for(world):
    leaking = judge_chain(TWO, output("What is the Seine?", "Seine"), world)
    nothing = judge_chain(TWO, "", world)
    assert tasks_of([leaking, nothing], 0, 9) == ([], 0)
    (task,), _ = tasks_of([leaking, nothing], 0, 9, keep_refused=True, most_words=3)
    assert task.question == "What is the", "cut to three words"


def test_of_the_proposals_of_a_seed_the_best_format_is_kept_and_the_first_of_equals(world):
    bad = judge_chain(TWO, "", world)
    half = judge_chain(TWO, output("What river is it?", "Loire"), world)
    good = judge_chain(TWO, GOOD, world)
    other = judge_chain(ONE, output("What is the capital of France?", "Paris"), world)
    assert best_of([bad, half, good, half, other, other], 3) == [good, other]
    assert best_of([bad, half, half, bad], 2) == [half, half]
    ungrounded = judge_one(good.written, gates=("distinct_queries",))
    assert not ungrounded.passed and best_of([ungrounded, good], 2) == [good]


def test_chains_are_drawn_in_equal_shares_and_mixed():
    atlas = load_atlas()
    chains = Chains(atlas, 3).draw(31, np.random.default_rng(0), ANY)
    hops = [c.hops for c in chains]
    assert [hops.count(h) for h in (1, 2, 3)] == [10, 10, 11]
    assert hops != sorted(hops)
    train = {atlas.graph.entity_ids[e] for e in np.flatnonzero(atlas.train)}
    assert all(set(c.chain_id.split("|")[::2]) <= train for c in chains)
    assert chains == Chains(atlas, 3).draw(31, np.random.default_rng(0), ANY)
    assert chains != Chains(atlas, 3).draw(31, np.random.default_rng(1), ANY)
    assert {c.hops for c in Chains(atlas, 1).draw(5, np.random.default_rng(0), ANY)} == {1}


def test_chains_that_do_not_fit_are_replaced_by_others():
    atlas = load_atlas()
    rng = np.random.default_rng(4)
    rows = {name: row for row, name in enumerate(atlas.graph.entity_ids)}
    odd = lambda seed: rows[seed.source_id] % 2 == 1  # noqa: E731
    chains = Chains(atlas, 3).draw(30, rng, odd)
    assert [sum(c.hops == h for c in chains) for h in (1, 2, 3)] == [10, 10, 10]
    assert all(odd(c) for c in chains)
    assert len({c.id for c in chains}) == 30
    with pytest.raises(UserError, match="proposer.prompt_length"):
        Chains(atlas, 3).draw(30, rng, lambda seed: False)
