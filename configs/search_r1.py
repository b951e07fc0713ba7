"""Search-R1 (arXiv 2503.09516): labelled questions, exact match, GRPO. The labelled baseline.

python -m zest_jax.train --config=configs/search_r1.py:qwen2.5-3b --workdir=runs/search_r1 \
    --config.source.file=train.jsonl --config.retrieval.index=wiki-18 \
    --config.evaluation.tasks=benchmarks.jsonl

The paper reports an average EM of 0.336 on its seven benchmarks for 3B-Instruct with GRPO; we have
not run that scale. `:atlas` takes about two minutes on two fast CPU cores.
"""

from configs import common
from configs.scales import SCALES, set_scale
from zest_jax.config import parse_arg


def get_config(arg: str = ""):
    """Search-R1.

    The paper's: source, reward, format table, KL 0.001 (low_var_kl), clip 0.2, learning rate 1e-6
    and 5e-7 with the format reward, 512 questions of 5 rollouts, 10 optimiser steps a batch, 4
    turns, top-3, 500 tokens a turn, tool output masked. Ours: warm-up in steps instead of a share
    of 15 epochs.

    Variants:
      qwen2.5-3b, qwen2.5-7b, …-base, atlas   the scale
      format   the reward by format table instead of bare exact match
    """
    variant = parse_arg(arg, scale=SCALES, format=False)
    c = common.get_config()
    set_scale(c, variant.scale)
    c.method = "search_r1"
    c.source.kind = "labelled"
    c.schedule.kind = "labelled"
    c.schedule.iterations = 1
    c.solver.kl_weight = 0.001
    if variant.format:
        c.method = "search_r1_format"
        c.solver.reward = "search_r1_format"
    if variant.scale == "atlas":
        c.schedule.tasks = 480  # questions by template over the training chains
        c.schedule.solver_steps = 24
        return c
    c.source.file = "train.jsonl"  # NQ and HotpotQA in FlashRAG's format
    c.solver.tasks_per_step = 512
    c.solver.updates_per_batch = 10
    c.solver.learning_rate = 5e-7 if variant.format else 1e-6
    c.schedule.solver_steps = 1005
    return c
