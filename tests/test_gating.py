"""Gates by name: each refuses what it must and lets pass what it must."""

import dataclasses

import numpy as np
import pytest
from written import CONFIG, judge_one, output, written

from zest_jax.errors import UserError
from zest_jax.tasks.gating import Means
from zest_jax.tasks.seeds import Seed
from zest_jax.tasks.types import Passage

PARIS = Passage("paris", "Paris", "The capital of France. It lies on the Seine.")
SEINE = Passage("seine", "Seine", "A river of 777 km; its mouth is at Le Havre.")
BERLIN = Passage("berlin", "Berlin", "The capital of Germany.")
DOCUMENT = Seed("paris#2", "paris", 2, {}, passages=(PARIS,))
ANSWER = Seed("havre#2", "havre", 2, {}, answers=("Le Havre", "Havre"))
TWO_HOPS = output("Where does the river through the capital of France end?", "Le Havre")
BACKWARD = "<think> x</think><question> Where does the river of Paris end?</question>"


def found(*passages):
    return [[passage] for passage in passages]


def verdict(gate, one, **options):
    chosen = CONFIG.gates.copy_and_resolve_references()
    chosen.update(options)
    return judge_one(one, "pair", (gate,), Means(chosen)).reason


def searched(text=TWO_HOPS, seed=DOCUMENT, queries=("Seine",), passages=(SEINE,), claims=True):
    return written(seed, text, queries=queries, found=found(*passages), claims=claims)


@pytest.mark.parametrize(
    ("gate", "one", "reason"),
    [
        ("pair", searched(), ""),
        ("pair", searched("<question> What?</question>"), "no answer"),
        ("pair", searched(BACKWARD, ANSWER, claims=False), ""),
        ("pair", searched("", ANSWER, claims=False), "no question"),
        ("leakage", searched(), ""),
        ("leakage", searched(output("Is it Le Havre?", "Le Havre")), "answer in question"),
        # by another name of the given answer, and in another script
        (
            "leakage",
            searched(BACKWARD.replace("end", "reach Havre"), ANSWER, claims=False),
            "answer in question",
        ),
        ("leakage", searched(output("長江は東京を流れますか？", "東京")), "answer in question"),
        ("leakage", searched(output("長江は 東京 を流れますか？", "東京")), "answer in question"),
        ("think", searched(), ""),
        ("think", searched(output("Where?", "Le Havre", think="")), "no reasoning"),
        ("target", searched(TWO_HOPS, ANSWER), ""),
        ("target", searched(output("Where is it?", "Rouen"), ANSWER), "answer is not the target"),
        ("length", searched(), ""),
        ("length", searched(output("Where?", "Le Havre")), "question too short"),
        ("answer_length", searched(output("Where is it?", "w " * 11)), "answer too long"),
        ("grounded", searched(), ""),
        ("grounded", searched(output("Which river is it?", "the Seine")), ""),
        ("grounded", searched(output("Which river is it?", "Rhine")), "answer not in evidence"),
        ("grounded", searched(passages=()), "answer not in evidence"),  # an empty retrieval
        ("grounded_beyond_source", searched(), ""),
        (
            "grounded_beyond_source",
            searched(output("Which river is it?", "Seine")),  # only in the document and a title
            "answer not beyond the seed",
        ),
        ("searches", searched(), ""),
        ("searches", searched(queries=(), passages=()), "too few searches"),
        ("searches", searched(passages=(SEINE, BERLIN)), "too many searches"),
        ("searches", searched(seed=ANSWER, passages=(SEINE, BERLIN)), ""),
        ("distinct_queries", searched(queries=("Seine", "Havre")), ""),
        ("distinct_queries", searched(queries=("Seine", "the seine.")), "repeated query"),
        ("distinct_queries", searched(), "too few searches"),
        ("retrieved", searched(), ""),
        ("retrieved", searched(passages=()), "nothing retrieved"),
        ("format_positive", searched(), ""),
        ("format_positive", searched(""), "no question"),
        ("format_full", searched(), ""),
        ("format_full", searched(""), "no question"),
    ],
)
def test_a_gate(gate, one, reason):
    assert verdict(gate, one) == reason


def test_the_first_refusal_counts_and_unknown_gates_are_named():
    one = searched(output("Is it Le Havre?", "Le Havre", think=""))
    assert judge_one(one, "pair", ("think", "leakage")).reason == "no reasoning"
    assert judge_one(one, "pair", ("leakage", "think")).reason == "answer in question"
    with pytest.raises(UserError, match=r"no gate 'thinks'; there are pair, leakage"):
        judge_one(one, "pair", ("thinks",))


class Reads:
    """A reader that answers what the passages that it is shown hold."""

    def __init__(self):
        self.shown = []

    def __call__(self, questions, passages):
        self.shown += [[p.id for p in some] for some in passages]
        return ["Le Havre" if any(p is SEINE for p in some) else None for some in passages]


def test_the_rag_check_mixes_in_noise_and_refuses_what_it_cannot_decide():
    read = Reads()
    noise = tuple(Passage(f"n{i}", "", "noise") for i in range(9))
    means = Means(CONFIG.gates, read, np.random.default_rng(0), noise)
    good = judge_one(searched(), "pair", ("rag",), means)
    bad = judge_one(searched(passages=(BERLIN,)), "pair", ("rag",), means)
    assert good.passed and bad.reason == "not answerable from its evidence"
    assert len(read.shown[0]) == 2 + 4 and {"paris", "seine"} <= set(read.shown[0])
    assert len(set(read.shown[0])) == 6
    lenient = CONFIG.gates.copy_and_resolve_references()
    lenient.update(rag_fail_open=True)
    published = Means(lenient, read, np.random.default_rng(0), noise)
    assert judge_one(searched(passages=(BERLIN,)), "pair", ("rag",), published).passed
    wrong = searched(output("Where does it end?", "Rouen"))
    assert not judge_one(wrong, "pair", ("rag",), published).passed, "it answered, and wrongly"


def test_a_question_that_is_answered_without_any_passage_is_refused():
    means = Means(CONFIG.gates, lambda questions, passages: ["le havre" for _ in questions])
    assert (
        judge_one(searched(), "pair", ("closed_book",), means).reason == "answered without evidence"
    )
    ignorant = Means(CONFIG.gates, lambda questions, passages: [None for _ in questions])
    assert judge_one(searched(), "pair", ("closed_book",), ignorant).passed


def test_dr_zeros_format_by_word_and_by_substring():
    # perfect: 1; three hops without a search lose a quarter of the four parts (METHODS: 1.375)
    seed = Seed("x", "x", 3, {}, passages=(Passage("x", "X", "It lies in Berlin."),))
    one = written(seed, output("Which town is it that is meant here?", "Berlin"))
    loose = CONFIG.gates.copy_and_resolve_references()
    loose.update(substring_match=True)
    for options in (CONFIG.gates, loose):
        assert judge_one(one, "dr_zero", (), Means(options)).format == 0.75
    # "in" stands in "Berlin" only for the published code, both as answer and as leak
    sub = written(seed, output("Which preposition is it?", "erl"))
    assert judge_one(sub, "dr_zero", (), Means(loose)).format == 0.75
    assert judge_one(sub, "dr_zero", (), Means(CONFIG.gates)).format == 0.5
    leak = written(seed, output("Which Berlin is it?", "erl"))
    assert judge_one(leak, "dr_zero", (), Means(loose)).format == 0
    assert judge_one(leak, "dr_zero", (), Means(CONFIG.gates)).format == 0.5


def test_several_queries_of_one_call_are_one_call_of_dr_zeros_score():
    """One valid call of two queries and one response: as good as a call of one query."""
    one = dataclasses.replace(searched(queries=("Seine", "Havre")), calls=1)
    assert judge_one(one, "dr_zero", ()).format_parts["tool"] == 1.0
    assert judge_one(dataclasses.replace(one, calls=2), "dr_zero", ()).format_parts["tool"] < 1.0
