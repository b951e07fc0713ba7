"""The proposer's half of a step on the host: seeds, episodes, gates, probe, and the batch to score.

Shape letters: B proposals, C contexts, G probe rollouts of a question.
"""

import dataclasses
import time
from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zest_jax import assembly, traces
from zest_jax.errors import UserError
from zest_jax.learning.packing import PackSpec, pack
from zest_jax.learning.updates import ProposalBatch
from zest_jax.models.policy import Params
from zest_jax.parallel import hosts
from zest_jax.rewards.difficulty import CURVES
from zest_jax.rewards.information_gain import context_names
from zest_jax.rewards.terms import NEEDS_LIKELIHOOD, Signals, needs
from zest_jax.rollout.sampler import Sampler
from zest_jax.rollout.trajectories import Trajectories
from zest_jax.solving import sampled_items
from zest_jax.staging import Staging
from zest_jax.tasks import proposals
from zest_jax.tasks.funnel import Funnel
from zest_jax.tasks.gates import ParsedProposal
from zest_jax.tasks.gating import Means
from zest_jax.tasks.seeds import Proposal, Seed, Written
from zest_jax.tasks.sources import SeedSource
from zest_jax.tasks.sources.chain_pool import PooledChains
from zest_jax.tasks.sources.references import References


@dataclasses.dataclass(frozen=True)
class Probe:
    """What a solver made of the proposals that it was asked.

    Attributes:
      asked: index of each proposal that it was asked, in order.
      right_B: right answers to each of those.
      rollouts: per question.
    """

    asked: Sequence[int]
    right_B: np.ndarray
    rollouts: int

    @property
    def shares(self) -> dict[int, float]:
        """Share of right answers, by the index of the proposal."""
        return {
            i: float(right) / self.rollouts
            for i, right in zip(self.asked, self.right_B, strict=True)
        }


class Proposing:
    """The parts of a run that write questions, with its config in hand.

    Args:
      config: the run's.
      parts: with a proposer.
      packs: shapes of the packed batches.
    """

    def __init__(self, config: Any, parts: assembly.Parts, packs: dict[str, PackSpec]):
        assert parts.proposer_sampler is not None and isinstance(parts.source, SeedSource)
        self.config, self.parts = config, parts
        self.sampler: Sampler = parts.proposer_sampler
        self.source: SeedSource = parts.source
        self.staging = Staging(config, parts) if isinstance(parts.source, References) else None
        self.funnel = Funnel()
        self.packs = packs
        self._recorder = traces.Recorder(self.sampler, parts.world.passages)
        self.columns = len(context_names(assembly.evidence_parts(config)))

    # ------------------------------------------------------------------ lengths

    def prompt(self, seed: Seed) -> str:
        return self.sampler.protocol.prompt.format(**seed.fields)

    def fits_proposer(self, seed: Seed) -> bool:
        """Whether a seed's prompt is short enough."""
        ids = self.parts.proposer.encode([self.prompt(seed)])[0]
        return len(ids) <= self.config.proposer.prompt_length

    def fits_solver(self, question: str) -> bool:
        """Whether a question is short enough to be asked."""
        prompt = self.parts.solver_sampler.protocol.prompt.format(question=question)
        return len(self.parts.solver.encode([prompt])[0]) <= self.config.solver.prompt_length

    # ------------------------------------------------------------------ proposals

    def draw(
        self,
        params: Params,
        count: int,
        rng: np.random.Generator,
        key: jax.Array,
        rounds: int = 1,
        used: Container[str] = (),
        some: bool = True,
    ) -> list[Seed]:
        """Seeds of the source whose prompts fit: so many, or fewer where a proposer has to prepare
        them (`staging`) and not all it began with came through.

        Args:
          params: the proposer.
          count: seeds wanted.
          rng: of what is drawn.
          key: of the sampling of what is prepared.
          rounds: how often new references are tried, while seeds are wanting.
          used: ids of seeds that earlier iterations' questions were written from. A pool gives
            others; small sources may give them again.
          some: whether it is a mistake if nothing comes through.

        Raises:
          UserError: the source runs dry, or nothing came through.
        """
        if self.staging is None:
            fresh = isinstance(self.source, PooledChains)
            return self.source.draw(
                count,
                rng,
                lambda seed: self.fits_proposer(seed) and not (fresh and seed.id in used),
            )
        self.funnel = Funnel()
        seeds: list[Seed] = []
        named: set[str] = set()
        for attempt in range(rounds):
            references = self.source.draw(count, rng, lambda seed: True)
            at = jax.random.fold_in(key, attempt)
            made, funnel = self.staging(params, references, at, rng, named)
            fitting = [seed for seed in made if self.fits_proposer(seed)]
            funnel.turn_back("path", "prompt too long", len(made) - len(fitting))
            self.funnel += funnel
            seeds += fitting
            if len(seeds) >= count:
                break
        if some and not seeds:
            raise UserError(
                f"none of {rounds * count} reference questions led to an evidence path that the "
                f"proposer can be shown; start from a policy that names targets "
                f"(proposer.folder), or raise source.documents or proposer.prompt_length.\n"
                f"{self.funnel.table()}"
            )
        return seeds[:count]

    def stage_metrics(self) -> dict[str, float]:
        """Shares that passed each stage of the last step; {} for sources without stages."""
        return {} if self.staging is None else self.funnel.metrics("proposer")

    def propose(
        self,
        params: Params,
        seeds: Sequence[Seed],
        key: jax.Array,
        rng: np.random.Generator,
        samples: int = 1,
        reader: Params | None = None,
        beside: Sequence[Proposal] = (),
    ) -> tuple[Trajectories, list[Proposal]]:
        """Writes `samples` proposals for each seed and judges them.

        Args:
          params: the proposer.
          seeds: what to ask about.
          key: of the sampling.
          rng: of what gates draw.
          samples: neighbours in the result share a seed.
          reader: the policy that answers gates' questions; where None the proposer, or the solver
            that the run began with where the proposer is another policy.
          beside: earlier proposals whose passages serve gates as noise, as these do.
        """
        begun = time.perf_counter()
        repeated = [seed for seed in seeds for _ in range(samples)]
        prompts = self.parts.proposer.encode([self.prompt(seed) for seed in repeated])
        episodes = self.sampler(params, prompts, key, self.config.proposer.temperature)

        def read_some(rows: Sequence[int]) -> list[Written]:
            of = slice(rows[0], rows[-1] + 1)
            return proposals.read_episodes(
                repeated[of],
                jax.tree.map(lambda x: x[of], episodes),
                self.sampler,
                self.parts.world.passages,
                self.fits_solver,
            )

        written = hosts.share(range(len(repeated)), read_some)
        read = None
        if self.parts.reader is not None:
            reads, with_params = self.parts.reader, reader
            if with_params is None:
                solver = self.parts.solver
                with_params = solver.whole(solver.params) if self.parts.apart else params

            def read(questions: Any, passages: Any) -> list[str | None]:
                return reads(with_params, jax.random.fold_in(key, 1), questions, passages)

        around = [*written, *(proposal.written for proposal in beside)]
        noise = {p.id: p for one in around for part in one.evidence for p in part}
        means = Means(self.config.gates, read, rng, tuple(noise.values()))
        p = self.config.proposer
        judged = proposals.judge(
            [self._unless_evaluated(one) for one in written], p.format, p.gates, means
        )
        self.funnel.add("question", (proposal.reason for proposal in judged))
        self.funnel.took("question", time.perf_counter() - begun)
        return episodes, judged

    def _unless_evaluated(self, written: Written) -> Written:
        """The same, unreadable where it asks a question that the solver is measured by."""
        if not self.parts.world.evaluates(written.question or ""):
            return written
        parsed = ParsedProposal(None, None, written.parsed.think, "question of the evaluation")
        return dataclasses.replace(written, parsed=parsed)

    def one_shot(self, proposed: Sequence[Proposal]) -> list[str]:
        """What a single retrieval with each question brings, as the solver would see it."""
        found = self.parts.retrieval.find([p.written.question or "" for p in proposed])
        show = self.parts.solver_sampler.protocol.show
        return [show([(p.title, p.text) for p in passages]) for passages in found]

    # ------------------------------------------------------------------ the batch

    def batch(
        self,
        episodes: Trajectories,
        proposed: Sequence[Proposal],
        probe: Probe | None,
        progress: float,
        order_B: np.ndarray,
    ) -> ProposalBatch:
        """Everything that the proposer's step needs of the host.

        Args:
          episodes: the proposals as sampled.
          proposed: judged.
          probe: a solver's answers; None where no reward looks at them.
          progress: share of the training that is done, for curves that move.
          order_B: see `ProposalBatch.reward_order_B`.
        """
        c, count = self.config, len(proposed)
        # One shape, whatever came through the stages before.
        B = max(count, c.proposer.seeds_per_step * c.proposer.samples)
        contexts, valid_BC = None, np.zeros((B, self.columns), bool)
        if needs(c.reward, NEEDS_LIKELIHOOD):
            items, owners, valid_BC[:count] = proposals.context_items(
                proposed,
                self.one_shot(proposed),
                self.parts.solver_sampler.protocol,
                self.parts.solver.encode,
                self.columns,
                assembly.context_length(c),
            )
            contexts = pack(items, self.packs["contexts"], owners)
        probed_B, difficulty_B = np.zeros(B, bool), np.zeros(B, np.float32)
        if probe is not None and len(probe.asked):
            curve = CURVES.find(c.reward.difficulty)
            probed_B[list(probe.asked)] = True
            difficulty_B[list(probe.asked)] = curve(
                np.asarray(probe.right_B, np.float64), probe.rollouts, progress
            )

        def column(values: Sequence[float], dtype: type = np.float32, rest: float = 0) -> Any:
            return np.array([*values, *[rest] * (B - count)], dtype)

        hops_B = np.array([p.seed.hops for p in proposed], np.int32)
        return ProposalBatch(
            proposals=pack(sampled_items(episodes), self.packs["proposer"]),
            contexts=contexts,
            signals=Signals(
                format_B=column([p.format for p in proposed]),
                passed_B=column([p.passed for p in proposed], bool),
                hops_B=column(hops_B.tolist(), np.int32),
                probed_B=probed_B,
                difficulty_B=difficulty_B,
                valid_BC=valid_BC,
                more={
                    name: column([value(p) for p in proposed])
                    for name, value in proposals.COLUMNS.items()
                },
            ),
            # What is only padding is compared with nothing else.
            group_B=column(
                group_keys(c.proposer.advantage.group, proposed, hops_B).tolist(), np.int32, -1
            ),
            reward_order_B=np.concatenate([order_B, np.arange(count, B)]),
        )

    def lines(
        self,
        episodes: Trajectories,
        proposed: Sequence[Proposal],
        per_row: Mapping[str, np.ndarray],
        valid_BC: np.ndarray,
    ) -> list[dict[str, Any]]:
        """Some of the proposals, every hop count among them, written down (`traces`).

        Args:
          episodes: the proposals as sampled.
          proposed: judged.
          per_row: of each proposal: reward, advantage, gain, terms, likelihoods.
          valid_BC: which contexts a proposal has.
        """
        names, samples = context_names(self.columns - 4), self.config.proposer.samples
        starts = range(0, len(proposed), samples)
        out = []
        for g in traces.chosen([proposed[b].seed.hops for b in starts], samples):
            for b in range(g * samples, min((g + 1) * samples, len(proposed))):
                p = proposed[b]
                numbers = {"format": p.format}
                numbers |= {k: float(x[b]) for k, x in per_row.items() if k.startswith("term_")}
                if p.passed and valid_BC[b].any():
                    numbers["gain"] = float(per_row["gain"][b])
                out.append(
                    self._recorder.record(
                        episodes,
                        b,
                        p.written.answers,
                        [passage.id for passage in p.seed.passages],
                        role="proposer",
                        id=f"{p.seed.id}/{b}",
                        task=p.seed.id,
                        group=g,
                        chain=list(p.seed.words),
                        question=p.written.question,
                        answer=p.written.parsed.answer,
                        golden_answers=list(p.seed.answers),
                        hops=p.seed.hops,
                        reason=p.reason,
                        reward=traces.number(per_row["reward"][b]),
                        reward_parts={name: traces.number(x) for name, x in numbers.items()},
                        advantage=traces.number(per_row["advantage"][b]),
                        log_likelihoods={
                            name: traces.number(per_row["loglik_BC"][b, c])
                            for c, name in enumerate(names)
                            if valid_BC[b, c]
                        },
                    )
                )
        return out


def group_keys(group: str, proposed: Sequence[Proposal], hops_B: np.ndarray) -> np.ndarray:
    """The keys by which proposals are compared: hop count, seed, or one for all. int32 [B]."""
    if group == "hop":
        return hops_B
    if group == "prompt":
        numbers: dict[str, int] = {}
        keys = [numbers.setdefault(p.seed.id, len(numbers)) for p in proposed]
        return np.array(keys, np.int32)
    return np.zeros(len(proposed), np.int32)
