"""Nearest vectors: exact search, the partitioned index, and the package scann beside them.

    python -m benchmarks.retrieval --vectors=1000000,10000000,21015324 --dimension=768   on one GPU
    python -m benchmarks.retrieval                        100,000 x 384, as for a CPU
    python -m benchmarks.retrieval --file=vectors.npy     real embeddings
    python -m benchmarks.retrieval --device_vectors --vectors=21015324 --dimension=768   one GPU

Synthetic vectors are a mixture of N / 50 Gaussians: a centre with components N(0, 1), and around it
0.7 N(0, 1) in every component, brought to length 1. Queries are vectors of the corpus with noise of
a quarter of their length. Of real embeddings (`benchmarks.window_vectors` makes some) 1,024 are
left out at random as queries. Vectors without clusters would be hopeless for any tree, and no text
encoder makes such.

Recall is against exact search in float32. Bytes are those of all arrays per vector.

With `--device_vectors` the vectors are made on the device, for exact engines only: recall is then
against the plain product in XLA. `roof_ms` is the longer of reading the index once (4.8 TB/s, the
H200's) and of its products (790 TFLOP/s in bfloat16, twice that in 8 bits).
"""

import functools
import json
import time
from collections.abc import Callable
from typing import Any

from benchmarks import harness

COLUMNS = (
    *("engine", "vectors", "batch", "leaves", "searched", "recall@10", "recall@3", "median_ms"),
    *("roof_ms", "queries_per_s", "bytes_per_vector", "build_s", "failed"),
)
ENGINES = (
    *("exact float32", "exact bfloat16", "exact int8", "partitioned bfloat16", "partitioned int8"),
    *("partitioned int4", "scann"),
)
ON_DEVICE = ("exact bfloat16", "exact int8", "exact int8 reordered", "xla bfloat16")
TOP_K = 10
_PART = 65_536  # vectors made at a time


def vectors_of(case: dict[str, Any]) -> tuple[Any, Any]:
    """Unit vectors [N, E] and queries [1024, E], float32."""
    import numpy as np

    rng = np.random.default_rng(0)
    if case["file"]:
        given = np.load(case["file"], mmap_mode="r")
        order = rng.permutation(len(given))[: case["vectors"] + 1024]
        query_BE = _unit(np.asarray(given[np.sort(order[:1024])], np.float32))
        row_N = np.sort(order[1024:])
        vector_NE = np.empty((len(row_N), given.shape[1]), np.float32)
        for at in range(0, len(row_N), _PART):
            vector_NE[at : at + _PART] = _unit(given[row_N[at : at + _PART]].astype(np.float32))
        return vector_NE, query_BE
    N, E = case["vectors"], case["dimension"]
    centre_CE = rng.standard_normal((max(1, N // 50), E), np.float32)
    vector_NE = np.empty((N, E), np.float32)
    for at in range(0, N, _PART):
        part_RE = vector_NE[at : at + _PART]
        part_RE[:] = 0.7 * rng.standard_normal(part_RE.shape, np.float32)
        part_RE += centre_CE[rng.integers(len(centre_CE), size=len(part_RE))]
        part_RE[:] = _unit(part_RE)
    query_BE = vector_NE[rng.integers(N, size=1024)]
    noise_BE = rng.standard_normal(query_BE.shape, np.float32)
    return vector_NE, _unit(query_BE + 0.25 * _unit(noise_BE))


def _unit(vector_NE: Any) -> Any:
    import numpy as np

    return vector_NE / np.maximum(np.linalg.norm(vector_NE, axis=1, keepdims=True), 1e-12)


def make(case: dict[str, Any], vector_NE: Any) -> tuple[Any, float | None]:
    """An index, and its bytes per vector where they can be told."""
    import jax
    import jax.numpy as jnp

    from zest_jax.retrieval import scann_index
    from zest_jax.retrieval.exact import ExactIndex, quantise_rows
    from zest_jax.retrieval.partitioned import PartitionSettings
    from zest_jax.retrieval.partitioned_build import build

    kind, _, what = case["engine"].partition(" ")
    index: Any
    if kind == "exact":
        index_NE: Any = jnp.zeros(vector_NE.shape, "float32" if what == "int8" else what)
        if what == "int8":
            parts = [
                quantise_rows(jnp.asarray(vector_NE[at : at + _PART]))
                for at in range(0, len(vector_NE), _PART)
            ]
            index_NE = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
        else:
            write = jax.jit(
                lambda x, part, at: jax.lax.dynamic_update_slice_in_dim(
                    x, part.astype(x.dtype), at, 0
                ),
                donate_argnums=0,
            )
            for at in range(0, len(vector_NE), _PART):
                index_NE = write(index_NE, vector_NE[at : at + _PART], at)
        index = ExactIndex(index_NE)
    else:
        # A tree at every size: the advice for 100,000 vectors and fewer is none.
        leaves = case["leaves"] or round(len(vector_NE) ** 0.5)
        common: dict[str, Any] = {
            "num_leaves": leaves,
            "num_leaves_to_search": case["searched"][0],
            "training_sample_size": min(len(vector_NE), max(100_000, 50 * leaves)),
            "soar_lambda": case["soar_lambda"],
            "reorder": case["reorder"],
        }
        if kind == "scann":
            if scann_index.import_scann() is None:
                raise RuntimeError("scann is not installed")
            index = scann_index.build(vector_NE, scann_index.ScannSettings(**common))
            return index, None
        index = build(vector_NE, PartitionSettings(**common, reorder_type=what))
    jax.block_until_ready(index)
    return index, sum(x.nbytes for x in jax.tree.leaves(index)) / index.size


def on_device(case: dict[str, Any]) -> dict[str, Any]:
    """All batch sizes of one exact index whose vectors are made on the device."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from zest_jax.retrieval import exact_triton
    from zest_jax.retrieval.exact import ExactIndex, exact_search, quantise_rows

    N, E = case["vectors"], case["dimension"]
    centre_CE = jax.random.normal(jax.random.key(0), (max(1, N // 50), E), jnp.bfloat16)
    part = min(_PART, N)

    @functools.partial(jax.jit, donate_argnums=0)
    def fill(vector_NE: Any, first: Any, key: Any) -> Any:
        one, other = jax.random.split(key)
        own_RE = centre_CE[jax.random.randint(one, (part,), 0, len(centre_CE))]
        own_RE = own_RE.astype(jnp.float32) + 0.7 * jax.random.normal(other, (part, E))
        own_RE /= jnp.linalg.norm(own_RE, axis=1, keepdims=True)
        return jax.lax.dynamic_update_slice_in_dim(
            vector_NE, own_RE.astype(vector_NE.dtype), first, 0
        )

    vector_NE = jnp.zeros((N, E), jnp.bfloat16)
    for at in range(0, N, part):
        vector_NE = fill(vector_NE, min(at, N - part), jax.random.fold_in(jax.random.key(1), at))
    chosen = jax.random.randint(jax.random.key(2), (512,), 0, N)
    noise_BE = jax.random.normal(jax.random.key(3), (512, E))
    query_BE = vector_NE[chosen].astype(jnp.float32)
    query_BE += 0.25 * noise_BE / jnp.linalg.norm(noise_BE, axis=1, keepdims=True)
    query_BE /= jnp.linalg.norm(query_BE, axis=1, keepdims=True)
    top_k = case["top_k"]
    plain = jax.jit(lambda v, q: exact_search(v, q, top_k))
    truth = np.asarray(plain(vector_NE, query_BE[:256])[0])
    engine = case["engine"]
    index: Any = vector_NE
    if engine == "exact bfloat16":
        index = ExactIndex(vector_NE)
    elif engine.startswith("exact int8"):
        index = ExactIndex(
            jax.jit(quantise_rows)(vector_NE), vector_NE if "reordered" in engine else None
        )
        if index.exact_NE is None:
            del vector_NE
    search = plain
    if isinstance(index, ExactIndex):
        search = jax.jit(lambda index, q: index.search_in_jit(q, top_k))
    stored = sum(x.nbytes for x in jax.tree.leaves(index))
    found = np.asarray(search(index, query_BE[:256])[0])
    int8 = "int8" in engine
    rows = []
    for batch in case["batches"]:
        queries = query_BE[:batch]
        run = functools.partial(lambda q: jax.block_until_ready(search(index, q)), queries)
        timed = harness.seconds(run, case["steps"])
        peak = harness.PEAK_TFLOPS["H200"] * 1e12 * (2 if int8 else 1)
        read = N * E * (1 if int8 else 2) / 4.8e12
        rows.append(
            {
                "batch": batch,
                "recall@3": _recall(found, truth, 3) if top_k >= 3 else None,
                "median_ms": 1e3 * timed["median_s"],
                "roof_ms": 1e3 * max(read, 2 * N * E * batch / peak),
                "queries_per_s": batch / timed["median_s"],
                "bytes_per_vector": stored / N,
                "kernel": exact_triton.usable()[1],
            }
        )
    return {"results": rows, **harness.machine()}


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """All batch sizes and numbers of leaves of one index, in this process."""
    if case["device_vectors"]:
        return on_device(case)
    import jax
    import numpy as np

    from zest_jax.retrieval.exact import ExactIndex

    vector_NE, query_BE = vectors_of(case)
    start = time.perf_counter()
    index, stored = make(case, vector_NE)
    build_s = time.perf_counter() - start
    truth = _truth(case, vector_NE, query_BE)
    rows = []
    for searched in [0] if isinstance(index, ExactIndex) else case["searched"]:
        search = _search(index, searched)
        found = np.concatenate([np.asarray(search(query_BE[at : at + 256])[0]) for at in (0, 256)])
        for batch in case["batches"]:
            queries: Any = query_BE[:batch]
            if case["engine"] != "scann":
                queries = jax.device_put(queries)
            timed = harness.seconds(functools.partial(search, queries), case["steps"])
            rows.append(
                {
                    "batch": batch,
                    "leaves": getattr(index, "settings", None) and index.settings.num_leaves,
                    "searched": searched or None,
                    "recall@10": _recall(found, truth, 10),
                    "recall@3": _recall(found, truth, 3),
                    "median_ms": 1e3 * timed["median_s"],
                    "queries_per_s": batch / timed["median_s"],
                    "bytes_per_vector": stored,
                    "build_s": build_s,
                }
            )
    return {"results": rows, **harness.machine()}


def _search(index: Any, searched: int) -> Callable[[Any], Any]:
    """From device to device, as in a compiled step; scann is called on the host."""
    import jax

    from zest_jax.retrieval.scann_index import ScannIndex

    if isinstance(index, ScannIndex):
        return lambda q: index.search(q, TOP_K, num_leaves_to_search=searched)
    options = {"num_leaves_to_search": searched} if searched else {}
    jitted = jax.jit(lambda index, q: index.search_in_jit(q, TOP_K, **options))
    return lambda q: jax.block_until_ready(jitted(index, q))


def _truth(case: dict[str, Any], vector_NE: Any, query_BE: Any) -> Any:
    """The best rows of the first 512 queries in float32, kept in a file for the other engines."""
    import os

    import jax
    import jax.numpy as jnp
    import numpy as np

    if os.path.exists(case["truth"]):
        return np.load(case["truth"])

    @jax.jit
    def best(query_BE: Any, part_RE: Any) -> Any:
        score_BR = jnp.matmul(query_BE, part_RE.T, precision="highest")
        return jax.lax.top_k(score_BR, min(TOP_K, len(part_RE)))

    query_BE = jnp.asarray(query_BE[:512])
    best_score = np.zeros((512, 0), np.float32)
    best_row = np.zeros((512, 0), np.int64)
    for at in range(0, len(vector_NE), _PART):
        score, pick = map(np.asarray, best(query_BE, vector_NE[at : at + _PART]))
        best_score = np.concatenate([best_score, score], 1)
        best_row = np.concatenate([best_row, pick + at], 1)
        order = np.argsort(-best_score, axis=1, kind="stable")[:, :TOP_K]
        best_score = np.take_along_axis(best_score, order, 1)
        best_row = np.take_along_axis(best_row, order, 1)
    np.save(case["truth"], best_row)
    return best_row


def _recall(found: Any, truth: Any, k: int) -> float:
    pairs = zip(found[:, :k].tolist(), truth[:, :k].tolist(), strict=True)
    return sum(len(set(a) & set(b)) for a, b in pairs) / (len(found) * k)


def main() -> None:
    import tempfile

    p = harness.parser(__doc__, "runs/benchmarks/retrieval.json")
    p.add_argument("--vectors", default="100000", help="sizes of the corpus")
    p.add_argument("--dimension", type=int, default=384)
    p.add_argument("--file", default="", help="a .npy file of vectors instead of synthetic ones")
    p.add_argument("--batches", default="1,64,256", help="queries at a time")
    p.add_argument("--leaves", type=int, default=0, help="leaves of the tree; 0 for sqrt(N)")
    p.add_argument("--searched", default="0.03,0.1", help="shares of the leaves to search")
    p.add_argument("--soar_lambda", type=float, default=None)
    p.add_argument("--reorder", type=int, default=200, help="candidates scored again")
    p.add_argument("--engines", default="", help="default: all that go with the vectors")
    p.add_argument("--top_k", type=int, default=3, help="with --device_vectors")
    p.add_argument("--device_vectors", action="store_true", help="made on the device; exact only")
    p.add_argument("--timeout", type=int, default=1800, help="seconds for one engine")
    a = p.parse_args()
    if a.case:
        print(json.dumps(measure(json.loads(a.case))))
        return
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in (int(n) for n in a.vectors.split(",")):
            leaves = a.leaves or round(size**0.5)
            shape = {
                "vectors": size,
                "dimension": a.dimension,
                "file": a.file,
                "batches": [int(b) for b in a.batches.split(",")],
                "leaves": leaves,
                "searched": [max(1, round(float(x) * leaves)) for x in a.searched.split(",")],
                "soar_lambda": a.soar_lambda,
                "reorder": a.reorder,
                "steps": a.steps,
                "truth": f"{folder}/{size}.npy",
                "device_vectors": a.device_vectors,
                "top_k": a.top_k,
            }
            engines = a.engines or ",".join(ON_DEVICE if a.device_vectors else ENGINES)
            for engine in engines.split(","):
                done = harness.run_case(
                    "benchmarks.retrieval", {"engine": engine, **shape}, timeout=a.timeout
                )
                found = done.pop("results", [{"failed": done.get("failed")}])
                about = {k: done[k] for k in ("device", "devices", "jax", "python") if k in done}
                new = [{"engine": engine, "vectors": size, **row} for row in found]
                print(harness.table(new, COLUMNS), flush=True)
                rows += new
    print(harness.table(rows, COLUMNS))
    shown = {k: getattr(a, k) for k in ("dimension", "file", "reorder", "soar_lambda")}
    harness.write(a.out, rows, about | shown)


if __name__ == "__main__":
    main()
