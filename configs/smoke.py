"""Dr. Free, whole, on the embedded world, in minutes on two CPU cores."""

from configs import common
from zest_jax.config import parse_arg


def get_config(arg: str = ""):
    """Variants: "" | "control" (shuffled rewards) | "gpu" (larger, from random weights) | "warm_start"."""
    variant = parse_arg(arg, size=("smoke", "gpu", "warm_start"), control=False)
    c = common.get_config()
    c.schedule.iterations = 2
    c.schedule.proposer_steps = 6
    c.schedule.solver_steps = 45
    c.schedule.tasks = 720
    c.schedule.max_chains = 960
    c.solver.decay = True
    c.policy.folder = "smoke_policy"
    if variant.size == "warm_start":
        c.policy.folder = ""
        c.schedule.iterations = 0
        c.warm_start.steps = 3000
        c.warm_start.stop_at_em = 0.45
    c.control.shuffle_rewards = variant.control
    return c
