"""Dr. Zero (arXiv 2601.07055): a proposer that searches on from a document, paid by difficulty.

python -m zest_jax.train --config=configs/dr_zero.py:qwen2.5-3b --workdir=runs/dr_zero \
    --config.retrieval.index=wiki-18 --config.evaluation.tasks=benchmarks.jsonl

The paper's averages are 0.326 (3B) and 0.372 (7B) by recollection; independent runs were weaker. We
have not run that scale. `:atlas` takes about two minutes on two fast CPU cores.
"""

from configs import common
from configs.scales import INSTRUCT_SCALES, searching_proposer_on_atlas, set_scale
from zest_jax.config import parse_arg


def get_config(arg: str = ""):
    """Dr. Zero.

    The published code's: 0.5 s_fmt + 1[0<k<n] (n-k)/(n-1) with n = 5, HRPO over the batch (ddof 1,
    eps 1e-6 outside the root, a group of one keeps its reward), hops 4:3:2:1, three iterations of
    50 and 50 steps, no KL, gradient clip 0.1, at most five turns, five samples a seed in generation
    of which the best format is kept. Three of its flaws are switches:
      gates.substring_match      an answer "in" is found in "Berlin"
      generation.keep_refused    generation filters nothing
      proposer.gates             the published code asks for s_fmt > 0 alone

    Variants:
      qwen2.5-3b, qwen2.5-7b, atlas   the scale (tool calls need an instruct model)
      strict   without those flaws: whole words, refused questions are dropped, and a question must
               have been searched for as often as its hops say
    """
    variant = parse_arg(arg, scale=INSTRUCT_SCALES, strict=False)
    c = common.get_config()
    set_scale(c, variant.scale)
    set_method(c)
    if variant.strict:
        c.method = "dr_zero_strict"
        c.gates.substring_match = False
        c.generation.keep_refused = False
        c.proposer.gates = ("pair", "leakage", "searches", "grounded")
    c.proposer.protocol = "dr_zero_proposer"
    if variant.scale == "atlas":
        searching_proposer_on_atlas(c)
        c.proposer.protocol = "plain_document"
        c.proposer.seeds_per_step = 32
        c.proposer.slots = 32
        c.source.hop_weights = (4, 3, 2)  # no chain of this world is longer than three hops
        return c
    c.world.max_hops = 4
    c.solver.protocol = "dr_zero_solver"
    c.solver.searches = 4
    return c


def set_method(c) -> None:
    """What is Dr. Zero's, at any scale."""
    c.method = "dr_zero"
    c.source.kind = "documents"
    c.proposer.searches = 4
    c.proposer.format = "dr_zero"
    c.proposer.gates = ("pair", "format_positive")
    c.proposer.max_grad_norm = 0.1
    c.proposer.advantage.singleton = "raw"
    c.solver.advantage.singleton = "raw"
    c.solver.max_grad_norm = 0.1
    c.gates.substring_match = True
    c.reward.weights.format = 0.5
    c.reward.weights.information_gain = 0.0
    c.reward.weights.difficulty = 1.0
    c.reward.difficulty = "dr_zero"
    c.probe.model = "anchor"
    c.probe.rollouts = 5
    c.solver.group_size = 5
    c.generation.samples = 5
    c.generation.keep_refused = True
    c.generation.most_words = 50
