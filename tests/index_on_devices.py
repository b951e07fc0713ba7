"""Searches of one index by the host-driven rollout and within the compiled one, on one device and
on all of two processes: prints what the episodes were, as JSON. Started by
`test_index_on_devices.py`.

    python tests/index_on_devices.py FOLDER
"""

import hashlib
import json
import sys
from pathlib import Path

import jax
import numpy as np
import tiny_config
from retrieval_server import save_exact_index

from zest_jax import assembly
from zest_jax.models.hf import read_tokenizer
from zest_jax.parallel import Placement, hosts
from zest_jax.parallel.mesh import make_mesh
from zest_jax.players import policy_folder
from zest_jax.retrieval.index_files import IndexFolder
from zest_jax.retrieval.interface import Passage
from zest_jax.retrieval.passages import tokenise, tokenizer_card, tokens_key
from zest_jax.tasks.atlas import load_atlas
from zest_jax.tracing import TraceCounter

E5 = Path(__file__).parent / "fixtures" / "encoders" / "e5"


def make_index(folder: Path, config) -> None:
    """The atlas's passages, by an encoder of random weights."""
    passages = [Passage(p.id, p.title, p.text) for p in load_atlas(None).passages]
    save_exact_index(folder, passages, E5, "float32", shard_rows=100)
    tokenizer = read_tokenizer(policy_folder(config.policy.folder))
    layout = assembly.protocol(config.solver.protocol).layout
    key = tokens_key(tokenizer_card(tokenizer), layout.stored)
    tokenise(
        IndexFolder(folder).passages(),
        tokenizer,
        folder / "tokens" / key,
        template=layout.stored,
        write=layout.write,
    )


def episodes(config, placement: Placement, where: str) -> dict:
    """What the solver writes to a few questions."""
    with config.unlocked():
        config.retrieval.where = where
    traces = TraceCounter()
    with placement.active():
        parts = assembly.build(config, traces, placement)
        params = placement.params(parts.solver.params)
        tasks = parts.world.heldout_tasks[:11]
        prompts = [parts.solver_sampler.protocol.prompt.format(question=t.question) for t in tasks]
        out = parts.solver_sampler(
            params, parts.solver.encode(prompts), jax.random.key(3), 1.0, streams=range(11)
        )
        together = placement.mesh is not None or where == "device"  # or others would have to ask
        found = parts.retrieval.find([t.question for t in tasks[:3]], 5) if together else []
    shards = jax.tree.leaves(parts.retrieval.on_device)[-1:]
    return {
        "how": parts.retrieval.how,
        "rows": [np.asarray(out.rows_NTUR)[n].tolist() for n in range(11)],
        "ids": hashlib.sha256(np.asarray(out.ids_NL).tobytes()).hexdigest(),
        "searches": int(np.asarray(out.searches_N).sum()),
        "found": [[p.id for p in each] for each in found],
        "devices": len(shards[0].sharding.device_set) if shards else 1,
        "counters": parts.solver_sampler.counters,
        "retraces": traces.retraces,
    }


def main(folder: str) -> None:
    config = tiny_config.get_config()
    config.retrieval.index = folder
    config.retrieval.query_length = 48
    config.retrieval.top_k = 2
    config.solver.observation_length = 200
    config.proposer.searches = 0
    config.solver.narrowings = 1
    config.world.folder = str(load_atlas(None).folder)
    hosts.initialize()
    hosts.told(lambda: make_index(Path(folder), config))
    out = {}
    if hosts.is_first():
        out["host"] = episodes(config, Placement(), "host")
        out["device"] = episodes(config, Placement(), "device")
    mesh = make_mesh(2, 2, 1)
    out["devices"] = episodes(config, Placement(mesh), "auto")
    out["hosts"] = episodes(config, Placement(mesh), "host")
    print(json.dumps(out))


if __name__ == "__main__":
    main(sys.argv[1])
