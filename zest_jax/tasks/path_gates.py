"""Static verification of a question that was written from an evidence path, item by item.

ZEST-Search does not list its checks. Beside the general gates (a readable pair, no leak, lengths,
the target as answer) these are ours; each is a gate by name.
"""

from typing import Any

from zest_jax.tasks.gates import PASS, Verdict
from zest_jax.tasks.gating import GATES, Judged, each
from zest_jax.tasks.names import name_key, named


@GATES.register("start_named")
@each
def start_named(one: Judged, options: Any) -> Verdict:
    """The question names the entity that the path starts from: else nobody could begin."""
    nodes = one.written.seed.nodes
    if not nodes:
        return Verdict(False, "no path")
    begins = named(one.written.question or "", nodes[0])
    return PASS if begins else Verdict(False, "start not in question")


@GATES.register("between_hidden")
@each
def between_hidden(one: Judged, options: Any) -> Verdict:
    """No entity between start and answer stands in the question: it would cut the path short.

    A name that is part of the start's own ("York" in "New York") does not count.
    """
    question, nodes = one.written.question or "", one.written.seed.nodes
    for start in nodes[0] if nodes else ():
        question = _without(question, start)
    told = any(named(question, node) for node in nodes[1:-1])
    return Verdict(False, "entity between in question") if told else PASS


@GATES.register("answer_in_last")
@each
def answer_in_last(one: Judged, options: Any) -> Verdict:
    """The answer stands in the text of the path's last document."""
    seed = one.written.seed
    held = bool(seed.passages) and named(seed.passages[-1].text, seed.answers)
    return PASS if held else Verdict(False, "answer not in the last document")


@GATES.register("new_question")
@each
def new_question(one: Judged, options: Any) -> Verdict:
    """The question is not the reference itself."""
    reference = one.written.seed.fields.get("reference", "")
    same = name_key(one.written.question or "") == name_key(reference)
    return Verdict(False, "question is its reference") if same else PASS


def _without(question: str, name: str) -> str:
    key = name_key(name)
    return f" {name_key(question)} ".replace(f" {key} ", " ") if key else question
