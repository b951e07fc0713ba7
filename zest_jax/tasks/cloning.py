"""What a warm start imitates: scripted episodes of a world, or a file of trajectories.

A trajectory file has one JSON object a line, {"segments": [[text, trained], …]}: the episode's text
in pieces, each with whether the policy would have written it itself. Prompts and passages are not
trained.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zest_jax.errors import UserError
from zest_jax.learning.packing import Item
from zest_jax.tasks import scripts
from zest_jax.tasks.atlas import Atlas
from zest_jax.tasks.path_scripts import path_flaws, path_script, target_script
from zest_jax.tasks.scripts import Segment
from zest_jax.tasks.search_scripts import backward_chain, backward_script, document_script
from zest_jax.tasks.types import read_records

Encode = Callable[[Sequence[str]], list[list[int]]]


@dataclasses.dataclass(frozen=True)
class Mix:
    """Shares of what is imitated.

    Attributes:
      solver: weight of search episodes.
      reading: weight of answers from given passages.
      proposer: weight of question writing from a chain.
      document: weight of question writing from a document, with searches.
      backward: weight of question writing from an answer, with searches.
      target: weight of naming a target for a reference question.
      path: weight of question writing from an evidence path.
      renamed: share of the episodes whose names are random, so that reading has to be learnt and
        not names by heart.
      early_answer, wrong_field, relation_query: shares of the search episodes that go wrong in
        these ways (`scripts.solver_script`); the rest are right.
      flawed_proposer: share of the proposals that are bad questions; of targets a third of it.
      max_hops: longest chain.
    """

    solver: float = 0.6
    reading: float = 0.1
    proposer: float = 0.3
    document: float = 0.0
    backward: float = 0.0
    target: float = 0.0
    path: float = 0.0
    renamed: float = 0.5
    early_answer: float = 0.5
    wrong_field: float = 0.1
    relation_query: float = 0.05
    flawed_proposer: float = 0.5
    max_hops: int = 3


def scripted_episodes(
    atlas: Atlas, mix: Mix, count: int, rng: np.random.Generator
) -> list[list[Segment]]:
    """Scripted episodes over training chains."""
    weights = np.array(
        [
            mix.solver,
            mix.reading,
            mix.proposer,
            mix.document,
            mix.backward,
            mix.target,
            mix.path,
        ]
    )
    # Kinds of weight 0 are left out, so that adding one does not change what is drawn without it.
    there = np.flatnonzero(weights)
    kinds = rng.choice(there, size=count, p=weights[there] / weights.sum())
    hops_of = rng.integers(1, mix.max_hops + 1, size=count)
    pools = {
        hops: atlas.sample_chains(hops, int(np.sum(hops_of == hops)), rng, split="train")
        for hops in range(1, mix.max_hops + 1)
    }
    episodes = []
    for kind, hops in zip(kinds.tolist(), hops_of.tolist(), strict=True):
        chain = pools[hops].pop()
        rename = bool(rng.random() < mix.renamed)
        if kind == 0:
            shares = [mix.early_answer, mix.wrong_field, mix.relation_query]
            at = int(np.searchsorted(np.cumsum(shares), rng.random(), side="right"))
            flaw = scripts.SOLVER_FLAWS[at] if at < len(shares) else None
            episodes.append(scripts.solver_script(chain, atlas, rng, rename, flaw))
        elif kind == 1:
            episodes.append(scripts.reading_script(chain, atlas, rng, rename))
        elif kind == 3:
            flawed = bool(rng.random() < mix.flawed_proposer)
            episodes.append(document_script(chain, atlas, rng, rename, flawed))
        elif kind == 4:
            flawed, found = bool(rng.random() < mix.flawed_proposer), None
            while found is None:
                found = backward_chain(atlas, int(rng.integers(2, mix.max_hops + 1)), rng)
            episodes.append(backward_script(found, atlas, rng, rename, flawed))
        elif kind == 5:
            flawed = bool(rng.random() < mix.flawed_proposer / 3)
            episodes.append(target_script(chain, atlas, rng, flawed))
        elif kind == 6:
            flaws = path_flaws(hops)
            flawed = bool(rng.random() < mix.flawed_proposer)
            flaw = flaws[int(rng.integers(len(flaws)))] if flawed else None
            episodes.append(path_script(chain, atlas, rng, rename, flaw))
        else:
            flaws = scripts.proposer_flaws(hops)
            flawed = rng.random() < mix.flawed_proposer
            flaw = flaws[int(rng.integers(len(flaws)))] if flawed else None
            episodes.append(scripts.proposer_script(chain, atlas, rng, rename, flaw))
    return episodes


def read_trajectories(path: str | Path) -> list[list[Segment]]:
    """All episodes of a trajectory file.

    Raises:
      UserError: file, line and what was expected.
    """
    episodes = []
    for record, where in read_records(path, "trajectories"):
        segments = record.get("segments")
        if not isinstance(segments, list) or not segments:
            raise UserError(f"{where}: 'segments' must be a list of [text, trained] pairs.")
        for pair in segments:
            good = isinstance(pair, list) and len(pair) == 2
            if not good or not isinstance(pair[0], str) or not isinstance(pair[1], bool):
                raise UserError(f"{where}: every segment must be [text, true or false].")
        if not any(trained for _, trained in segments):
            raise UserError(f"{where}: no segment is trained; mark the policy's own words true.")
        episodes.append([(text, trained) for text, trained in segments])
    return episodes


def episode_items(episodes: Sequence[Sequence[Segment]], encode: Encode) -> list[Item]:
    """Token ids and trained positions; segments are tokenised apart, as the sampler joins them."""
    ids_of = iter(encode([text for episode in episodes for text, _ in episode]))
    items = []
    for episode in episodes:
        pieces = [(next(ids_of), trained) for _, trained in episode]
        ids = np.array([i for piece, _ in pieces for i in piece], np.int32)
        mask = np.array([trained for piece, trained in pieces for _ in piece], bool)
        mask[:1] = False  # nothing predicts the first token
        targets = np.flatnonzero(mask)
        items.append(Item(ids, targets, np.zeros(len(targets), np.float32)))
    return items


def recorded(w: Any, encode: Any, most: int) -> list[Item]:
    """The trajectories of a config's group `warm_start` as they are trained on; [] without a file.

    Raises:
      UserError: the file is broken, or a trajectory has more than `most` tokens.
    """
    if not (w.steps and w.file):
        return []
    items = episode_items(read_trajectories(w.file), encode)
    check_lengths(items, most, w.file)
    return items


def check_lengths(items: Sequence[Item], most: int, path: str | Path) -> None:
    """Refuses trajectories that no row can hold.

    Raises:
      UserError: which one, its tokens and the limit.
    """
    for number, item in enumerate(items, start=1):
        if len(item.ids) > most or len(item.targets) > most // 2:
            raise UserError(
                f"{path}, trajectory {number}: {len(item.ids)} tokens, {len(item.targets)} of them "
                f"trained; at most {most} and {most // 2} fit the config's lengths. Shorten it or "
                "raise solver.prompt_length, action_length or observation_length."
            )
