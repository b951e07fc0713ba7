"""Dr. Free's three filters and the random walk, on a graph small enough to list by hand."""

import numpy as np
import pytest
from tiny_world import tiny_world

from zest_jax.errors import UserError
from zest_jax.tasks import chains
from zest_jax.tasks.atlas import load_atlas
from zest_jax.tasks.graph import KnowledgeGraph


@pytest.fixture
def world(tmp_path):
    return tiny_world(tmp_path)


@pytest.fixture(scope="module")
def atlas():
    return load_atlas()


def test_filter_a_drops_walks_that_come_back():
    walks = np.array([[0, 1, 2], [0, 1, 0], [3, 3, 4], [4, 2, 1]])
    assert chains.acyclic(walks).tolist() == [True, False, False, True]


def test_filter_b_keeps_one_tail_and_clear_names(world):
    # Triples: fr-capital-pa, fr-friend-be, pa-river-se, pa-country-fr, se-friend-pa, se-friend-lo,
    # lo-country-fr. "Berlin" is the name of two, and se has two friends.
    assert chains.unambiguous(world.graph).tolist() == [True, False, True, True, False, False, True]
    almost = chains.unambiguous(world.graph, max_tails=2)
    assert almost.tolist() == [True, False, True, True, True, True, True]


def test_filter_b_reads_aliases_without_accents_or_case():
    entities = [("a", "Köln", ()), ("b", "Cologne", ("KOLN",)), ("c", "Bonn", ()), ("d", "Ulm", ())]
    graph = KnowledgeGraph.from_triples(
        entities, [("r", "r")], [(2, 0, 0), (3, 0, 2)], [[0], [1], [2], [3]]
    )
    assert chains.unambiguous(graph).tolist() == [False, True]


def test_filter_c_wants_passages_and_a_mention(world):
    covered, mentioned = chains.supported(world.graph, world.passages)
    assert covered.all()
    # France's passage does not speak of Berlin, nor Loire's of France.
    assert mentioned.tolist() == [True, False, True, True, True, True, False]


def test_all_chains_of_the_tiny_world(world):
    rng = np.random.default_rng(0)
    # Training entities: fr, pa, se. Clear triples among them: fr>pa, pa>se, pa>fr.
    assert world.count_chains(1) == 3
    ids = {chain.id for chain in world.sample_chains(1, 3, rng)}
    assert ids == {"fr|capital|pa", "pa|river|se", "pa|country|fr"}
    (two,) = world.sample_chains(2, 1, rng)  # fr>pa>fr is a cycle, pa>fr>pa too
    assert two.id == "fr|capital|pa|river|se"
    assert two.entities == (0, 1, 2) and two.relations == (0, 1)
    with pytest.raises(UserError, match=r"Only 1 chains of 2 hop\(s\) .* 2 were asked for"):
        world.sample_chains(2, 2, rng)
    # Loire's only triple is not mentioned in its passage, so no validation chain exists.
    assert world.count_chains(1, "validation") == 0
    with pytest.raises(UserError, match="Only 0 chains"):
        world.sample_chains(1, 1, rng, "validation")


def test_a_start_need_not_be_allowed_elsewhere(world):
    start = np.array([False, False, False, True, False, False])
    allowed = np.array([True, True, True, False, False, False])
    rng = np.random.default_rng(0)
    (chain,) = chains.sample_chains(world.graph, 1, 1, rng, allowed=allowed, start=start)
    assert chain.id == "lo|country|fr"
    (chain,) = chains.sample_chains(world.graph, 2, 1, rng, allowed=allowed, start=start)
    assert chain.id == "lo|country|fr|capital|pa"


def test_the_same_state_gives_the_same_chains(atlas):
    first = atlas.sample_chains(3, 200, np.random.default_rng(5))
    again = atlas.sample_chains(3, 200, np.random.default_rng(5))
    other = atlas.sample_chains(3, 200, np.random.default_rng(6))
    assert first == again and first != other


def test_chains_differ_exist_and_pass_every_filter(atlas):
    graph = atlas.graph
    for hops in (1, 2, 3):
        drawn = atlas.sample_chains(hops, 1000, np.random.default_rng(hops))
        assert len({chain.id for chain in drawn}) == 1000
        for chain in drawn:
            assert len(set(chain.entities)) == hops + 1
            for head, relation, tail in zip(
                chain.entities, chain.relations, chain.entities[1:], strict=False
            ):
                assert graph.tails_of(head, relation) == [tail]
                assert graph.labels[tail] in atlas.passage_of(head).text
            assert atlas.train[list(chain.entities)].all()


def test_every_chain_can_be_drawn(atlas):
    total = atlas.count_chains(1)
    drawn = atlas.sample_chains(1, total, np.random.default_rng(0))
    assert len({chain.id for chain in drawn}) == total
    with pytest.raises(UserError, match=f"Only {total} chains"):
        atlas.sample_chains(1, total + 1, np.random.default_rng(0))


def test_walks_start_anywhere_about_equally_often(atlas):
    drawn = atlas.sample_chains(3, 3000, np.random.default_rng(0))
    kinds = {atlas.kinds[chain.entities[0]] for chain in drawn}
    assert {"city", "country", "currency", "language", "element", "person"} <= kinds
