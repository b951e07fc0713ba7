"""BM25: against the formula in plain Python, against bm25s's own indexing, and on its files."""

import math
import random
import re
from collections import Counter

import bm25s
import numpy as np
import pytest

from zest_jax.errors import UserError
from zest_jax.retrieval import bm25
from zest_jax.retrieval.interface import Passage, TextRetriever

TEXTS = [
    "The cat sat on the mat.",
    "The dog sat on the log!",
    "Cats and dogs: a cat, a dog, another cat",
    "...",
    "Straße und STRASSE",
]


def plain_scores(texts, query, k1, b):
    """The formula of the module's head, word for word."""
    documents = [re.findall(r"\w+", text.casefold()) for text in texts]
    average = sum(map(len, documents)) / len(documents)
    out = []
    for document in documents:
        score = 0.0
        for word in re.findall(r"\w+", query.casefold()):
            holders = sum(word in other for other in documents)
            times = Counter(document)[word]
            idf = math.log(1 + (len(documents) - holders + 0.5) / (holders + 0.5))
            room = k1 * (1 - b + b * len(document) / average)
            score += idf * times / (times + room) if times else 0.0
        out.append(score)
    return out


@pytest.fixture
def index(tmp_path):
    assert bm25.build(TEXTS, tmp_path / "index") == len(TEXTS)
    return bm25.open_bm25(tmp_path / "index")


def test_hand_worked(tmp_path):
    """Two passages of two and one words; "b" is in both, "a" in the first.

    idf(a) = ln(1 + 1.5 / 1.5) = ln 2, avg = 1.5; with k1 = 1 and b = 0 the score of one occurrence
    is idf / 2.
    """
    bm25.build(["a b", "b"], tmp_path / "index", k1=1.0, b=0.0)
    found = bm25.open_bm25(tmp_path / "index").search(["a"], 2)
    assert found.rows.tolist() == [[0, -1]]
    assert found.scores[0, 0] == pytest.approx(math.log(2) / 2)
    assert found.scores[0, 1] == -np.inf


@pytest.mark.parametrize(("k1", "b"), [(0.9, 0.4), (1.5, 0.75), (0.0, 1.0)])
def test_equals_the_formula(tmp_path, monkeypatch, k1, b):
    """Over random texts, in blocks so small that words spread over many of them."""
    monkeypatch.setattr(bm25, "_BLOCK", 64)
    rng = random.Random(0)
    vocabulary = [f"w{i}" for i in range(40)]
    weights = [1 / (i + 1) for i in range(40)]
    texts = [" ".join(rng.choices(vocabulary, weights, k=rng.randrange(1, 30))) for _ in range(80)]
    queries = [" ".join(rng.choices(vocabulary, k=rng.randrange(1, 6))) for _ in range(20)]
    queries.append("w1 w1 w3")  # a word twice counts twice
    bm25.build(iter(texts), tmp_path / "index", k1=k1, b=b)
    retriever = bm25.open_bm25(tmp_path / "index")
    assert (retriever.k1, retriever.b, len(retriever)) == (k1, b, 80)
    found = retriever.search(queries, 7)
    for rows, scores, query in zip(found.rows, found.scores, queries, strict=True):
        expected = np.array(plain_scores(texts, query, k1, b))
        best = [row for row in np.argsort(-expected, kind="stable")[:7] if expected[row] > 0]
        np.testing.assert_allclose(scores[: len(best)], expected[best], rtol=1e-5)
        np.testing.assert_allclose(expected[rows[: len(best)]], expected[best], rtol=1e-5)
        assert (rows[len(best) :] == -1).all()


def test_equals_what_bm25s_builds(index):
    theirs = bm25s.BM25(k1=bm25.K1, b=bm25.B, method="lucene")
    theirs.index([bm25.words(text) for text in TEXTS], show_progress=False)
    for query in ("cat", "dog sat", "strasse", "the mat on"):
        expected = theirs.get_scores(bm25.words(query))
        found = index.search([query], len(TEXTS))
        hits = int((expected > 0).sum())
        np.testing.assert_allclose(found.scores[0, :hits], expected[found.rows[0, :hits]], 1e-6)
        assert (np.delete(expected, found.rows[0, :hits]) == 0).all()


def test_empty_unknown_and_wide_queries(index):
    found = index.search(["", "?!", "unheardof", "cat \ud800"], 9)
    assert found.rows.dtype == np.int32 and found.scores.dtype == np.float32
    assert (found.rows[:3] == -1).all() and (found.scores[:3] == -np.inf).all()
    assert sorted(found.rows[3, :2].tolist()) == [0, 2] and (found.rows[3, 2:] == -1).all()
    assert index.search([], 3).rows.shape == (0, 3)


def test_ties_go_to_the_lower_row(tmp_path):
    bm25.build(["x y"] * 50, tmp_path / "index")
    assert bm25.open_bm25(tmp_path / "index").search(["y"], 4).rows.tolist() == [[0, 1, 2, 3]]


def test_words():
    assert bm25.words("Vitamin C, the ﬁrst!") == ["vitamin", "c", "the", "first"]
    assert bm25.words("STRASSE") == bm25.words("straße")
    assert bm25.words("北京 is Beijing") == ["北", "京", "is", "beijing"]
    assert bm25.words("the Cat", frozenset({"the"})) == ["cat"]


def test_stopwords_are_stored(tmp_path):
    bm25.build(["the cat", "the dog"], tmp_path / "index", stopwords=["The"])
    assert (bm25.open_bm25(tmp_path / "index").search(["THE"], 2).rows == -1).all()


def test_passages_and_scores(tmp_path):
    corpus = [Passage(str(i), f"t{i}", text) for i, text in enumerate(TEXTS)]
    bm25.build((p.text for p in corpus), tmp_path / "index")
    retriever = bm25.open_bm25(tmp_path / "index", corpus)
    assert isinstance(retriever, TextRetriever)
    first, nothing = retriever.search_passages(["another cat", "zebra"], 2)
    assert [p.id for p, _ in first] == ["2", "0"] and nothing == []
    assert first[0][1] > first[1][1] > 0
    with pytest.raises(UserError, match="without its passages"):
        bm25.open_bm25(tmp_path / "index").search_passages(["cat"], 1)
    with pytest.raises(UserError, match="indexes 5 passages, but the corpus beside it has 4"):
        bm25.open_bm25(tmp_path / "index", corpus[:4])


def test_a_moved_folder_loads_mapped(tmp_path):
    bm25.build(TEXTS, tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "two")
    retriever = bm25.open_bm25(tmp_path / "two")
    assert retriever.search(["log"], 1).rows.tolist() == [[1]]
    assert isinstance(retriever._index.scores["data"], np.memmap)


def test_mistakes(tmp_path):
    with pytest.raises(UserError, match="no BM25 index"):
        bm25.open_bm25(tmp_path)
    with pytest.raises(UserError, match="no text with a word"):
        bm25.build(["", "..."], tmp_path / "index")
    with pytest.raises(UserError, match="b=2"):
        bm25.build(["a"], tmp_path / "index", b=2)

    def broken():
        yield "a"
        raise RuntimeError("the corpus ends in the middle")

    with pytest.raises(RuntimeError):
        bm25.build(broken(), tmp_path / "index")
    assert list(tmp_path.iterdir()) == []  # nothing half written stays
    bm25.build(["a"], tmp_path / "index")
    with pytest.raises(UserError, match="exists already"):
        bm25.build(["a"], tmp_path / "index")
    for name in ("data.csc.index.npy", "vocab.index.json"):
        path = tmp_path / "index" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-2])
        with pytest.raises(UserError, match="damaged"):
            bm25.open_bm25(tmp_path / "index")
        path.write_bytes(whole)
