"""Token -> bytes tables and stop tables, against decoding and regular expressions in Python."""

import re
from pathlib import Path

import numpy as np
import pytest
import tiny
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from real_qwen import qwen3
from tokenizers.normalizers import NFC

import zest_jax
from zest_jax.errors import UserError
from zest_jax.rollout.stops import NONE, build_stop_table, token_bytes

ATLAS = Path(zest_jax.__file__).parent / "assets" / "atlas" / "tokenizer"
OPENING = [b"<search>", b"<answer>"]
CLOSING = [b"</search>", b"</answer>"]
# Pieces that are encoded one by one and joined: ids that no encoder would give for the whole text.
PIECES = [
    *("<search>", "</search>", "<answer>", "</answer>", "</information>", "<think>"),
    *("<", "</", "<sea", "rch>", "</sea", "</answer", ">", "></search", "<</answer>", ">.\n"),
    *(
        " France",
        " capital of",
        "naïve",
        "e\u0301",
        "東京",
        "🜚",
        "\x00",
        " ",
        "\n\n",
        "<|endoftext|>",
    ),
]


def load(name):
    if name == "qwen3":
        return qwen3()
    if name == "atlas":
        return transformers.AutoTokenizer.from_pretrained(ATLAS)
    return tiny.tokenizer(tags_as_tokens=name == "tiny")


@pytest.fixture(scope="module", params=["atlas", "tiny", "tiny split", "qwen3"])
def tokenizer(request):
    return load(request.param)


def reference(tokens, opening, closing, ids):
    """What each token does, by searching the joined bytes: (opened, tail, closed, span)."""
    text, out = b"", []
    for i in ids:
        token = tokens[i] if i < len(tokens) else None
        if not token:  # a special token: what came before it is no part of any later tag
            text = b""
            out.append((NONE, 0, NONE, 0))
            continue
        start, text = len(text), text + token

        def ends(tags, start=start, text=text):
            """(end, kind) of all tags that end in this token; the longest where several do."""
            found = {}
            for kind in sorted(range(len(tags)), key=lambda k: len(tags[k])):
                for m in re.finditer(b"(?=%s)" % re.escape(tags[kind]), text):
                    found[m.start() + len(tags[kind])] = kind + 1
            return sorted((end, kind) for end, kind in found.items() if end > start)

        closes = ends(closing)
        close_end, closed = closes[0] if closes else (len(text) + 1, NONE)
        opens = [(end, kind) for end, kind in ends(opening) if end <= close_end]
        open_end, opened = opens[-1] if opens else (len(text), NONE)
        span = len(text) - close_end + len(closing[closed - 1]) if closed else 0
        out.append((opened, len(text) - open_end, closed, span))
    return out


def through_table(table, ids):
    state, out = 0, []
    for i in ids:
        columns = (table.opened_XV, table.open_tail_XV, table.closed_XV, table.close_span_XV)
        out.append(tuple(int(c[state, i]) for c in columns))
        state = table.next_XV[state, i]
    return out


# ------------------------------------------------------------------------------- token -> bytes


def test_every_token_has_the_bytes_that_the_decoder_gives_it(tokenizer):
    tokens = token_bytes(tokenizer)
    assert len(tokens) == len(tokenizer)
    special = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    assert special >= set(tokenizer.all_special_ids)
    for i, token in enumerate(tokens):
        if i in special:
            assert token is None
            continue
        assert token, tokenizer.convert_ids_to_tokens(i)
        # A part of a character decodes to replacement signs; whole characters decode to themselves.
        assert tokenizer.decode([i]) == token.decode(errors="replace")


def test_every_single_byte_is_a_token(tokenizer):
    tokens = token_bytes(tokenizer)
    assert {bytes([b]) for b in range(256)} <= {t for t in tokens if t}


@given(st.text(max_size=30))
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("name", ["atlas", "tiny", "tiny split"])
def test_joined_bytes_are_the_normalised_text(name, text):
    tokenizer = load(name)
    tokens = token_bytes(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not set(ids) & set(tokenizer.all_special_ids):
        joined = b"".join(tokens[i] for i in ids)
        # (Python's own NFC may know an older Unicode than the tokenizer's.)
        assert joined == NFC().normalize_str(text).encode()


def test_unfinished_characters_keep_their_bytes(tokenizer):
    tokens = token_bytes(tokenizer)
    ids = tokenizer.encode("🜚</search>", add_special_tokens=False)
    # The emoji is four bytes; cut after each of them, what stands is a prefix of its UTF-8.
    whole = "🜚".encode()
    head = b""
    for i in ids:
        head += tokens[i]
        if len(head) <= 4:
            assert whole.startswith(head)
    # Stop detection does not care that the character before the tag was never finished.
    cut = [next(i for i, t in enumerate(tokens) if t == bytes([b])) for b in whole[:2]]
    tail = tokenizer.encode("</search>", add_special_tokens=False)
    table = build_stop_table(tokens, OPENING, CLOSING)
    assert [step[2] for step in through_table(table, cut + tail)][-1] == 1


def test_the_real_qwen3_tokenizer_is_the_published_one():
    tokenizer = qwen3()
    assert len(tokenizer) == 151_669
    # Ids as anyone's Qwen2.5 or Qwen3 gives them.
    for text, ids in {
        "<search>": [27, 1836, 29],
        "</search>": [522, 1836, 29],
        "<answer>": [27, 9217, 29],
        "<information>": [27, 25069, 29],
        "<|im_end|>": [151_645],
        "</think>": [151_668],
    }.items():
        assert tokenizer.encode(text, add_special_tokens=False) == ids
    tokens = token_bytes(tokenizer)
    assert tokens[151_645] is None and tokens[151_668] == b"</think>"


def test_ids_that_a_vocabulary_leaves_out_have_no_bytes():
    import tokenizers

    model = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 3}, []))
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=model)
    assert token_bytes(wrapped) == [b"a", None, None, b"b"]


def test_a_tokenizer_without_bytes_is_refused():
    import tokenizers

    model = tokenizers.Tokenizer(
        tokenizers.models.BPE({"▁x": 0, "<unk>": 1}, [], unk_token="<unk>")
    )
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>")
    with pytest.raises(UserError, match="not byte-level"):
        token_bytes(wrapped)


# ----------------------------------------------------------------------------------- stop tables


def test_stop_tables_agree_with_regular_expressions(tokenizer):
    tokens = token_bytes(tokenizer)
    table = build_stop_table(tokens, OPENING, CLOSING, vocab_size=len(tokens) + 5)
    pieces = [tokenizer.encode(p, add_special_tokens=False) for p in PIECES]
    pieces.append([len(tokens) + 2])  # a row of a padded head that no token has
    rng = np.random.default_rng(0)
    closed = 0
    for _ in range(150):
        ids = [i for p in rng.integers(0, len(pieces), 12) for i in pieces[p]]
        want = reference(tokens, OPENING, CLOSING, ids)
        assert through_table(table, ids) == want, tokenizer.decode(ids)
        closed += sum(step[2] != NONE for step in want)
    assert closed > 100
    assert all(table.bytes_V[i] == len(t or b"") for i, t in enumerate(tokens))


def test_tags_within_longer_tokens():
    # As in Qwen's vocabulary: "></" and "</" are tokens, ">." swallows the end of a tag.
    tokens = [b"</", b"search", b">", b"></", b">.\n", b"<search", b"><search>x</search>y", b"a"]
    table = build_stop_table(tokens, OPENING, CLOSING)
    # "<search" ">." opens, ">.\n" leaves two bytes behind the tag.
    assert through_table(table, [5, 4]) == [(0, 0, 0, 0), (1, 2, 0, 0)]
    # "</" "search" "></": closed, the span reaches from "<" to the token's end: 9 + 2 bytes.
    assert through_table(table, [0, 1, 3])[-1] == (0, 0, 1, 11)
    # … and the "</" that it left behind begins the next tag.
    assert through_table(table, [0, 1, 3, 1, 2])[-1] == (0, 0, 1, 9)
    # Opened and closed in one token: ten bytes after the opening tag, ten from "<" of the closing.
    assert through_table(table, [6])[-1] == (1, 11, 1, 10)


letters = st.sampled_from([b"<", b"/", b"a", b"b", b">"])
words = st.lists(letters, min_size=1, max_size=5).map(b"".join)


@given(
    tokens=st.lists(st.one_of(words, words, words, st.none()), min_size=1, max_size=8),
    opening=st.lists(words, min_size=1, max_size=3, unique=True),
    closing=st.lists(words, min_size=1, max_size=3, unique=True),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_any_tags_over_any_tokens(tokens, opening, closing, data):
    ids = data.draw(st.lists(st.integers(0, len(tokens) - 1), max_size=12))
    table = build_stop_table(tokens, opening, closing)
    assert through_table(table, ids) == reference(tokens, opening, closing, ids)
