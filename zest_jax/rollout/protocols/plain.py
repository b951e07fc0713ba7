"""The shortest protocols, for a small policy that was warm-started on them.

Names stand after a space everywhere, so that a byte-level tokenizer writes them with the same ids.
The shipped policy was trained on these very texts.
"""

from zest_jax.rollout.protocols.protocol import ANSWER, SEARCH, Protocol

# Search-R1's episode without the instructions.
PLAIN_SEARCH = Protocol(
    name="plain_search",
    prompt="Q: {question}\n",
    actions=(("search", SEARCH), ("answer", ANSWER)),
)

# A proposer that is given its evidence writes one reply: <think>, <question>, <answer>.
PLAIN_PROPOSER = Protocol(
    name="plain_proposer",
    prompt="Write a question.\nChain: {chain}\n{passages}",
    actions=(("answer", ANSWER),),
)

# A proposer that is given a document and searches on from there (Dr. Zero without instructions).
PLAIN_DOCUMENT = Protocol(
    name="plain_document",
    prompt="Write a question.\nHops: {hops}\n {title}: {text}\n",
    actions=(("search", SEARCH), ("answer", ANSWER)),
)

# A proposer that is given the answer and works backwards (SSP without instructions).
PLAIN_BACKWARD = Protocol(
    name="plain_backward",
    prompt="Write a question.\nAnswer: {answer}\nSearches: {searches}\n",
    actions=(("search", SEARCH), ("question", ANSWER)),
)

# A proposer that is given a reference question names an answer of the same kind (ZEST-Search).
PLAIN_TARGET = Protocol(
    name="plain_target",
    prompt="Name an answer.\nReference: {question}\n",
    actions=(("answer", ANSWER),),
)

PROTOCOLS = (PLAIN_SEARCH, PLAIN_PROPOSER, PLAIN_DOCUMENT, PLAIN_BACKWARD, PLAIN_TARGET)
