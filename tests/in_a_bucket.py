"""A program where a folder stands in for buckets: `in_a_bucket FOLDER PROGRAM ARGUMENTS…`."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from zest_jax import bucket, placing
from zest_jax.datasets.files import to_path

_, FOLDER, PROGRAM, *ARGUMENTS = sys.argv


def local(text: str | os.PathLike[str]) -> Any:
    return Path(FOLDER, str(text).partition("://")[2]) if "://" in str(text) else to_path(text)


if __name__ == "__main__":
    bucket.to_path = placing.to_path = local  # type: ignore[assignment]
    sys.argv = [PROGRAM, *ARGUMENTS]
    sys.exit(importlib.import_module(f"zest_jax.{PROGRAM}").entry())
