"""Proposals: from a proposer's episodes to judged questions, their contexts and their tasks.

The host's share of the proposer step is here (text, parsing, gates, tokens); likelihoods, reward,
advantage and update are one jitted program (`learning.updates.proposer_update`).

Shape letters: B proposals, C contexts.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from zest_jax.learning.packing import Item
from zest_jax.rewards.information_gain import FULL, HOP_1, NONE, ONE_SHOT, SOURCE
from zest_jax.rollout.protocols import ANSWER, Protocol
from zest_jax.rollout.sampler import Sampler
from zest_jax.rollout.trajectories import Trajectories
from zest_jax.tasks import path_gates as path_gates  # registers its gates
from zest_jax.tasks.episodes import found_by, turns_of
from zest_jax.tasks.formats import FORMATS
from zest_jax.tasks.gates import ParsedProposal, parse_proposal
from zest_jax.tasks.gating import Judged, Means, apply_gates
from zest_jax.tasks.seeds import Proposal, Seed, Written
from zest_jax.tasks.types import Passage, Task
from zest_jax.text import contains_any

Encode = Callable[[Sequence[str]], list[list[int]]]

# Numbers of a proposal that reward terms may look at (`Signals.more`); add your own.
COLUMNS: dict[str, Callable[[Proposal], float]] = {
    "question_words": lambda proposal: len((proposal.written.question or "").split()),
    "searches": lambda proposal: proposal.written.searches,
}


def read_episodes(
    seeds: Sequence[Seed],
    episodes: Trajectories,
    sampler: Sampler,
    passages: Sequence[Passage],
    fits: Callable[[str], bool] = lambda question: True,
) -> list[Written]:
    """What a proposer's episodes say, one a seed.

    Args:
      seeds: what they were given.
      episodes: on the host.
      sampler: that drew them.
      passages: the corpus, by the rows that the episodes name.
      fits: whether a question is short enough for the solver's prompt; one that is not cannot be
        asked and counts as unreadable.
    """
    texts = sampler.texts(episodes)
    turns = turns_of(episodes, sampler.tokenizer)
    protocol = sampler.protocol
    claims = protocol.tag(ANSWER) == "answer"
    out = []
    for n, (seed, text) in enumerate(zip(seeds, texts, strict=True)):
        # What was found is no part of the proposal: a passage may spell out a tag.
        parsed = parse_proposal("".join(turns[n]), claims=claims)
        if parsed.question is not None and not fits(parsed.question):
            parsed = ParsedProposal(None, None, parsed.think, "question too long")
        searches = int(episodes.searches_N[n])
        asked = [protocol.queries(turn) for turn in turns[n]]
        out.append(
            Written(
                seed=seed,
                output=text,
                turns=turns[n],
                queries=tuple(q for queries in asked if queries for q in queries),
                calls=sum(bool(queries) for queries in asked),
                found=tuple(
                    found_by(episodes, n, t, passages, sampler.tokenizer) for t in range(searches)
                ),
                parsed=parsed,
            )
        )
    return out


def judge(
    written: Sequence[Written], format_name: str, gate_names: Sequence[str], means: Means
) -> list[Proposal]:
    """Gives every proposal its format score and puts it through the gates.

    Raises:
      UserError: there is no format score, or no gate, of a name.
    """
    score = FORMATS.find(format_name)
    judged = [Judged(one, *score(one, means.options)) for one in written]
    if not means.others:
        others = {p.id: p for one in written for part in one.evidence for p in part}
        means = dataclasses.replace(means, others=tuple(others.values()))
    return apply_gates(judged, gate_names, means)


def best_of(proposals: Sequence[Proposal], samples: int) -> list[Proposal]:
    """Of every `samples` neighbours, which share a seed, one: the highest format score, the first
    of them where several share it (Dr. Zero's generation).

    A proposal that passed the gates is taken before one that did not.
    """
    groups = [proposals[at : at + samples] for at in range(0, len(proposals), samples)]
    return [max(group, key=lambda p: (p.passed, p.format)) for group in groups]


def answer_in_source(written: Written) -> bool:
    """Whether the source's passage alone names the answer (Dr. Free's audit of multi-hop
    questions)."""
    source = written.seed.passages[:1]
    names = written.answers
    return any(contains_any(f"{p.title}: {p.text}", names) for p in source)


def context_texts(proposal: Proposal, protocol: Protocol, one_shot: str) -> dict[int, str]:
    """The passages of each context column of a proposal, as the policy reads them.

    One hop: with what one retrieval brings, and without anything. Several: the whole evidence;
    nothing; the source's passage; one retrieval; each other part of the evidence alone: of hop k,
    or of the k-th search of a proposer that searches.
    """
    hops = proposal.seed.hops
    if hops == 1:
        return {ONE_SHOT: one_shot, NONE: ""}
    evidence = proposal.written.evidence
    shown = [protocol.show([(p.title, p.text) for p in part]) for part in evidence]
    columns = {FULL: "".join(shown), NONE: "", ONE_SHOT: one_shot}
    if shown:
        columns[SOURCE] = shown[0]
    return columns | {HOP_1 + k: text for k, text in enumerate(shown[1:])}


def context_items(
    proposals: Sequence[Proposal],
    one_shot: Sequence[str],
    protocol: Protocol,
    encode: Encode,
    columns: int,
    longest: int,
) -> tuple[list[Item], list[int], np.ndarray]:
    """The sequences whose answer tokens the anchor scores, for proposals that passed the gates.

    A sequence is the question as the solver gets it, the passages as the solver sees them, an
    opened answer tag, and the answer: the same template around every context, so that it cancels in
    differences. The answer is tokenised apart, so that its tokens are the same everywhere.

    Args:
      proposals: all proposals of the batch; the others get no sequence and no valid column, since
        their information gain is not paid.
      one_shot: what one retrieval with the question brings, rendered, per proposal.
      protocol: the solver's.
      encode: texts -> token ids.
      columns: C.
      longest: most tokens of a sequence; passages beyond are cut off.

    Returns:
      Items, their owners (b * C + c), and valid [B, C].
    """
    owners: list[int] = []
    texts: list[str] = []
    answers: list[str] = []
    valid_BC = np.zeros((len(proposals), columns), bool)
    for b, proposal in enumerate(proposals):
        question = proposal.written.question
        if not proposal.passed or question is None:
            continue
        prompt = protocol.prompt.format(question=question)
        answer = f" {proposal.written.answers[0]}"
        for column, passages in context_texts(proposal, protocol, one_shot[b]).items():
            if column >= columns:
                raise ValueError(f"{columns} columns do not hold the parts of the evidence")
            owners.append(b * columns + column)
            texts.append(f"{prompt}{passages}<answer>")
            answers.append(answer)
            valid_BC[b, column] = True
    (opened,) = encode(["<answer>"])
    items = []
    for context, scored in zip(encode(texts), encode(answers), strict=True):
        scored = scored[: longest // 2]
        room = longest - len(scored)
        if len(context) > room:
            context = context[: room - len(opened)] + opened
        targets = np.arange(len(context), len(context) + len(scored))
        ids = np.array(context + scored, np.int32)
        items.append(Item(ids, targets, np.zeros(len(scored), np.float32)))
    return items, owners, valid_BC


def task_of(proposal: Proposal, task_id: str, iteration: int, probe: str = "") -> Task:
    """The task that a proposal asks.

    Args:
      proposal: with a question and an answer.
      task_id: unique within its file.
      iteration: of the run.
      probe: name of the model whose answers the proposer was paid by; "" where none was.
    """
    seed, written = proposal.seed, proposal.written
    evidence = dict.fromkeys(p.id for part in written.evidence for p in part)
    return Task(
        id=task_id,
        question=written.question or "",
        answers=written.answers or ("",),
        hops=seed.hops,
        source_id=seed.source_id,
        evidence=tuple(evidence),
        iteration=iteration,
        chain_id=seed.chain_id,
        meta={
            "probe": probe,
            "seed": seed.id,
            "proposal": written.output,
            "answer_in_source": answer_in_source(written),
        }
        | ({"nodes": [list(names) for names in seed.nodes]} if seed.nodes else {}),
    )


def tasks_of(
    proposals: Sequence[Proposal],
    iteration: int,
    most: int,
    *,
    probe: str = "",
    keep_refused: bool = False,
    most_words: int = 0,
) -> tuple[list[Task], int]:
    """The tasks of the proposals that passed, each question once, and how many came twice.

    Args:
      proposals: judged proposals.
      iteration: of the run, noted in the tasks.
      most: tasks wanted; later ones are left out.
      probe: see `task_of`.
      keep_refused: refused proposals stay as long as there is a pair to ask (Dr. Zero's published
        generation filters nothing).
      most_words: a question is cut to so many words; 0 does not cut.
    """
    tasks: list[Task] = []
    seen: set[str] = set()
    duplicates = 0
    for proposal in proposals:
        question = proposal.written.question
        usable = proposal.passed or (keep_refused and proposal.written.answers)
        if not usable or question is None:
            continue
        words = question.split()
        if most_words and len(words) > most_words:
            question = " ".join(words[:most_words])
        if question in seen:
            duplicates += 1
            continue
        seen.add(question)
        if len(tasks) == most:
            continue
        task = task_of(proposal, f"iteration{iteration}-{len(tasks)}", iteration, probe)
        tasks.append(dataclasses.replace(task, question=question))
    return tasks, duplicates
