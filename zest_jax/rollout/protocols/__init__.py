"""Every protocol by its name: whatever the files of this folder list as `PROTOCOLS`."""

import importlib
import pkgutil

from zest_jax.errors import UserError
from zest_jax.rollout.protocols.plain import (
    PLAIN_BACKWARD,
    PLAIN_DOCUMENT,
    PLAIN_PROPOSER,
    PLAIN_SEARCH,
)
from zest_jax.rollout.protocols.protocol import (
    ANSWER,
    SEARCH,
    Call,
    Limits,
    Protocol,
    in_chat_template,
)
from zest_jax.rollout.protocols.search_r1 import SEARCH_R1

PROTOCOLS: dict[str, Protocol] = {}


def register(*protocols: Protocol) -> None:
    """Makes protocols known by their names.

    Raises:
      ValueError: a name is taken by another one.
    """
    for each in protocols:
        if PROTOCOLS.setdefault(each.name, each) != each:
            raise ValueError(f"there are two protocols named {each.name}")


def find(name: str) -> Protocol:
    """The protocol of a name.

    Raises:
      UserError: there is none; tells which there are.
    """
    if name not in PROTOCOLS:
        raise UserError(f"there is no protocol {name!r}; there are {', '.join(PROTOCOLS)}.")
    return PROTOCOLS[name]


for _found in pkgutil.iter_modules(__path__):
    register(*getattr(importlib.import_module(f"{__name__}.{_found.name}"), "PROTOCOLS", ()))

__all__ = [
    "ANSWER",
    "PLAIN_BACKWARD",
    "PLAIN_DOCUMENT",
    "PLAIN_PROPOSER",
    "PLAIN_SEARCH",
    "PROTOCOLS",
    "SEARCH",
    "SEARCH_R1",
    "Call",
    "Limits",
    "Protocol",
    "find",
    "in_chat_template",
    "register",
]
