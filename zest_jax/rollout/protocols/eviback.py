"""EviBack (arXiv 2607.23955): every turn is one thought and one action, a call or the answer.

A thought stands in <reason> or <think>. A turn that breaks the grammar makes the whole episode
worth nothing; `Protocol.well_formed` says whether one does. An unreadable call ends the episode.
At most ten turns and 4,096 tokens. The tool's result is JSON with the documents; the published one
repeats the query in it, which stands right before it in the call.
"""

from zest_jax.rollout.protocols.protocol import ANSWER, SEARCH, Call, Limits, Protocol
from zest_jax.rollout.protocols.qwen_tools import ASSISTANT, ONE_QUERY, SPECIAL, USER

EVIBACK = Protocol(
    name="eviback",
    prompt=(
        "Answer the question below with the help of the search tool. Every turn of yours has two "
        "parts and nothing else: your reasoning between <reason> and </reason>, then either one "
        'call <tool_call>{{"name": "search", "arguments": {{"query": "..."}}}}</tool_call> or '
        "the answer, a few words, between <answer> and </answer>. Answer once, in your last turn."
        "\nQuestion: {question}"
    ),
    actions=(("tool_call", SEARCH), ("answer", ANSWER)),
    call=Call(keys=("query",)),
    thought=("reason", "think"),
    observation=(
        f'{USER}<tool_response>\n{{{{"documents": [{{passages}}]}}}}\n</tool_response>{ASSISTANT}'
    ),
    passage='{{"title": "{title}", "text": "{text}"}}',
    between_passages=", ",
    escape=True,
    final_action=False,
    special=SPECIAL,
    tools=ONE_QUERY,
    limits=Limits(turns=10, response=4096),
)

PROTOCOLS = (EVIBACK,)
