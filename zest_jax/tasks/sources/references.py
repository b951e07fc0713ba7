"""Reference questions without labels, the templates of ZEST-Search: a proposer names a target of
the kind that each asks for, and writes a new question from evidence that leads to it.

A line of the file has `question`, and may have an `id`; whatever else it has is not looked at. A
reference is no seed yet: `staging.Staging` makes seeds of them.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zest_jax.errors import UserError
from zest_jax.tasks.evidence_paths import Aliases
from zest_jax.tasks.seeds import Seed
from zest_jax.tasks.sources.interface import SOURCES, Fits, hop_counts, too_few
from zest_jax.tasks.types import read_records
from zest_jax.tasks.world import World


class References:
    """Reference questions.

    Args:
      questions: (id, question) of each.
      aliases: names of known entities.
      known_only: whether targets have to be among them.
      hop_weights: weights of paths of 1, 2, … hops.
      left_out: source ids that no path may start from.
    """

    def __init__(
        self,
        questions: Sequence[tuple[str, str]],
        aliases: Aliases,
        known_only: bool,
        hop_weights: tuple[float, ...],
        left_out: frozenset[str] = frozenset(),
    ):
        self.questions, self.aliases, self.known_only = questions, aliases, known_only
        self.hop_weights, self.left_out = hop_weights, left_out

    def draw(self, count: int, rng: np.random.Generator, fits: Fits) -> list[Seed]:
        """See `SeedSource`; references are all different as long as there are enough."""
        hops = hop_counts(count, self.hop_weights, rng)
        seeds: list[Seed] = []
        order: list[int] = []
        for _ in range(4 * count + len(self.questions)):
            if len(seeds) == count:
                return seeds
            order = order or rng.permutation(len(self.questions)).tolist()
            name, question = self.questions[order.pop()]
            wanted = int(hops[len(seeds)])
            seed = Seed(
                id=f"{name}#{wanted}#{len(seeds)}",
                source_id=name,
                hops=wanted,
                fields={"question": question},
                words=(question,),
            )
            if fits(seed):
                seeds.append(seed)
        if len(seeds) == count:
            return seeds
        raise too_few("reference questions", count, len(seeds))


def read_references(path: str | Path) -> list[tuple[str, str]]:
    """(id, question) of every line.

    Raises:
      UserError: file, line and what was expected.
    """
    questions = []
    for number, (record, where) in enumerate(read_records(path, "reference questions")):
        question = record.get("question")
        if not isinstance(question, str) or not question.strip():
            raise UserError(f"{where}: 'question' must be a text.")
        questions.append((str(record.get("id", number)), question.strip()))
    return questions


def read_aliases(path: str | Path) -> Iterable[tuple[str, tuple[str, ...]]]:
    """(id, names) of every line {"id": …, "names": [name, …]}.

    Raises:
      UserError: file, line and what was expected.
    """
    for record, where in read_records(path, "entities and their names"):
        entity, names = record.get("id"), record.get("names")
        texts = isinstance(names, list) and all(isinstance(n, str) and n.strip() for n in names)
        if not isinstance(entity, str) or not texts or not names:
            raise UserError(f"{where}: expected an 'id' and 'names', a list of texts.")
        yield entity, tuple(names)


@SOURCES.register("references")
def build(config: Any, world: World) -> References:
    """The file `source.file`, else the references of the world.

    Raises:
      UserError: there is neither, or no question is left.
    """
    source, atlas = config.source, world.atlas
    path = source.file or (atlas.folder / "references.jsonl" if atlas is not None else "")
    if not path:
        raise UserError("source.kind=references needs a file of questions: set source.file.")
    questions = [
        (name, question)
        for name, question in read_references(path)
        if not world.evaluates(question)
    ]
    if not questions:
        raise UserError(f"{path}: every question of it is one of the evaluation.")
    known = source.known_targets
    if source.aliases:
        aliases = Aliases(read_aliases(source.aliases))
    elif atlas is not None:
        graph = atlas.graph
        aliases = Aliases((graph.entity_ids[e], graph.names(e)) for e in range(graph.entity_count))
    elif known:
        raise UserError(
            "source.known_targets=True needs a file of entities and their names: set "
            "source.aliases."
        )
    else:
        aliases = Aliases()
    hops = tuple(source.hop_weights)
    return References(questions, aliases, known, hops, world.evaluated_sources)
