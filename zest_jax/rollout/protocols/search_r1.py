"""Search-R1 (arXiv 2503.09516): one user's turn, and everything after it in one reply."""

from zest_jax.rollout.protocols.protocol import ANSWER, SEARCH, Limits, Protocol

SEARCH_R1 = Protocol(
    name="search_r1",
    prompt=(
        "Answer the question below. Whenever you get new information, first reason about it "
        "between <think> and </think>. If you lack a fact, look it up with <search> query "
        "</search>; what is found comes back between <information> and </information>, and you may "
        "search as often as you need. Once nothing is missing, give the answer itself, without "
        "explanation, between <answer> and </answer>, for example <answer> Beijing </answer>. "
        "Question: {question}\n"
    ),
    actions=(("search", SEARCH), ("answer", ANSWER)),
    observation="\n\n<information>{passages}</information>\n\n",
    passage="Doc {rank}(Title: {title}) {text}\n",
    correction=(
        "\nThat was not a valid action. To look something up, put the query between <search> and "
        "</search>; to answer, put the answer between <answer> and </answer>. Try again.\n"
    ),
    limits=Limits(action=500, observation=500),
)

PROTOCOLS = (SEARCH_R1,)
