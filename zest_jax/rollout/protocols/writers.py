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

# The stages before ZEST's question: an answer first, then the facts that lead to it.
ZEST_TARGET = Protocol(
    name="zest_target",
    prompt=(
        "Here is a question. Do not answer it: name another entity of the same kind as its answer, "
        "one that encyclopedia articles about other things mention. Reply with one JSON object, "
        '{{"answer": "its name", "type": "what it is"}}, between <answer> and </answer>.\n'
        "Question: {question}"
    ),
    actions=(("answer", ANSWER),),
)

ZEST_PATH = Protocol(
    name="zest_path",
    prompt=(
        "Find a path of {hops} facts, or of fewer if there is none, that ends at {answer}. Every "
        "fact leads from one entity to another and is held by one sentence of the documents below, "
        "which names both; each fact begins where the one before it ends, and no entity comes "
        'twice. Reply with one JSON object, {{"edges": [{{"head": "entity", "relation": "a few '
        'words of the sentence", "tail": "entity", "sentence": "copied word for word", "document": '
        '"what stands in brackets before it"}}]}}, between <answer> and </answer>.\n'
        "Documents:\n{documents}"
    ),
    actions=(("answer", ANSWER),),
)

PROTOCOLS = (DR_FREE, ZEST, ZEST_TARGET, ZEST_PATH)
