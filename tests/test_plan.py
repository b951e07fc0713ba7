"""The plan of a run on a slice that is not there: names, exchanges, steps, compilations."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import plan_slices
import pytest
import tpu

from zest_jax import assembly, chips, config, hlo, memory_plan, roofline, steps
from zest_jax.errors import UserError
from zest_jax.planning import with_shapes
from zest_jax.proposing import Proposing
from zest_jax.tracing import TraceCounter

ROOT = Path(__file__).parents[1]

# ------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "topology", "count"),
    [
        ("v5e-256", "v5e:16x16", 256),
        ("v5litepod-16", "v5e:4x4", 16),
        ("v5p-128", "v5p:4x4x4", 64),
        ("v5p-8", "v5p:2x2x1", 4),
        ("v5p-16", "v5p:2x2x2", 8),
        ("v6e-64", "v6e:8x8", 64),
        ("v6e:2x4", "v6e:2x4", 8),
        ("h200-8", "", 8),
    ],
)
def test_a_slice_by_its_name(name, topology, count):
    found = chips.find_slice(name)
    assert (found.topology, found.count) == (topology, count)


@pytest.mark.parametrize("name", ["v5e-24", "v5p-12", "v4-8", "v5e", "h200:8", "h200-0", "v5p-4"])
def test_a_slice_that_is_none_is_refused(name):
    with pytest.raises(UserError, match=f"topology '{name}'"):
        chips.find_slice(name)


# --------------------------------------------------------------------------------- exchanges

PROGRAM = """HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (p: bf16[8,4]) -> bf16[2,4] {
  %whole = bf16[8,4]{1,0} all-reduce(%p), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %own = bf16[2,4] dynamic-slice(%whole)
}

%inner (p: (s32[], f32[16])) -> (s32[], f32[16]) {
  %g = f32[16]{0:T(128)} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}
  %f = bf16[2,4]{1,0} fusion(%y), kind=kLoop, calls=%all-reduce-scatter.1
}

%inner_condition (p: (s32[], f32[16])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

%outer (p: (s32[], f32[16])) -> (s32[], f32[16]) {
  %c = f32[2,2] constant({
{1, 2},
{3, 4}
})
  %w = (s32[], f32[16]) while(%t), condition=%inner_condition, body=%inner
  %s = ((f32[4]{0}, u32[]), (f32[8]{0}, u32[])) all-gather-start(%q), replica_groups={{0,1}}, \
metadata={op_name="jit(run)/while/body/decode/dot"}
}

%outer_condition (p: (s32[], f32[16])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: f32[16]) -> f32[] {
  %w = (s32[], f32[16]) while(%t), condition=%outer_condition, body=%outer
  ROOT %r = f32[] all-reduce(%z), replica_groups=mesh['a'=2,'b'=4] {'a','b'}, to_apply=%add
}
"""


def test_exchanges_of_a_program_by_hand():
    found = {c.operation + c.shapes[0]: c for c in hlo.collectives(PROGRAM)}
    assert set(found) == {
        "all-reducef32[]",
        "all-gatherf32[16]",
        "reduce-scatterbf16[8,4]",
        "all-gatherf32[8]",
    }
    once = found["all-reducef32[]"]
    assert (once.bytes, once.devices, once.times, once.loops) == (4, 8, 1, 0)
    assert once.travels == 2 * 4 * 7 / 8
    # Five turns within a loop whose end depends on data.
    layer = found["all-gatherf32[16]"]
    assert (layer.bytes, layer.devices, layer.times, layer.loops) == (64, 4, 5, 1)
    scattered = found["reduce-scatterbf16[8,4]"]
    assert (scattered.bytes, scattered.times, scattered.travels) == (64, 5, 48.0)
    assert hlo.part(found["all-gatherf32[8]"]) == "decode"
    assert hlo.summary(found.values())["all-gather", "loop"] == (5, 5 * 64)


# ---------------------------------------------------------------------------------- the steps


def shapes(tree):
    leaves, structure = jax.tree.flatten(tree)
    return [(np.shape(x), str(x.dtype)) for x in leaves], jax.tree.structure(
        jax.tree.unflatten(structure, range(len(leaves)))
    )


class Captured(Exception):
    """Carries the arguments of a compiled step that was not called."""


def test_steps_are_those_of_a_run(place):
    """State, batches and rollouts as a real run has them: same trees, shapes and types."""
    arguments = place.arguments(Path("unused"))
    flags = dict(a.removeprefix("--config.").split("=") for a in arguments if "config." in a[:9])
    c = config.load("tests/tiny_config.py", flags)
    parts = assembly.build(c, TraceCounter())
    described = steps.describe(c, steps.Described(), platform="cpu")
    by_name = steps.called(described.steps)
    state = assembly.state_from(c, parts, parts.solver.params)
    for name, tree in state.items():
        assert shapes(described.resident[name]) == shapes(tree), name

    def capture(*given):
        raise Captured(given)

    for role, sampler in (("solver", parts.solver_sampler), ("proposer", parts.proposer_sampler)):
        sampler._rollout = capture
        with pytest.raises(Captured) as caught:
            sampler(parts.solver.params, [[1, 2]], jax.random.key(0), 1.0)
        given, planned = caught.value.args[0], by_name[f"{role}_rollout"].arguments
        assert shapes(planned)[0] == shapes(given)[0], role
        assert by_name[f"{role}_rollout"].rollout == sampler.spec
    proposing = Proposing(c, parts, assembly.pack_specs(c))
    nobody = jax.tree.map(lambda x: x[:0], jax.device_get(_episodes(parts.proposer_sampler)))
    batch = proposing.batch(nobody, [], None, 0.0, np.zeros(0, np.int32))
    planned = by_name["proposer_update"].arguments[2]
    assert [x[0] for x in shapes(planned)[0]] == [x[0] for x in shapes(batch)[0]]


def _episodes(sampler):
    from zest_jax.rollout import trajectories

    spec = sampler.spec
    return trajectories.empty(1, spec.length, spec.searches, 1, spec.queries)


def test_policies_that_are_not_at_hand_have_a_known_shape():
    c = with_shapes(config.load("configs/dr_free.py:qwen2.5-7b"))
    assert json.loads((Path(c.policy.folder) / "config.json").read_text())["hidden_size"] == 3_584


# --------------------------------------------------------------------------------------- costs


def test_operations_are_counted_through_loops():
    def work(a, n):
        x = jax.lax.fori_loop(0, n, lambda _, x: x @ a, a)
        return jax.lax.scan(lambda x, _: (x @ a, None), x, jnp.arange(7))[0]

    given = (jax.ShapeDtypeStruct((16, 8), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32))
    square = (jax.ShapeDtypeStruct((8, 8), jnp.float32), given[1])
    assert roofline.flops(work, square, [3]) == 10 * 2 * 8**3
    assert roofline.flops(lambda a, n: a.T @ a, given) == 2 * 8 * 8 * 16


def test_changes_that_fit_are_tried_in_order():
    c = config.load("configs/smoke.py", {"training.remat": "none", "training.rows": 4})
    plan_of = functools.partial(_plan, most=1)
    assert memory_plan.fitting_changes(plan_of, c)[0] == {"training.remat": "dots"}
    first = memory_plan.fitting_changes(plan_of, c, first=[{"training.rows": 1}])
    assert first[0] == {"training.rows": 1}


def _plan(c, most):
    kept = {"none": 1.8, "dots": 0.9, "full": 0.9}[c.training.remat] * min(c.training.rows, 2) / 2
    return memory_plan.Plan((memory_plan.Line("kept", kept),), {}, most / memory_plan.USABLE)


# ------------------------------------------------------------------------------- compilations


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """What `plan_slices.py` says, by name, and the folder of its files."""
    folder = tmp_path_factory.mktemp("plans")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, str(ROOT / "tests" / "plan_slices.py"), str(folder)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3_000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {each["name"]: each for each in found}, folder


needs_compiler = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not tpu.INSTALLED, reason="the TPU compiler (libtpu) is not installed"),
]


class TestCompiled:
    pytestmark = needs_compiler

    @pytest.mark.parametrize("name", plan_slices.SLICES)
    def test_a_run_compiles_for_a_slice_and_fits(self, plans, name):
        said, folder = plans
        assert said[name]["code"] == 0, said[name]
        told = json.loads((folder / f"{name}.json").read_text())
        assert told["fits"] and 0 < told["peak"] < told["chip"]["memory"]
        names = {step["name"] for step in told["steps"]}
        assert names >= {"solver_rollout", "solver_update", "advantages"}
        if name == "v5p-8":
            assert names >= {"proposer_rollout", "proposer_update"}
        for step in told["steps"]:
            assert step["arguments"] <= step["assigned"], "the compiler writes no memory report"
            assert not step["problem"]
            assert step["name"] == "advantages" or step["seconds"] > 0
        update = next(step for step in told["steps"] if step["name"] == "solver_update")
        assert update["aliased"] >= 0.99 * update["outputs"] - 4_096, "the state is not donated"

    def test_one_that_does_not_fit_ends_with_2_and_the_smallest_change(self, plans):
        done = plans[0]["too small"]
        assert done["code"] == 2
        assert "--config.training.rows=" in done["err"] and "the compiler agrees" in done["err"]
