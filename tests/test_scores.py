"""Figures of an evaluation, by hand: benchmarks, their unweighted mean, hops, several samples."""

import itertools
import math

import numpy as np
import pytest

from zest_jax import scores
from zest_jax.errors import UserError
from zest_jax.evaluation import Answered, summarise
from zest_jax.statistics import bootstrap_ci, mean_of_means_ci
from zest_jax.text import cover_exact_match, exact_match, majority, token_f1


def answered(id, em=0.0, *, set="nq", hops=0, sample=0, answer="x", **more):
    given = dict(
        id=id, question=f"{id}?", golden_answers=["gold"], hops=hops, answer=answer, em=float(em),
        f1=float(em), searches=1, valid=answer is not None, text="", queries=2, duplicates=1,
        finish="answered", well_formed=True, cover_em=float(em), tokens=100, written=20,
        benchmark=set, sample=sample,
    )  # fmt: skip
    return Answered(**given | more)


# nq: 1 of 4 right; musique: 1 of 2 right; bamboogle: its only one.
ANSWERS = [
    answered("0", 1),
    *(answered(str(n)) for n in (1, 2)),
    answered("3", answer=None, searches=4, finish="out_of_turns", duplicates=3),
    answered("0", 1, set="musique", hops=2, searches=3, tokens=300),
    answered("1", 0, set="musique", hops=3, f1=0.5, cover_em=1.0),
    answered("0", 1, set="bamboogle", hops=2),
]


def test_the_average_is_the_unweighted_mean_of_the_benchmarks():
    told = scores.score(ANSWERS, draws=100)
    assert (told["questions"], told["samples"]) == (7, 1)
    assert {n: r["count"] for n, r in told["benchmarks"].items()} == {
        "nq": 4, "musique": 2, "bamboogle": 1,
    }  # fmt: skip
    assert [r["em"] for r in told["benchmarks"].values()] == [0.25, 0.5, 1.0]
    assert told["average"]["em"] == pytest.approx((0.25 + 0.5 + 1) / 3)
    assert told["average"]["em"] != pytest.approx(3 / 7), "not the share of all questions"
    nq, musique = told["benchmarks"]["nq"], told["benchmarks"]["musique"]
    assert (nq["valid"], nq["forced_stops"], nq["searches"]) == (0.75, 0.25, 1.75)
    assert (nq["duplicate_queries"], nq["tokens"], nq["written"]) == (1.5, 100, 20)
    assert (musique["f1"], musique["cover_em"], musique["tokens"]) == (0.75, 1.0, 200)
    assert told["finish"] == {"answered": 6, "out_of_turns": 1}


def test_hops_are_told_where_the_questions_tell():
    told = scores.score(ANSWERS, draws=50)
    assert {h: (r["count"], r["em"]) for h, r in told["by_hop"].items()} == {
        "2": (2, 1.0), "3": (1, 0.0),
    }  # fmt: skip
    assert scores.score(ANSWERS[:4], draws=50)["by_hop"] == {}
    assert summarise(ANSWERS[:4], draws=50)["by_hop"] == {}
    assert list(summarise(ANSWERS, draws=50)["by_hop"]) == ["2", "3"]


def test_an_older_file_tells_less():
    old = [answered("0", 1, tokens=None, cover_em=None, answer="the gold rush"), answered("1")]
    nq = scores.score(old, draws=50)["benchmarks"]["nq"]
    assert nq["tokens"] is None and nq["cover_em"] == 0.5, "cover-EM is computed from the answer"
    mixed = scores.score([*old, answered("0", set="popqa")], draws=50)
    assert mixed["average"]["tokens"] is None and mixed["benchmarks"]["popqa"]["tokens"] == 100


def test_intervals_by_hand():
    # All questions of a set alike: nothing to draw.
    assert mean_of_means_ci([[1, 1, 1], [0, 0]], draws=100) == (0.5, 0.5)
    # Two questions, one right: the mean is 0, 1/2, 1 with 1/4, 1/2, 1/4, so 95 % is everything.
    assert mean_of_means_ci([[0, 1]], draws=4000) == (0.0, 1.0)
    # ... beside a set without spread: half of that around it.
    assert mean_of_means_ci([[0, 1], [1]], draws=4000) == (0.5, 1.0)
    # Of one set it is the bootstrap of the mean (other draws, the same distribution).
    values = np.random.default_rng(0).integers(0, 5, 400) / 4
    one, other = mean_of_means_ci([values], 20_000), bootstrap_ci(values, 20_000)
    np.testing.assert_allclose(one, other, atol=0.003)
    # Sets of the same scores are drawn apart: their mean has a standard error smaller by sqrt 2.
    width = [np.ptp(mean_of_means_ci([values] * n, 20_000)) for n in (1, 2)]
    assert width[0] / width[1] == pytest.approx(math.sqrt(2), rel=0.05)
    for wrong in ([], [[]], [[math.nan]]):
        with pytest.raises(ValueError):
            mean_of_means_ci(wrong)


def test_pass_at_k_counts_the_draws():
    for n, c in ((1, 0), (1, 1), (4, 1), (5, 2), (6, 6)):
        right = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            draws = list(itertools.combinations(right, k))
            want = sum(any(draw) for draw in draws) / len(draws)
            assert scores.pass_at_k(n, c, k) == pytest.approx(want)
    assert scores.pass_at_k(4, 1, 2) == 0.5 and scores.pass_at_k(10, 3, 1) == pytest.approx(0.3)
    for n, c, k in ((2, 3, 1), (2, 1, 3), (2, 1, 0)):
        with pytest.raises(ValueError):
            scores.pass_at_k(n, c, k)
    assert [scores.ks(n) for n in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]


def test_the_majority_votes_by_normal_form_and_ties_go_to_the_earliest():
    assert majority(["Paris", "the Seine", "seine.", None]) == "the Seine"
    assert majority(["b", "a", "A", "B."]) == "b"
    assert majority([None, None, "x"]) == "x", "no answer has no vote"
    assert majority([None, " "]) is None and majority([]) is None
    assert majority(["A", "The", "the"]) == "The", "what normalises to nothing is not one answer"


def test_several_samples_by_hand():
    def asked(id, *answers):
        return [
            answered(id, a == "gold", sample=n, answer=a, searches=n) for n, a in enumerate(answers)
        ]

    # Right: 2 of 4 (a tie that the earliest wins), 1 of 4, 0 of 4.
    answers = [
        *asked("0", "gold", "x", "gold", "x"),
        *asked("1", "x", "gold", "X!", None),
        *asked("2", "x", None, "y", "y")[::-1],
    ]
    nq = scores.score(answers, draws=100)["benchmarks"]["nq"]
    assert nq["count"] == 3 and nq["em"] == pytest.approx((2 / 4 + 1 / 4) / 3)
    assert nq["pass"]["1"] == pytest.approx(nq["em"]), "the mean over samples"
    assert nq["pass"]["2"] == pytest.approx((5 / 6 + 1 / 2 + 0) / 3)
    assert nq["pass"]["4"] == pytest.approx(2 / 3) and list(nq["pass_ci95"]) == ["1", "2", "4"]
    assert nq["majority"] == pytest.approx(1 / 3) and nq["searches"] == 1.5
    assert "pass" not in scores.score(answers[:1], draws=10)["benchmarks"]["nq"]
    with pytest.raises(UserError, match="some questions have 3 answers and some 4"):
        scores.score(answers[1:])
    with pytest.raises(UserError, match="no answer"):
        scores.score([])


def search_r1_scores(solution, golds):
    """EM and cover-EM of Search-R1's scorer, written down a second time: of the whole text, in
    which the prompt's example is the first answer; the last of two or more is scored."""
    import re
    import string

    def normal(text):
        text = "".join(c for c in text.lower() if c not in string.punctuation)
        return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())

    found = [m.strip() for m in re.findall(r"<answer>(.*?)</answer>", solution, re.DOTALL)]
    if len(found) < 2:
        return 0, 0
    given = normal(found[-1])
    keys = [normal(gold) for gold in golds]
    return int(given in keys), int(any(key in given for key in keys))


PROMPT = "For example, <answer> Beijing </answer>. Question: q?\n"
BRANCHES = [  # response, golds, EM, cover-EM, F1
    ("<answer>Beijing</answer>", ["Beijing"], 1, 1, 1.0),
    ("<think>t</think><answer> the  U.S.A. </answer>", ["usa"], 1, 1, 1.0),
    ("<answer>a</answer> then <answer>b c</answer>", ["B, C"], 1, 1, 1.0),
    ("<answer>right</answer><answer>wrong</answer>", ["right"], 0, 0, 0.0),
    ("no tag at all", ["Beijing"], 0, 0, 0.0),
    ("<answer>cut off", ["Beijing"], 0, 0, 0.0),
    ("<answer>in Berlin, Germany</answer>", ["Berlin", "Bonn"], 0, 1, 0.5),
    ("<answer>Berlin</answer>", ["in Berlin"], 0, 0, 2 / 3),
    # By characters, as the published scorers do: "in" stands in "berlin".
    ("<answer>Berlin</answer>", ["in"], 0, 1, 0.0),
    ("<answer>two\nlines</answer>", ["Two Lines"], 1, 1, 1.0),
    ("<answer>x</answer>", ["y", "X."], 1, 1, 1.0),
]


@pytest.mark.parametrize(("response", "golds", "em", "cover", "f1"), BRANCHES)
def test_every_branch_of_search_r1_s_scorer(response, golds, em, cover, f1):
    from zest_jax.text import last_tag

    assert search_r1_scores(PROMPT + response, golds) == (em, cover)
    answer = last_tag(response, "answer")
    assert exact_match(answer, golds) == em
    assert cover_exact_match(answer, golds, word_boundary=False) == cover
    assert token_f1(answer, golds) == pytest.approx(f1)
