"""Configs: loading, overriding, hashing, comparing, and a sentence for every mistake."""

import json

import pytest
from ml_collections import ConfigDict

from zest_jax import config as config_lib
from zest_jax.errors import UserError

CONFIG = """
from ml_collections import ConfigDict, config_dict
from zest_jax.config import parse_arg

def get_config(arg=None):
    arg = parse_arg(arg, control=False, iterations=2, size=("small", "qwen2.5-3b"))
    config = ConfigDict()
    config.seed = 0
    config.iterations = arg.iterations
    config.control = arg.control
    config.size = arg.size
    config.init = config_dict.placeholder(str)
    config.empty = None
    config.solver = ConfigDict({"learning_rate": 3e-4, "group_size": 8, "hops": (1, 2, 3)})
    config.proposer = ConfigDict({"learning_rate": 1e-4, "lambda_format": 0.2})
    return config
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "exp.py"
    path.write_text(CONFIG)
    return str(path)


def test_load_overrides_and_locks(file):
    config = config_lib.load(
        f"{file}:control,iterations=3",
        {
            "solver.group_size": 4,
            "solver.hops": "(1, 2)",
            "init": "runs/a",
            "proposer.learning_rate": 1,
        },
    )
    assert config.control is True and config.iterations == 3 and config.size == "small"
    assert config.solver.group_size == 4 and config.solver.hops == (1, 2)
    assert config.init == "runs/a"
    assert config.proposer.learning_rate == 1.0
    assert isinstance(config.proposer.learning_rate, float)
    with pytest.raises(AttributeError):
        config.new_field = 1
    assert config_lib.load(file).solver.group_size == 8  # Nothing stays behind.


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"solver.groupsize": 4}, ["no field solver.groupsize", "nearest is solver.group_size"]),
        ({"group_size": 4}, ["no field group_size", "nearest is solver.group_size"]),
        ({"solvr.learning_rate": 4}, ["nearest is solver.learning_rate"]),
        ({"zzzzzz": 4}, ["no field zzzzzz"]),
        ({"solver.group_size": "many"}, ["solver.group_size", "a whole number", "'many'"]),
        ({"solver.group_size": 2.5}, ["solver.group_size", "a whole number", "'2.5'"]),
        ({"solver.learning_rate": "x"}, ["solver.learning_rate", "a number", "'x'"]),
        ({"control": "maybe"}, ["control", "true or false", "'maybe'"]),
        ({"solver.hops": "(1, 'a')"}, ["solver.hops", "a whole number", "'a'"]),
        ({"solver": 3}, ["solver is a group", "--config.solver."]),
        ({"empty": 3}, ["empty", "placeholder"]),
    ],
)
def test_wrong_overrides_get_one_sentence(file, overrides, words):
    with pytest.raises(UserError) as caught:
        config_lib.load(file, overrides)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", ["no function get_config()"]),
        ("def get_config(:\n  pass\n", ["line 1", "invalid syntax"]),
        ("def get_config():\n  return 1 / 0\n", ["line 2", "ZeroDivisionError"]),
        ("import nowhere_to_be_found\n", ["line 1", "nowhere_to_be_found"]),
        ("def get_config():\n  return {}\n", ["returns dict", "ConfigDict"]),
    ],
)
def test_broken_files_get_one_sentence(tmp_path, text, words):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        config_lib.load(str(path))
    for word in ["broken.py", *words]:
        assert word in str(caught.value)


def test_variant_for_a_config_without_one(tmp_path):
    path = tmp_path / "plain.py"
    path.write_text("def get_config():\n  pass\n")
    with pytest.raises(UserError, match="its variant do not fit"):
        config_lib.load(f"{path}:gpu")


def test_missing_file_names_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "smoke.py").write_text(CONFIG)
    with pytest.raises(UserError, match=r"did you mean configs/smoke\.py"):
        config_lib.load("configs/smok.py")
    assert config_lib.load("configs/smoke.py").seed == 0


def test_a_config_may_import_its_neighbours(tmp_path):
    folder = tmp_path / "neighbour_configs"
    folder.mkdir()
    (folder / "shared_defaults.py").write_text("SEED = 7\n")
    (folder / "own.py").write_text(
        "from ml_collections import ConfigDict\n"
        "from neighbour_configs import shared_defaults\n"
        "def get_config():\n  return ConfigDict({'seed': shared_defaults.SEED})\n"
    )
    assert config_lib.load(str(folder / "own.py")).seed == 7


def test_parse_arg():
    spec = {
        "control": False,
        "iterations": 2,
        "rate": 0.5,
        "name": "a",
        "size": ("small", "big-1.5b"),
    }
    plain = config_lib.parse_arg(None, **spec)
    assert vars(plain) == {**spec, "size": "small"}
    set_ = config_lib.parse_arg("control, big-1.5b,iterations=3,rate=1,name=b=c", **spec)
    assert vars(set_) == {
        "control": True,
        "iterations": 3,
        "rate": 1.0,
        "name": "b=c",
        "size": "big-1.5b",
    }
    assert config_lib.parse_arg("control=false,size=big-1.5b", **spec).size == "big-1.5b"
    for arg in ["contrl", "iterations", "size=huge", "iterations=x", "control=2"]:
        with pytest.raises(UserError):
            config_lib.parse_arg(arg, **spec)
    with pytest.raises(UserError, match="known are control, iterations=2, .*small, big-1.5b"):
        config_lib.parse_arg("nothing", **spec)


def test_hash_is_stable_and_sees_every_field():
    config = ConfigDict({"b": {"x": 1.0, "y": (1, 2)}, "a": None})
    # SHA-256 of {"a":null,"b":{"x":1.0,"y":[1,2]}}
    assert config_lib.config_hash(config) == "89ad5cf86b86"
    assert config_lib.config_hash({"a": None, "b": {"y": [1, 2], "x": 1.0}}) == "89ad5cf86b86"
    assert config_lib.config_hash({"a": None, "b": {"y": [1, 2], "x": 1}}) != "89ad5cf86b86"
    assert json.loads(config_lib.resolved_json(config)) == config_lib.to_plain(config)


def test_differences():
    old = {"a": 1, "b": {"c": [1, 2], "d": "x"}, "gone": {"e": 1}}
    new = ConfigDict({"a": 1, "b": {"c": (1, 3), "d": "x"}, "fresh": True})
    found = config_lib.differences(old, new)
    assert [tuple(each) for each in found] == [
        ("b.c", [1, 2], [1, 3]),
        ("fresh", config_lib.ABSENT, True),
        ("gone.e", 1, config_lib.ABSENT),
    ]
    assert str(found[0]) == "b.c: [1, 2] there, [1, 3] now"
    assert config_lib.differences({"a": 1}, {"a": True})  # 1 == True in Python only.
    assert not config_lib.differences(new, json.loads(config_lib.resolved_json(new)))


def test_a_field_that_json_cannot_hold_is_named():
    with pytest.raises(UserError, match=r"a\.b\[1\] holds a function"):
        config_lib.to_plain({"a": {"b": [1, len.__class__ and (lambda: 0)]}})
