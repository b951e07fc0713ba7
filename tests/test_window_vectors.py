"""benchmarks.window_vectors: which windows there are, and that words alone give a text's tokens."""

import json

import numpy as np
import pytest
import tokenizers

from benchmarks.window_vectors import tokenised, unpadded, windows


def test_windows_stay_within_their_text():
    # Texts of 3 and 2 words; words of 1, 2, 1 and 1, 3 tokens.
    first_W = np.array([0, 1, 3, 4, 5, 8])
    found = windows(first_W, np.array([3, 2]), [2], 3)
    assert sorted(map(tuple, found.tolist())) == [(0, 3), (1, 3), (4, 4)]
    with pytest.raises(ValueError, match="has 3 windows"):
        windows(first_W, np.array([3, 2]), [2], 4)


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
