"""How good written questions are: leakage, validity and hops (the shape of ZEST-Search's Table 3).

In a world whose facts are known, a question can be read back: `Oracle` takes it apart by the
phrases that the world asks with. Elsewhere only leakage is known without a judge;
`zest_jax.audit` asks a model.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from zest_jax.columns import in_columns
from zest_jax.tasks.atlas import Atlas
from zest_jax.tasks.evidence_paths import Aliases
from zest_jax.tasks.gates import leaks_answer
from zest_jax.tasks.seeds import Proposal


class Oracle:
    """Reads questions of the form "What is the capital of the country of Lyon?".

    Args:
      atlas: facts, and the phrases that ask for its relations.
    """

    def __init__(self, atlas: Atlas):
        self._graph = atlas.graph
        rows = {key: row for row, key in enumerate(self._graph.entity_ids)}
        self._rows = rows
        self._aliases = Aliases((key, self._graph.names(row)) for key, row in rows.items())
        self._phrases: list[tuple[int, str, str]] = []
        for relation, phrases in enumerate(atlas.phrases):
            for phrase in phrases:
                before, after = phrase.split("{}")
                self._phrases.append((relation, before, after))

    def hops(self, question: str, answers: Sequence[str]) -> int:
        """Facts that lead from the question's entity to the answer; 0 where the question is not of
        the form, or the facts lead elsewhere or to several entities.

        Where a question can be read in two ways, the shorter one that is right counts.
        """
        asked = re.fullmatch(r"\s*What is (.+)\?\s*", question)
        if asked is None:
            return 0
        wanted = {self._aliases.id_of(name) for name in answers}
        right = [
            len(relations)
            for entity, relations in self._readings(asked.group(1))
            if self._reached(entity, relations) in wanted
        ]
        return min(right, default=0)

    def _readings(self, phrase: str) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(entity, relations in the order of the walk) of every way to read a phrase."""
        if self._aliases.known(phrase):
            yield self._rows[self._aliases.id_of(phrase)], ()
        for relation, before, after in self._phrases:
            inner = phrase.removeprefix(before).removesuffix(after)
            if inner and f"{before}{inner}{after}" == phrase:
                for entity, relations in self._readings(inner):
                    yield entity, (*relations, relation)

    def _reached(self, entity: int, relations: Sequence[int]) -> str:
        """Id of the one entity at the end of a walk; "" where it parts or ends before."""
        if not relations:
            return ""
        for relation in relations:
            tails = self._graph.tails_of(entity, relation)
            if len(tails) != 1:
                return ""
            entity = tails[0]
        return self._graph.entity_ids[entity]


@dataclasses.dataclass(frozen=True)
class Quality:
    """What was found of written questions.

    Attributes:
      questions: that could be read, whether or not a gate refused them.
      leaking: of those, questions that name their answer.
      valid: valid questions by hops; None where nobody can tell.
    """

    questions: int
    leaking: int
    valid: dict[int, int] | None

    def to_json(self) -> dict[str, Any]:
        """Shares in per cent; hop shares are among valid questions."""
        out: dict[str, Any] = {
            "questions": self.questions,
            "answer_leakage": _percent(self.leaking, self.questions),
        }
        if self.valid is not None:
            count = sum(self.valid.values())
            out["valid"] = _percent(count, self.questions)
            for hops in range(1, max(3, *self.valid, 0) + 1):
                out[f"{hops}_hop"] = _percent(self.valid.get(hops, 0), count)
        return out

    def table(self) -> str:
        """One metric a line."""
        rows = [("metric", "")]
        for name, value in self.to_json().items():
            shown = "-" if value is None else f"{value:.1f} %"
            if name == "questions":
                shown = str(value)
            rows.append((name.replace("_", " ").replace(" hop", "-hop"), shown))
        return in_columns(rows)


def quality(proposed: Sequence[Proposal], oracle: Oracle | None) -> Quality:
    """Of all proposals with a question and an answer to ask for.

    Args:
      proposed: judged; refused ones count as well, since gates hide what a proposer is like.
      oracle: of the world; None where its facts are not known.
    """
    written = [p.written for p in proposed if p.written.question is not None and p.written.answers]
    leaking = sum(leaks_answer(w.question or "", w.answers) for w in written)
    if oracle is None:
        return Quality(len(written), leaking, None)
    hops = collections.Counter(oracle.hops(w.question or "", w.answers) for w in written)
    del hops[0]
    return Quality(len(written), leaking, dict(hops))


def _percent(part: int, of: int) -> float | None:
    return 100 * part / of if of else None
