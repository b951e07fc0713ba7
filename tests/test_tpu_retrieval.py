"""All of Wikipedia in the memory of TPU slices, proven by the real TPU compiler; nothing runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tpu
import tpu_retrieval

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not tpu.INSTALLED, reason="the TPU compiler (libtpu) is not installed"),
]


@pytest.fixture(scope="module")
def compiled():
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(root / "tests" / "tpu_retrieval.py"), *tpu_retrieval.SLICES],
        env=os.environ | {"PYTHONPATH": path, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    return {result["name"]: result for result in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", tpu_retrieval.SLICES)
def test_exact_search_of_wikipedia_fits(compiled, name):
    result = compiled[name]
    devices = 4 if name == "v5p" else 8
    assert result["devices"] == devices
    share = tpu_retrieval.VECTORS * tpu_retrieval.DIMENSION * 2 / devices
    assert share <= result["arguments"] <= 1.01 * share, "not split evenly"
    assert result["total"] <= 0.5 * tpu_retrieval.SLICES[name].memory, "no room for a policy"
    # The scores of all passages would be 2.7 GB or more, those of one chunk 0.3.
    assert result["temporaries"] < 0.5e9
    # Only the best of every device travel: 3 rows and their scores for each query.
    assert result["collectives"]
    for entry in result["collectives"]:
        operation, _, shape = entry.split()
        assert operation == "all-gather" and shape == f"{devices}x3x256", entry
