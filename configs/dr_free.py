"""Dr. Free (arXiv 2609.33565): questions for knowledge-graph chains, paid by a likelihood contrast.

python -m zest_jax.train --config=configs/dr_free.py:qwen2.5-3b --workdir=runs/dr_free \
    --config.source.file=chains --config.retrieval.index=wiki-18 \
    --config.evaluation.tasks=benchmarks.jsonl

The paper reports an average EM of 0.375 (backbone not named); we have not run that scale. `:atlas`
takes about two minutes on two CPU cores (`configs/smoke.py` is the longer version of it).
"""

from configs import common
from configs.scales import SCALES, searching_proposer_on_atlas, set_scale
from zest_jax.config import parse_arg

# The paper's names of the shortcuts, and ours.
SHORTCUTS = {"source": "source", "hop": "hop", "closed_book": "none", "one_shot": "one_shot"}


def get_config(arg: str = ""):
    """Dr. Free.

    The paper's: chains of 1 to 3 hops in equal shares, R = 0.2 s_fmt + R_IG where the format is
    perfect and the answer grounded beyond the source, tanh bounded by tau = 3, HRPO, GRPO with
    exact match, three iterations of 50 and 50 steps, the anchor is the base model and then the
    previous solver, top-3 of E5 over Wiki-18. Ours (its appendix could not be read): learning rate,
    batch and lengths as of Dr. Zero; equal weights of the format's parts; tau tanh(gain / tau) of
    the two forms that fit.

    Variants, the paper's ablations among them:
      qwen2.5-3b, qwen2.5-7b, …-base, atlas   the scale
      difficulty    paid by difficulty instead of the gain
      both          by both
      no_opt        the proposer is never updated
      no_kg         seeds are documents with a number of hops, and the proposer searches; Dr. Zero's
                    format score goes with it, all else stays
      without=NAME  one shortcut is left out: source, hop, closed_book or one_shot
    """
    variant = parse_arg(
        arg,
        scale=SCALES,
        reward=("gain", "difficulty", "both"),
        no_opt=False,
        no_kg=False,
        without=("nothing", *SHORTCUTS),
    )
    c = common.get_config()
    set_scale(c, variant.scale)
    atlas = variant.scale == "atlas"
    c.method = "dr_free"
    if variant.no_kg:
        c.method = "dr_free_no_kg"
        c.source.kind = "documents"
        # The proposer claims the answer, and its score counts its searches.
        c.proposer.gates = tuple(g for g in c.proposer.gates if g != "target")
        c.proposer.format = "dr_zero"
        c.proposer.searches = 4
        c.proposer.protocol = "dr_zero_proposer"
        c.source.hop_weights = (1, 1, 1)
        if atlas:
            searching_proposer_on_atlas(c)
            c.proposer.protocol = "plain_document"
    elif not atlas:
        c.source.kind = "chain_pool"
        c.source.file = "chains"  # a folder of zest_jax.build_chains
        c.proposer.protocol = "dr_free_proposer"
    if variant.reward != "gain":
        c.method += f"_{variant.reward}"
        c.reward.weights.difficulty = 1.0
    if variant.reward == "difficulty":
        c.reward.weights.information_gain = 0.0
    if variant.no_opt:
        c.method += "_no_opt"
        c.proposer.frozen = True
    if atlas and variant.reward != "difficulty":
        # In this world one passage often gives the answer away by the relation's word alone
        # (docs/smoke.md), so the single passages of the hops are scored and not compared with.
        c.reward.without = ("hop",)
    if variant.without != "nothing":
        c.method += f"_without_{variant.without}"
        c.reward.without = tuple({*c.reward.without, SHORTCUTS[variant.without]})
    return c
