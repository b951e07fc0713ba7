"""The six criteria, case by case: what each must refuse and what it must let pass."""

import unicodedata

import pytest

from zest_jax.tasks.evidence_paths import (
    CRITERIA,
    Aliases,
    Edge,
    EvidencePath,
    PathCase,
    PathRules,
    check_path,
    sentences,
)
from zest_jax.tasks.types import Passage

ALIASES = Aliases(
    [
        ("Q1", ("Marie Curie", "Maria Skłodowska", "Madame Curie")),
        ("Q2", ("Warsaw", "Warszawa")),
        ("Q3", ("Poland", "Republic of Poland")),
        ("Q4", ("Vistula", "Wisła")),
        ("Q5", ("Tokyo", "東京")),
        ("Q6", ("Japan", "日本")),
        ("Q7", ("Georgia",)),
        ("Q8", ("Georgia", "Sakartvelo")),
    ]
)
DOCUMENTS = {
    d.id: d
    for d in (
        Passage("d1", "Marie Curie", "Marie Curie was born in Warsaw. She went to Paris."),
        Passage("d2", "Warsaw", "Warsaw is the capital of Poland. It lies on the Vistula."),
        Passage("d3", "Poland", "Poland borders Germany. Its longest river is the Vistula."),
        Passage("d4", "Tokyo", "東京は日本の首都である。人口は多い。"),
        Passage("d5", "São Tomé", "São Tomé is the capital of\n  São Tomé and Príncipe."),
    )
}
BORN = Edge("Marie Curie", "born in", "Warsaw", "Marie Curie was born in Warsaw.", "d1")
CAPITAL = Edge("Warsaw", "capital of", "Poland", "Warsaw is the capital of Poland.", "d2")
RIVER = Edge("Poland", "longest river", "Vistula", "Its longest river is the Vistula.", "d3")
TOKYO = Edge("東京", "首都", "日本", "東京は日本の首都である。", "d4")
TOME = Edge(
    "São Tomé", "capital of", "São Tomé and Príncipe",
    "São Tomé is the capital of São Tomé and Príncipe.", "d5",
)  # fmt: skip


def changed(edge, **fields):
    return Edge(**(vars(edge) | fields))


def verdict(name, *edges, answer=None, rules=None):
    case = PathCase(
        EvidencePath(edges), answer or edges[-1].tail, DOCUMENTS, ALIASES, rules or PathRules()
    )
    return CRITERIA[name](case)


def test_the_six_in_the_papers_order():
    assert list(CRITERIA) == [
        "endpoint", "continuity", "acyclicity", "grounding", "entity_support", "relation_validity",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("edges", "answer", "good"),
    [
        ((BORN, CAPITAL), "Poland", True),
        ((BORN, CAPITAL), "republic of poland", True),  # by another name, another case
        ((TOKYO,), "Japan", True),  # in another script
        ((TOME,), "Sao Tome and Principe", True),  # without its accents
        ((BORN, CAPITAL), "Warsaw", False),  # an entity between
        ((BORN,), "Vistula", False),
        ((changed(CAPITAL, head="Poland", tail="Warsaw"),), "Poland", False),  # reversed
        ((changed(BORN, tail="Georgia"),), "Sakartvelo", False),  # a name that two bear
    ],
)
def test_endpoint(edges, answer, good):
    found = verdict("endpoint", *edges, answer=answer)
    assert bool(found) is good and found.reason == ("" if good else "path ends elsewhere")


@pytest.mark.parametrize(
    ("edges", "good"),
    [
        ((BORN,), True),
        ((BORN, CAPITAL), True),
        ((BORN, CAPITAL, changed(RIVER, head="Republic of Poland")), True),  # joined by an alias
        ((BORN, RIVER), False),
        ((CAPITAL, BORN), False),  # the order turned
        ((BORN, changed(CAPITAL, head="Poland", tail="Warsaw")), False),  # an edge reversed
        ((BORN, CAPITAL, BORN), False),
        ((changed(BORN, tail="warszawa"), CAPITAL), True),
    ],
)
def test_continuity(edges, good):
    found = verdict("continuity", *edges)
    assert bool(found) is good and found.reason == ("" if good else "edges do not join")


@pytest.mark.parametrize(
    ("edges", "good"),
    [
        ((BORN, CAPITAL, RIVER), True),
        ((TOKYO,), True),
        ((CAPITAL, changed(CAPITAL, head="Poland", tail="Warsaw")), False),  # there and back
        ((BORN, changed(CAPITAL, tail="Madame Curie")), False),  # back under an alias
        ((changed(CAPITAL, tail="Warszawa"),), False),  # a loop of one edge
        (
            (changed(BORN, head="東京", tail="日本"), changed(BORN, head="Japan", tail="Tokyo")),
            False,
        ),
        ((BORN, CAPITAL, changed(RIVER, tail="MARIA SKŁODOWSKA")), False),
    ],
)
def test_acyclicity(edges, good):
    found = verdict("acyclicity", *edges)
    assert bool(found) is good and found.reason == ("" if good else "entity comes twice")


@pytest.mark.parametrize(
    ("edge", "reason"),
    [
        (BORN, ""),
        (TOKYO, ""),
        (TOME, ""),  # a line break within is a space
        (changed(TOME, sentence=unicodedata.normalize("NFD", TOME.sentence)), ""),
        (changed(BORN, sentence="Marie Curie was born in warsaw."), "sentence not in its document"),
        (changed(BORN, document="d2"), "sentence not in its document"),
        (changed(BORN, document="d9"), "document was not retrieved"),
        (changed(BORN, sentence=" "), "sentence not in its document"),
        # a part of a sentence, and more than one
        (changed(BORN, sentence="was born in Warsaw."), "sentence not in its document"),
        (
            changed(BORN, sentence="Marie Curie was born in Warsaw. She went to Paris."),
            "sentence not in its document",
        ),
        # put together from two passages
        (
            changed(BORN, sentence="She went to Paris. Warsaw is the capital of Poland."),
            "sentence not in its document",
        ),
    ],
)
def test_grounding(edge, reason):
    assert verdict("grounding", edge).reason == reason


@pytest.mark.parametrize(
    ("edge", "good"),
    [
        (BORN, True),
        (changed(BORN, head="Maria Skłodowska"), True),  # the sentence has another name of hers
        (TOKYO, True),
        (changed(TOKYO, head="Tokyo", tail="Japan"), True),
        (TOME, True),
        (RIVER, False),  # "Its" names nobody
        (changed(BORN, sentence="She went to Paris."), False),
        (changed(BORN, tail="War"), False),  # whole words
        (changed(CAPITAL, tail="Germany"), False),
    ],
)
def test_entity_support(edge, good):
    found = verdict("entity_support", edge)
    assert bool(found) is good and found.reason == ("" if good else "sentence lacks an entity")


def test_a_title_can_stand_for_the_head():
    rules = PathRules(title_is_subject=True)
    assert verdict("entity_support", RIVER, rules=rules)
    # of its own document only, and never for the tail
    assert not verdict("entity_support", changed(RIVER, head="Warsaw"), rules=rules)
    assert not verdict("entity_support", changed(RIVER, tail="Germany"), rules=rules)


@pytest.mark.parametrize(
    ("edge", "reason"),
    [
        (BORN, ""),
        (changed(CAPITAL, relation="is the capital city of"), ""),  # one word of it is enough
        (changed(CAPITAL, relation="Capitals"), ""),  # by its stem
        (TOKYO, ""),
        (changed(BORN, relation="  "), "relation says nothing"),
        (changed(BORN, relation="of the"), "relation says nothing"),
        (changed(BORN, relation="Related to"), "relation says nothing"),
        (changed(BORN, relation="born in a city by name of a b c d"), "relation too long"),
        (changed(BORN, relation="birth of Madame Curie"), "relation names an entity"),
        (changed(BORN, relation="married"), "relation not in sentence"),
        (changed(TOKYO, relation="河川"), "relation not in sentence"),
    ],
)
def test_relation_validity(edge, reason):
    assert verdict("relation_validity", edge).reason == reason


def test_all_together():
    def check(*edges, **rules):
        rules = PathRules(title_is_subject=True, **rules)
        return check_path(
            PathCase(EvidencePath(edges), "Vistula", DOCUMENTS, ALIASES, rules)
        ).reason

    assert check(BORN, CAPITAL, RIVER) == ""
    assert check(BORN, CAPITAL, RIVER, max_hops=2) == "too many hops"
    assert check() == "no path"
    assert check(BORN, RIVER) == "edges do not join"
    assert check(changed(RIVER, relation="deepest lake")) == "relation not in sentence"


def test_names():
    assert ALIASES.id_of("MARIE  curie") == "Q1"
    assert ALIASES.names_of("Madame Curie")[0] == "Madame Curie"
    assert set(ALIASES.names_of("Madame Curie")) == {
        "Marie Curie",
        "Maria Skłodowska",
        "Madame Curie",
    }
    assert ALIASES.known("wisła") and not ALIASES.known("Rhine")
    assert not ALIASES.known("Georgia") and ALIASES.id_of("Sakartvelo") == "Q8"
    assert ALIASES.id_of("Rhine") == ALIASES.id_of("rhine!")


def test_sentences():
    assert sentences("It is. 4 degrees. Its capital is A.B. Next one") == [
        "It is.", "4 degrees.", "Its capital is A.B.", "Next one",
    ]  # fmt: skip
    assert sentences("東京は首都。人口は多い。") == ["東京は首都。", "人口は多い。"]
    assert sentences('He said "no." Then he went.') == ['He said "no."', "Then he went."]
    assert sentences(" \n ") == []
    assert sentences("pi is 3.14 or so. and more") == ["pi is 3.14 or so. and more"]
