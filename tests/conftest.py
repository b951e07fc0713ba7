"""Settings of the whole suite. They must stand before the first import of JAX."""

import importlib.metadata
import os

_JAXLIB = importlib.metadata.version("jaxlib")
# Tests of several devices or of a GPU start processes of their own.
os.environ["JAX_PLATFORMS"] = "cpu"
# A compiled program from an earlier run would hide what compiles now, and how often.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
# The suite compiles a great deal and computes little: fewer passes over the machine code halve its
# time, and so does code written for each operation instead of for each fusion of several. Programs
# that tests start inherit them; a compilation for a TPU leaves them out.
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        # XLA ends the process over a flag that it does not know, as later versions do not this one.
        *(["--xla_cpu_use_fusion_emitters=false"] if _JAXLIB.startswith("0.10.") else []),
    )
).strip()
# Nothing in the suite may need a network.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest  # noqa: E402
import tiny_run  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

# Shapes and types are checked at every call of the pure functions (not in a user's run).
install_import_hook(
    ["zest_jax.rewards", "zest_jax.learning.losses", "zest_jax.learning.advantages"],
    "beartype.beartype",
)


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """World and compiled programs of the tiny runs (`tiny_run.Place`), one for all workers."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder /= "tiny"
    folder.mkdir(exist_ok=True)
    place = tiny_run.Place(folder)
    with place.alone():
        place.make_world()
    return place


@pytest.fixture(scope="session")
def finished_run(place):
    """The workdir of an uninterrupted tiny run. Read it; copy it to change it."""
    workdir = place.folder / "finished"
    with place.alone():  # the first worker makes it, the other waits
        if not (workdir / "report.json").exists():
            done = place.run(place.arguments(workdir))
            assert done.returncode == 0, done.stderr
    return workdir


# Files of a minute or more. They go first: a long one that came last would run alone. And the
# TPU compilers, which need nothing of a run, take the other worker while the first makes one.
LONG = (
    *("methods", "tpu", "resume", "train", "partitioned", "lora", "bad_input", "engine"),
    *("teacher_faults", "updates", "attention_cache", "evaluate", "ask", "sharding", "export"),
    "host_driver",
)


def pytest_collection_modifyitems(items):
    """Puts the tests of long files before all others, in the order of LONG."""
    place = {f"test_{name}.py": n for n, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONG)))
