"""How the folder of a text encoder wants its vectors made: pooling, norm, prefixes, longest text.

sentence-transformers writes it down in files beside the weights (`modules.json` and what it names,
`config_sentence_transformers.json`, `sentence_bert_config.json`); a plain folder does not, and then
the name of a known family has to do, or the caller says it.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from zest_jax.errors import UserError

# The instruction that Qwen3-Embedding was published with, for its queries only.
WEB_SEARCH = "Given a web search query, retrieve relevant passages that answer the query"
# sentence-transformers' names of the poolings that we compute.
_POOLINGS = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_OLD_POOLING = re.compile(r"pooling_mode_(\w+?)(?:_tokens?)?")
_PASSAGE_PROMPTS = ("document", "passage", "corpus")


def instruction(task: str) -> str:
    """The query prefix of Qwen3-Embedding for a task told in one sentence."""
    return f"Instruct: {task}\nQuery:"


# Families whose plain folders do not tell their prefixes, by a part of the folder's or hub name.
_FAMILIES = (
    (re.compile(r"(^|[-_])e5[-_]", re.IGNORECASE), ("query: ", "passage: ")),
    (re.compile(r"qwen3-embedding", re.IGNORECASE), (instruction(WEB_SEARCH), "")),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a folder says; None where it says nothing.

    Attributes:
      weights: the folder of the network itself.
      pooling: "mean", "cls" or "last".
      normalize: whether vectors are divided by their length.
      query_prefix: text before a query.
      passage_prefix: text before a passage.
      max_length: most tokens of a text.
    """

    weights: Path
    pooling: str | None = None
    normalize: bool | None = None
    query_prefix: str | None = None
    passage_prefix: str | None = None
    max_length: int | None = None


def read_settings(folder: Path, name: str) -> Settings:
    """Reads the files of sentence-transformers, where they are, and knows a few families by name.

    Args:
      folder: the folder.
      name: as the user called it (a path or an id of the Hugging Face hub).

    Raises:
      UserError: a pipeline that is not a network, a pooling and a norm; a pooling that is named
        but not there; or a file that cannot be read or holds something of a wrong type.
    """
    families = [prefixes for pattern, prefixes in _FAMILIES if pattern.search(Path(name).name)]
    query, passage = families[0] if families else (None, None)
    prompts = _read_prompts(folder / "config_sentence_transformers.json")
    said = (prompts.get(key) for key in _PASSAGE_PROMPTS)
    settings = Settings(
        folder,
        query_prefix=prompts.get("query") or query,  # newer versions write "" for "not said"
        passage_prefix=next((p for p in said if p), passage),
    )
    pipeline = folder / "modules.json"
    if not pipeline.exists():
        return settings
    modules = [_read_module(pipeline, module) for module in _json(pipeline, list)]
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(
            f"{pipeline} describes the pipeline {' > '.join(kinds) or 'of nothing'}"
            "; only Transformer > Pooling, and Normalize after it, can be loaded"
        )
    weights, pooling = folder / modules[0][1], folder / modules[1][1] / "config.json"
    if not pooling.exists():  # the library's default, the mean, is not that of this model
        raise UserError(
            f"{pipeline} names the pooling folder {modules[1][1]!r}, but {pooling} is not there, "
            "so how the model makes a vector is not known; fetch the model again with its folders"
        )
    network = _json(weights / "sentence_bert_config.json")
    if network.get("do_lower_case"):
        raise UserError(
            f"{weights / 'sentence_bert_config.json'} has do_lower_case, which is not supported; "
            "set it to false where the tokenizer makes lower case itself"
        )
    longest = network.get("max_seq_length")
    if longest is not None and (type(longest) is not int or longest < 1):
        raise UserError(
            f"{weights / 'sentence_bert_config.json'} has max_seq_length = {longest!r}; it is a "
            "whole number of tokens from 1 on, or null"
        )
    return dataclasses.replace(
        settings,
        weights=weights,
        pooling=_read_pooling(pooling),
        normalize=len(modules) == 3,
        max_length=longest,
    )


def _read_prompts(path: Path) -> dict[str, str]:
    """The prompts by name; those that are null are left out."""
    prompts = _json(path).get("prompts")
    prompts = {} if prompts is None else prompts
    if not isinstance(prompts, dict):
        raise UserError(f"{path} has prompts = {prompts!r}; they are texts by name")
    for name, prompt in prompts.items():
        if prompt is not None and not is_text(prompt):
            raise UserError(f"{path} has the prompt {name} = {prompt!r}, which is no valid text")
    return {name: prompt for name, prompt in prompts.items() if prompt is not None}


def _read_module(path: Path, module: Any) -> tuple[str, str]:
    """Kind and folder of one entry of a modules.json."""
    if isinstance(module, dict):
        kind, folder = module.get("type"), module.get("path", "")
        if isinstance(kind, str) and isinstance(folder, str):
            return kind.rsplit(".", 1)[-1], folder
    raise UserError(f"{path} has the module {module!r}; each has a text as its type and its path")


def _read_pooling(path: Path) -> str:
    config = _json(path)
    modes = config.get("pooling_mode")
    if modes is None:  # one truth value per mode, until version 5
        flags = {
            match[1]: value
            for key, value in config.items()
            if (match := _OLD_POOLING.fullmatch(key))
        }
        if any(type(value) is not bool for value in flags.values()):
            raise UserError(f"{path} has a pooling_mode_… that is neither true nor false")
        if any(flags.values()):
            flags = {"mean": True} | flags  # what the library takes where it is not said
        modes = [mode for mode, value in flags.items() if value]
        if not modes:
            raise UserError(
                f"{path} names no pooling mode, so how the model makes a vector is not known; "
                "fetch the model again"
            )
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in _POOLINGS:
        raise UserError(
            f"{path} asks for pooling by {' + '.join(map(str, modes))}, which is not supported; "
            f"supported are {', '.join(_POOLINGS)}, one of them"
        )
    if config.get("include_prompt", True) is not True:
        raise UserError(f"{path} leaves prompts out of the pooling, which is not supported")
    return _POOLINGS[modes[0]]


def is_text(value: Any) -> bool:
    """Whether a value is a string that can be written as UTF-8 (no half of a surrogate pair)."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _json(path: Path, kind: type = dict) -> Any:
    """The file's value, an empty one where there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return kind()
    except OSError as e:
        raise UserError(f"{path} cannot be opened ({e.strerror}); fetch the model again") from e
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise UserError(f"{path} is not valid JSON of the expected form; fetch the model again")
    return value
