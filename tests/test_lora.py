"""Adapters: a start that is the base itself, parity when merged, and what is computed for them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_hf import FIXTURES, LOGIT_TOLERANCE, all_logits, span

from zest_jax.errors import UserError
from zest_jax.learning.packing import PackSpec
from zest_jax.models import bind, load_pretrained, save_pretrained
from zest_jax.models.config import MATRICES, LoraSpec
from zest_jax.models.lora import add_lora, fingerprint, join, merge_lora, split_lora
from zest_jax.models.policy import empty_cache
from zest_jax.parallel.sharding import RULES

VOCAB, LENGTH = 40, 16
SPEC = LoraSpec(rank=3, alpha=6.0)
PACKS = PackSpec(rows=2, length=LENGTH, targets=LENGTH, micro_batches=2)


def with_adapters(config, params, spec=SPEC, seed=1, b_scale=0.0):
    """The policy with adapters; `b_scale` puts normal numbers where B begins as zeros."""
    config = dataclasses.replace(config, lora=spec)
    params = add_lora(config, params, jax.random.key(seed))
    rng = np.random.default_rng(seed)

    def fill(path, x):
        if "_lora_b_" in path[-1].key:
            return x + jnp.asarray(b_scale * rng.normal(size=x.shape), jnp.float32)
        return x

    return config, jax.tree_util.tree_map_with_path(fill, params)


@pytest.fixture(scope="module")
def base():
    return tiny.policy(VOCAB, qkv_bias=True)


# ------------------------------------------------------------------------- the arithmetic


def test_every_adapter_has_a_name_a_shape_and_a_rule(base):
    config, params = with_adapters(*base)
    adapters, frozen = split_lora(params)
    assert jax.tree.structure(frozen) == jax.tree.structure(base[1])
    assert len(adapters["blocks"]) == 2 * len(MATRICES) and adapters.keys() == {"blocks"}
    sizes = {"A": 3, "D": 32, "H": 4, "J": 2, "K": 8, "F": 48}
    for name, leaf in adapters["blocks"].items():
        letters = name.rsplit("_", 1)[1]
        assert leaf.shape == (2, *(sizes[letter] for letter in letters)), name
        assert leaf.dtype == jnp.float32
        assert len(RULES[name]) == len(letters), name
        if "_lora_b_" in name:
            assert not leaf.any()
        else:  # x A has about the size of x
            contracted = np.prod([sizes[letter] for letter in letters[:-1]])
            assert np.std(leaf) * contracted**0.5 == pytest.approx(1, rel=0.25), name
    # An adapter lies on the mesh as its matrix does.
    for target, (ins, outs) in MATRICES.items():
        rule = RULES[f"{target}_{ins}{outs}"]
        a, b = (RULES[name] for name in LoraSpec.names(target))
        assert tuple(a)[: len(ins)] == tuple(rule)[: len(ins)]
        assert tuple(b)[1:] == tuple(rule)[len(ins) :]


def test_split_and_join_move_no_array(base):
    _, params = with_adapters(*base)
    adapters, frozen = split_lora(params)
    again = join(frozen, adapters)
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True):
        assert one is other
    assert join(None, params) is params
    with pytest.raises(ValueError, match="both frozen and trained"):
        join(params, adapters)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_b_at_zero_the_model_is_the_base_bit_for_bit(base, dtype):
    config = dataclasses.replace(base[0], dtype=dtype)
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 24))
    want = all_logits(config, base[1], ids, span(24))
    got = all_logits(*with_adapters(config, base[1]), ids, span(24))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("targets", [tuple(MATRICES), ("v",), ("q", "down")])
def test_merged_it_is_the_same_model(base, targets):
    config, params = with_adapters(*base, LoraSpec(3, 6.0, targets), b_scale=0.1)
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 24))
    got = all_logits(config, params, ids, span(24))
    assert np.max(np.abs(got - all_logits(*base, ids, span(24)))) > 0.05
    merged_config, merged = merge_lora(config, params)
    assert merged_config == base[0]
    assert jax.tree.structure(merged) == jax.tree.structure(base[1])
    np.testing.assert_allclose(all_logits(merged_config, merged, ids, span(24)), got, atol=5e-6)
    # By hand, one layer of one matrix; what has no adapter is the base's own array.
    a, b = (np.asarray(params["blocks"][n][1], np.float64) for n in LoraSpec.names(targets[-1]))
    name = "{}_{}{}".format(targets[-1], *MATRICES[targets[-1]])
    want = base[1]["blocks"][name][1] + 6.0 / 3 * np.tensordot(a, b, 1)
    np.testing.assert_allclose(merged["blocks"][name][1], want, atol=1e-6)
    assert merged["embed_VD"] is params["embed_VD"]


def test_decoding_is_the_forward_pass(base):
    config, params = with_adapters(*base, b_scale=0.1)
    ids = np.random.default_rng(2).integers(0, VOCAB, (2, 24))

    @jax.jit
    def decoded(params, ids):
        policy = bind(config, params)
        layers, cache = policy.unstack(), empty_cache(config, 2, 24)
        one, cache = policy.extend(layers, cache, ids[:, :20], jnp.zeros(2, int))
        two, _ = policy.extend(layers, cache, ids[:, 20:], jnp.full(2, 20))
        return policy.logits(jnp.concatenate([one, two], axis=1))

    want = all_logits(config, params, ids, span(24))
    np.testing.assert_allclose(decoded(params, ids), want, atol=5e-6)


def test_the_base_may_lie_in_bfloat16(base):
    """Where the compute type is bfloat16 anyway, only the norms' scales are rounded."""
    config = dataclasses.replace(base[0], dtype="bfloat16")
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), base[1])
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 24))
    config, params = with_adapters(config, base[1], b_scale=0.1)
    adapters, _ = split_lora(params)
    np.testing.assert_array_equal(
        all_logits(config, join(half, adapters), ids, span(24)),
        all_logits(config, params, ids, span(24)),
    )
    _, merged = merge_lora(config, join(half, adapters))
    assert merged["blocks"]["q_DHK"].dtype == jnp.float32


# ------------------------------------------------------------------------- in and out


def test_the_merged_export_is_the_adapted_model_and_the_bare_one_that_of_transformers(tmp_path):
    config, params = load_pretrained(FIXTURES / "qwen3")
    with np.load(FIXTURES / "qwen3" / "expected.npz") as f:
        ids, want = f["ids"].astype(int), f["logits"]
    config, params = with_adapters(config, params)
    save_pretrained(*merge_lora(config, params), tmp_path / "fresh")
    got = all_logits(*load_pretrained(tmp_path / "fresh"), ids, span(24))
    assert np.max(np.abs(got - want)) <= LOGIT_TOLERANCE
    config, params = with_adapters(*load_pretrained(FIXTURES / "qwen3"), b_scale=0.05)
    with pytest.raises(UserError, match="merge them"):
        save_pretrained(config, params, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    save_pretrained(*merge_lora(config, params), tmp_path / "trained")
    adapted = all_logits(config, params, ids, span(24))
    assert np.max(np.abs(adapted - want)) > 1e-2
    got = all_logits(*load_pretrained(tmp_path / "trained"), ids, span(24))
    assert np.max(np.abs(got - adapted)) <= LOGIT_TOLERANCE


def test_the_fingerprint_sees_one_bit(base):
    params = base[1]
    number = fingerprint(params)
    assert number == fingerprint(jax.tree.map(lambda x: jnp.array(np.asarray(x)), params))
    other = params | {"embed_VD": params["embed_VD"].at[3, 4].multiply(1 + 2**-22)}
    assert fingerprint(other) != number
    blocks = params["blocks"] | {
        "k_DJK": params["blocks"]["v_DJK"],
        "v_DJK": params["blocks"]["k_DJK"],
    }
    assert fingerprint(params | {"blocks": blocks}) != number
    assert 0 <= fingerprint(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)) < 2**32


@pytest.mark.parametrize("fields", [{"rank": 0}, {"alpha": 0.0}, {"targets": ("q", "w")}])
def test_adapters_that_cannot_be_are_refused(fields):
    with pytest.raises(UserError):
        LoraSpec(**({"rank": 2} | fields))
