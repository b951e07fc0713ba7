"""The solver's half of a step on the host: questions, rollouts, correctness, rewards, the batch.

Shape letters: N rollouts, G rollouts of one question.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zest_jax import assembly, traces
from zest_jax.evaluation import well_formed, words_of
from zest_jax.fallback import EvidenceFallback
from zest_jax.learning.packing import Item, Packed, PackSpec, pack
from zest_jax.models.policy import Params
from zest_jax.parallel import hosts
from zest_jax.rewards.outcome import Outcome, outcome
from zest_jax.rewards.solver import SOLVER_REWARDS, Group
from zest_jax.rollout.trajectories import Role, Trajectories
from zest_jax.tasks.types import Task


@dataclasses.dataclass(frozen=True)
class Attempts:
    """A solver's rollouts on some questions; a question's are neighbours.

    Attributes:
      tasks: the questions.
      episodes: one a rollout, on the host.
      answers: of each rollout.
      outcomes: of each question: what difficulty, pass rates and group kinds are read from.
      reward_N: shaped reward of each rollout.
      scale_N: factor of each rollout's advantage, one for a group; None for 1 everywhere.
      notes: metrics of what shaped the rewards.
      lines: where each reward comes from, as JSON; () where it is the outcome alone.
    """

    tasks: Sequence[Task]
    episodes: Trajectories
    answers: list[str | None]
    outcomes: list[Outcome]
    reward_N: np.ndarray
    scale_N: np.ndarray | None = None
    notes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    lines: Sequence[dict[str, Any]] = ()

    @property
    def group(self) -> int:
        return len(self.answers) // max(len(self.tasks), 1)

    @property
    def right(self) -> np.ndarray:
        """Right answers to each question."""
        return np.array([int((o.y_G >= 1).sum()) for o in self.outcomes])


class Solving:
    """The parts of a run that answer questions, with its config in hand.

    Args:
      config: the run's.
      parts: policy, samplers, world.
      packs: shapes of the packed batches.
      fallback: what pays groups in which nobody is right; None leaves them at their reward.
    """

    def __init__(
        self,
        config: Any,
        parts: assembly.Parts,
        packs: dict[str, PackSpec],
        fallback: EvidenceFallback | None = None,
    ):
        self.config, self.parts, self.packs, self.fallback = config, parts, packs, fallback
        self.sampler = parts.solver_sampler
        self._reward = SOLVER_REWARDS.find(config.solver.reward)
        self._recorder = traces.Recorder(self.sampler, parts.world.passages)

    def attempt(
        self,
        params: Params,
        tasks: Sequence[Task],
        group: int,
        key: jax.Array,
        temperature: float,
    ) -> Attempts:
        """`group` rollouts for each question."""
        prompt = self.sampler.protocol.prompt
        hosts.agree("questions", [task.question for task in tasks])
        ids = self.parts.solver.encode([prompt.format(question=task.question) for task in tasks])
        episodes = self.sampler(params, [i for i in ids for _ in range(group)], key, temperature)

        def scored(some: Sequence[int]) -> list[tuple[list[str | None], Outcome, np.ndarray]]:
            rows = slice(some[0] * group, (some[-1] + 1) * group)
            part = jax.tree.map(lambda x: x[rows], episodes)
            answers, outcomes, rewards = self._score([tasks[g] for g in some], part, group)
            each = [answers[g * group : (g + 1) * group] for g in range(len(some))]
            return list(zip(each, outcomes, rewards, strict=True))

        groups = hosts.share(range(len(tasks)), scored)
        rewards = [reward for _, _, reward in groups]
        return Attempts(
            tasks,
            episodes,
            [answer for answers, _, _ in groups for answer in answers],
            [each for _, each, _ in groups],
            np.concatenate([np.zeros(0), *rewards]),
        )

    def _score(
        self, tasks: Sequence[Task], episodes: Trajectories, group: int
    ) -> tuple[list[str | None], list[Outcome], list[np.ndarray]]:
        """Answers of the rollouts of some groups, and each group's outcome and rewards [G]."""
        answers = self.sampler.answers(episodes)
        outcomes = [
            outcome(answers[g * group : (g + 1) * group], task.answers)
            for g, task in enumerate(tasks)
        ]
        rewards: list[np.ndarray] = []
        if self.config.solver.reward == "exact_match":
            rewards += [o.y_G for o in outcomes]
        else:
            texts = self.sampler.texts(episodes)
            seen = observations(episodes, self.sampler.tokenizer)
            protocol, spoken = self.sampler.protocol, words_of(episodes, self.sampler)
            formed = np.array(well_formed(self.sampler, spoken, answers))
            asked = [
                "\n".join(q for turn in turns for q in protocol.queries(turn) or ())
                for turns in spoken
            ]
            for g, (task, each) in enumerate(zip(tasks, outcomes, strict=True)):
                of = slice(g * group, (g + 1) * group)
                rewards.append(
                    self._reward(
                        Group(
                            answers=task.answers,
                            outcome=each,
                            texts=tuple(texts[of]),
                            observations=tuple(seen[of]),
                            queries=tuple(asked[of]),
                            searches_G=np.asarray(episodes.searches_N)[of],
                            well_formed_G=formed[of],
                            path=self._path(task),
                            most_searches=self.config.solver.searches,
                        ),
                        self.config.solver_reward,
                    )
                )
        return answers, outcomes, rewards

    def paid(self, attempts: Attempts) -> Attempts:
        """The attempts with the fallback's rewards, where there is one; they are as they were for
        whoever only wants to know how many are right."""
        if self.fallback is None or not attempts.tasks:
            return attempts
        fallback = self.fallback

        def pay() -> Any:
            return fallback(
                attempts.tasks,
                attempts.episodes,
                attempts.answers,
                words_of(attempts.episodes, self.sampler),
                attempts.reward_N,
            )

        # A server need not answer twice alike, and costs: one process asks it. A teacher on the
        # devices needs all of them.
        on_device = self.config.teacher.kind in ("reader", "local")
        paid = pay() if on_device else hosts.told(pay)
        hosts.agree("rewards after the teacher", paid.reward_N.tobytes())
        return dataclasses.replace(
            attempts,
            reward_N=paid.reward_N,
            scale_N=paid.scale_N,
            notes=paid.notes,
            lines=paid.lines,
        )

    def _path(self, task: Task) -> tuple[tuple[str, ...], ...]:
        """Names of the entities on the way, where the task tells them or the world knows its
        chain."""
        if "nodes" in task.meta:
            return tuple(tuple(names) for names in task.meta["nodes"])
        atlas = self.parts.world.atlas
        if atlas is None or not task.chain_id:
            return ()
        rows = {name: row for row, name in enumerate(atlas.graph.entity_ids)}
        entities = task.chain_id.split("|")[::2]
        return tuple(atlas.graph.names(rows[name]) for name in entities if name in rows)

    def group_keys(self, attempts: Attempts) -> np.ndarray:
        """The keys by which rollouts are compared: question, hop count, or one for all.

        int32 [N].
        """
        group, tasks = self.config.solver.advantage.group, attempts.tasks
        if group == "prompt":
            keys = np.arange(len(tasks))
        elif group == "hop":
            keys = np.array([task.hops for task in tasks])
        else:
            keys = np.zeros(len(tasks), np.int64)
        return np.repeat(keys.astype(np.int32), attempts.group)

    def lines(self, attempts: Attempts, advantage_N: np.ndarray) -> list[dict[str, Any]]:
        """Some of the rollouts, whole groups of every hop count, written down (`traces`)."""
        tasks, group = attempts.tasks, attempts.group
        out = []
        for g in traces.chosen([task.hops for task in tasks], group):
            task, own = tasks[g], attempts.outcomes[g]
            for i, n in enumerate(range(g * group, (g + 1) * group)):
                reward, y = float(attempts.reward_N[n]), float(own.y_G[i])
                parts = {"exact match": y} | ({"shaping": reward - y} if reward != y else {})
                told = attempts.lines[n] if attempts.lines else {}
                out.append(
                    self._recorder.record(
                        attempts.episodes,
                        n,
                        task.answers,
                        task.evidence,
                        role="solver",
                        id=f"{task.id}/{n}",
                        task=task.id,
                        group=g,
                        question=task.question,
                        golden_answers=list(task.answers),
                        hops=task.hops,
                        answer=attempts.answers[n],
                        em=y,
                        f1=traces.number(own.f1_G[i]),
                        reward=traces.number(reward),
                        reward_parts={name: traces.number(x) for name, x in parts.items()},
                        why=str(told.get("status") or told.get("skip") or ""),
                        advantage=traces.number(advantage_N[n]),
                    )
                )
        return out

    def batches(self, attempts: Attempts, advantage_N: np.ndarray) -> Iterator[Packed]:
        """The rollouts that carry a gradient, packed; in as many batches as there are updates.

        A group without contrast has no advantage, and is dropped; not so a rollout with a
        log-probability that is no number, at which the update stops.
        """
        count, episodes = attempts.episodes.count, attempts.episodes
        unread_NL = ~np.isfinite(episodes.logp_NL) & np.asarray(episodes.mask_NL)
        keep = np.flatnonzero((advantage_N[:count] != 0) | unread_NL.any(axis=1))
        for part in np.array_split(keep, self.config.solver.updates_per_batch):
            if len(part):
                rows = part.tolist()
                yield pack(sampled_items(attempts.episodes, rows), self.packs["solver"], rows)


def sampled_items(episodes: Trajectories, rows: Sequence[int] | None = None) -> list[Item]:
    """Sampled sequences as they are trained on: the sampler's ids, mask and log-probabilities."""
    items = []
    for n in range(episodes.count) if rows is None else rows:
        length = int(episodes.length_N[n])
        targets = np.flatnonzero(episodes.mask_NL[n, :length])
        items.append(Item(episodes.ids_NL[n, :length], targets, episodes.logp_NL[n, targets]))
    return items


def observations(episodes: Trajectories, tokenizer: Any) -> list[str]:
    """What the searches of each episode brought, as text."""
    role_NL = np.asarray(episodes.role_NL)
    ids_NL = np.asarray(episodes.ids_NL)
    ids = [ids_NL[n][role_NL[n] == Role.TOOL].tolist() for n in range(episodes.count)]
    return tokenizer.batch_decode(ids, clean_up_tokenization_spaces=False)
