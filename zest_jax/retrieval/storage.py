"""Files of an index that survive a kill: written whole, or grown from one checkpoint to the next.

A whole file is written under a temporary name and renamed. A set of growing files (`GrowingFiles`)
has a note beside it that says how long each file was when they last belonged together; whoever goes
on cuts them back to that.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from zest_jax.errors import UserError
from zest_jax.files import writing

_BLOCK = 1 << 22


class FileEntry(NamedTuple):
    """A file as a manifest lists it.

    Attributes:
      file: its path, relative to the manifest's folder.
      bytes: its length.
      sha256: of its content.
    """

    file: str
    bytes: int
    sha256: str


def sha256_of(path: Path) -> str:
    """The sha256 of a file's content, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def list_files(folder: Path, names: Iterable[str]) -> tuple[FileEntry, ...]:
    """Entries of files of a folder, read whole for their checksums."""
    return tuple(
        FileEntry(name, (folder / name).stat().st_size, sha256_of(folder / name)) for name in names
    )


def check_files(folder: Path, entries: Iterable[FileEntry], *, content: bool) -> None:
    """Compares files with what a manifest says of them.

    Args:
      folder: the manifest's.
      entries: what it lists.
      content: read every file and compare checksums; False compares lengths only, at once.

    Raises:
      UserError: a file is missing, cut short or changed; it is named.
    """
    for entry in entries:
        path = folder / entry.file
        if not path.is_file():
            raise UserError(f"{path} is missing; copy the index again, or build it anew.")
        size = path.stat().st_size
        if size != entry.bytes:
            raise UserError(
                f"{path} has {size:,} bytes instead of {entry.bytes:,}: it was "
                f"{'cut short' if size < entry.bytes else 'changed'}; copy the index again, or "
                "build it anew."
            )
        if content and sha256_of(path) != entry.sha256:
            raise UserError(
                f"{path} is damaged: its sha256 is not the one in the manifest; copy the index "
                "again, or build it anew."
            )


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A JSON object out of a file.

    Raises:
      UserError: there is no such file, or it holds something else.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path.parent} is no {what}: it has no {path.name}.") from None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it is not the JSON of {what}; build it anew.")
    return value


def write_json(path: Path, value: Any) -> None:
    """Replaces a file by the JSON of `value`; see `writing`."""
    with writing(path) as file:
        file.write((json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def sweep(folder: Path, name: str) -> None:
    """Removes what a killed process left of the file `name` half written."""
    for path in folder.glob(f".{name}.*"):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lets only one process write to a folder, which is made if it is missing.

    Raises:
      UserError: another process does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"another process is writing to {folder}; wait for it, or name another folder."
            ) from None
        yield


class GrowingFiles:
    """Several files that are appended to together.

    Args:
      folder: where; made if it is missing.
      names: the files.
      note: the file beside them that says how far they belong together.
      source: what they are made of. Work of an earlier process is gone on with only if it had the
        same source.

    Attributes:
      done: the value given to the last `checkpoint` of an earlier process, None for a new start.

    Raises:
      UserError: an earlier process began with another source, or its files are gone.
    """

    def __init__(self, folder: Path, names: Sequence[str], note: str, source: dict[str, Any]):
        folder.mkdir(parents=True, exist_ok=True)
        self._note = folder / note
        sweep(folder, note)
        self.done: Any = None
        lengths = dict.fromkeys(names, 0)
        if self._note.exists():
            stored = read_json(self._note, "an unfinished store")
            if stored["source"] != source:
                raise UserError(
                    f"{folder} holds the beginning of a store made from {_differs(stored, source)}"
                    "; remove the folder, or give what it was begun with."
                )
            self.done, lengths = stored["done"], stored["lengths"]
        self._source = source
        self._files: dict[str, IO[bytes]] = {}
        for name in names:
            path = folder / name
            file = open(path, "r+b" if path.exists() else "w+b")
            self._files[name] = file
            if os.fstat(file.fileno()).st_size < lengths[name]:
                self.close()
                raise UserError(
                    f"{path} is shorter than when it was last written; remove {folder} and build "
                    "it anew."
                )
            file.truncate(lengths[name])
            file.seek(0, os.SEEK_END)

    def append(self, name: str, data: bytes | np.ndarray) -> None:
        """Adds bytes, or the bytes of an array, to a file."""
        self._files[name].write(
            data if isinstance(data, bytes) else np.ascontiguousarray(data).data
        )

    def length(self, name: str) -> int:
        """Bytes of a file with what was appended."""
        return self._files[name].tell()

    def checkpoint(self, done: Any) -> None:
        """Makes what was appended last; a later process goes on from here and finds `done`."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        lengths = {name: file.tell() for name, file in self._files.items()}
        write_json(self._note, {"source": self._source, "done": done, "lengths": lengths})

    def close(self) -> None:
        """Closes the files and leaves the note where it is."""
        for file in self._files.values():
            file.close()

    def forget(self) -> None:
        """Removes the note: the files are complete and listed elsewhere."""
        self._note.unlink(missing_ok=True)


def _differs(stored: dict[str, Any], source: dict[str, Any]) -> str:
    before = stored["source"]
    keys = [key for key in {**before, **source} if before.get(key) != source.get(key)]
    key = keys[0]
    return f"{key} {_short(before.get(key))}, not {_short(source.get(key))}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:197]}..."


def mapped(path: Path, dtype: Any) -> np.ndarray:
    """A file as a flat array, read as it is used; an empty file gives an empty array."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r")
