"""The TPU attention kernel, interpreted on a CPU, against plain XLA attention.

Shape letters: B batch, L length, H query heads, J key/value heads, K head size.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import virtual_devices

from zest_jax.models.attention import xla_attention
from zest_jax.models.attention_splash import _blocks, splash_attention


def both_ways(shape, lengths, dtype=jnp.float32, split=lambda x: x):
    """Outputs and gradients of (splash, XLA) for random tensors, padding left out of account.

    Args:
      shape: B, L, H, J, K.
      lengths: lengths of the segments of every row, what is left being padding; None for rows that
        are one sequence each.
      dtype: of queries, keys and values.
      split: places an array [B, ...] on the devices.
    """
    B, L, H, J, K = shape
    rng = np.random.default_rng(0)
    query, key, value, weight = (
        split(jnp.asarray(rng.normal(size=(B, L, heads, K)), dtype)) for heads in (H, J, J, H)
    )
    position = jnp.broadcast_to(jnp.arange(L), (B, L))
    segment = None
    if lengths is not None:
        numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        row = np.pad(numbers, (0, L - len(numbers))).astype(np.int32)
        segment = split(jnp.broadcast_to(row, (B, L)))
        weight *= (segment > 0)[:, :, None, None]

    def splash(q, k, v):
        out = splash_attention(q, k, v, segment, interpret=True)
        return jnp.sum((out * weight).astype(jnp.float32)), out

    def xla(q, k, v):
        out = xla_attention(q, k, v, position, position, segment, segment)
        return jnp.sum((out * weight).astype(jnp.float32)), out

    results = []
    for f in (splash, xla):
        run = jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2), has_aux=True))
        (_, out), grads = run(query, key, value)
        assert out.dtype == dtype and out.shape == (B, L, H, K)
        results.append([np.asarray(x, np.float32) for x in (out * (weight != 0), *grads)])
    return results


@pytest.mark.parametrize(
    "shape, lengths",
    [
        pytest.param((2, 200, 4, 2, 64), None, id="grouped, padded length"),
        pytest.param((1, 200, 4, 1, 128), (50, 1, 129), id="packed, with padding"),
        pytest.param((1, 640, 4, 2, 64), (100, 400, 140), id="packed, several blocks"),
        pytest.param((1, 7, 2, 1, 128), None, id="shorter than the lanes"),
    ],
)
def test_equals_xla_forward_and_backward(shape, lengths):
    splash, xla = both_ways(shape, lengths)
    for got, want in zip(splash, xla, strict=True):
        assert np.abs(want).max() > 0.1
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


def test_bfloat16_rounds_no_worse_than_its_inputs():
    splash, xla = both_ways((1, 256, 4, 2, 128), (100, 140), jnp.bfloat16)
    exact = both_ways((1, 256, 4, 2, 128), (100, 140), jnp.float32)[1]
    for got, ours, want in zip(splash, xla, exact, strict=True):
        error, usual = np.abs(got - want).mean(), np.abs(ours - want).mean()
        assert error < 2 * usual, (error, usual)


@pytest.mark.parametrize(
    "length, block, padded",
    [
        (1, 128, 128),
        (200, 256, 256),
        (512, 512, 512),
        (513, 384, 768),
        (1100, 384, 1152),
        (2048, 512, 2048),
        (4096, 1024, 4096),
        (5000, 1024, 5120),
    ],
)
def test_blocks(length, block, padded):
    assert _blocks(length) == (block, padded)


PROGRAM = """
import jax
import numpy as np
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec as P
from test_attention_splash import both_ways
from zest_jax.parallel import make_mesh

said = []
logging.warning = lambda message, *args: said.append(message % args)
for sizes, shape, warnings in (
    ((2, 2, 2), (4, 130, 4, 2, 64), 0),
    ((2, 2, 2), (4, 130, 6, 3, 64), 1),
    ((2, 2, 2), (2, 130, 4, 2, 64), 1),
):
    said.clear()
    mesh = make_mesh(*sizes)
    rows = ("data", "fsdp") if shape[0] % 4 == 0 else None
    with jax.set_mesh(mesh):
        split = lambda x: jax.device_put(x, NamedSharding(mesh, P(rows)))
        splash, xla = both_ways(shape, (60, 50), split=split)
    for got, want in zip(splash, xla, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)
    assert len(said) == warnings, said
print("devices", len(jax.devices()))
"""


@pytest.mark.slow
def test_eight_devices_each_take_their_rows_and_heads():
    root = Path(__file__).parents[1]
    env = {**os.environ, "XLA_FLAGS": virtual_devices.flags(8)}
    env["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["devices", "8"]
