"""Dr. Free, whole, on the embedded world, in minutes on two CPU cores.

python -m zest_jax.train --config=configs/smoke.py --workdir=runs/smoke
"""

from configs import common
from zest_jax.config import parse_arg


def get_config(arg: str = ""):
    """Dr. Free on the atlas.

    Variants (after a colon, as in configs/smoke.py:gpu):
      (none)      a shipped policy of 0.8M parameters, two iterations
      gpu         a policy of 4.5M parameters from random weights: warm start, then three iterations
      warm_start  the warm start alone: what made the shipped policy (with zest_jax.warm_start)
      search_warm_start   the same from there for proposers that search: what made search_policy
      control     rewards go to random rollouts of the batch; must not learn (joins with the others)
    """
    variant = parse_arg(
        arg, size=("smoke", "gpu", "warm_start", "search_warm_start"), control=False
    )
    c = common.get_config()
    c.control.shuffle_rewards = variant.control
    c.schedule.iterations = 2
    c.schedule.proposer_steps = 6
    c.schedule.solver_steps = 24
    c.schedule.tasks = 384
    c.schedule.max_seeds = 576
    c.solver.decay = True
    c.proposer.decay = True
    # In this world one passage often gives the answer away by the relation's word alone, so that
    # with the single passages of the hops among the shortcuts no question would gain anything
    # (docs/smoke.md has the figures). They are scored and logged all the same.
    c.reward.without = ("hop",)
    if variant.size == "smoke":
        c.policy.folder = "smoke_policy"
        return c

    c.warm_start.steps = 1500
    c.warm_start.sequences = 160
    c.warm_start.stop_every = 250
    if variant.size == "warm_start":
        c.schedule.iterations = 0
        return c

    if variant.size == "search_warm_start":
        c.policy.folder = "smoke_policy"
        c.schedule.iterations = 0
        c.warm_start.learning_rate = 1e-3
        c.warm_start.solver = 0.35
        c.warm_start.reading = 0.1
        c.warm_start.proposer = 0.15
        c.warm_start.document = 0.2
        c.warm_start.backward = 0.2
        c.warm_start.flawed_proposer = 0.4
        # Room for episodes of proposers that search.
        c.proposer.protocol = "plain_document"
        c.proposer.searches = 3
        c.source.kind = "documents"
        c.source.hop_weights = (1, 1, 1)
        c.proposer.prompt_length = 96
        return c

    c.policy.width = 256
    c.policy.layers = 6
    c.policy.heads = 8
    c.policy.mlp_width = 704
    c.warm_start.learning_rate = 1e-3
    c.solver.slots = 256
    c.solver.tasks_per_step = 32
    c.solver.learning_rate = 2e-4
    c.proposer.slots = 96
    c.proposer.seeds_per_step = 96
    c.proposer.learning_rate = 2e-4
    c.schedule.iterations = 3
    c.schedule.proposer_steps = 10
    c.schedule.solver_steps = 50
    c.schedule.tasks = 1600
    c.schedule.max_seeds = 2304
    c.training.rows = 32
    c.checkpoint.every = 100
    return c
