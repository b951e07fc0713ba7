"""What a proposer is given, and what it wrote.

A *seed* is one thing to ask about: a chain, a document, an answer. A *written* proposal is the
seed with the proposer's words, queries and findings; a *proposal* has been judged as well.
"""

import dataclasses
from collections.abc import Mapping
from functools import cached_property

from zest_jax.tasks.gates import ParsedProposal
from zest_jax.tasks.types import Passage


@dataclasses.dataclass(frozen=True)
class Seed:
    """One thing to ask about.

    Attributes:
      id: unique within its source.
      source_id: what splits go by: the entity or document that the question starts from.
      hops: hops that are asked for; the group of HRPO.
      fields: what the placeholders of the proposer's prompt are filled with.
      passages: the evidence that is known before anything is written, in hop order: the passages
        of a chain's entities, or one document; () where the proposer has to find its own.
      answers: accepted names of the answer where it is known beforehand; () where the proposer
        claims one.
      words: the seed as people read it.
      chain_id: of a knowledge-graph chain; "" else.
      nodes: names of each entity on the way, from the question's first to the answer; () where no
        way is known.
    """

    id: str
    source_id: str
    hops: int
    fields: Mapping[str, str]
    passages: tuple[Passage, ...] = ()
    answers: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    chain_id: str = ""
    nodes: tuple[tuple[str, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Written:
    """What a proposer made of a seed.

    Attributes:
      seed: what it was given.
      output: everything after the prompt, observations included.
      turns: the proposer's own words of each turn.
      queries: what it searched for, in order.
      found: the passages that each search brought, best first.
      parsed: question, answer and thought.
      calls: its turns that asked something; one may hold several queries.
    """

    seed: Seed
    output: str
    turns: tuple[str, ...]
    queries: tuple[str, ...]
    found: tuple[tuple[Passage, ...], ...]
    parsed: ParsedProposal
    calls: int = 0

    @property
    def question(self) -> str | None:
        return self.parsed.question

    @property
    def answers(self) -> tuple[str, ...]:
        """Names of the answer: the seed's, else the one that the proposer claims."""
        claimed = self.parsed.answer
        return self.seed.answers or (() if claimed is None else (claimed,))

    @cached_property
    def evidence(self) -> tuple[tuple[Passage, ...], ...]:
        """The passages by hop: the source's first, then a chain's or what each search brought."""
        return (*((passage,) for passage in self.seed.passages), *self.found)

    @property
    def searches(self) -> int:
        return len(self.found)


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A written proposal, judged.

    Attributes:
      written: what was judged.
      format: format score in [0, 1].
      format_parts: its parts by name.
      reason: of the first gate that refused it; "" where it passed them all.
    """

    written: Written
    format: float
    format_parts: Mapping[str, float]
    reason: str = ""

    @property
    def seed(self) -> Seed:
        return self.written.seed

    @property
    def passed(self) -> bool:
        return not self.reason
