"""Who is evaluated: a run's solver, a config's policy or a Hugging Face folder, and what it asks.

A run's solver among its run's passages keeps its compiled rollout. With another index, another
protocol, or as a bare folder, the same steps are driven from the host.
"""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags

from zest_jax import ask, assembly, export
from zest_jax.errors import UserError
from zest_jax.models.lora import fingerprint
from zest_jax.models.policy import Params
from zest_jax.questions import check_evidence, of_world
from zest_jax.retrieval.index_files import read_manifest
from zest_jax.retrieval.interface import PassageRetriever
from zest_jax.retrieval.open_index import open_retriever
from zest_jax.rollout.host_driver import HostSampler
from zest_jax.rollout.protocols import SEARCH
from zest_jax.rollout.sampler import Sampler
from zest_jax.tasks.types import Task
from zest_jax.tracing import TraceCounter


@dataclasses.dataclass(frozen=True)
class Examinee:
    """A solver that is evaluated.

    Attributes:
      name: for people.
      sampler, params: the solver.
      index: what answers its searches, for people; "" where nothing does.
      searched: the retriever or the passages that are searched; None for neither.
      questions: held-out ones of its own; () without a run or config.
      top_k: passages of a search.
      notes: sentences for whoever reads the figures.
    """

    name: str
    sampler: Sampler
    params: Params
    index: str
    searched: Any
    questions: Sequence[Task]
    top_k: int
    notes: tuple[str, ...] = ()

    def check(self, tasks: Sequence[Task]) -> tuple[str, ...]:
        """What is to be known of these questions; refuses them if they do not fit.

        Raises:
          UserError: a question is too long, or the questions are about another corpus.
        """
        protocol, limit = self.sampler.protocol, self.sampler.spec.prompt_length
        for task, length in zip(tasks, lengths(self.sampler, tasks), strict=True):
            if length > limit:
                raise UserError(
                    f"question {task.id} has {length} tokens with its prompt, more than the "
                    f"{limit} that an episode of {protocol.name} has room for "
                    "(solver.prompt_length); raise that field or leave the question out."
                )
        missing = check_evidence(tasks, self.searched, self.index)
        return (*self.notes, missing) if missing else self.notes

    def settings(self) -> dict[str, Any]:
        """What its answers depend on, as JSON."""
        spec, protocol = self.sampler.spec, self.sampler.protocol
        return {
            "solver": self.name,
            "weights": fingerprint(self.params),
            "protocol": protocol.name,
            "prompt": zlib.crc32(protocol.prompt.encode()),
            "index": self.index,
            "passages": corpus_of(self.index).get("fingerprint", ""),
            "top_k": self.top_k,
            "searches": spec.searches,
            "prompt_length": spec.prompt_length,
            "action_length": spec.action_length,
            "observation_length": spec.observation_length,
            "response_length": spec.response_length,
        }

    @property
    def size(self) -> int:
        """Bytes of the policy."""
        return sum(x.nbytes for x in jax.tree.leaves(self.params))


def lengths(sampler: Sampler, tasks: Sequence[Task]) -> list[int]:
    """Tokens of each question with its prompt."""
    texts = [sampler.protocol.prompt.format(question=task.question) for task in tasks]
    ids = sampler.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [len(each) for each in ids]


def corpus_of(index: str) -> dict[str, Any]:
    """Name and fingerprint of an index folder's corpus; {} of what is none."""
    if not index or "://" in index:
        return {}
    try:
        return read_manifest(index).corpus
    except UserError:
        return {}


def of_run(
    config: Any, workdir: str | None, tasks: Sequence[Task] | None, values: flags.FlagValues
) -> Examinee:
    """The solver of a run, or the policy that a config begins with.

    Args:
      config, workdir: either of the two.
      tasks: the questions, if they are known already; a protocol of another prompt makes room for
        them.
      values: the program's flags.

    Raises:
      UserError: it cannot be loaded, or an index or protocol does not fit it.
    """
    if workdir is not None:
        parts, params, step = export.load_role(workdir, "solver", values.step)
        config, name = export.read_config(workdir), f"{workdir}, step {step}"
    else:
        parts = assembly.build(config, TraceCounter())
        params, name = parts.solver.whole(parts.solver.params), parts.solver.origin
    questions = of_world(parts.world.heldout_tasks, parts.world.name)
    own, retrieval = parts.solver_sampler, parts.retrieval
    host, on_device = retrieval.by_text, retrieval.on_device.get("solver")
    searched = None if not own.spec.searches else host or parts.world.passages
    if not (values.index or values.protocol):
        index = retrieval.name if own.spec.searches else ""
        return Examinee(name, own, params, index, searched, questions, retrieval.top_k)

    protocol = own.protocol
    if values.protocol:
        protocol = parts.solver.speaks(assembly.protocol(values.protocol))
    retriever: PassageRetriever | None = host
    if values.index:
        retriever = searched = open_retriever(values.index, **_encoder(values))
    elif host is None and on_device is not None:
        retriever = ask.WorldRetriever(on_device, parts.solver.tokenizer, parts.world.passages)
    searches = own.spec.searches if protocol.kind(SEARCH) and retriever is not None else 0
    prompt = own.spec.prompt_length
    if values.protocol:
        sized = dataclasses.replace(parts.solver, chat=False)  # its prompt is filled in already
        texts = [protocol.prompt.format(question=t.question) for t in tasks or questions]
        prompt = max([prompt, *map(len, sized.encode(texts))])
    spec = dataclasses.replace(
        own.spec,
        prompt_length=prompt,
        searches=searches,
        observation_length=own.spec.observation_length if searches else 0,
        queries=protocol.most_queries,
        response_length=protocol.limits.response,
    )
    top_k = retrieval.top_k if values.top_k is None else values.top_k
    try:
        sampler = HostSampler(
            "solver_rollout", parts.solver.policy, spec, protocol, parts.solver.tokenizer,
            retriever if searches else None, own.capacity, TraceCounter(), parts.solver.end_ids,
            top_k=top_k,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(
            f"protocol {protocol.name} does not fit the lengths of the run's episodes: {error}; "
            "with --config raise that field of the solver (--config.solver.…=…), or export the "
            "solver and give it as --model."
        ) from None
    notes = other_corpus(values.index, config.retrieval.index, retrieval.name) if searches else ()
    index = values.index or retrieval.name if searches else ""
    return Examinee(name, sampler, params, index, searched, questions, top_k, notes)


def other_corpus(index: str, own: str, name: str) -> tuple[str, ...]:
    """A sentence if an index holds other passages than those that a run was trained with: of its
    own index, or of the world of a name."""
    here, there = corpus_of(index), corpus_of(own)
    if here and not own:
        return (
            f"{index} holds the corpus {here.get('name')}, and the policy's run searched the "
            f"passages of {name}.",
        )
    if not (here and there) or here.get("fingerprint") == there.get("fingerprint"):
        return ()
    return (
        f"{index} holds the corpus {here.get('name')}, and the policy's run searched another one, "
        f"{there.get('name')} of {own}.",
    )


def of_folder(tasks: Sequence[Task], values: flags.FlagValues) -> Examinee:
    """A policy of a Hugging Face folder, or of the hub.

    Raises:
      UserError: it cannot be loaded, or a length, an index or a protocol does not fit it.
    """
    who = ask.load_model(values)
    retriever = ask.open_index(who, values)
    texts = [who.protocol.prompt.format(question=task.question) for task in tasks]
    ids = who.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    spec, top_k = ask.sizes(who, max(map(len, ids)), retriever is not None, values)
    spec = dataclasses.replace(spec, slots=values.slots)
    sampler = HostSampler(
        "solver_rollout", who.config, spec, who.protocol, who.tokenizer, retriever,
        4 * values.slots, TraceCounter(), who.eos_ids, top_k=top_k,
    )  # fmt: skip
    return Examinee(who.name, sampler, who.params, values.index, retriever, (), top_k)


def _encoder(values: flags.FlagValues) -> dict[str, str]:
    return {"encoder": values.encoder} if values.encoder else {}
