"""The figures of an evaluation as text."""

from collections.abc import Mapping, Sequence
from typing import Any

from zest_jax import compare
from zest_jax.columns import in_columns
from zest_jax.datasets import BENCHMARKS

COLUMNS = {  # of the figures: key, title, digits
    "em": ("EM", 3),
    "f1": ("F1", 3),
    "cover_em": ("cover-EM", 3),
    "valid": ("valid", 3),
    "searches": ("searches", 2),
    "duplicate_queries": ("repeated", 2),
    "forced_stops": ("forced", 3),
    "written": ("written", 0),
    "tokens": ("tokens", 0),
}
LEGEND = (
    "cover-EM: an accepted answer stands in the answer; valid: a complete answer was given; "
    "repeated: queries asked before in the episode; forced: ended by a limit, not by the solver; "
    "written, tokens: of an episode, by the policy and in all"
)


def title_of(benchmark: str) -> str:
    """A benchmark's name as papers write it."""
    known = BENCHMARKS.get(benchmark)
    return known.title if known else benchmark or "questions"


def whole(told: Mapping[str, Any], shown: int = 10) -> str:
    """Everything that is told of an evaluation (`evaluate.main`), as text."""
    s = told["settings"]
    how = f"temperature {s['temperature']:g}" if s["temperature"] else "greedy"
    how += f", {s['samples']} samples, seed {s['seed']}" if s["samples"] > 1 else ""
    searched = f"{s['index']}, top {s['top_k']}" if s["index"] else "nothing"
    parts = [
        f"solver: {s['solver']}\nprotocol: {s['protocol']}, {how}\nsearches: {searched}",
        *told["notes"],
        in_columns(rows(told), "lr"),
    ]
    if hops := hop_rows(told):
        parts.append(in_columns(hops, "lr"))
    ends = ", ".join(f"{name} {count:,}" for name, count in told["finish"].items())
    parts.append(f"episodes ended: {ends}")
    if told["published"]:
        parts.append(in_columns(published_rows(told), "lr"))
    if told["comparison"]:
        parts += _comparison(told["comparison"], shown)
    return "\n\n".join([*parts, LEGEND])


def rows(told: Mapping[str, Any]) -> list[list[str]]:
    """The table of benchmarks, its head first; the average last where there are several."""
    each = [(title_of(name), row) for name, row in told["benchmarks"].items()]
    if len(each) > 1:
        each.append(("average (unweighted)", told["average"]))
    return _rows(each, "benchmark", told["samples"])


def hop_rows(told: Mapping[str, Any]) -> list[list[str]]:
    """The table of hops, its head first; [] where no question tells, or all tell the same."""
    each = told["by_hop"]
    if len(each) == 1 and next(iter(each.values()))["count"] == told["questions"]:
        return []
    return _rows(each.items(), "hops", told["samples"]) if each else []


def published_rows(told: Mapping[str, Any]) -> list[list[str]]:
    """What papers have published beside ours, a column a benchmark; the head first."""
    names = list(told["benchmarks"])
    head = ["as published, EM or F1", *map(title_of, names), "average", "measured with"]
    out = [head]
    for metric in dict.fromkeys(row["metric"] for row in told["published"]):
        ours = [told["benchmarks"][name][metric] for name in names]
        label = {"em": "EM", "f1": "F1"}[metric]
        average = told["average"][metric] if len(names) > 1 else None
        out.append([f"ours, {label}", *_cells(ours), _cell(average), told["settings"]["index"]])
        for row in (r for r in told["published"] if r["metric"] == metric):
            who = ", ".join(filter(None, (row["system"], row["backbone"])))
            cells = [row["scores"].get(name) for name in names]
            told_by = f"{row['source']}: {who} (published {label})"
            out.append([told_by, *_cells(cells), _cell(row["average"]), row["note"]])
    return out


def _rows(each: Any, name: str, samples: int) -> list[list[str]]:
    each = list(each)
    titles = [title for title, _ in COLUMNS.values()]
    passes = [k for k in (each[0][1].get("pass") or ()) if k != "1"]
    several = ["majority", *(f"pass@{k}" for k in passes)] if samples > 1 else []
    table = [[name, "questions", "EM", "95 %", *titles[1:3], *several, *titles[3:]]]
    for title, row in each:
        cells = [_cell(row[key], digits) for key, (_, digits) in COLUMNS.items()]
        low, high = row["em_ci95"]
        more = [_cell(row["majority"]), *(_cell(row["pass"][k]) for k in passes)] if several else []
        interval = f"{low:.3f}–{high:.3f}"
        count = f"{row['count']:,}"
        table.append([title, count, cells[0], interval, *cells[1:3], *more, *cells[3:]])
    return table


def _comparison(comparison: Mapping[str, Any], shown: int) -> list[str]:
    parts = [f"before: {comparison['before']}\n{compare.table(comparison)}"]
    for name in ("rescued", "regressed"):
        lines = compare.questions(comparison[name]["questions"], shown)
        parts.append("\n  ".join([f"{name}: {comparison[name]['count']:,}", *lines]))
    return parts


def _cells(values: Sequence[float | None]) -> list[str]:
    return [_cell(value) for value in values]


def _cell(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
