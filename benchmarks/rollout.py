"""How fast episodes are sampled: the whole engine, as the trainer runs it.

    python -m benchmarks.rollout                        on a GPU, beside transformers
    python -m benchmarks.rollout --policies=tiny --slots=4 --prompt=16 --new=8    a trial on a CPU

Two cases for each policy, with random weights:

- **decode**: every slot takes a prompt and writes a fixed number of tokens (own position per slot,
  stop detection, log-probabilities). Reported is the time of a decode step, prefill taken off by a
  second run that writes a single token.
- **search**: episodes of several turns whose lengths are drawn from a heavy-tailed distribution,
  since a share of the vocabulary's tokens is declared to complete an action; every turn embeds its
  query, searches an index on the device and reads what was found.

The peer is `generate` of transformers, with a search in torch and all tokens read anew each turn.
"""

import dataclasses
import functools
import time
from typing import Any

from benchmarks import harness
from benchmarks.shapes import POLICIES

COLUMNS = (
    *("engine", "policy", "case", "slots", "episodes", "prompt", "new", "tokens_per_s", "step_ms"),
    *("utilisation", "median_s", "first_s", "peak_gib", "failed"),
)


def words(vocab_size: int, search: float, answer: float) -> list[bytes]:
    """Bytes of a made-up vocabulary, in which these shares of the tokens are whole actions."""
    out = []
    for i in range(vocab_size):
        # Golden-ratio steps spread the actions evenly over the ids.
        at = (i * 0.6180339887498949) % 1.0
        if at < search:
            out.append(b"<search> q</search>")
        elif at < search + answer:
            out.append(b"<answer> a</answer>")
        else:
            out.append(b" w%d" % i)
    return out


def ours(case: dict[str, Any]) -> dict[str, Any]:
    """Times `Engine.rollout` in this process."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from zest_jax.models import init_params
    from zest_jax.models.backends import choose_attention
    from zest_jax.rollout.engine import Engine
    from zest_jax.rollout.protocols import PLAIN_SEARCH
    from zest_jax.rollout.sampling import Draws
    from zest_jax.rollout.state import RolloutSpec
    from zest_jax.rollout.stops import build_stop_table

    config, _ = choose_attention(POLICIES[case["policy"]])
    params = jax.jit(
        lambda key: jax.tree.map(lambda x: x.astype(config.dtype), init_params(config, key))
    )(jax.random.key(0))
    searching = case["case"] == "search"
    share = 1 / case["new"] if searching else 0.0
    tokens = words(config.vocab_size, share * 0.9, share * 0.1)
    table = jax.tree.map(
        jnp.asarray, build_stop_table(tokens, PLAIN_SEARCH.opening, PLAIN_SEARCH.closing)
    )
    retriever = _retriever(config.vocab_size, case) if searching else None
    N = case["episodes"]
    rng = np.random.default_rng(0)
    prompt_NP = jnp.asarray(rng.integers(0, config.vocab_size, (N, case["prompt"])), jnp.int32)
    length_N = jnp.full(N, case["prompt"], jnp.int32)
    spec = RolloutSpec(
        slots=case["slots"],
        prompt_length=case["prompt"],
        action_length=2 * case["new"] if searching else case["new"],
        observation_length=case["observation"] if searching else 0,
        searches=case["turns"] if searching else 0,
        wait_fraction=case["wait"],
        block_tokens=case["block_tokens"],
    )

    def program(spec: Any) -> Any:
        engine = Engine(config, spec, PLAIN_SEARCH, ())
        run = jax.jit(functools.partial(engine.rollout, draws=_draws(Draws)))
        return lambda: jax.block_until_ready(run(params, table, retriever, prompt_NP, length_N))

    run = program(spec)
    start = time.perf_counter()
    out, counters = run()
    first = time.perf_counter() - start
    timed = harness.seconds(run, case["steps"], warm_up=1)
    if case.get("trace"):
        with jax.profiler.trace(case["trace"]):
            run()
    sampled = int(np.asarray(out.mask_NL).sum())
    steps = int(counters["decode_steps"])
    result = timed | {
        "first_s": first,
        "sampled": sampled,
        "decode_steps": steps,
        "utilisation": float(counters["slot_utilisation"]),
        "searches": int(np.asarray(out.searches_N).sum()),
        "tokens_per_s": sampled / timed["median_s"],
        **harness.machine(),
    }
    if not searching:
        one = harness.seconds(
            program(dataclasses.replace(spec, action_length=1)), case["steps"], warm_up=1
        )
        rounds = -(-N // case["slots"])
        writing = timed["median_s"] - one["median_s"]
        result["step_ms"] = 1e3 * writing / (steps - rounds)
        result["tokens_per_s"] = (sampled - N) / writing
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return result | {"peak_gib": peak / 2**30 if peak else None}


def _draws(kind: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return kind(jax.random.key(0), jnp.float32(1.0))


def _retriever(vocab_size: int, case: dict[str, Any]) -> Any:
    """A random index of the asked size: no corpus is needed to time a search."""
    import jax
    import jax.numpy as jnp

    from zest_jax.retrieval import Retriever
    from zest_jax.retrieval.encoders import BagEncoder
    from zest_jax.retrieval.layout import Frame
    from zest_jax.retrieval.store import FramePieces, PassageStore

    N, E, C = case["passages"], case["dimension"], case["observation"]
    shown = 3
    table_VE = jax.random.normal(jax.random.key(1), (vocab_size, E // 2), jnp.float32)
    index_NE = jax.jit(lambda key: jax.random.normal(key, (N, E), jnp.bfloat16))(jax.random.key(2))
    ids_NP = jax.random.randint(jax.random.key(3), (N, C // shown), 0, vocab_size)
    frame = FramePieces.build(Frame([[]], [[]] * shown, [], []))
    store = PassageStore(ids_NP, jnp.full(N, C // shown, jnp.int32), frame, size=C)
    return Retriever(BagEncoder(table_VE), index_NE, store, shown)


def main() -> None:
    p = harness.parser(__doc__, "runs/benchmarks/rollout.json")
    p.set_defaults(steps=3)
    p.add_argument("--policies", default="qwen2.5-0.5b,qwen2.5-1.5b")
    p.add_argument("--cases", default="decode,search")
    p.add_argument("--slots", default="128,256")
    p.add_argument("--rounds", type=int, default=1, help="episodes per slot, decode")
    p.add_argument("--prompt", type=int, default=512)
    p.add_argument("--new", type=int, default=128, help="tokens written (mean of a turn, search)")
    p.add_argument("--turns", type=int, default=3)
    p.add_argument("--observation", type=int, default=450)
    p.add_argument("--passages", type=int, default=1_000_000)
    p.add_argument("--dimension", type=int, default=768)
    p.add_argument("--episodes", type=int, default=512, help="of the search case")
    p.add_argument("--wait", type=float, default=0.25, help="wait_fraction of the search case")
    p.add_argument("--block_tokens", type=int, default=128)
    p.add_argument("--trace", default="", help="folder for a profile of one call")
    p.add_argument("--peer", action=harness.argparse.BooleanOptionalAction, default=True)
    a = p.parse_args()
    if a.case:
        return harness.run_here(a.case, ours, "rollout")
    names = ("prompt", "new", "turns", "observation", "passages", "dimension", "block_tokens")
    shape = {k: getattr(a, k) for k in (*names, "steps", "trace")}
    rows: list[dict[str, Any]] = []
    with_peer = a.peer and harness.has_torch_gpu()
    for name in a.policies.split(","):
        for kind in a.cases.split(","):
            for slots in (int(s) for s in a.slots.split(",")):
                episodes = a.episodes if kind == "search" else slots * a.rounds
                wait = a.wait if kind == "search" else 1.0
                about = {"policy": name, "case": kind, "slots": slots, "episodes": episodes}
                for engine in ("zest_jax", *(["transformers"] if with_peer else [])):
                    case = {"engine": engine, "wait": wait} | about | shape
                    rows.append(harness.run_case("benchmarks.rollout", case))
                    print(harness.table(rows[-1:], COLUMNS), flush=True)
    print("\n" + harness.table(rows, COLUMNS))
    harness.write(a.out, rows, {"tokens_per_s": "tokens that the policy wrote, per second"})


if __name__ == "__main__":
    main()
