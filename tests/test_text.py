"""Answer normalisation, matching and tags: values worked by hand."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zest_jax import text


@pytest.mark.parametrize(
    ("raw", "normal"),
    [
        ("The  Beatles!", "beatles"),
        ("U.S.A.", "usa"),
        ("a cat, an owl and the dog", "cat owl and dog"),
        ("Theatre", "theatre"),  # an article only as a whole word
        ("O'Neill-Smith", "oneillsmith"),
        ("\tSeine\n", "seine"),
        ("the", ""),
    ],
)
def test_normalize_answer(raw, normal):
    assert text.normalize_answer(raw) == normal


@given(st.text(alphabet=string.printable, max_size=40))
def test_normalising_leaves_no_case_punctuation_or_outer_space(raw):
    normal = text.normalize_answer(raw)
    assert normal == normal.lower() == " ".join(normal.split())
    assert not set(normal) & set(string.punctuation)
    assert not {"a", "an", "the"} & set(normal.split())


def test_exact_match():
    assert text.exact_match(" The Seine.", ["Rhone", "seine"])
    assert not text.exact_match("river Seine", ["Seine"])
    assert not text.exact_match(None, ["Seine"])
    assert not text.exact_match("Seine", [])


def test_exact_match_never_pays_for_nothing():
    assert not text.exact_match("", [""])
    assert not text.exact_match("the", ["A"])
    assert not text.exact_match("  ", ["A"])
    assert text.exact_match("a", ["A"])


def test_token_f1():
    # words {river, seine}: P 1/2, R 1/1 -> 2/3
    assert text.token_f1("the river Seine", ["Seine"]) == pytest.approx(2 / 3)
    # P 2/3, R 2/4 -> 2 * 2 / 7; the better gold counts
    assert text.token_f1("x y z", ["x y q r", "q"]) == pytest.approx(4 / 7)
    # multiplicity: shared 1 of 2 and of 1 -> 2/3
    assert text.token_f1("b b", ["b"]) == pytest.approx(2 / 3)
    assert text.token_f1("Seine", ["seine"]) == 1.0
    assert text.token_f1(None, ["seine"]) == text.token_f1("", [""]) == 0.0


def test_cover_exact_match():
    assert text.cover_exact_match("It is the Seine, I think", ["Seine"])
    assert not text.cover_exact_match("Berlin", ["in"])
    assert text.cover_exact_match("Berlin", ["in"], word_boundary=False)
    assert not text.cover_exact_match("Berlin", ["the"], word_boundary=False)
    assert not text.cover_exact_match(None, ["Seine"])


def test_contains_answer():
    assert text.contains_answer("Paris: a city on the Seine.", "The Seine")
    assert not text.contains_answer("Parisian life", "Paris")
    assert text.contains_answer("in New York City", "new york")
    assert not text.contains_answer("anything", "the")
    assert text.contains_any("of Paris", ["Lyon", "Paris"])
    assert not text.contains_any("of Paris", [])


def test_tags():
    sample = "<answer> Rhone </answer> no <search> x\ny</search><answer></answer><answer>open"
    assert text.tags(sample, "answer") == ["Rhone", ""]
    assert text.last_tag(sample, "answer") == ""
    assert text.tags(sample, "search") == ["x\ny"]
    assert text.last_tag(sample, "think") is None
    assert text.last_tag("<answer> a <answer> Seine</answer>", "answer") == "a <answer> Seine"
