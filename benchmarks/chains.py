"""The building of a chain pool at Wikidata5M's size, on generated files: time and peak memory.

    python -m benchmarks.chains --folder=/tmp/chains                   full size, about 5 GB of disk
    python -m benchmarks.chains --folder=/tmp/chains --scale=0.01      a dry run

Generated are, times --scale: 20,614,279 triples over 4,594,485 entities and 822 relations
(relations and tails by Zipf's law, heads lognormal), 4.5 names an entity, a tenth of them in
Cyrillic and a tenth in Chinese characters, a tenth of the further names borne by several entities;
a description an entity; and a corpus in Wiki-18's format of --passages passages of 100 words, two
an article, where the first names the article's entity's first tails. They are packed as Wikidata5M
is, and removed at the end unless --keep.

The build runs in a process of its own; its peak memory is what the system says of it.
"""

import argparse
import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from zest_jax.retrieval.corpora import open_corpus
from zest_jax.retrieval.passages import write_passages

TRIPLES, ENTITIES, RELATIONS = 20_614_279, 4_594_485, 822
ALPHABETS = ("etaoinshrdlumkvp", "еаоинстрвлкмдпуя", "山川田中村東西南北大小高松竹梅木")
_PART = 1 << 20


class Names:
    """Labels of entities: two words each, no two alike."""

    def __init__(self, count: int, rng: np.random.Generator):
        self._side = int(np.ceil(np.sqrt(count / 8)))
        self._words = [
            (self._make(a, 1, rng), self._make(a, 2, rng))
            for a in (*[ALPHABETS[0]] * 8, ALPHABETS[1], ALPHABETS[2])
        ]

    def _make(self, alphabet: str, seed: int, rng: np.random.Generator) -> list[str]:
        words: dict[str, None] = {}
        while len(words) < self._side:
            word = "".join(alphabet[i] for i in rng.integers(len(alphabet), size=5 + seed))
            words[word.capitalize()] = None
        return list(words)

    def __getitem__(self, row: int) -> str:
        first, second = self._words[row % 10]
        at = row // 10
        gap = "" if row % 10 == 9 else " "  # Chinese characters stand without spaces
        return f"{first[at // self._side % self._side]}{gap}{second[at % self._side]}"


def generate(folder: Path, scale: float, passages: int) -> dict[str, int]:
    """Writes the files; the same for a scale and a number of passages."""
    rng = np.random.default_rng(0)
    E, T = max(1000, int(ENTITIES * scale)), max(5000, int(TRIPLES * scale))
    numbers = np.sort(rng.choice(70_000_000, E, replace=False) + 1)
    names = Names(E, rng)
    weights = 1.0 / np.arange(1, RELATIONS + 1)
    relation = rng.choice(RELATIONS, T, p=weights / weights.sum()).astype(np.int32)
    degree = rng.lognormal(0.0, 1.0, E)
    head = rng.choice(E, T, p=degree / degree.sum()).astype(np.int32)
    # Half of the tails by Zipf's law, half uniform, as cities and books are.
    tail = np.where(
        rng.random(T) < 0.5, (E * rng.random(T) ** 6).astype(np.int32), rng.integers(E, size=T)
    )
    _write_triples(folder, numbers, head, relation, tail)
    counts = _write_names(folder, numbers, names, rng)
    _write_texts(folder, numbers, names, (head, tail), passages, rng)
    return {"triples": T, "entities": E, "names": counts, "passages": passages}


def _write_triples(folder: Path, numbers: Any, head: Any, relation: Any, tail: Any) -> None:
    path = folder / "triples.txt"
    with path.open("w") as file:
        for at in range(0, len(head), _PART):
            part = slice(at, at + _PART)
            rows = zip(
                numbers[head[part]].tolist(), (relation[part] + 1).tolist(),
                numbers[tail[part]].tolist(), strict=True,
            )  # fmt: skip
            file.write("".join([f"Q{h}\tP{r}\tQ{t}\n" for h, r, t in rows]))
    archive = folder / "wikidata5m_transductive.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(path, "wikidata5m_transductive_train.txt")
    path.unlink()


def _write_names(folder: Path, numbers: Any, names: Names, rng: np.random.Generator) -> int:
    path, total = folder / "entity.txt", 0
    with path.open("w", encoding="utf-8") as file:
        for at in range(0, len(numbers), _PART):
            ids = numbers[at : at + _PART].tolist()
            further = rng.poisson(3.5, len(ids)).tolist()
            draws = rng.integers(1 << 40, size=(len(ids), 16)).tolist()
            lines = []
            for row, (number, count, draw) in enumerate(zip(ids, further, draws, strict=True), at):
                label = names[row]
                row_names = [label]
                for i in range(min(count, 15)):
                    shared = draw[i] % 10 == 0
                    row_names.append(
                        f"Common {draw[i] % 99_991}" if shared else f"{label} {draw[i] % 9_973:x}"
                    )
                total += len(row_names)
                lines.append(f"Q{number}\t" + "\t".join(row_names) + "\n")
            file.write("".join(lines))
    with tarfile.open(folder / "wikidata5m_alias.tar.gz", "w:gz", compresslevel=1) as tar:
        tar.add(path, "wikidata5m_entity.txt")
        text = "".join(f"P{i + 1}\trelation {i + 1}\tother {i + 1}\n" for i in range(RELATIONS))
        entry = tarfile.TarInfo("wikidata5m_relation.txt")
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text.encode()))
    path.unlink()
    return total


def _write_texts(
    folder: Path, numbers: Any, names: Names, edges: Any, passages: int, rng: np.random.Generator
) -> None:
    """The corpus, of articles on as many entities as it has room for, and all descriptions."""
    letters = ALPHABETS[0]
    words = [
        "".join(letters[i] for i in rng.integers(16, size=n)) for n in rng.integers(2, 9, 5000)
    ]
    fillers = [" ".join(words[i] for i in rng.integers(5000, size=95)) for _ in range(2000)]
    head, tail = edges
    order = np.argsort(head, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(head, minlength=len(numbers)))])
    has_article = np.zeros(len(numbers), bool)
    articles = min(len(numbers), passages // 2)
    has_article[rng.choice(len(numbers), articles, replace=False)] = True
    rest, row_id = passages - 2 * articles, 0
    with (
        (folder / "wiki-18.jsonl").open("w", encoding="utf-8") as corpus,
        gzip.open(folder / "wikidata5m_text.txt.gz", "wt", 1, encoding="utf-8") as described,
    ):
        for row, number in enumerate(numbers.tolist()):
            label, filler = names[row], fillers[row % 2000]
            described.write(f"Q{number}\t{label} {filler[:200]}\n")
            if not has_article[row]:
                continue
            near = order[offsets[row] : min(offsets[row] + 2, offsets[row + 1])]
            named = ", ".join(names[t] for t in tail[near].tolist())
            for text in (f"{label} {filler} of {named}.", fillers[(row + 7) % 2000]):
                line = {"id": str(row_id), "contents": f'"{label}"\n{text}'}
                corpus.write(json.dumps(line, ensure_ascii=False) + "\n")
                row_id += 1
        for i in range(rest):
            line = {"id": str(row_id + i), "contents": f'"No entity {i // 2}"\n{fillers[i % 2000]}'}
            corpus.write(json.dumps(line, ensure_ascii=False) + "\n")


def measure(folder: Path, command: list[str]) -> dict[str, Any]:
    """Runs a program to its end: seconds of its phases and of the whole, peak memory."""
    log = folder / "log.txt"
    begun = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - begun
    text = log.read_text()
    print(text)
    phases = re.findall(r"^(.*?) \d+/\d+ · took ([\d:]+)", text, re.MULTILINE)
    scale = 1 if sys.platform == "darwin" else 1024
    row: dict[str, Any] = {
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_GiB": usage.ru_maxrss * scale / 2**30,
        "phases": [f"{name} {took}" for name, took in phases],
    }
    if process.returncode:
        row["failed"] = text.strip().splitlines()[-1][:300]
    return row


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--folder", required=True, help="where to generate; made, and removed at the end"
    )
    p.add_argument("--scale", type=float, default=1.0, help="of Wikidata5M's size")
    p.add_argument(
        "--passages", type=int, help="of the corpus; 4,200,000 times --scale if not given"
    )
    p.add_argument("--chains", type=int, help="100,000 times --scale if not given")
    p.add_argument("--keep", action="store_true", help="leave the generated files")
    p.add_argument("--plain", action="store_true", help="without the descriptions")
    p.add_argument("--index", action="store_true", help="with an index of the corpus")
    p.add_argument("--out", default="runs/benchmarks/chains.json", help="JSON file to write")
    args = p.parse_args()
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    passages = args.passages or int(4_200_000 * args.scale)
    chains = args.chains or max(30, int(100_000 * args.scale))
    try:
        begun = time.monotonic()
        made = folder / "made.json"
        if made.exists():
            sizes = json.loads(made.read_text())
        else:
            sizes = generate(folder, args.scale, passages)
            made.write_text(json.dumps(sizes))
        print(f"generated {sizes} in {time.monotonic() - begun:.0f} s", flush=True)
        corpus = folder / "wiki-18.jsonl"
        if args.index:
            write_passages(open_corpus(corpus), folder / "index" / "passages")
            corpus = folder / "index"
        command = [
            sys.executable, "-m", "zest_jax.build_chains", f"--wikidata={folder}",
            f"--corpus={corpus}", f"--pool={folder / 'pool'}",
            f"--chains={chains}", f"--same_words={0 if args.plain else 0.5}",
        ]  # fmt: skip
        shutil.rmtree(folder / "pool", ignore_errors=True)
        row = {"corpus": corpus.name, **sizes, "chains": chains, **measure(folder, command)}
    finally:
        if not args.keep:
            shutil.rmtree(folder)
    columns = (
        "corpus",
        "triples",
        "entities",
        "names",
        "passages",
        "chains",
        "seconds",
        "cpu_seconds",
    )
    print(harness.table([row], (*columns, "peak_GiB", "failed")))
    harness.write(args.out, [row], {"python": sys.version.split()[0], "cpus": os.cpu_count()})


if __name__ == "__main__":
    main()
