"""Proposers that are given their evidence and write one reply: <think>, <question>, <answer>.

Dr. Free's gets a chain and the passages of its entities, ZEST's a path of facts and the sentences
that hold them.
"""

from zest_jax.rollout.protocols.protocol import ANSWER, Protocol

_REPLY = (
    "First think between <think> and </think>. Then write the question between <question> and "
    "</question> and its answer, as it stands in the evidence, between <answer> and </answer>.\n"
)

DR_FREE = Protocol(
    name="dr_free_proposer",
    prompt=(
        "Write one question that follows the whole chain below from its first entity to its last, "
        "which is the answer. Name the first entity and how one leads to the next; name none of "
        f"the later entities. {_REPLY}"
        "Chain: {chain}\nPassages:\n{passages}"
    ),
    actions=(("answer", ANSWER),),
)

ZEST = Protocol(
    name="zest_proposer",
    prompt=(
        "Write one question whose answer is the end of the path below. Every fact of the path must "
        "be needed to find it; neither the answer nor an entity between may stand in the "
        f"question. {_REPLY}"
        "Path: {path}\nEvidence:\n{passages}"
    ),
    actions=(("answer", ANSWER),),
)

PROTOCOLS = (DR_FREE, ZEST)
