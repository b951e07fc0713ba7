"""From reference questions to seeds with evidence paths: what a proposer of ZEST-Search does before
it writes a question, with the checks between.

1. It names a target of the kind that a reference asks for (`tasks.targets`).
2. Documents are retrieved for the target; some have to name it. They are followed backwards, a
   search for each document's title, for paths of several hops.
3. The documents become an evidence path that ends at the target (`tasks.path_building`), by their
   sentences or as the proposer writes it, under the six criteria.

What comes out are seeds: writing the question from them is the episode that is trained.
"""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from zest_jax import assembly
from zest_jax.models.policy import Params
from zest_jax.rollout.sampler import Sampler
from zest_jax.tasks.evidence_paths import EvidencePath, PathCase, PathRules
from zest_jax.tasks.funnel import Funnel
from zest_jax.tasks.path_building import Built, choose, linked_paths, written_path
from zest_jax.tasks.seeds import Seed
from zest_jax.tasks.sources.references import References
from zest_jax.tasks.targets import entity_filter, read_target, supporting
from zest_jax.tasks.types import Passage
from zest_jax.text import last_tag

_BRANCH = 3  # documents of a target that are followed backwards, and of each of those


@dataclasses.dataclass(frozen=True)
class Found:
    """A target with its documents.

    Attributes:
      reference: what it was named for.
      answer: the target.
      support: documents that name it, best first.
      documents: all that were retrieved, by id.
    """

    reference: Seed
    answer: str
    support: tuple[Passage, ...]
    documents: dict[str, Passage]


class Staging:
    """The stages before the question.

    Args:
      config: the run's.
      parts: with a source of references.
    """

    def __init__(self, config: Any, parts: assembly.Parts):
        assert isinstance(parts.source, References)
        self.options, self.parts = config.source, parts
        self.source: References = parts.source
        self.temperature = config.proposer.temperature
        self.answer_words = config.gates.answer_words
        self.rules = PathRules(
            max_hops=config.world.max_hops,
            title_is_subject=config.source.title_is_subject,
            relation_words=config.source.relation_words,
        )

    def __call__(
        self,
        params: Params,
        references: Sequence[Seed],
        key: jax.Array,
        rng: np.random.Generator,
        seen: set[str] | None = None,
    ) -> tuple[list[Seed], Funnel]:
        """Seeds of the references that came through, in order, and how many fell where.

        Args:
          params: the proposer.
          references: of the source.
          key: of the sampling.
          rng: of what is equally good.
          seen: entities that were named before; those of this call are added.
        """
        funnel = Funnel()
        seen = set() if seen is None else seen
        with _timed(funnel, "target"):
            named = self._targets(params, references, key, seen, funnel)
        with _timed(funnel, "support"):
            found = self._documents(named, funnel)
        with _timed(funnel, "path"):
            if self.options.path != "none":
                self._follow_backwards(found)
            seeds = self._paths(params, found, key, rng, funnel)
        return seeds, funnel

    # ------------------------------------------------------------------ 1: targets

    def _targets(
        self,
        params: Params,
        references: Sequence[Seed],
        key: jax.Array,
        seen: set[str],
        funnel: Funnel,
    ) -> list[tuple[Seed, str]]:
        asked = [dict(seed.fields) for seed in references]
        outputs = self._write("target", params, asked, jax.random.fold_in(key, 2))
        named: list[tuple[Seed, str]] = []
        aliases, reasons = self.source.aliases, []
        for seed, output in zip(references, outputs, strict=True):
            target = None if output is None else read_target(output)
            verdict = entity_filter(
                target,
                seed.fields["question"],
                aliases,
                most_words=self.answer_words,
                known_only=self.source.known_only,
            )
            reason = "reference too long" if output is None else verdict.reason
            if target is not None and verdict:
                entity = aliases.id_of(target.answer)
                if entity in seen:
                    reason = "target named before"
                else:
                    seen.add(entity)
                    named.append((seed, target.answer))
            reasons.append(reason)
        funnel.add("target", reasons)
        return named

    def _write(
        self, stage: str, params: Params, fields: Sequence[dict[str, str]], key: jax.Array
    ) -> list[str | None]:
        """The proposer's words of a stage; None where its prompt is too long."""
        sampler: Sampler = self.parts.stages[stage]
        prompts = self.parts.proposer.encode([sampler.protocol.prompt.format(**f) for f in fields])
        fits = [i for i, ids in enumerate(prompts) if len(ids) <= sampler.spec.prompt_length]
        outputs: list[str | None] = [None] * len(prompts)
        if fits:
            episodes = sampler(params, [prompts[i] for i in fits], key, self.temperature)
            for i, text in zip(fits, sampler.texts(episodes), strict=True):
                outputs[i] = text
        return outputs

    # ------------------------------------------------------------------ 2: documents

    def _documents(self, named: Sequence[tuple[Seed, str]], funnel: Funnel) -> list[Found]:
        depth, aliases = self.options.documents, self.source.aliases
        answers = self.parts.retrieval.find([answer for _, answer in named], depth)
        found, reasons = [], []
        for (seed, answer), documents in zip(named, answers, strict=True):
            verdict, support = supporting(answer, documents, aliases, self.options.support)
            reasons.append(verdict.reason)
            if verdict:
                found.append(Found(seed, answer, support, {d.id: d for d in documents}))
        funnel.add("support", reasons)
        return found

    def _follow_backwards(self, found: Sequence[Found]) -> None:
        """Adds what names the documents' own titles, a hop further each time."""
        depth, aliases = self.options.documents, self.source.aliases
        ahead = [[d.title for d in one.support[:_BRANCH]] for one in found]
        for _ in range(self.rules.max_hops - 1):
            titles = list(dict.fromkeys(title for each in ahead for title in each))
            by_title = dict(zip(titles, self.parts.retrieval.find(titles, depth), strict=True))
            further = []
            for one, each in zip(found, ahead, strict=True):
                following: list[str] = []
                for title in each:
                    _, naming = supporting(title, by_title[title], aliases)
                    one.documents.update({d.id: d for d in naming})
                    following += [d.title for d in naming[:_BRANCH]]
                further.append(list(dict.fromkeys(following)))
            ahead = further

    # ------------------------------------------------------------------ 3: paths

    def _paths(
        self,
        params: Params,
        found: Sequence[Found],
        key: jax.Array,
        rng: np.random.Generator,
        funnel: Funnel,
    ) -> list[Seed]:
        if self.options.path == "none":
            seeds = [self._without_path(one) for one in found]
            clear = [self._may_start(seed) for seed in seeds]
            funnel.add("path", ["" if good else "start is of the evaluation" for good in clear])
            return [seed for seed, good in zip(seeds, clear, strict=True) if good]
        if self.options.path == "written":
            fields = [self._shown(one) for one in found]
            outputs = self._write("path", params, fields, jax.random.fold_in(key, 3))
            built = [self._judged(one, out) for one, out in zip(found, outputs, strict=True)]
        else:
            built = [self._linked(one, rng) for one in found]
        seeds, reasons = [], []
        for one, made in zip(found, built, strict=True):
            funnel.tried.update(made.tried)
            reasons.append(made.reason)
            if made.path is not None:
                seeds.append(self._seed(one, made.path))
        funnel.add("path", reasons)
        return seeds

    def _may_start(self, seed: Seed) -> bool:
        start = self.source.aliases.id_of(seed.passages[0].title)
        return not {seed.source_id, start} & self.source.left_out

    def _linked(self, one: Found, rng: np.random.Generator) -> Built:
        aliases = self.source.aliases
        return choose(
            linked_paths(one.answer, one.reference.hops, one.documents, aliases, self.rules, rng),
            self.source.left_out,
        )

    def _judged(self, one: Found, output: str | None) -> Built:
        path = written_path(last_tag(output or "", "answer") or "")
        if path is None:
            unread = "prompt too long" if output is None else "path unreadable"
            return Built(None, unread, Counter({unread: 1}))
        aliases = self.source.aliases
        case = PathCase(path, one.answer, one.documents, aliases, self.rules)
        return choose([case], self.source.left_out)

    def _shown(self, one: Found) -> dict[str, str]:
        """What a proposer is given to arrange: documents in the order they were found, as many as
        its prompt has room for."""
        lines = [f"[{d.id}] {d.title}: {d.text}\n" for d in one.documents.values()]
        sampler = self.parts.stages["path"]
        fields = {"answer": one.answer, "hops": str(one.reference.hops), "documents": ""}
        asked, *shown = self.parts.proposer.encode(
            [sampler.protocol.prompt.format(**fields), *lines]
        )
        room = sampler.spec.prompt_length - len(asked)
        kept = 0
        while kept < len(shown) and len(shown[kept]) <= room:
            room -= len(shown[kept])
            kept += 1
        return fields | {"documents": "".join(lines[:kept])}

    def _seed(self, one: Found, path: EvidencePath) -> Seed:
        """The seed of a path: its words, the documents of its sentences, the target's names."""
        aliases = self.source.aliases
        passages = tuple(one.documents[edge.document] for edge in path.edges)
        return Seed(
            id=f"{one.reference.id}|{' | '.join(path.words)}",
            source_id=passages[0].id,
            hops=path.hops,
            fields=self._fields(one, passages, " | ".join(path.words), path.hops),
            passages=passages,
            answers=aliases.names_of(one.answer),
            words=path.words,
            nodes=tuple(aliases.names_of(name) for name in (path.start, *path.between, one.answer)),
        )

    def _without_path(self, one: Found) -> Seed:
        """The seed of a target and one document that names it."""
        passages = one.support[:1]
        chain = f"{passages[0].title} | {one.answer}"
        return Seed(
            id=f"{one.reference.id}|{one.answer}",
            source_id=passages[0].id,
            hops=1,
            fields=self._fields(one, passages, chain, 1),
            passages=passages,
            answers=self.source.aliases.names_of(one.answer),
            words=(passages[0].title, one.answer),
        )

    @staticmethod
    def _fields(one: Found, passages: Sequence[Passage], chain: str, hops: int) -> dict[str, str]:
        return {
            "chain": chain,
            "path": chain,
            "passages": "".join(f"{passage.render()}\n" for passage in passages),
            "answer": one.answer,
            "reference": one.reference.fields["question"],
            "hops": str(hops),
        }


@contextlib.contextmanager
def _timed(funnel: Funnel, stage: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    funnel.took(stage, time.perf_counter() - begun)
