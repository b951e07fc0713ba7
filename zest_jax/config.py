"""Configs: load a file with overrides, tell its mistakes in a sentence, print, hash and compare.

A config is what `get_config(arg)` of a Python file returns: a `ConfigDict`, locked. Everything here
goes through `ml_collections.config_flags`, so a config built in a test or a benchmark is the one
that the same words on a command line would build.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict, FrozenConfigDict, config_flags

import zest_jax
from zest_jax.errors import UserError

ABSENT = "(absent)"  # How `differences` names a field that one of the two configs lacks.

_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


class Difference(NamedTuple):
    """One field in which two configs differ."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.old!r} there, {self.new!r} now"


# ---------------------------------------------------------------------------------------------
# Loading


def load(path: str, overrides: Mapping[str, Any] | None = None) -> ConfigDict:
    """The locked config of a file, without flags.

    Args:
      path: a config file, with its argument after a colon if it takes one
        ("configs/smoke.py:gpu").
      overrides: dotted field path -> value, as `--config.PATH=VALUE` would set it.

    Returns:
      The config, locked.

    Raises:
      UserError: the file is missing or broken, or an override names no field or has a wrong type.
    """
    argv = ["load", f"--config={path}"]
    argv += [f"--config.{key}={value}" for key, value in (overrides or {}).items()]
    config, _ = parse_flags(flags.FlagValues(), argv)
    assert config is not None
    return config


def parse_flags(
    values: flags.FlagValues, argv: Sequence[str]
) -> tuple[ConfigDict | None, list[str]]:
    """Parses `--config=FILE[:ARG]`, its overrides and the flags that `values` has.

    The file is run here, and only its `ConfigDict` is handed to `ml_collections`: a mistake can
    then be answered with the names and the types of that very file and variant.

    Args:
      values: flags of the program, not yet parsed; gets the overrides added.
      argv: like `sys.argv`, the program's name first.

    Returns:
      The config, locked (None without `--config`), and the arguments that no flag took.

    Raises:
      UserError: any mistake on the command line or in the file.
    """
    file, argv = _take_config(argv)
    config = None if file is None else _build(file)
    before = {} if config is None else flatten(config)
    for arg in argv[1:]:
        if match := re.match(r"^--?(?:no)?config\.([^=]+)", arg):
            if config is None:
                raise UserError(f"{arg} overrides a field, but no --config=FILE is given.")
            _check_field(config, match[1])
    try:
        if config is not None:
            config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
        rest = values(argv)[1:]
    except flags.UnrecognizedFlagError as error:
        known = [*(name for name in values if "." not in name), "config"]
        raise UserError(
            f"unknown flag --{error.flagname}{_nearest(error.flagname, known)}"
        ) from error
    except flags.IllegalFlagValueError as error:
        raise UserError(_explain_value(str(error), config)) from error
    except flags.Error as error:
        raise UserError(_explain_flag(str(error))) from error
    if config is None:
        return None, rest
    config = values["config"].value
    after = flatten(config)
    for path, old in before.items():
        _check_items(path, old, after[path])
    return config, rest


def _build(path: str) -> ConfigDict:
    """Runs `get_config` of "FILE[:ARG]", every mistake told in one sentence."""
    file, colon, arg = path.partition(":")
    if not Path(file).is_file():
        raise UserError(f"config file {file} does not exist{_nearest_file(file)}.")
    with _importable(path):
        try:
            scope: dict[str, Any] = {"__name__": "zest_config", "__file__": file}
            exec(compile(Path(file).read_text("utf-8"), file, "exec"), scope)
            if not callable(scope.get("get_config")):
                raise UserError(f"config file {file} has no function get_config().")
            config = scope["get_config"](*([arg] if colon else []))
        except UserError:
            raise
        except Exception as error:  # Whatever a user's file raises is the user's mistake.
            raise UserError(_explain_file(file, error)) from error
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"get_config() of {file} returns {type(config).__name__}; "
            "it must return an ml_collections ConfigDict."
        )
    return config


@contextlib.contextmanager
def _importable(path: str | None) -> Iterator[None]:
    """Lets a config file `import configs.common`, from wherever the program is started."""
    roots = [str(Path(zest_jax.__file__).resolve().parent.parent)]
    if path:
        roots.insert(0, str(Path(path.partition(":")[0]).resolve().parent.parent))
    before = list(sys.path)
    sys.path[:0] = [root for root in roots if root not in before]
    try:
        yield
    finally:
        sys.path[:] = before


def parse_arg(arg: str | None, **defaults: Any) -> SimpleNamespace:
    """Typed variants of a config from one string, as in "control" or "gpu,iterations=3".

    A default of `False` or `True` is a switch: its bare name turns it on. A tuple of strings is a
    choice: a bare word picks one of them, the first is the default. Any other default is set by
    `name=value` and keeps its type.

    Args:
      arg: comma-separated variants; None and "" leave the defaults.
      **defaults: the variants that the config knows.

    Returns:
      One attribute for every default.

    Raises:
      UserError: an unknown variant (the known ones are named), or a value of a wrong type.
    """
    choices = {key: value for key, value in defaults.items() if isinstance(value, tuple)}
    values = {key: (value[0] if key in choices else value) for key, value in defaults.items()}
    for item in filter(None, (part.strip() for part in (arg or "").split(","))):
        name, equals, text = item.partition("=")
        owner = next((key for key, words in choices.items() if item in words), None)
        if owner is not None:
            values[owner] = item
        elif name not in defaults or (not equals and not isinstance(defaults[name], bool)):
            raise UserError(f"unknown config variant {item!r}; known are {_known(defaults)}.")
        elif name in choices:
            if text not in choices[name]:
                raise UserError(f"{name} is one of {', '.join(choices[name])}, not {text!r}.")
            values[name] = text
        else:
            values[name] = _typed(name, text if equals else "true", defaults[name])
    return SimpleNamespace(**values)


# ---------------------------------------------------------------------------------------------
# Printing, hashing, comparing


def to_plain(config: Any, path: str = "") -> Any:
    """A config as plain dicts, lists and scalars; keys sorted.

    Raises:
      UserError: a field holds something that JSON cannot, named by its path.
    """
    if isinstance(config, (ConfigDict, FrozenConfigDict)):
        config = config.to_dict()
    if isinstance(config, Mapping):
        items = sorted((str(key), value) for key, value in config.items())
        return {key: to_plain(value, f"{path}.{key}".lstrip(".")) for key, value in items}
    if isinstance(config, (list, tuple)):
        return [to_plain(value, f"{path}[{i}]") for i, value in enumerate(config)]
    if config is None or isinstance(config, (bool, int, float, str)):
        return config
    if hasattr(config, "item"):  # A NumPy scalar.
        return config.item()
    raise UserError(
        f"config field {path} holds a {type(config).__name__}; "
        "fields hold numbers, strings, true/false, None, lists and dicts only."
    )


def resolved_json(config: Any) -> str:
    """The config as indented JSON, keys sorted: what stands in a workdir's config.json."""
    return json.dumps(to_plain(config), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def config_hash(config: Any) -> str:
    """Twelve hex digits of SHA-256 over the canonical JSON: equal configs, equal hash."""
    canonical = json.dumps(to_plain(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def flatten(config: Any) -> dict[str, Any]:
    """Dotted field path -> value; lists are values, an empty dict is one too."""
    out: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict) and value:
            for key, below in value.items():
                walk(below, f"{path}.{key}" if path else key)
        elif path:
            out[path] = value

    walk(to_plain(config), "")
    return out


def differences(old: Any, new: Any) -> list[Difference]:
    """The fields in which two configs (or their JSON, read back) differ, by path."""
    a, b = flatten(old), flatten(new)
    paths = sorted(a.keys() | b.keys())
    pairs = [Difference(path, a.get(path, ABSENT), b.get(path, ABSENT)) for path in paths]
    # `1 == True == 1.0` in Python, but not in a config.
    return [pair for pair in pairs if json.dumps(pair.old) != json.dumps(pair.new)]


# ---------------------------------------------------------------------------------------------
# Mistakes in words


def _take_config(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of `--config=FILE` or `--config FILE` (the last one), and `argv` without it."""
    file: str | None = None
    rest: list[str] = []
    todo = list(argv)
    while todo:
        arg = todo.pop(0)
        if arg == "--":
            return file, [*rest, arg, *todo]
        if match := re.match(r"^--?config=(.*)$", arg, re.DOTALL):
            file = match[1]
        elif re.match(r"^--?config$", arg):
            if not todo:
                raise UserError("--config needs a file, as in --config=configs/smoke.py.")
            file = todo.pop(0)
        else:
            rest.append(arg)
    return file, rest


def _check_field(config: ConfigDict, path: str) -> None:
    """Raises if `path` is no field of `config`, naming the nearest that is."""
    value: Any = config
    names = re.sub(r"\[[^\]]*\]", "", path).split(".")
    for name in names:
        # `name in value` and not getattr: a ConfigDict also has methods.
        if not isinstance(value, (Mapping, ConfigDict)) or name not in value:
            known = _all_paths(config)
            raise UserError(f"config has no field {path}{_nearest_path(path, known)}.")
        value = value[name]
    if isinstance(value, ConfigDict):
        raise UserError(
            f"config field {path} is a group of fields; set them one by one, as in "
            f"--config.{path}.{next(iter(value), 'FIELD')}=VALUE."
        )


def _check_items(path: str, old: Any, new: Any) -> None:
    """A list or tuple keeps the type of its items, which absl does not see to."""
    if not isinstance(old, (list, tuple)) or not old or not isinstance(new, (list, tuple)):
        return
    kind = type(old[0])
    if any(type(item) is not kind for item in old):
        return
    allowed = (int, float) if kind is float else (kind,)
    for item in new:
        if type(item) not in allowed:
            expected = _TYPE_NAMES.get(kind, f"a {kind.__name__}")
            raise UserError(f"every item of config field {path} must be {expected}, got {item!r}.")


def _all_paths(config: ConfigDict) -> list[str]:
    """Every field's dotted path, groups of fields included."""
    paths: list[str] = []
    for leaf in flatten(config):
        parts = leaf.split(".")
        paths += [".".join(parts[: i + 1]) for i in range(len(parts))]
    return list(dict.fromkeys(paths))


def _nearest_path(path: str, known: Sequence[str]) -> str:
    """ " (the nearest is …)": by the whole path, or by its last part if that says more."""
    last = path.rsplit(".", 1)[-1]

    def likeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, path, candidate).ratio()
        tail = difflib.SequenceMatcher(None, last, candidate.rsplit(".", 1)[-1]).ratio()
        return max(whole, 0.95 * tail)

    best = max(known, key=likeness, default=None)
    return f"; the nearest is {best}" if best and likeness(best) > 0.5 else ""


def _nearest(name: str, known: Sequence[str]) -> str:
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean --{match[0]}?" if match else f"; known are {', '.join(sorted(known))}."


def _nearest_file(file: str) -> str:
    near = sorted(str(path) for path in Path("configs").glob("*.py"))
    match = difflib.get_close_matches(file, near, n=1, cutoff=0.5)
    return f"; did you mean {match[0]}" if match else f" (looked from {Path.cwd()})"


def _explain_value(text: str, config: ConfigDict | None) -> str:
    """Absl's "flag --config.a.b=x: could not convert …" with the type that the field has."""
    match = re.match(r"flag --(.+?)=(.*?): (.*)", text, re.DOTALL)
    if not match:
        return _one_line(text)
    name, value, reason = match.groups()
    if config is None or not name.startswith("config."):
        return f"--{name}={value}: {_one_line(reason)}."
    field = name.removeprefix("config.")
    kind = config
    for part in field.split(".")[:-1]:
        kind = kind[part]
    type_ = kind.get_type(field.split(".")[-1]) if isinstance(kind, ConfigDict) else object
    expected = _TYPE_NAMES.get(type_, f"a {type_.__name__}")
    return f"config field {field} must be {expected}, got {value!r}."


def _explain_flag(text: str) -> str:
    """Absl's or ml_collections' other errors; theirs are sentences, but for one that is a page."""
    match = re.search(r"Type <class '(.+?)'> of field config\.(\S+)", text)
    if not match:
        return f"{_one_line(text)}."
    return (
        f"config field {match[2]} has type {match[1]} and cannot be set on the command line; "
        "set it in the config file (there, config_dict.placeholder(TYPE) makes an empty field "
        "that can be set)."
    )


def _explain_file(file: str, error: Exception) -> str:
    """ "FILE, line N: ErrorType: message", N the last line in that file."""
    if isinstance(error, SyntaxError):
        return f"config file {error.filename}, line {error.lineno}: {error.msg}."
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file
    ]
    where = f"config file {file}" + (f", line {frames[-1].lineno}" if frames else "")
    if isinstance(error, TypeError) and "get_config()" in str(error) and not frames:
        return f"config file {file} and its variant do not fit: {_one_line(str(error))}."
    return f"{where}: {type(error).__name__}: {_one_line(str(error))}."


def _known(defaults: Mapping[str, Any]) -> str:
    words: list[str] = []
    for key, value in defaults.items():
        if isinstance(value, tuple):
            words += value
        else:
            words.append(key if isinstance(value, bool) else f"{key}={value}")
    return ", ".join(words) or "none"


def _typed(name: str, text: str, default: Any) -> Any:
    """`text` in the type of `default`."""
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return type(default)(text)
    except (KeyError, ValueError):
        expected = _TYPE_NAMES.get(type(default), type(default).__name__)
        raise UserError(f"config variant {name} must be {expected}, got {text!r}.") from None


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")
