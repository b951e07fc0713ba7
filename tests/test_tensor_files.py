"""Safetensors files as the safetensors library reads them, and a sentence for every broken one."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open

from zest_jax.errors import UserError
from zest_jax.models import load_encoder
from zest_jax.models.tensor_files import open_tensors

ENCODERS = Path(__file__).parent / "fixtures" / "encoders"
NAME = "model.safetensors"
DATA = np.arange(4, dtype="<f4").tobytes()


def entry(shape=(2,), begin=0, end=8, dtype="F32", **fields):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **fields}


def without(field):
    return {key: value for key, value in entry().items() if key != field}


def write(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def refused_by_the_library(path):
    try:
        with safe_open(path, "np"):
            return False
    except SafetensorError:
        return True


SECOND = entry(begin=8, end=16)
BROKEN = [
    ({"a": entry(begin=-8, end=0), "b": SECOND}, DATA, "a has the data_offsets .-8, 0."),
    ({"a": entry(begin=8, end=0), "b": SECOND}, DATA, "a has the data_offsets .8, 0."),
    ({"a": entry(begin=0.0, end=8.0)}, DATA[:8], "a has the data_offsets .0.0, 8.0."),
    ({"a": entry(begin=False, end=8)}, DATA[:8], "a has the data_offsets"),
    ({"a": entry(begin="0", end="8")}, DATA[:8], "a has the data_offsets"),
    ({"a": entry(data_offsets=[0, 8, 8])}, DATA[:8], "a has the data_offsets"),
    ({"a": entry(data_offsets=8)}, DATA[:8], "a has the data_offsets"),
    ({"a": entry(), "b": entry(begin=4, end=12)}, DATA[:12], "b overlaps the tensor before it"),
    ({"a": entry(), "b": entry()}, DATA[:8], "b overlaps the tensor before it"),
    ({"a": SECOND}, DATA, "a leaves a hole before it"),
    ({"a": entry(end=4), "b": entry(begin=4, end=12)}, DATA[:12], "a has 4 bytes, which are not"),
    ({"a": entry(end=16)}, DATA, "a has 16 bytes, which are not"),
    ({"a": entry(dtype="I64"), "b": SECOND}, DATA, "a has 8 bytes, which are not"),
    ({"a": entry(), "b": entry((2**40,), 8, 8 + 2**42)}, DATA, "b is truncated"),
    ({"a": entry(), "b": SECOND}, DATA[:12], "too short by 4 bytes: b is truncated"),
    ({"a": entry(), "b": SECOND}, DATA[:4], "a is truncated and 1 more behind it"),
    ({"a": entry()}, DATA, "has 8 bytes behind its last tensor"),
    ({}, DATA, "has 16 bytes behind its last tensor"),
    ({"a": without("shape")}, DATA[:8], "a has no shape"),
    ({"a": without("dtype")}, DATA[:8], "a has no dtype"),
    ({"a": without("data_offsets")}, DATA[:8], "a has no data_offsets"),
    ({"a": 7}, DATA[:8], "a is no JSON object"),
    ({"a": None}, DATA[:8], "a is no JSON object"),
    ({"a": entry(shape=(-2,))}, DATA[:8], "a has the shape .-2."),
    ({"a": entry(shape=(-1, -2))}, DATA[:8], "a has the shape .-1, -2."),
    ({"a": entry(shape=(2.0,))}, DATA[:8], "a has the shape .2.0."),
    ({"a": {**entry(), "shape": 2}}, DATA[:8], "a has the shape 2"),
    ({"a": {**entry(), "dtype": ["F32"]}}, DATA[:8], "a has the dtype"),
    ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
    ({"__metadata__": [1]}, b"", "__metadata__"),
    (["a"], b"", "header that is no JSON object"),
    (b"null", b"", "header that is no JSON object"),
    (b"{}}}", b"", "header that is no JSON:"),
    (b'"\xff\xfe"', b"", "header that is no JSON:"),
    (b"[" * 100_000, b"", "header that is no JSON:"),
]


@pytest.mark.parametrize("header, data, words", BROKEN)
def test_what_the_library_refuses_is_a_user_error(header, data, words, tmp_path):
    write(tmp_path / NAME, header, data)
    assert refused_by_the_library(tmp_path / NAME)
    with pytest.raises(UserError, match=words) as e:
        open_tensors(tmp_path)
    assert f"file {NAME} " in str(e.value) and str(tmp_path) in str(e.value)


@pytest.mark.parametrize(
    "header, data",
    [
        ({"a": entry(), "b": SECOND}, DATA),
        ({"b": SECOND, "a": entry()}, DATA),  # in any order
        ({"a": entry(), "b": entry((0, 3), 8, 8), "c": entry((), 8, 12)}, DATA[:12]),
        ({"a": entry((3, 0), 0, 0)}, b""),
        ({"__metadata__": {"x": "y"}, "a": entry(more=1)}, DATA[:8]),
        ({"__metadata__": None, "a": entry()}, DATA[:8]),
        ({}, b""),
    ],
)
def test_what_the_library_reads_is_read_as_the_library_does(header, data, tmp_path):
    write(tmp_path / NAME, header, data)
    found, problems = open_tensors(tmp_path)
    assert not problems
    with safe_open(tmp_path / NAME, "np") as f:
        assert set(f.keys()) == set(found)
        for name, stored in found.items():
            want = f.get_tensor(name)
            assert stored.view().shape == want.shape and stored.view().dtype == want.dtype
            np.testing.assert_array_equal(stored.view(), want)


def test_types_of_no_weights_are_named_and_the_rest_is_read(tmp_path):
    write(tmp_path / NAME, {"a": entry(), "ids": entry((1,), 8, 16, "I64")}, DATA)
    found, problems = open_tensors(tmp_path)
    assert list(found) == ["a"] and problems == ["ids has type I64, which is not supported"]


# --------------------------------------------------------------------- no weights, or not all


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 90868376\n"


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "is empty"),
        (b"abc", "is truncated or no safetensors file"),
        (bytes(8), "is truncated or no safetensors file"),
        ((10**9).to_bytes(8, "little") + b"{}", "is truncated or no safetensors file"),
        (POINTER, "is a git-LFS pointer"),
        (b"\n<!DOCTYPE html><html><body>Not found</body></html>", "is an HTML page"),
        (b"<html><body>Not found</body></html>", "is an HTML page"),
        (b"PK\x03\x04" + bytes(60), "is a PyTorch or zip file"),
    ],
)
def test_a_file_without_tensors_is_told_first_and_alone(content, words, tmp_path):
    for path in (ENCODERS / "e5").glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "modules.json").unlink()
    (tmp_path / NAME).write_bytes(content)
    assert refused_by_the_library(tmp_path / NAME)
    with pytest.raises(UserError, match=f"cannot be read: file {NAME} {words}") as e:
        load_encoder(tmp_path)
    assert "is missing" not in str(e.value)


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / NAME).mkdir()
    with pytest.raises(UserError, match=f"file {NAME} cannot be opened"):
        open_tensors(tmp_path)


@pytest.mark.parametrize(
    "there, words",
    [
        ("pytorch_model.bin", "only as pytorch_model.bin, .* convert to safetensors"),
        ("pytorch_model-00001-of-00002.bin", "convert to safetensors"),
        ("tf_model.h5", "only as tf_model.h5, .* convert to safetensors"),
        ("model-00001-of-00002.safetensors", "neither model.safetensors nor .*index.json"),
        ("README.md", "no weights: neither model.safetensors nor .*index.json"),
    ],
)
def test_a_folder_without_our_files_says_what_it_has(there, words, tmp_path):
    (tmp_path / there).write_bytes(b"x")
    with pytest.raises(UserError, match=words) as e:
        open_tensors(tmp_path)
    assert str(tmp_path) in str(e.value)


# --------------------------------------------------------------------------------- the index


def sharded(folder, weight_map=None):
    write(folder / "x.safetensors", {"a": entry()}, DATA[:8])
    write(folder / "y.safetensors", {"b": entry()}, DATA[8:])
    index = folder / "model.safetensors.index.json"
    files = {"a": "x.safetensors", "b": "y.safetensors"}
    index.write_text(json.dumps({"weight_map": files if weight_map is None else weight_map}))
    return index


def test_all_files_of_an_index_are_read_and_all_broken_ones_named(tmp_path):
    sharded(tmp_path)
    found, problems = open_tensors(tmp_path)
    assert not problems and found["b"].view().tolist() == [2, 3]
    (tmp_path / "x.safetensors").unlink()
    (tmp_path / "y.safetensors").write_bytes(POINTER)
    with pytest.raises(UserError, match="x.safetensors is missing; file y.safetensors is a git-LF"):
        open_tensors(tmp_path)


def test_a_tensor_in_two_files_or_in_the_wrong_one_is_named(tmp_path):
    sharded(tmp_path)
    write(tmp_path / "y.safetensors", {"a": entry(), "b": SECOND}, DATA)
    assert open_tensors(tmp_path)[1] == ["a lies both in x.safetensors and in y.safetensors"]
    write(tmp_path / "x.safetensors", {}, b"")
    found, problems = open_tensors(tmp_path)
    assert list(found) == ["b"] and problems == ["a lies in y.safetensors against the index"]


@pytest.mark.parametrize("name", [7, None, ["x.safetensors"], {}, "", ".", "..", "../x", "/x"])
def test_an_index_names_files_of_its_folder(name, tmp_path):
    index = sharded(tmp_path, {"a": "x.safetensors", "b": name})
    with pytest.raises(UserError, match="b shall lie in .*, which is no file name") as e:
        open_tensors(tmp_path)
    assert str(index) in str(e.value)


@pytest.mark.parametrize(
    "text, words",
    [
        (b"", "no JSON"),
        (b"<html>", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[]", "no weight_map"),
        (b"{}", "no weight_map"),
        (b'{"weight_map": {}}', "no weight_map"),
        (b'{"weight_map": [["a", "x.safetensors"]]}', "no weight_map"),
        (b'{"weight_map": "x.safetensors"}', "no weight_map"),
    ],
)
def test_an_index_of_another_form_is_named(text, words, tmp_path):
    index = sharded(tmp_path)
    index.write_bytes(text)
    with pytest.raises(UserError, match=words) as e:
        open_tensors(tmp_path)
    assert f"{index} is not a valid index" in str(e.value)
