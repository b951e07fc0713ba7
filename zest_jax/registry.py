"""Tables of named parts: what a config may name, and where an extension adds its own.

    GATES = Registry("gate", "proposer.gates")

    @GATES.register("no_digits")
    def no_digits(written): ...

A config file that imports the module with the new part may then name it.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from zest_jax.errors import UserError

Part = TypeVar("Part")


class Registry(Generic[Part]):
    """Parts of one kind by name.

    Args:
      kind: what a part is called in a message.
      field: the config field that names one.
    """

    def __init__(self, kind: str, field: str):
        self.kind, self.field = kind, field
        self._parts: dict[str, Part] = {}

    def register(self, name: str) -> Callable[[Part], Part]:
        """A decorator that makes a part known by a name, and returns it unchanged.

        Raises:
          ValueError: another part has the name.
        """

        def add(part: Part) -> Part:
            if self._parts.setdefault(name, part) is not part:
                raise ValueError(f"there are two {self.kind}s named {name!r}")
            return part

        return add

    def find(self, name: str) -> Part:
        """The part of a name.

        Raises:
          UserError: there is none; tells which there are.
        """
        if name not in self._parts:
            raise UserError(
                f"config field {self.field}: there is no {self.kind} {name!r}; there are "
                f"{', '.join(self.names)}."
            )
        return self._parts[name]

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order in which they became known."""
        return tuple(self._parts)
