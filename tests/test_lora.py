"""Adapters: a start that is the base itself, parity when merged, and what is computed for them."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_run
from test_hf import FIXTURES, LOGIT_TOLERANCE, all_logits, span
from test_resume import arrays, in_solver_phase, kill_when, numbers

from zest_jax import assembly, cli, evaluate, export, preflight
from zest_jax import config as config_lib
from zest_jax.errors import UserError
from zest_jax.learning import updates
from zest_jax.learning.advantages import HRPO
from zest_jax.learning.packing import Item, PackSpec, pack
from zest_jax.learning.updates import ProposalBatch, UpdateSpec
from zest_jax.models import bind, load_pretrained, save_pretrained
from zest_jax.models.cache import empty_cache
from zest_jax.models.config import MATRICES, LoraSpec
from zest_jax.models.lora import add_lora, fingerprint, join, merge_lora, split_lora
from zest_jax.parallel.sharding import RULES
from zest_jax.players import policy_folder
from zest_jax.rewards.terms import Signals

VOCAB, LENGTH = 40, 16
SPEC = LoraSpec(rank=3, alpha=6.0)
ROWS, PACKS = 5, PackSpec(rows=5, length=LENGTH, targets=LENGTH, micro_batches=1)


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
    """The numbers are those of the same rounded weights in float32."""
    config = dataclasses.replace(base[0], dtype="bfloat16")
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), base[1])
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 24))
    rounded = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    config, params = with_adapters(config, rounded, b_scale=0.1)
    adapters, _ = split_lora(params)
    np.testing.assert_array_equal(
        all_logits(config, join(half, adapters), ids, span(24)),
        all_logits(config, params, ids, span(24)),
    )
    _, merged = merge_lora(config, join(half, adapters))
    assert merged["blocks"]["q_DHK"].dtype == jnp.float32


# ------------------------------------------------------------------------- updates


@pytest.fixture(scope="module")
def shallow():
    return tiny.policy(VOCAB, layers=1, qkv_bias=True)


def batch_of(seed=0, packs=PACKS):
    rng = np.random.default_rng(seed)
    items = [rng.integers(0, VOCAB, LENGTH - 1).astype(np.int32) for _ in range(ROWS)]
    targets = np.arange(2, LENGTH - 1)
    zeros = np.zeros(len(targets), np.float32)
    return pack([Item(ids, targets, zeros) for ids in items], packs)


def moved(old, new):
    """Largest change of each leaf, in steps of Adam at its first update (all of size 1)."""
    return jax.tree.map(lambda a, b: float(np.max(np.abs(a - b))) / 1e-3, old, new)


@pytest.mark.parametrize(("remat", "moments"), [("none", "float32"), ("full", "int8")])
def test_only_the_adapters_move_and_as_in_an_update_of_everything(shallow, remat, moments):
    config, params = with_adapters(*shallow, b_scale=0.1)
    adapters, frozen = split_lora(params)
    spec = UpdateSpec(1e-3, max_grad_norm=1e9, remat=remat, moments=moments)
    step = jax.jit(updates.cloning_update, static_argnums=(0, 1))
    state, metrics = step(config, spec, spec.init(adapters), batch_of(), frozen)
    whole, whole_metrics = step(config, spec, spec.init(params), batch_of(), None)
    assert metrics["loss"] == pytest.approx(float(whole_metrics["loss"]), rel=1e-6)
    # Adam's first step is the gradient's sign: compare where no gradient is near 0.
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        other = whole.params["blocks"][path[-1].key]
        assert np.mean(np.abs(leaf - other) < 1e-5) > 0.99, path
    assert min(jax.tree.leaves(moved(adapters, state.params))) > 0.9
    assert metrics["grad_norm"] < whole_metrics["grad_norm"]
    kept = {jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state)}
    assert all("_lora_" in name or "count" in name or name == ".step" for name in kept), kept


@pytest.mark.parametrize("remat", ["none", "full"])
def test_no_gradient_of_a_frozen_matrix_is_computed(shallow, remat):
    """The compiled step has no product of the shape of a matrix, unless everything is trained."""
    config, params = with_adapters(*shallow)
    spec = UpdateSpec(1e-3, remat=remat)
    step = jax.jit(functools.partial(updates.cloning_update, config, spec))
    # Width 32, heads 4 x 8, keys 2 x 8, feed-forward 48, 40 words; 5 rows of 16 tokens.
    matrices = {"32,32", "32,16", "32,48", "48,32", "32,40"}

    def products(trained, frozen):
        text = step.lower(spec.init(trained), batch_of(), frozen).compile().as_text()
        return re.findall(r"= f32\[([\d,]*)\]\S* dot\(", text)

    of_adapters, of_all = products(*split_lora(params)), products(params, None)
    assert set(of_all) >= matrices and "32,3" in of_adapters
    assert not matrices & set(of_adapters)
    gone = sum(shape in matrices for shape in of_all)
    assert gone == len(MATRICES) + 1  # every matrix, and the head
    assert len(of_adapters) <= len(of_all) - gone


def test_a_single_micro_batch_is_what_several_add_up_to(shallow):
    config, params = with_adapters(*shallow, b_scale=0.1)
    adapters, frozen = split_lora(params)
    spec = UpdateSpec(1e-3, max_grad_norm=1e9)
    step = jax.jit(updates.cloning_update, static_argnums=(0, 1))
    several = PackSpec(rows=1, length=LENGTH, targets=LENGTH, micro_batches=ROWS)
    one, metrics = step(config, spec, spec.init(adapters), batch_of(), frozen)
    two, others = step(config, spec, spec.init(adapters), batch_of(packs=several), frozen)
    for name, value in metrics.items():
        assert value == pytest.approx(float(others[name]), rel=1e-5), name
    first, second = (jax.tree.leaves(s.opt_state) for s in (one, two))
    for x, y in zip(first, second, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-7)

    def loops(batch) -> list[str]:
        """But for those that the gradient of a lookup may be compiled to."""
        lowered = step.lower(config, spec, spec.init(adapters), batch, frozen)
        lines = lowered.compile().as_text().splitlines()
        return [line for line in lines if " while(" in line and "scatter-add" not in line]

    assert loops(batch_of(packs=several)) and not loops(batch_of())


def test_the_proposers_step_shares_its_base_with_the_anchor(shallow):
    """The same numbers as with whole parameters for both, of another anchor than the proposer."""
    config, params = with_adapters(*shallow, b_scale=0.1)
    anchor = with_adapters(*shallow, seed=2, b_scale=0.1)[1]
    batch = ProposalBatch(
        proposals=batch_of(1),
        contexts=batch_of(2),
        signals=Signals(*[np.ones(ROWS, np.float32)] * 5, np.ones((ROWS, 1), bool)),
        group_B=np.ones(ROWS, np.int32),
        reward_order_B=np.arange(ROWS),
    )
    spec = UpdateSpec(1e-3)

    @jax.jit
    def step(state, anchor, batch, frozen):
        def reward(signals, loglik_BC):
            return {"reward": loglik_BC[:, 0]}

        return updates.proposer_update(
            config, config, spec, HRPO, reward, state, anchor, batch, frozen, None, frozen
        )

    adapters, frozen = split_lora(params)
    state, _, parts = step(spec.init(adapters), split_lora(anchor)[0], batch, frozen)
    _, _, want = step(spec.init(params), anchor, batch, None)
    for name, value in want.items():
        np.testing.assert_allclose(parts[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert np.ptp(parts["loglik_BC"]) > 0.1
    assert jax.tree.structure(state.params) == jax.tree.structure(adapters)


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
    assert fingerprint(jax.tree.map(lambda x: 2 * x, params)) != number
    assert fingerprint(jax.tree.map(lambda x: x[::-1], params)) != number
    assert 0 <= fingerprint(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)) < 2**32


@pytest.mark.parametrize("fields", [{"rank": 0}, {"alpha": 0.0}, {"targets": ("q", "w")}])
def test_adapters_that_cannot_be_are_refused(fields):
    with pytest.raises(UserError):
        LoraSpec(**({"rank": 2} | fields))


# ------------------------------------------------------------------------- whole runs

LORA = (
    "--config.training.lora.rank=4",
    "--config.warm_start.learning_rate=1e-3",
    "--config.checkpoint.keep=50",
    "--config.schedule.iterations=1",
)


@pytest.fixture(scope="module")
def lora_run(place):
    workdir = place.folder / "lora"
    done = place.run(place.arguments(workdir, *LORA))
    assert done.returncode == 0, done.stderr
    assert re.search("policy of [0-9,]+ parameters .* of which [0-9,]+ in adapters", done.stderr)
    return workdir


def report(workdir):
    return json.loads((workdir / "report.json").read_text("utf-8"))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_trains_adapters_and_its_export_is_the_merged_policy(lora_run, tmp_path):
    assert report(lora_run)["retraces"] == 0
    state, host = arrays(lora_run)
    assert all("_lora_" in name or "count" in name or name.endswith(".step") for name in state)
    trained = {
        n.rsplit("'", 2)[1]: x for n, x in state.items() if n.startswith("['solver'].params")
    }
    assert min(np.abs(x).max() for name, x in trained.items() if "_lora_b_" in name) > 1e-4
    step = export.export(str(lora_run), "solver", str(tmp_path))
    parts, params, loaded_step = export.load_role(str(lora_run), "solver")
    assert step == loaded_step == host["step"] == 7
    config, exported = load_pretrained(tmp_path)
    want_config, want = merge_lora(parts.solver.policy, params)
    assert config == want_config and config.lora is None
    for one, other in zip(*map(jax.tree.leaves, (exported, want)), strict=True):
        np.testing.assert_array_equal(one, other)
    # No other weights go with these adapters, should the starting folder change under the run.
    frozen = parts.solver.frozen
    scaled = frozen | {"embed_VD": 2 * frozen["embed_VD"]}
    other = dataclasses.replace(parts.solver, frozen=scaled)
    assembly.check_base(host, parts)
    with pytest.raises(UserError, match="belong to other weights"):
        assembly.check_base(host, dataclasses.replace(parts, solver=other, proposer=other))


@pytest.mark.slow
def test_weights_of_an_earlier_step(lora_run, tmp_path, capsys):
    run = f"--workdir={lora_run}"
    assert export.entry(["export", run, f"--out={tmp_path}/0", "--step=0"]) == 0
    assert "solver of step 0 written" in capsys.readouterr().out
    # Adapters that are still zero: the policy that the run began with, bit for bit.
    folder = json.loads((lora_run / "config.json").read_text("utf-8"))["policy"]["folder"]
    _, exported = load_pretrained(tmp_path / "0")
    _, start = load_pretrained(policy_folder(folder))
    for one, other in zip(*map(jax.tree.leaves, (exported, start)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert evaluate.entry(["evaluate", run, "--step=2"]) == 0
    assert "step 2" in capsys.readouterr().out
    for entry, more in ((export.entry, [f"--out={tmp_path}/x"]), (evaluate.entry, [])):
        assert entry(["program", run, "--step=8", *more]) == cli.EXIT_USER
        err = capsys.readouterr().err
        steps = ", ".join(map(str, range(8)))
        assert f"no checkpoint of step 8; there are those of {steps} (" in err


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_killed_run_of_adapters_ends_with_the_same_numbers(place, lora_run, tmp_path):
    workdir = tmp_path / "killed"
    arguments = place.arguments(workdir, *LORA)
    kill_when(place, workdir, in_solver_phase, arguments)
    done = place.run(arguments)
    assert done.returncode == 0, done.stderr
    assert "resumed at step" in done.stderr
    assert numbers(workdir) == numbers(lora_run)
    (state, host), (want, want_host) = arrays(workdir), arrays(lora_run)
    assert host == want_host and state.keys() == want.keys()
    for name, value in state.items():
        np.testing.assert_array_equal(value, want[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_with_moments_of_8_bits(place, tmp_path):
    more = ("--config.training.moments=int8", "--config.schedule.iterations=1")
    done = place.run(place.arguments(tmp_path / "run", *more))
    assert done.returncode == 0, done.stderr
    assert report(tmp_path / "run")["retraces"] == 0
    state, host = arrays(tmp_path / "run")
    codes = [x for name, x in state.items() if "['solver'].opt_state" in name and x.ndim > 1]
    assert {x.dtype.name for x in codes} == {"int8", "uint8", "float32"}
    size = sum(x.size for name, x in state.items() if name.startswith("['solver'].params"))
    assert sum(x.nbytes for x in codes) < 2.3 * size
    assert host["step"] == 7 and host["base"] is None


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("lora.rank", -1, "training.lora.rank must be at least 0"),
        ("lora.alpha", 0.0, "training.lora.alpha above 0"),
        ("lora.targets", (), "training.lora.targets names some of q, k, v"),
        ("lora.targets", ("q", "head"), "training.lora.targets names some of q, k, v"),
        ("moments", "int4", "training.moments is one of float32, int8"),
    ],
)
def test_mistakes_in_the_config(field, value, words):
    config = config_lib.load(tiny_run.CONFIG)
    preflight.check_fields(config)
    config = config_lib.load(tiny_run.CONFIG, {f"training.{field}": value})
    with pytest.raises(UserError, match=words):
        preflight.check_fields(config)
