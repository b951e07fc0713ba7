"""Rollouts written down for people: one JSON line each, which `zest_jax.view` shows.

A line (version 1) has these fields; numbers that are not known are null or left out:

  version, step, iteration  where in the run it stands.
  role                 "solver" or "proposer".
  id                   of the rollout within its step ("task/number", as in rewards.jsonl).
  task, group          id of the question (or of the proposer's seed), and a number that the
                       rollouts of one question share within a step.
  question, golden_answers, hops, evidence   evidence: ids of the gold passages.
  turns                what was written after the prompt, in order; see below.
  answer, em, f1       of the solver; em is exact match, 0 or 1.
  reward, reward_parts, advantage   the parts by name; `why` tells what a teacher said.
  finish               the name of a `Finish` in small letters.
  searches, queries, duplicates     how many; duplicates repeat an earlier query of the rollout.
  chain, answer, reason, log_likelihoods   of the proposer: its seed in words, the answer that it
                       claims, the gate that refused it ("" for none), and the solver's
                       log-likelihood of the answer per token, by context.

A turn is one of

  {"by": "policy", "action": "search", "answer", "question" or "none", "text", "sizes": […],
   "logps": […], "queries": […]}
  {"by": "tool", "passages": [{"query", "id", "title", "text", "score", "gold", "holds_answer"}],
   "text"}
  {"by": "injected", "text"}

`sizes` are the bytes of each sampled token and `logps` their log-probabilities in nats, under the
softmax at the sampling temperature. Tokens are cut out of the UTF-8 bytes of `text`, never out of
its characters: a token may be part of a character, and its bytes are then told as they are. Where
a policy's bytes are no UTF-8, `text` shows U+FFFD for what cannot be read and `hex` holds the bytes
themselves, which `sizes` then cut.

`query` is the number of the query, in its turn, that found the passage. `gold` is true for
evidence, and null where the question has none on record. A tool's `text` is what the policy read;
it is left out where it holds the whole text of each of the passages.

Shape letters: N rollouts, L episode length, B proposals, C contexts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np

from zest_jax.rollout.protocols import ANSWER, SEARCH
from zest_jax.rollout.sampler import Sampler
from zest_jax.rollout.stops import token_bytes
from zest_jax.rollout.trajectories import Finish, Role, Trajectories
from zest_jax.tasks.types import Passage
from zest_jax.text import contains_any
from zest_jax.workdir import read_jsonl

VERSION = 1

# Of a run's folder `rollouts`.
FILES = ("proposals.jsonl", "episodes.jsonl")

# Rollouts that a step writes at the most: whole groups, some of every hop count.
MOST = 64

# Of a step's, in the report.
_REPORTED_PROPOSALS = 6


class Recorder:
    """Writes the rollouts of one role down.

    Args:
      sampler: that draws them.
      passages: the corpus, by the rows that episodes name; () where only a server has it.
    """

    def __init__(self, sampler: Sampler, passages: Sequence[Passage]):
        self.sampler, self.passages = sampler, passages

    @cached_property
    def _bytes(self) -> list[bytes | None]:
        return token_bytes(self.sampler.tokenizer)

    def record(
        self,
        episodes: Trajectories,
        n: int,
        answers: Sequence[str],
        evidence: Iterable[str],
        **more: Any,
    ) -> dict[str, Any]:
        """A rollout's line without where in the run it stands.

        Args:
          episodes: on the host.
          n: the rollout's row.
          answers: right answers, for marking passages that hold one.
          evidence: ids of the gold passages; none where they are not known.
          more: fields of the role, which come first.
        """
        evidence = list(evidence)
        return {
            "version": VERSION,
            **more,
            "evidence": evidence,
            "finish": Finish(int(episodes.finish_N[n])).name.lower(),
            "searches": int(episodes.searches_N[n]),
            "queries": int(episodes.asked_NT[n].sum()),
            "duplicates": int(episodes.duplicates_N[n]),
            "turns": self.turns(episodes, n, answers, evidence),
        }

    def turns(
        self, episodes: Trajectories, n: int, answers: Sequence[str], evidence: Sequence[str]
    ) -> list[dict[str, Any]]:
        """The turns of a rollout, as the head of this file describes them."""
        begin, end = int(episodes.prompt_length_N[n]), int(episodes.length_N[n])
        role_L = np.asarray(episodes.role_NL[n, :end])
        turn_L = np.asarray(episodes.turn_NL[n, :end])
        out: list[dict[str, Any]] = []
        search = 0
        for (role, _), run in groupby(
            range(begin, end), lambda at: (int(role_L[at]), int(turn_L[at]))
        ):
            places = list(run)
            ids = np.asarray(episodes.ids_NL[n])[places].tolist()
            pieces = [self._piece(token) for token in ids]
            if role == Role.POLICY:
                logps = np.asarray(episodes.logp_NL[n])[places].tolist()
                out.append(self._spoken(pieces, logps))
                continue
            text = b"".join(pieces).decode("utf-8", "replace")
            if role == Role.TOOL:
                found = self._found(episodes, n, search, answers, evidence)
                search += 1
                turn: dict[str, Any] = {"by": "tool", "passages": found}
                if not found or any(each["text"] not in text for each in found):
                    turn["text"] = text
                out.append(turn)
            else:
                out.append({"by": "injected", "text": text})
        return out

    def _piece(self, token: int) -> bytes:
        """The bytes of a token; a special one has those of its name."""
        known = self._bytes[token] if token < len(self._bytes) else b""
        if known is None:
            return str(self.sampler.tokenizer.convert_ids_to_tokens(token) or "").encode()
        return known

    def _spoken(self, pieces: Sequence[bytes], logps: Sequence[float]) -> dict[str, Any]:
        raw = b"".join(pieces)
        text = raw.decode("utf-8", "replace")
        protocol = self.sampler.protocol
        action = protocol.action(text)
        queries = protocol.queries(text) if action else None
        kind = "none"
        if action is not None and action[0] == ANSWER:
            kind = protocol.tag(ANSWER) or ANSWER
        elif queries is not None:
            kind = SEARCH
        turn: dict[str, Any] = {"by": "policy", "action": kind, "text": text}
        if text.encode() != raw:
            turn["hex"] = raw.hex()
        turn |= {"sizes": [len(piece) for piece in pieces], "logps": [number(x, 4) for x in logps]}
        return turn | ({"queries": queries} if queries is not None else {})

    def _found(
        self,
        episodes: Trajectories,
        n: int,
        search: int,
        answers: Sequence[str],
        evidence: Sequence[str],
    ) -> list[dict[str, Any]]:
        """The passages that a search brought, by query, best first; [] where a server did."""
        if search >= episodes.rows_NTUR.shape[1] or not len(self.passages):
            return []
        out = []
        for query, rows in enumerate(np.asarray(episodes.rows_NTUR[n, search])):
            for place in np.flatnonzero(rows >= 0):
                passage = self.passages[int(rows[place])]
                out.append(
                    {
                        "query": query,
                        "id": passage.id,
                        "title": passage.title,
                        "text": passage.text,
                        "score": number(episodes.scores_NTUR[n, search, query, place], 4),
                        "gold": passage.id in evidence if evidence else None,
                        "holds_answer": contains_any(f"{passage.title} {passage.text}", answers),
                    }
                )
        return out


def chosen(hops: Sequence[int], group: int, most: int = MOST) -> list[int]:
    """Numbers of the groups to write down: the first of every hop count, then the second, …, as
    long as their rollouts are at most `most`, in order; one at least.

    Args:
      hops: hop count of each group.
      group: rollouts in a group.
      most: rollouts.
    """
    seen: dict[int, int] = {}
    order = []
    for g, count in enumerate(hops):
        seen[count] = seen.get(count, 0) + 1
        order.append((seen[count], count, g))
    return sorted(g for _, _, g in sorted(order)[: max(1, most // max(group, 1))])


def number(value: Any, digits: int = 6) -> float | None:
    """A number that JSON has, rounded; None for what is none."""
    value = float(value)
    return round(value, digits) if math.isfinite(value) else None


def text_of(line: Mapping[str, Any]) -> str:
    """Everything after the prompt as one text, observations with their passages."""
    if "turns" not in line:
        return str(line.get("text") or "")
    parts = []
    for turn in line["turns"]:
        if turn["by"] == "tool" and "text" not in turn:
            shown = "\n".join(f"{p['title']}: {p['text']}" for p in turn["passages"])
            parts.append(f"<information> {shown}</information>")
        else:
            parts.append(turn["text"])
    return "".join(parts)


def for_report(folder: Path) -> list[dict[str, Any]]:
    """Of a run's rollouts, those that its report shows, as `report.write_report` takes them: per
    step some proposals, and an episode of every hop count. Lines without a version, which earlier
    releases wrote, are all shown."""
    out: list[dict[str, Any]] = []
    # By step and group: the first rollout, and whether each one is right. The rest is let go.
    groups: dict[tuple[int, int], tuple[dict[str, Any], list[bool]]] = {}
    proposals: Counter[int] = Counter()
    for line in chain.from_iterable(read_jsonl(folder / name) for name in FILES):
        if "version" not in line:
            out.append(line)
        elif line["role"] == "solver":
            first = groups.setdefault((line["step"], line["group"]), (line, []))
            first[1].append(line["em"] >= 1)
        elif proposals[line["step"]] < _REPORTED_PROPOSALS:
            proposals[line["step"]] += 1
            label = line["reason"] or "passed the gates"
            out.append({**line, "kind": "proposal", "label": label, "text": text_of(line)})
    told = set()
    for (step, _), (line, right) in groups.items():
        if (step, line["hops"]) not in told:
            told.add((step, line["hops"]))
            label = f"{sum(right)} of {len(right)} rollouts right"
            out.append({**line, "kind": "solver", "label": label, "text": text_of(line)})
    return out
