"""Targets and paths on hand-made documents."""

import json

import numpy as np
import pytest

from zest_jax.errors import UserError
from zest_jax.tasks.evidence_paths import Aliases, PathRules
from zest_jax.tasks.funnel import Funnel
from zest_jax.tasks.path_building import choose, linked_paths, relation_words, written_path
from zest_jax.tasks.sources.references import read_aliases, read_references
from zest_jax.tasks.targets import entity_filter, read_target, supporting
from zest_jax.tasks.types import Passage

ALIASES = Aliases([("Q1", ("Lyon",)), ("Q2", ("France", "French Republic")), ("Q3", ("Rhône",))])
LYON = Passage("d1", "Lyon", "Its country is France. The river is the Rhône.")
FRANCE = Passage("d2", "France", "Its largest neighbour is Spain. The capital is Paris.")
SPAIN = Passage("d3", "Spain", "Its neighbour is France. The capital is Madrid.")
RULES = PathRules(title_is_subject=True)


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ("<answer> Lyon</answer>", "Lyon"),
        ('<answer>{"answer": "Lyon", "type": "city"}</answer>', "Lyon"),
        ('thinking <answer> {"answer": "Łódź"} </answer>', "Łódź"),
        ("<answer> first</answer><answer> Paris</answer>", "Paris"),
        ("<answer>Lyon", None),
        ("Lyon", None),
        ('<answer>{"answer": 3}</answer>', None),
        ('<answer>{"answer": "Lyon"</answer>', None),
        ("<answer><b>Lyon</b></answer>", None),
        ('<answer>{"name": "Lyon"}</answer>', None),
        ('<answer>{"answer": "A\\ud800b"}</answer>', None),  # half a character
        (f'<answer>{{"answer": {"9" * 5000}}}</answer>', None),
    ],
)
def test_reading_a_target(output, answer):
    target = read_target(output)
    assert (target.answer if target else None) == answer


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("Lyon", ""),
        ("Łódź", ""),
        ("東京", ""),
        ("", "target names nothing"),
        ("unknown", "target names nothing"),
        ("--", "target names nothing"),
        ("12 May 1990", "target is a number or date"),
        ("1234", "target names nothing"),
        ("the city that lies on the banks of the long river Rhône", "target too long"),
        ("cities", "target is no name"),
        ("iPhone", ""),
        ("van Gogh", ""),
        ("N/A", "target names nothing"),
        ("The answer is Paris", "target names nothing"),
        ("None of the above", "target names nothing"),
        ("Spain", "target in its reference"),
    ],
)
def test_the_entity_filter(output, reason):
    target = read_target(f"<answer>{output}</answer>")
    found = entity_filter(
        target, "What is the capital of Spain?", ALIASES, most_words=8, known_only=False
    )
    assert found.reason == reason


def test_a_target_has_to_be_known_where_that_is_asked():
    def reason(name):
        target = read_target(f"<answer>{name}</answer>")
        return entity_filter(target, "Who?", ALIASES, most_words=8, known_only=True).reason

    assert reason("french republic") == "" and reason("French Republic") == ""
    assert reason("Rhone") == "" and reason("Loire") == "target is no known entity"
    assert entity_filter(None, "", ALIASES, most_words=8, known_only=True).reason == (
        "target unreadable"
    )


def test_retrieval_support():
    verdict, found = supporting("France", [FRANCE, LYON, SPAIN], ALIASES)
    assert verdict and found == (LYON, SPAIN), "its own article does not count"
    assert supporting("French Republic", [LYON], ALIASES)[1] == (LYON,)
    assert supporting("Fran", [LYON], ALIASES)[0].reason == "no document names it"
    assert supporting("Lyon", [LYON], ALIASES)[0].reason == "no document names it"
    assert supporting("France", [], ALIASES)[0].reason == "nothing retrieved"
    assert supporting("France", [LYON, SPAIN], ALIASES, least=3)[0].reason == "no document names it"
    # a title alone is no support
    title_only = Passage("d9", "Bank of France", "A bank.")
    assert not supporting("France", [title_only], ALIASES)[0]


def built(answer, hops, documents=(LYON, FRANCE, SPAIN), rules=RULES, left_out=()):
    shown = {d.id: d for d in documents}
    rng = np.random.default_rng(0)
    return choose(linked_paths(answer, hops, shown, ALIASES, rules, rng), left_out)


def test_paths_by_links():
    two = built("Spain", 2)
    assert two.path.words == ("Lyon", "country", "France", "largest neighbour", "Spain")
    assert [e.document for e in two.path.edges] == ["d1", "d2"]
    one = built("Rhône", 1)
    assert one.path.words == ("Lyon", "river", "Rhône")
    # Spain -> France -> Spain is tried and refused, so that what is left is shorter
    back = built("Spain", 2, (FRANCE, SPAIN))
    assert back.path.hops == 1 and back.tried["entity comes twice"] == 1
    # no path starts where the evaluation does
    assert built("Spain", 2, left_out={"d1"}).path.words[0] == "France"
    assert built("Rhône", 1, left_out={"d1"}).reason == "start is of the evaluation"
    # no sentence names it
    assert built("Berlin", 3).reason == "no path" and built("Berlin", 3).path is None
    # sentences say "its", and a title may not stand for it
    strict = built("Rhône", 1, rules=PathRules())
    assert strict.path is None and strict.reason == "sentence lacks an entity"


def test_the_words_of_a_relation():
    assert relation_words("The largest neighbour is France.", ("Lyon", "France")) == (
        "largest neighbour"
    )
    assert relation_words("Its script is Latin Script.", ("Latin Script",)) == ""
    assert relation_words("one two three four five six", ()) == "one two three four"


def test_a_path_as_a_proposer_writes_it():
    edge = {"head": "Lyon", "relation": "country", "tail": "France",
            "sentence": "Its country is France.", "document": "d1"}  # fmt: skip
    path = written_path(json.dumps({"edges": [edge]}))
    assert path.words == ("Lyon", "country", "France")
    for broken in (
        "", "{", "[]", '{"edges": {}}', json.dumps({"edges": [edge | {"tail": 3}]}),
        json.dumps({"edges": [{"head": "Lyon"}]}),
        json.dumps({"edges": [edge | {"tail": "\ud800"}]}),
        json.dumps({"edges": ["Lyon"]}), "[" * 100_000,
    ):  # fmt: skip
        assert written_path(broken) is None


def test_reference_files(tmp_path):
    path = tmp_path / "references.jsonl"
    path.write_text('{"question": " Who? ", "answer": "x"}\n{"id": 7, "question": "When?"}\n')
    assert read_references(path) == [("0", "Who?"), ("7", "When?")]
    path.write_text('{"q": "Who?"}\n')
    with pytest.raises(UserError, match=r"line 1: 'question' must be a text"):
        read_references(path)
    path.write_text('{"id": "Q1", "names": ["A", "B"]}\n')
    assert list(read_aliases(path)) == [("Q1", ("A", "B"))]
    for broken in ('{"id": "Q1", "names": []}', '{"id": "Q1"}', '{"id": 1, "names": ["A"]}'):
        path.write_text(broken + "\n")
        with pytest.raises(UserError, match=r"line 1: expected an 'id' and 'names'"):
            list(read_aliases(path))


def test_the_funnel_counts_as_the_paper_does():
    funnel = Funnel()
    funnel.add("target", [""] * 486 + ["target unreadable"] * 14)
    funnel.add("support", [""] * 411 + ["no document names it"] * 75)
    funnel.add("path", [""] * 411)
    funnel.add("question", [""] * 302 + ["answer in question"] * 109)
    for stage, seconds in (
        ("target", 100.0),
        ("support", 42.53),
        ("path", 59.24),
        ("question", 111.15),
    ):
        funnel.took(stage, seconds)
    rows = [" ".join(line.split()) for line in funnel.table().splitlines()]
    for row in (
        "target format and entity filter 486/500 97.2 % target unreadable 14",
        "retrieval-support verification 411/486 84.6 % no document names it 75",
        "overall target validation 411/500 82.2 %",
        "evidence-path construction 411/411 100.0 %",
        "static QA verification 302/411 73.5 % answer in question 109",
        "final 302/500 60.4 %",
    ):
        assert row in rows
    times = [" ".join(line.split()) for line in funnel.times().splitlines()]
    assert "target generation and validation 142.53 0.472" in times
    assert "evidence-path construction 59.24 0.196" in times
    assert "total 312.92 1.036" in times
    both = funnel + funnel
    assert both.passed("question") == 604 and both.seconds["path"] == pytest.approx(118.48)
    assert both.metrics("p")["p/passed_question"] == pytest.approx(302 / 411)
