"""Dr. Zero (arXiv 2601.07055): tool calls with several queries; a proposer that searches.

At most five assistant turns, 2,560 tokens after the prompt. The result of a call is JSON with one
text; what several queries found is parted by a line of dashes. A turn without a call ends the
episode, and so does a call that cannot be read. The proposer's question stands before its answer,
which ends the episode.
"""

import dataclasses

from zest_jax.rollout.protocols.protocol import ANSWER, SEARCH, Call, Limits, Protocol
from zest_jax.rollout.protocols.qwen_tools import ASSISTANT, SEVERAL_QUERIES, SPECIAL, USER

SOLVER = Protocol(
    name="dr_zero_solver",
    prompt=(
        "Answer the question below. Whenever you get new information, first reason about it "
        "between <think> and </think>. If you lack a fact, call the search engine between "
        "<tool_call> and </tool_call>; what is found comes back between <tool_response> and "
        "</tool_response>, and you may search as often as you need. Once nothing is missing, give "
        "the answer itself, without explanation, between <answer> and </answer>, for example "
        "<answer> Beijing </answer>. Question: {question}"
    ),
    actions=(("tool_call", SEARCH), ("answer", ANSWER)),
    call=Call(keys=("query_list", "query")),
    most_queries=4,
    observation=(
        f'{USER}<tool_response>\n{{{{"result": "{{passages}}"}}}}\n</tool_response>{ASSISTANT}'
    ),
    between_results="\\n---\\n",
    passage="Doc {rank} (Title: {title})\\n{text}",
    between_passages="\\n\\n",
    escape=True,
    final_action=False,
    special=SPECIAL,
    tools=SEVERAL_QUERIES,
    limits=Limits(turns=5, response=2560),
)

PROPOSER = dataclasses.replace(
    SOLVER,
    name="dr_zero_proposer",
    prompt=(
        "You write questions that take several facts to answer. Facts form a chain: node 1 stands "
        "in the document below, every further node follows from the one before it by a fact that "
        "you look up, and node n is the answer. A chain of n nodes takes n - 1 searches.\n"
        "Begin at a node of the document, extend the chain step by step, and stop at node n. "
        "Think between <think> and </think> before every step; search between <tool_call> and "
        "</tool_call>, and read what is found between <tool_response> and </tool_response>. At "
        "the end write the question between <question> and </question> and its answer, a few "
        "words, between <answer> and </answer>.\n"
        "The question names node 1 and none of the later ones, cannot be answered without the "
        "searches, has exactly one answer, and can be understood without the document. For n = 1 "
        "the answer stands in the document and no search is needed.\n"
        "n = {hops}\nDocument: (Title: {title})\n{text}"
    ),
)

PROTOCOLS = (SOLVER, PROPOSER)
