"""Search self-play (arXiv 2510.18821): one policy solves, in Search-R1's way, and proposes.

The proposer works backwards from a given answer and ends with a question. Ten turns, 8,192 tokens.
"""

import dataclasses

from zest_jax.rollout.protocols.protocol import ANSWER, SEARCH, Limits, Protocol
from zest_jax.rollout.protocols.search_r1 import SEARCH_R1

_LIMITS = Limits(turns=10, response=8192)

SOLVER = dataclasses.replace(SEARCH_R1, name="ssp_solver", limits=_LIMITS)

PROPOSER = Protocol(
    name="ssp_proposer",
    prompt=(
        "You are given an answer, and write a question that it is the only answer to. Work "
        "backwards: do not look up the answer itself first, but something that is connected with "
        "it; find a fact that leads from there to the answer; then take the beginning of that fact "
        "as the new target and find one that leads to it, until the chain has as many links as "
        "there are searches.\n"
        "Rules: every fact comes from a search; the question does not give away the answer or the "
        "links between; it cannot be answered without searching; you search exactly as often as "
        "asked; and there is one right answer only.\n"
        "Think between <think> and </think>. Search with <search> query </search>; what is found "
        "comes back between <information> and </information>. At the end write the question "
        "between <question> and </question>.\n"
        "Answer: {answer}\nSearches: {searches}\n"
    ),
    actions=(("search", SEARCH), ("question", ANSWER)),
    observation=SEARCH_R1.observation,
    passage=SEARCH_R1.passage,
    correction=(
        "\nThat was not a valid action. To look something up, put the query between <search> and "
        "</search>; to finish, put the question between <question> and </question>. Try again.\n"
    ),
    limits=_LIMITS,
)

PROTOCOLS = (SOLVER, PROPOSER)
