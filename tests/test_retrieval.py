"""Retrieval: exact search against numpy, the bag encoder's numbers, and observations by hand."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from zest_jax.errors import UserError
from zest_jax.models import load_encoder
from zest_jax.retrieval import BagEncoder, PassageStore, Retriever, exact_search, splice
from zest_jax.retrieval.encoders import TokenEncoder, pad_ragged
from zest_jax.retrieval.layout import Frame, Layout
from zest_jax.rollout.protocols import PLAIN_SEARCH, PROTOCOLS, SEARCH, SEARCH_R1
from zest_jax.tasks.atlas import load_atlas

# ------------------------------------------------------------------------------- exact search


def by_numpy(index, queries, retrieved):
    """Best first; of equal scores the lower row first."""
    scores = queries @ index.T
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :retrieved]
    return rows, np.take_along_axis(scores, rows, axis=1)


@pytest.mark.parametrize(
    ("passages", "chunk", "retrieved"),
    [(12, 12, 3), (12, 100, 12), (12, 4, 3), (13, 4, 3), (13, 2, 5), (9, 8, 9), (5, 1, 2)],
)
def test_exact_search_is_numpys_ranking_for_every_chunk(passages, chunk, retrieved):
    rng = np.random.default_rng(passages + chunk)
    # Small whole numbers: scores are exact, all negative for some queries, and full of ties.
    index = rng.integers(-2, 3, (passages, 4)).astype(np.float32)
    queries = np.concatenate([rng.integers(-2, 3, (6, 4)), np.zeros((1, 4))]).astype(np.float32)
    index[:, 3] = 2.0
    queries[:3, 3] = -9.0
    rows, scores = exact_search(jnp.asarray(index), jnp.asarray(queries), retrieved, chunk)
    want_rows, want_scores = by_numpy(index, queries, retrieved)
    assert len(np.unique(want_scores)) < want_scores.size, "there should be ties"
    assert rows.dtype == jnp.int32
    np.testing.assert_array_equal(rows, want_rows)
    np.testing.assert_array_equal(scores, want_scores)


def test_scores_of_a_half_precision_index_are_float32():
    index = jnp.asarray([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], jnp.bfloat16)
    rows, scores = exact_search(index, jnp.asarray([[1.0, 2**-9]]), 3, chunk=2)
    assert scores.dtype == jnp.float32
    assert rows.tolist() == [[2, 0, 1]]
    assert scores.tolist() == [[1 + 2**-9, 1.0, 2**-9]]  # bfloat16 would make two of them equal


def test_more_than_there_is_cannot_be_asked_for():
    with pytest.raises(ValueError, match="4 passages asked for, the index has 3"):
        exact_search(jnp.zeros((3, 2)), jnp.zeros((1, 2)), 4)


# ------------------------------------------------------------------------------- bag encoder


def test_idf_and_unit_vectors_by_hand():
    encoder = BagEncoder.fit([[1, 2, 2], [1, 3]], vocab_size=5)
    # df 0, 2, 1, 1, 0 of 2 texts; a token in every text says nothing.
    idf = np.log(3 / np.array([1.0, 3.0, 2.0, 2.0, 1.0]))
    np.testing.assert_allclose(encoder.table_VE, np.diag(idf), rtol=1e-6)
    ids = np.array([[1, 2, 9, 9], [2, 4, 0, 3], [2, 2, 4, 0], [3, 3, 3, 3]]) % 5
    got = np.asarray(encoder.encode(ids, np.array([2, 2, 3, 0])))
    a, b = np.log(1.5), np.log(3)
    want = np.zeros((4, 5))
    want[0, 2] = 1
    want[1, [2, 4]] = np.array([a, b]) / np.hypot(a, b)
    want[2, [2, 4]] = np.array([2 * a, b]) / np.hypot(2 * a, b)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_the_score_is_the_titles_cosine_and_a_share_of_the_texts():
    encoder = BagEncoder.fit([[1, 2], [3, 4], [5]], vocab_size=6, text_weight=0.25)
    index = encoder.encode_passages([[1], [3], [5]], [[2, 3], [4], [1]])
    query = encoder.encode_queries(np.array([[1, 0]]), np.array([1]))
    # Token 1 is the title of the first passage and the text of the third.
    np.testing.assert_allclose(query @ index.T, [[1.0, 0.0, 0.25]], atol=1e-6)


def test_passages_are_encoded_the_same_in_batches_of_any_size():
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 30, rng.integers(1, 9)).tolist() for _ in range(7)]
    encoder = BagEncoder.fit(texts, vocab_size=30)
    whole = encoder.encode_passages(texts[::-1], texts)
    np.testing.assert_allclose(
        encoder.encode_passages(texts[::-1], texts, batch=3), whole, atol=1e-6
    )


def test_a_random_projection_keeps_cosines():
    texts = [[1, 2], [3, 4], [5, 6], [7, 8], [1, 8]]
    exact = BagEncoder.fit(texts, vocab_size=9)
    rough = BagEncoder.fit(texts, vocab_size=9, dimension=20_000, seed=1)
    assert rough.table_VE.shape == (9, 20_000)
    ids, length = pad_ragged(texts)
    assert ids.tolist()[4] == [1, 8] and length.tolist() == [2] * 5
    u, v = exact.encode(ids, length), rough.encode(ids, length)
    np.testing.assert_allclose(v @ v.T, u @ u.T, atol=0.03)
    again = BagEncoder.fit(texts, vocab_size=9, dimension=20_000, seed=1)
    assert np.array_equal(again.table_VE, rough.table_VE)


def test_names_find_their_own_passages_in_the_shipped_world():
    atlas = load_atlas()
    words = transformers.AutoTokenizer.from_pretrained(str(atlas.tokenizer_folder))
    retriever = Retriever.build(
        words,
        [p.title for p in atlas.passages],
        [p.text for p in atlas.passages],
        layout=PLAIN_SEARCH.layout,
        retrieved=3,
        observation_length=200,
    )
    asked = words([f" {p.title}" for p in atlas.passages], add_special_tokens=False)["input_ids"]
    ids, length = pad_ragged(asked)
    rows, scores = jax.jit(retriever.search)(ids[:, None], length[:, None])
    assert rows.shape == scores.shape == (len(atlas.passages), 1, 3)
    assert np.mean(np.asarray(rows)[:, 0, 0] == np.arange(len(rows))) >= 0.98
    assert (np.diff(np.asarray(scores), axis=2) <= 0).all()


# ------------------------------------------------------------------------------- observations


def test_splice_by_hand():
    pieces = np.array([[[7, 8, 5], [9, 5, 5]], [[5, 5, 5], [1, 2, 3]]])
    ids, length = splice(pieces, np.array([[2, 1], [0, 3]]), size=5)
    assert ids.tolist() == [[7, 8, 9, 0, 0], [1, 2, 3, 0, 0]]
    assert length.tolist() == [3, 3]
    ids, length = splice(pieces, np.array([[3, 3], [0, 0]]), size=4)  # what does not fit is cut
    assert ids.tolist() == [[7, 8, 5, 9], [0, 0, 0, 0]]
    assert length.tolist() == [4, 0]


jitted_splice = jax.jit(splice, static_argnums=2)


@given(
    st.lists(st.lists(st.integers(1, 99), max_size=4), min_size=3, max_size=3),
    st.sampled_from([1, 7, 14]),
)
@settings(max_examples=60, deadline=None)
def test_splice_is_concatenation(pieces, size):
    ids, length = pad_ragged(pieces, width=4)
    got, got_length = jitted_splice(ids[None], length[None], size)
    want = sum(pieces, [])[:size]
    assert got_length.tolist() == [len(want)]
    assert got[0].tolist() == want + [0] * (size - len(want))


def test_passages_are_cut_so_that_their_frame_fits():
    passages = [[1, 2, 3], [4], list(range(20, 40))]
    frame = Frame(starts=[[10]], heads=[[11], [12]], ending=[13], closing=[])
    store = PassageStore.build(passages, frame, size=20)
    # 20 tokens less 3 before passages and 1 after leave 8 to each of two.
    assert store.length_N.tolist() == [3, 1, 8]
    assert store.ids_NP[2].tolist() == list(range(20, 28))
    got, lengths = store.observe(jnp.array([[[1, 0]], [[2, 2]]]))
    cut = list(range(20, 28))
    assert got[0].tolist() == [10, 11, 4, 12, 1, 2, 3, 13] + [0] * 12
    assert got[1].tolist() == [10, 11, *cut, 12, *cut, 13]
    assert lengths.tolist() == [8, 20]
    with pytest.raises(UserError, match="leaves 7 to each of 2 passages; raise observation_length"):
        PassageStore.build(passages, frame, size=19)


def test_several_queries_are_shown_one_after_another_and_the_missing_are_not():
    frame = Frame(starts=[[10], [20]], heads=[[11], [12]], ending=[13], closing=[14])
    store = PassageStore.build([[1, 2], [3]], frame, size=60)
    rows = jnp.array([[[0, 1], [1, 0]], [[0, -1], [-1, -1]], [[1, 0], [1, 0]], [[-1, -1]] * 2])
    ids, length = store.observe(rows, jnp.array([2, 2, 1, 0]))
    first = [10, 11, 1, 2, 12, 3, 13]
    want = [
        [*first, 20, 11, 3, 12, 1, 2, 13, 14],
        [10, 11, 1, 2, 13, 20, 13, 14],  # a query that found nothing is shown as such
        [10, 11, 3, 12, 1, 2, 13, 14],
        [10, 13, 14],
    ]
    assert [row[:n].tolist() for row, n in zip(ids, length, strict=True)] == want


def test_frames_of_the_protocols():
    def same(texts):
        return texts

    assert PLAIN_SEARCH.layout.frame(same, 1, 2) == Frame(
        ["<information>"], ["", ""], "</information>", ""
    )
    assert SEARCH_R1.layout.frame(same, 1, 3) == Frame(
        ["\n\n<information>"],
        ["Doc 1(Title: ", "Doc 2(Title: ", "Doc 3(Title: "],
        "</information>\n\n",
        "",
    )
    assert PLAIN_SEARCH.layout.body == " {title}: {text}"
    assert SEARCH_R1.layout.body == "{title}) {text}\n"
    with pytest.raises(ValueError, match="before {title}"):
        Layout(passage="{title} {rank}").frame(same, 1, 1)


@pytest.mark.parametrize(
    "protocol", [p for p in PROTOCOLS.values() if p.kind(SEARCH)], ids=lambda p: p.name
)
def test_what_the_rollout_shows_is_what_the_protocol_says(protocol):
    words = tiny.tokenizer()
    titles, texts = ["ab", "c {d}", "ef"], ["one two", "x", "the {text}"]
    retriever = Retriever.build(
        words,
        titles,
        texts,
        layout=protocol.layout,
        retrieved=2,
        observation_length=500,
        queries=protocol.most_queries,
    )
    U = protocol.most_queries
    rows = np.full((2, U, 2), -1)
    rows[:, :2] = [[[1, 2], [2, 0]][:U], [[2, -1], [-1, -1]][:U]]
    asked = np.array([min(U, 2), 1])
    ids, length = retriever.observe(rows, asked)
    for row, n, found, count in zip(ids, length, rows, asked, strict=True):
        results = [[(titles[i], texts[i]) for i in each if i >= 0] for each in found[:count]]
        assert words.decode(row[:n]) == protocol.show_results(results)
        if count == 1:
            assert protocol.show_results(results) == protocol.show(results[0])


def test_a_special_token_spelled_out_in_a_passage_is_text():
    words = tiny.tokenizer()
    retriever = Retriever.build(
        words,
        ["ab"],
        ["c<|endoftext|>d"],
        layout=PLAIN_SEARCH.layout,
        retrieved=1,
        observation_length=60,
    )
    ids, length = retriever.observe(np.zeros((1, 1, 1), int))
    shown = ids[0, : int(length[0])].tolist()
    assert words.eos_token_id not in shown
    assert words.decode(shown) == "<information> ab: c<|endoftext|>d</information>"
    assert words("<|endoftext|>")["input_ids"] == [words.eos_token_id], "and it stays one elsewhere"


def test_a_table_of_a_real_vocabulary_squared_is_refused():
    with pytest.raises(UserError, match=r"151,936 tokens, a table of 86 GiB; set retrieval.dim"):
        BagEncoder.fit([[1, 2]], 151_936)


def test_an_encoder_of_the_policys_family_reads_the_ids_that_were_sampled():
    encoder = load_encoder(Path(__file__).parent / "fixtures" / "encoders" / "qwen3_embedding")
    got = TokenEncoder.build(encoder, encoder.tokenizer)
    assert encoder.query_prefix and len(got.before_X) > 3 and len(got.after_Y) == 1
    texts = [" the capital of France", " a", " whose river?"]
    ids = encoder.tokenizer(texts, add_special_tokens=False)["input_ids"]
    padded_SQ, length_S = pad_ragged([*ids, []])
    vectors_SE = jax.jit(TokenEncoder.encode_queries)(
        got, padded_SQ + 3 * (padded_SQ == 0), length_S
    )
    np.testing.assert_allclose(vectors_SE[:3], encoder.encode_texts(texts, "query"), atol=1e-5)
    assert not np.asarray(vectors_SE[3]).any()
    with pytest.raises(UserError, match="other ids than the policy writes"):
        TokenEncoder.build(encoder, tiny.tokenizer())
