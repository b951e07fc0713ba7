"""Stored passages: texts and token ids by row."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pytest
import transformers
from test_corpora import LOOSE, lines, wiki

from zest_jax.errors import UserError
from zest_jax.retrieval import passages as module
from zest_jax.retrieval.corpora import open_corpus
from zest_jax.retrieval.interface import Passage
from zest_jax.retrieval.layout import Frame
from zest_jax.retrieval.passages import (
    PassageTexts,
    TokenisedPassages,
    store_passages,
    tokenise,
    tokenizer_card,
    tokens_key,
    write_passages,
)
from zest_jax.retrieval.store import HostPassageStore, PassageStore

PASSAGES = [
    Passage("a", "Évariste", "Born in 1811.\nDied young."),
    Passage("b", "", "no title"),
    Passage("ü", "only title", ""),
    Passage("d", "emoji 😀", "text " * 50),
]


@pytest.fixture(scope="module")
def tokenizers():
    folder = os.path.join(os.path.dirname(__file__), "fixtures", "encoders")
    return [
        transformers.AutoTokenizer.from_pretrained(os.path.join(folder, name))
        for name in ("qwen3_embedding", "e5")
    ]


def files_of(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


# ---------------------------------------------------------------------------------------- texts


def test_texts_come_back_by_row(tmp_path):
    store_passages(PASSAGES, tmp_path / "p")
    store = PassageTexts(tmp_path / "p")
    assert len(store) == 4
    assert [store[i] for i in range(4)] == list(store) == store[:] == PASSAGES
    assert store[1:3] == PASSAGES[1:3] and store[-1] == PASSAGES[3] and store[::2] == PASSAGES[::2]
    assert store[2:2] == [] and store[9:] == []
    with pytest.raises(IndexError):
        store[4]
    assert store.rows_of(["d", "ü", "nope", "a", "b"]).tolist() == [3, 2, -1, 0, 1]
    store.check()
    with pytest.raises(UserError, match="holds passages already"):
        store_passages(PASSAGES, tmp_path / "p")
    empty = store_passages([], tmp_path / "empty")
    assert len(empty) == 0 and list(empty) == [] and empty.rows_of(["a"]).tolist() == [-1]


def test_duplicates_and_malformed_lines_are_reported(tmp_path):
    records = [{"id": f"{i % 4}", "title": "t", "text": f"{i % 3}"} for i in range(6)]
    corpus = open_corpus(lines(tmp_path / "c.jsonl", *records, "bad\n"), limits=LOOSE)
    report = write_passages(corpus, tmp_path / "p").report
    # ids 0 1 2 3 0 1, texts 0 1 2 0 1 2.
    assert report["duplicate_ids"] == 2
    assert report["duplicate_ids_named"] == [["0", 0, "0", 4], ["1", 1, "1", 5]]
    assert report["duplicate_texts"] == 3
    assert report["duplicate_texts_named"][0] == ["0", 0, "3", 3]
    assert report["malformed"] == 1
    assert report["named"] == ["c.jsonl, line 7: not JSON (Expecting value)"]
    assert PassageTexts(tmp_path / "p").rows_of(["0", "1"]).tolist() == [
        0,
        1,
    ]  # the first of equals


def test_a_killed_process_is_gone_on_with(tmp_path, monkeypatch):
    """A real kill between two checkpoints, with more written behind the last one."""
    corpus = wiki(tmp_path / "c.jsonl", 3000)
    text = corpus.read_text()
    corpus.write_text("bad\n" + text)
    program = """
        import sys, os, signal
        from zest_jax.retrieval import corpora, passages
        corpora._BLOCK, passages._CHECKPOINT = 4096, 500

        def tell(done, stored):
            if stored > 1800:
                os.kill(os.getpid(), signal.SIGKILL)

        passages.write_passages(corpora.open_corpus(sys.argv[1]), sys.argv[2], tell)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(corpus), str(tmp_path / "p")]
    assert subprocess.run(command, timeout=120).returncode == -signal.SIGKILL
    with pytest.raises(UserError, match="no store of passages"):
        PassageTexts(tmp_path / "p")
    # What stands behind the checkpoint is torn, and cut off.
    with open(tmp_path / "p" / "texts.bin", "ab") as file:
        file.write(b"torn \xc3")
    seen = []
    monkeypatch.setattr(module, "_CHECKPOINT", 500)
    store = write_passages(open_corpus(corpus), tmp_path / "p", lambda done, n: seen.append(n))
    assert seen[0] > 1500  # nothing before the last checkpoint was read again
    assert store.report["named"] == ["c.jsonl, line 1: not JSON (Expecting value)"]
    write_passages(open_corpus(corpus), tmp_path / "q")
    assert files_of(tmp_path / "p") == files_of(tmp_path / "q")
    # Done is done; another corpus is refused.
    stamp = (tmp_path / "p" / "texts.bin").stat().st_mtime_ns
    assert len(write_passages(open_corpus(corpus), tmp_path / "p")) == 3000
    assert (tmp_path / "p" / "texts.bin").stat().st_mtime_ns == stamp
    with pytest.raises(UserError, match="passages of c.jsonl, and d.jsonl is another corpus"):
        write_passages(open_corpus(wiki(tmp_path / "d.jsonl", 3)), tmp_path / "p")


def test_a_beginning_of_another_corpus_is_refused(tmp_path):
    stopped = open_corpus(wiki(tmp_path / "c.jsonl", 5))
    files = module._growing(tmp_path / "p", stopped.identity())
    files.checkpoint({"position": {}, "named": []})
    files.close()
    with pytest.raises(UserError, match='name "c.jsonl", not "d.jsonl"'):
        write_passages(open_corpus(wiki(tmp_path / "d.jsonl", 5)), tmp_path / "p")


def test_cut_and_changed_files_are_named(tmp_path):
    folder = tmp_path / "p"
    store_passages(PASSAGES, folder)
    path = folder / "texts.bin"
    data = path.read_bytes()
    path.write_bytes(b"X" + data[1:])
    with pytest.raises(UserError, match="texts.bin is damaged"):
        PassageTexts(folder).check()
    path.write_bytes(data[:-1])
    with pytest.raises(UserError, match="texts.bin has .* cut short"):
        PassageTexts(folder)
    path.unlink()
    with pytest.raises(UserError, match="texts.bin is missing"):
        PassageTexts(folder)
    (folder / "passages.json").write_text("{")
    with pytest.raises(UserError, match="passages.json is damaged"):
        PassageTexts(folder)


def test_opening_takes_no_time_and_no_memory(tmp_path):
    store_passages((Passage(str(i), "t", "x" * 100) for i in range(50_000)), tmp_path / "p")
    began = time.perf_counter()
    for _ in range(10):
        PassageTexts(tmp_path / "p")
    assert (time.perf_counter() - began) / 10 < 0.05


# --------------------------------------------------------------------------------------- tokens


def test_ids_are_those_of_the_tokenizer(tmp_path, tokenizers):
    texts = store_passages(PASSAGES, tmp_path / "p")
    qwen = tokenizers[0]
    tokens = tokenise(texts, qwen, tmp_path / "t")
    wanted = [
        qwen(f" {p.title}: {p.text}", add_special_tokens=False)["input_ids"] for p in PASSAGES
    ]
    assert [tokens[i].tolist() for i in range(4)] == wanted
    assert tokens.longest == max(map(len, wanted)) and tokens.dtype == np.uint16
    ids, lengths = tokens.rows(np.array([3, -1, 1, 7]), 6)
    assert lengths.tolist() == [6, 0, min(6, len(wanted[1])), 0]
    for row, n, source in zip(ids, lengths, [3, 0, 1, 0], strict=True):
        assert row.tolist() == (wanted[source][:n] + [0] * 6)[:6]
    cut = tokenise(texts, qwen, tmp_path / "cut", longest=5)
    assert [cut[i].tolist() for i in range(4)] == [w[:5] for w in wanted]
    with pytest.raises(UserError, match="shown as ' {title}: {text}' instead of '{text}'"):
        tokenise(texts, qwen, tmp_path / "t", template="{text}")


def test_another_tokenizer_is_refused_with_both_names(tmp_path, tokenizers):
    texts = store_passages(PASSAGES, tmp_path / "p")
    qwen, e5 = tokenizers
    tokenise(texts, qwen, tmp_path / "t")
    assert len(TokenisedPassages(tmp_path / "t", qwen)) == 4
    with pytest.raises(UserError, match=r"tokenised with \S*qwen3_embedding .*has \S*e5 \(150"):
        TokenisedPassages(tmp_path / "t", e5)
    # Padding and truncation, which calls leave behind, are not part of who a tokenizer is.
    before = tokenizer_card(qwen)
    qwen(["a", "b c d e"], padding=True, truncation=True, max_length=3)
    assert tokenizer_card(qwen) == before
    assert tokens_key(before, "a") != tokens_key(before, "b") != tokens_key(tokenizer_card(e5), "b")
    again = transformers.AutoTokenizer.from_pretrained(qwen.name_or_path)
    again.add_tokens(["<new>"])
    assert tokenizer_card(again)["fingerprint"] != before["fingerprint"]


def test_tokenising_goes_on_after_a_stop(tmp_path, tokenizers, monkeypatch):
    texts = store_passages(
        (Passage(str(i), f"t {i}", f"text of {i} " * (i % 5)) for i in range(100)), tmp_path / "p"
    )
    qwen = tokenizers[0]
    monkeypatch.setattr(module, "_BATCH", 7)
    monkeypatch.setattr(module, "_CHECKPOINT", 20)
    whole = tokenise(texts, qwen, tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop(done, total):
        if done > 50:
            raise Stop

    with pytest.raises(Stop):
        tokenise(texts, qwen, tmp_path / "t", tell=stop)
    with pytest.raises(UserError, match="made from template"):
        tokenise(texts, qwen, tmp_path / "t", template="{text}")
    seen = []
    again = tokenise(texts, qwen, tmp_path / "t", tell=lambda done, total: seen.append(done))
    assert seen[0] == 49  # the checkpoint at 42, and a batch
    assert files_of(tmp_path / "t") == files_of(tmp_path / "whole")
    assert again.longest == whole.longest
    # Ids of 16 and of 32 bits say the same.
    stored = json.loads((tmp_path / "t" / "tokens.json").read_text())
    ids = np.fromfile(tmp_path / "t" / "ids.bin", "<u2").astype("<u4")
    ids.tofile(tmp_path / "t" / "ids.bin")
    stored["dtype"] = "<u4"
    stored["files"] = module.list_files(tmp_path / "t", ["ids.bin", "ids.end"])
    (tmp_path / "t" / "tokens.json").write_text(json.dumps(stored))
    wide = TokenisedPassages(tmp_path / "t")
    assert wide.dtype == np.int32
    for i in range(100):
        np.testing.assert_array_equal(wide[i], whole[i])


@pytest.mark.parametrize("block", [1 << 16, 30])
def test_padded_arrays_on_the_device(tmp_path, tokenizers, monkeypatch, block):
    texts = store_passages(
        (Passage(str(i), f"t {i}", f"text of {i} " * (i % 5)) for i in range(100)), tmp_path / "p"
    )
    tokens = tokenise(texts, tokenizers[0], tmp_path / "t")
    monkeypatch.setattr(module, "_BLOCK", block)
    mesh = jax.make_mesh((1,), ("data",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    for length in (0, 9):
        for sharding in (None, split):
            ids, lengths = tokens.padded(length, sharding)
            P = length or tokens.longest
            assert ids.shape == (100, P) and ids.dtype == np.uint16
            for i in range(100):
                n = min(len(tokens[i]), P)
                assert lengths[i] == n
                assert ids[i].tolist() == tokens[i][:n].tolist() + [0] * (P - n)


def test_no_room_is_told(tmp_path, tokenizers, monkeypatch):
    tokens = tokenise(store_passages(PASSAGES, tmp_path / "p"), tokenizers[0], tmp_path / "t")

    class Small:
        def memory_stats(self):
            return {"bytes_limit": 1000, "bytes_in_use": 990}

        def __str__(self):
            return "a small device"

    monkeypatch.setattr(module.jax, "local_devices", lambda: [Small()])
    with pytest.raises(UserError, match="a small device has 0.0 GB free.*host memory"):
        tokens.padded()


def test_stores_show_what_the_lists_would(tmp_path, tokenizers):
    """On the device, on the host and from Python lists: the same observations."""
    qwen = tokenizers[0]
    tokens = tokenise(store_passages(PASSAGES, tmp_path / "p"), qwen, tmp_path / "t")
    frame = Frame(starts=[[7, 8, 9]], heads=[[], [5]], ending=[3, 2], closing=[])
    lists = PassageStore.build([tokens[i].tolist() for i in range(4)], frame, 60)
    rows = np.array([[[0, 1]], [[3, -1]], [[2, 0]]], np.int32)
    want = lists.observe(rows)
    for kind in (PassageStore, HostPassageStore):
        store = kind.from_tokens(tokens, frame, 60)
        got = jax.jit(lambda store, rows: store.observe(rows))(store, rows)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b, strict=True)
        with pytest.raises(UserError, match="raise observation_length"):
            kind.from_tokens(tokens, frame, 20)
    first, second = tokens[0].tolist(), tokens[1].tolist()
    flat = [7, 8, 9, *first[:27], 5, *second[:27], 3, 2]
    assert want[0][0].tolist() == flat + [0] * (60 - len(flat))
