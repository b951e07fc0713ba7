"""Task sources by name (`source.kind`): where seeds for a proposer, or labelled tasks, come from.

Every file of this folder holds one kind and registers it. A source leaves out whatever the
evaluation starts from (`World.evaluated_sources`).
"""

import importlib
import pkgutil

from zest_jax.tasks.sources.interface import SOURCES, Fits, SeedSource, TaskSource

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")

__all__ = ["SOURCES", "Fits", "SeedSource", "TaskSource"]
