"""What a config's numbers come to, without building a run."""

import pytest

from zest_jax.assembly import evidence_parts, needs_reader, optimizer_steps, update_specs
from zest_jax.config import load
from zest_jax.tasks.gating import GATES, asks_reader


def test_learning_rates_run_over_the_optimisers_own_steps():
    """SSP on the atlas: 16 steps, each an update of either role on one optimiser: 32."""
    c = load("configs/ssp.py:atlas")
    assert optimizer_steps(c, "solver") == optimizer_steps(c, "proposer") == 2
    specs = update_specs(c)
    assert specs["solver"].total_steps == specs["proposer"].total_steps == 32
    assert specs["solver"].warmup_steps == 2 * c.solver.warmup_steps
    c = load("configs/zest_search.py:atlas")  # online, two policies
    specs = update_specs(c)
    assert specs["proposer"].total_steps == specs["solver"].total_steps == c.schedule.solver_steps
    c = load("configs/dr_free.py:atlas")  # iterated: each role has phases of its own
    c.solver.updates_per_batch = 3
    specs = update_specs(c)
    assert specs["solver"].total_steps == 3 * c.schedule.solver_steps
    assert specs["proposer"].total_steps == c.schedule.proposer_steps


def test_every_search_of_a_proposer_has_a_part_of_the_evidence():
    c = load("configs/dr_free.py:qwen2.5-3b,no_kg")
    assert (c.world.max_hops, c.proposer.searches, evidence_parts(c)) == (3, 4, 4)


@pytest.mark.parametrize(("gates", "asked"), [(("pair",), False), (("pair", "rag"), True)])
def test_a_gate_that_reads_has_a_reader(gates, asked):
    c = load("configs/dr_free.py:atlas")
    c.proposer.gates = gates
    assert needs_reader(c) is asked


def test_a_gate_of_ones_own_may_read_too():
    @GATES.register("reads_for_a_test")
    @asks_reader
    def reads(judged, means):
        return []

    c = load("configs/dr_free.py:atlas")
    c.proposer.gates = ("pair", "reads_for_a_test")
    assert needs_reader(c)
