"""An index folder within the compiled rollout: as from the host, on one device and on four."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import virtual_devices
from processes import free_port
from retrieval_server import save_bm25_index, save_exact_index

from zest_jax.errors import UserError
from zest_jax.models import load_encoder
from zest_jax.models.hf import read_tokenizer
from zest_jax.parallel import Placement
from zest_jax.players import Player
from zest_jax.retrieval import room
from zest_jax.retrieval.blocks import in_blocks
from zest_jax.retrieval.encoders import Rewriter, TextEncoder, TokenEncoder
from zest_jax.retrieval.index_files import IndexFolder
from zest_jax.retrieval.interface import Passage
from zest_jax.retrieval.layout import Layout
from zest_jax.retrieval.open_device import DeviceFolder
from zest_jax.retrieval.open_index import add_partitioned
from zest_jax.retrieval.partitioned import PartitionSettings
from zest_jax.retrieval.passages import tokenise, tokenizer_card, tokens_key
from zest_jax.retrieving import build_index_retrieval, index_bytes
from zest_jax.rollout.protocols import PLAIN_SEARCH

HERE = Path(__file__).parent
ENCODERS = HERE / "fixtures" / "encoders"
PASSAGES = [Passage(f"p{i}", f"Title {i}", f"It has the number {i * i}.") for i in range(11)]


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    """What `index_on_devices.py` prints."""
    folder = tmp_path_factory.mktemp("index") / "index"
    env = {**os.environ, "XLA_FLAGS": virtual_devices.flags(2)}
    env["PYTHONPATH"] = os.pathsep.join((str(HERE.parent), str(HERE)))
    env |= {"ZEST_COORDINATOR": f"127.0.0.1:{free_port()}", "ZEST_PROCESSES": "2"}
    command = [sys.executable, str(HERE / "index_on_devices.py"), str(folder)]
    both = [
        subprocess.Popen(
            command,
            env=env | {"ZEST_PROCESS": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (0, 1)
    ]
    said = [process.communicate(timeout=300) for process in both]
    for process, (_, errors) in zip(both, said, strict=True):
        assert process.returncode == 0, errors[-3000:]
    first, second = (json.loads(text.splitlines()[-1]) for text, _ in said)
    assert all(first[name] == second[name] for name in second)
    return first


@pytest.mark.parametrize("where", ["device", "devices", "hosts"])
def test_wherever_the_index_is_searched_episodes_are_the_same(episodes, where):
    one, other = episodes["host"], episodes[where]
    assert one["searches"] == other["searches"] >= 5
    assert one["ids"] == other["ids"] and one["rows"] == other["rows"]
    assert other["found"] == episodes["device"]["found"] and len(other["found"][0]) == 5


def test_several_devices_trace_once_and_tell_their_times(episodes):
    for where in ("host", "hosts"):
        assert episodes[where]["retraces"] == 0
        assert episodes[where]["counters"]["decode_s"] > episodes[where]["counters"]["search_s"] > 0


def test_what_is_said_of_where_it_is_searched(episodes):
    assert episodes["host"]["how"] == "from the host (retrieval.where=host)"
    for where in ("device", "devices"):
        assert episodes[where]["how"].startswith("within the compiled rollout (the host rewrites")
    assert episodes["devices"]["devices"] == 4


def save_index(folder, tokenizer=None, layout=PLAIN_SEARCH.layout, encoder="e5"):
    save_exact_index(folder, PASSAGES, ENCODERS / encoder, "float32")
    if tokenizer is not None:
        key = tokens_key(tokenizer_card(tokenizer), layout.stored)
        passages = IndexFolder(folder).passages()
        target = folder / "tokens" / key
        tokenise(passages, tokenizer, target, template=layout.stored, write=layout.write)
    return folder


def ids_of(tokenizer, texts):
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def qwen():
    return read_tokenizer(ENCODERS / "qwen3_embedding")


def test_passages_and_queries_are_those_of_the_host(tmp_path, qwen):
    """Of an encoder with the policy's vocabulary, and in a layout that writes into JSON."""
    layout = Layout(passage=" {title}: {text}", escape=True)
    folder = DeviceFolder(save_index(tmp_path / "index", qwen, layout, "qwen3_embedding"))
    store = folder.store(qwen, layout, 2, 1, 120)
    retriever = folder.retriever(qwen, qwen.decode, 16, store)
    assert isinstance(retriever.encoder, TokenEncoder)
    texts = [" Title 7", " the number 81", " nothing"]
    ids_SUQ, length_SU = np.zeros((20, 1, 16), np.int32), np.zeros((20, 1), np.int32)
    for s, ids in zip((3, 18, 19), ids_of(qwen, texts), strict=True):
        ids_SUQ[s, 0, : len(ids)], length_SU[s, 0] = ids, len(ids)
    rows_SUR, scores_SUR = jax.jit(type(retriever).search)(retriever, ids_SUQ, length_SU)
    expected = folder.by_text().search(texts, 2)
    np.testing.assert_array_equal(np.asarray(rows_SUR)[[3, 18, 19], 0], expected.rows)
    np.testing.assert_allclose(np.asarray(scores_SUR)[[3, 18, 19], 0], expected.scores, atol=1e-5)
    shown, length = retriever.observe(jnp.asarray(expected.rows)[:1, None])
    text = qwen.decode(np.asarray(shown)[0, : int(length[0])])
    first, second = (PASSAGES[row] for row in expected.rows[0])
    assert text == layout.show([[(p.title, p.text) for p in (first, second)]])


def test_an_encoder_of_another_vocabulary_reads_the_text(qwen):
    encoder = load_encoder(ENCODERS / "e5")
    rewriting = TextEncoder.build(encoder, qwen.decode, 8)
    texts = ["Title 7", "", "a number"]
    ids_SQ, length_S = np.zeros((3, 8), np.int32), np.zeros(3, np.int32)
    for s, ids in enumerate(ids_of(qwen, [f" {t}" if t else "" for t in texts])):
        ids_SQ[s, : len(ids)], length_S[s] = ids, len(ids)
    vectors_SE = np.asarray(jax.jit(TextEncoder.encode_queries)(rewriting, ids_SQ, length_S))
    expected_SE = encoder.encode_texts(texts, "query")
    np.testing.assert_allclose(vectors_SE[[0, 2]], expected_SE[[0, 2]], atol=1e-5)
    assert not vectors_SE[1].any()
    # A long query is cut as the encoder's tokenizer cuts: between its special tokens.
    whole = encoder.tokenize(texts[:1], "query")[0]
    row_SL, count_S = Rewriter(encoder, qwen.decode, len(whole) - 2)(ids_SQ[:1], length_S[:1])
    assert count_S.tolist() == [len(whole) - 2]
    assert row_SL[0].tolist() == [*whole[:-3], whole[-1]]


def test_blocks_are_of_those_that_ask():
    asks_S = jnp.asarray([False, True, True, False, True])
    calls = []

    def work(slot_W):
        jax.debug.callback(lambda slots: calls.append(slots.tolist()), slot_W)
        return 10 * slot_W

    out_S = jax.jit(lambda asks: in_blocks(asks, work, jnp.full(5, -1), 2))(asks_S)
    jax.effects_barrier()
    assert out_S.tolist() == [-1, 10, 20, -1, 40]
    assert len(calls) == 2 and calls[0] == [1, 2] and calls[1][0] == 4


def described(index, qwen, **changes):
    """A config's part, players and protocols, for `build_index_retrieval`."""
    import tiny_config

    config = tiny_config.get_config()
    config.retrieval.index, config.proposer.searches = str(index), 0
    config.solver.observation_length = 64
    for name, value in changes.items():
        config.retrieval[name] = value
    player = Player(qwen, None, {}, None, "", "", {})
    roles = dict.fromkeys(("solver", "proposer"), player)
    return config, roles, dict.fromkeys(roles, PLAIN_SEARCH), Placement()


def test_where_it_cannot_be_and_why(tmp_path, qwen, monkeypatch):
    plain = save_index(tmp_path / "plain")
    found = build_index_retrieval(*described(plain, qwen))
    assert found.host is not None and not found.on_device
    assert (
        found.how.startswith("from the host, since the passages of") and "--tokenizer" in found.how
    )
    words = tmp_path / "words"
    save_bm25_index(words, PASSAGES)
    assert "kind bm25 is searched on the host" in build_index_retrieval(*described(words, qwen)).how
    for index, said in ((plain, "were not tokenised"), (words, "kind bm25")):
        with pytest.raises(UserError, match=f"retrieval.where=device, but .*{said}.*where=auto"):
            build_index_retrieval(*described(index, qwen, where="device"))
    ready = save_index(tmp_path / "ready", qwen)
    assert not build_index_retrieval(*described(ready, qwen)).host
    assert build_index_retrieval(*described(ready, qwen, where="host")).host

    class Small:
        def memory_stats(self):
            return {"bytes_limit": 1000, "bytes_in_use": 900}

    monkeypatch.setattr(room.jax, "local_devices", lambda: [Small()])
    with pytest.raises(UserError, match="the vectors of .*ready take .* share the index over more"):
        build_index_retrieval(*described(ready, qwen))


def test_what_an_index_takes_before_it_is_opened(tmp_path, qwen):
    """The mesh is chosen with room for it; nothing is laid on devices where the host is asked."""
    index = save_index(tmp_path / "index", qwen)
    config = described(index, qwen, top_k=2)[0]
    roles = {"solver": qwen, "proposer": qwen}
    # Vectors of 32 float32, and half of an observation of 64 ids, four bytes each.
    assert index_bytes(config, roles) == (len(PASSAGES) * (4 * 32 + 4 * 32), 0.0)
    config.retrieval.where = "host"
    assert index_bytes(config, roles) is None
    config.retrieval.where, config.retrieval.index = "auto", "http://127.0.0.1:9"
    assert index_bytes(config, roles) is None
    config.retrieval.index = str(save_index(tmp_path / "untold"))
    assert index_bytes(config, roles) is None, "its passages were not tokenised"
    config.retrieval.index = ""
    assert index_bytes(config, roles) == (0.0, 0.0)
    add_partitioned(
        index,
        PartitionSettings(num_leaves=2, num_leaves_to_search=2, dimensions_per_block=2, reorder=4),
    )
    config.retrieval.index = str(index)
    shared, whole = index_bytes(config, roles)
    assert shared == 0.0 and whole > len(PASSAGES) * 4 * 32
