"""Task sources: what they give, and that nothing of the evaluation is among it."""

import dataclasses
import json

import numpy as np
import pytest
from tiny_world import tiny_world

from configs import common
from zest_jax.errors import UserError
from zest_jax.tasks.atlas import load_atlas
from zest_jax.tasks.chain_pool import ChainRecord, EntityRecord, RelationRecord, write_pool
from zest_jax.tasks.sources import SOURCES, SeedSource, TaskSource
from zest_jax.tasks.types import Passage, Task, write_tasks
from zest_jax.tasks.world import World


def anything(seed):
    return True


def config(kind, **more):
    c = common.get_config()
    c.source.kind = kind
    c.update_from_flattened_dict(more)
    return c


@pytest.fixture(scope="module")
def world():
    return World.of_atlas(load_atlas())


def build(kind, world, **more):
    return SOURCES.find(kind)(config(kind, **more), world)


@pytest.mark.parametrize("kind", ["chains", "documents", "answers"])
def test_seeds_are_drawn_alike_from_the_same_numbers(world, kind):
    source = build(kind, world)
    assert isinstance(source, SeedSource)
    one, two, other = (source.draw(30, np.random.default_rng(s), anything) for s in (0, 0, 1))
    assert one == two != other and len(one) == 30
    assert not {s.source_id for s in one} & world.evaluated_sources
    assert all(set(s.fields) >= {"hops"} or s.chain_id for s in one)


def test_a_document_is_cut_and_its_hops_follow_the_weights(world):
    source = build(
        "documents", world, **{"source.hop_weights": (3, 0, 1), "source.most_characters": 10}
    )
    seeds = source.draw(400, np.random.default_rng(0), anything)
    hops = [s.hops for s in seeds]
    assert set(hops) == {1, 3} and 0.68 < hops.count(1) / 400 < 0.82
    assert all(
        len(s.fields["text"]) <= 10 and s.fields["text"] == s.passages[0].text for s in seeds
    )
    assert all(s.fields["searches"] == str(s.hops - 1) and s.answers == () for s in seeds)
    trained = {world.atlas.graph.entity_ids[e] for e in np.flatnonzero(world.atlas.train)}
    assert {s.source_id for s in seeds} <= trained


def test_what_does_not_fit_is_not_drawn_and_too_little_is_said(world):
    for kind in ("documents", "answers", "chains"):
        source = build(kind, world)
        short = source.draw(12, np.random.default_rng(0), lambda s: len("".join(s.words)) < 90)
        assert all(len("".join(s.words)) < 90 for s in short) and len(short) == 12
        with pytest.raises(UserError, match="fit"):
            source.draw(3, np.random.default_rng(0), lambda s: False)


def test_answers_of_a_file(tmp_path, world):
    path = tmp_path / "answers.jsonl"
    lines = [
        {"ground_truth": "Seine", "search_turns": 3},
        {"answer": "Loire", "aliases": ["Leire"], "id": "l"},
        {"golden_answers": ["東京", "Tokyo"]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    more = {"source.hop_weights": (0, 1), "proposer.searches": 3}
    source = build("answers", world, **{"source.file": str(path)}, **more)
    seeds = {s.answers[0]: s for s in source.draw(3, np.random.default_rng(0), anything)}
    assert seeds.keys() == {"Seine", "Loire", "東京"}, "all different while there are enough"
    assert seeds["Seine"].hops == 3 and seeds["Loire"].hops == 2
    assert seeds["Loire"].answers == ("Loire", "Leire") and seeds["Loire"].source_id == "l"
    assert len(source.draw(7, np.random.default_rng(0), anything)) == 7
    for bad, words in (
        ({"ground_truth": ""}, "line 1.*the answer"),
        ({"question": "x"}, "line 1.*the answer"),
        ({"ground_truth": "x", "search_turns": -1}, "whole number of searches"),
        ({"ground_truth": "x", "search_turns": 99}, "asks for 99 searches"),
    ):
        path.write_text(json.dumps(bad) + "\n")
        with pytest.raises(UserError, match=words):
            build("answers", world, **{"source.file": str(path)})


def test_labelled_questions_leave_out_the_evaluation(tmp_path, world):
    heldout = world.heldout_tasks[0]
    path = tmp_path / "train.jsonl"
    tasks = [
        Task("a", "Who wrote it?", ("me",)),
        Task("b", "Of the same source?", ("x",), source_id=heldout.source_id),
        Task("c", f" {heldout.question.upper()} ", ("x",)),
    ]
    write_tasks(path, tasks)
    source = build("labelled", world, **{"source.file": str(path)})
    assert isinstance(source, TaskSource) and not isinstance(source, SeedSource)
    assert [t.id for t in source.tasks()] == ["a"]
    write_tasks(path, tasks[1:])
    with pytest.raises(UserError, match="belongs to the evaluation"):
        build("labelled", world, **{"source.file": str(path)})


def test_labelled_questions_by_template(world):
    tasks = build("labelled", world, **{"schedule.tasks": 60}).tasks()
    assert 50 <= len(tasks) <= 60 and {t.hops for t in tasks} == {1, 2, 3}
    assert not {t.source_id for t in tasks} & world.evaluated_sources
    assert len({t.question for t in tasks}) == len(tasks)
    assert tasks == build("labelled", world, **{"schedule.tasks": 60}).tasks()


def pool(folder, count=12):
    def entity(name):
        return EntityRecord(name, f"Label {name}", (), Passage(f"p{name}", name, f"Of {name}."))

    def chain(hops, n):
        entities = tuple(entity(f"Q{n}x{k}") for k in range(hops + 1))
        return ChainRecord(entities, tuple(RelationRecord(f"P{k}", "part of") for k in range(hops)))

    chains = [chain(h, 10 * n + h) for h in (1, 2) for n in range(count)]
    about = {"seed": 0, "corpus": {"name": "toy"}}
    write_pool(folder, chains, about)
    return folder


def test_chains_of_a_pool(tmp_path):
    folder = pool(tmp_path / "pool")
    heldout = Task("h", "What?", ("x",), source_id="Q11x0")
    bare = World("toy", (), (heldout,))
    more = {"source.file": str(folder), "world.max_hops": 2}
    source = build("chain_pool", bare, **more)
    seeds = source.draw(20, np.random.default_rng(0), anything)
    assert sorted(s.hops for s in seeds) == [1] * 10 + [2] * 10
    assert len({s.id for s in seeds}) == 20 and "Q11x0" not in {s.source_id for s in seeds}
    two = next(s for s in seeds if s.hops == 2)
    assert two.answers == (two.words[-1],) and two.chain_id.count("|") == 4
    assert two.fields["chain"] == " | ".join(two.words) and len(two.passages) == 3
    with pytest.raises(UserError, match=r"11 chains of 1 hop\(s\)"):
        source.draw(24, np.random.default_rng(0), anything)
    with pytest.raises(UserError, match="build_chains"):
        build("chain_pool", bare)


def test_sources_say_what_they_lack(tmp_path):
    bare = World("server", (), ())
    for kind, words in {
        "chains": "index only",
        "documents": "index folder",
        "answers": "source.file",
        "labelled": "source.file",
    }.items():
        with pytest.raises(UserError, match=words):
            build(kind, bare)
    with pytest.raises(UserError, match="no task source 'graph'; there are"):
        SOURCES.find("graph")
    small = World.of_atlas(tiny_world(tmp_path))
    assert build("answers", small).draw(1, np.random.default_rng(0), anything)


def test_chains_leave_out_what_the_evaluation_starts_from(world):
    graph, rng = world.atlas.graph, np.random.default_rng(0)
    drawn = build("chains", world).draw(30, rng, anything)
    evaluated = drawn[0].source_id
    task = Task("t", "Where?", ("x",), source_id=evaluated)
    other = dataclasses.replace(world, heldout_tasks=(task,))
    again = build("chains", other).draw(30, rng, anything)
    assert evaluated in graph.entity_ids and evaluated not in {s.source_id for s in again}
