"""Parity with transformers (numbers of torch, kept as fixtures), and model folders in and out."""

import functools
import importlib.util
import json
import logging
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import transformers

from zest_jax.errors import UserError
from zest_jax.models import (
    PolicyConfig,
    bind,
    init_params,
    load_config,
    load_generation,
    load_pretrained,
    save_pretrained,
)
from zest_jax.models.cache import empty_cache
from zest_jax.models.tensor_files import open_tensors

FIXTURES = Path(__file__).parent / "fixtures" / "hf"
NAMES = sorted(p.name for p in FIXTURES.iterdir())
STORED = {"qwen3_untied": "bfloat16", "llama_linear_v4": "bfloat16"}
LOGIT_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-3


@functools.cache
def model(name):
    config, params = load_pretrained(FIXTURES / name)
    with np.load(FIXTURES / name / "expected.npz") as f:
        return config, params, dict(f)


@functools.partial(jax.jit, static_argnums=0)
def all_logits(config, params, ids, position, segment=None):
    policy = bind(config, params)
    return policy.logits(policy(ids, position, segment))


def span(length):
    return np.broadcast_to(np.arange(length), (2, length))


# ---------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name):
    config, params, want = model(name)
    got = all_logits(config, params, want["ids"].astype(int), span(24))
    assert np.max(np.abs(got - want["logits"])) <= LOGIT_TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_padded_and_packed_rows(name):
    config, params, want = model(name)
    ids, length = want["ids"].astype(int), want["length"]
    real = np.arange(24) < length[:, None]
    # Padding stands on the right, any id, and the real tokens never see it.
    padded = np.where(real, ids, 1)
    got = all_logits(config, params, padded, span(24))
    assert np.max(np.abs(got - want["left_padded_logits"])[real]) <= LOGIT_TOLERANCE
    # Both rows in one, told apart by their segments alone.
    packed = np.concatenate([ids[0, : length[0]], ids[1, : length[1]]])[None]
    position = np.concatenate([np.arange(length[0]), np.arange(length[1])])[None]
    segment = np.repeat([1, 2], length)[None]
    got = all_logits(config, params, packed, position, segment)[0]
    assert np.max(np.abs(got - want["left_padded_logits"][real])) <= LOGIT_TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_logits_at_long_positions(name):
    config, params, want = model(name)
    assert want["long_position"].max() > 20_000
    position = np.broadcast_to(want["long_position"], (2, 24)).astype(int)
    got = all_logits(config, params, want["ids"].astype(int), position)[:1]
    assert np.max(np.abs(got - want["long_logits"])) <= LOGIT_TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_torch(name, tmp_path):
    config, params, want = model(name)
    ids, length = jnp.asarray(want["ids"], jnp.int32), want["length"]
    counted = (np.arange(24) < length[:, None])[:, 1:]

    @jax.jit
    def loss_and_gradient(params):
        def loss(params):
            log_p = jax.nn.log_softmax(all_logits(config, params, ids, span(24))[:, :-1])
            nll = -jnp.take_along_axis(log_p, ids[:, 1:, None], -1)[..., 0]
            return jnp.sum(nll * counted) / counted.sum()

        return jax.value_and_grad(loss)(params)

    loss, gradient = loss_and_gradient(params)
    assert abs(loss - want["loss"]) <= 1e-5
    save_pretrained(config, gradient, tmp_path)  # the exporter gives torch's names and layout
    stored, _ = open_tensors(tmp_path)
    digests = {k.removeprefix("grad/"): v for k, v in want.items() if k.startswith("grad/")}
    assert stored.keys() == digests.keys()
    for tensor, digest in digests.items():
        flat = np.asarray(stored[tensor].view(), np.float64).ravel()
        signs = np.random.default_rng(3).integers(0, 2, (3, flat.size)) * 2 - 1
        entries = flat[np.linspace(0, flat.size - 1, 8).astype(int)]
        got = np.concatenate([[np.linalg.norm(flat)], signs @ flat, entries])
        # A projection on +-1 spreads as the norm does: all are measured against the norm.
        assert np.max(np.abs(got - digest)) <= GRADIENT_TOLERANCE * digest[0], tensor


@pytest.mark.parametrize("name", NAMES)
def test_greedy_generation_through_the_cache(name):
    config, params, want = model(name)
    ids, length = want["ids"].astype(int), want["prompt_length"].astype(int)
    steps = want["generated"].shape[1]

    @jax.jit
    def generate(params, prompt, length):
        policy = bind(config, params)
        layers = policy.unstack()
        cache = empty_cache(config, 2, 128)
        hidden, cache = policy.extend(layers, cache, prompt, jnp.zeros(2, int))
        token = jnp.argmax(policy.logits(hidden[jnp.arange(2), length - 1]), -1)

        def step(carry, at):
            cache, token = carry
            hidden, cache = policy.extend(layers, cache, token[:, None], length + at)
            return (cache, jnp.argmax(policy.logits(hidden[:, 0]), -1)), token

        return jax.lax.scan(step, (cache, token), jnp.arange(steps))[1].T

    got = generate(params, ids[:, : length.max()], length)
    np.testing.assert_array_equal(got, want["generated"])


# ---------------------------------------------------------------------------------- in and out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", ["5GB", 30_000])
def test_import_export_import_is_bit_exact(name, size, tmp_path):
    config, params, _ = model(name)
    save_pretrained(
        config, params, tmp_path, dtype=STORED.get(name, "float32"), max_shard_size=size
    )
    assert (tmp_path / "model.safetensors").exists() == (size == "5GB")
    again_config, again = load_pretrained(tmp_path)
    assert again_config == config
    jax.tree.map(np.testing.assert_array_equal, again, params)
    # Byte for byte what transformers had stored, under the same names.
    before, _ = open_tensors(FIXTURES / name)
    after, problems = open_tensors(tmp_path)
    assert not problems and before.keys() == after.keys()
    for tensor in before:
        assert before[tensor].view().tobytes() == after[tensor].view().tobytes()
        assert before[tensor].dtype == after[tensor].dtype


def test_a_later_export_replaces_an_earlier_one(tmp_path):
    config, params, _ = model("qwen2")
    save_pretrained(config, params, tmp_path, max_shard_size=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    save_pretrained(config, params, tmp_path)
    assert [p.name for p in tmp_path.glob("model*")] == ["model.safetensors"]


@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_the_exported_config(name, tmp_path, caplog):
    config, params, _ = model(name)
    save_pretrained(config, params, tmp_path)
    with caplog.at_level(logging.WARNING), propagated():
        read = transformers.AutoConfig.from_pretrained(tmp_path)
        original = transformers.AutoConfig.from_pretrained(FIXTURES / name)
    assert not caplog.records
    ours, theirs = read.to_dict(), original.to_dict()
    scaled = {k: v for k, v in theirs["rope_parameters"].items() if k != "type"}  # 4's old name
    assert scaled.items() <= ours["rope_parameters"].items()
    for field in ("model_type", "head_dim", "rms_norm_eps", "tie_word_embeddings", "vocab_size"):
        assert ours.get(field) == theirs.get(field, config.head_dim), field
    assert PolicyConfig.from_hf(theirs) == PolicyConfig.from_hf(ours) == config


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", ["5GB", 30_000])
def test_transformers_loads_the_export_without_a_warning(name, size, tmp_path, caplog):
    config, params, want = model(name)
    save_pretrained(config, params, tmp_path, tiny.tokenizer(), max_shard_size=size)
    import torch

    with caplog.at_level(logging.WARNING), propagated():
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, output_loading_info=True, attn_implementation="eager"
        )
    assert not caplog.records and not any(info.values()), (caplog.records, info)
    with torch.no_grad():
        got = loaded(torch.tensor(want["ids"].astype(int))).logits.numpy()
    assert np.max(np.abs(got - want["logits"])) <= 1e-6


def propagated():
    """Lets pytest see the records of transformers, which otherwise stay within its own logger."""
    import contextlib

    @contextlib.contextmanager
    def scope():
        logger = logging.getLogger("transformers")
        before, logger.propagate = logger.propagate, True
        try:
            yield
        finally:
            logger.propagate = before

    return scope()


def test_tokenizer_and_generation_settings_travel_along(tmp_path):
    config = PolicyConfig(320, 16, 1, 2, 1, 8, 24)
    params = init_params(config, jax.random.key(0))
    tokenizer = tiny.tokenizer()
    save_pretrained(config, params, tmp_path, tokenizer)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "x <search> naïve 東京</search>"
    assert again.encode(text) == tokenizer.encode(text)
    eos = tokenizer.eos_token_id
    assert load_generation(tmp_path) == {"eos_token_id": eos, "pad_token_id": eos}
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["eos_token_id"] == eos and "pad_token_id" not in written
    save_pretrained(config, params, tmp_path, generation={"eos_token_id": [5, 0]})
    assert load_generation(tmp_path) == {"eos_token_id": [5, 0]}


def test_bfloat16_parameters_on_request():
    config, params = load_pretrained(FIXTURES / "qwen3", param_dtype="bfloat16", dtype="bfloat16")
    assert config.dtype == "bfloat16"
    assert {a.dtype for a in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    whole = model("qwen3")[1]["embed_VD"]
    np.testing.assert_array_equal(params["embed_VD"], whole.astype(jnp.bfloat16))


# ------------------------------------------------------------------------------- what goes wrong


def rewrite(folder, change):
    """Applies `change` to the {name: array} of a single-file model and stores the result."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def copied(name, tmp_path):
    return Path(shutil.copytree(FIXTURES / name, tmp_path / name))


def test_all_wrong_tensors_are_named_at_once(tmp_path):
    folder = copied("qwen2", tmp_path)

    def change(tensors):
        del tensors["model.layers.1.self_attn.q_proj.bias"]
        tensors["model.layers.0.mlp.experts"] = np.zeros((2, 2), np.float32)
        tensors["model.norm.weight"] = np.zeros((31,), np.float32)

    rewrite(folder, change)
    with pytest.raises(UserError) as e:
        load_pretrained(folder)
    message = str(e.value)
    assert "model.layers.1.self_attn.q_proj.bias [32] is missing" in message
    assert "model.layers.0.mlp.experts is unexpected" in message
    assert "model.norm.weight has shape [31] instead of [32]" in message


def test_truncated_files_name_their_tensors(tmp_path):
    folder = copied("qwen3", tmp_path)
    path = folder / "model.safetensors"
    stored, _ = open_tensors(folder)
    last = max(stored, key=lambda name: stored[name].start)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match=f"{last.replace('.', '[.]')} is truncated"):
        load_pretrained(folder)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="truncated or no safetensors file"):
        load_pretrained(folder)


def test_a_missing_file_of_a_sharded_model_is_named(tmp_path):
    folder = copied("qwen2_yarn_sharded", tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match="model-00002-of-00003.safetensors is missing"):
        load_pretrained(folder)


def test_a_stored_head_of_a_tied_model_must_be_the_embedding(tmp_path):
    folder = copied("qwen2", tmp_path)
    embed = "model.embed_tokens.weight"
    rewrite(folder, lambda t: t.update({"lm_head.weight": t[embed].copy()}))
    config, params = load_pretrained(folder)
    assert config.tied and "head_DV" not in params
    rewrite(folder, lambda t: t.update({"lm_head.weight": t[embed] + 1}))
    with pytest.raises(UserError, match="although the two are tied"):
        load_pretrained(folder)


def test_old_rotary_buffers_are_ignored(tmp_path):
    folder = copied("llama3", tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda t: t.update({name: np.ones(4, np.float32)}))
    load_pretrained(folder)


def test_integer_weights_are_refused_by_name(tmp_path):
    folder = copied("qwen2", tmp_path)
    rewrite(folder, lambda t: t.update({"model.norm.weight": np.ones(32, np.int8)}))
    with pytest.raises(UserError, match="model.norm.weight has type I8"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"model_type": "qwen3_moe"}, "not supported yet"),
        ({"model_type": "gemma3"}, "gemma3"),
        (
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "sliding-window",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"bits": 4}}, "unquantised"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "original_max_position"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_models_that_cannot_be_computed_are_refused(fields, words):
    hf = {**json.loads((FIXTURES / "qwen3" / "config.json").read_text()), **fields}
    hf = {k: v for k, v in hf.items() if v is not None}
    if "layer_types" not in fields:
        hf.pop("layer_types", None)
    with pytest.raises(UserError, match=words):
        PolicyConfig.from_hf(hf)


def test_a_sliding_window_that_is_switched_off_is_no_obstacle():
    hf = {  # the fields of the published Qwen2.5-0.5B, as transformers 4 wrote them
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    config = PolicyConfig.from_hf(hf)
    assert (config.head_dim, config.rope_theta, config.qkv_bias) == (64, 1e6, True)
    assert config.tied and not config.qk_norm and config.rope_scaling is None


@pytest.mark.parametrize("name", ["no/such-model", "/no/such/folder", "nowhere"])
def test_a_model_that_is_nowhere_is_a_user_error(name):
    with pytest.raises(UserError, match="folder"):
        load_config(name)


def test_a_policy_of_no_family_cannot_be_exported(tmp_path):
    config = PolicyConfig(32, 16, 1, 2, 1, 8, 24, qkv_bias=True, qk_norm=True)
    with pytest.raises(UserError, match="neither Qwen2 nor Qwen3"):
        save_pretrained(config, init_params(config, jax.random.key(0)), tmp_path)
    with pytest.raises(UserError, match="max_shard_size"):
        save_pretrained(model("qwen2")[0], model("qwen2")[1], tmp_path, max_shard_size="lots")


# ----------------------------------------------------------------- configs that are off

BASE = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def test_rope_scaling_counts_where_both_groups_are_there():
    """As in transformers, where a model card's YaRN is added to a file that was saved anew."""
    plain = {"rope_type": "default", "rope_theta": 5e5}
    both = BASE | {"rope_theta": 5e5, "rope_parameters": plain, "rope_scaling": YARN}
    config = PolicyConfig.from_hf(both)
    assert config.rope_scaling.kind == "yarn" and config.rope_scaling.factor == 4.0
    assert config.rope_theta == 5e5
    with pytest.raises(UserError, match="write rope_theta into rope_scaling as well"):
        PolicyConfig.from_hf(BASE | {"rope_parameters": plain, "rope_scaling": YARN})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_attention_heads": "abc"}, "num_attention_heads = 'abc', which is no positive whole"),
        ({"num_attention_heads": None}, "no field 'num_attention_heads'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"head_dim": 15}, "a head size of 15"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"rope_theta": 0}, "rope_theta = 0"),
        ({"rope_parameters": "x"}, "rope_parameters = 'x', which is no group"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling of .* factor = 0"),
        ({"rope_scaling": YARN | {"factor": None}}, "rope_scaling of .* no field 'factor'"),
    ],
)
def test_values_that_no_model_has_are_named(changes, told):
    with pytest.raises(UserError, match=told):
        PolicyConfig.from_hf(BASE | changes)


def test_null_fields_take_their_defaults():
    config = PolicyConfig.from_hf(BASE | {"rms_norm_eps": None, "max_position_embeddings": None})
    assert (config.norm_eps, config.max_length) == (1e-6, 32_768)


@pytest.mark.parametrize("field", ["dtype", "param_dtype"])
def test_types_that_are_none(field):
    with pytest.raises(
        UserError, match=f"{field} is one of float32, bfloat16, float16, not 'int8'"
    ):
        load_pretrained("anywhere", **{field: "int8"})


def test_a_folder_without_tokenizer_or_with_another_models(tmp_path):
    from zest_jax.models.hf import read_tokenizer

    with pytest.raises(UserError, match="has no tokenizer"):
        read_tokenizer(tmp_path)
    tiny.tokenizer(tags_as_tokens=True).save_pretrained(tmp_path)
    read_tokenizer(tmp_path, 4096)
    with pytest.raises(
        UserError, match="has only 16 rows for them: it is the tokenizer of another"
    ):
        read_tokenizer(tmp_path, 16)


def test_a_folder_that_cannot_be_made(tmp_path):
    config = PolicyConfig(16, 8, 1, 2, 1, 4, 8)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        save_pretrained(config, init_params(config, jax.random.key(0)), tmp_path / "file" / "x")
