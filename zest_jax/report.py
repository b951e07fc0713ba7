"""The end of a run: report.json for programs, report.html for people (one file, no network).

`write_report` takes three things: a summary, the metrics and some traces.

Summary: a nested dict; `REQUIRED` lists what must be in it. Further keys go into report.json as
they are. Some are shown: "title", "notes" (sentences), "warnings" (of `guards.Warned`) and, under
heldout.before and heldout.after, "f1", "valid", "em_sampled" and "by_hop" ({"1": {"em", "f1",
"searches", "valid", "count"}, …}); and "behaviour" (`behaviour.compare`). Where the metrics speak
of a teacher, "teacher" is added to it (`teachers.evidence.totals`).

Traces, either of (all but "kind" may be missing):
  {"kind": "solver", "label": "after iteration 2", "question", "golden_answers": […], "answer",
   "em": 0 or 1, "hops", "text": the episode with its tags}
  {"kind": "proposal", "label", "chain": [entity, relation, entity, …], "question", "answer",
   "hops", "reward", "reward_parts": {name: number}, "log_likelihoods": {context: number},
   "text": the proposer's words with their tags}
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from markupsafe import Markup

import zest_jax
from zest_jax import charts, pages
from zest_jax.teachers.evidence import totals
from zest_jax.workdir import Workdir

REQUIRED = (
    "heldout.before.em",
    "heldout.after.em",
    "heldout.gain_ci95",
    "heldout.before.searches",
    "heldout.after.searches",
    "wall_seconds",
    "device",
    "retraces",
    "config_hash",
)

# A tag of an episode or a proposal; one that a length limit cut off ends with the text.
_TURN = re.compile(
    r"<(think|search|information|question|answer)>(.*?)(?:</\1>|(?=<(?:think|search|information|"
    r"question|answer)>)|$)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Chart:
    """What is drawn together: metric keys (with * for any text), in this order."""

    title: str
    keys: tuple[str, ...]
    note: str = ""


CHARTS = (
    Chart(
        "Held-out exact match", ("eval/em", "eval/em_hop*", "eval/em_sampled"), "never trained on"
    ),
    Chart("Reward", ("solver/reward", "proposer/reward"), "mean over the batch"),
    Chart(
        "Exact match in training", ("solver/em", "solver/em_hop*"), "on the proposer's questions"
    ),
    Chart("Searches per question", ("solver/searches", "solver/searches_hop*", "eval/searches")),
    Chart(
        "Valid share", ("solver/valid", "proposer/valid", "eval/valid"), "well-formed and answered"
    ),
    Chart(
        "Groups",
        ("solver/groups_mixed", "solver/groups_all_right", "solver/groups_all_wrong"),
        "only mixed groups teach the solver",
    ),
    Chart("Proposer reward by hop", ("proposer/reward_hop*",)),
    Chart("Parts of the proposer's reward", ("proposer/term_format", "proposer/term_*")),
    Chart(
        "Difficulty reward by hop",
        ("proposer/difficulty", "proposer/difficulty_hop*"),
        "the curve at the solver's success, of the proposals that it was asked",
    ),
    Chart(
        "Why proposals were refused", ("proposer/refused_*",), "share of the batch, first refusal"
    ),
    Chart("Leakage", ("proposer/leakage", "generate/leakage"), "the answer stands in the question"),
    Chart("Proposer's searches", ("proposer/searches", "proposer/searches_hop*")),
    Chart(
        "Information gain by hop",
        ("proposer/gain_hop*",),
        "nats per answer token over the best shortcut",
    ),
    Chart("Format score by hop", ("proposer/format_hop*",)),
    Chart("Grounded share", ("proposer/grounded", "proposer/grounded_hop*")),
    Chart(
        "Answer log-likelihood by context",
        ("proposer/loglik_*",),
        "of the frozen anchor, per answer token",
    ),
    Chart(
        "Answerable by context",
        ("proposer/answerable_*",),
        "share of the questions that the anchor answers from it; low is good for a shortcut",
    ),
    Chart(
        "Zero-search rate",
        (
            "solver/zero_search",
            "solver/zero_search_hop*",
            "proposer/zero_search",
            "eval/zero_search",
        ),
        "answers without looking anything up",
    ),
    Chart(
        "Answer in the source passage",
        ("proposer/answer_in_source", "generate/answer_in_source"),
        "share of multi-hop questions that the first passage gives away",
    ),
    Chart("Proposals accepted", ("generate/accepted", "generate/duplicates")),
    Chart(
        "Teacher",
        ("teacher/unanswered", "teacher/groups_left_out", "teacher/all_zero_groups"),
        "shares: asked and unanswered; groups left unpaid for it; groups in which nobody is right",
    ),
    Chart("Warm start", ("warm_start/loss", "warm_start/validation_em"), "behaviour cloning"),
    Chart("Loss", ("solver/loss", "proposer/loss")),
    Chart("Gradient norm", ("solver/grad_norm", "proposer/grad_norm")),
    Chart("KL to the sampling policy", ("solver/kl", "proposer/kl")),
    Chart("KL to the reference", ("solver/kl_to_reference", "proposer/kl_to_reference")),
    Chart("Entropy", ("solver/entropy", "proposer/entropy"), "nats per token"),
    Chart("Out of room", ("solver/hit_limit", "proposer/hit_limit"), "cut off by a length limit"),
    Chart("Tokens of an episode", ("solver/length", "proposer/length"), "written by the policy"),
    Chart(
        "Seconds of a step",
        ("time/step", "time/rollout", "time/update", "time/compile", "time/slowest_process"),
        "compiling is part of the rollout or the update that it was for",
    ),
)


def write_report(
    workdir: Workdir,
    summary: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    traces: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Writes report.json and report.html into a workdir.

    Args:
      workdir: the run's folder; its config.json is shown if it is there.
      summary: see the head of this file.
      metrics: records of `metrics.read_metrics`.
      traces: see the head of this file.

    Raises:
      KeyError: the summary lacks a required key.
    """
    for path in REQUIRED:
        value: Any = summary
        for part in path.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise KeyError(f"the report's summary lacks {path}")
            value = value[part]
    teacher = totals(metrics)
    plain = _plain(summary if teacher is None else {**summary, "teacher": teacher})
    text = json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    config = workdir.config_json.read_text("utf-8") if workdir.config_json.exists() else ""
    page = render(plain, metrics, traces, config)
    workdir.write(workdir.report_json.name, text)
    workdir.write(workdir.report_html.name, page)


def render(
    summary: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    traces: Sequence[Mapping[str, Any]],
    config: str = "",
) -> str:
    """The page."""
    environment = pages.environment()
    environment.filters["number"] = _number
    environment.filters["clock"] = _clock
    drawn, rest = draw(metrics)
    heldout = summary["heldout"]
    return environment.get_template("report.html.j2").render(
        summary=summary,
        before=heldout["before"],
        after=heldout["after"],
        low=heldout["gain_ci95"][0],
        high=heldout["gain_ci95"][1],
        hops=_by_hop(heldout),
        behaviour=summary.get("behaviour"),
        warnings=summary.get("warnings", []),
        teacher=summary.get("teacher"),
        charts=drawn,
        more_charts=rest,
        proposals=[_trace(each) for each in traces if each["kind"] == "proposal"],
        episodes=[_trace(each) for each in traces if each["kind"] == "solver"],
        config=config,
        version=zest_jax.__version__,
    )


def draw(metrics: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The charts of `CHARTS` for which there are numbers, and one for each other key."""
    points: dict[str, list[charts.Point]] = {}
    for record in sorted(metrics, key=lambda record: record["step"]):
        for key, value in record.items():
            if "/" in key and isinstance(value, (int, float)) and math.isfinite(value):
                points.setdefault(key, []).append((record["step"], value))
    # One axis for all, so that what happened at the same time stands at the same place; but a warm
    # start, which may be ten times as long, keeps to an axis of its own.
    cloned = {key for key in points if key.startswith("warm_start/")}
    spans = {is_cloning: _span(points, cloned, is_cloning) for is_cloning in (False, True)}

    drawn: list[dict[str, Any]] = []
    used: set[str] = set()
    for chart in CHARTS:
        keys = [
            key
            for pattern in chart.keys
            for key in sorted(points)
            if fnmatchcase(key, pattern) and key not in used
        ]
        if keys:
            used.update(keys)
            drawn.append(_chart(chart.title, chart.note, keys, points, spans[keys[0] in cloned]))
    rest = [
        _chart(key, "", [key], points, spans[key in cloned]) for key in sorted(points.keys() - used)
    ]
    return drawn, rest


def _span(
    points: Mapping[str, Sequence[charts.Point]], cloned: set[str], is_cloning: bool
) -> tuple[float, float]:
    """First and last step at which a metric of the warm start (or any other) was measured."""
    steps = [
        step for key, line in points.items() if (key in cloned) == is_cloning for step, _ in line
    ]
    return (min(steps), max(steps)) if steps else (0.0, 0.0)


def turns(text: str) -> list[tuple[str, str]]:
    """An episode's (kind, text) pieces in order; kind "other" is what stands outside all tags."""
    pieces, at = [], 0
    for match in _TURN.finditer(text):
        pieces.append(("other", text[at : match.start()]))
        pieces.append((match[1], match[2]))
        at = match.end()
    pieces.append(("other", text[at:]))
    return [(kind, piece.strip()) for kind, piece in pieces if piece.strip()]


def _chart(
    title: str,
    note: str,
    keys: Sequence[str],
    points: Mapping[str, Sequence[charts.Point]],
    span: tuple[float, float],
) -> dict[str, Any]:
    names = _names(keys)
    series = [charts.Series(name, points[key]) for name, key in zip(names, keys, strict=True)]
    svg: Markup = charts.line_chart(series, title, span)
    return {"title": title, "note": note, "svg": svg, "names": names if len(names) > 1 else []}


def _names(keys: Sequence[str]) -> list[str]:
    """Short names for a legend: without what all keys share before the last slash or underscore."""
    heads = {key.partition("/")[0] for key in keys}
    names = [key if len(heads) > 1 else key.partition("/")[2] for key in keys]
    first = names[0]
    cut = max(
        (
            i
            for i in range(len(first) + 1)
            if first[i - 1 : i] in "_/" and i and all(name.startswith(first[:i]) for name in names)
        ),
        default=0,
    )
    return [name[cut:].replace("_", " ").replace("/", " ") for name in names]


def _by_hop(heldout: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """(hop, before, after) rows of the table, if the summary has them."""
    before = heldout["before"].get("by_hop") or {}
    after = heldout["after"].get("by_hop") or {}
    hops = sorted(before.keys() | after.keys(), key=lambda hop: (len(hop), hop))
    return [(hop, before.get(hop) or {}, after.get(hop) or {}) for hop in hops]


def _trace(trace: Mapping[str, Any]) -> dict[str, Any]:
    names = "kind label question golden_answers answer em hops chain reward text".split()
    plain = {name: trace.get(name) for name in [*names, "reward_parts", "log_likelihoods"]}
    return {**plain, "turns": turns(plain["text"] or "")}


def _plain(value: Any) -> Any:
    """Only what JSON has: NumPy scalars as numbers, string keys, null for what is no number."""
    if isinstance(value, Mapping):
        return {str(key): _plain(below) for key, below in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _number(value: Any, digits: int = 3, sign: bool = False) -> str:
    if value is None or isinstance(value, str):
        return value or "–"
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    return text.replace("-", "−")


def _clock(seconds: float) -> str:
    seconds = int(seconds + 0.5)
    return f"{seconds // 60} min {seconds % 60:02} s" if seconds >= 60 else f"{seconds} s"
