"""Proposals written by hand, as if a proposer had sampled them."""

from configs import common
from zest_jax.tasks.gates import parse_proposal
from zest_jax.tasks.gating import Means
from zest_jax.tasks.proposals import judge
from zest_jax.tasks.seeds import Proposal, Seed, Written
from zest_jax.tasks.sources.chains import chain_seed

CONFIG = common.get_config()
DR_FREE_GATES = tuple(CONFIG.proposer.gates)


def written(seed: Seed, output: str, *, queries=(), found=(), claims=True) -> Written:
    """A proposal of one turn, with the searches that it is said to have made."""
    parsed = parse_proposal(output, claims=claims)
    found = tuple(map(tuple, found))
    return Written(seed, output, (output,), tuple(queries), found, parsed, calls=len(queries))


def judge_one(one: Written, format_name="dr_free", gates=DR_FREE_GATES, means=None) -> Proposal:
    return judge([one], format_name, gates, means or Means(CONFIG.gates))[0]


def judge_chain(chain, output, atlas) -> Proposal:
    """An output for a chain through Dr. Free's gates."""
    return judge_one(written(chain_seed(chain, atlas), output))


def output(question, answer, think="<think> so</think>"):
    return f"{think}<question> {question}</question><answer> {answer}</answer>"
