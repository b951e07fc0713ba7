"""EviBack (arXiv 2607.23955): labelled questions; a frozen teacher pays groups nobody got right.

python -m zest_jax.train --config=configs/eviback.py:qwen3-1.7b --workdir=runs/eviback \
    --config.source.file=train.jsonl --config.retrieval.index=wiki-18 \
    --config.evaluation.tasks=benchmarks.jsonl \
    --config.teacher.where=http://localhost:8000/v1 --config.teacher.model=glm-4.7-flash

The paper reports F1 0.291 against 0.251 of Search-R1 at 1.7B; we have not run that scale. `:atlas`
takes about two minutes on two fast CPU cores.
"""

from configs import common
from configs.scales import set_scale
from zest_jax.config import parse_arg

POLICIES = {"qwen3-0.6b": "Qwen/Qwen3-0.6B", "qwen3-1.7b": "Qwen/Qwen3-1.7B",
            "qwen3-4b": "Qwen/Qwen3-4B"}  # fmt: skip


def get_config(arg: str = ""):
    """EviBack.

    The published code's: exact match of well-formed trajectories only; all-zero groups are paid
    beta = gamma = 0.1 by the two-stage teacher, and their advantages scaled by lambda = 0.1 after
    normalisation with ddof 1; a group of one keeps its reward; 64 questions of 8 rollouts,
    learning rate 1e-6, temperature 0.7, ten turns, 4,096 tokens after the prompt, five documents
    shown of a search, 79 steps. Ours: the teacher's prompts; top-5 in place of 50 retrieved and 5
    shown, which is the same without a second ranking.

    Variants:
      qwen3-1.7b, qwen3-0.6b, qwen3-4b, atlas   the scale
      no_teacher   the same without the fallback (the paper's Search-R1 row)
    """
    variant = parse_arg(arg, scale=("qwen3-1.7b", *POLICIES, "atlas"), no_teacher=False)
    c = common.get_config()
    atlas = variant.scale == "atlas"
    set_scale(c, "atlas" if atlas else "qwen2.5-3b")
    c.method = "eviback" if not variant.no_teacher else "eviback_no_teacher"
    c.source.kind = "labelled"
    c.schedule.kind = "labelled"
    c.schedule.iterations = 1
    c.solver.reward = "strict_exact_match"
    c.solver.advantage.singleton = "raw"
    c.solver.group_size = 8
    c.fallback.enabled = not variant.no_teacher
    if atlas:
        # The shipped policy speaks no tool calls; its tags are well-formed by their own grammar.
        c.teacher.kind = "reader"
        c.schedule.tasks = 480
        c.schedule.solver_steps = 24
        return c
    c.policy.folder = POLICIES[variant.scale]
    c.source.file = "train.jsonl"
    c.retrieval.top_k = 5
    c.solver.protocol = "eviback"
    c.solver.prompt_length = 512
    c.solver.observation_length = 900
    c.solver.searches = 9
    c.solver.slots = 128
    c.solver.tasks_per_step = 64
    c.solver.temperature = 0.7
    c.schedule.solver_steps = 79
    return c
