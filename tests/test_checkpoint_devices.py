"""Checksums of every type, and checkpoints from one number of devices to another."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import virtual_devices

from zest_jax.checkpoint import Checkpoints
from zest_jax.checksums import checksums

DTYPES = ("float32", "bfloat16", "float16", "int8", "uint8", "int32", "uint32", "bool")


def bits(dtype: str, count: int = 96) -> jax.Array:
    rng = np.random.default_rng(0)
    if dtype == "bool":
        return jnp.asarray(rng.integers(0, 2, count).astype(bool))
    raw = rng.integers(0, 256, count * jnp.dtype(dtype).itemsize).astype(np.uint8)
    return jax.lax.bitcast_convert_type(
        jnp.asarray(raw.view(f"uint{8 * jnp.dtype(dtype).itemsize}")), jnp.dtype(dtype)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_bit_counts(dtype):
    whole = {"x": bits(dtype), "y": bits(dtype)[:1].reshape(())}
    sums = checksums(whole)
    assert sums.keys() == {"['x']", "['y']"} and checksums(whole) == sums
    width = 1 if dtype == "bool" else 8 * jnp.dtype(dtype).itemsize
    word = np.asarray(whole["x"])
    for place in (0, 1, 64, 95):
        for bit in range(width):
            hurt = word.copy()
            if dtype == "bool":
                hurt[place] ^= True
            else:
                hurt.view(f"uint{width}")[place] ^= np.array(1 << bit, f"uint{width}")
            assert checksums({"x": jnp.asarray(hurt)})["['x']"] != sums["['x']"], (place, bit)
    other = next(i for i in range(1, len(word)) if word[i].tobytes() != word[0].tobytes())
    swapped = word.copy()
    swapped[[0, other]] = swapped[[other, 0]]
    assert checksums({"x": jnp.asarray(swapped)})["['x']"] != sums["['x']"]


def test_random_keys_have_one():
    one, other = (checksums({"key": jax.random.key(seed)}) for seed in (0, 1))
    assert one != other and checksums({"key": jax.random.key(0)}) == one


PROGRAM = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from zest_jax.checkpoint import Checkpoints
    from zest_jax.checksums import checksums

    assert jax.device_count() == 8
    plain = {
        "w": jnp.arange(64 * 24, dtype=jnp.float32).reshape(64, 24) ** 1.5,
        "b": jnp.arange(40, dtype=jnp.bfloat16),
        "q": jnp.arange(-64, 64, dtype=jnp.int8),
    }

    def placed(fsdp, tensor, specs):
        mesh = jax.make_mesh((fsdp, tensor), ("fsdp", "tensor"),
                             axis_types=(jax.sharding.AxisType.Auto,) * 2)
        return {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in plain.items()}

    one = placed(4, 2, {"w": P("fsdp", "tensor"), "b": P("fsdp"), "q": P(("fsdp", "tensor"))})
    other = placed(2, 4, {"w": P("tensor"), "b": P(), "q": P("fsdp")})
    sums = checksums(plain)
    assert checksums(one) == sums and checksums(other) == sums
    with Checkpoints(sys.argv[1]) as checkpoints:
        checkpoints.save(1, one, {"step": 1})
        checkpoints.wait()
        zeros = jax.tree.map(lambda x: jax.device_put(jnp.zeros_like(x), x.sharding), other)
        _, restored, _ = checkpoints.restore(zeros)
    for name, x in restored.items():
        assert x.sharding == other[name].sharding, name
        np.testing.assert_array_equal(x, plain[name])
"""


def test_from_eight_devices_to_another_mesh_and_to_one(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path)],
        env=os.environ | {"XLA_FLAGS": virtual_devices.flags(8)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    like = {
        "w": jnp.zeros((64, 24)),
        "b": jnp.zeros(40, jnp.bfloat16),
        "q": jnp.zeros(128, jnp.int8),
    }
    with Checkpoints(tmp_path, keep=None) as checkpoints:
        number, state, host = checkpoints.restore(like)
    assert (number, host) == (1, {"step": 1})
    np.testing.assert_allclose(state["w"].ravel(), np.arange(64 * 24.0) ** 1.5, rtol=1e-6)
    np.testing.assert_array_equal(state["q"], np.arange(-64, 64, dtype=np.int8))
