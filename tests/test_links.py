"""Worlds of articles that name each other: what is a link, and the folder that is made of them."""

import json

import pytest

from zest_jax import build_links, import_phantom_wiki
from zest_jax.retrieval.interface import Passage
from zest_jax.tasks.atlas import load_atlas
from zest_jax.tasks.links import Link, find_links, nameable, shorten, words_before


def passages(*pairs):
    return [Passage(str(n), title, text) for n, (title, text) in enumerate(pairs)]


@pytest.mark.parametrize(
    "text, words",
    [
        ("It was directed by", "directed by"),
        ("The Rhine rises north of the", "north of"),
        ("the capital of the", "capital of"),
        ("It is in", ""),  # says nothing
        ("Directed", ""),  # begins with a capital: a name, or a sentence
        ("a film by Stanley", ""),  # part of a longer name
        ("was born, and in", ""),  # the clause ends before a word that says something
        ("the river", ""),  # one word alone
        ("", ""),
    ],
)
def test_words_before_a_name(text, words):
    assert words_before(text) == words


def test_links_by_hand():
    found = find_links(
        passages(
            ("Rhine", "The Rhine rises west of Germany. It is wide."),
            ("Germany", "Germany borders on France and on the China Sea."),
            ("France", "The capital of France is Paris. The centre of Paris is old."),
            ("Paris", "Paris was painted by Monet and was painted by Manet."),
            ("China", "China has its border with Germany. It made peace with Germany."),
            ("Monet", "Monet was born in Paris's north."),  # a possessive is not read
        )
    )
    # Not: "China Sea" (a longer name); Monet by words that stand twice; "Paris" in an article that
    # it is named in after "centre of" is one, since these words stand once.
    assert found == [
        Link(0, "west of", 1),
        Link(1, "borders on", 2),
        Link(2, "centre of", 3),
        Link(4, "border with", 1),
        Link(4, "peace with", 1),
    ]


def test_a_relation_of_two_tails_is_none():
    two = passages(
        ("Alpha", "It borders on Betaland. Then again it borders on Gammaland."),
        ("Betaland", "One."),
        ("Gammaland", "Two."),
    )
    assert find_links(two) == []


def test_titles_that_running_text_tells():
    named = nameable(
        passages(
            ("Mercury (planet)", "x"),
            ("Art", "x"),
            ("water", "x"),
            ("Twins", "x"),
            ("Twins", "y"),
            ("Empty", ""),
            ("St. Louis", "x"),
            ("Kyiv", "x"),
        )  # fmt: skip
    )
    assert named == {"St. Louis": 6, "Kyiv": 7}


def test_the_longest_title_is_meant():
    (link,) = find_links(
        passages(
            ("Alaska", "It lies north of New York City."), ("New York", "x"), ("New York City", "y")
        )
    )
    assert link == Link(0, "north of", 2)


@pytest.mark.parametrize(
    "most, kept",
    [(100, "One two. Three four."), (12, "One two."), (6, "One"), (20, "One two. Three four.")],
)
def test_shorten_keeps_whole_sentences(most, kept):
    assert shorten("One two.  Three four.", most) == kept


def write_corpus(folder, count=60):
    """A ring: every article names the next two, each after words of its own."""
    names = [f"Town{chr(65 + n // 26)}{chr(97 + n % 26)}" for n in range(count)]
    lines = []
    for n, name in enumerate(names):
        a, b = names[(n + 1) % count], names[(n + 7) % count]
        text = f"It stands north of {a}. It trades with {b}."
        lines.append(json.dumps({"id": f"p{n}", "title": name, "text": text}) + "\n")
    (folder / "corpus.jsonl").write_text("".join(lines))
    return folder / "corpus.jsonl"


def test_a_world_is_made_and_opens(tmp_path, capsys):
    from importlib.resources import files

    tokenizer = files("zest_jax") / "assets" / "atlas" / "tokenizer"
    arguments = [
        f"--corpus={write_corpus(tmp_path)}", f"--tokenizer={tokenizer}",
        f"--world={tmp_path / 'world'}", "--questions=30", "--max_hops=2",
    ]  # fmt: skip
    assert build_links.entry(["build_links", *arguments]) == 0
    told = json.loads((tmp_path / "world" / "links.json").read_text())
    assert told["passages"] == 60 and told["links"] == 120
    atlas = load_atlas(tmp_path / "world")
    assert atlas.heldout.sum() == 12 and atlas.validation.sum() == 6
    assert len(atlas.heldout_tasks) == told["questions, heldout"] == 30
    heldout = {atlas.graph.entity_ids[e] for e in atlas.heldout.nonzero()[0]}
    for task in atlas.heldout_tasks:
        assert task.source_id in heldout
        assert task.question.startswith('What is the name after "') and len(task.evidence) > 1
    import numpy as np

    for hops in (1, 2):
        count = atlas.count_chains(hops, "train")
        for chain in atlas.sample_chains(hops, count, np.random.default_rng(0), "train"):
            assert not {atlas.graph.entity_ids[e] for e in chain.entities} & heldout
    # A world that is there is not made over.
    assert build_links.entry(["build_links", *arguments]) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, message",
    [
        ("--tokenizer=nowhere", "has no tokenizer.json"),
        ("--heldout=0.9", "--heldout and --validation"),
        ("--characters=10", "--characters is 50"),
        ("--corpus=", "give all three"),
    ],
)
def test_mistakes_of_build_links(tmp_path, capsys, change, message):
    from importlib.resources import files

    arguments = [
        f"--corpus={write_corpus(tmp_path)}", f"--world={tmp_path / 'world'}",
        f"--tokenizer={files('zest_jax') / 'assets' / 'atlas' / 'tokenizer'}",
        "--validation=0.1", change,
    ]  # fmt: skip
    assert build_links.entry(["build_links", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "world").exists()


def test_a_corpus_without_links(tmp_path, capsys):
    from importlib.resources import files

    corpus = tmp_path / "alone.jsonl"
    corpus.write_text('{"id": "1", "title": "Alone", "text": "It names nobody."}\n')
    tokenizer = files("zest_jax") / "assets" / "atlas" / "tokenizer"
    arguments = [f"--corpus={corpus}", f"--tokenizer={tokenizer}", f"--world={tmp_path / 'w'}"]
    assert build_links.entry(["build_links", *arguments]) == 2
    assert "names another one" in capsys.readouterr().err


def test_phantom_wiki(tmp_path, capsys):
    article = "# Ann Ode\n\n## Family\nThe mother of Ann Ode is Eve Ode.\n\n## Friends\nNone.\n"
    question = {
        "id": "a", "question": "Who is the mother of Ann Ode?", "answer": ["Eve Ode", "Eve Ode"],
        "difficulty": 1, "is_aggregation_question": False,
    }  # fmt: skip
    counting = question | {"id": "b", "is_aggregation_question": True}
    (tmp_path / "articles.json").write_text(json.dumps([{"title": "Ann Ode", "article": article}]))
    (tmp_path / "questions.json").write_text(json.dumps([question, counting]))
    arguments = [f"--source={tmp_path}", f"--out={tmp_path / 'out'}"]
    assert import_phantom_wiki.entry(["import_phantom_wiki", *arguments]) == 0
    (line,) = map(json.loads, (tmp_path / "out" / "corpus.jsonl").read_text().splitlines())
    assert line["text"] == "The mother of Ann Ode is Eve Ode. None."
    (task,) = map(json.loads, (tmp_path / "out" / "tasks.jsonl").read_text().splitlines())
    assert task["golden_answers"] == ["Eve Ode"] and task["hops"] == 1
    assert import_phantom_wiki.entry(["import_phantom_wiki", *arguments]) == 2
    assert "holds a corpus already" in capsys.readouterr().err
    (tmp_path / "questions.json").write_text('[{"id": 1}]')
    assert import_phantom_wiki.entry(["import_phantom_wiki", *arguments]) == 2
    assert "does not hold what phantom-wiki 1.0 writes" in capsys.readouterr().err
    (tmp_path / "questions.json").write_text("[]")
    assert import_phantom_wiki.entry(["import_phantom_wiki", *arguments]) == 2
    assert "has no article, or no question" in capsys.readouterr().err
    (tmp_path / "articles.json").unlink()
    assert import_phantom_wiki.entry(["import_phantom_wiki", *arguments]) == 2
    assert "no such file" in capsys.readouterr().err
