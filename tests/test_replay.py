"""An update that was not finite: what is kept of it, and what a replay says of it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_config

from zest_jax import assembly, not_finite, replay
from zest_jax.config import resolved_json
from zest_jax.errors import UserError
from zest_jax.learning.packing import Item, PackSpec, pack
from zest_jax.learning.updates import ProposalBatch
from zest_jax.not_finite import Tried, keep_tried
from zest_jax.rewards.outcome import outcome
from zest_jax.rewards.terms import Signals
from zest_jax.rollout.trajectories import empty
from zest_jax.solving import Attempts, Solving
from zest_jax.tracing import TraceCounter
from zest_jax.workdir import Workdir

BAD = {"solver/loss": float("nan"), "solver/reward": 0.5}


def items(count, seed=0):
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        ids = rng.integers(20, 90, rng.integers(5, 12)).astype(np.int32)
        targets = np.arange(2, len(ids))
        out.append(Item(ids, targets, np.full(len(targets), -5.0, np.float32)))
    return out


@pytest.fixture(scope="module")
def run(place, tmp_path_factory):
    """A small run's config and parts, as its workdir knows them."""
    c = tiny_config.get_config()
    c.world.folder = str(place.world)
    c.policy.folder = ""
    c.policy.width, c.policy.layers, c.policy.mlp_width = 16, 2, 16
    c.policy.heads, c.policy.kv_heads, c.policy.head_dim = 2, 1, 8
    c.solver.kl_weight = 0.1
    workdir = tmp_path_factory.mktemp("replay")
    (workdir / "config.json").write_text(resolved_json(c), "utf-8")
    parts = assembly.build(c, TraceCounter())
    return c, parts, workdir


def keep(run, batch, advantage_N):
    """Leaves an update of the solver as a run does; what it said."""
    c, parts, path = run
    said = []
    state = assembly.initial_state(c, parts)
    tried = Tried(7, "solver", BAD, batch, advantage_N)
    with Workdir(path) as workdir:
        host = {"step": 6, "base": assembly.base_of(parts)}
        keep_tried(workdir, c, tried, state, host, said.append)
    return state, said


def test_names_rollout_and_token(run, capsys, tmp_path):
    c, parts, path = run
    rollouts = items(6)
    rollouts[4].logp[3] = -np.inf
    rollouts[2].logp[1] = -60.0
    packs = assembly.pack_specs(c)["solver"]
    batch = pack(rollouts, packs)
    advantage_N = np.array([1, -1, 2, 0.5, 1, -3], np.float32)
    _, said = keep(run, batch, advantage_N)
    assert len(said) == 1 and "solver/loss = nan" in said[0] and "zest_jax.replay" in said[0]

    dump = tmp_path / "found.json"
    entry = replay.entry
    assert entry(["replay", f"--workdir={path}", f"--dump={dump}"]) == 0
    out = capsys.readouterr().out
    token = int(rollouts[4].ids[rollouts[4].targets[3]])
    text = parts.solver.tokenizer.decode([token])
    verdict = out.rstrip().splitlines()[-1]
    assert verdict.startswith("The sampler's log-probability was not finite, first at rollout 4")
    assert f"rollout 4, token {rollouts[4].targets[3]}" in verdict and repr(text) in verdict

    found = json.loads(dump.read_text("utf-8"))
    (place,) = found["sampler"]
    assert (place["rollout"], place["id"], place["value"]) == (4, token, "-inf")
    before = parts.solver.tokenizer.decode(rollouts[4].ids[: rollouts[4].targets[3]].tolist())
    assert before.endswith(place["after"]) and place["after"]
    # A ratio that the loss cuts off is told, and is no fault.
    (far,) = found["far"]
    assert far["rollout"] == 2 and far["value"] > 50
    assert found["policy"] == [] == found["reference"] == found["scores"]
    assert found["metrics"]["not_finite_sampler_logp"] == 1
    assert not any(leaf["not_finite"] for leaf in found["weights"] + found["gradients"])
    assert {leaf["where"] for leaf in found["weights"]} == {
        "solver's weights", "solver's moments", "reference",
    }  # fmt: skip
    # The loss by rollout adds up to the update's, but for the KL penalty (of 0: nothing moved yet).
    assert found["metrics"]["kl_to_reference"] == pytest.approx(0, abs=1e-6)
    rows = {row["rollout"]: row for row in found["rows"]}
    assert rows.keys() == set(range(6)) and rows[5]["advantage"] == -3
    total = sum(row["loss"] for row in rows.values())
    assert found["metrics"]["loss"] == pytest.approx(total, rel=1e-3)
    # Gradients come from the head down.
    layers = [leaf["layer"] for leaf in found["gradients"] if leaf["layer"] is not None]
    assert layers == sorted(layers, reverse=True) and set(layers) == {0, 1}
    assert found["gradients"][-1]["leaf"].startswith("embed")


def test_the_state_before_comes_back_whole(run):
    c, _, path = run
    batch = pack(items(2, seed=1), assembly.pack_specs(c)["solver"])
    state, _ = keep(run, batch, np.ones(2, np.float32))
    case = replay.load(str(path))
    assert case.role == "solver" and case.what["updates_before"] == 6
    jax.tree.map(np.testing.assert_array_equal, case.state, state)
    jax.tree.map(np.testing.assert_array_equal, case.tried.batch, batch)
    assert case.tried.batch.segments == batch.segments
    np.testing.assert_array_equal(case.tried.advantage_N, [1, 1])


@pytest.mark.parametrize("scored", [True, False])
def test_batches_of_proposals_are_kept_too(run, tmp_path, scored):
    c, _, _ = run
    packs = PackSpec(rows=2, length=16, targets=16, micro_batches=2)
    column_B = np.arange(3, dtype=np.float32)
    batch = ProposalBatch(
        proposals=pack(items(3), packs),
        contexts=pack(items(3, seed=2), packs, [0, 4, 9]) if scored else None,
        signals=Signals(
            format_B=column_B,
            passed_B=column_B > 0,
            hops_B=column_B.astype(np.int32),
            probed_B=column_B > 1,
            difficulty_B=column_B / 2,
            valid_BC=np.eye(3, 5, dtype=bool),
            more={"words": column_B + 1},
        ),
        group_B=np.array([1, 1, 2], np.int32),
        reward_order_B=np.array([2, 0, 1]),
    )
    said = []
    tried = Tried(3, "online", {"proposer/not_finite_loglik": 2.0}, batch)
    with Workdir(tmp_path) as workdir:
        keep_tried(workdir, c, tried, {"x": jnp.ones(2)}, {"step": 2}, said.append)
    what, back = not_finite.read(tmp_path)
    assert what["role"] == "proposer" and what["phase"] == "online" and what["step"] == 3
    assert what["not_finite"] == {"proposer/not_finite_loglik": "2.0"}
    assert jax.tree.structure(back.batch) == jax.tree.structure(batch)
    jax.tree.map(np.testing.assert_array_equal, back.batch, batch)
    assert back.advantage_N is None and back.bad == tried.bad
    # The folder in which a run works whose workdir is a bucket is gone when somebody reads this.
    bucket = tmp_path / "bucket" / "mine"
    with Workdir(tmp_path / "local", checkpoints=bucket / "checkpoints") as workdir:
        keep_tried(workdir, c, tried, {"x": jnp.ones(2)}, {"step": 2}, said.append)
    assert f"copy {bucket} to runs/mine" in said[1] and "--workdir=runs/mine tells" in said[1]
    assert "local" not in said[1] and (bucket / "not_finite" / "state").is_dir()


def test_a_rollout_without_contrast_still_stops_the_update_where_it_is_no_number(run):
    """It has no advantage and would be left out of the batch."""
    c, parts, _ = run
    episodes = empty(4, 12, 1, 1)
    episodes.length_N[:] = 8
    episodes.mask_NL[:, 3:8] = True
    episodes.logp_NL[:, 3:8] = -1.0
    outcomes = [outcome(["a", "b"], ("a",)), outcome(["b", "b"], ("a",))]
    attempts = Attempts((), episodes, ["a", "b", "b", "b"], outcomes, np.array([1, 0, 0, 0.0]))
    solving = Solving(c, parts, assembly.pack_specs(c))
    advantage_N = np.array([1, -1, 0, 0, 0, 0], np.float32)  # padded

    def rows():
        (batch,) = solving.batches(attempts, advantage_N)
        return set(batch.owner_MRX[batch.mask_MRX].tolist())

    assert rows() == {0, 1}
    episodes.logp_NL[3, 5] = np.nan
    assert rows() == {0, 1, 3}
    episodes.logp_NL[3, 5], episodes.logp_NL[2, 1] = -1.0, np.nan  # not a sampled token
    assert rows() == {0, 1}


def test_a_folder_without_an_update_is_told(run, tmp_path, capsys):
    c, _, _ = run
    (tmp_path / "config.json").write_text(resolved_json(c), "utf-8")
    assert replay.entry(["replay", f"--workdir={tmp_path}"]) == 2
    assert "has no update to make again" in capsys.readouterr().err
    with pytest.raises(UserError, match="no workdir"):
        replay.load(str(tmp_path / "elsewhere"))


def leaf(where="solver's weights", broken=0, name="blocks/q_DHK", layer=1, largest=1.0):
    return {
        "where": where, "leaf": name, "layer": layer, "values": 9, "not_finite": broken,
        "largest": largest, "norm": 1.0,
    }  # fmt: skip


def found(**changes):
    """What a replay finds where nothing is wrong, but for the changes."""
    place = {"what": {"role": "solver", "device": "TPU v4"}, "device": "cpu", "metrics": {}}
    lists = dict.fromkeys(("sampler", "policy", "scores", "far", "rows", "gradients"), [])
    return place | lists | {"reference": None, "weights": [leaf()]} | changes


TOKEN = [{"rollout": 3, "token": 9, "text": "</x>"}]


@pytest.mark.parametrize(
    ("changes", "starts"),
    [
        ({}, "The update is finite now, on cpu (it was made on TPU v4)"),
        (
            {"weights": [leaf(), leaf(broken=2)], "policy": TOKEN, "gradients": [leaf(broken=9)]},
            "The weights were not finite before the update, first blocks/q_DHK, layer 1 (2 of 9",
        ),
        (
            {"weights": [leaf(where="solver's moments", broken=1, name="mu/embed_VD", layer=None)]},
            "The optimiser's moments were not finite before the update, first mu/embed_VD (1 of",
        ),
        ({"weights": [leaf(where="anchor", broken=1)]}, "The anchor was not finite, first blocks/"),
        (
            {"sampler": TOKEN, "policy": TOKEN},
            "The sampler's log-probability was not finite, first at rollout 3, token 9 ('</x>')",
        ),
        ({"policy": TOKEN}, "The policy's log-probability is not finite, first at rollout 3"),
        ({"reference": TOKEN}, "The reference's log-probability is not finite, first at rollout 3"),
        (
            {"scores": [{"proposal": 2, "what": "reward", "value": float("inf")}]},
            "Reward of proposal 2 is inf",
        ),
        (
            {"rows": [{"rollout": 5, "tokens": 3, "advantage": 1e38, "loss": -float("inf")}]},
            "The loss of rollout 5 is not finite",
        ),
        (
            {"gradients": [leaf(), leaf(broken=9, name="blocks/down_FD", layer=0)]},
            "The loss is finite and the gradient is not, first (from the head down) blocks/down_FD"
            ", layer 0",
        ),
        (
            {"metrics": {"loss": 1.0, "grad_norm": float("inf")}},
            "Everything that goes into the update is finite, and the update itself is not: "
            "grad_norm = inf.",
        ),
    ],
)
def test_the_verdict_names_what_comes_first(changes, starts):
    assert replay.verdict(found(**changes)).startswith(starts)
