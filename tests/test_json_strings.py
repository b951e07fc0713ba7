"""The queries of a call: on device, on the host, and as Python's json module reads them."""

import dataclasses
import functools
import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_qwen import qwen3

from zest_jax.rollout import json_strings, stops
from zest_jax.rollout.protocols import Call, Protocol
from zest_jax.rollout.protocols.protocol import strings_of_call

CALL = Call()
OPEN, CLOSE = "<tool_call>", "</tool_call>"
ACTIONS = (("tool_call", "search"), ("answer", "answer"))
PROTOCOL = Protocol("p", "", ACTIONS, call=CALL, most_queries=3)
SLOTS, LENGTH, QUERIES = 24, 256, 3

# All bytes, some pieces that cross every border there is, and a special token.
PIECES = [
    *('{"', '":', ' "', '"}', '"]', '", "', "name", "query", "_list", "</tool", "_call>", ">{"),
    *('"\\', "}}</", '"}}', "<to", 'ol_call>{"na', "é", "search", '":"', " ab", '[""', "\\u00"),
    *('arguments": {"query": "', '"]}}</tool_call> x', "</tool_call>", "<tool_call>"),
]
TOKENS = [bytes([b]) for b in range(256)] + [p.encode() for p in PIECES] + [None]


@functools.partial(jax.jit, static_argnums=(0, 1))
def read(tables, queries, table, ids, begin, skip, end, active):
    return json_strings.read_calls(tables, table, ids, begin, skip, end, active, queries)


class Tables:
    """The automaton, hashed by identity so that it can be part of what is compiled."""

    def __init__(self, call):
        self.__dict__.update(vars(json_strings.build_tables(call, CLOSE.encode())))


TABLES = Tables(CALL)


@functools.cache
def table():
    built = stops.build_stop_table(TOKENS, [OPEN.encode()], [CLOSE.encode()], with_text=True)
    return built, jax.tree.map(jnp.asarray, built)


def split(text, rng):
    """Ids of some spelling of the bytes."""
    ids, at = [], 0
    while at < len(text):
        fits = [i for i, t in enumerate(TOKENS) if t and len(t) > 1 and text.startswith(t, at)]
        ids.append(rng.choice(fits) if fits and rng.random() < 0.7 else text[at])
        at += len(TOKENS[ids[-1]])
    return ids


def action(ids):
    """The ids up to the first closing tag, and where the content begins (token, byte)."""
    host, _ = table()
    state, begin = 0, None
    for n, i in enumerate(ids):
        if begin is None and host.opened_XV[state, i]:
            tail = int(host.open_tail_XV[state, i])
            begin = (n, len(TOKENS[i]) - tail) if tail else (n + 1, 0)
        if host.closed_XV[state, i]:
            return ids[: n + 1], begin
        state = int(host.next_XV[state, i])
    return None, None


def on_device(actions):
    """For each (ids, begin): the spans of its queries, or None."""
    ids = np.zeros((SLOTS, LENGTH), np.int32)
    begin, skip, end = (np.zeros(SLOTS, np.int32) for _ in range(3))
    for s, (row, at) in enumerate(actions):
        ids[s, : len(row)], end[s] = row, len(row)
        begin[s], skip[s] = at
    active = np.arange(SLOTS) < len(actions)
    got = jax.device_get(read(TABLES, QUERIES, table()[1], ids, begin, skip, end, active))
    assert not got.valid_S[len(actions) :].any()
    spans = []
    for s in range(len(actions)):
        count = int(got.count_S[s])
        assert bool(count) == bool(got.valid_S[s])
        assert not got.span_SU2[s, count:].any()
        spans.append([tuple(x) for x in got.span_SU2[s, :count].tolist()] if count else None)
    return spans


def check(spans, ids, tokens, spelled):
    """The spans hold every token with a byte of its query, and no other."""
    if spelled is None:
        assert spans is None
        return
    assert spans is not None and len(spans) == min(len(spelled), QUERIES)
    for (begin, end), query in zip(spans, spelled, strict=False):
        query = query.encode()
        if not query:
            assert begin == end
            continue
        before = b"".join(tokens[i] for i in ids[:begin])
        inside = b"".join(tokens[i] for i in ids[begin:end])
        whole = b"".join(tokens[i] for i in ids)
        first, last = len(tokens[ids[begin]]), len(tokens[ids[end - 1]])
        places = [
            p
            for p in range(min(first, len(inside) - len(query) + 1))
            if inside.startswith(query, p)
            and len(inside) - p - len(query) < last
            and whole[len(before) + p - 1 :][:1] == b'"'
            and whole[len(before) + p + len(query) :][:1] == b'"'
        ]
        assert places, (inside, query)


words = st.text(st.sampled_from('ab é"\\\n</>{}[],:u0\x7f😀'), max_size=6) | st.sampled_from(
    ["query", "name", "arguments", "search", "", CLOSE]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=4,
)


@st.composite
def calls(draw):
    """Something like a call, and its queries (None if it is none)."""
    name = draw(st.sampled_from(["search"] * 4 + ["find", 3]))
    key = draw(st.sampled_from(["query", "query_list"] * 3 + ["queries"]))
    queries = draw(words | st.lists(words, max_size=4) | values)
    arguments = draw(st.dictionaries(words, values, max_size=1)) | {key: queries}
    whole = {"name": name, "arguments": arguments}
    whole |= {k: v for k, v in draw(st.dictionaries(words, values, max_size=1)).items()}
    if draw(st.booleans()):
        whole = dict(reversed(whole.items()))
    text = json.dumps(
        whole,
        ensure_ascii=draw(st.booleans()),
        indent=draw(st.sampled_from([None, None, 1])),
        separators=draw(st.sampled_from([None, (",", ":")])),
    )
    return draw(st.sampled_from(["", " ", "\n"])) + text, whole


def expected(whole):
    """What the object says, without regard to how it is spelled."""
    arguments = whole["arguments"]
    if whole["name"] != "search" or not isinstance(arguments, dict):
        return None
    found = [arguments[key] for key in CALL.keys if key in arguments]
    if len(found) != 1:
        return None
    strings = [found[0]] if isinstance(found[0], str) else found[0]
    if not isinstance(strings, list) or not strings:
        return None
    return strings if all(isinstance(s, str) for s in strings) else None


@given(calls())
@settings(max_examples=150, deadline=None)
def test_the_host_reads_what_was_meant(call):
    text, whole = call
    want = expected(whole)
    got = PROTOCOL.queries(f"x{OPEN}{text}{CLOSE}y")
    if CLOSE in text:  # which ends the call in the middle of a string
        assert got is None
    else:
        assert got == (want[:3] if want else None)


@given(st.lists(st.tuples(calls(), st.integers(0, 2**32), st.integers(0, 3)), max_size=SLOTS))
@settings(max_examples=40, deadline=None)
def test_the_device_reads_what_the_host_reads(several):
    """Texts with up to three bytes changed, put in or left out, in any split into tokens."""
    actions, wanted = [], []
    for (text, _), seed, changes in several:
        rng = random.Random(seed)
        raw = bytearray(text.encode())
        for _ in range(changes):
            at = rng.randrange(len(raw))
            byte = rng.choice(b'{}[]",:\\ntu0e-. \n\x01\xff<a1')
            raw[at : at + rng.choice([0, 1])] = bytes([byte] * rng.choice([0, 1, 1]))
        ids = split(b"x" + OPEN.encode() + bytes(raw) + CLOSE.encode() + b" more", rng)
        if rng.random() < 0.05:
            ids.insert(rng.randrange(len(ids)), len(TOKENS) - 1)
        row, begin = action(ids)
        if begin is None or len(row) > LENGTH:
            continue
        # One character a byte, so that bytes that are no text are compared too.
        whole = b"".join(TOKENS[i] or b"\0" for i in row).decode("latin-1")
        content = PROTOCOL.action(whole)
        assert content is not None
        spelled = strings_of_call(content[1], CALL)
        wanted.append(spelled and [s.encode("latin-1").decode("latin-1") for s in spelled])
        actions.append((row, begin))
    tokens = [(t or b"\0").decode("latin-1").encode() for t in TOKENS]
    for spans, (row, _), spelled in zip(on_device(actions), actions, wanted, strict=True):
        check(spans, row, tokens, spelled)


@pytest.mark.parametrize(
    ("content", "want"),
    [
        ('{"name": "search", "arguments": {"query": "a b"}}', ["a b"]),
        ('{"arguments": {"query_list": ["a", "", "c", "d"]}, "name": "search"}', ["a", "", "c"]),
        ('{"name":"search","arguments":{"top":[1,{"query":"no"}],"query":"\\u00e9\\n"}}', ["é\n"]),
        ('{"name": "search", "arguments": {"query": "\\ud800"}}', ["?"]),
        ('{"name": "search", "arguments": {"query": ""}}', [""]),
        ('{"name": "look", "arguments": {"query": "a"}}', None),
        ('{"name": "search", "arguments": {"query": 3}}', None),
        ('{"name": "search", "arguments": {"query_list": []}}', None),
        ('{"name": "search", "arguments": {"query_list": ["a", 1]}}', None),
        ('{"name": "search", "arguments": {"query_list": [["a"]]}}', None),
        ('{"name": "search", "arguments": {"query_list": {"query": "a"}}}', None),
        ('{"name": "search", "arguments": {"query": "a", "query": "b"}}', None),
        ('{"name": "search", "arguments": {"query": "a", "query_list": ["b"]}}', None),
        ('{"name": "search", "name": "search", "arguments": {"query": "a"}}', None),
        ('{"n\\u0061me": "search", "arguments": {"query": "a"}}', None),
        ('{"name": "search", "query": "a"}', None),
        ('[{"name": "search", "arguments": {"query": "a"}}]', None),
        ('{"name": "search", "arguments": "query"}', None),
        ('{"name": "search", "arguments": {"query": "a"}', None),
        ('{"name": "search", "arguments": {"query": "a"}}}', None),
        ("{'name': 'search', 'arguments': {'query': 'a'}}", None),
        ('{"name": "search", "arguments": {"query": "a", "x": NaN}}', None),
        ('{"name": "search", "arguments": {"query": "a", "x": 01}}', None),
        ('{"name": "search", "arguments": {"query": "a\nb"}}', None),
        ('{"name": "search", "arguments": {"query": "a\x1fb"}}', None),
        ('{"name": "search", "arguments": {"query": "a"}} {}', None),
        ("", None),
        ("search for it", None),
    ],
)
def test_by_hand(content, want):
    text = f"{OPEN}{content}{CLOSE}"
    assert PROTOCOL.queries(text) == want
    ids, begin = action(list(text.encode()))
    (spans,) = on_device([(ids, begin)])
    assert (spans is None) == (want is None)
    loose = dataclasses.replace(PROTOCOL, call=dataclasses.replace(CALL, strict=False))
    assert loose.queries(text) == (want or [])


def test_brackets_deeper_than_it_counts_are_no_call():
    deep = '{"name": "search", "x": %s1%s, "arguments": {"query": "a"}}'
    rows = []
    for depth in (json_strings.DEPTH - 1, json_strings.DEPTH):
        rows.append(action(list((OPEN + deep % ("[" * depth, "]" * depth) + CLOSE).encode())))
    shallow, too_deep = on_device(rows)
    assert shallow and too_deep is None


def test_with_the_real_qwen3_tokenizer():
    tokenizer = qwen3()
    tokens = stops.token_bytes(tokenizer)
    text_VW, bytes_V = stops.token_text(tokens, len(tokens))
    blank = np.zeros((1, 1), np.int8)
    qwen = stops.StopTable(blank, blank, blank, blank, blank, bytes_V, text_VW)
    rng = random.Random(0)
    alphabet = [
        "Who",
        " wrote",
        " «Les",
        "é",
        "?",
        '"',
        "\\",
        "\n",
        " 1984",
        "日本",
        "😀",
        "</",
        "}",
    ]
    rows, contents = [], []
    for n in range(SLOTS):
        queries = ["".join(rng.choices(alphabet, k=rng.randrange(7))) for _ in range(1 + n % 4)]
        call = {"name": "search", "arguments": {"query_list": queries}}
        content = json.dumps(call, ensure_ascii=n % 2 == 0, indent=[None, 2][n % 3 == 0])
        if n % 5 == 4:
            content = content.replace("}", "", 1)
        contents.append(f"\n{content}\n")
        rows.append(tokenizer(f"{OPEN}\n{content}\n{CLOSE}")["input_ids"])
    ids = np.zeros((SLOTS, LENGTH), np.int32)
    for row, each in zip(ids, rows, strict=True):
        row[: len(each)] = each
    one, end = np.ones(SLOTS, np.int32), np.array([len(r) for r in rows])
    got = read(TABLES, QUERIES, qwen, ids, one, 0 * one, end, one > 0)
    for n, (row, content) in enumerate(zip(rows, contents, strict=True)):
        count = int(got.count_S[n])
        spans = [tuple(x) for x in got.span_SU2[n, :count].tolist()] if count else None
        check(spans, row, [t or b"\0" for t in tokens], strings_of_call(content, CALL))
    assert 0 < int(got.valid_S.sum()) < SLOTS
