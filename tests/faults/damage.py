"""Hurting files of a workdir that nobody is running."""

from __future__ import annotations

import random
import shutil
from pathlib import Path


def _a_file(folder: Path, rng: random.Random) -> Path:
    """One of the files, the larger ones more often."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size)
    return rng.choices(files, [p.stat().st_size ** 0.3 for p in files])[0]


def truncate(checkpoint: Path, rng: random.Random) -> str:
    """Cuts a file of a checkpoint short."""
    path = _a_file(checkpoint, rng)
    size = path.stat().st_size
    keep = rng.randrange(size)
    with path.open("r+b") as file:
        file.truncate(keep)
    return f"{path.relative_to(checkpoint.parent)} cut to {keep} of {size} bytes"


def corrupt(checkpoint: Path, rng: random.Random) -> str:
    """Flips a few bits of a file of a checkpoint."""
    path = _a_file(checkpoint, rng)
    count = rng.choice((1, 1, 4, 32))
    with path.open("r+b") as file:
        size = path.stat().st_size
        for _ in range(count):
            at = rng.randrange(size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ (1 << rng.randrange(8))]))
    return f"{count} bits of {path.relative_to(checkpoint.parent)} flipped"


def remove(checkpoint: Path, rng: random.Random) -> str:
    """Takes a file or a folder of a checkpoint away."""
    path = _a_file(checkpoint, rng)
    if rng.random() < 0.3 and path.parent != checkpoint:
        shutil.rmtree(path.parent)
        return f"{path.parent.relative_to(checkpoint.parent)} deleted"
    path.unlink()
    return f"{path.relative_to(checkpoint.parent)} deleted"


def litter(workdir: Path, newest: int, rng: random.Random) -> str:
    """What a kill may leave: half a checkpoint, half-written files, torn last lines."""
    how = rng.choice(("half a checkpoint", "a half-written file", "a torn last line"))
    if how == "half a checkpoint":
        source = workdir / "checkpoints" / str(newest)
        half = workdir / "checkpoints" / f"{newest + 1}.orbax-checkpoint-tmp-{rng.randrange(9999)}"
        shutil.copytree(source, half)
        for path in sorted(half.rglob("*")):
            if path.is_file() and rng.random() < 0.5:
                path.unlink()
    elif how == "a half-written file":
        for name in (".metrics.jsonl.x3f", "tasks/.iteration_0.jsonl.a1", ".report.json.q8"):
            path = workdir / name
            path.parent.mkdir(exist_ok=True)
            path.write_text('{"step": 3, "pha')
    else:
        files = [workdir / "metrics.jsonl", *sorted((workdir / "rollouts").glob("*.jsonl"))]
        for path in files:
            if path.exists():
                with path.open("a") as file:
                    file.write('{"step": 7, "phase": "solver", "time": 17')
    return how


def cut_tail(path: Path, rng: random.Random) -> str:
    """Cuts the end of a growing file off."""
    size = path.stat().st_size
    keep = size - rng.randrange(1, max(2, min(size, 6000)))
    with path.open("r+b") as file:
        file.truncate(keep)
    return f"{path.name} cut to {keep} of {size} bytes"


BAD_LINES = (
    ("not JSON", b"this is no task\n", ("line {}", "not JSON")),
    ("half a line", b'{"id": "q1", "question": "Wha\n', ("line {}", "not JSON")),
    ("a field missing", b'{"id": "zz", "question": "?"}\n', ("line {}", "'golden_answers'")),
    (
        "a wrong type",
        b'{"id": "zz", "question": 7, "golden_answers": ["a"]}\n',
        ("line {}", "'question'"),
    ),
    ("no UTF-8", b'{"id": "zz", "question": "\xff\xfe", "golden_answers": ["a"]}\n', ("UTF-8",)),
    ("a list", b"[1, 2]\n", ("line {}", "a JSON object")),
    ("no golden answer at all", b'{"id": "zz", "question": "?", "golden_answers": 4}\n', ("line",)),
)


def spoil_line(path: Path, rng: random.Random) -> tuple[str, tuple[str, ...]]:
    """Puts a bad line into a file of tasks: what was done, and what has to be said."""
    rows = path.read_bytes().splitlines(keepends=True)
    at = rng.randrange(len(rows))
    name, bad, words = rng.choice(BAD_LINES)
    rows[at] = bad
    path.write_bytes(b"".join(rows))
    said = tuple(word.format(at + 1) for word in words)
    return f"line {at + 1} of {path.name}: {name}", (path.name, *said)


def ruin(folder: Path) -> None:
    """Damages every checkpoint, for certain."""
    for path in folder.iterdir():
        if path.name.isdigit():
            noted = path / "host" / "metadata"
            noted.write_bytes(noted.read_bytes()[:-9])


def listing(folder: Path) -> list[tuple[str, int]]:
    """Names and sizes of all that is in it, but for what a kill left half-written."""
    return sorted(
        (str(p.relative_to(folder)), p.stat().st_size if p.is_file() else -1)
        for p in folder.rglob("*")
        if ".orbax-checkpoint-tmp" not in str(p.relative_to(folder))
    )
