"""A small real model becomes a search agent: SmolLM2-135M over 10,033 articles, without labels.

    python -m zest_jax.fetch_demo --out=demo
    python -m zest_jax.build_links --corpus=demo/wikipedia-summaries/corpus.jsonl \
        --tokenizer=demo/smollm2-135m-instruct --world=demo/world
    python -m zest_jax.build_index --corpus=demo/world/passages.jsonl \
        --encoder=demo/all-minilm-l6-v2 --index=demo/index
    python -m zest_jax.train --config=configs/demo.py --workdir=runs/demo

docs/results.md has what it was measured to do.
"""

from configs import common
from zest_jax.config import parse_arg


def get_config(arg: str = ""):
    """Dr. Free over links between Wikipedia summaries.

    Chains come from articles that name each other (`zest_jax.build_links`), searches are answered
    by MiniLM over all articles, the held-out questions start from articles that no chain of
    training holds. A short warm start on scripts teaches the tags; two thirds of its search
    episodes go wrong on purpose (most give up too early), which is what is left to learn.

    Variants:
      (none)      the whole run
      labelled    the same solver steps on templated questions with known answers (Search-R1), from
                  the same warm start
      no_opt      the proposer is never updated
    """
    variant = parse_arg(arg, labelled=False, no_opt=False)
    c = common.get_config()
    c.method = "demo" + "_labelled" * variant.labelled + "_no_opt" * variant.no_opt
    c.world.folder = "demo/world"
    c.policy.folder = "demo/smollm2-135m-instruct"
    c.policy.dtype = "bfloat16"
    c.retrieval.index = "demo/index"
    c.retrieval.top_k = 1
    c.retrieval.query_length = 32

    # Reading is no new skill to a real model: names need not be made up to teach copying.
    c.warm_start.steps = 40
    c.warm_start.sequences = 64
    c.warm_start.learning_rate = 1e-4
    c.warm_start.warmup_steps = 5
    c.warm_start.stop_every = 40
    c.warm_start.renamed = 0.0

    c.solver.prompt_length = 72
    c.solver.action_length = 48
    c.solver.observation_length = 256
    c.solver.searches = 4
    c.solver.slots = 256
    c.solver.tasks_per_step = 32
    c.solver.group_size = 8
    c.solver.learning_rate = 1e-5
    c.solver.decay = True
    c.proposer.prompt_length = 640
    c.proposer.action_length = 128
    c.proposer.slots = 96
    c.proposer.seeds_per_step = 96
    c.proposer.learning_rate = 1e-5
    c.proposer.decay = True
    c.proposer.frozen = variant.no_opt
    # As in the embedded world, one article often holds the last hop's words by itself.
    c.reward.without = ("hop",)
    c.schedule.iterations = 2
    c.schedule.proposer_steps = 8
    c.schedule.solver_steps = 40
    c.schedule.tasks = 1280
    c.schedule.max_seeds = 1920
    c.training.rows = 16
    c.checkpoint.every = 1000  # at the end of every phase
    c.checkpoint.keep = 1
    if variant.labelled:
        c.source.kind = "labelled"
        c.schedule.kind = "labelled"
        c.schedule.iterations = 1
        c.schedule.tasks = 2560
        c.schedule.solver_steps = 80
    return c
