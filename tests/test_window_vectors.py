"""benchmarks.window_vectors: which windows there are, and that words alone give a text's tokens."""

import json

import numpy as np
import pytest
import tokenizers

from benchmarks.retrieval import _recall, _truth, vectors_of
from benchmarks.window_vectors import tokenised, unpadded, windows


def test_windows_stay_within_their_text():
    # Texts of 3 and 2 words; words of 1, 2, 1 and 1, 3 tokens.
    first_W = np.array([0, 1, 3, 4, 5, 8])
    found = windows(first_W, np.array([3, 2]), [2], 3)
    assert sorted(map(tuple, found.tolist())) == [(0, 3), (1, 3), (4, 4)]
    with pytest.raises(ValueError, match="has 3 windows"):
        windows(first_W, np.array([3, 2]), [2], 4)


def test_queries_of_a_file_are_drawn_from_all_of_it_and_left_out(tmp_path):
    N = 3072
    angle_N = 2 * np.pi * np.arange(N) / N  # every vector another direction, in order
    np.save(tmp_path / "v.npy", 3 * np.stack([np.cos(angle_N), np.sin(angle_N)], 1))
    case = {"file": str(tmp_path / "v.npy"), "vectors": N - 1024, "truth": str(tmp_path / "t.npy")}
    vector_NE, query_BE = vectors_of(case)
    rows = [
        np.round(np.arctan2(x[:, 1], x[:, 0]) * N / (2 * np.pi)) % N for x in (vector_NE, query_BE)
    ]
    assert sorted(np.concatenate(rows).tolist()) == list(range(N))
    assert np.allclose(np.linalg.norm(vector_NE, axis=1), 1, atol=1e-6)
    # Were they the first rows, all would lie in the first third.
    assert np.histogram(rows[1], 3, (0, N))[0].min() > 250
    truth = _truth(case, vector_NE, query_BE)
    by_hand = np.argsort(-(query_BE[:512].astype(float) @ vector_NE.T.astype(float)), axis=1)
    assert _recall(truth, by_hand, 1) > 0.8  # two neighbours may be equally near
    assert _recall(truth, by_hand, 10) > 0.98


def test_words_apart_are_tokenised_as_in_their_text(tmp_path):
    pieces = ["[UNK]", "the", "river", "##s", "of", "spain", ",", "ebro"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.enable_padding(length=40)
    tokenizer.enable_truncation(2)
    path = tmp_path / "corpus.jsonl"
    rows = [{"title": "Rivers", "text": "of Spain, the Ebro"}, {"title": "Ebro", "text": "river"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = unpadded(tokenizer)
    token_T, first_W, words_D = tokenised(str(path), plain)
    assert words_D.tolist() == [5, 2]
    whole = [plain.encode(f"{row['title']} {row['text']}").ids for row in rows]
    assert token_T.tolist() == whole[0] + whole[1] == [2, 3, 4, 5, 6, 1, 7, 7, 2]
    assert first_W.tolist() == [0, 2, 3, 5, 6, 7, 8, 9]
