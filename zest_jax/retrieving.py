"""What answers the searches of a run, as a config's group `retrieval` says.

Without an index the world's passages are embedded by a bag of the policy's own token ids and lie on
the device: the whole rollout is one compiled program. So it is with the folder of an index of
vectors (`retrieval.index`) whose passages were tokenised for the policy. Any other index, and a
server, is asked by the host-driven driver, which runs the same steps.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from typing import Protocol as Protocol_

import jax
import numpy as np

from zest_jax.errors import UserError
from zest_jax.models import PolicyConfig
from zest_jax.parallel import Placement, hosts
from zest_jax.players import Player
from zest_jax.retrieval import Retriever
from zest_jax.retrieval.encoders import TextEncoder
from zest_jax.retrieval.index_files import DTYPES, IndexFolder, read_manifest
from zest_jax.retrieval.interface import PassageRetriever
from zest_jax.retrieval.open_device import DeviceFolder, reads_ids_of, why_not
from zest_jax.retrieval.open_index import encoder_of, open_retriever
from zest_jax.retrieval.passages import PassageTexts
from zest_jax.retrieval.retriever import passage_store
from zest_jax.rollout import side_by_side
from zest_jax.rollout.host_driver import HostSampler
from zest_jax.rollout.protocols import SEARCH, Protocol, find
from zest_jax.rollout.sampler import Sampler
from zest_jax.rollout.state import RolloutSpec
from zest_jax.rollout.stops import read_text, token_bytes
from zest_jax.tasks.types import Passage
from zest_jax.tasks.world import World
from zest_jax.tracing import TraceCounter


class Find(Protocol_):
    """Passages that a single search with each text brings, best first."""

    def __call__(self, texts: Sequence[str], most: int = 0) -> list[list[Passage]]: ...


@dataclasses.dataclass(frozen=True)
class Retrieval:
    """What answers searches.

    Attributes:
      name: for people.
      on_device: a retriever for each role that searches, which share encoder and index; {} where
        the host is asked.
      host: what host-driven rollouts ask; None where everything is on device.
      find: passages that a single search with each text brings, best first; as many as `top_k`, or
        as its second argument says.
      top_k: passages per search.
      by_text: an index or a server, asked by text; None for the world's passages.
      how: where an index is searched and why, for people; "" for the world's passages.
    """

    name: str
    on_device: dict[str, Retriever]
    host: PassageRetriever | None
    find: Find
    top_k: int
    by_text: PassageRetriever | None = None
    how: str = ""

    def on(self, placement: Placement) -> "Retrieval":
        """The same with what is on device shared out over the devices of a placement."""
        mesh = placement.mesh
        if mesh is None:
            return self
        # Roles share encoder and index: what is one array stays one.
        placed: dict[int, jax.Array] = {}
        on_device = {
            role: side_by_side.place_retriever(retriever, mesh, placed)
            for role, retriever in self.on_device.items()
        }
        return dataclasses.replace(self, on_device=on_device)

    def sampler(
        self,
        role: str,
        *,
        policy: PolicyConfig,
        spec: RolloutSpec,
        protocol: Protocol,
        tokenizer: Any,
        capacity: int,
        traces: TraceCounter,
        eos_ids: Sequence[int],
        placement: Placement = Placement(),  # noqa: B008 (frozen)
    ) -> Sampler:
        """The compiled rollout of a role, or the host-driven one where the host is asked."""
        name = f"{role}_rollout"
        if self.host is not None and spec.searches:
            return HostSampler(
                name,
                policy,
                spec,
                protocol,
                tokenizer,
                self.host,
                capacity,
                traces,
                eos_ids,
                top_k=self.top_k,
                placement=placement,
            )
        retriever = self.on_device.get(role) if spec.searches else None
        return Sampler(
            name, policy, spec, protocol, tokenizer, retriever, capacity, traces, eos_ids,
            placement,
        )  # fmt: skip


def build_retrieval(
    config: Any,
    world: World,
    player: Player,
    protocols: Mapping[str, Protocol],
    traces: TraceCounter,
) -> Retrieval:
    """The world's passages, embedded by a bag of a policy's token ids.

    Args:
      config: the run's.
      world: whose passages.
      player: in whose tokens.
      protocols: how each role of the player writes; the first one's passages are the index's.
      traces: counts the traces.

    Raises:
      UserError: a passage does not fit an observation.
    """
    top_k, tokenizer = config.retrieval.top_k, player.tokenizer
    searching = searching_roles(config, protocols)
    for role in searching:
        check_passages(config, world, tokenizer, role, protocols[role])
    titles = [passage.title for passage in world.passages]
    bodies = [passage.text for passage in world.passages]
    first, *_ = protocols
    retriever = Retriever.build(
        tokenizer,
        titles,
        bodies,
        layout=protocols[first].layout,
        retrieved=top_k,
        queries=protocols[first].most_queries,
        observation_length=config[first].observation_length,
        text_weight=config.retrieval.text_weight,
        dimension=config.retrieval.dimension,
        vocab_size=player.policy.vocab_size,
    )
    on_device = {first: retriever}
    for role in searching:
        shown, size = protocols[role], config[role].observation_length
        if role != first:
            store = passage_store(
                tokenizer, titles, bodies, shown.layout, top_k, shown.most_queries, size
            )
            on_device[role] = retriever.shown_as(store)
    searches: dict[int, Callable[..., Any]] = {}

    def search_for(most: int) -> Callable[..., Any]:
        if most not in searches:
            deeper = dataclasses.replace(retriever, retrieved=most)
            name = "search" if most == top_k else f"search_{most}"
            searches[most] = traces.jit(name, deeper.search)
        return searches[most]

    width = config.proposer.action_length
    fixed = max(config.proposer.seeds_per_step * config.proposer.samples, 1)

    def find_on_device(texts: Sequence[str], most: int = 0) -> list[list[Passage]]:
        if not texts:
            return []
        search = search_for(min(most or top_k, len(world.passages)))
        questions = tokenizer([f" {text}" for text in texts], add_special_tokens=False)["input_ids"]
        found: list[list[Passage]] = []
        for at in range(0, len(questions), fixed):  # batches of one size, so that none re-traces
            part = questions[at : at + fixed]
            query_BQ, length_B = np.zeros((fixed, width), np.int32), np.zeros(fixed, np.int32)
            for b, ids in enumerate(part):
                length_B[b] = min(len(ids), width)
                query_BQ[b, : length_B[b]] = ids[: length_B[b]]
            rows_B1R, _ = hosts.fetch(search(query_BQ[:, None], length_B[:, None]))
            found += [
                [world.passages[row] for row in rows if row >= 0]
                for rows in rows_B1R[: len(part), 0].tolist()
            ]
        return found

    return Retrieval(world.name, on_device, None, find_on_device, top_k)


def searching_roles(config: Any, protocols: Mapping[str, Protocol]) -> list[str]:
    """Those of the roles that search in this run."""
    roles = [role for role in protocols if protocols[role].kind(SEARCH) and config[role].searches]
    return [r for r in roles if r == "solver"] if config.schedule.kind == "labelled" else roles


def build_index_retrieval(
    config: Any,
    players: Mapping[str, Player],
    protocols: Mapping[str, Protocol],
    placement: Placement,
) -> Retrieval:
    """The index or server that a config names, on the devices where `retrieval.where` lets it be.

    Args:
      config: the run's.
      players: of the roles.
      protocols: how each role writes.
      placement: the devices.

    Raises:
      UserError: it does not open, there is no room for it, or it cannot be where it is wanted.
    """
    r, roles = config.retrieval, searching_roles(config, protocols)
    why = _why_on_host(config, players, protocols, roles, placement)
    if r.where == "device" and why:
        raise UserError(f"retrieval.where=device, but {why}; or set retrieval.where=auto.")
    if r.where == "host" or why:
        where = "from the host" + (f", since {why}" if why else " (retrieval.where=host)")
        return _on_host(config, where)
    axes = () if placement.mesh is None else side_by_side.AXES
    folder = DeviceFolder(r.index, placement.mesh, axes, r.encoder)
    on_device = {}
    for role in roles:
        player, shown = players[role], protocols[role]
        store = folder.store(
            player.tokenizer,
            shown.layout,
            r.top_k,
            shown.most_queries,
            config[role].observation_length,
        )
        read = functools.partial(read_text, token_bytes(player.tokenizer))
        on_device[role] = folder.retriever(player.tokenizer, read, r.query_length, store)
    by_text = folder.by_text()

    def find_by_text(texts: Sequence[str], most: int = 0) -> list[list[Passage]]:
        answers = by_text.search_passages(list(texts), most or r.top_k) if texts else []
        return [[passage for passage, _ in answer] for answer in answers]

    rewritten = any(isinstance(o.encoder, TextEncoder) for o in on_device.values())
    where = "within the compiled rollout" + (
        " (the host rewrites queries for the encoder, which has another vocabulary)"
        if rewritten
        else ""
    )
    return Retrieval(r.index, on_device, None, find_by_text, r.top_k, by_text, where)


def index_bytes(config: Any, tokenizers: Mapping[str, Any]) -> tuple[float, float] | None:
    """About what the vectors and passages of the index that a config names take on devices, before
    it is opened: what devices share, and what each has whole. None where the host is asked.

    Args:
      config: the run's.
      tokenizers: of the policy of each role; None for one that is not known.

    Raises:
      UserError: there is no index.
    """
    r = config.retrieval
    if not r.index:
        return 0.0, 0.0
    if "://" in r.index or r.where == "host":
        return None
    protocols = {role: find(config[role].protocol) for role in tokenizers}
    roles = searching_roles(config, protocols)
    known = [role for role in roles if tokenizers[role] is not None]
    if why_not(r.index, [(tokenizers[role], protocols[role].layout) for role in known]):
        return None
    manifest = read_manifest(Path(r.index).expanduser())
    # A passage is cut to its share of an observation; stores of several roles are seldom one.
    shares = [config[role].observation_length / r.top_k for role in roles]
    passages = 4.0 * manifest.passages * sum(shares)
    if manifest.kind == "exact":
        vector = manifest.dimension * DTYPES[manifest.dtype].itemsize
        return manifest.passages * vector + passages, 0.0
    return 0.0, sum(entry.bytes for entry in manifest.files) + passages


def _why_on_host(
    config: Any,
    players: Mapping[str, Player],
    protocols: Mapping[str, Protocol],
    roles: Sequence[str],
    placement: Placement,
) -> str:
    """Why an index is not searched within the compiled rollout; "" where it can be."""
    where = config.retrieval.index
    if "://" in where:
        return "a server is asked over the network"
    wanted = [(players[role].tokenizer, protocols[role].layout) for role in roles]
    why = why_not(where, wanted)
    if why or placement.mesh is None or placement.mesh.shape["tensor"] == 1:
        return why
    encoder = encoder_of(IndexFolder(where), config.retrieval.encoder)
    if all(reads_ids_of(encoder, tokenizer) for tokenizer, _ in wanted):
        return ""
    return (
        "its encoder has another vocabulary than the policy, whose heads are split over devices "
        "(mesh.tensor), where no compiled step can ask the host"
    )


def _on_host(config: Any, how: str) -> Retrieval:
    r = config.retrieval
    options = {"encoder": r.encoder} if r.encoder else {}
    host = hosts.alone(lambda: open_retriever(r.index, **options))

    def find_on_host(texts: Sequence[str], most: int = 0) -> list[list[Passage]]:
        if not texts:
            return []
        # One process asks: a server need not answer twice alike.
        ask = functools.partial(host.search_passages, list(texts), most or r.top_k)
        answers = hosts.told(lambda: hosts.alone(ask))
        return [[passage for passage, _ in answer] for answer in answers]

    return Retrieval(r.index, {}, host, find_on_host, r.top_k, host, how)


def check_passages(
    config: Any, world: World, tokenizer: Any, role: str, protocol: Protocol
) -> None:
    """Refuses passages that a role's observation cannot show.

    Raises:
      UserError: which passage, its tokens and the limit.
    """
    most, top_k = protocol.most_queries, config.retrieval.top_k
    shown = tokenizer(
        [protocol.show_results([[(p.title, p.text)] * top_k] * most) for p in world.passages],
        add_special_tokens=False,
        verbose=False,
    )["input_ids"]
    longest = max(range(len(shown)), key=lambda n: len(shown[n]))
    limit = config[role].observation_length
    if len(shown[longest]) > limit:
        folder = Path() if world.atlas is None else world.atlas.folder
        raise UserError(
            f"{folder / 'passages.jsonl'}: passage {world.passages[longest].id} has "
            f"{len(shown[longest])} tokens with its tags, shown {top_k * most} at a time, more "
            f"than {role}.observation_length={limit}; raise it, lower retrieval.top_k or shorten "
            "the passage."
        )


def index_world(where: str) -> World:
    """The corpus of an index folder; a server's cannot be read by row, and is empty here.

    Raises:
      UserError: the folder has no passages.
    """
    if "://" in where:
        return World(where, (), ())
    folder = Path(where).expanduser() / "passages"
    if not folder.is_dir():
        raise UserError(
            f"{where}: no index is there; build one with zest_jax.build_index, or give a server's "
            "address (http://…)."
        )
    passages: Sequence[Any] = PassageTexts(folder)
    return World(Path(where).name, passages, ())
