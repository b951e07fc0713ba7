"""Scripted episodes: exact text on a hand-made chain, flaws, renaming, speed."""

import re
import time

import numpy as np
import pytest
from tiny_world import tiny_world

from zest_jax.errors import UserError
from zest_jax.tasks import scripts
from zest_jax.tasks.atlas import load_atlas
from zest_jax.tasks.types import Chain

CHAIN = Chain("fr|capital|pa|river|se", (0, 1, 2), (0, 1))
FRANCE = "<information> France: Its capital is Paris. Old.</information>"
PARIS = "<information> Paris: Its river is Seine. Its home is France.</information>"
SEINE = "<information> Seine: It has friends, Paris and Loire.</information>"
QUESTION = "Q: What is the river of the capital of France?\n"


@pytest.fixture
def world(tmp_path):
    return tiny_world(tmp_path)


@pytest.fixture(scope="module")
def atlas():
    return load_atlas()


def rng(seed=0):
    return np.random.default_rng(seed)


def text_of(segments):
    return "".join(text for text, _ in segments)


def test_right_solver_script(world):
    assert scripts.solver_script(CHAIN, world, rng()) == [
        (QUESTION, False),
        ("<think> capital</think><search> France</search>", True),
        (FRANCE, False),
        ("<think> river</think><search> Paris</search>", True),
        (PARIS, False),
        ("<think> done</think><answer> Seine</answer>", True),
    ]


def test_early_answer(world):
    assert text_of(scripts.solver_script(CHAIN, world, rng(), flaw="early_answer")) == (
        QUESTION
        + f"<think> capital</think><search> France</search>{FRANCE}"
        + "<think> done</think><answer> Paris</answer>"
    )
    one = Chain("fr|capital|pa", (0, 1), (0,))
    assert text_of(scripts.solver_script(one, world, rng(), flaw="early_answer")) == (
        "Q: What is the capital of France?\n<think> done</think><answer> France</answer>"
    )


def test_wrong_field(world):
    # From Paris the other field is its home, France; the thought names either relation.
    one = Chain("pa|river|se", (1, 2), (1,))
    seen = {text_of(scripts.solver_script(one, world, rng(s), flaw="wrong_field"))
            for s in range(20)}  # fmt: skip
    assert seen == {
        f"Q: What is the river of Paris?\n<think> {thought}</think><search> Paris</search>{PARIS}"
        "<think> done</think><answer> France</answer>"
        for thought in ("river", "home")
    }


def test_relation_query(world):
    one = Chain("pa|river|se", (1, 2), (1,))
    for seed in range(20):
        segments = scripts.solver_script(one, world, rng(seed), flaw="relation_query")
        if len(segments) == 2:  # the search led back to Seine every time: answered early
            continue
        assert segments[1] == ("<think> river</think><search> river</search>", True)
        assert segments[2][0] in {
            f"<information>{p.render()}</information>" for p in world.passages
        }
        assert segments[3][0] != "<think> done</think><answer> Seine</answer>"


def test_proposer_scripts(world):
    prompt = (
        "Write a question.\nChain: France | capital | Paris | river | Seine\n"
        " France: Its capital is Paris. Old.\n"
        " Paris: Its river is Seine. Its home is France.\n"
        " Seine: It has friends, Paris and Loire.\n"
    )
    think = "<think> France, capital, river</think>"
    ask = "<question> What is the river of the capital of France?</question>"

    def output(flaw):
        (first, trained), (second, also) = scripts.proposer_script(CHAIN, world, rng(), flaw=flaw)
        assert first == prompt and not trained and also
        return second

    assert output(None) == f"{think}{ask}<answer> Seine</answer>"
    assert output("no_think") == f"{ask}<answer> Seine</answer>"
    assert output("shortcut") == (
        "<think> Paris, river</think><question> What is the river of Paris?</question>"
        "<answer> Seine</answer>"
    )
    assert output("leak") == (
        f"{think}<question> What is the river of the capital of France, Seine?</question>"
        "<answer> Seine</answer>"
    )
    assert output("wrong_answer") in {
        f"{think}{ask}<answer> France</answer>", f"{think}{ask}<answer> Paris</answer>",
    }  # fmt: skip


def test_reading_script(world):
    for seed in range(20):
        (context, trained), answer = scripts.reading_script(CHAIN, world, rng(seed))
        assert not trained and answer == (" Seine</answer>", True)
        assert context.startswith(QUESTION) and context.endswith("<answer>")
        blocks = re.findall("<information>.*?</information>", context)
        assert sorted(blocks) in (sorted([FRANCE, PARIS]), sorted([FRANCE, PARIS, SEINE]))


def test_unknown_flaws_are_refused(world):
    with pytest.raises(ValueError, match="No solver flaw"):
        scripts.solver_script(CHAIN, world, rng(), flaw="leak")
    with pytest.raises(ValueError, match="No proposer flaw"):
        scripts.proposer_script(CHAIN, world, rng(), flaw="early_answer")
    one = Chain("pa|river|se", (1, 2), (1,))
    with pytest.raises(ValueError, match="one hop"):
        scripts.proposer_script(one, world, rng(), flaw="shortcut")
    assert "shortcut" not in scripts.proposer_flaws(1)
    assert "shortcut" in scripts.proposer_flaws(2)


def test_renaming_needs_a_tokenizer(world):
    with pytest.raises(UserError, match="needs the world's tokenizer"):
        scripts.solver_script(CHAIN, world, rng(), rename=True)


WRITERS = [
    lambda c, a, r: scripts.solver_script(c, a, r, rename=True),
    lambda c, a, r: scripts.solver_script(c, a, r, rename=True, flaw="wrong_field"),
    lambda c, a, r: scripts.solver_script(c, a, r, rename=True, flaw="relation_query"),
    lambda c, a, r: scripts.reading_script(c, a, r, rename=True),
    lambda c, a, r: scripts.proposer_script(c, a, r, rename=True),
]


@pytest.mark.parametrize("write", WRITERS)
def test_no_real_name_survives_renaming(atlas, write, monkeypatch):
    # Random names may spell real ones, so these are numbers instead.
    def numbered(entities, _atlas, _rng):
        return {entity: f"#{entity}#" for entity in entities}

    monkeypatch.setattr(scripts, "random_names", numbered)
    longest = sorted(atlas.graph.labels, key=len, reverse=True)
    real = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest))})(?!\w)")
    generator = rng(3)
    for chain in atlas.sample_chains(3, 60, generator):
        episode = text_of(write(chain, atlas, generator))
        assert not real.findall(episode)
        assert all(f" #{entity}#" in episode for entity in chain.entities[:1])


def test_renaming_is_the_same_everywhere(atlas):
    generator = rng(1)
    for chain in atlas.sample_chains(2, 50, generator):
        names = scripts.random_names(chain.entities, atlas, generator)
        assert len(set(names.values())) == 3
    for chain in atlas.sample_chains(2, 50, generator):
        segments = scripts.solver_script(chain, atlas, generator, rename=True)
        searches = re.findall("<search> (.*?)</search>", text_of(segments))
        answer = re.search("<answer> (.*?)</answer>", text_of(segments))[1]
        assert searches[0] in segments[0][0]
        assert segments[2][0].startswith(f"<information> {searches[0]}:")
        assert f" {searches[1]}." in segments[2][0]
        assert segments[4][0].startswith(f"<information> {searches[1]}:")
        assert f" {answer}." in segments[4][0]


def test_random_names_look_like_names(atlas):
    names = list(scripts.random_names(range(500), atlas, rng()).values())
    assert len(set(names)) == 500
    assert all(re.fullmatch("[A-Z][a-z]*( ?[A-Za-z]+)*", name) for name in names)


def test_scripts_repeat_with_the_random_state(atlas):
    (chain,) = atlas.sample_chains(3, 1, rng())
    for write in WRITERS:
        assert write(chain, atlas, rng(9)) == write(chain, atlas, rng(9))
        assert write(chain, atlas, rng(9)) != write(chain, atlas, rng(10))


def test_flawed_scripts_answer_wrongly(atlas):
    generator = rng(2)
    for hops in (1, 2, 3):
        for chain in atlas.sample_chains(hops, 100, generator):
            right = atlas.graph.labels[chain.entities[-1]]
            for flaw in scripts.SOLVER_FLAWS:
                segments = scripts.solver_script(chain, atlas, generator, flaw=flaw)
                assert not segments[-1][0].endswith(f"<answer> {right}</answer>")
                assert segments[-1][1] and not segments[0][1]


def test_scripts_are_fast(atlas):
    generator = rng()
    drawn = atlas.sample_chains(3, 1000, generator)
    begin = time.perf_counter()
    for chain in drawn:
        scripts.solver_script(chain, atlas, generator, rename=True)
    assert time.perf_counter() - begin < 1.0  # at least 1,000 a second, on a loaded machine
