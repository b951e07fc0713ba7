"""Counting traces: a compiled step that is traced twice for the same shapes is a bug, not a
wait."""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax


class TraceCounter:
    """Makes jitted functions whose traces are counted by name and by the shapes of their
    arguments."""

    def __init__(self) -> None:
        self._seen: collections.Counter[tuple] = collections.Counter()

    def jit(self, name: str, function: Callable, **options: Any) -> Callable:
        """`jax.jit(function, **options)`, counted under `name`."""

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            leaves, tree = jax.tree.flatten((args, kwargs))
            shapes = tuple((getattr(x, "shape", x), str(getattr(x, "dtype", ""))) for x in leaves)
            self._seen[name, str(tree), shapes] += 1
            return function(*args, **kwargs)

        return jax.jit(traced, **options)

    @property
    def traces(self) -> dict[str, int]:
        """Traces by name."""
        total: dict[str, int] = {}
        for (name, _, _), count in self._seen.items():
            total[name] = total.get(name, 0) + count
        return total

    @property
    def retraces(self) -> int:
        """Traces beyond the first for the same name and shapes; 0 where all is well."""
        return sum(count - 1 for count in self._seen.values())
