"""A world of six entities written by hand, for tests whose expected text is written out."""

import json
from pathlib import Path

from zest_jax.tasks.atlas import Atlas, load_atlas

# Every relation has one phrase, so that questions are the same for every random state.
RELATIONS = {
    "capital": ("capital", "the capital of {}"),
    "river": ("river", "the river of {}"),
    "country": ("home", "the home of {}"),
    "friend": ("friend", "the friend of {}"),
}
ENTITIES = {
    "fr": ("France", "train"),
    "pa": ("Paris", "train"),
    "se": ("Seine", "train"),
    "lo": ("Loire", "validation"),
    "be": ("Berlin", "heldout"),
    "bi": ("Berlin", "train"),
}
TRIPLES = [
    ("fr", "capital", "pa"),
    ("pa", "river", "se"),
    ("pa", "country", "fr"),
    ("lo", "country", "fr"),
    ("se", "friend", "pa"),
    ("se", "friend", "lo"),
    ("fr", "friend", "be"),
]
PASSAGES = {
    "fr": "Its capital is Paris. Old.",
    "pa": "Its river is Seine. Its home is France.",
    "se": "It has friends, Paris and Loire.",
    "lo": "Its land has six corners.",
    "be": "A town.",
    "bi": "A name.",
}


def write_world(folder: Path) -> None:
    """Writes the files that `load_atlas` reads."""

    def jsonl(name: str, records: list[dict]) -> None:
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / name).write_text(text, encoding="utf-8")

    jsonl(
        "entities.jsonl",
        [{"id": k, "label": n, "kind": "thing", "split": s} for k, (n, s) in ENTITIES.items()],
    )
    jsonl(
        "relations.jsonl",
        [{"id": k, "label": n, "phrases": [p]} for k, (n, p) in RELATIONS.items()],
    )
    jsonl(
        "passages.jsonl",
        [{"id": k, "title": ENTITIES[k][0], "text": t} for k, t in PASSAGES.items()],
    )
    lines = "".join("\t".join(triple) + "\n" for triple in TRIPLES)
    (folder / "triples.tsv").write_text(lines, encoding="utf-8")


def tiny_world(folder: Path) -> Atlas:
    """The world, read back from files in ``folder``."""
    write_world(folder)
    return load_atlas(folder)
