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
      UserError: a pipeline that is not a network, a pooling and a norm; or an unreadable file.
    """
    families = [prefixes for pattern, prefixes in _FAMILIES if pattern.search(Path(name).name)]
    query, passage = families[0] if families else (None, None)
    prompts = _json(folder / "config_sentence_transformers.json").get("prompts") or {}
    said = (prompts.get(key) for key in _PASSAGE_PROMPTS)
    settings = Settings(
        folder,
        query_prefix=prompts.get("query") or query,  # newer versions write "" for "not said"
        passage_prefix=next((p for p in said if p), passage),
    )
    if not (folder / "modules.json").exists():
        return settings
    modules = [
        (str(m.get("type", "")).rsplit(".", 1)[-1], folder / str(m.get("path", "")))
        for m in _json(folder / "modules.json", list)
    ]
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(
            f"{folder / 'modules.json'} describes the pipeline {' > '.join(kinds) or 'of nothing'}"
            "; only Transformer > Pooling, and Normalize after it, can be loaded"
        )
    weights = modules[0][1]
    network = _json(weights / "sentence_bert_config.json")
    if network.get("do_lower_case"):
        raise UserError(
            f"{weights / 'sentence_bert_config.json'} has do_lower_case, which is not supported; "
            "set it to false where the tokenizer makes lower case itself"
        )
    return dataclasses.replace(
        settings,
        weights=weights,
        pooling=_read_pooling(modules[1][1] / "config.json"),
        normalize=len(modules) == 3,
        max_length=network.get("max_seq_length"),
    )


def _read_pooling(path: Path) -> str:
    config = _json(path)
    modes = config.get("pooling_mode")
    if modes is None:  # one truth value per mode, until version 5
        found = ((_OLD_POOLING.fullmatch(key), value) for key, value in config.items())
        modes = [match[1] for match, value in found if match and value] or ["mean"]
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise UserError(
            f"{path} asks for pooling by {' + '.join(map(str, modes))}, which is not supported; "
            f"supported are {', '.join(_POOLINGS)}, one of them"
        )
    if not config.get("include_prompt", True):
        raise UserError(f"{path} leaves prompts out of the pooling, which is not supported")
    return _POOLINGS[modes[0]]


def _json(path: Path, kind: type = dict) -> Any:
    """The file's value, an empty one where there is no such file."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return kind()
    except ValueError:
        value = None
    if not isinstance(value, kind):
        raise UserError(f"{path} is not valid JSON of the expected form; fetch the model again")
    return value
