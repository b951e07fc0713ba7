"""Dr. Free's proposals: chains in, questions out, judged, and the contexts that score them.

The host's share of the proposer step is here (text, parsing, gates, tokens); likelihoods, reward,
advantage and update are one jitted program (`learning.updates.proposer_update`).

Shape letters: B proposals, C contexts.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from zest_jax.errors import UserError
from zest_jax.learning.packing import Item
from zest_jax.rewards.information_gain import FULL, HOP_1, NONE, ONE_SHOT, SOURCE
from zest_jax.rollout.protocols import Protocol
from zest_jax.tasks.atlas import Atlas
from zest_jax.tasks.gates import GateResult, ParsedProposal, gate_dr_free, parse_proposal
from zest_jax.tasks.types import Chain, Task
from zest_jax.text import contains_any

Encode = Callable[[Sequence[str]], list[list[int]]]


@dataclasses.dataclass(frozen=True)
class Proposal:
    """What a proposer wrote for a chain, taken apart and judged.

    Attributes:
      chain: the chain that it was given.
      output: its words.
      parsed: question, answer and thought.
      gate: format score and grounding.
    """

    chain: Chain
    output: str
    parsed: ParsedProposal
    gate: GateResult


def draw_chains(
    atlas: Atlas,
    count: int,
    max_hops: int,
    rng: np.random.Generator,
    fits: Callable[[Chain], bool] = lambda chain: True,
) -> list[Chain]:
    """Training chains, 1 to `max_hops` hops in equal shares, in mixed order.

    Args:
      atlas: the world.
      count: how many.
      max_hops: longest chain.
      rng: the only source of chance.
      fits: whether a chain's prompt is short enough for the proposer; others are drawn instead of
        those that are not.

    Raises:
      UserError: the world has too few chains, or too few that fit.
    """
    chains: list[Chain] = []
    for hops in range(1, max_hops + 1):
        share = count * hops // max_hops - count * (hops - 1) // max_hops
        found = {c.id: c for c in atlas.sample_chains(hops, share, rng, split="train") if fits(c)}
        for _ in range(8):
            if len(found) >= share:
                break
            more = atlas.sample_chains(hops, 2 * (share - len(found)), rng, split="train")
            found |= {c.id: c for c in more if fits(c)}
        if len(found) < share:
            raise UserError(
                f"hardly a chain of {hops} hops fits proposer.prompt_length; raise it, lower "
                "world.max_hops or shorten the passages."
            )
        chains += list(found.values())[:share]
    return [chains[i] for i in rng.permutation(len(chains))]


def judge(
    chain: Chain, output: str, atlas: Atlas, fits: Callable[[str], bool] = lambda question: True
) -> Proposal:
    """Parses an output and puts it through Dr. Free's gates.

    Args:
      chain: what the proposer was given.
      output: its words.
      atlas: the world.
      fits: whether a question is short enough for the solver's prompt; one that is not cannot be
        asked and counts as unreadable.
    """
    parsed = parse_proposal(output)
    if parsed.question is not None and not fits(parsed.question):
        parsed = ParsedProposal(None, None, parsed.think, "question too long")
    # Texts without titles: with its title, the answer's own passage would ground anything.
    texts = [atlas.passage_of(entity).text for entity in chain.entities]
    names = atlas.graph.names(chain.entities[-1])
    return Proposal(chain, output, parsed, gate_dr_free(parsed, names, texts, chain.hops))


def answer_in_source(chain: Chain, atlas: Atlas) -> bool:
    """Whether the first passage alone names the answer (Dr. Free's audit of multi-hop
    questions)."""
    names = atlas.graph.names(chain.entities[-1])
    return contains_any(atlas.passage_of(chain.entities[0]).render(), names)


def context_texts(
    proposal: Proposal, atlas: Atlas, protocol: Protocol, one_shot: str
) -> dict[int, str]:
    """The passages of each context column of a proposal, as the policy reads them.

    One hop: with what one retrieval brings, and without anything. Several: the whole chain;
    nothing; the source's passage; one retrieval; the passage of e_k for each hop k.
    """
    if proposal.chain.hops == 1:
        return {ONE_SHOT: one_shot, NONE: ""}
    passages = [atlas.passage_of(entity) for entity in proposal.chain.entities]
    shown = [protocol.show([(p.title, p.text)]) for p in passages]
    columns = {FULL: "".join(shown), NONE: "", SOURCE: shown[0], ONE_SHOT: one_shot}
    return columns | {HOP_1 + k: text for k, text in enumerate(shown[1:])}


def context_items(
    proposals: Sequence[Proposal],
    one_shot: Sequence[str],
    atlas: Atlas,
    protocol: Protocol,
    encode: Encode,
    columns: int,
) -> tuple[list[Item], list[int], np.ndarray]:
    """The sequences whose answer tokens the anchor scores, for proposals that passed the gates.

    A sequence is the question as the solver gets it, the passages as the solver sees them, an
    opened answer tag, and the answer: the same template around every context, so that it cancels in
    differences. The answer is tokenised apart, so that its tokens are the same everywhere.

    Args:
      proposals: all proposals of the batch; the others get no sequence and no valid column, since
        their information gain is not paid.
      one_shot: what one retrieval with the question brings, rendered, per proposal.
      atlas: the world.
      protocol: the solver's.
      encode: texts -> token ids.
      columns: C.

    Returns:
      Items, their owners (b * C + c), and valid [B, C].
    """
    owners: list[int] = []
    texts: list[str] = []
    answers: list[str] = []
    valid_BC = np.zeros((len(proposals), columns), bool)
    for b, proposal in enumerate(proposals):
        if not proposal.gate.passed or proposal.parsed.question is None:
            continue
        prompt = protocol.prompt.format(question=proposal.parsed.question)
        answer = f" {atlas.graph.labels[proposal.chain.entities[-1]]}"
        for column, passages in context_texts(proposal, atlas, protocol, one_shot[b]).items():
            owners.append(b * columns + column)
            texts.append(f"{prompt}{passages}<answer>")
            answers.append(answer)
            valid_BC[b, column] = True
    items = []
    for context, scored in zip(encode(texts), encode(answers), strict=True):
        targets = np.arange(len(context), len(context) + len(scored))
        ids = np.array(context + scored, np.int32)
        items.append(Item(ids, targets, np.zeros(len(scored), np.float32)))
    return items, owners, valid_BC


def tasks_of(
    proposals: Sequence[Proposal],
    atlas: Atlas,
    iteration: int,
    most: int,
) -> tuple[list[Task], int]:
    """The tasks of the proposals that passed, each question once, and how many came twice.

    Args:
      proposals: judged proposals.
      atlas: the world.
      iteration: of the run, noted in the tasks.
      most: tasks wanted; later ones are left out.
    """
    tasks: list[Task] = []
    seen: set[str] = set()
    duplicates = 0
    for proposal in proposals:
        question = proposal.parsed.question
        if not proposal.gate.passed or question is None:
            continue
        if question in seen:
            duplicates += 1
            continue
        seen.add(question)
        if len(tasks) == most:
            continue
        chain = proposal.chain
        tasks.append(
            Task(
                id=f"iteration{iteration}-{len(tasks)}",
                question=question,
                answers=atlas.graph.names(chain.entities[-1]),
                hops=chain.hops,
                source_id=atlas.graph.entity_ids[chain.entities[0]],
                evidence=tuple(atlas.passage_of(entity).id for entity in chain.entities),
                iteration=iteration,
                chain_id=chain.id,
                meta={
                    "proposal": proposal.output,
                    "answer_in_source": answer_in_source(chain, atlas),
                },
            )
        )
    return tasks, duplicates
