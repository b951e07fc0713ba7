"""The stages before a question, with a proposer that says what it is told to say."""

import json
import types

import jax
import numpy as np
import pytest

from configs import common
from zest_jax.rollout.protocols import find
from zest_jax.staging import Staging
from zest_jax.tasks.evidence_paths import Aliases, PathCase, PathRules
from zest_jax.tasks.path_building import choose, written_path
from zest_jax.tasks.sources.references import References
from zest_jax.tasks.types import Passage

PASSAGES = {
    p.id: p
    for p in (
        Passage("lyon", "Lyon", "Its country is France."),
        Passage("france", "France", "Its capital is Paris. Its neighbour is Spain."),
        Passage("spain", "Spain", "Its neighbour is France. Its capital is Madrid."),
        Passage("held", "Seville", "Its river is the Guadalquivir."),
    )
}
ALIASES = Aliases(
    [("lyon", ("Lyon",)), ("france", ("France",)), ("spain", ("Spain",)), ("paris", ("Paris",)),
     ("madrid", ("Madrid",)), ("river", ("Guadalquivir",)), ("rome", ("Rome",))]
)  # fmt: skip
FOUND = {
    "Paris": ["france"],
    "Madrid": ["spain"],
    "Guadalquivir": ["held"],
    "France": ["france", "lyon", "spain"],
    "Spain": ["spain", "france"],
    "Rome": ["france"],
}


class Says:
    """A sampler whose replies are looked up by what its prompt has in it."""

    def __init__(self, protocol, replies, longest=10_000):
        self.protocol, self.replies = find(protocol), replies
        self.spec = types.SimpleNamespace(prompt_length=longest)

    def __call__(self, params, prompts, key, temperature):
        assert params == "params" and temperature == 1.0
        return ["".join(map(chr, ids)) for ids in prompts]

    def texts(self, episodes):
        return [
            next((reply for part, reply in self.replies.items() if part in text), "")
            for text in episodes
        ]


def staging(targets, paths=None, path="linked", longest=10_000, longest_path=10_000, **source):
    config = common.get_config()
    config.source.path = path
    config.source.title_is_subject = True
    config.source.update(source)
    questions = [(f"r{n}", question) for n, question in enumerate(targets)]
    replies = {q: f"<answer> {answer}</answer>" for q, answer in targets.items()}
    parts = types.SimpleNamespace(
        source=References(questions, ALIASES, True, (0, 1), frozenset({"held"})),
        proposer=types.SimpleNamespace(encode=lambda texts: [list(map(ord, t)) for t in texts]),
        retrieval=types.SimpleNamespace(
            find=lambda texts, most: [[PASSAGES[d] for d in FOUND.get(t, [])] for t in texts]
        ),
        stages={
            "target": Says("plain_target", replies, longest),
            "path": Says("zest_path", paths or {}, longest_path),
        },
    )
    made = Staging(config, parts)
    references = sorted(
        parts.source.draw(len(targets), np.random.default_rng(0), lambda seed: True),
        key=lambda seed: seed.source_id,
    )
    return made("params", references, jax.random.key(0), np.random.default_rng(0))


TARGETS = {
    "First?": "Paris",  # two hops, from Lyon or Spain
    "Second?": "Madrid",
    "Third?": "Nowhere",  # no known entity
    "Fourth?": "Rome",  # no document names it
    "Fifth?": "Guadalquivir",  # only a document of the evaluation does
    "Sixth?": "Paris",  # a second time
    "Seventh?": "paris</answer><answer> {",  # unreadable
}


def test_each_stage_refuses_something():
    seeds, funnel = staging(TARGETS)
    assert [seed.answers for seed in seeds] == [("Paris",), ("Madrid",)]
    assert funnel.reasons["target"] == {
        "": 4, "target is no known entity": 1, "target named before": 1, "target unreadable": 1,
    }  # fmt: skip
    assert funnel.reasons["support"] == {"": 3, "no document names it": 1}
    assert funnel.reasons["path"] == {"": 2, "start is of the evaluation": 1}
    paris, madrid = seeds
    assert paris.hops == 2 and paris.words[2:] == ("France", "capital", "Paris")
    assert paris.words[0] in ("Lyon", "Spain") and len(paris.passages) == 2
    assert paris.source_id == paris.passages[0].id and paris.passages[1].id == "france"
    assert paris.nodes == ((paris.words[0],), ("France",), ("Paris",))
    assert paris.fields["reference"] == "First?" and paris.fields["answer"] == "Paris"
    assert paris.fields["path"] == " | ".join(paris.words)
    assert madrid.words == ("France", "neighbour", "Spain", "capital", "Madrid")
    assert set(funnel.seconds) == {"target", "support", "path"}


def edge(head, relation, tail, sentence, document):
    return {"head": head, "relation": relation, "tail": tail, "sentence": sentence,
            "document": document}  # fmt: skip


def test_a_path_that_the_proposer_writes():
    lyon = edge("Lyon", "country", "France", "Its country is France.", "lyon")
    paris = edge("France", "capital", "Paris", "Its capital is Paris.", "france")
    made_up = edge("Spain", "capital", "Madrid", "Spain has the capital Madrid.", "spain")
    paths = {
        "ends at Paris": f"<answer>{json.dumps({'edges': [lyon, paris]})}</answer>",
        "ends at Madrid": f"<answer>{json.dumps({'edges': [made_up]})}</answer>",
        "ends at Guadalquivir": "<answer>none</answer>",
    }
    seeds, funnel = staging(TARGETS, paths, path="written")
    assert [seed.words for seed in seeds] == [("Lyon", "country", "France", "capital", "Paris")]
    assert funnel.reasons["path"] == {
        "": 1, "sentence not in its document": 1, "path unreadable": 1,
    }  # fmt: skip


def test_a_start_that_is_held_out_is_refused_wherever_its_sentence_stands():
    held = edge("Seville", "neighbour", "France", "Its neighbour is France.", "spain")
    paris = edge("France", "capital", "Paris", "Its capital is Paris.", "france")
    paths = {"ends at Paris": f"<answer>{json.dumps({'edges': [held, paris]})}</answer>"}
    seeds, funnel = staging(TARGETS, paths, path="written")
    assert not seeds and "sentence lacks an entity" in funnel.reasons["path"]
    aliases = Aliases([("held", ("Spain",)), ("france", ("France",)), ("paris", ("Paris",))])
    case = PathCase(
        written_path(json.dumps({"edges": [held | {"head": "Spain"}, paris]})),
        "Paris", PASSAGES, aliases, PathRules(title_is_subject=True),
    )  # fmt: skip
    assert choose([case]).path and choose([case], {"held"}).reason == "start is of the evaluation"


def test_documents_are_shown_as_far_as_there_is_room():
    seeds, funnel = staging(TARGETS, {"[france]": "<answer>none</answer>"}, path="written")
    assert funnel.reasons["path"]["path unreadable"] == 3
    _, short = staging(TARGETS, {}, path="written", longest_path=20)
    assert short.reasons["path"] == {"prompt too long": 3}


def test_without_a_path():
    seeds, funnel = staging(TARGETS, path="none")
    assert [seed.words for seed in seeds] == [("France", "Paris"), ("Spain", "Madrid")]
    assert [seed.hops for seed in seeds] == [1, 1] and not any(seed.nodes for seed in seeds)
    assert funnel.reasons["path"] == {"": 2, "start is of the evaluation": 1}


@pytest.mark.parametrize(
    ("source", "entered"),
    [({"support": 2}, 0), ({"longest": 10}, 0), ({"documents": 5}, 3)],
)
def test_what_falls_before(source, entered):
    longest = source.pop("longest", 10_000)
    _, funnel = staging(TARGETS, longest=longest, **source)
    assert funnel.entered("path") == entered
