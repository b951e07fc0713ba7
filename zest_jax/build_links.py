"""Makes a world out of a corpus of articles that name each other: no labels, no knowledge graph.

    python -m zest_jax.build_links --corpus=demo/wikipedia-summaries/corpus.jsonl \\
        --tokenizer=demo/smollm2-135m-instruct --world=demo/world
    python -m zest_jax.build_index --corpus=demo/world/passages.jsonl \\
        --encoder=demo/all-minilm-l6-v2 --index=demo/index

An article that names another one's title after some words is a fact, and a walk through such facts
is a chain: what a proposer writes questions for, and what a solver can be measured by, since its
end is known by construction (`zest_jax/tasks/links.py` says what counts as a link). The folder is a
world like the embedded one (`--config.world.folder=…`): passages, entities, relations, triples,
questions, and the tokenizer that lengths are counted in.

Articles are shortened to whole sentences (--characters). A share of those that link anywhere is
held out (--heldout, --validation): no chain of training holds one at any place, the chains of the
questions start from them. What was kept and left out is printed and stands in links.json.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from zest_jax import cli
from zest_jax.errors import UserError
from zest_jax.retrieval.corpora import open_corpus
from zest_jax.retrieval.interface import Passage
from zest_jax.tasks.atlas import Atlas, load_atlas
from zest_jax.tasks.links import Link, find_links, phrase, shorten
from zest_jax.tasks.templates import chain_task, reveals_answer
from zest_jax.tasks.types import Task, write_tasks

SUMMARY = "links.json"
QUESTION_SETS = ("heldout", "validation")


def main(config: Any, workdir: str | None, values: flags.FlagValues) -> None:
    if not (values.corpus and values.tokenizer and values.world):
        raise UserError("give all three: --corpus=FILE, --tokenizer=FOLDER and --world=FOLDER.")
    shares = {"heldout": values.heldout, "validation": values.validation}
    if min(shares.values()) <= 0 or sum(shares.values()) >= 1:
        raise UserError("--heldout and --validation are shares above 0, below 1 together.")
    if values.characters < 50 or values.questions < 1 or not 1 <= values.max_hops <= 4:
        raise UserError(
            "--characters is 50 or more, --questions 1 or more, --max_hops from 1 to 4."
        )
    folder = Path(values.world).expanduser()
    if folder.exists():
        raise UserError(f"{folder} is there already; delete it to make it anew.")
    tokenizer = Path(values.tokenizer).expanduser()
    if not (tokenizer / "tokenizer.json").is_file():
        raise UserError(f"{tokenizer} has no tokenizer.json; --tokenizer is the policy's folder.")
    passages = read_corpus(values.corpus, values.characters)
    links = find_links(passages)
    if not links:
        raise UserError(f"{values.corpus}: no article names another one's title.")
    rng = np.random.default_rng(values.seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Made beside its place and moved there whole, so that a kill leaves no half of a world.
    with contextlib.ExitStack() as stack:
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        stack.callback(shutil.rmtree, made, ignore_errors=True)
        splits = split_articles(links, shares, rng)
        write_world(made, passages, links, splits, tokenizer)
        told = {
            "corpus": str(values.corpus),
            "passages": len(passages),
            "links": len(links),
            "articles with links": len({link.head for link in links}),
            "words before names": len({link.relation for link in links}),
        }
        atlas = load_atlas(made)
        for split in ("train", *QUESTION_SETS):
            told[f"chains of 1 to {values.max_hops} hops, {split}"] = [
                atlas.count_chains(hops, split) for hops in range(1, values.max_hops + 1)
            ]
        for split in QUESTION_SETS:
            count = values.questions if split == "heldout" else max(values.questions // 3, 1)
            tasks = questions(atlas, split, count, values.max_hops, rng)
            write_tasks(made / f"{split}.jsonl", tasks)
            told[f"questions, {split}"] = len(tasks)
        text = json.dumps(told | {"seed": values.seed}, ensure_ascii=False, indent=2)
        (made / SUMMARY).write_text(text + "\n", "utf-8")
        made.chmod(0o755)
        made.rename(folder)
    for name, count in told.items():
        print(f"{name}: {f'{count:,}' if isinstance(count, int) else count}")


def read_corpus(path: str, most: int) -> list[Passage]:
    """The passages of a corpus, shortened to `most` characters."""
    corpus = open_corpus(path)
    return [
        Passage(passage.id, passage.title, shorten(passage.text, most))
        for batch in corpus.batches()
        for passage in batch.passages
    ]


def split_articles(
    links: Sequence[Link], shares: dict[str, float], rng: np.random.Generator
) -> dict[int, str]:
    """The split of every article that links or is linked to; shares are of those that link."""
    heads = sorted({link.head for link in links})
    order = rng.permutation(len(heads)).tolist()
    splits = dict.fromkeys(sorted({link.tail for link in links} | set(heads)), "train")
    at = 0
    for name, share in shares.items():
        count = round(share * len(heads))
        splits |= {heads[i]: name for i in order[at : at + count]}
        at += count
    return splits


def write_world(
    folder: Path,
    passages: Sequence[Passage],
    links: Sequence[Link],
    splits: dict[int, str],
    tokenizer: Path,
) -> None:
    """The files of a world (README, "Your own corpus"), without its questions."""
    relations = {words: f"r{n}" for n, words in enumerate(sorted({x.relation for x in links}))}
    _write(
        folder / "passages.jsonl",
        ({"id": p.id, "title": p.title, "text": p.text} for p in passages),
    )
    _write(
        folder / "entities.jsonl",
        (
            {"id": passages[row].id, "label": passages[row].title, "aliases": [], "split": split}
            for row, split in splits.items()
        ),
    )
    _write(
        folder / "relations.jsonl",
        (
            {"id": name, "label": words, "phrases": [phrase(words)]}
            for words, name in relations.items()
        ),
    )
    lines = (
        f"{passages[x.head].id}\t{relations[x.relation]}\t{passages[x.tail].id}\n" for x in links
    )
    (folder / "triples.tsv").write_text("".join(lines), "utf-8")
    (folder / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder / "tokenizer" / name)


def questions(
    atlas: Atlas, split: str, count: int, max_hops: int, rng: np.random.Generator
) -> list[Task]:
    """Up to `count` questions of a split by template, of each number of hops as many.

    Questions that spell out their answer are left out.
    """
    tasks: list[Task] = []
    for hops in range(1, max_hops + 1):
        share = count // max_hops + (hops <= count % max_hops)
        there = atlas.count_chains(hops, split)
        chains = atlas.sample_chains(hops, min(2 * share, there), rng, split)
        made = [
            chain_task(chain, atlas, rng, f"{split}-{hops}-{number:03}")
            for number, chain in enumerate(chains)
        ]
        tasks += [task for task in made if not reveals_answer(task)][:share]
    return tasks


def _write(path: Path, records: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("corpus", "", "what zest_jax.build_index reads", flag_values=values)
    flags.DEFINE_string("tokenizer", "", "folder of the policy's", flag_values=values)
    flags.DEFINE_string("world", "", "the folder that is made", flag_values=values)
    flags.DEFINE_integer("characters", 400, "of an article that are kept", flag_values=values)
    flags.DEFINE_float("heldout", 0.2, "share of the linking articles", flag_values=values)
    flags.DEFINE_float("validation", 0.1, "share of the linking articles", flag_values=values)
    flags.DEFINE_integer("questions", 480, "held out; a third to validate by", flag_values=values)
    flags.DEFINE_integer("max_hops", 3, "of a question", flag_values=values)
    flags.DEFINE_integer("seed", 0, "of splits and questions", flag_values=values)


entry = cli.program(main, define=define, needs_config=False, needs_workdir=False)

if __name__ == "__main__":
    sys.exit(entry())
