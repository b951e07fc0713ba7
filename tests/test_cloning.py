"""What a warm start imitates: trajectory files, trained positions, the mix of scripts."""

import json

import numpy as np
import pytest
import tiny

from zest_jax.errors import UserError
from zest_jax.tasks import cloning
from zest_jax.tasks.atlas import load_atlas
from zest_jax.tasks.cloning import Mix, episode_items, read_trajectories, scripted_episodes

GOOD = {"segments": [["Q: where?\n", False], ["<answer> here</answer>", True]]}


def write(folder, *records):
    path = folder / "episodes.jsonl"
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_trajectory_file(tmp_path):
    path = write(tmp_path, GOOD, "", GOOD | {"source": "elsewhere"})
    assert (
        read_trajectories(path)
        == [
            [("Q: where?\n", False), ("<answer> here</answer>", True)],
        ]
        * 2
    )


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{not json", "expected one JSON object a line"),
        ([1], "expected a JSON object, found a list"),
        ({}, "'segments' must be a list of"),
        ({"segments": []}, "'segments' must be a list of"),
        ({"segments": "Q"}, "'segments' must be a list of"),
        ({"segments": [["Q"]]}, "every segment must be"),
        ({"segments": [["Q", 1]]}, "every segment must be"),
        ({"segments": [[True, "Q"]]}, "every segment must be"),
        ({"segments": [{"text": "Q", "trained": True}]}, "every segment must be"),
        ({"segments": [["Q", False]]}, "no segment is trained"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(tmp_path, record, message):
    path = write(tmp_path, GOOD, "", record)
    with pytest.raises(UserError) as error:
        read_trajectories(path)
    assert str(error.value).startswith(f"{path}, line 3: ")
    assert message in str(error.value)


def test_a_missing_or_empty_file_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="no such file; expected a JSON-lines file of trajectories"):
        read_trajectories(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="empty"):
        read_trajectories(write(tmp_path, ""))


def words(texts):
    """One id a character, so that positions can be counted."""
    return [[ord(c) for c in text] for text in texts]


def test_trained_positions_by_hand():
    (one, two) = episode_items(
        [
            [("ab", False), ("cde", True), ("f", False), ("gh", True)],
            [("ij", True), ("", True), ("k", False)],
        ],
        words,
    )
    assert bytes(one.ids.tolist()).decode() == "abcdefgh"
    assert one.targets.tolist() == [2, 3, 4, 6, 7]
    assert bytes(two.ids.tolist()).decode() == "ijk"
    assert two.targets.tolist() == [1], "nothing predicts the first token"
    assert one.logp.tolist() == [0.0] * 5 and one.ids.dtype == np.int32


def test_segments_are_tokenised_apart_as_the_sampler_joins_them():
    episode = [("Q: the", False), ("</", True), ("search>", False)]
    (item,) = episode_items([episode], tiny.encode)
    pieces = tiny.encode([text for text, _ in episode])
    assert item.ids.tolist() == sum(pieces, [])
    assert item.ids.tolist() != tiny.encode(["Q: the</search>"])[0], "joined, it would be a tag"
    assert item.targets.tolist() == list(range(len(pieces[0]), len(pieces[0]) + len(pieces[1])))


# ------------------------------------------------------------------------------- scripts


@pytest.fixture(scope="module")
def atlas():
    return load_atlas()


def rng(seed=0):
    return np.random.default_rng(seed)


def text_of(episode):
    return "".join(text for text, _ in episode)


@pytest.mark.parametrize(
    ("mix", "begins", "ends"),
    [
        (Mix(solver=1, reading=0, proposer=0), "Q: ", "</answer>"),
        (Mix(solver=0, reading=1, proposer=0), "Q: ", "</answer>"),
        (Mix(solver=0, reading=0, proposer=1), "Write a question.\nChain: ", "</answer>"),
    ],
)
def test_a_weight_of_one_gives_that_kind_alone(atlas, mix, begins, ends):
    episodes = scripted_episodes(atlas, mix, 40, rng())
    assert len(episodes) == 40
    for episode in episodes:
        text = text_of(episode)
        assert text.startswith(begins) and text.endswith(ends)
        assert not episode[0][1] and episode[-1][1]
        assert ("<search>" in text) <= bool(mix.solver)


def test_shares_of_kinds_renaming_and_hops(atlas):
    mix = Mix(solver=2, reading=1, proposer=1, renamed=0.25, max_hops=2)
    episodes = scripted_episodes(atlas, mix, 800, rng(1))
    texts = [text_of(e) for e in episodes]
    proposer = [t.startswith("Write") for t in texts]
    assert np.mean(proposer) == pytest.approx(0.25, abs=0.06)
    chains = [t.split("\n")[1].count(" | ") // 2 for t in texts if t.startswith("Write")]
    assert set(chains) == {1, 2}
    assert np.mean(np.array(chains) == 1) == pytest.approx(0.5, abs=0.12)
    labels = set(atlas.graph.labels)
    sources = [t.split("\n")[1][7:].split(" | ")[0] for t in texts if t.startswith("Write")]
    assert np.mean([s not in labels for s in sources]) == pytest.approx(0.25, abs=0.1)


def test_flaws_are_drawn_by_their_shares(atlas, monkeypatch):
    drawn = []
    script = cloning.scripts.solver_script

    def spy(chain, atlas, rng, rename, flaw):
        drawn.append(flaw)
        return script(chain, atlas, rng, rename, flaw)

    monkeypatch.setattr(cloning.scripts, "solver_script", spy)
    shares = {"early_answer": 0.5, "wrong_field": 0.2, "relation_query": 0.1}
    mix = Mix(solver=1, reading=0, proposer=0, renamed=0, **shares)
    scripted_episodes(atlas, mix, 1000, rng(2))
    for flaw, share in {**shares, None: 0.2}.items():
        assert drawn.count(flaw) / 1000 == pytest.approx(share, abs=0.05)
    drawn.clear()
    clean = Mix(solver=1, reading=0, proposer=0, early_answer=0, wrong_field=0, relation_query=0)
    scripted_episodes(atlas, clean, 50, rng(3))
    assert drawn == [None] * 50


def test_the_same_random_state_gives_the_same_episodes(atlas):
    one, again = (scripted_episodes(atlas, Mix(), 30, rng(4)) for _ in range(2))
    assert one == again
    assert one != scripted_episodes(atlas, Mix(), 30, rng(5))
