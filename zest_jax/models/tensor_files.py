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
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from zest_jax.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_BYTE = np.dtype(np.uint8)
# Bits of a number of every type of the format, ours and others.
_BITS = {
    **{name: 8 * dtype.itemsize for name, dtype in _DTYPES.items()},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16},
    **{"F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
    **{"I32": 32, "U32": 32, "C64": 64, "I64": 64, "U64": 64},
}
_LONGEST_HEADER = 100_000_000  # bytes, as in the library
_LISTED = 5  # files in an error before it says "and … more"
_OTHER_FORMATS = (".bin", ".bin.index.json", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")
# How files begin that stand in place of weights, in lower case.
_NO_TENSORS = {
    b"version https://git-lfs": "a git-LFS pointer (git lfs pull fetches what it points to)",
    b"<!doctype": "an HTML page",
    b"<html": "an HTML page",
    b"<?xml": "an XML page",
    b"pk\x03\x04": "a PyTorch or zip file",
}


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a tensor lies: its file, type, shape, and first byte."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    def view(self) -> np.ndarray:
        """The tensor over the mapped file: nothing is read before it is used."""
        if 0 in self.shape:  # cannot be mapped
            return np.empty(self.shape, self.dtype)
        if not self.shape:
            return np.fromfile(self.path, self.dtype, 1, offset=self.start).reshape(())
        return np.memmap(self.path, self.dtype, "r", self.start, self.shape)


def open_tensors(folder: Path) -> tuple[dict[str, Stored], list[str]]:
    """Finds every tensor of a model folder: model.safetensors, or the files that its index names.

    Returns:
      The sound tensors by name, and a sentence, beginning with its name, for every other.

    Raises:
      UserError: a file is missing, or cannot be read as the safetensors library would read it;
        every such file is named. What its tensors are is then not known, so none is called missing.
    """
    wanted = _read_index(folder) if (folder / INDEX).exists() else None
    files = [_only_file(folder)] if wanted is None else sorted(set(wanted.values()))
    problems: list[str] = []
    broken: list[str] = []
    found: dict[str, Stored] = {}
    for name in files:
        try:
            for tensor, (kind, stored) in _read_header(folder / name).items():
                if kind not in _DTYPES:
                    problems.append(f"{tensor} has type {kind}, which is not supported")
                elif tensor in found:
                    other = found[tensor].path.name
                    problems.append(f"{tensor} lies both in {other} and in {name}")
                else:
                    found[tensor] = stored
        except FileNotFoundError:
            broken.append(f"file {name} is missing")
        except OSError as e:
            broken.append(f"file {name} cannot be opened ({e.strerror})")
        except _BrokenFileError as e:
            broken.append(f"file {name} {e}")
    if broken:
        rest = f"; and {len(broken) - _LISTED} more" if len(broken) > _LISTED else ""
        raise UserError(
            f"the weights in {folder} cannot be read: {'; '.join(broken[:_LISTED])}{rest}; "
            "fetch or export the model again"
        )
    if wanted is not None:
        for tensor, stored in list(found.items()):
            if wanted.get(tensor) != stored.path.name:
                problems.append(f"{tensor} lies in {stored.path.name} against the index")
                del found[tensor]
    return found, problems


class _BrokenFileError(Exception):
    """What is wrong with a file as a whole, in words that follow its name."""


def _only_file(folder: Path) -> str:
    """The name of a single file, or a UserError that says what the folder has instead of it."""
    if (folder / SINGLE).exists():
        return SINGLE
    names = sorted(path.name for path in folder.iterdir())
    ours = [name for name in names if name.endswith(".safetensors")]
    if ours:
        raise UserError(
            f"{folder} has {ours[0]}, but neither {SINGLE} nor {INDEX}, which says what lies "
            "where; fetch the whole model again"
        )
    others = [name for name in names if name.endswith(_OTHER_FORMATS)]
    if others:
        raise UserError(
            f"{folder} has its weights only as {others[0]}, which is not read; convert to "
            "safetensors (load the model with transformers and call its save_pretrained)"
        )
    raise UserError(
        f"{folder} has no weights: neither {SINGLE} nor {INDEX} is there; fetch the model again, "
        "and convert to safetensors what is stored otherwise"
    )


def _read_index(folder: Path) -> dict[str, str]:
    """File names by tensor name."""

    def refuse(what: str) -> NoReturn:
        raise UserError(f"{folder / INDEX} is not a valid index: {what}; fetch the model again")

    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except OSError as e:
        refuse(f"it cannot be opened ({e.strerror})")
    except (ValueError, RecursionError):
        refuse("it is no JSON")
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not files:
        refuse("it has no weight_map with the file of every tensor")
    for tensor, name in files.items():
        # A path would lead out of the folder; "" and "." are folders.
        if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
            refuse(f"{tensor} shall lie in {name!r}, which is no file name")
    return files


def _read_header(path: Path) -> dict[str, tuple[str, Stored]]:
    """Type and place of every tensor of a file.

    What the safetensors library (0.8) refuses is refused here too: above all, the tensors must
    cover the data without a hole, an overlap or a byte behind the last one. (A type without a
    `Stored` of ours has one of single bytes, for its place.)

    Raises:
      _BrokenFileError: the file is no safetensors file, or not all of one.
      OSError: it cannot be opened.
    """
    size = path.stat().st_size
    with path.open("rb") as f:
        start = f.read(64)
        length = int.from_bytes(start[:8], "little")
        for mark, what in _NO_TENSORS.items():
            if start.lstrip().lower().startswith(mark):
                raise _BrokenFileError(f"is {what}, not the weights themselves")
        if not size:
            raise _BrokenFileError("is empty")
        if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
            raise _BrokenFileError("is truncated or no safetensors file")
        f.seek(8)
        text = f.read(length)
    try:
        header = json.loads(text.decode())
    except (ValueError, RecursionError):
        raise _BrokenFileError("has a header that is no JSON: it is damaged") from None
    if not isinstance(header, dict):
        raise _BrokenFileError("has a header that is no JSON object: it is damaged")
    notes = header.pop("__metadata__", None) or {}
    if not isinstance(notes, dict) or not all(isinstance(v, str) for v in notes.values()):
        raise _BrokenFileError("has a __metadata__ that is no table of strings: it is damaged")
    places = {name: _read_entry(name, entry) for name, entry in header.items()}
    _check_cover(places, size - 8 - length)
    return {
        name: (kind, Stored(path, _DTYPES.get(kind, _BYTE), shape, 8 + length + begin))
        for name, (kind, shape, begin, _) in places.items()
    }


def _read_entry(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Type, shape, first and last-plus-one byte of a tensor, from its entry of the header."""

    def counts(value: Any) -> bool:  # bool is a kind of int
        return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)

    if not isinstance(entry, dict):
        raise _BrokenFileError(f"has a header whose {name} is no JSON object")
    for field in ("dtype", "shape", "data_offsets"):
        if field not in entry:
            raise _BrokenFileError(f"has a header whose {name} has no {field}")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str):
        raise _BrokenFileError(f"has a header whose {name} has the dtype {kind!r}")
    if not counts(shape):
        raise _BrokenFileError(
            f"has a header whose {name} has the shape {shape!r}: not whole numbers from 0 on"
        )
    if not counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _BrokenFileError(
            f"has a header whose {name} has the data_offsets {offsets!r}: not a first and a last "
            "whole number from 0 on"
        )
    bits = _BITS.get(kind)
    if bits is not None and 8 * (offsets[1] - offsets[0]) != math.prod(shape) * bits:
        raise _BrokenFileError(
            f"has a header whose {name} has {offsets[1] - offsets[0]} bytes, which are not those "
            f"of {shape} numbers of type {kind}"
        )
    return kind, tuple(shape), *offsets


def _check_cover(places: Mapping[str, tuple[str, tuple[int, ...], int, int]], size: int) -> None:
    """Refuses tensors that do not cover `size` bytes of data one behind the other."""
    ordered = sorted(places.items(), key=lambda item: item[1][2:])
    covered = 0
    for name, (_, _, begin, end) in ordered:
        if begin != covered:
            where = (
                "overlaps the tensor before it" if begin < covered else "leaves a hole before it"
            )
            raise _BrokenFileError(f"has a header whose {name} {where}: it is damaged")
        covered = end
    if covered > size:
        short = [name for name, place in ordered if place[3] > size]
        rest = f" and {len(short) - 1} more behind it" if len(short) > 1 else ""
        raise _BrokenFileError(
            f"is too short by {covered - size} bytes: {short[0]} is truncated{rest}"
        )
    if covered < size:
        raise _BrokenFileError(f"has {size - covered} bytes behind its last tensor: it is damaged")


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
