"""Tool calls as the chat templates of Qwen2.5 and Qwen3 write them (Hermes' way).

A call ends the assistant's turn; its result is a user's turn of its own. The ends and beginnings of
turns are special tokens, and are written as their ids.
"""

import json

from zest_jax.rollout.protocols.protocol import ANSWER, SEARCH, Call, Protocol

SPECIAL = ("<|im_start|>", "<|im_end|>")
USER = "<|im_end|>\n<|im_start|>user\n"
ASSISTANT = "<|im_end|>\n<|im_start|>assistant\n"


def tool(argument: str, schema: dict, about: str) -> str:
    """A search tool with one argument, as chat templates take it."""
    function = {
        "name": "search",
        "description": about,
        "parameters": {
            "type": "object",
            "properties": {argument: schema},
            "required": [argument],
        },
    }
    return json.dumps([{"type": "function", "function": function}])


ONE_QUERY = tool(
    "query",
    {"type": "string", "description": "What to look for."},
    "Finds the passages of an encyclopedia that fit a query best.",
)
SEVERAL_QUERIES = tool(
    "query_list",
    {
        "type": "array",
        "items": {"type": "string"},
        "description": "What to look for: one or more queries.",
    },
    "Finds the passages of an encyclopedia that fit each query best.",
)

QWEN_TOOLS = Protocol(
    name="qwen_tools",
    prompt=(
        "Answer the question below. Think between <think> and </think> before every step. Call "
        "the search tool whenever you lack a fact, as often as you need. Once nothing is missing, "
        "give the answer itself, in a few words, between <answer> and </answer>.\n"
        "Question: {question}"
    ),
    actions=(("tool_call", SEARCH), ("answer", ANSWER)),
    call=Call(),
    observation=f"{USER}<tool_response>\n{{passages}}</tool_response>{ASSISTANT}",
    passage="Doc {rank} (Title: {title}) {text}\n",
    correction=(
        f"{USER}That was neither a valid call of the search tool nor an answer between <answer> "
        f"and </answer>. Try again.{ASSISTANT}"
    ),
    special=SPECIAL,
    tools=ONE_QUERY,
)

PROTOCOLS = (QWEN_TOOLS,)
