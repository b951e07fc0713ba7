"""The embedded world: real facts about countries, cities, money, languages and elements.

`load_atlas` reads the files shipped under ``zest_jax/assets/atlas`` (see PROVENANCE.md there), or
any folder of the same layout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path

import numpy as np

from zest_jax.errors import UserError
from zest_jax.tasks import chains
from zest_jax.tasks.chains import Bools
from zest_jax.tasks.graph import KnowledgeGraph
from zest_jax.tasks.types import Chain, Passage, Task, read_passages, read_records, read_tasks

SPLITS = ("train", "validation", "heldout")

# A passage as text and the entities named in it, e.g. (" ", 3, ": Its capital is ", 7, ".").
Pieces = tuple[str | int, ...]


@dataclass(frozen=True)
class Atlas:
    """A small world, whole.

    Attributes:
      folder: where it was read from.
      graph: entities, relations, triples; entity rows and passage rows need not agree.
      kinds: [E] what sort of thing each entity is.
      passages: the corpus, in row order.
      phrases: [R] ways to ask for each relation, with ``{}`` for its head.
      train, validation, heldout: [E] bool each, the split of the entities.
      heldout_tasks, validation_tasks: question sets; empty where their files are not made yet.
    """

    folder: Path
    graph: KnowledgeGraph
    kinds: tuple[str, ...]
    passages: tuple[Passage, ...]
    phrases: tuple[tuple[str, ...], ...]
    train: Bools
    validation: Bools
    heldout: Bools
    heldout_tasks: tuple[Task, ...]
    validation_tasks: tuple[Task, ...]

    @property
    def tokenizer_folder(self) -> Path:
        """Hugging Face folder of the tokenizer made for this world."""
        return self.folder / "tokenizer"

    def passage_of(self, entity: int) -> Passage:
        """The (first) passage about an entity."""
        return self.passages[self.graph.passages_of(entity)[0]]

    @cached_property
    def triple_masks(self) -> tuple[Bools, Bools]:
        """[T] bool each: triples that pass filters (b) and (c), and those that may come first."""
        covered, mentioned = chains.supported(self.graph, self.passages)
        clear = chains.unambiguous(self.graph)
        usable = clear & covered[self.graph.heads] & covered[self.graph.tails]
        return usable, usable & mentioned

    def split_mask(self, split: str) -> Bools:
        """[E] bool, the entities of a split."""
        if split not in SPLITS:
            raise ValueError(f"No split '{split}'; there are {', '.join(SPLITS)}.")
        return {"train": self.train, "validation": self.validation, "heldout": self.heldout}[split]

    def sample_chains(
        self, hops: int, count: int, rng: np.random.Generator, split: str = "train"
    ) -> list[Chain]:
        """Chains that pass the three filters and belong to a split.

        Training chains hold training entities only; validation and held-out chains start from an
        entity of theirs and go anywhere.
        """
        usable, first = self.triple_masks
        mask = self.split_mask(split)
        return chains.sample_chains(
            self.graph,
            hops,
            count,
            rng,
            triples=usable,
            first_triples=first,
            allowed=mask if split == "train" else None,
            start=mask,
        )

    def count_chains(self, hops: int, split: str = "train") -> int:
        """Number of chains that `sample_chains` chooses from."""
        usable, first = self.triple_masks
        mask = self.split_mask(split)
        return chains.count_chains(
            self.graph,
            hops,
            triples=usable,
            first_triples=first,
            allowed=mask if split == "train" else None,
            start=mask,
        )

    @cached_property
    def pieces(self) -> tuple[Pieces, ...]:
        """[E] each entity's rendered passage, cut where it names the entity or a tail of it."""
        return tuple(self._cut(entity) for entity in range(self.graph.entity_count))

    @cached_property
    def name_pieces(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Vocabulary entries that can begin a made-up name, and those that can go on with one.

        Words that passages and questions are built of ("Its", "What", ...) begin no name.
        """
        path = self.tokenizer_folder / "tokenizer.json"
        try:
            vocabulary = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
        except FileNotFoundError:
            raise UserError(
                f"{path}: no such file; renaming needs the world's tokenizer."
            ) from None
        frame = {"What", "Write", "Chain"}
        for pieces in self.pieces:
            for part in pieces:
                if isinstance(part, str):
                    frame.update(re.findall(r"\w+", part))
        heads = sorted(piece[1:] for piece in vocabulary if re.fullmatch("Ġ[A-Z][a-z]*", piece))
        tails = sorted(piece for piece in vocabulary if re.fullmatch("[a-z]+", piece))
        return tuple(head for head in heads if head not in frame), tuple(tails)

    def _cut(self, entity: int) -> Pieces:
        names = {self.graph.labels[tail]: tail for _, tail in self.graph.facts(entity)}
        names[self.graph.labels[entity]] = entity
        # The longest name first, so that "New Delhi" is not read as "Delhi".
        pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        found = re.split(rf"(?<!\w)({pattern})(?!\w)", self.passage_of(entity).render())
        return tuple(names.get(part, part) for part in found if part)


def load_atlas(folder: str | Path | None = None) -> Atlas:
    """Reads the shipped world, or one of the same layout from ``folder``.

    Raises:
      UserError: a file is missing or malformed (file, line and what was expected).
    """
    root = Path(str(files("zest_jax") / "assets" / "atlas")) if folder is None else Path(folder)
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; expected a world with entities, triples, ....")
    passages = tuple(read_passages(root / "passages.jsonl"))
    graph = KnowledgeGraph.from_files(
        root / "entities.jsonl", root / "relations.jsonl", root / "triples.tsv", passages
    )
    bare = np.flatnonzero(np.diff(graph.passage_offsets) == 0)
    if len(bare):
        raise UserError(
            f"{root / 'passages.jsonl'}: no passage has the id or title of the entity "
            f"'{graph.labels[bare[0]]}'; every entity needs one."
        )
    kinds, splits = [], []
    for record, where in read_records(root / "entities.jsonl", "entities"):
        if record.get("split") not in SPLITS:
            raise UserError(f"{where}: 'split' must be one of {', '.join(SPLITS)}.")
        kinds.append(str(record.get("kind", "")))
        splits.append(record["split"])
    marks = np.array(splits)
    return Atlas(
        folder=root,
        graph=graph,
        kinds=tuple(kinds),
        passages=passages,
        phrases=tuple(_read_phrases(root / "relations.jsonl")),
        train=marks == "train",
        validation=marks == "validation",
        heldout=marks == "heldout",
        heldout_tasks=_tasks(root / "heldout.jsonl"),
        validation_tasks=_tasks(root / "validation.jsonl"),
    )


def _tasks(path: Path) -> tuple[Task, ...]:
    return tuple(read_tasks(path)) if path.exists() else ()


def _read_phrases(path: Path) -> Sequence[tuple[str, ...]]:
    result = []
    for record, where in read_records(path, "relations"):
        phrases = record.get("phrases")
        if not isinstance(phrases, list) or not phrases:
            raise UserError(f"{where}: 'phrases' must be a list of ways to ask.")
        for phrase in phrases:
            if not isinstance(phrase, str) or phrase.count("{}") != 1:
                raise UserError(f"{where}: the phrase {phrase!r} needs exactly one {{}}.")
        result.append(tuple(phrases))
    return result
