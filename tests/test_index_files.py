"""The folder of an index: manifest, shards, checksums, refusals; vectors made elsewhere."""

import dataclasses
import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from zest_jax import files
from zest_jax.errors import UserError
from zest_jax.models import load_encoder
from zest_jax.retrieval import index_files, storage
from zest_jax.retrieval.foreign_vectors import open_vectors
from zest_jax.retrieval.index_files import IndexFolder, Manifest
from zest_jax.retrieval.interface import Passage
from zest_jax.retrieval.passages import store_passages, tokenise, tokens_key

ENCODERS = Path(__file__).parent / "fixtures" / "encoders"
N, E = 7, 32


@pytest.fixture(scope="module")
def e5():
    return load_encoder(ENCODERS / "e5")


def build(folder, encoder, dtype="bfloat16", rows=3):
    """A small index with random vectors; returns them as stored."""
    passages = store_passages(
        [Passage(str(i), f"title {i}", f"text {i}") for i in range(N)], folder / "passages"
    )
    vector_NE = np.random.default_rng(0).normal(size=(N, E)).astype(np.float32)
    shards = tuple(
        index_files.write_shard(folder, number, vector_NE[at : at + rows], dtype)
        for number, at in enumerate(range(0, N, rows))
    )
    card = index_files.encoder_card(ENCODERS / "e5", encoder)
    corpus = {"name": "c.jsonl", "fingerprint": passages.fingerprint}
    manifest = Manifest("exact", N, E, dtype, card, corpus, shards)
    index_files.write_manifest(folder, manifest)
    return vector_NE.astype(index_files.DTYPES[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_moved_folder_loads(tmp_path, e5, dtype):
    vector_NE = build(tmp_path / "a", e5, dtype)
    shutil.move(tmp_path / "a", tmp_path / "elsewhere" / "b")
    assert str(tmp_path) not in (tmp_path / "elsewhere" / "b" / "index.json").read_text()
    index = IndexFolder(
        tmp_path / "elsewhere" / "b", encoder=e5, encoder_name=ENCODERS / "e5", check=True
    )
    vectors = index.vectors()
    assert vectors.shape == (N, E) and len(vectors) == N
    blocks = list(vectors.blocks())
    assert [first for first, _ in blocks] == [0, 3, 6]
    whole = np.concatenate([block for _, block in blocks])
    assert whole.dtype == vectors.dtype == vector_NE.dtype
    np.testing.assert_array_equal(whole.view(np.uint8), vector_NE.view(np.uint8))
    rows = np.array([6, 0, 2, 3, 6])
    np.testing.assert_array_equal(vectors.rows(rows), vector_NE[rows])
    assert index.passages()[4].title == "title 4"
    # What .npy holds can be read by numpy alone.
    raw = np.load(tmp_path / "elsewhere" / "b" / "vectors" / "shard-00000.npy")
    assert raw.dtype == {"bfloat16": np.uint16}.get(dtype, np.dtype(dtype))


def test_a_cut_or_changed_shard_is_named(tmp_path, e5):
    build(tmp_path, e5)
    path = tmp_path / "vectors" / "shard-00001.npy"
    data = path.read_bytes()
    path.write_bytes(data[:-2])
    with pytest.raises(UserError, match="shard-00001.npy has .* cut short"):
        IndexFolder(tmp_path)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # one bit
    index = IndexFolder(tmp_path)  # opening reads no shard whole
    with pytest.raises(UserError, match="shard-00001.npy is damaged: its sha256"):
        IndexFolder(tmp_path, check=True)
    vectors = index.vectors()
    vectors.shard(0)
    with pytest.raises(UserError, match="shard-00001.npy is damaged"):
        list(vectors.blocks())
    path.unlink()
    with pytest.raises(UserError, match="shard-00001.npy is missing"):
        IndexFolder(tmp_path)


def test_another_encoder_or_dimension_is_refused_with_both_names(tmp_path, e5):
    build(tmp_path, e5)
    name = ENCODERS / "e5"
    other = load_encoder(ENCODERS / "minilm")
    with pytest.raises(UserError, match=r"encoder \S*/e5, not with \S*/minilm"):
        IndexFolder(tmp_path, encoder=other, encoder_name=ENCODERS / "minilm")
    half = load_encoder(name, dimension=16)
    with pytest.raises(UserError, match=r"32 components by \S*/e5, but \S*/e5 makes 16"):
        IndexFolder(tmp_path, encoder=half, encoder_name=name)
    with pytest.raises(UserError, match="pooling 'mean' against 'cls'"):
        IndexFolder(tmp_path, encoder=load_encoder(name, pooling="cls"), encoder_name=name)
    # The same encoder under another name and in another type of arithmetic is the same.
    copy = tmp_path / "my-e5"
    shutil.copytree(name, copy)
    assert IndexFolder(
        tmp_path, encoder=load_encoder(copy, dtype="bfloat16"), encoder_name=copy
    ).manifest.encoder["name"] == str(name)
    weights = next(copy.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(UserError, match="other weights or another tokenizer"):
        IndexFolder(tmp_path, encoder=load_encoder(copy), encoder_name=copy)


def test_tokens_of_another_policy_are_refused(tmp_path, e5):
    build(tmp_path, e5)
    mine, other = e5.tokenizer, load_encoder(ENCODERS / "qwen3_embedding").tokenizer
    index = IndexFolder(tmp_path)
    with pytest.raises(UserError, match=r"not tokenised.*--tokenizer=\S*/e5"):
        index.tokens(mine)
    for template in ("{text}", "{title}"):
        key = tokens_key(index_files.tokenizer_card(mine), template)
        tokenise(index.passages(), mine, tmp_path / "tokens" / key, template=template)
    for template in ("{text}", "{title}"):
        assert index.tokens(mine, template).template == template
    assert len(index.tokens(mine)) == N
    with pytest.raises(UserError, match=r"shown as '{\w+}', not as '{title}: {text}'"):
        index.tokens(mine, "{title}: {text}")
    with pytest.raises(UserError, match=r"tokenised with \S*/e5 .*has \S*/qwen3_embedding"):
        index.tokens(other)


def test_passages_of_another_corpus_are_refused(tmp_path, e5):
    build(tmp_path, e5)
    shutil.rmtree(tmp_path / "passages")
    store_passages([Passage(str(i), "", "x") for i in range(N)], tmp_path / "passages")
    with pytest.raises(UserError, match="other passages than .*c.jsonl"):
        IndexFolder(tmp_path).passages()


def test_other_versions_and_damaged_manifests(tmp_path, e5):
    with pytest.raises(UserError, match="is no index: it has no index.json"):
        IndexFolder(tmp_path)
    (tmp_path / "building.json").write_text("{}")
    with pytest.raises(UserError, match="not complete; run the command"):
        IndexFolder(tmp_path)
    build(tmp_path, e5)
    assert not (tmp_path / "building.json").exists()
    manifest = index_files.read_manifest(tmp_path)
    path = tmp_path / "index.json"
    stored = json.loads(path.read_text())
    for change, words in [
        ({"format": 2}, "has the format 2, this version reads 1"),
        ({"shards": [{"file": "x"}]}, "index.json is damaged"),
    ]:
        path.write_text(json.dumps(stored | change))
        with pytest.raises(UserError, match=words):
            IndexFolder(tmp_path)
    path.write_text(json.dumps(stored)[:-20])
    with pytest.raises(UserError, match="index.json is damaged"):
        IndexFolder(tmp_path)
    index_files.write_manifest(tmp_path, manifest)
    (tmp_path / "tree.npy").write_bytes(b"leaves")
    index_files.add_files(tmp_path, ["tree.npy"], kind="partitioned", settings={"leaves": 1})
    again = IndexFolder(tmp_path, check=True).manifest
    assert again.kind == "partitioned" and again.settings == {"leaves": 1}
    assert again == dataclasses.replace(
        manifest, kind="partitioned", settings={"leaves": 1}, files=again.files
    )
    (tmp_path / "tree.npy").write_bytes(b"Leaves")
    IndexFolder(tmp_path)
    with pytest.raises(UserError, match="tree.npy is damaged"):
        IndexFolder(tmp_path, check=True)


def test_vectors_that_are_not_finite_are_refused(tmp_path):
    with pytest.raises(UserError, match="row 1 of shard 4 is not finite in float16"):
        index_files.write_shard(tmp_path, 4, np.array([[1.0], [1e6]], np.float32), "float16")
    assert not (tmp_path / "vectors").exists()
    shard = index_files.write_shard(tmp_path, 4, np.array([[1.0], [1e6]], np.float32), "bfloat16")
    got = np.load(tmp_path / shard.file).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(got, np.array([[1.0], [1e6]], ml_dtypes.bfloat16))


# -------------------------------------------------------------------------------------- storage


def test_one_process_at_a_time(tmp_path):
    with storage.held(tmp_path):
        with pytest.raises(UserError, match="another process is writing"):
            with storage.held(tmp_path):
                pass
    with storage.held(tmp_path):
        pass


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    storage.write_json(path, {"a": 1})
    with pytest.raises(RuntimeError):
        with files.writing(path) as file:
            file.write(b"half")
            raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
    assert json.loads(path.read_text()) == {"a": 1}


def test_growing_files_are_cut_back_and_never_made_up(tmp_path):
    files = storage.GrowingFiles(tmp_path, ["a", "b"], "note", {"of": 1})
    assert files.done is None
    files.append("a", b"123")
    files.append("b", np.array([258], "<u2"))
    files.checkpoint({"at": 1})
    files.append("a", b"456")
    files.close()
    assert (tmp_path / "a").read_bytes() == b"123456"
    files = storage.GrowingFiles(tmp_path, ["a", "b"], "note", {"of": 1})
    assert files.done == {"at": 1} and files.length("a") == 3
    files.append("a", b"7")
    files.close()
    assert (tmp_path / "a").read_bytes() == b"1237" and (tmp_path / "b").read_bytes() == b"\x02\x01"
    with pytest.raises(UserError, match="of 1, not 2"):
        storage.GrowingFiles(tmp_path, ["a", "b"], "note", {"of": 2})
    (tmp_path / "b").unlink()
    with pytest.raises(UserError, match="b is shorter than when"):
        storage.GrowingFiles(tmp_path, ["a", "b"], "note", {"of": 1})


# ------------------------------------------------------------------------------ foreign vectors

# What faiss 1.15.1 writes (write_index) for the vectors below.
VECTORS = np.array([[1, 2, 3], [-0.5, 0.25, 8]], np.float32)
_MIDDLE = "030000000200000000000000000010000000000000001000000000000" + "1"
_DATA = "0600000000000000" + "0000803f0000004000004040000000bf0000803e00000041"
FAISS = {
    "inner product": bytes.fromhex("49784649" + _MIDDLE + "00000000" + _DATA),
    "L2": bytes.fromhex("49784632" + _MIDDLE + "01000000" + _DATA),
}
L1 = bytes.fromhex("4978466c" + _MIDDLE + "02000000" + "00000000" + _DATA)


@pytest.mark.parametrize("metric", FAISS)
def test_flat_indexes_of_faiss(tmp_path, metric):
    path = tmp_path / "e5_Flat.index"
    path.write_bytes(FAISS[metric])
    got = open_vectors(path)
    np.testing.assert_array_equal(got.vector_NE, VECTORS)
    assert got.metric == metric
    path.write_bytes(FAISS[metric][:-1])
    with pytest.raises(UserError, match=r"cut short: 2 x 3 .*cat part_"):
        open_vectors(path)
    path.write_bytes(FAISS[metric][:20])
    with pytest.raises(UserError, match="cut short: 20 bytes"):
        open_vectors(path)


def test_other_files_are_no_vectors(tmp_path):
    path = tmp_path / "x.index"
    for data, words in [
        (L1, "metric 2 and 6 numbers: no flat index"),
        (b"IHNf" + bytes(80), "a graph index"),
        (b"IxMp" + bytes(80), "ids of its own"),
        (b"IwFl" + bytes(80), "inverted-file"),
        (b"hello world", "neither a .npy file nor a FAISS"),
        (b"\x93NUMPY garbage", "cannot be read"),
    ]:
        path.write_bytes(data)
        with pytest.raises(UserError, match=words):
            open_vectors(path)
    with pytest.raises(UserError, match="does not exist"):
        open_vectors(tmp_path / "nowhere.npy")
    np.save(tmp_path / "x.npy", np.arange(6).reshape(2, 3))
    with pytest.raises(UserError, match=r"int64 of shape \(2, 3\)"):
        open_vectors(tmp_path / "x.npy")
    np.save(tmp_path / "x.npy", VECTORS.astype(np.float16))
    assert open_vectors(tmp_path / "x.npy").vector_NE.dtype == np.float16
