"""The two scales of every method: that of the papers, and the embedded world in minutes on a CPU.

The papers' scale needs an index of Wiki-18 (`zest_jax.build_index`), a file of benchmark questions,
and accelerators; every path is an override away:

    --config.retrieval.index=wiki-18 --config.evaluation.tasks=benchmarks.jsonl
"""

from ml_collections import ConfigDict

POLICIES = {
    "qwen2.5-3b": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5-3b-base": "Qwen/Qwen2.5-3B",
    "qwen2.5-7b-base": "Qwen/Qwen2.5-7B",
}
SCALES = (*POLICIES, "atlas")
INSTRUCT_SCALES = tuple(s for s in SCALES if not s.endswith("base"))


def set_scale(c: ConfigDict, scale: str) -> None:
    """Sets everything that depends on the scale and not on the method.

    Found in the papers: backbone, learning rates near 1e-6, top-3 of E5 over Wiki-18, temperature
    1, clip 0.2, 500 tokens of an action and of an observation (Search-R1). The rest is ours.
    """
    if scale == "atlas":
        _atlas(c)
    else:
        _papers(c, scale)


def _papers(c: ConfigDict, scale: str) -> None:
    c.policy.folder = POLICIES[scale]
    c.policy.chat = not scale.endswith("base")
    c.policy.dtype = "bfloat16"
    c.retrieval.index = "wiki-18"  # a folder of zest_jax.build_index, or a server's address
    c.retrieval.top_k = 3
    c.retrieval.query_length = 64
    c.evaluation.tasks = "benchmarks.jsonl"
    c.evaluation.draws = 10_000
    c.solver.protocol = "search_r1"
    c.solver.prompt_length = 512
    c.solver.action_length = 500
    c.solver.observation_length = 500
    c.solver.searches = 4
    c.solver.slots = 256
    c.solver.tasks_per_step = 256
    c.solver.group_size = 5
    c.solver.learning_rate = 1e-6
    c.solver.warmup_steps = 4
    c.proposer.prompt_length = 1536
    c.proposer.action_length = 500
    c.proposer.observation_length = 500
    c.proposer.slots = 256
    c.proposer.seeds_per_step = 256
    c.proposer.learning_rate = 1e-6
    c.proposer.warmup_steps = 19
    c.gates.reading_length = 4096
    c.schedule.tasks = 33_923
    c.schedule.max_seeds = 60_000
    c.training.rows = 8
    c.training.remat = "full"
    c.checkpoint.every = 25


def _atlas(c: ConfigDict) -> None:
    """The shipped policy, a short schedule; sizes as of `configs/smoke.py`."""
    c.policy.folder = "smoke_policy"
    c.solver.decay = True
    c.proposer.decay = True
    c.schedule.iterations = 1
    c.schedule.proposer_steps = 6
    c.schedule.solver_steps = 16
    c.schedule.tasks = 192
    c.schedule.max_seeds = 288
    c.evaluation.draws = 2000


def searching_proposer_on_atlas(c: ConfigDict) -> None:
    """Sizes of a proposer that searches, and a shipped policy that has seen one."""
    c.policy.folder = "search_policy"
    c.proposer.prompt_length = 96
    c.proposer.action_length = 64
    c.proposer.searches = 3
    c.proposer.observation_length = 62
