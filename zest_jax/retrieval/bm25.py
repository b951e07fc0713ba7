"""BM25 over words: no encoder, no device, and the baseline that every dense index has to beat.

The files are those of the package bm25s, which also computes the scores; it precomputes the score
of every word in every passage, so that a search only adds up columns. We build them in a
stream, since bm25s holds a whole corpus as lists of Python numbers (over 60 GB for 21 million
passages), and choose the best rows ourselves, since bm25s breaks ties by chance and would use
JAX's default device for it.

    score(q, d) = sum over words t of q:
                  idf(t) * f(t, d) / (f(t, d) + k1 * (1 - b + b * |d| / avg))
    idf(t) = log(1 + (N - n(t) + 0.5) / (n(t) + 0.5))

f counts t in d, |d| are the words of d, avg their mean, n(t) the passages with t, N all passages:
Lucene's form without its constant factor k1 + 1. A word that comes twice in a query counts twice.

Shape letters: B queries, k results, N passages, P postings (pairs of a word and a passage).
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from zest_jax.errors import UserError
from zest_jax.retrieval.interface import Found, Passage, TextRetriever, read_passages

# Anserini's values for short passages, and so those of the BM25 index that Search-R1 offers.
K1 = 0.9
B = 0.4

_SETTINGS = "settings.json"
_FORMAT = 1
_BLOCK = 1 << 22  # postings held at a time while building: about 400 MB with what sorting takes
# Scripts written without spaces are indexed by character; anything else by runs of letters,
# digits and underscores.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


def words(text: str, stopwords: frozenset[str] = frozenset()) -> list[str]:
    """The words of a text: NFKC and case folded, without punctuation, in their order."""
    text = text if text.isascii() else unicodedata.normalize("NFKC", text)
    found = _WORD.findall(text.casefold())
    return [word for word in found if word not in stopwords] if stopwords else found


def build(
    texts: Iterable[str],
    folder: str | Path,
    *,
    k1: float = K1,
    b: float = B,
    stopwords: Iterable[str] = (),
) -> int:
    """Writes an index of texts, in their order, and returns how many there were.

    The folder appears under its name only when it is complete. Memory goes to the vocabulary
    and one block of postings; the folder's disk must hold the postings twice.

    Args:
      texts: what is searched, usually title and text of each passage; read once.
      folder: a folder that does not exist yet.
      k1: how soon repetitions of a word stop to count, at least 0.
      b: how much long passages are held back, from 0 to 1.
      stopwords: words to leave out of passages and queries.

    Raises:
      UserError: wrong k1 or b, a folder that exists, or a corpus without a word.
    """
    folder = Path(folder)
    if not k1 >= 0 or not 0 <= b <= 1:
        raise UserError(f"BM25 needs k1 >= 0 and b from 0 to 1, not k1={k1} and b={b}.")
    if folder.exists():
        raise UserError(f"{folder} exists already; remove it or name another folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        left_out = frozenset(word for entry in stopwords for word in words(entry))
        count = _write(texts, work, k1, b, left_out)
        work.chmod(0o755)
        work.rename(folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return count


def open_bm25(folder: str | Path, passages: Sequence[Passage] | None = None) -> BM25Retriever:
    """Opens an index memory-mapped.

    Args:
      folder: as written by `build`.
      passages: the corpus by row, where passages shall be read too.

    Raises:
      UserError: no index there, one of another version, a damaged one, or one of another corpus.
    """
    folder = Path(folder)
    try:
        settings = json.loads((folder / _SETTINGS).read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} is no BM25 index: it has no {_SETTINGS}.") from None
    if settings["format"] != _FORMAT:
        raise UserError(
            f"{folder} is a BM25 index of format {settings['format']}, this version reads "
            f"{_FORMAT}; build it anew."
        )
    try:
        index = _bm25s().BM25.load(folder, mmap=True, show_progress=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} is damaged ({error}); build it anew.") from None
    postings = int(index.scores["indptr"][-1])
    if len(index.scores["data"]) != postings or len(index.scores["indices"]) != postings:
        raise UserError(f"{folder} is damaged (its arrays differ in length); build it anew.")
    if passages is not None and len(passages) != settings["passages"]:
        raise UserError(
            f"{folder} indexes {settings['passages']:,} passages, but the corpus beside it has "
            f"{len(passages):,}; build it anew."
        )
    return BM25Retriever(index, frozenset(settings["stopwords"]), passages)


class BM25Retriever(TextRetriever):
    """Search in an open index; made by `open_bm25`. Safe to use from several threads."""

    def __init__(
        self, index: Any, stopwords: frozenset[str], passages: Sequence[Passage] | None
    ) -> None:
        self._index = index
        self._stopwords = stopwords
        self._passages = passages

    def __len__(self) -> int:
        return self._index.scores["num_docs"]

    @property
    def k1(self) -> float:
        """See `build`."""
        return self._index.k1

    @property
    def b(self) -> float:
        """See `build`."""
        return self._index.b

    def search(self, queries: Sequence[str], top_k: int) -> Found:
        """See `TextRetriever`; passages that share no word with the query are never found.

        Ties go to the lower row. All scores of one query are held at a time, N * 4 bytes.
        """
        found = Found.nothing(len(queries), top_k)
        for rows, scores, query in zip(found.rows, found.scores, queries, strict=True):
            ids = self._index.get_tokens_ids(words(query, self._stopwords))
            if ids:
                score_N = self._index.get_scores_from_ids(ids)
                best = _best(score_N, top_k)
                rows[: len(best)] = best
                scores[: len(best)] = score_N[best]
        return found

    def passages(self, rows: np.ndarray) -> list[list[Passage]]:
        """See `TextRetriever`."""
        return read_passages(self._passages, rows)


def _best(score_N: np.ndarray, top_k: int) -> np.ndarray:
    """Rows of the largest positive scores, best first; the lower row before its equals."""
    least = 0.0
    if top_k < len(score_N):
        least = np.partition(score_N, -top_k)[-top_k]
    chosen = np.flatnonzero(score_N >= least if least > 0 else score_N > 0)
    return chosen[np.argsort(-score_N[chosen], kind="stable")[:top_k]]


# ------------------------------------------------------------------------------------- building


def _write(
    texts: Iterable[str], folder: Path, k1: float, b: float, stopwords: frozenset[str]
) -> int:
    vocabulary: dict[str, int] = {}
    length_N = array("i")
    with (
        tempfile.TemporaryFile(dir=folder) as word_file,
        tempfile.TemporaryFile(dir=folder) as times_file,
        tempfile.TemporaryFile(dir=folder) as distinct_file,
    ):
        _count(texts, stopwords, vocabulary, length_N, (word_file, times_file, distinct_file))
        if not vocabulary:
            raise UserError("there is nothing to index; the corpus has no text with a word.")
        length = np.frombuffer(length_N, np.int32)
        spooled = (word_file, times_file, distinct_file)
        _sort(spooled, len(vocabulary), length, folder, k1, b)
    index = _bm25s().BM25(k1=k1, b=b, method="lucene")
    # The names of bm25s's own files, whose arrays are there already.
    params = dict(
        k1=k1, b=b, delta=index.delta, method="lucene", idf_method="lucene", dtype="float32",
        int_dtype="int32", num_docs=len(length), version=_bm25s().__version__, backend="numpy",
    )  # fmt: skip
    (folder / "params.index.json").write_text(json.dumps(params, indent=2), "utf-8")
    (folder / "vocab.index.json").write_text(json.dumps(vocabulary, ensure_ascii=False), "utf-8")
    settings = {
        "format": _FORMAT,
        "passages": len(length),
        "k1": k1,
        "b": b,
        "stopwords": sorted(stopwords),
    }
    (folder / _SETTINGS).write_text(json.dumps(settings, indent=2), "utf-8")
    return len(length)


def _count(
    texts: Iterable[str],
    stopwords: frozenset[str],
    vocabulary: dict[str, int],
    length_N: array,
    files: tuple[IO[bytes], IO[bytes], IO[bytes]],
) -> None:
    """Spools word ids and counts [P] of each passage in turn, and its number of distinct words."""
    word_P, times_P, distinct_N = array("i"), array("i"), array("i")
    buffers = (word_P, times_P, distinct_N)

    def flush() -> None:
        for buffer, file in zip(buffers, files, strict=True):
            buffer.tofile(file)  # type: ignore[arg-type]
            del buffer[:]

    for text in texts:
        found = words(text, stopwords)
        counts = Counter(found)
        for word, times in counts.items():
            word_P.append(vocabulary.setdefault(word, len(vocabulary)))
            times_P.append(times)
        distinct_N.append(len(counts))
        length_N.append(len(found))
        if len(word_P) >= _BLOCK:
            flush()
    flush()
    for file in files:
        file.seek(0)


def _sort(
    files: tuple[IO[bytes], IO[bytes], IO[bytes]],
    size: int,
    length_N: np.ndarray,
    folder: Path,
    k1: float,
    b: float,
) -> None:
    """Writes the scores of all postings by word and, within a word, by passage."""
    word_file, times_file, distinct_file = files
    word_P = _mapped(word_file)
    times_P = _mapped(times_file)
    distinct_N = _mapped(distinct_file)
    N, P = len(length_N), len(word_P)

    holders_W = np.zeros(size, np.int64)  # passages that have the word
    for at in range(0, P, _BLOCK):
        holders_W += np.bincount(word_P[at : at + _BLOCK], minlength=size)
    idf_W = np.log1p((N - holders_W + 0.5) / (holders_W + 0.5))
    average = length_N.mean(dtype=np.float64)
    damping_N = k1 * (1 - b + b * length_N / average)

    start_W = np.zeros(size + 1, np.int64)
    np.cumsum(holders_W, out=start_W[1:])
    np.save(folder / "indptr.csc.index.npy", start_W)
    new = np.lib.format.open_memmap
    score_P = new(folder / "data.csc.index.npy", "w+", np.float32, (P,))
    row_P = new(folder / "indices.csc.index.npy", "w+", np.int32, (P,))

    next_W = start_W[:-1].copy()  # where the next posting of a word goes
    end_N = np.cumsum(distinct_N, dtype=np.int64)
    for at in range(0, P, _BLOCK):
        word = np.asarray(word_P[at : at + _BLOCK])
        times = np.asarray(times_P[at : at + _BLOCK], np.float64)
        row = np.searchsorted(end_N, np.arange(at, at + len(word)), side="right")
        score = idf_W[word] * times / (times + damping_N[row])
        order = np.argsort(word, kind="stable")  # rows stay in order within a word
        word = word[order]
        here = np.bincount(word, minlength=size)
        first = np.cumsum(here) - here
        to = next_W[word] + np.arange(len(word)) - first[word]
        score_P[to] = score[order]
        row_P[to] = row[order]
        next_W += here


def _mapped(file: IO[bytes]) -> np.ndarray:
    return np.memmap(file, np.int32, "r")


def _bm25s() -> Any:
    # Not at the head of the file: bm25s runs a JAX operation when it is imported, which would
    # start the device before the program has set it up.
    try:
        import bm25s
    except ImportError:
        raise UserError("BM25 needs the package bm25s; pip install bm25s.") from None
    return bm25s
