"""Compiles for TPUs that are not there: attention, and whole training steps at Qwen2.5's sizes.

    python tests/tpu.py attention/v5e v5e/7B        one JSON line for each
    python tests/tpu.py --full-effort all           as a program on the chip is compiled; slower

A program of its own, since the TPU compiler must be set up before JAX is imported and one process
at a time may hold it.

Shape letters: B batch, L length, H query heads, J key/value heads, K head size, M micro-batches,
R rows, X targets per row.
"""

import atexit
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

# For this program only, before JAX is imported: which chips there are would be asked of a metadata
# server, and two programs may compile side by side.
SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

INSTALLED = importlib.util.find_spec("libtpu") is not None


@dataclasses.dataclass(frozen=True)
class Slice:
    """A TPU slice: the compiler's name of its topology, and the memory of one device in bytes."""

    topology: str
    memory: float


SLICES = {  # https://cloud.google.com/tpu/docs/system-architecture-tpu-vm; v5p-8 counts cores
    "v5e": Slice("v5e:4x4", 16e9),
    "v5p": Slice("v5p:2x2x1", 95e9),
    "v6e": Slice("v6e:4x4", 32e9),
}

# Vocabulary, width, layers, heads, key/value heads, head size, feed-forward width, tied: from the
# config.json of Qwen2.5-0.5B, -3B and -7B.
MODELS = {
    "0.5B": (151_936, 896, 24, 14, 2, 64, 4_864, True),
    "3B": (151_936, 2_048, 36, 16, 2, 128, 11_008, True),
    "7B": (152_064, 3_584, 28, 28, 4, 128, 18_944, False),
}

# What the backward pass keeps, and devices per copy of the weights' split over heads and features.
STEPS = {
    "v5e/0.5B": ("dots", 1),
    "v5e/3B": ("full", 1),
    "v5e/7B": ("full", 1),
    "v5p/0.5B": ("dots", 1),
    "v5p/3B": ("dots", 1),
    "v5p/7B": ("dots", 1),
    "v6e/0.5B": ("dots", 1),
    "v6e/3B": ("dots", 1),
    "v6e/7B": ("full", 4),
}
LENGTH = 2_048
# Slices on which a whole rollout is compiled (eight chips, or v5p's four of two cores), and layers
# of its policy where time matters.
ROLLOUTS = {"v5e": ("v5e:2x4", 4), "v5p": ("v5p:2x2x1", 4), "v6e": ("v6e:2x4", 4)}
PASSAGES = 21_015_552  # the next multiple of 1,024 after Wikipedia's 21,015,324
_OPERATIONS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def policy_config(model: str):
    """The `PolicyConfig` of a row of MODELS, as it is trained on TPUs."""
    from zest_jax.models import PolicyConfig

    *sizes, tied = MODELS[model]
    return PolicyConfig(
        *sizes,
        tied=tied,
        rope_theta=1e6,
        qkv_bias=True,
        qk_norm=False,
        dtype="bfloat16",
        attention="splash",
    )


def compile_attention(chip: str) -> dict:
    """Forward and gradient of attention over packed rows, rows and heads split over the devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from zest_jax.models.attention_splash import splash_attention

    mesh = _mesh(chip, tensor=4)

    def loss(q, k, v, segment):
        return jnp.sum(splash_attention(q, k, v, segment).astype(jnp.float32))

    results = {}
    # Heads that do not divide (0.5B), that do (7B), and long rows, which have larger blocks.
    for L, H, J, K in ((2048, 14, 2, 64), (1100, 28, 4, 128), (4096, 28, 4, 128)):
        B = mesh.shape["fsdp"]
        by_head = NamedSharding(mesh, P("fsdp", None, None if J % 4 else "tensor"))
        q, k, v = (
            jax.ShapeDtypeStruct((B, L, heads, K), jnp.bfloat16, sharding=by_head)
            for heads in (H, J, J)
        )
        segment = jax.ShapeDtypeStruct(
            (B, L), jnp.int32, sharding=NamedSharding(mesh, P("fsdp", None))
        )
        with jax.set_mesh(mesh):
            lowered = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(q, k, v, segment)
        results[f"{L}x{H}x{J}x{K}"] = report(lowered)
    return results


def compile_step(chip: str, model: str, remat: str, tensor: int) -> dict:
    """The solver's whole update: one row of LENGTH tokens, all of them targets, per row's share."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from zest_jax.learning.packing import Packed
    from zest_jax.learning.updates import UpdateSpec, policy_update
    from zest_jax.models import param_shapes
    from zest_jax.parallel import param_shardings
    from zest_jax.parallel.sharding import BATCH

    mesh = _mesh(chip, tensor)
    config, spec = policy_config(model), UpdateSpec(learning_rate=1e-6, remat=remat)
    state = jax.eval_shape(spec.init, param_shapes(config))
    places = param_shardings(state, mesh)
    state = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, places
    )
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, *BATCH))
    M, R = 2, mesh.shape["data"] * mesh.shape["fsdp"]

    def field(dtype):
        return jax.ShapeDtypeStruct((M, R, LENGTH), dtype, sharding=rows)

    batch = Packed(
        ids_MRL=field(jnp.int32),
        position_MRL=field(jnp.int32),
        segment_MRL=field(jnp.int32),
        at_MRX=field(jnp.int32),
        target_MRX=field(jnp.int32),
        logp_MRX=field(jnp.float32),
        owner_MRX=field(jnp.int32),
        mask_MRX=field(jnp.bool_),
        micro_batches=jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
    )
    advantage = jax.ShapeDtypeStruct((M * R,), jnp.float32, sharding=whole)
    step = jax.jit(
        policy_update, static_argnums=(0, 1), donate_argnums=2, out_shardings=(places, whole)
    )
    with jax.set_mesh(mesh):
        lowered = step.lower(config, spec, state, batch, advantage)
    weights = sum(x.size for x in jax.tree.leaves(state.params))
    about = {"remat": remat, "mesh": dict(mesh.shape), "weights": weights}
    return about | report(lowered)


def compile_rollout(chip: str, full: bool) -> dict:
    """A whole search rollout beside an index of Wikipedia's 21,015,324 passages, split over all.

    Slots and passages are split over the devices, the policy's weights are on each: as `train` runs
    it on a mesh.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from zest_jax.models import param_shapes
    from zest_jax.parallel.sharding import BATCH
    from zest_jax.retrieval import Retriever
    from zest_jax.retrieval.encoders import BagEncoder
    from zest_jax.retrieval.exact import ExactIndex
    from zest_jax.retrieval.layout import Frame
    from zest_jax.retrieval.store import FramePieces, PassageStore
    from zest_jax.rollout.engine import Engine
    from zest_jax.rollout.protocols import SEARCH_R1
    from zest_jax.rollout.sampling import Draws
    from zest_jax.rollout.side_by_side import rollout_on, shards_of, share_engine
    from zest_jax.rollout.state import RolloutSpec
    from zest_jax.rollout.stops import build_stop_table

    topology, layers = ROLLOUTS[chip]
    mesh = _mesh(chip, 1, topology)
    rows, whole = (NamedSharding(mesh, spec) for spec in (P(BATCH[0]), P()))
    config = dataclasses.replace(policy_config("0.5B"), attention="xla")
    if not full:
        config = dataclasses.replace(config, layers=layers)

    def give(shape, dtype, place=whole):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    retriever = Retriever(
        BagEncoder(give((config.vocab_size, 384), jnp.float32)),
        ExactIndex(
            give((PASSAGES, 768), jnp.bfloat16, rows),
            recall_target=0.99,
            vectors=21_015_324,
        ),
        PassageStore(
            give((PASSAGES, 128), jnp.int32, rows),
            give((PASSAGES,), jnp.int32, rows),
            FramePieces.build(Frame([[1, 2]], [[3]] * 3, [4], [5])),
            size=450,
        ),
        retrieved=3,
    )
    spec = RolloutSpec(
        slots=128,
        prompt_length=256,
        action_length=256,
        observation_length=450,
        searches=3,
        wait_fraction=0.25,
        block_tokens=128,
    )
    engine = share_engine(Engine(config, spec, SEARCH_R1, (0,)), mesh)
    tokens = [b"<search>", b"</search>", b"<answer>", b"</answer>"]
    table = build_stop_table(tokens, SEARCH_R1.opening, SEARCH_R1.closing, config.vocab_size)
    arguments = (
        jax.tree.map(lambda x: give(x.shape, jnp.bfloat16), param_shapes(config)),
        jax.tree.map(lambda x: give(x.shape, x.dtype), table),
        retriever,
        give((512, spec.prompt_length), jnp.int32, rows),
        give((512,), jnp.int32, rows),
        Draws(
            give((), jax.random.key(0).dtype),
            give((), jnp.float32),
            give((512,), jnp.uint32, rows),
        ),
        give((shards_of(mesh),), jnp.int32, rows),
    )
    with jax.set_mesh(mesh):
        lowered = jax.jit(rollout_on(engine, mesh)).lower(*arguments)
    return {"mesh": dict(mesh.shape)} | report(lowered, text=True)


def _mesh(chip: str, tensor: int, topology: str = ""):
    from jax.experimental import topologies

    from zest_jax.parallel import make_mesh

    devices = topologies.get_topology_desc(topology or SLICES[chip].topology, "tpu").devices
    return make_mesh(data=1, fsdp=-1, tensor=tensor, devices=devices)


def _assigned() -> int | None:
    """Bytes that the compiler's last program takes of a device, by its buffer assignment."""
    reports = Path(os.environ["ZEST_TPU_DUMP"]).glob("*memory-usage-report.txt")
    newest = max(reports, key=lambda path: path.stat().st_mtime_ns, default=None)
    total = re.search(r"Total bytes: (\d+)", newest.read_text()) if newest else None
    return int(total[1]) if total else None


def report(lowered, text: bool = False) -> dict:
    """Compiles; bytes are those of one device. With `text`, host transfers are looked for."""
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    assigned = _assigned()
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    outputs, aliased = memory.output_size_in_bytes, memory.alias_size_in_bytes
    return {
        "seconds": round(seconds, 1),
        "arguments": arguments,
        "outputs": outputs,
        "aliased": aliased,
        "temporaries": temporaries,
        "assigned": assigned,
        "total": arguments + outputs - aliased + temporaries,
        "flops": compiled.cost_analysis().get("flops"),
        "collectives": _collectives(compiled.as_text()),
    } | ({"host": _host_transfers(compiled.as_text())} if text else {})


def _host_transfers(text: str) -> list[str]:
    """Instructions of the optimised program that exchange data with the host."""
    found = re.findall(r" (infeed|outfeed|send|recv)(?:-done)?\(", text)
    found += re.findall(r'custom_call_target="([^"]*(?:callback|Host)[^"]*)"', text)
    return sorted({*found, *re.findall(r"S\(5\)", text)})  # memory space 5 is the host's


def _collectives(text: str) -> list[str]:
    """Every exchange of the optimised program once: "all-gather bf16 1x896x4864"."""
    found = set()
    computation = ""
    for line in text.splitlines():
        if line.startswith("%"):
            computation = line
        if match := re.search(rf"= (.*?) ({_OPERATIONS})(?:-start)?\(", line):
            shapes, operation = match.groups()
            # A reduction of which every device keeps a part is written as a fusion around a whole
            # reduction, and named for it.
            if computation.startswith("%all-reduce-scatter"):
                operation = "reduce-scatter"
            for dtype, shape in re.findall(r"\b([a-z]+\d+)\[([\d,]*)\]", shapes):
                if dtype != "u32":  # the ring's bookkeeping
                    found.add(f"{operation} {dtype} {shape.replace(',', 'x') or '1'}")
    return sorted(found)


def prepare(full_effort: bool = False) -> None:
    """Sets up the compiler; before JAX is imported."""
    os.environ.update(SETTINGS)
    if not full_effort:
        os.environ["JAX_OPTIMIZATION_LEVEL"] = "O1"  # a third of the time
    dump = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, dump, ignore_errors=True)
    os.environ["ZEST_TPU_DUMP"] = dump
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_hlo_as_text"


def main(arguments: list[str]) -> None:
    """See the head of the file."""
    full = "--full-effort" in arguments
    if full:
        arguments.remove("--full-effort")
    prepare(full)
    for name in list(STEPS) if arguments == ["all"] else arguments:
        head, tail = name.split("/")
        if head == "attention":
            result = compile_attention(tail)
        elif head == "rollout":
            result = compile_rollout(tail, full)
        else:
            result = compile_step(head, tail, *STEPS[name])
        print(json.dumps({"name": name} | result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
