"""Text encoders: parity with transformers and sentence-transformers (fixtures), and refusals."""

import functools
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import virtual_devices
from safetensors.numpy import load_file, save_file

from zest_jax.errors import UserError
from zest_jax.models import PolicyConfig, instruction, load_encoder, save_pretrained
from zest_jax.models.bert import BertConfig, attention_both_ways, bert_shapes
from zest_jax.models.encoder_folders import read_settings
from zest_jax.models.encoders import bucket, pool
from zest_jax.parallel.sharding import RULES

FIXTURES = Path(__file__).parent / "fixtures" / "encoders"
NAMES = ["e5", "minilm", "qwen3_embedding"]
TOLERANCE = 1e-5


@functools.cache
def encoder(name):
    with np.load(FIXTURES / name / "expected.npz") as f:
        want = dict(f)
    return load_encoder(FIXTURES / name), want, json.loads(str(want["texts"]))


def copied(name, tmp_path, to="copy"):
    return Path(shutil.copytree(FIXTURES / name, tmp_path / to))


def edit(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


# ---------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("name", NAMES)
def test_vectors_of_padded_ids_are_those_of_transformers(name):
    got, want, _ = encoder(name)
    ids, length = want["ids"].astype(int), want["length"].astype(int)
    vectors = got.encode(got.params, ids, length)
    assert vectors.dtype == jnp.float32
    np.testing.assert_allclose(vectors, want["vectors"], atol=TOLERANCE, rtol=0)
    # What stands behind a row's end is never seen, and more of it changes nothing.
    other = np.where(np.arange(24) < length[:, None], ids, 7)
    other = np.pad(other, ((0, 0), (0, 8)), constant_values=3)
    again = got.encode(got.params, other, length)
    np.testing.assert_allclose(again, want["vectors"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["query", "passage"])
def test_vectors_of_texts_are_those_of_sentence_transformers(name, kind):
    got, want, texts = encoder(name)
    vectors = got.encode_texts(texts, kind, batch_size=4)
    np.testing.assert_allclose(vectors, want[kind], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_comes_before_the_norm(name):
    _, want, texts = encoder(name)
    size = want["cut"].shape[1]
    got = load_encoder(FIXTURES / name, dimension=size)
    assert got.size == size < 32
    vectors = got.encode_texts(texts, "passage")
    np.testing.assert_allclose(vectors, want["cut"], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


def test_the_fixtures_have_what_the_parity_is_about():
    got, want, texts = encoder("qwen3_embedding")
    assert all(row[-1] == 0 for row in got.tokenize(texts, "passage"))  # the end token
    longest = [max(map(len, encoder(n)[0].tokenize(texts, "query"))) for n in NAMES]
    assert longest == [40, 24, 96]  # cut texts, with the end token behind them
    for name in NAMES:
        want = encoder(name)[1]
        assert np.abs(want["query"] - want["passage"]).max() > 0.1 or name == "minilm"
    for path in (FIXTURES / "e5", FIXTURES / "minilm"):
        for tensor, value in load_file(path / "model.safetensors").items():
            assert np.unique(value).size > 2, tensor  # no bias or norm of 0 or 1 throughout


def test_inside_another_compiled_step_and_in_bfloat16():
    got, want, _ = encoder("e5")
    ids, length = want["ids"].astype(int), want["length"].astype(int)

    @jax.jit
    def scores(params, ids, length):
        vectors = got.encode(params, ids, length)
        return vectors @ vectors.T

    expected = want["vectors"] @ want["vectors"].T
    np.testing.assert_allclose(
        scores(got.params, ids, length), expected, atol=2 * TOLERANCE, rtol=0
    )
    half = load_encoder(FIXTURES / "e5", dtype="bfloat16")
    assert {a.dtype for a in jax.tree.leaves(half.params)} == {jnp.dtype("bfloat16")}
    vectors = half.encode(half.params, ids, length)
    assert vectors.dtype == jnp.float32
    assert np.min(np.sum(vectors * want["vectors"], axis=1)) > 0.999


# ---------------------------------------------------------------------- arithmetic, by hand


def test_poolings_by_hand():
    hidden = jnp.asarray([[[1.0, 2.0], [3.0, 6.0], [9.0, 9.0]], [[5.0, 5.0]] * 3])
    length = jnp.asarray([2, 0])
    for pooling, want in (("mean", [2, 4]), ("cls", [1, 2]), ("last", [3, 6])):
        np.testing.assert_array_equal(pool(hidden, length, pooling), [want, [0, 0]])


def test_attention_sees_the_real_keys_and_all_of_them():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 5, 2, 4)).astype(np.float32) for _ in range(3))
    got = attention_both_ways(q, k, v, jnp.asarray([5, 3]))
    for b, n in enumerate([5, 3]):
        for h in range(2):
            weight = np.exp(q[b, :, h] @ k[b, :n, h].T / 2)
            want = weight / weight.sum(-1, keepdims=True) @ v[b, :n, h]
            np.testing.assert_allclose(got[b, :, h], want, atol=1e-6)


def test_empty_rows_give_zeros_and_no_nan():
    got, want, _ = encoder("minilm")
    vectors = got.encode(got.params, want["ids"].astype(int), np.array([24, 0, 1, 0]))
    np.testing.assert_array_equal(np.any(np.asarray(vectors), axis=1), [True, False, True, False])


def test_lengths_are_few():
    assert [bucket(n, 512) for n in (1, 16, 17, 25, 33, 49, 500, 512)] == [
        *(16, 16, 24, 32, 48, 64, 512, 512)
    ]
    assert bucket(130, 150) == 150
    assert len({bucket(n, 8192) for n in range(1, 8193)}) == 19


def test_texts_keep_their_order_and_share_programs():
    got, want, texts = encoder("e5")
    many = texts * 5
    vectors = got.encode_texts(many, "query", batch_size=16)
    np.testing.assert_allclose(vectors, np.tile(want["query"], (5, 1)), atol=TOLERANCE, rtol=0)
    assert got.encode_texts([], "query").shape == (0, 32)
    # Unpadded, one by one: batching and padding change nothing.
    ids = got.tokenize(texts[:2], "query")
    alone = [got.encode(got.params, np.array([row]), np.array([len(row)]))[0] for row in ids]
    np.testing.assert_allclose(alone, want["query"][:2], atol=TOLERANCE, rtol=0)


def test_long_texts_come_in_smaller_batches(monkeypatch):
    got, _, texts = encoder("qwen3_embedding")
    monkeypatch.setattr("zest_jax.models.encoders._FULL_LENGTH", 40)
    monkeypatch.setattr("zest_jax.models.encoders._WINDOW", 1)
    shapes = []
    original = type(got)._batch

    def batch(self, rows, length, full):
        shapes.append((len(rows), length))
        return original(self, rows, length, full)

    monkeypatch.setattr(type(got), "_batch", batch)
    vectors = got.encode_texts(texts, "passage", batch_size=4)
    np.testing.assert_allclose(vectors, encoder("qwen3_embedding")[1]["passage"], atol=TOLERANCE)
    assert max(rows * length for rows, length in shapes) <= 4 * 40
    assert (1, 96) in shapes and sum(rows for rows, _ in shapes) == len(texts)


# ------------------------------------------------------------------- settings of folders


def test_settings_come_from_the_folder():
    e5, minilm, qwen = (encoder(name)[0] for name in NAMES)
    assert (e5.query_prefix, e5.passage_prefix, e5.recipe.pooling) == (
        *("query: ", "passage: ", "mean"),
    )
    assert (minilm.query_prefix, minilm.passage_prefix, minilm.max_length) == ("", "", 24)
    assert (qwen.passage_prefix, qwen.recipe.pooling, qwen.max_length) == ("", "last", 96)
    assert qwen.query_prefix == (
        "Instruct: Given a web search query, retrieve relevant passages that answer the query\n"
        "Query:"
    )


def plain(name, tmp_path, to):
    """A folder without a word from sentence-transformers."""
    folder = copied(name, tmp_path, to)
    for path in (folder / "modules.json", folder / "config_sentence_transformers.json"):
        path.unlink()
    return folder


@pytest.mark.parametrize(
    "name, to, query, passage",
    [
        ("e5", "e5-base-v2", "query: ", "passage: "),
        ("e5", "my-e5_small", "query: ", "passage: "),
        ("e5", "base5-large", "", ""),
        ("e5", "encoder", "", ""),
        (
            "qwen3_embedding",
            "Qwen3-Embedding-0.6B",
            "Instruct: Given a web search query, retrieve relevant passages that answer the query\n"
            "Query:",
            "",
        ),
    ],
)
def test_plain_folders_follow_the_rule_of_their_family(name, to, query, passage, tmp_path):
    got = load_encoder(plain(name, tmp_path, to))
    assert (got.query_prefix, got.passage_prefix) == (query, passage)
    if query:
        _, want, texts = encoder(name)
        vectors = got.encode_texts(texts, "query")
        np.testing.assert_allclose(vectors, want["query"], atol=TOLERANCE, rtol=0)


def test_arguments_win_over_the_folder(tmp_path):
    task = "Find the page of a person"
    got = load_encoder(
        FIXTURES / "e5",
        pooling="cls",
        normalize=False,
        query_prefix=instruction(task),
        passage_prefix="",
    )
    assert got.query_prefix == "Instruct: Find the page of a person\nQuery:"
    a, b = got.encode_texts(["x", "x"], "passage")
    np.testing.assert_array_equal(a, b)
    assert abs(np.linalg.norm(a) - 1) > 0.1
    edit(copied("e5", tmp_path) / "1_Pooling" / "config.json", pooling_mode="cls")
    other = load_encoder(tmp_path / "copy", passage_prefix="").encode_texts(["x"], "passage")
    np.testing.assert_allclose(other[0], a / np.linalg.norm(a), atol=TOLERANCE)


def test_a_pipeline_without_normalize_gives_other_lengths(tmp_path):
    folder = copied("e5", tmp_path)
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:2]))
    got = load_encoder(folder)
    assert not got.recipe.normalize
    vector = got.encode_texts(["x"], "query")
    assert abs(np.linalg.norm(vector) - 1) > 0.1


def test_a_chat_policy_works_as_an_encoder_with_or_without_its_head(tmp_path):
    """Stored with "model." and an untied head, the same decoder gives the same vectors."""
    got, want, texts = encoder("qwen3_embedding")
    folder = copied("qwen3_embedding", tmp_path)
    head = np.zeros((32, 300), np.float32)
    untied = PolicyConfig(**{**vars(got.recipe.network), "tied": False})
    save_pretrained(untied, {**got.params, "head_DV": head}, folder)
    vectors = load_encoder(folder).encode_texts(texts, "query")
    np.testing.assert_allclose(vectors, want["query"], atol=TOLERANCE, rtol=0)


# ------------------------------------------------------------------------------- what goes wrong


def test_all_wrong_tensors_are_named_at_once(tmp_path):
    folder = copied("e5", tmp_path)

    def change(tensors):
        del tensors["encoder.layer.1.attention.self.query.bias"]
        tensors["encoder.layer.0.adapter.weight"] = np.zeros((2, 2), np.float32)
        tensors["embeddings.LayerNorm.weight"] = np.zeros((31,), np.float32)

    rewrite(folder, change)
    with pytest.raises(UserError) as e:
        load_encoder(folder)
    message = str(e.value)
    assert "encoder.layer.1.attention.self.query.bias [32] is missing" in message
    assert "encoder.layer.0.adapter.weight is unexpected" in message
    assert "embeddings.LayerNorm.weight has shape [31] instead of [32]" in message
    folder = copied("qwen3_embedding", tmp_path, "decoder")
    rewrite(folder, lambda tensors: tensors.pop("norm.weight"))
    with pytest.raises(UserError, match="norm.weight .32. is missing"):
        load_encoder(folder)


def test_names_of_old_norms(tmp_path):
    folder = copied("e5", tmp_path)

    def change(tensors):
        for name in [n for n in tensors if "LayerNorm" in n]:
            old = name.replace("weight", "gamma").replace("bias", "beta")
            tensors[old] = tensors.pop(name)

    rewrite(folder, change)
    again = load_encoder(folder)
    jax.tree.map(np.testing.assert_array_equal, again.params, encoder("e5")[0].params)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"model_type": "xlm-roberta"}, "multilingual E5 is. are not supported yet"),
        ({"model_type": "t5"}, "'t5' is not supported as an encoder"),
        ({"model_type": ["bert"]}, "is not supported as an encoder"),
        ({"hidden_act": "gelu_new"}, "exact GELU"),
        ({"position_embedding_type": "relative_key"}, "absolute position"),
        ({"is_decoder": True}, "both directions"),
        ({"quantization_config": {"bits": 4}}, "unquantised"),
        ({"model_type": "qwen2", "is_causal": False}, "attend in both directions"),
        ({"num_attention_heads": None}, "no field 'num_attention_heads'"),
    ],
)
def test_networks_that_cannot_be_computed_are_refused(fields, words, tmp_path):
    folder = copied("e5", tmp_path)
    config = {**json.loads((folder / "config.json").read_text()), **fields}
    config = {k: v for k, v in config.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=words):
        load_encoder(folder)


@pytest.mark.parametrize(
    "file, fields, words",
    [
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "max"]}, "mean . max"),
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "weightedmean"),
        ("1_Pooling/config.json", {"include_prompt": False}, "leaves prompts out"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(file, fields, words, tmp_path):
    folder = copied("e5", tmp_path)
    edit(folder / file, **fields)
    with pytest.raises(UserError, match=words):
        load_encoder(folder)


def test_other_pipelines_and_broken_files_are_refused(tmp_path):
    folder = copied("e5", tmp_path)
    modules = json.loads((folder / "modules.json").read_text())
    dense = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    (folder / "modules.json").write_text(json.dumps([*modules, dense]))
    with pytest.raises(UserError, match="Transformer > Pooling > Normalize > Dense"):
        load_encoder(folder)
    (folder / "modules.json").write_text("{}")
    with pytest.raises(UserError, match="modules.json is not valid"):
        load_encoder(folder)
    old = copied("minilm", tmp_path, "old")
    edit(old / "1_Pooling" / "config.json", pooling_mode_max_tokens=True)
    with pytest.raises(UserError, match="mean . max"):
        load_encoder(old)
    edit(old / "1_Pooling" / "config.json", pooling_mode_max_tokens=False)
    edit(old / "1_Pooling" / "config.json", pooling_mode_mean_sqrt_len_tokens=True)
    with pytest.raises(UserError, match="mean_sqrt_len"):
        read_settings(old, "old")


@pytest.mark.parametrize("name", ["e5", "qwen3_embedding"])
def test_a_pooling_that_is_named_but_not_there_is_refused(name, tmp_path):
    folder = copied(name, tmp_path)
    (folder / "1_Pooling" / "config.json").unlink()
    with pytest.raises(UserError, match="1_Pooling/config.json is not there"):
        load_encoder(folder)
    (folder / "1_Pooling").rmdir()
    with pytest.raises(UserError, match="1_Pooling/config.json is not there"):
        load_encoder(folder)
    # Without a word about the pooling, the family has a rule.
    for path in (folder / "modules.json", folder / "config_sentence_transformers.json"):
        path.unlink()
    rule = {"e5": "mean", "qwen3_embedding": "last"}
    assert load_encoder(folder).recipe.pooling == rule[name]


@pytest.mark.parametrize(
    "file, content, words",
    [
        ("modules.json", '["Transformer"]', "has the module 'Transformer'"),
        ("modules.json", '[{"type": 3, "path": ""}]', "has the module"),
        ("modules.json", '[{"type": "x.Transformer", "path": 7}]', "has the module"),
        ("modules.json", '[{"path": ""}]', "has the module"),
        ("modules.json", "7", "modules.json is not valid JSON of the expected form"),
        ("modules.json", "[" * 100_000, "modules.json is not valid JSON"),
        ("config_sentence_transformers.json", '{"prompts": ["a"]}', "has prompts = "),
        ("config_sentence_transformers.json", '{"prompts": "a"}', "has prompts = 'a'"),
        ("config_sentence_transformers.json", '{"prompts": {"query": 3}}', "the prompt query = 3"),
        ("config_sentence_transformers.json", '{"prompts": {"query": "\\ud800"}}', "no valid text"),
        ("config_sentence_transformers.json", "[]", "not valid JSON of the expected form"),
        ("sentence_bert_config.json", '{"max_seq_length": "24"}', "max_seq_length = '24'"),
        ("sentence_bert_config.json", '{"max_seq_length": 0}', "max_seq_length = 0"),
        ("sentence_bert_config.json", '{"max_seq_length": -1}', "max_seq_length = -1"),
        ("sentence_bert_config.json", '{"max_seq_length": true}', "max_seq_length = True"),
        ("sentence_bert_config.json", '{"max_seq_length": 24.5}', "max_seq_length = 24.5"),
        ("1_Pooling/config.json", "{}", "names no pooling mode"),
        ("1_Pooling/config.json", '{"pooling_mode_mean_tokens": false}', "names no pooling mode"),
        ("1_Pooling/config.json", '{"pooling_mode_mean_tokens": "no"}', "neither true nor false"),
        ("1_Pooling/config.json", '{"pooling_mode_cls_token": true}', "mean . cls"),
        ("1_Pooling/config.json", '{"pooling_mode": 3}', "pooling by 3"),
        ("1_Pooling/config.json", '{"pooling_mode": []}', "asks for pooling by"),
        ("1_Pooling/config.json", '{"pooling_mode": [["mean"]]}', "asks for pooling by"),
    ],
)
def test_settings_of_a_wrong_type_are_user_errors(file, content, words, tmp_path):
    folder = copied("e5", tmp_path)
    (folder / file).write_text(content)
    with pytest.raises(UserError, match=words) as e:
        read_settings(folder, "copy")
    assert str(folder / file) in str(e.value)


def test_null_settings_are_not_said(tmp_path):
    folder = copied("e5", tmp_path)
    edit(folder / "sentence_bert_config.json", max_seq_length=None)
    edit(folder / "config_sentence_transformers.json", prompts={"query": None, "document": "d: "})
    said = read_settings(folder, "copy")
    assert (said.max_length, said.query_prefix, said.passage_prefix) == (None, None, "d: ")
    edit(folder / "config_sentence_transformers.json", prompts=None)
    assert read_settings(folder, "copy").passage_prefix is None


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"num_attention_heads": 5}, "hidden_size = 32, which is not a multiple of .* = 5"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps = 'small'"),
        ({"layer_norm_eps": -1e-12}, "layer_norm_eps = -1e-12"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps = nan"),
        ({"type_vocab_size": None}, "type_vocab_size = None"),
        ({"max_position_embeddings": "512"}, "max_position_embeddings = '512'"),
        *(
            ({field: value}, f"config.json has {field} = ")
            for field in ("hidden_size", "num_attention_heads", "vocab_size")
            for value in ("32", 0, -32, 32.0, None, True, [32])
        ),
    ],
)
def test_fields_of_a_wrong_type_or_value_are_user_errors(fields, words):
    hf = json.loads((FIXTURES / "e5" / "config.json").read_text())
    with pytest.raises(UserError, match=words):
        BertConfig.from_hf(hf | fields)


@pytest.mark.parametrize(
    "file, fields, words",
    [
        ("sentence_bert_config.json", {"max_seq_length": 2}, "at most 2 tokens, 2 of them special"),
        ("tokenizer_config.json", {"model_max_length": "long"}, "model_max_length = 'long'"),
        ("tokenizer_config.json", {"model_max_length": -1}, "at most -1 tokens"),
    ],
)
def test_texts_have_room_beside_the_special_tokens(file, fields, words, tmp_path):
    folder = copied("e5", tmp_path)
    edit(folder / file, **fields)
    with pytest.raises(UserError, match=words):
        load_encoder(folder)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"dtype": "int8"}, "dtype is one of float32, bfloat16, not 'int8'"),
        ({"dtype": "float16"}, "dtype is one of float32, bfloat16, not 'float16'"),
        ({"dtype": None}, "not None"),
        ({"normalize": "no"}, "normalize is True, False or None, not 'no'"),
        ({"query_prefix": 3}, "a prefix is a text, not 3"),
        ({"passage_prefix": "\udcff"}, "a prefix is a text, not"),
        ({"dimension": "8"}, "dimension = '8'"),
        ({"dimension": True}, "dimension = True"),
        ({"pooling": ""}, "pooling is one of mean, cls, last, not ''"),
    ],
)
def test_arguments_without_a_meaning_are_user_errors(arguments, words):
    with pytest.raises(UserError, match=words):
        load_encoder(FIXTURES / "e5", **arguments)


@pytest.mark.parametrize(
    "texts, words",
    [
        (["x", 3], "text 1 is no string but int: 3"),
        (["x", None], "text 1 is no string but NoneType"),
        (["x", b"y"], "text 1 is no string but bytes"),
        ([["x", "y"]], "text 0 is no string but list"),
        (["x", "y", "a\ud83d"], "text 2 is no valid Unicode"),
        ("x", "not one string"),
        (b"x", "a list of texts, not bytes"),
        ({"x": "y"}, "a list of texts, not dict"),
        ({"x"}, "a list of texts, not set"),
        ((text for text in "x"), "a list of texts, not generator"),
        (None, "a list of texts, not NoneType"),
    ],
)
def test_what_is_no_text_is_not_encoded(texts, words):
    with pytest.raises(UserError, match=words):
        encoder("e5")[0].encode_texts(texts)


def test_a_text_is_named_by_its_number_in_the_whole_list(monkeypatch):
    monkeypatch.setattr("zest_jax.models.encoders._WINDOW", 1)
    with pytest.raises(UserError, match="text 5 is no string"):
        encoder("e5")[0].encode_texts(["x"] * 5 + [7], batch_size=2)
    with pytest.raises(UserError, match="text 1 is no valid Unicode"):
        encoder("e5")[0].tokenize(["x", "\udc00"], "query")


@pytest.mark.parametrize("size", [0, -1, 1.5, "4", None, True])
def test_a_batch_has_rows(size):
    with pytest.raises(UserError, match="batch_size is "):
        encoder("e5")[0].encode_texts(["x"], batch_size=size)


def test_arrays_of_texts_and_sizes_of_numpy_are_taken():
    got = encoder("e5")[0]
    vectors = got.encode_texts(np.array(["x", "y"]), batch_size=np.int64(2))
    np.testing.assert_array_equal(vectors, got.encode_texts(("x", "y"), batch_size=2))


def test_a_folder_without_a_tokenizer_is_a_user_error(tmp_path):
    folder = copied("e5", tmp_path)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(UserError, match="no tokenizer"):
        load_encoder(folder)


def test_a_tokenizer_of_another_model_is_a_user_error(tmp_path):
    folder = copied("e5", tmp_path)
    shutil.copy(FIXTURES / "qwen3_embedding" / "tokenizer.json", folder)
    with pytest.raises(UserError, match="ids up to 304, but the model has only 150 rows"):
        load_encoder(folder)


def test_wrong_arguments_are_user_errors():
    got = encoder("e5")[0]
    with pytest.raises(UserError, match="'document'"):
        got.encode_texts(["x"], "document")
    with pytest.raises(UserError, match="list of texts"):
        got.encode_texts("x", "query")
    with pytest.raises(UserError, match="pooling is one of mean, cls, last"):
        load_encoder(FIXTURES / "e5", pooling="max")
    with pytest.raises(UserError, match="32 components"):
        load_encoder(FIXTURES / "e5", dimension=33)
    with pytest.raises(ValueError, match="40 positions"):
        got.encode(got.params, np.zeros((1, 41), int), np.array([41]))


# --------------------------------------------------------------------------------- the mesh


def test_every_parameter_has_a_rule_of_its_own_rank():
    config = BertConfig(11, 8, 2, 2, 12)
    for path, leaf in jax.tree_util.tree_leaves_with_path(bert_shapes(config)):
        rule = RULES[path[-1].key]
        assert len(rule) in (0, leaf.ndim - (len(path) > 1)), path


def test_eight_devices_give_the_vectors_of_one():
    program = """
        import json, sys
        import jax, numpy as np
        from zest_jax.models import load_encoder
        from zest_jax.parallel import make_mesh

        assert len(jax.devices()) == 8
        mesh = make_mesh(data=2, fsdp=2, tensor=2)
        for folder in sys.argv[1:]:
            with np.load(f"{folder}/expected.npz") as f:
                want = dict(f)
            texts = json.loads(str(want["texts"]))
            encoder = load_encoder(folder, mesh=mesh)
            q = encoder.params["blocks"]["q_DHK"].sharding
            assert "fsdp" in q.spec and "tensor" in q.spec, q
            got = encoder.encode_texts(texts[:5], "query", batch_size=4)
            np.testing.assert_allclose(got, want["query"][:5], atol=1e-5, rtol=0)
        print("equal")
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": virtual_devices.flags(8),
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)]
        + [str(FIXTURES / name) for name in ("e5", "qwen3_embedding")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout.strip() == "equal", done.stderr[-3000:]
