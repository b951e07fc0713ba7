"""Indexes opened by their kind: with their passages, their encoder, and what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from retrieval_server import save_bm25_index, save_exact_index

from zest_jax.errors import UserError
from zest_jax.models import load_encoder
from zest_jax.retrieval import scann_index
from zest_jax.retrieval.bm25 import BM25Retriever
from zest_jax.retrieval.index_files import read_manifest
from zest_jax.retrieval.interface import Passage, TextRetriever
from zest_jax.retrieval.open_index import add_scann, open_index, open_retriever
from zest_jax.retrieval.remote import RemoteRetriever
from zest_jax.retrieval.scann_index import ExactIndex, ScannIndex, ScannSettings

ENCODERS = Path(__file__).parent / "fixtures" / "encoders"
PASSAGES = [
    Passage(f"p{i}", title, text)
    for i, (title, text) in enumerate(
        [
            ("Paris", "The capital of France."),
            ("Lyon", "A city in France, on the Rhône."),
            ("", "A passage without a title."),
            ("Cat", "A small animal that sleeps.\nIt purrs."),
            ("Dog", "An animal that barks."),
            ("Rome", "The capital of Italy."),
            ("Ionian Sea", "Between Italy and Greece."),
            ("Pisa", "Known for a tower."),
            ("Zebra", "An animal with stripes."),
            ("Nile", "A river."),
        ]
    )
]
QUERIES = ["Which animal barks?", "capital of Italy", "", "half \ud800 a pair"]
needs_scann = pytest.mark.skipif(scann_index.import_scann() is None, reason="no scann")


@pytest.fixture
def exact(tmp_path):
    """An index whose encoder lies beside it."""
    shutil.copytree(ENCODERS / "e5", tmp_path / "encoder")
    save_exact_index(tmp_path / "index", PASSAGES, tmp_path / "encoder")
    return tmp_path / "index"


def test_bm25(tmp_path):
    save_bm25_index(tmp_path / "index", PASSAGES)
    (tmp_path / "index").rename(tmp_path / "moved")
    retriever = open_index(tmp_path / "moved")
    assert isinstance(retriever, BM25Retriever | TextRetriever) and len(retriever) == 10
    answers = retriever.search_passages(["animal barks", "Rhône", "qwerty"], 3)
    assert answers[0][0][0] == PASSAGES[4] and len(answers[0]) == 3
    assert [p for p, _ in answers[1]] == [PASSAGES[1]] and answers[2] == []


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_exact(tmp_path, dtype):
    """The same rows as numpy over the encoder's own vectors, from shards of every type."""
    vector_NE = save_exact_index(tmp_path / "index", PASSAGES, ENCODERS / "e5", dtype)
    retriever = open_index(tmp_path / "index")
    assert isinstance(retriever, TextRetriever) and isinstance(retriever._index, ExactIndex)
    assert retriever._index.index_NE.dtype == dtype
    texts = [q.replace("\ud800", "?") for q in QUERIES]
    score_BN = load_encoder(ENCODERS / "e5").encode_texts(texts, "query") @ vector_NE.T
    found = retriever.search(QUERIES, 3)
    tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    best = -np.sort(-score_BN, axis=1)[:, :3]
    np.testing.assert_allclose(found.scores, best, atol=tolerance)
    picked = np.take_along_axis(score_BN, found.rows, axis=1)
    np.testing.assert_allclose(picked, best, atol=tolerance)
    assert retriever.passages(found.rows) == [[PASSAGES[r] for r in row] for row in found.rows]
    # More than there is, and nothing asked.
    answers = retriever.search_passages(["animal"], 64)
    assert sorted(p.id for p, _ in answers[0]) == [p.id for p in PASSAGES]
    assert retriever.search([], 3).rows.shape == (0, 3)


@needs_scann
def test_scann(exact, monkeypatch, caplog):
    plain = open_index(exact).search(QUERIES, 4)
    manifest = add_scann(exact)
    assert manifest == read_manifest(exact) and manifest.kind == "scann"
    assert any(entry.file == "scann/dataset.npy" for entry in manifest.files)
    exact.rename(exact.parent / "moved")
    retriever = open_index(exact.parent / "moved")
    assert isinstance(retriever._index, ScannIndex)
    found = retriever.search(QUERIES, 4)
    np.testing.assert_allclose(found.scores, plain.scores, atol=1e-2)
    # Built anew with other settings, in its place.
    manifest = add_scann(exact.parent / "moved", ScannSettings(reorder=10))
    assert manifest.settings["scann"]["reorder"] == 10
    again = open_index(exact.parent / "moved")
    assert again._index.settings == ScannSettings(reorder=10)
    np.testing.assert_array_equal(again.search(QUERIES, 4).rows, found.rows)
    # Elsewhere its vectors serve, and the log says so.
    monkeypatch.setattr(scann_index, "import_scann", lambda: None)
    elsewhere = open_index(exact.parent / "moved")
    assert isinstance(elsewhere._index, ExactIndex) and "scann is not installed" in caplog.text
    np.testing.assert_array_equal(elsewhere.search(QUERIES, 4).rows, plain.rows)
    with pytest.raises(UserError, match="scann is not installed"):
        add_scann(exact.parent / "moved")


def test_the_encoder_has_moved(exact):
    (exact.parent / "encoder").rename(exact.parent / "elsewhere")
    with pytest.raises(UserError, match="cannot be loaded.*--encoder=FOLDER"):
        open_index(exact)
    assert len(open_index(exact, encoder=exact.parent / "elsewhere")) == 10


def test_another_encoder_is_refused_with_both_names(exact):
    for name in ("minilm", "qwen3_embedding"):
        with pytest.raises(UserError) as error:
            open_index(exact, encoder=ENCODERS / name)
        assert str(exact.parent / "encoder") in str(error.value)
        assert str(ENCODERS / name) in str(error.value)


def test_damage_is_named(exact):
    path = exact / "vectors" / "shard-00001.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(UserError, match="shard-00001.npy has .* cut short"):
        open_index(exact)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match="shard-00001.npy is damaged"):
        open_index(exact)
    open_index(exact, check=False)
    path.unlink()
    with pytest.raises(UserError, match="shard-00001.npy is missing"):
        open_index(exact)


def test_other_kinds_and_no_index(exact, tmp_path):
    with pytest.raises(UserError, match="is no index"):
        open_index(tmp_path)
    manifest = json.loads((exact / "index.json").read_text())
    (exact / "index.json").write_text(json.dumps({**manifest, "kind": "partitioned"}))
    with pytest.raises(UserError, match="no partitioned index"):
        open_index(exact)


def test_a_server_by_its_address(exact):
    with open_retriever("http://127.0.0.1:9") as remote:
        assert isinstance(remote, RemoteRetriever)
    assert isinstance(open_retriever(exact), TextRetriever)
