"""Whole runs of the real programs, in processes of their own, small enough for tests."""

import contextlib
import dataclasses
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONFIG = str(ROOT / "tests" / "tiny_config.py")
HELDOUT, VALIDATION = 12, 6


def write_world(folder: Path) -> Path:
    """The atlas with few questions."""
    atlas = Path(str(files("zest_jax") / "assets" / "atlas"))
    shutil.copytree(atlas, folder)
    for name, count in (("heldout", HELDOUT), ("validation", VALIDATION)):
        path = folder / f"{name}.jsonl"
        lines = path.read_text("utf-8").splitlines(keepends=True)
        path.write_text("".join(lines[:: len(lines) // count][:count]), "utf-8")
    return folder


def untimed(record: dict[str, Any]) -> dict[str, Any]:
    """A record of the metrics without its time, and without how long things took."""
    return {k: v for k, v in record.items() if k != "time" and not k.startswith("time/")}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where runs find their world, and the programs that earlier ones have compiled."""

    folder: Path

    @property
    def world(self) -> Path:
        return self.folder / "world"

    def make_world(self) -> None:
        if not self.world.exists():
            write_world(self.world)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While one worker of the suite is within, the others wait."""
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def arguments(self, workdir: Path, *more: str, config: str = CONFIG) -> list[str]:
        """Flags of `zest_jax.train`; later ones win."""
        # ZEST_TEST_POLICY tries a policy that does not ship yet.
        policy = os.environ.get("ZEST_TEST_POLICY", "smoke_policy")
        return [
            f"--config={config}",
            f"--workdir={workdir}",
            f"--config.world.folder={self.world}",
            f"--config.policy.folder={policy}",
            *more,
        ]

    def environment(self) -> dict[str, str]:
        """Of the programs that are started."""
        # A run does its compiled steps many times, and what it compiles serves the runs after it:
        # one level more than in the suite's own processes costs about as much to compile and takes
        # a third off a run.
        flags = os.environ["XLA_FLAGS"].replace("optimization_level=0", "optimization_level=1")
        return os.environ | {
            "XLA_FLAGS": flags,
            "JAX_ENABLE_COMPILATION_CACHE": "1",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def start(
        self,
        arguments: list[str],
        program: str = "train",
        prefix: tuple[str, ...] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> subprocess.Popen:
        """Starts a program of `zest_jax`, or a module; `prefix` stands before its command,
        `variables` are of its environment."""
        module = program if "." in program else f"zest_jax.{program}"
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=self.environment() | dict(variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, arguments: list[str], *args, **options) -> subprocess.CompletedProcess:
        """Starts a program and waits for its end."""
        with self.start(arguments, *args, **options) as process:
            try:
                out, err = process.communicate(timeout=240)
            finally:
                process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)
