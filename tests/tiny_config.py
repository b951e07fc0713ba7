"""A whole run in seconds: the shipped policy, a few questions a step, two short iterations."""

from configs import common
from zest_jax.config import parse_arg


def get_config(arg: str = ""):
    """Variants: "" | "control" (shuffled rewards)."""
    variant = parse_arg(arg, control=False)
    c = common.get_config()
    # Random weights write no question that passes the gates, so the run starts where a warm start
    # has been, and does two steps of it for the code's sake.
    c.policy.folder = "smoke_policy"
    c.warm_start.steps = 2
    c.warm_start.sequences = 4
    c.warm_start.stop_every = 2
    c.warm_start.learning_rate = 1e-6
    c.solver.slots = 8
    c.solver.tasks_per_step = 4
    c.solver.group_size = 4
    c.proposer.slots = 6
    c.proposer.seeds_per_step = 6
    c.schedule.iterations = 2
    c.schedule.proposer_steps = 2
    c.schedule.solver_steps = 3
    c.schedule.tasks = 8
    c.schedule.max_seeds = 24
    c.training.rows = 4
    c.evaluation.draws = 200
    c.checkpoint.every = 1
    c.log.rollouts_every = 1
    c.control.shuffle_rewards = variant.control
    return c
