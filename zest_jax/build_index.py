"""Builds an index of a corpus: passages, their vectors or a BM25 index, and perhaps their tokens.

    python -m zest_jax.build_index --corpus=wiki-18.jsonl.gz --encoder=e5-base-v2 --index=wiki-18
    python -m zest_jax.build_index --corpus=wiki-18.jsonl.gz --encoder=bm25 --index=wiki-18-bm25
    python -m zest_jax.build_index --index=wiki-18 --tokenizer=my-policy --protocol=search_r1

    python -m zest_jax.build_index --index=wiki-18 --kind=partitioned --reorder_type=int8

--kind says how vectors are searched: exact, scann (the package, on the host) or partitioned (the
same method on the device). An index of vectors can be made one of another kind at any time; its
settings bear the names of ScaNN's builder; those not given are what its authors advise.

Killed at any moment, the same command goes on where it stopped and repeats no finished shard.

--vectors=FILE takes vectors computed elsewhere with --encoder: a .npy file, or a FAISS flat index
such as e5_Flat.index. Some passages are encoded again to see that they are these vectors.
--tokenizer=FOLDER stores the passages as token ids for that policy too, now or later.

Passages are encoded as `"title"` on one line and the text below it, as the corpora of FlashRAG and
Search-R1 hold them; --form=plain leaves the quotes out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from zest_jax import cli
from zest_jax.errors import UserError
from zest_jax.models import Encoder, load_encoder
from zest_jax.models.hf import read_tokenizer
from zest_jax.parallel import make_mesh
from zest_jax.progress import Progress
from zest_jax.retrieval import index_files
from zest_jax.retrieval.corpora import FORMATS, Limits, open_corpus
from zest_jax.retrieval.foreign_vectors import ForeignVectors, open_vectors
from zest_jax.retrieval.index_files import BUILDING, DTYPES, MANIFEST, Manifest, Shard
from zest_jax.retrieval.interface import Passage, to_contents
from zest_jax.retrieval.passages import (
    PassageTexts,
    tokenise,
    tokenizer_card,
    tokens_key,
    write_passages,
)
from zest_jax.retrieval.storage import held, list_files, read_json, sweep, write_json

BM25 = "bm25"
FORMS = ("contents", "plain")
VECTOR_KINDS = ("exact", "scann", "partitioned")
_SAMPLE = 64  # passages encoded again to check vectors from elsewhere
_MEGABYTE = 1_000_000


# ----------------------------------------------------------------------------------------- steps


def read_corpus(values: flags.FlagValues, folder: Path, progress: Progress) -> PassageTexts:
    """Stores the passages; without --corpus, opens those that are there."""
    if not values.corpus:
        if not (folder / "passages").is_dir():
            raise UserError("no corpus is given; say which: --corpus=wiki-18.jsonl.gz.")
        return PassageTexts(folder / "passages")
    limits = Limits(values.max_malformed, values.max_malformed_share)
    corpus = open_corpus(values.corpus, values.format, limits)
    total = -(-corpus.total_bytes // _MEGABYTE)
    with progress.phase(f"reading {corpus.name} (MB)", total) as bar:
        told = 0

        def tell(done: int, passages: int) -> None:
            nonlocal told
            now = total if done == corpus.total_bytes else done // _MEGABYTE
            bar.advance(now - told, passages=passages)
            told = now

        passages = write_passages(corpus, folder / "passages", tell)
    for line in _findings(passages.report):
        progress.say(line)
    return passages


def _findings(report: dict[str, Any]) -> Iterator[str]:
    if report["malformed"]:
        named = "; ".join(report["named"][:5])
        yield f"{report['malformed']:,} malformed lines were left out: {named}"
    for what in ("ids", "texts"):
        if count := report[f"duplicate_{what}"]:
            pairs = report[f"duplicate_{what}_named"][:3]
            named = "; ".join(f"{a} (row {i}) and {b} (row {j})" for a, i, b, j in pairs)
            yield f"{count:,} passages repeat the {what[:-1]} of an earlier one: {named}"


def passage_text(passage: Passage, form: str) -> str:
    """What is encoded of a passage."""
    if not passage.title:
        return passage.text
    return to_contents(passage) if form == "contents" else f"{passage.title}\n{passage.text}"


def read_encoder(values: flags.FlagValues) -> tuple[Encoder, dict[str, Any]]:
    """The encoder over all devices of this machine, and its card."""
    devices = jax.local_devices()
    mesh = make_mesh(data=-1, fsdp=1, devices=devices) if len(devices) > 1 else None
    dtype = values.compute
    if dtype == "auto":
        dtype = "float32" if devices[0].platform == "cpu" else "bfloat16"
    encoder = load_encoder(values.encoder, mesh=mesh, dtype=dtype, dimension=values.dimension)
    card = index_files.encoder_card(values.encoder, encoder, values.form)
    return encoder, card


def write_vectors(
    folder: Path,
    manifest: Manifest,
    shard_rows: int,
    make: Any,
    progress: Progress,
) -> Manifest:
    """Makes and stores all shards that are not there yet.

    Args:
      folder: the index.
      manifest: what is to be, without shards.
      shard_rows: rows of every shard but the last.
      make: called with first and last row, returns their vectors.
      progress: told about rows.

    Raises:
      UserError: the folder holds the beginning of another index.
    """
    plan = {**manifest.to_json(), "shard_rows": shard_rows}
    shards = [Shard(**entry) for entry in _resume(folder, plan)]
    N = manifest.passages
    done = sum(shard.rows for shard in shards)
    with progress.phase("encoding passages", N, done) as bar:
        while done < N:
            last = min(done + shard_rows, N)
            number = len(shards)
            sweep(folder / "vectors", Path(index_files.shard_name(number)).name)
            vector_RE = make(done, last, bar)
            if vector_RE.shape != (last - done, manifest.dimension):
                raise ValueError(f"vectors {vector_RE.shape} for rows {done} to {last}")
            shards.append(index_files.write_shard(folder, number, vector_RE, manifest.dtype))
            write_json(folder / BUILDING, {**plan, "shards": [s._asdict() for s in shards]})
            done = last
    return Manifest(**{**vars(manifest), "shards": tuple(shards)})


def _resume(folder: Path, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """The shards that an earlier process finished; refuses to mix two indexes."""
    path = folder / BUILDING
    sweep(folder, BUILDING)
    if not path.exists():
        write_json(path, plan)
        return []
    stored = read_json(path, "unfinished index")
    for key in plan:
        if key != "shards" and stored.get(key) != plan[key]:
            before, now = stored.get(key), plan[key]
            if isinstance(before, dict) and isinstance(now, dict):
                inner = next(k for k in {**before, **now} if before.get(k) != now.get(k))
                if "name" in before and "name" in now and before["name"] != now["name"]:
                    inner = "name"
                key, before, now = f"{key} {inner}", before.get(inner), now.get(inner)
            raise UserError(
                f"{folder} holds the beginning of another index: its {key} is {before!r}, not "
                f"{now!r}; give the same flags as before, or remove {path}."
            )
    return stored["shards"]


def encode_rows(encoder: Encoder, passages: PassageTexts, form: str, batch_size: int) -> Any:
    """A function that makes the vectors of rows."""
    step = 64 * batch_size

    def make(first: int, last: int, bar: Any) -> np.ndarray:
        out_RE = np.empty((last - first, encoder.size), np.float32)
        for at in range(first, last, step):
            end = min(at + step, last)
            texts = [passage_text(p, form) for p in passages[at:end]]
            vector_NE = encoder.encode_texts(texts, "passage", batch_size=batch_size)
            out_RE[at - first : end - first] = vector_NE
            bar.advance(end - at)
        return out_RE

    return make


def copy_rows(foreign: ForeignVectors) -> Any:
    """A function that reads the vectors of rows."""

    def make(first: int, last: int, bar: Any) -> np.ndarray:
        vector_RE = np.asarray(foreign.vector_NE[first:last], np.float32)
        bar.advance(last - first)
        return vector_RE

    return make


def check_foreign(
    path: str, foreign: ForeignVectors, encoder: Encoder, passages: PassageTexts, form: str
) -> None:
    """Refuses vectors that are not those of this corpus, in this order, by this encoder.

    Some passages are encoded again, and nearly all have to be like their vectors.
    """
    N, E = foreign.vector_NE.shape
    if N != len(passages):
        bad = passages.report["malformed"]
        left_out = f" ({bad:,} malformed lines were left out of it)" if bad else ""
        raise UserError(
            f"{path} has {N:,} vectors, the corpus has {len(passages):,} passages{left_out}; give "
            "the corpus that they were made from."
        )
    if E != encoder.size:
        raise UserError(
            f"{path} has vectors of {E} components, the encoder makes {encoder.size}; give the "
            "encoder that made them, or --dimension."
        )
    row_S = np.unique(np.linspace(0, N - 1, min(N, _SAMPLE)).astype(int))
    texts = [passage_text(passages[int(row)], form) for row in row_S]
    own_SE = encoder.encode_texts(texts, "passage")
    given_SE = np.asarray(foreign.vector_NE[row_S], np.float32)
    length_S = np.linalg.norm(given_SE, axis=1)
    if foreign.metric == "L2" and np.ptp(length_S) > 0.02 * length_S.mean():
        raise UserError(
            f"{path} is searched by L2 distance and its vectors differ in length, but an index "
            "here is searched by inner product, which would rank otherwise; give unit vectors."
        )
    own_S = _likeness(own_SE, given_SE)
    alike = (own_S > 0.8).mean()
    if alike < 0.9:
        raise UserError(
            f"{path} does not hold the vectors of this corpus by this encoder: of {len(row_S)} "
            f"passages encoded again, {alike:.0%} are like their vector (median correlation "
            f"{np.median(own_S):.2f}); check the order of the corpus, --encoder and --form, or say "
            "--nocheck_vectors."
        )


def _likeness(own_SE: np.ndarray, given_SE: np.ndarray) -> np.ndarray:
    """Cosines [S] of vectors with their counterparts, both about their means.

    Encoders put all texts into a narrow cone: without the mean taken off, any two are alike.
    """
    pair = []
    for vector_SE in (own_SE, given_SE):
        spread_SE = vector_SE - vector_SE.mean(axis=0)
        few = np.linalg.norm(spread_SE) < 1e-3 * np.linalg.norm(vector_SE)  # one, or all equal
        vector_SE = vector_SE if few else spread_SE
        pair.append(vector_SE / np.maximum(np.linalg.norm(vector_SE, axis=1)[:, None], 1e-12))
    return np.sum(pair[0] * pair[1], axis=1)


def build_dense(values: flags.FlagValues, folder: Path, progress: Progress) -> None:
    """An index of vectors."""
    foreign = open_vectors(values.vectors) if values.vectors else None
    encoder, card = read_encoder(values)
    finished = _finished(folder)
    if finished is not None:
        index_files.check_encoder(folder, finished, card)
    passages = read_corpus(values, folder, progress)
    corpus = {"name": _corpus_name(values, finished), "fingerprint": passages.fingerprint}
    if finished is not None:
        progress.say(f"{folder} is complete already: {finished.passages:,} passages.")
        return
    settings: dict[str, Any] = {}
    if foreign is not None:
        if values.check_vectors:
            check_foreign(values.vectors, foreign, encoder, passages, values.form)
        elif foreign.vector_NE.shape != (len(passages), encoder.size):
            raise UserError(
                f"{values.vectors} has the shape {foreign.vector_NE.shape}; expected "
                f"{(len(passages), encoder.size)}."
            )
        settings = {"vectors": Path(values.vectors).name}
    manifest = Manifest(
        "exact", len(passages), encoder.size, values.dtype, card, corpus, settings=settings
    )
    make = (
        encode_rows(encoder, passages, values.form, values.batch_size)
        if foreign is None
        else copy_rows(foreign)
    )
    manifest = write_vectors(folder, manifest, values.shard_rows, make, progress)
    index_files.write_manifest(folder, manifest)
    progress.say(
        f"{folder}: {len(passages):,} passages, {encoder.size} components in {values.dtype}, "
        f"{sum(s.bytes for s in manifest.shards) / 1e9:.2f} GB of vectors."
    )


def build_bm25(values: flags.FlagValues, folder: Path, progress: Progress) -> None:
    """An index of words."""
    from zest_jax.retrieval import bm25

    if values.vectors:
        raise UserError("--encoder=bm25 takes no --vectors; say which encoder made them.")
    finished = _finished(folder)
    if finished is not None and finished.kind != "bm25":
        raise UserError(
            f"{folder} was built with the encoder {finished.encoder['name']}, not with bm25; name "
            "another --index."
        )
    passages = read_corpus(values, folder, progress)
    if finished is not None:
        progress.say(f"{folder} is complete already: {finished.passages:,} passages.")
        return
    corpus = {"name": _corpus_name(values, None), "fingerprint": passages.fingerprint}
    manifest = Manifest("bm25", len(passages), 0, "", {"name": BM25}, corpus)
    _resume(folder, manifest.to_json())
    for left in (*folder.glob(".bm25.*"), folder / "bm25"):  # begun by a killed process
        shutil.rmtree(left, ignore_errors=True)
    with progress.phase("indexing words", len(passages)) as bar:

        def texts() -> Iterator[str]:
            for passage in passages:
                yield f"{passage.title}\n{passage.text}" if passage.title else passage.text
                bar.advance()

        bm25.build(texts(), folder / "bm25")
    names = sorted(p.relative_to(folder).as_posix() for p in (folder / "bm25").iterdir())
    manifest = Manifest(**{**vars(manifest), "files": list_files(folder, names)})
    index_files.write_manifest(folder, manifest)
    progress.say(f"{folder}: {len(passages):,} passages, by their words.")


def set_kind(values: flags.FlagValues, folder: Path, progress: Progress) -> None:
    """Makes an index of vectors one of the kind asked for."""
    from zest_jax.retrieval import open_index
    from zest_jax.retrieval.partitioned import PartitionSettings
    from zest_jax.retrieval.scann_index import ScannSettings

    manifest = index_files.read_manifest(folder)
    if manifest.kind == BM25:
        raise UserError(f"{folder} is an index of words: --kind={values.kind} needs vectors.")
    if values.kind == "exact":
        if manifest.kind != "exact":
            open_index.make_exact(folder)
        return
    scann = values.kind == "scann"
    given = {flag: getattr(values, flag) for flag in SEARCH_FLAGS}
    given = {SEARCH_FLAGS[flag]: value for flag, value in given.items() if value is not None}
    if scann and {"reorder_type", "spherical"} & given.keys():
        raise UserError("--reorder_type and --spherical are for --kind=partitioned.")
    kind = ScannSettings if scann else PartitionSettings
    settings = dataclasses.replace(kind.for_size(manifest.passages), **given)
    if settings.num_leaves and "num_leaves" in given and "num_leaves_to_search" not in given:
        visited = max(1, settings.num_leaves // 10)
        settings = dataclasses.replace(settings, num_leaves_to_search=visited)
    settings.check(manifest.passages)
    with progress.phase(f"building the {values.kind} index", manifest.passages) as bar:
        if isinstance(settings, PartitionSettings):
            open_index.add_partitioned(folder, settings, bar.advance)
        else:
            open_index.add_scann(folder, settings)
            bar.advance(manifest.passages)
    told = ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(settings).items())
    progress.say(f"{folder}: {values.kind}, {told}.")


def add_tokens(values: flags.FlagValues, folder: Path, progress: Progress) -> None:
    """The passages as token ids of a policy."""
    from zest_jax.assembly import protocol
    from zest_jax.players import policy_folder

    tokenizer = read_tokenizer(policy_folder(values.tokenizer))
    shown = protocol(values.protocol)
    template = shown.layout.stored
    passages = index_files.IndexFolder(folder).passages()
    key = tokens_key(tokenizer_card(tokenizer), template, values.passage_tokens)
    with progress.phase("tokenising passages", len(passages)) as bar:
        told = 0

        def tell(done: int, _: int) -> None:
            nonlocal told
            bar.advance(done - told)
            told = done

        tokens = tokenise(
            passages,
            tokenizer,
            folder / "tokens" / key,
            template=template,
            write=shown.layout.write,
            longest=values.passage_tokens,
            tell=tell,
        )
    name = tokens.tokenizer["name"]
    progress.say(f"{len(tokens):,} passages of at most {tokens.longest} tokens for {name}.")


def _finished(folder: Path) -> Manifest | None:
    return index_files.read_manifest(folder) if (folder / MANIFEST).exists() else None


def _corpus_name(values: flags.FlagValues, finished: Manifest | None) -> str:
    if values.corpus:
        return Path(values.corpus).name
    return finished.corpus["name"] if finished else "passages"


# --------------------------------------------------------------------------------------- program

# Flags of ScaNN's builder, and the fields of the settings that they set.
SEARCH_FLAGS = {
    "num_leaves": "num_leaves",
    "num_leaves_to_search": "num_leaves_to_search",
    "training_sample_size": "training_sample_size",
    "dimensions_per_block": "dimensions_per_block",
    "anisotropic_quantization_threshold": "anisotropic_quantization_threshold",
    "reordering_num_neighbors": "reorder",
    "soar_lambda": "soar_lambda",
    "spherical": "spherical",
    "reorder_type": "reorder_type",
}


def main(config: Any, workdir: str | None, values: flags.FlagValues) -> None:
    if config is not None or workdir:
        raise UserError("an index has no config and no workdir; say where it goes with --index.")
    if not values.index:
        raise UserError("no index is given; say which folder to write: --index=wiki-18.")
    if values.encoder == BM25 and values.kind:
        raise UserError("--encoder=bm25 takes no --kind: it makes no vectors.")
    chosen = [flag for flag in SEARCH_FLAGS if getattr(values, flag) is not None]
    if chosen and values.kind not in ("scann", "partitioned"):
        raise UserError(f"--{chosen[0]} needs --kind=scann or --kind=partitioned.")
    if not values.encoder and not values.tokenizer and not values.kind:
        raise UserError(
            "no encoder is given; say a folder, a hub id or bm25 (--encoder=intfloat/e5-base-v2)."
        )
    for name in ("shard_rows", "batch_size"):
        if getattr(values, name) < 1:
            raise UserError(f"--{name} must be at least 1.")
    folder = Path(values.index).expanduser()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder to write to.")
    if not values.encoder and not (folder / MANIFEST).exists():
        raise UserError(f"{folder} is no complete index yet; build it first, with --encoder.")
    with contextlib.ExitStack() as stack:
        stack.enter_context(held(folder))
        progress = stack.enter_context(Progress())
        if values.encoder:
            build = build_bm25 if values.encoder == BM25 else build_dense
            build(values, folder, progress)
        if values.tokenizer:
            add_tokens(values, folder, progress)
    if values.kind:
        with Progress() as progress:  # the functions of open_index hold the folder themselves
            set_kind(values, folder, progress)


def define(values: flags.FlagValues) -> None:
    def text(name: str, default: str | None, help: str) -> None:
        flags.DEFINE_string(name, default, help, values)

    text("corpus", "", "a file or folder: jsonl, tsv (both perhaps gzipped), parquet, text files")
    text("encoder", "", "folder or hub id of an encoder, or bm25")
    text("index", "", "the folder to write")
    text("vectors", "", "vectors made elsewhere with --encoder: .npy, or a FAISS flat index")
    text("tokenizer", "", "folder or hub id of a policy: also store passages as its token ids")
    text("protocol", "search_r1", "how that policy is shown passages")
    flags.DEFINE_enum("format", None, FORMATS, "of the corpus, if not told by it", values)
    flags.DEFINE_enum("dtype", "bfloat16", tuple(DTYPES), "type of stored vectors", values)
    flags.DEFINE_enum(
        "compute", "auto", ("auto", "float32", "bfloat16"),
        "type to encode in; auto is float32 on a CPU and bfloat16 elsewhere", values,
    )  # fmt: skip
    flags.DEFINE_enum("form", "contents", FORMS, "how a passage's title and text are put", values)
    for name, default, help in (
        ("dimension", 0, "components to keep (for encoders trained so); 0 keeps all"),
        ("shard_rows", 100_000, "passages in a file of vectors"),
        ("batch_size", 256, "passages encoded at a time, over all devices"),
        ("passage_tokens", 0, "with --tokenizer: tokens that a passage is cut to; 0 keeps all"),
        ("max_malformed", 100, "malformed lines before the corpus is refused"),
    ):
        flags.DEFINE_integer(name, default, help, flag_values=values)
    flags.DEFINE_enum("kind", None, VECTOR_KINDS, "how vectors are searched", values)
    for name, help in (
        ("num_leaves", "leaves of the tree; 0 for none"),
        ("num_leaves_to_search", "leaves that a query visits"),
        ("training_sample_size", "vectors that tree and codes are trained on"),
        ("dimensions_per_block", "components that share a 4-bit code; 0 for brute force"),
        ("reordering_num_neighbors", "candidates that are scored again; 0 for none"),
    ):
        flags.DEFINE_integer(name, None, f"ScaNN's: {help}", 0, flag_values=values)
    for name, help in (
        ("anisotropic_quantization_threshold", "weight of errors along a vector"),
        ("soar_lambda", "weight of the second assignment; one assignment if not given"),
    ):
        flags.DEFINE_float(name, None, f"ScaNN's: {help}", flag_values=values)
    flags.DEFINE_bool("spherical", None, "partitioned: centres of length 1", flag_values=values)
    flags.DEFINE_enum(
        "reorder_type", None, ("bfloat16", "int8", "int4"),
        "partitioned: what candidates are scored again with", values,
    )  # fmt: skip
    flags.DEFINE_float(
        "max_malformed_share", 0.01, "share of malformed lines, likewise", flag_values=values
    )
    flags.DEFINE_bool(
        "check_vectors", True, "encode some passages again to check --vectors", flag_values=values
    )


entry = cli.program(
    main,
    define=define,
    needs_config=False,
    needs_workdir=False,
    memory_hint="use a smaller --batch_size",
)

if __name__ == "__main__":
    sys.exit(entry())
