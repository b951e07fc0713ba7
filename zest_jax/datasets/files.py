"""Reads question files as FlashRAG writes them: a JSON object a line, perhaps gzipped.

    {"id": "test_0", "question": "…", "golden_answers": ["…"], "metadata": {…}}

A file may lie in a local folder or in a bucket (gs://…, s3://…, hf://…).
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from zest_jax.datasets import benchmarks
from zest_jax.errors import UserError
from zest_jax.tasks.types import Task, task_from_record

ENDINGS = (".jsonl", ".jsonl.gz")
_BUCKETS = ("gs://", "s3://", "az://", "hf://")
_LFS = b"version https://git-lfs"
_CUT_SHORT = (EOFError, zlib.error, gzip.BadGzipFile)
_TOLD = (*_CUT_SHORT, FileNotFoundError, IsADirectoryError)  # by whoever reads, for any path


def to_path(text: str | os.PathLike[str]) -> Any:
    """A local path, or one in a bucket (`etils.epath.Path`, which acts like `pathlib.Path`).

    Raises:
      UserError: there is no such kind of bucket.
    """
    if "://" not in str(text):
        return Path(text).expanduser()
    if not str(text).startswith(_BUCKETS):
        raise UserError(f"{text}: no such kind of bucket; known are {', '.join(_BUCKETS)}.")
    from etils import epath

    return epath.Path(text)


@contextlib.contextmanager
def bucket_errors(path: Any) -> Iterator[None]:
    """Tells what a bucket's package raises in one sentence; a local path passes as it is.

    Raises:
      UserError: the package is missing, or the bucket refuses.
    """
    if isinstance(path, Path):
        yield
        return
    try:
        yield
    except (UserError, *_TOLD):
        raise
    except ImportError as error:
        raise UserError(
            f"{path}: a package that reads such a bucket is missing ({error}); install it (gcsfs "
            "for gs://, s3fs for s3://, adlfs for az://), or copy the files to a folder."
        ) from None
    except Exception as error:
        raise UserError(
            f"{path} cannot be read ({error}); check the address and that you may read it, or copy "
            "the files to a folder."
        ) from error


class TaskFile:
    """The questions of one file, checked line by line while they are read.

    As Search-R1 does, a question loses the space around it and gets a question mark if it ends
    without one. `meta["benchmark"]` says the set, `meta["metadata"]` is the line's metadata as JSON
    text, and `hops` is what line, metadata or set tell, else 0.

    Args:
      path: the file; whether it is gzipped is seen by its first bytes.
      name: the set that its questions belong to; a line may name another as "benchmark".

    Attributes:
      rows: questions read so far.
      blank_answers: blank answers that were left out beside others, so far.
      bytes_read: of the file on disk, so far; it is read some kilobytes at a time.
    """

    def __init__(self, path: Any, name: str):
        self.path, self.name = path, name
        self.rows = self.blank_answers = self.bytes_read = 0

    def __iter__(self) -> Iterator[Task]:
        """Streams the questions.

        Raises:
          UserError: there is no such file, it is empty, cut short or no JSON lines; a line lacks a
            field, has no answer, or repeats an id.
        """
        self.rows = self.blank_answers = self.bytes_read = 0
        lines: dict[str, int] = {}
        for number, record in self._records():
            task = self._task(record, f"{self.path}, line {number}")
            earlier = lines.setdefault(task.id, number)
            if earlier != number:
                raise UserError(
                    f"{self.path}, line {number}: the id '{task.id}' was used on line {earlier}; "
                    "give every question an id of its own."
                )
            self.rows += 1
            yield task
        if not self.rows:
            raise UserError(f"{self.path} is empty; fetch it again.")

    def _task(self, record: dict[str, Any], where: str) -> Task:
        record = dict(record)
        answers = record.get("golden_answers")
        if isinstance(answers, list):
            kept = [a for a in answers if not isinstance(a, str) or a.strip()]
            if not kept:
                raise UserError(
                    f"{where}: 'golden_answers' is empty; give the answers, or leave the line out."
                )
            self.blank_answers += len(answers) - len(kept)
            record["golden_answers"] = kept
        metadata = record.pop("metadata", None)
        stated = "hops" in record
        if not stated:
            benchmark = benchmarks.find(self.name)
            told = hops_told(metadata) or (benchmark.hops if benchmark else 0)
            stated = bool(told)
            record["hops"] = told or 1  # a task has one at least, until it is known to have none
        if not isinstance(record.setdefault("benchmark", self.name), str):
            raise UserError(f"{where}: the field 'benchmark' must be a text.")
        task = task_from_record(record, where)
        if not stated:
            task = replace(task, hops=0)
        question = task.question.strip()
        if not question:
            raise UserError(f"{where}: the question is empty; give it, or leave the line out.")
        if metadata is not None:
            text = (
                metadata if isinstance(metadata, str) else json.dumps(metadata, ensure_ascii=False)
            )
            task.meta["metadata"] = text
        return replace(task, question=question if question.endswith("?") else question + "?")

    def _records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        number = 0
        try:
            with bucket_errors(self.path), _opened(self.path) as (file, raw):
                for number, line in enumerate(file, start=1):
                    if number == 1:
                        line = line.removeprefix(b"\xef\xbb\xbf")
                        if line.startswith(_LFS):
                            raise UserError(
                                f"{self.path} is only a pointer to the file; run `git lfs pull` in "
                                "its folder, or download the file itself."
                            )
                    if line.strip():
                        self.bytes_read = raw.tell()
                        yield number, self._parse(line, number)
        except _CUT_SHORT as error:
            raise UserError(
                f"{self.path} is cut short or damaged after line {number} ({error}); fetch it "
                "again."
            ) from None
        except FileNotFoundError:
            raise UserError(f"{self.path}: no such file; expected a JSON-lines file.") from None
        except IsADirectoryError:
            raise UserError(f"{self.path} is a folder; expected a JSON-lines file.") from None

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        where = f"{self.path}, line {number}"
        try:
            record = json.loads(line.decode("utf-8"))
            if b"\\ud" in line.lower():  # an escape may stand for half a character
                json.dumps(record, ensure_ascii=False).encode("utf-8")
        except ValueError as error:  # of any of these
            if not line.endswith(b"\n"):
                raise UserError(
                    f"{self.path} is cut short: its last line, {number}, ends in the middle; fetch "
                    "it again."
                ) from None
            raise UserError(
                f"{where}: expected one JSON object a line in UTF-8 ({error}); mend the line."
            ) from None
        if not isinstance(record, dict):
            raise UserError(f"{where}: expected a JSON object a line, in braces; mend the line.")
        return record


def hops_told(metadata: Any) -> int:
    """Hops of a question by FlashRAG's metadata; 0 if it does not tell.

    MuSiQue tells the steps that its question was composed of, HotpotQA and 2WikiMultihopQA the
    articles whose sentences support the answer, one for each hop.
    """
    if not isinstance(metadata, dict):
        return 0
    steps = metadata.get("question_decomposition")
    if isinstance(steps, list):
        return len(steps)
    facts = metadata.get("supporting_facts")
    if isinstance(facts, dict):
        titles = facts.get("title")
    elif isinstance(facts, list):  # as the sets' authors write them: [[title, sentence], …]
        titles = [fact[0] for fact in facts if isinstance(fact, list) and fact]
    else:
        return 0
    if not isinstance(titles, list):
        return 0
    return len({title for title in titles if isinstance(title, str)})


def find_file(folder: Any, split: str) -> Any | None:
    """The file of a split in a set's folder, plain or gzipped; None if there is none."""
    with bucket_errors(folder):
        for ending in ENDINGS:
            if (path := folder / f"{split}{ending}").exists():
                return path
    return None


@contextlib.contextmanager
def _opened(path: Any) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """A file's text, and the file on disk that tells how far it is read."""
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        if zipped:
            with gzip.GzipFile(fileobj=raw) as text:
                yield text, raw  # type: ignore[misc]
        else:
            yield raw, raw
