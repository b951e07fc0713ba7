"""Safetensors files as host views, read and written one tensor at a time.

The format is eight bytes of header length, a JSON header of {name: {dtype, shape, data_offsets}},
and the data. Reading maps the file, so that a shard of a tensor costs only its own bytes, and a
transposed view no copy (the library copies whole tensors); writing holds one tensor at a time (the
library wants all of a file's at once).
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a tensor lies: its file, type, shape, and first byte."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    def view(self) -> np.ndarray:
        """The tensor over the mapped file: nothing is read before it is used."""
        if not self.shape:
            return np.fromfile(self.path, self.dtype, 1, offset=self.start).reshape(())
        return np.memmap(self.path, self.dtype, "r", self.start, self.shape)


def open_tensors(folder: Path) -> tuple[dict[str, Stored], list[str]]:
    """Finds every tensor of a model folder: model.safetensors, or the files that its index names.

    Returns:
      The sound tensors by name, and a sentence for everything that is broken.
    """
    problems: list[str] = []
    index = folder / INDEX
    wanted: dict[str, str] | None = None
    if index.exists():
        try:
            wanted = dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError):
            return {}, [f"{INDEX} is not a valid index"]
        files = sorted(set(wanted.values()))
    elif (folder / SINGLE).exists():
        files = [SINGLE]
    else:
        return {}, [f"neither {SINGLE} nor {INDEX} is there"]
    found: dict[str, Stored] = {}
    for name in files:
        if (folder / name).exists():
            _open_file(folder / name, found, problems)
        else:
            problems.append(f"file {name} is missing")
    if wanted is not None:
        for tensor, stored in list(found.items()):
            if wanted.get(tensor) != stored.path.name:
                problems.append(f"{tensor} lies in {stored.path.name} against the index")
                del found[tensor]
    return found, problems


def _open_file(path: Path, found: dict[str, Stored], problems: list[str]) -> None:
    """Adds the tensors of one file to `found`, and what is wrong with it to `problems`."""
    size = path.stat().st_size
    try:
        with path.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if not 2 <= length <= size - 8:
                raise ValueError
            header = json.loads(f.read(length))
    except ValueError:
        problems.append(f"file {path.name} is truncated or no safetensors file")
        return
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = _DTYPES.get(entry["dtype"])
        shape = tuple(entry["shape"])
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        if dtype is None:
            problems.append(f"{name} has type {entry['dtype']}, which is not supported")
        elif end - start != math.prod(shape) * dtype.itemsize or name in found:
            problems.append(f"{name} is described wrongly by the header of {path.name}")
        elif end > size:
            problems.append(f"{name} is truncated in {path.name}")
        else:
            found[name] = Stored(path, dtype, shape, start)


def write_tensors(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    max_shard_size: int,
    tensors: Iterable[tuple[str, Callable[[], np.ndarray]]],
    *,
    dry: bool = False,
) -> None:
    """Writes model.safetensors, or model-0000i-of-0000n.safetensors and their index.

    Files of an earlier export in the same folder are removed last, so that no moment has a mixture
    under the final names of a single file.

    Args:
      folder: an existing folder.
      shapes: shape of every tensor, in the order of writing.
      dtype: the type of all of them.
      max_shard_size: bytes of data after which a new file is begun.
      tensors: name and producer of each tensor, in the order of `shapes`; called one after the
      other.
      dry: call the producers but write nothing (the processes that only help to gather).
    """
    plan = _plan_files(shapes, dtype, max_shard_size)
    producers = iter(tensors)
    for path, names in plan.items():
        if dry:
            for _, (_, produce) in zip(names, producers, strict=False):
                produce()
            continue
        part = folder / f"{path}.part"
        with part.open("wb") as f:
            f.write(_header(names, shapes, dtype))
            for name in names:
                produced, produce = next(producers)
                assert produced == name, (produced, name)
                array = produce()
                assert array.shape == shapes[name] and array.dtype == dtype, name
                f.write(np.ascontiguousarray(array).view(np.uint8).data)
            f.flush()
            os.fsync(f.fileno())
    if dry:
        return
    for old in [*folder.glob("model*.safetensors"), folder / INDEX]:
        old.unlink(missing_ok=True)
    for path in plan:
        (folder / f"{path}.part").replace(folder / path)
    if len(plan) > 1:
        total = sum(math.prod(s) for s in shapes.values()) * dtype.itemsize
        weight_map = {name: path for path, names in plan.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _plan_files(
    shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype, limit: int
) -> dict[str, list[str]]:
    """Tensors by file name, filling files in order up to the limit."""
    files: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        if files[-1] and used + size > limit:
            files.append([])
            used = 0
        files[-1].append(name)
        used += size
    if len(files) == 1:
        return {SINGLE: files[0]}
    n = len(files)
    return {f"model-{i:05d}-of-{n:05d}.safetensors": names for i, names in enumerate(files, 1)}


def _header(names: list[str], shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    start = 0
    for name in names:
        end = start + math.prod(shapes[name]) * dtype.itemsize
        shape = list(shapes[name])
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begins on a multiple of eight
    return len(text).to_bytes(8, "little") + text
