"""The figures of an evaluation as one HTML page that needs no network."""

from collections.abc import Mapping
from typing import Any

import zest_jax
from zest_jax import compare, pages
from zest_jax import evaluation_tables as tables


def render(told: Mapping[str, Any]) -> str:
    """The page of `evaluate.main`'s figures; or, with "comparison" alone, of `compare.main`'s."""
    full = "benchmarks" in told
    comparison = told["comparison"]
    return (
        pages.environment()
        .get_template("evaluation.html.j2")
        .render(
            title=f"Evaluation of {told['settings']['solver']}" if full else "Two evaluations",
            settings=told["settings"] if full else {},
            notes=told["notes"] if full else [],
            table=tables.rows(told) if full else [],
            hops=tables.hop_rows(told) if full else [],
            finish=told["finish"] if full else {},
            published=tables.published_rows(told) if full and told["published"] else [],
            comparison=comparison,
            compared=compare.rows(comparison) if comparison else [],
            by_benchmark=_by_benchmark(comparison) if comparison else [],
            legend=tables.LEGEND,
            version=zest_jax.__version__,
        )
    )


def _by_benchmark(comparison: Mapping[str, Any]) -> list[list[str]]:
    """Exact match and searches of both sides, by benchmark; [] where there is only one."""
    sets = comparison["by_benchmark"]
    if len(sets) < 2:
        return []
    out = [["benchmark", "questions", "EM before", "after", "F1 before", "after"]]
    for name, each in sets.items():
        numbers = [f"{value:.3f}" for figure in ("em", "f1") for value in each[figure]]
        out.append([tables.title_of(name), f"{each['count']:,}", *numbers])
    return out
