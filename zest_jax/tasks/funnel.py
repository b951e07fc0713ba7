"""How many references, targets, paths and questions got through each stage, and why others fell."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from zest_jax.columns import in_columns

STAGES = ("target", "support", "path", "question")
"""Names of the stages, in order: format and entity filter, retrieval support, path, static QA."""

TITLES = {
    "target": "target format and entity filter",
    "support": "retrieval-support verification",
    "path": "evidence-path construction",
    "question": "static QA verification",
}


@dataclasses.dataclass
class Funnel:
    """Counts of one or many batches; batches add up.

    Attributes:
      reasons: per stage, how often each verdict was given; "" is a pass.
      tried: verdicts of single candidate paths.
      seconds: spent in each stage.
    """

    reasons: dict[str, Counter[str]] = dataclasses.field(
        default_factory=lambda: {stage: Counter() for stage in STAGES}
    )
    tried: Counter[str] = dataclasses.field(default_factory=Counter)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, stage: str, reasons: Iterable[str]) -> None:
        """Counts verdicts of a stage by their reasons, "" for those that passed."""
        self.reasons[stage].update(reasons)

    def turn_back(self, stage: str, reason: str, count: int) -> None:
        """Makes refusals of what a stage had let pass."""
        if count:
            self.reasons[stage][""] -= count
            self.reasons[stage][reason] += count

    def took(self, stage: str, seconds: float) -> None:
        """Adds to the time of a stage."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    def __add__(self, other: "Funnel") -> "Funnel":
        return Funnel(
            {stage: self.reasons[stage] + other.reasons[stage] for stage in STAGES},
            self.tried + other.tried,
            {
                stage: self.seconds.get(stage, 0.0) + other.seconds.get(stage, 0.0)
                for stage in STAGES
            },
        )

    def entered(self, stage: str) -> int:
        return self.reasons[stage].total()

    def passed(self, stage: str) -> int:
        return self.reasons[stage][""]

    def metrics(self, prefix: str) -> dict[str, float]:
        """Share that passed each stage, of what came to it; stages that nothing came to are left
        out."""
        return {
            f"{prefix}/passed_{stage}": self.passed(stage) / self.entered(stage)
            for stage in STAGES
            if self.entered(stage)
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "stages": {
                stage: {
                    "entered": self.entered(stage),
                    "passed": self.passed(stage),
                    "refused": {k: n for k, n in self.reasons[stage].most_common() if k},
                }
                for stage in STAGES
            },
            "candidate_paths": {k or "valid": n for k, n in self.tried.most_common()},
            "seconds": dict(self.seconds),
        }

    def table(self) -> str:
        """Passed / entered and rate of each stage (the shape of ZEST-Search's Table 6), with the
        commonest refusals."""
        rows = [("stage", "passed", "rate", "refused for")]
        begun = next((stage for stage in STAGES if self.entered(stage)), "target")
        for stage in STAGES[STAGES.index(begun) :]:
            rows.append((TITLES[stage], *self._rate(self.passed(stage), self.entered(stage)),
                         _commonest(self.reasons[stage])))  # fmt: skip
            if stage == "support":
                whole = self._rate(self.passed("support"), self.entered("target"))
                rows.append(("  overall target validation", *whole, ""))
        final = self._rate(self.passed("question"), self.entered(begun))
        rows.append(("final", *final, ""))
        return in_columns(rows)

    def times(self) -> str:
        """Seconds of each part, in all and per accepted question (the shape of Table 7)."""
        accepted = max(self.passed("question"), 1)
        target, support, path, question = (self.seconds.get(stage, 0.0) for stage in STAGES)
        parts = {
            "target generation and validation": target + support,
            "evidence-path construction": path,
            "question generation and static verification": question,
        }
        parts["total"] = sum(parts.values())
        rows = [("part", "seconds", "per task")]
        rows += [(name, f"{s:.2f}", f"{s / accepted:.3f}") for name, s in parts.items()]
        return in_columns(rows)

    @staticmethod
    def _rate(passed: int, of: int) -> tuple[str, str]:
        return f"{passed}/{of}", f"{100 * passed / of:.1f} %" if of else "-"


def _commonest(reasons: Mapping[str, int], most: int = 3) -> str:
    refused = sorted(((n, r) for r, n in reasons.items() if r), reverse=True)
    return ", ".join(f"{reason} {count}" for count, reason in refused[:most])
