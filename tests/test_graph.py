"""The graph's arrays, worked out by hand for the tiny world, and its error messages."""

import numpy as np
import pytest
from tiny_world import tiny_world, write_world

from zest_jax.errors import UserError
from zest_jax.tasks.atlas import load_atlas
from zest_jax.tasks.graph import KnowledgeGraph


def test_triples_are_grouped_by_head(tmp_path):
    graph = tiny_world(tmp_path).graph
    # Rows: fr 0, pa 1, se 2, lo 3, be 4, bi 5; capital 0, river 1, country 2, friend 3.
    assert graph.head_offsets.tolist() == [0, 2, 4, 6, 7, 7, 7]
    assert graph.heads.tolist() == [0, 0, 1, 1, 2, 2, 3]
    assert graph.relations.tolist() == [0, 3, 1, 2, 3, 3, 2]
    assert graph.tails.tolist() == [1, 4, 2, 0, 1, 3, 0]
    assert graph.tails.dtype == np.int32 and graph.head_offsets.dtype == np.int64
    assert graph.facts(1) == [(1, 2), (2, 0)]
    assert graph.tails_of(2, 3) == [1, 3]
    assert graph.passages_of(2).tolist() == [2]
    assert graph.row_of["lo"] == 3


def test_repeated_triples_count_once():
    graph = KnowledgeGraph.from_triples(
        [("a", "A", ()), ("b", "B", ("Bee",))],
        [("r", "r")],
        [(0, 0, 1), (0, 0, 1)],
        [[0], [1, 2]],
    )
    assert graph.triple_count == 1
    assert graph.names(1) == ("B", "Bee")
    assert graph.passages_of(1).tolist() == [1, 2]


def test_a_passage_is_found_by_title_where_its_id_is_foreign(tmp_path):
    write_world(tmp_path)
    path = tmp_path / "passages.jsonl"
    path.write_text(path.read_text("utf-8").replace('"id": "fr"', '"id": "wiki-7"'), "utf-8")
    assert load_atlas(tmp_path).passage_of(0).id == "wiki-7"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("triples.tsv", "fr\tcapital\n", r"triples.tsv, line 1: expected head, .* found 2"),
        ("triples.tsv", "fr\tcapital\txx\n", r"line 1: the id 'xx'"),
        ("triples.tsv", "", "the file is empty"),
        ("relations.jsonl", '{"id": "capital"}\n', "'label'"),
        ("entities.jsonl", '{"id": "x", "label": "X", "aliases": "Y"}\n', "'aliases'"),
        ("entities.jsonl", '{"id": "x", "label": "X"}\n' * 2, "'x' comes twice"),
    ],
)
def test_wrong_graph_files_are_named(tmp_path, name, text, message):
    write_world(tmp_path)
    (tmp_path / name).write_text(text, "utf-8")
    with pytest.raises(UserError, match=message):
        load_atlas(tmp_path)


def test_an_entity_without_a_passage_is_named(tmp_path):
    write_world(tmp_path)
    path = tmp_path / "passages.jsonl"
    path.write_text("".join(path.read_text("utf-8").splitlines(True)[1:]), "utf-8")
    with pytest.raises(UserError, match="'France'"):
        load_atlas(tmp_path)


def test_phrases_need_one_place_for_the_name(tmp_path):
    write_world(tmp_path)
    path = tmp_path / "relations.jsonl"
    path.write_text(path.read_text("utf-8").replace("the river of {}", "the river"), "utf-8")
    with pytest.raises(UserError, match="exactly one"):
        load_atlas(tmp_path)
