"""Shows rollouts in a browser: one HTML file that needs nothing else, not even a network.

    python -m zest_jax.view runs/smoke                      # a run's rollouts and evaluations
    python -m zest_jax.view answers.jsonl --out=answers.html

FILE_OR_RUN is a run's folder or a file of rollouts: `rollouts/*.jsonl` (`zest_jax.traces` describes
a line), `evaluation/*.jsonl`, a file of `zest_jax.evaluate --out`, or one that an earlier release
wrote. A line is shown with what it has. Of more than --most rollouts the last ones are shown.

The page holds a small index of all rollouts, which is read at once, and the rollouts and passages
in parts, each compressed, which are read when they are looked at. A passage stands there once,
however many rollouts found it.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from markupsafe import Markup

import zest_jax
from zest_jax import cli, pages, traces
from zest_jax.behaviour import FORCED
from zest_jax.errors import UserError
from zest_jax.files import check_writable
from zest_jax.workdir import write_atomically

OUTCOMES = ("right", "wrong", "no answer", "forced stop", "accepted", "refused")
_RIGHT, _WRONG, _NO_ANSWER, _FORCED, _ACCEPTED, _REFUSED = range(len(OUTCOMES))

# Rollouts and passages in a part: some hundred kB of text, so that one is there in a moment.
_ROLLOUTS, _PASSAGES = 64, 512

# What a search brought, in episodes that are only a text.
_OBSERVATION = re.compile(
    r"<(information|tool_response)>.*?(?:</\1>|$)|<\|im_start\|>user.*?<\|im_start\|>assistant\n?",
    re.DOTALL,
)

# Fields that the page shows in a way of their own; all others are shown by their names.
_KNOWN = frozenset(
    "version step iteration role kind mode id task group question golden_answers hops evidence "
    "turns text answer em f1 reward reward_parts advantage finish searches duplicates queries "
    "chain reason label log_likelihoods valid why source".split()
)


def main(config: Any, workdir: str | None, values: flags.FlagValues) -> None:
    if config is not None:
        raise UserError("a viewer has no config; name a file of rollouts or a run.")
    if values.rollouts and workdir:
        raise UserError("both --rollouts and --workdir are given; name one file or run.")
    where = values.rollouts or workdir
    if not where:
        raise UserError("name a file of rollouts or a run: python -m zest_jax.view runs/smoke.")
    if values.most < 1:
        raise UserError("--most is 1 or more.")
    out = Path(values.out)
    check_writable(out)
    lines, total = read(where, values.most)
    page = render(lines, where, total)
    write_atomically(out, page)
    shown = f"{len(lines):,}" if len(lines) == total else f"the last {len(lines):,} of {total:,}"
    print(f"{shown} rollouts in {out} ({len(page) / 1e6:.1f} MB); open it in a browser.")


def read(where: str, most: int) -> tuple[list[dict[str, Any]], int]:
    """The last `most` rollouts of a file or of a run, and how many there are.

    A run's evaluations come first, then what was sampled in training, by step.

    Raises:
      UserError: there is no such place, or it holds none.
    """
    place = Path(where)
    if not place.is_dir():
        if not place.exists():
            raise UserError(f"{where}: there is no such file or run.")
        files = [(place, "")]
    else:
        files = [(path, path.stem) for path in sorted(place.glob("evaluation/*.jsonl"))]
        files += [(place / "rollouts" / name, "training") for name in traces.FILES]
        files = [(path, source) for path, source in files if path.exists()]
        if not files:
            raise UserError(
                f"{where} has neither evaluation/ nor rollouts/; name a run's folder or a file."
            )
    kept: deque[dict[str, Any]] = deque(maxlen=most)
    sampled: deque[dict[str, Any]] = deque()
    total = 0
    for path, source in files:
        newest: deque[dict[str, Any]] = deque(maxlen=most)
        for line in _lines(path):
            total += 1
            newest.append({**line, "source": source} if source else line)
        (sampled if source == "training" else kept).extend(newest)
    kept.extend(sorted(sampled, key=lambda line: _number(line.get("step")) or 0))
    if not kept:
        raise UserError(f"{where}: there is no rollout in it yet.")
    return list(kept), total


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Rollouts of a file. A torn last line, as a kill leaves it, is ignored.

    Raises:
      UserError: a line is no rollout.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                if not text.endswith("\n"):
                    return
                if number == 1:
                    raise UserError(
                        f"{path} is no file of rollouts or answers, a JSON object a line; name one."
                    ) from None
                raise UserError(f"{path}, line {number} is not JSON; remove the line.") from None
            if not isinstance(line, dict) or not {"question", "text", "turns"} & line.keys():
                raise UserError(
                    f"{path}, line {number} is no rollout: it is no object with a question, a "
                    "text or turns."
                )
            yield line


# ------------------------------------------------------------------------------------ the page


def render(lines: Sequence[Mapping[str, Any]], title: str, total: int | None = None) -> str:
    """The page.

    Args:
      lines: rollouts.
      title: where they come from.
      total: how many there were, if these are not all.
    """
    held = Pages(lines)
    index = held.index | {"title": title, "total": len(lines) if total is None else total}
    environment = pages.environment()
    assert environment.loader is not None
    script = environment.loader.get_source(environment, "view.js")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    blobs = [("index", _packed(index))]
    blobs += [(f"rollouts-{i}", part) for i, part in enumerate(_parts(held.details, _ROLLOUTS))]
    blobs += [(f"passages-{i}", part) for i, part in enumerate(_parts(held.passages, _PASSAGES))]
    return environment.get_template("view.html.j2").render(
        title=title.encode("utf-8", "replace").decode(),
        script=Markup(script),
        digest=digest,
        blobs=blobs,
        version=zest_jax.__version__,
    )


class Pages:
    """Rollouts as the page holds them.

    Attributes:
      index: columns over all rollouts: what lists, filters and sorts them.
      details: of each rollout, what is shown of it alone.
      passages: [id, title, text] of each passage, once.
    """

    def __init__(self, lines: Sequence[Mapping[str, Any]]):
        self.details: list[dict[str, Any]] = []
        self.passages: list[list[str]] = []
        self._places: dict[tuple[str, ...], int] = {}
        questions, groups = _Numbers(), _Numbers()
        sources = _Numbers()
        columns: dict[str, list[Any]] = {
            name: []
            for name in "question answer outcome role hops step source group reward advantage "
            "searches em f1".split()
        }
        for line in lines:
            role = role_of(line)
            question = _text(line.get("question"))
            source = " ".join(
                part for part in (_text(line.get("source")), _text(line.get("mode"))) if part
            )
            asked = _text(line.get("task")) or _text(line.get("id")) or question
            group = line.get("group")
            # Without a group on record the answers to one question are compared.
            key = (source, role, line.get("step"), asked if group is None else group)
            row: dict[str, Any] = {
                "question": questions[question],
                "answer": _text(line.get("answer")),
                "outcome": outcome_of(line),
                "role": role,
                "source": sources[source],
                "group": groups[repr(key)],
            }
            for name, column in columns.items():
                column.append(row[name] if name in row else _number(line.get(name)))
            self.details.append(self._detail(line))
        members: dict[int, set[int | None]] = {}
        for number, outcome in zip(columns["group"], columns["outcome"], strict=True):
            members.setdefault(number, set()).add(outcome)
        mixed = sorted(number for number, of in members.items() if is_mixed(of))
        self.index = {
            "count": len(lines),
            "rollouts": _ROLLOUTS,
            "passages": _PASSAGES,
            "outcomes": OUTCOMES,
            "questions": list(questions),
            "sources": list(sources),
            "mixed": mixed,
            "columns": columns,
        }

    def _detail(self, line: Mapping[str, Any]) -> dict[str, Any]:
        detail: dict[str, Any] = {"id": _text(line.get("id"))}
        for name in ("task", "finish", "reason", "why", "label"):
            if text := _text(line.get(name)):
                detail[name] = text
        for name in ("golden_answers", "evidence", "chain"):
            if texts := _texts(line.get(name)):
                detail[name] = texts
        for name in ("iteration", "queries", "duplicates"):
            if (number := _number(line.get(name))) is not None:
                detail[name] = number
        for name in ("reward_parts", "log_likelihoods"):
            pairs = line.get(name)
            if isinstance(pairs, Mapping) and pairs:
                detail[name] = [[_text(key), _number(value)] for key, value in pairs.items()]
        more = [
            [_text(key), value if isinstance(value, (bool, int, str)) else _number(value)]
            for key, value in line.items()
            if key not in _KNOWN and isinstance(value, (bool, int, float, str)) and value != ""
        ]
        if more:
            detail["more"] = more
        turns = line.get("turns")
        if isinstance(turns, list):
            detail["turns"] = [self._turn(turn) for turn in turns if isinstance(turn, Mapping)]
        else:
            detail["turns"] = plain_turns(_text(line.get("text")))
        return detail

    def _turn(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {"by": _text(turn.get("by"))}
        for name in ("action", "text", "hex"):
            if text := _text(turn.get(name)):
                out[name] = text
        if isinstance(turn.get("queries"), list):
            out["queries"] = _texts(turn["queries"])
        sizes, logps = turn.get("sizes"), turn.get("logps")
        if isinstance(sizes, list) and isinstance(logps, list) and len(sizes) == len(logps):
            out["sizes"] = [int(_number(size) or 0) for size in sizes]
            out["logps"] = [_thousandths(_number(logp)) for logp in logps]
        found = turn.get("passages")
        if isinstance(found, list):
            out["passages"] = [self._found(each) for each in found if isinstance(each, Mapping)]
        return out

    def _found(self, found: Mapping[str, Any]) -> list[Any]:
        """[place of the passage, query, score, gold, holds the answer]; gold null if unknown."""
        key = (_text(found.get("id")), _text(found.get("title")), _text(found.get("text")))
        place = self._places.setdefault(key, len(self.passages))
        if place == len(self.passages):
            self.passages.append(list(key))
        gold = found.get("gold")
        return [
            place,
            int(_number(found.get("query")) or 0),
            _number(found.get("score")),
            None if gold is None else int(bool(gold)),
            int(bool(found.get("holds_answer"))),
        ]


class _Numbers(dict[str, int]):
    """Numbers for texts, from 0 in the order in which they are first seen."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


# ------------------------------------------------------------------------------- what a line is


def role_of(line: Mapping[str, Any]) -> int:
    """0 for a solver's rollout, 1 for a proposer's."""
    return int(line.get("role") == "proposer" or line.get("kind") == "proposal")


def outcome_of(line: Mapping[str, Any]) -> int | None:
    """The number of a rollout's outcome in `OUTCOMES`; None where the line does not tell."""
    finish = _text(line.get("finish"))
    forced = finish in FORCED
    if role_of(line):
        if forced:
            return _FORCED
        # Older lines say so in a label.
        reason = line.get("reason", line.get("label"))
        if reason is None:
            return None
        return _ACCEPTED if reason in ("", "passed the gates") else _REFUSED
    if forced:
        return _FORCED
    em = _number(line.get("em"))
    if line.get("answer") is None and ("answer" in line or finish):
        return _NO_ANSWER
    return None if em is None else (_RIGHT if em >= 1 else _WRONG)


def is_mixed(outcomes: set[int | None]) -> bool:
    """Whether a group has rollouts that went well and others that did not."""
    good = outcomes & {_RIGHT, _ACCEPTED}
    return bool(good and outcomes & {_WRONG, _NO_ANSWER, _FORCED, _REFUSED})


def plain_turns(text: str) -> list[dict[str, str]]:
    """The turns of an episode that is only a text: observations are known by their tags."""
    out, at = [], 0
    for match in _OBSERVATION.finditer(text):
        out.append({"by": "policy", "text": text[at : match.start()]})
        out.append({"by": "tool", "text": match[0]})
        at = match.end()
    out.append({"by": "policy", "text": text[at:]})
    return [turn for turn in out if turn["text"]]


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _texts(value: Any) -> list[str]:
    if isinstance(value, list):
        return [_text(each) for each in value]
    return [] if value is None else [_text(value)]


def _number(value: Any) -> float | None:
    """A number as it is; None for everything else, since a page has no use for NaN."""
    if isinstance(value, bool):
        return int(value)
    # Too large for a float: no number of a rollout is.
    if not isinstance(value, (int, float)) or abs(value) > 1e300 or not math.isfinite(value):
        return None
    return value


def _thousandths(logp: float | None) -> int | None:
    """Minus the log-probability in thousandths, to a hundredth beyond a tenth: 1 % of the
    probability. Whole numbers, few of them different, compress well."""
    if logp is None:
        return None
    return round(-1000 * logp) if logp > -0.1 else 10 * round(-100 * logp)


# ------------------------------------------------------------------------------------ packing


def _parts(items: Sequence[Any], size: int) -> Iterator[str]:
    for at in range(0, len(items), size):
        yield _packed(items[at : at + size])


def _packed(value: Any) -> str:
    """JSON, compressed, in letters that mean nothing to HTML."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Half a surrogate pair has no UTF-8; in strings, and it can stand nowhere else, JSON spells it.
    text = re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)
    # Without the time of day: the same rollouts make the same page.
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("rollouts", "", "a file of rollouts or a run; may stand bare", values)
    flags.DEFINE_string("out", "rollouts.html", "the page that is written", values)
    flags.DEFINE_integer("most", 10_000, "rollouts shown at the most", flag_values=values)


entry = cli.program(
    main, define=define, needs_config=False, needs_workdir=False, arguments=("rollouts",)
)

if __name__ == "__main__":
    sys.exit(entry())
