"""What papers have published of the seven benchmarks, to stand beside an evaluation of ours.

A number is shown for a benchmark only where all of its questions were answered that the paper asks,
an average only where that holds for all seven; none enters our means. Whether retrieval and corpus
are the same is not known to the program, so each row says what it was measured with. Left out are
numbers that were not found in a paper, its code or a transcript of its tables: those of Dr. Zero by
benchmark.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zest_jax.datasets import BENCHMARKS

SEVEN = tuple(BENCHMARKS)
"""In the order of the papers' tables."""

_EVIBACK_SAMPLE = 3_500


@dataclasses.dataclass(frozen=True)
class Published:
    """A row of a paper's table.

    Attributes:
      source: the paper.
      system: the row.
      backbone: the policy; "" where the source does not name it.
      metric: em or f1.
      scores: share of each benchmark, 0 to 1; {} where only the average is published.
      average: of all seven.
      note: what a reader must know of the numbers.
      questions: of the whole evaluation: the published splits, or a sample of them.
    """

    source: str
    system: str
    backbone: str
    metric: str
    scores: Mapping[str, float]
    average: float
    note: str = ""
    questions: int = 51_713


def _table(
    source: str, note: str, lines: list[tuple[str, str, str]], scale: float
) -> tuple[Published, ...]:
    """Rows of (system, backbone, "seven scores and their mean")."""
    rows = []
    for system, backbone, text in lines:
        *scores, average = (round(float(x) * scale, 4) for x in text.split())
        by_name = dict(zip(SEVEN, scores, strict=True))
        rows.append(Published(source, system, backbone, "em", by_name, average, note))
    return tuple(rows)


SEARCH_R1 = _table(
    "Search-R1 (arXiv 2503.09516)",
    "E5-base-v2 over Wiki-18, top 3",
    [
        ("RAG, untrained", "7B", ".349 .585 .392 .299 .235 .058 .208 .304"),
        ("PPO", "7B-base", ".480 .638 .457 .433 .382 .196 .432 .431"),
        ("PPO", "7B-instruct", ".393 .610 .397 .370 .414 .146 .368 .385"),
        ("GRPO", "7B-base", ".395 .560 .388 .326 .297 .125 .360 .350"),
        ("GRPO", "7B-instruct", ".429 .623 .427 .386 .346 .162 .400 .396"),
        ("PPO", "3B-base", ".406 .587 .435 .284 .273 .049 .088 .303"),
        ("PPO", "3B-instruct", ".341 .545 .378 .324 .319 .103 .264 .325"),
        ("GRPO", "3B-base", ".421 .583 .413 .297 .274 .066 .128 .312"),
        ("GRPO", "3B-instruct", ".397 .565 .391 .331 .310 .124 .232 .336"),
    ],
    1.0,
)
ZEST_SEARCH = _table(
    "ZEST-Search",
    "metric not named there, exact match by convention; retrieval not known",
    [
        ("base", "3B-base", "16.7 30.7 17.8 12.4 7.2 2.3 6.4 13.4"),
        ("ours", "3B-base", "36.0 57.0 38.2 26.0 25.4 5.3 7.2 27.9"),
        ("base", "7B-base", "25.8 43.3 28.3 15.8 9.2 6.4 24.1 21.8"),
        ("ours", "7B-base", "37.1 61.9 40.3 34.7 31.8 11.7 32.0 35.6"),
        ("ours, 3 hops", "7B-base", "40.2 64.5 43.8 36.3 35.4 12.0 35.2 38.2"),
        ("frozen proposer", "7B-base", "40.5 61.5 42.6 32.8 29.4 9.1 20.0 33.7"),
    ],
    0.01,
)
DR_FREE = tuple(
    Published(
        "Dr. Free (arXiv 2609.33565)", system, "", "em", {}, average,
        "E5-base-v2 over Wiki-18; backbone not known",
    )
    for system, average in (
        ("full", 0.375),
        ("no proposer optimisation", 0.306),
        ("difficulty reward only", 0.343),
        ("gain and difficulty", 0.340),
        ("no knowledge graph", 0.335),
    )
)  # fmt: skip
EVIBACK = tuple(
    Published(
        "EviBack (arXiv 2607.23955)", system, f"Qwen3-{size}", "f1", {}, average,
        "3,500 questions of the seven, shows 5 passages", _EVIBACK_SAMPLE,
    )
    for system, size, average in (
        ("Search-R1", "0.6B", 0.2431), ("EviBack", "0.6B", 0.2490),
        ("Search-R1", "1.7B", 0.2509), ("EviBack", "1.7B", 0.2911),
        ("Search-R1", "4B", 0.4044), ("EviBack", "4B", 0.4177),
    )
)  # fmt: skip

ROWS = (*SEARCH_R1, *ZEST_SEARCH, *DR_FREE, *EVIBACK)


def comparable(counts: Mapping[str, int]) -> list[dict[str, Any]]:
    """The published numbers whose setting is that of an evaluation, as JSON.

    Args:
      counts: questions answered of each benchmark.

    Returns:
      Of each row that has any such number: "source", "system", "backbone", "metric", "note",
      "scores" (of the benchmarks that were answered whole) and "average" (None unless all were).
    """
    whole = [
        name for name in SEVEN
        if counts.get(name) == BENCHMARKS[name].rows[BENCHMARKS[name].evaluated]
    ]  # fmt: skip
    out = []
    for row in ROWS:
        scores = {name: row.scores[name] for name in whole if name in row.scores}
        if row.questions == _EVIBACK_SAMPLE:
            same = _is_eviback_sample(counts)
        else:
            same = len(whole) == len(SEVEN) == len(counts)
        average = row.average if same else None
        if scores or average is not None:
            out.append(
                {
                    "source": row.source,
                    "system": row.system,
                    "backbone": row.backbone,
                    "metric": row.metric,
                    "note": row.note,
                    "scores": scores,
                    "average": average,
                }
            )
    return out


def _is_eviback_sample(counts: Mapping[str, int]) -> bool:
    """562 or 563 questions of each set, Bamboogle whole, 3,500 in all."""
    sizes = (*(counts.get(name) for name in SEVEN if name != "bamboogle"),)
    return (
        len(counts) == len(SEVEN)
        and counts.get("bamboogle") == 125
        and set(sizes) <= {562, 563}
        and sum(counts.values()) == _EVIBACK_SAMPLE
    )
