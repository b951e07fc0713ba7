"""A player: a policy with its tokenizer, and how it is spoken to.

Proposer and solver may be one player in two roles, or two of different size, family and tokenizer.
"""

import dataclasses
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax

from zest_jax.errors import UserError
from zest_jax.models import PolicyConfig, init_params
from zest_jax.models.backends import choose_attention
from zest_jax.models.config import LoraSpec
from zest_jax.models.hf import load_config, load_generation, load_pretrained, read_tokenizer
from zest_jax.models.lora import add_lora, join, split_lora
from zest_jax.models.policy import Params
from zest_jax.parallel import Placement
from zest_jax.rollout.protocols import Protocol, in_chat_template
from zest_jax.tasks.world import World


@dataclasses.dataclass(frozen=True)
class Player:
    """A policy with what belongs to it.

    Attributes:
      tokenizer: the policy's.
      policy: its shape.
      params: where training starts from: the whole policy, or adapters that change nothing yet.
      frozen: the policy beside the adapters; None where all of it is trained.
      origin: where that came from, in words.
      attention: which back end was chosen, and why.
      generation: its generation_config.json, {} for random weights.
      chat: whether its prompts are a user's turn of its tokenizer's chat template.
      system: system message of that turn; "" leaves it to the template.
    """

    tokenizer: Any
    policy: PolicyConfig
    params: Params
    frozen: Params | None
    origin: str
    attention: str
    generation: dict[str, Any]
    chat: bool = False
    system: str = ""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts."""
        if not texts:
            return []
        # Not verbose: what is too long is our own business, with an error of its own.
        return self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]

    def whole(self, params: Params) -> Params:
        """All parameters of a policy of which `params` are trained, without copying any."""
        return join(self.frozen, params)

    def speaks(self, protocol: Protocol) -> Protocol:
        """A protocol as this player is given it."""
        return in_chat_template(protocol, self.tokenizer, self.system) if self.chat else protocol

    @property
    def trained(self) -> int:
        """Parameters that are trained."""
        return sum(x.size for x in jax.tree.leaves(self.params))

    @property
    def size(self) -> int:
        """All parameters."""
        return self.trained + sum(x.size for x in jax.tree.leaves(self.frozen))

    @property
    def end_ids(self) -> list[int]:
        """See `end_ids`."""
        return end_ids(self.generation)


def load_player(
    given: Any,
    p: Any,
    world: World,
    lora: LoraSpec | None,
    keys: tuple[jax.Array, jax.Array],
    placement: Placement = Placement(),  # noqa: B008 (frozen)
) -> Player:
    """A policy of a folder, or of random weights.

    Args:
      given: the config's group with `folder`, `chat` and `system`; a folder is one of Hugging Face,
        or a policy that ships with the package; "" makes random weights.
      p: the config's group `policy`: how to compute, and the shape of random weights.
      world: whose tokenizer random weights have.
      lora: the adapters that are trained; None trains the whole policy.
      keys: of random weights and of the adapters.
      placement: the devices that share the parameters.

    Raises:
      UserError: the folder cannot be read, or there is none and the world has no tokenizer.
    """
    frozen, folder = None, given.folder
    generation: dict[str, Any] = {}
    # A frozen policy is only computed with, so it is kept in the type of that.
    kept = "float32" if lora is None else p.dtype
    if folder:
        path = policy_folder(folder)
        policy, params = load_pretrained(path, dtype=p.dtype, param_dtype=kept, mesh=placement.mesh)
        tokenizer = read_tokenizer(path, policy.vocab_size)
        generation = load_generation(path)
    else:
        if world.atlas is None:
            raise UserError("a run on an index needs a policy to start from: set policy.folder.")
        tokenizer = read_tokenizer(world.atlas.tokenizer_folder)
        policy = random_shape(p, len(tokenizer))
        params = init_params(policy, keys[0])
        params = placement.params(jax.tree.map(lambda x: x.astype(kept), params))
    policy, attention = choose_attention(policy, p.attention)
    if lora is not None:
        policy = dataclasses.replace(policy, lora=lora)
        params, frozen = split_lora(add_lora(policy, params, keys[1]))
        params, frozen = placement.params(params), placement.params(frozen)
    origin = folder or "random weights"
    return Player(
        tokenizer, policy, params, frozen, origin, attention, generation, given.chat, given.system
    )


def policy_shape(given: Any, p: Any, world: World | None) -> PolicyConfig:
    """The shape of `load_player`'s policy, without its weights; `world` may be None for a folder.

    Raises:
      UserError: as `load_player`.
    """
    if given.folder:
        return load_config(policy_folder(given.folder), p.dtype)
    if world is None or world.atlas is None:
        raise UserError("a run on an index needs a policy to start from: set policy.folder.")
    return random_shape(p, len(read_tokenizer(world.atlas.tokenizer_folder)))


def random_shape(p: Any, vocab_size: int) -> PolicyConfig:
    """The shape of random weights, as the config's group `policy` says."""
    return PolicyConfig(
        vocab_size=vocab_size,
        width=p.width,
        layers=p.layers,
        heads=p.heads,
        kv_heads=p.kv_heads,
        head_dim=p.head_dim,
        mlp_width=p.mlp_width,
        dtype=p.dtype,
    )


def policy_folder(name: str) -> str:
    """A folder as given, or a policy that ships with the package under that name."""
    name = str(Path(name).expanduser()) if name.startswith("~") else name
    shipped = Path(str(files("zest_jax") / "assets" / name))
    return str(shipped) if "/" not in name and shipped.is_dir() else name


def end_ids(generation: dict[str, Any]) -> list[int]:
    """The end tokens that a generation_config.json names: none, one or several.

    Raises:
      UserError: what it names is no token id.
    """
    ends = generation.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(isinstance(end, int) and not isinstance(end, bool) and end >= 0 for end in ends):
        raise UserError(
            f"the policy's generation_config.json names {ends!r} as eos_token_id; expected one or "
            "several token ids."
        )
    return ends
