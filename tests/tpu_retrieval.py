"""Compiles the search of all of Wikipedia for TPU slices that are not there; see tpu.py.

    python tests/tpu_retrieval.py v5e v5p v6e        one JSON line for each

21,015,324 vectors of 768 components in bfloat16 (the passages of wiki-18 by E5), split by rows over
all devices; 256 queries, the best 3.
"""

import json
import sys

import tpu

VECTORS, DIMENSION, QUERIES, TOP_K = 21_015_324, 768, 256, 3
RECALL_TARGET = 0.99
# v5e-8 and v6e-8 count chips, v5p-4 here too: its topology is that of v5p-8 in Google's names,
# which count cores.
SLICES = {
    "v5e": tpu.Slice("v5e:2x4", 16e9),
    "v5p": tpu.Slice("v5p:2x2x1", 95e9),
    "v6e": tpu.Slice("v6e:2x4", 32e9),
}


def compile_search(chip: str) -> dict:
    """What the compiler says of one search; bytes are those of one device."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from zest_jax.parallel import make_mesh
    from zest_jax.retrieval.exact import ExactIndex

    devices = topologies.get_topology_desc(SLICES[chip].topology, "tpu").devices
    mesh = make_mesh(data=1, fsdp=-1, devices=devices)
    rows = -(-VECTORS // len(devices)) * len(devices)
    index_NE = jax.ShapeDtypeStruct(
        (rows, DIMENSION), jnp.bfloat16, sharding=NamedSharding(mesh, P(mesh.axis_names))
    )
    query_BE = jax.ShapeDtypeStruct(
        (QUERIES, DIMENSION), jnp.float32, sharding=NamedSharding(mesh, P())
    )
    index = ExactIndex(index_NE, recall_target=RECALL_TARGET, mesh=mesh, vectors=VECTORS)
    search = jax.jit(lambda index, query_BE: index.search_in_jit(query_BE, TOP_K))
    with jax.set_mesh(mesh):
        lowered = search.lower(index, query_BE)
    return {"devices": len(devices)} | tpu.report(lowered)


if __name__ == "__main__":
    tpu.prepare()
    for name in sys.argv[1:]:
        print(json.dumps({"name": name} | compile_search(name)), flush=True)
