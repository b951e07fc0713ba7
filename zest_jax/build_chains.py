"""Builds a pool of chains out of Wikidata5M and a corpus: what a proposer writes questions for.

    python -m zest_jax.build_chains --wikidata=wikidata5m/ --corpus=wiki-18.jsonl.gz --pool=wd5m
    python -m zest_jax.build_chains --wikidata=wikidata5m/ --corpus=indexes/wiki18 --pool=wd5m

--wikidata is a folder with the files as distributed, packed or not: the triples
(wikidata5m_transductive.tar.gz or wikidata5m_all_triplet.txt.gz), the names
(wikidata5m_alias.tar.gz) and, if it is there, the descriptions (wikidata5m_text.txt.gz); each can
be named by a flag of its own. --corpus is what zest_jax.build_index reads, or an index that it
made, which is faster: the passages that are needed are read by row.

A chain is a random walk through the triples whose entities have passages in the corpus. Kept are
chains (a) without cycles, (b) of relations with one tail (--max_tails) between entities with names
of their own that are no dates, numbers or short, (c) whose source has a passage that mentions the
next entity. How walks are drawn, and what the folder holds: docs/chains.md.

A table tells what every filter left; it is written to the pool as funnel.json, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from zest_jax import cli
from zest_jax.errors import UserError
from zest_jax.progress import Progress
from zest_jax.retrieval.corpora import FORMATS, Limits, open_corpus
from zest_jax.retrieval.storage import held, read_json, sweep, write_json
from zest_jax.tasks import wikidata
from zest_jax.tasks.alignment import Alignment, CorpusFile, PassageSource, PassageStore, align
from zest_jax.tasks.chain_pool import MANIFEST, ChainRecord, write_pool
from zest_jax.tasks.grounding import Grounding
from zest_jax.tasks.names import NameIndex, SurfaceRules, index_names
from zest_jax.tasks.walks import (
    Bools,
    Caps,
    Graph,
    Walker,
    Ways,
    build_graph,
    few_tails,
    held_out,
)
from zest_jax.tasks.wikidata import NameTable, Tally

FUNNEL = "funnel.json"
HELDOUT = "heldout"
UNFINISHED = "alignment.npz"  # until the pool is complete
_MEGABYTE = 1_000_000
_ROUNDS = 8  # readings of the corpus for more walks
_FIRST_RATE = 0.3  # share of walks that are taken to pass filter (c) before any was seen


# ---------------------------------------------------------------------------------------- funnel


@dataclasses.dataclass
class Funnel:
    """What every filter left of what there was, in order."""

    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def add(self, of: str, filter: str, kept: int, dropped: int | None = None) -> None:
        """A filter of some kind of thing; what is dropped is told by the row before it if None."""
        if dropped is None:
            before = [row["kept"] for row in self.rows if row["of"] == of]
            dropped = before[-1] - kept if before else 0
        self.rows.append({"of": of, "filter": filter, "dropped": dropped, "kept": kept})

    def tally(self, what: str, tally: Tally) -> None:
        """The malformed lines of a file, by name."""
        if tally.malformed:
            named = "; ".join(map(str, tally.named[:5]))
            self.notes.append(f"{tally.malformed:,} lines of the {what} were left out: {named}")

    def table(self) -> str:
        """For people."""
        width = max(len(row["filter"]) for row in self.rows)
        lines, last = [], None
        for row in self.rows:
            if row["of"] != last:
                last = row["of"]
                lines.append(f"{last:<{width + 2}}{'dropped':>14}{'kept':>14}")
            lines.append(f"  {row['filter']:<{width}}{row['dropped']:>14,}{row['kept']:>14,}")
        return "\n".join(lines)

    def write(self, folder: Path) -> None:
        write_json(folder / FUNNEL, {"filters": self.rows, "notes": self.notes})


# ----------------------------------------------------------------------------------------- steps


@dataclasses.dataclass(frozen=True)
class World:
    """A graph, its names and its passages.

    Attributes:
      graph: triples by head.
      labels: of each relation row, "" without one.
      table: names of entities.
      index: names that one entity bears alone.
      alignment: passages of entities.
    """

    graph: Graph
    labels: list[str]
    table: NameTable
    index: NameIndex
    alignment: Alignment


def find_files(values: flags.FlagValues) -> dict[str, list[Path]]:
    """The files of Wikidata5M by what they hold; "descriptions" may be missing.

    Raises:
      UserError: triples or names are nowhere.
    """
    wanted = {
        "triples": (
            ("wikidata5m_transductive.tar.gz",),
            ("wikidata5m_transductive_train.txt*", "wikidata5m_transductive_valid.txt*",
             "wikidata5m_transductive_test.txt*"),
            ("wikidata5m_all_triplet.txt*",),
        ),
        "entities": (("wikidata5m_alias.tar.gz",), ("wikidata5m_entity.txt*",)),
        "relations": (("wikidata5m_alias.tar.gz",), ("wikidata5m_relation.txt*",)),
        "descriptions": (("wikidata5m_text.txt*",),),
    }  # fmt: skip
    folder = Path(values.wikidata).expanduser() if values.wikidata else None
    if folder is not None and not folder.is_dir():
        raise UserError(f"{folder} is no folder; give the one that holds Wikidata5M's files.")
    found: dict[str, list[Path]] = {}
    for what, choices in wanted.items():
        if getattr(values, what):
            found[what] = [Path(name).expanduser() for name in getattr(values, what)]
            continue
        for patterns in choices:
            paths = (
                [p for pattern in patterns for p in sorted(folder.rglob(pattern))] if folder else []
            )
            if paths:
                found[what] = paths
                break
        if what not in found and what != "descriptions":
            names = " or ".join(choice[0].rstrip("*") for choice in choices)
            raise UserError(f"no {what} are given; name the file with --{what} ({names}).")
    for what in ("entities", "relations", "descriptions"):
        if len(found.get(what, ())) > 1:
            named = ", ".join(map(str, found[what]))
            raise UserError(f"several files hold the {what}: {named}; name one with --{what}.")
    return found


def open_source(values: flags.FlagValues, limits: Limits) -> PassageSource:
    """The corpus: files of passages, or the passages of an index."""
    path = Path(values.corpus).expanduser()
    for folder in (path / "passages", path):
        if (folder / "passages.json").is_file():
            return PassageStore(folder, path.name)
    return CorpusFile(open_corpus(path, values.format, limits))


def read_world(
    values: flags.FlagValues,
    files: dict[str, list[Path]],
    inputs: dict[str, list[dict[str, Any]]],
    source: PassageSource,
    folder: Path,
    funnel: Funnel,
    progress: Progress,
) -> World:
    """Reads everything but descriptions and the texts of passages.

    What the titles of the corpus gave is kept in the folder until the pool is complete, so that a
    build that was killed, or asked for too many chains, does not read them again.
    """
    limits = Limits(values.max_malformed, values.max_malformed_share)
    with _megabytes(progress, "reading triples", files["triples"]) as tell:
        triples, tally = wikidata.read_triples(files["triples"], limits, tell)
    funnel.tally("triples", tally)
    funnel.add("triples", "lines of the files", tally.lines, tally.malformed)
    graph = build_graph(triples)
    del triples
    funnel.add("triples", "repeated", graph.triples, graph.repeated)

    with _megabytes(progress, "reading relations", files["relations"]) as tell:
        relations, tally = wikidata.read_names(files["relations"][0], "P", limits, tell)
    funnel.tally("relations", tally)
    rows = relations.rows_of(graph.relations).tolist()
    labels = [(relations.names(row) or ("",))[0] if row >= 0 else "" for row in rows]
    with _megabytes(progress, "reading names", files["entities"]) as tell:
        table, tally = wikidata.read_names(files["entities"][0], "Q", limits, tell)
    funnel.tally("entities", tally)
    if table.repeated:
        funnel.notes.append(f"{table.repeated:,} rows of names repeat an entity; the first counts")
    with progress.phase("comparing names", len(table)) as bar:
        index = index_names(table, graph.entities, _teller(bar))
    funnel.add("names", "different names of entities", index.names)
    funnel.add("names", "that several entities bear", len(index.keys), index.shared)

    rules = SurfaceRules(values.shortest_name, values.numbers)
    key = {"inputs": inputs, "rules": rules._asdict(), "limits": dataclasses.asdict(limits)}
    kept = folder / UNFINISHED
    alignment = Alignment.load(kept, key, source)
    if alignment is not None:
        progress.say("the titles were read before; going on from there")
    else:
        with progress.phase(f"reading titles ({source.unit})", source.size) as bar:
            alignment = align(source, index, len(graph.entities), rules, _teller(bar))
        alignment.save(kept, key, source)
    counts = alignment.counts
    funnel.add("passages", "of the corpus", counts["passages"])
    funnel.add("passages", "whose title is no name of one entity", counts["titled"])
    funnel.add("passages", "of another title of the entity", counts["of_entities"])
    if isinstance(source, CorpusFile) and source.malformed:
        named = "; ".join(source.malformed[:5])
        funnel.notes.append(f"malformed lines of the corpus were left out: {named}")
    funnel.notes.append(
        f"{counts['titles_written_differently']:,} titles are written in several ways and were "
        f"left out; {counts['titles_of_a_later_name']:,} are a later name of an entity that has "
        "another"
    )
    E = len(graph.entities)
    funnel.add("entities", "of the triples", E)
    funnel.add("entities", "without a row of names", int((~index.unnamed).sum()))
    funnel.add("entities", "(b) without a name of its own", int(index.alone.sum()))
    funnel.add("entities", "(c) without a passage", int(alignment.aligned.sum()))
    return World(graph, labels, table, index, alignment)


def usable_triples(world: World, values: flags.FlagValues, funnel: Funnel) -> Bools:
    """Filters (b) and (c) as far as a triple alone can tell: [T] bool."""
    graph, aligned = world.graph, world.alignment.aligned
    heads = graph.heads()
    usable = graph.tail != heads
    funnel.add("triples", "from an entity to itself", int(usable.sum()))
    usable &= np.array([bool(label) for label in world.labels], bool)[graph.relation]
    funnel.add("triples", "of a relation without a label", int(usable.sum()))
    usable &= few_tails(graph, values.max_tails)
    funnel.add("triples", f"(b) of more than {values.max_tails} tail(s)", int(usable.sum()))
    usable &= aligned[heads] & aligned[graph.tail]
    funnel.add("triples", "(c) an end without name or passage", int(usable.sum()))
    usable &= ~world.alignment.poor[graph.tail]
    funnel.add("triples", "(b) to a date, a number or a short name", int(usable.sum()))
    return usable


def make_walkers(
    world: World, usable: Bools, held_E: Bools, values: flags.FlagValues
) -> dict[tuple[str, int], Walker]:
    """A source of walks for each pool and each number of hops."""
    graph = world.graph
    training = usable & ~held_E[graph.heads()] & ~held_E[graph.tail]
    parts = {"train": (training, ~held_E)}
    if values.heldout_share:
        parts[HELDOUT] = (usable, held_E)
    walkers = {}
    for number, (pool, (triples, start)) in enumerate(parts.items()):
        ways = Ways(graph, triples, start, values.relation_power)
        for hops in range(1, values.hops + 1):
            rng = np.random.default_rng([values.seed, number, hops])
            # Some of what is drawn fails filter (c), so that the caps of the pool come later.
            caps = Caps(4 * values.max_per_source, 4 * values.max_per_answer)
            walkers[pool, hops] = Walker(ways, hops, rng, caps)
    return walkers


def draw_chains(
    walkers: dict[tuple[str, int], Walker],
    wanted: dict[tuple[str, int], int],
    ground: Grounding,
    check: Callable[[list[Any]], None],
    values: flags.FlagValues,
    funnel: Funnel,
) -> dict[tuple[str, int], list[tuple[list[int], list[int]]]]:
    """Draws walks and looks for their passages until there are as many chains as wanted.

    Args:
      walkers: see `make_walkers`.
      wanted: chains of each.
      ground: passages.
      check: called with the walks of a round, reads their passages.
      values: flags.
      funnel: told what became of the walks.

    Returns:
      Entity and relation rows of the chains; fewer than wanted where there are no more.
    """
    kept: dict[tuple[str, int], list[tuple[list[int], list[int]]]] = {key: [] for key in walkers}
    caps = {key: Caps(values.max_per_source, values.max_per_answer) for key in walkers}
    seen = {key: np.zeros(4, np.int64) for key in walkers}  # judged, mentioned, aligned, capped
    for _ in range(_ROUNDS):
        drawn = {}
        for key, walker in walkers.items():
            missing = wanted[key] - len(kept[key])
            if missing > 0 and not walker.exhausted:
                judged = int(seen[key][0])
                rate = max(0.02, len(kept[key]) / judged) if judged else _FIRST_RATE
                drawn[key] = walker.draw(math.ceil(1.1 * missing / rate) + 16)
        if not any(len(walks.entities) for walks in drawn.values()):
            break
        check(list(drawn.values()))
        for key, walks in drawn.items():
            speaking = ground.mentioned(walks)
            chosen = speaking & ground.aligned(walks)
            pairs = zip(
                walks.entities[chosen].tolist(), walks.relations[chosen].tolist(), strict=True
            )
            capped = 0
            for nodes, kinds in pairs:
                if len(kept[key]) == wanted[key]:
                    break
                if caps[key].admit(nodes[0], nodes[-1]):
                    kept[key].append((nodes, kinds))
                else:
                    capped += 1
            seen[key] += (len(chosen), speaking.sum(), chosen.sum(), capped)
    for (pool, hops), walker in walkers.items():
        of = f"{'' if pool == 'train' else 'held-out '}walks of {hops} hop(s)"
        counts, (judged, mentioned, aligned, capped) = walker.counts, seen[pool, hops].tolist()
        left = counts["walks"]
        funnel.add(of, "drawn", left, 0)
        for name, why in (
            ("dead_end", "that end too early"),
            ("cycle", "(a) with an entity twice"),
            ("repeated", "drawn before"),
            ("capped", "of an end that has many already"),
        ):
            left -= counts[name]
            funnel.add(of, why, left)
        funnel.add(of, "(c) whose source does not mention the next", mentioned, judged - mentioned)
        funnel.add(of, "whose descriptions are of other articles", aligned)
        funnel.add(of, "of a source or answer that has many", aligned - capped, capped)
        funnel.add(of, "that are more than wanted", len(kept[pool, hops]))
    return kept


def shares(chains: int, hops: int) -> list[int]:
    """Chains of 1, 2, … hops, equal but for a rest, which the shorter ones get."""
    return [chains // hops + (number < chains % hops) for number in range(hops)]


def _peak_gib() -> float:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 2**30


# --------------------------------------------------------------------------------------- program


def build(values: flags.FlagValues, folder: Path, progress: Progress) -> None:
    """Everything, from the files to the pool."""
    files = find_files(values)
    settings = {
        name: getattr(values, name)
        for name in (
            "chains", "hops", "seed", "max_tails", "shortest_name", "numbers", "relation_power",
            "max_per_source", "max_per_answer", "heldout_share", "heldout_chains", "same_words",
        )
    }  # fmt: skip
    inputs: dict[str, list[dict[str, Any]]] = {
        what: [{"name": path.name, "bytes": _size(path)} for path in paths]
        for what, paths in sorted(files.items())
    }
    limits = Limits(values.max_malformed, values.max_malformed_share)
    source = open_source(values, limits)
    inputs["corpus"] = [source.identity()]
    if _is_complete(folder, {"settings": settings, "inputs": inputs}):
        progress.say(f"{folder} is complete already.")
        return
    sweep(folder, UNFINISHED)
    (folder / HELDOUT / MANIFEST).unlink(missing_ok=True)  # of a build that did not end
    funnel = Funnel()
    world = read_world(values, files, inputs, source, folder, funnel, progress)
    usable = usable_triples(world, values, funnel)
    held_E = held_out(world.graph.entities, values.heldout_share)
    walkers = make_walkers(world, usable, held_E, values)
    rules = SurfaceRules(values.shortest_name, values.numbers)
    described = "descriptions" in files and values.same_words > 0
    ground = Grounding(
        world.graph, world.table, world.index, world.labels, world.alignment, rules, described
    )

    def check(walks: list[Any]) -> None:
        with progress.phase("reading passages", ground.needed(walks)) as bar:
            ground.collect(source, walks, _teller(bar))
        if described:
            with _megabytes(progress, "reading descriptions", files["descriptions"]) as tell:
                numbers = ground.undescribed(walks)
                texts = wikidata.read_descriptions(files["descriptions"][0], numbers, limits, tell)
                ground.compare(texts, values.same_words)

    wanted = {}
    for pool, count in (("train", values.chains), (HELDOUT, values.heldout_chains)):
        for hops, share in enumerate(shares(count, values.hops), start=1):
            wanted[pool, hops] = share
    kept = draw_chains(walkers, wanted, ground, check, values, funnel)
    funnel.write(folder)
    for line in (*funnel.table().splitlines(), *funnel.notes):
        progress.say(line)
    for (pool, hops), chains in kept.items():
        if len(chains) < wanted[pool, hops] and not values.allow_fewer:
            raise UserError(
                f"only {len(chains):,} {'' if pool == 'train' else 'held-out '}chains of {hops} "
                f"hop(s) pass the filters, but {wanted[pool, hops]:,} are wanted "
                f"({folder / FUNNEL} tells why); ask for fewer (--chains, --heldout_chains), "
                "or say --allow_fewer."
            )
    if not any(chains for (pool, _), chains in kept.items() if pool == "train"):
        raise UserError(f"no chain passes the filters; {folder / FUNNEL} tells why.")
    about = {
        "seed": values.seed,
        "settings": settings,
        "corpus": source.about(),
        "inputs": inputs,
    }
    for pool in (HELDOUT, "train"):  # the manifest of the whole comes last

        def records(pool: str = pool) -> Iterator[ChainRecord]:
            for (name, _), chains in kept.items():
                if name == pool:
                    yield from (ground.record(nodes, kinds) for nodes, kinds in chains)

        if pool == "train" or values.heldout_share:
            place = folder if pool == "train" else folder / HELDOUT
            manifest = write_pool(place, records(), {"split": pool, **about})
            told = ", ".join(f"{count:,} of {h} hop(s)" for h, count in manifest["counts"].items())
            progress.say(f"{place}: {manifest['chains']:,} chains, {told}.")
    (folder / UNFINISHED).unlink(missing_ok=True)
    progress.say(f"peak memory of this process: {_peak_gib():.2f} GiB")


def _is_complete(folder: Path, wanted: dict[str, Any]) -> bool:
    """Whether the folder holds this pool; refuses to replace another one."""
    if not (folder / MANIFEST).exists():
        return False
    manifest = read_json(folder / MANIFEST, "chain pool")
    for part, now in wanted.items():
        before = manifest.get(part)
        if before != now:
            differs = part
            if isinstance(before, dict):
                differs = next(k for k in {**before, **now} if before.get(k) != now.get(k))
                before, now = before.get(differs), now.get(differs)
            raise UserError(
                f"{folder} holds a pool whose {differs} is {before!r}, not {now!r}; name another "
                "--pool, or remove that one."
            )
    return True


def _size(path: Path) -> int:
    if not path.is_file():
        raise UserError(f"{path} does not exist; give a file of Wikidata5M.")
    return path.stat().st_size


def _teller(bar: Any) -> Callable[[int], None]:
    told = 0

    def tell(done: int) -> None:
        nonlocal told
        bar.advance(done - told)
        told = done

    return tell


@contextlib.contextmanager
def _megabytes(progress: Progress, name: str, paths: list[Path]) -> Iterator[Callable[[int], None]]:
    """A bar over the bytes of files."""
    total = -(-sum(_size(path) for path in paths) // _MEGABYTE)
    with progress.phase(f"{name} (MB)", total) as bar:
        tell = _teller(bar)
        yield lambda done: tell(min(total, done // _MEGABYTE))
        tell(total)


def main(config: Any, workdir: str | None, values: flags.FlagValues) -> None:
    if config is not None or workdir:
        raise UserError("a pool has no config and no workdir; say where it goes with --pool.")
    if not values.pool:
        raise UserError("no pool is given; say which folder to write: --pool=pools/wikidata5m.")
    if not values.corpus:
        raise UserError("no corpus is given; say which: --corpus=wiki-18.jsonl.gz, or an index.")
    for name in ("chains", "hops", "max_tails"):
        if getattr(values, name) < 1:
            raise UserError(f"--{name} must be at least 1.")
    for name in ("seed", "max_per_source", "max_per_answer", "heldout_chains", "max_malformed"):
        if getattr(values, name) < 0:
            raise UserError(f"--{name} must be 0 or more.")
    for name in ("relation_power", "heldout_share", "same_words"):
        if not 0 <= getattr(values, name) <= 1:
            raise UserError(f"--{name} must lie between 0 and 1.")
    folder = Path(values.pool).expanduser()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder to write to.")
    with held(folder), Progress() as progress:
        build(values, folder, progress)


def define(values: flags.FlagValues) -> None:
    for name, help in (
        ("wikidata", "a folder with the files of Wikidata5M as distributed, packed or unpacked"),
        ("corpus", "a file or folder of passages, or an index of zest_jax.build_index"),
        ("pool", "the folder to write"),
    ):
        flags.DEFINE_string(name, "", help, values)
    for name, help in (
        ("triples", "files or archives of triples"),
        ("entities", "file of the entities' names, or the archive of names"),
        ("relations", "file of the relations' labels, or the archive of names"),
        ("descriptions", "file of the entities' descriptions"),
    ):
        flags.DEFINE_list(name, [], f"{help}; found in --wikidata if not given", values)
    flags.DEFINE_enum("format", None, FORMATS, "of the corpus, if not told by it", values)
    for name, default, help in (
        ("chains", 100_000, "chains of all lengths together, in equal shares"),
        ("hops", 3, "longest chain"),
        ("seed", 0, "of the walks"),
        ("max_tails", 1, "(b) tails that a head may have by one relation; 2 is almost one"),
        ("shortest_name", 3, "(b) letters of the shortest tail; East Asian ones count as two"),
        ("max_per_source", 10, "chains of one length from one source; 0 for any number"),
        ("max_per_answer", 100, "chains of one length to one answer; 0 for any number"),
        ("heldout_chains", 3000, "chains of the held-out pool, with --heldout_share"),
        ("max_malformed", 100, "malformed lines of a file before it is refused"),
    ):
        flags.DEFINE_integer(name, default, help, flag_values=values)
    for name, value, help in (
        ("relation_power", 0.5, "1: relations as often as in the graph; 0: all equally often"),
        ("heldout_share", 0.0, "share of the entities that no training chain has"),
        ("same_words", 0.5, "share of a description's words that its article must have; 0: any"),
        ("max_malformed_share", 0.01, "share of malformed lines, likewise"),
    ):
        flags.DEFINE_float(name, value, help, flag_values=values)
    flags.DEFINE_bool("numbers", False, "(b) let dates and numbers be tails", flag_values=values)
    flags.DEFINE_bool("allow_fewer", False, "write what there is", flag_values=values)


entry = cli.program(
    main,
    define=define,
    needs_config=False,
    needs_workdir=False,
    memory_hint="use a machine with 8 GiB",
)

if __name__ == "__main__":
    sys.exit(entry())
