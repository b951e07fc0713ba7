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

A search case is run once more with its pieces called from the host, each waited for, which gives
the split of its time; `waiting` is the share of slots and steps in which a slot waited for its
search.

The peer is `generate` of transformers, with a search in torch and all tokens read anew each turn.
It is given one batch of as many episodes as there are slots, and every action the mean length.
"""

import dataclasses
import functools
import json
import time
from typing import Any

from benchmarks import harness
from benchmarks.shapes import POLICIES

COLUMNS = (
    *("engine", "policy", "case", "slots", "episodes", "prompt", "new", "tokens_per_s", "step_ms"),
    *("utilisation", "median_s", "first_s", "peak_gib", "failed"),
)
SPLIT = ("policy", "slots", "passes", "decode_s", "prefill_s", "embed_s", "search_s", "waiting")


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
    from zest_jax.rollout.engine import Engine, compiler_options
    from zest_jax.rollout.protocols import PLAIN_SEARCH
    from zest_jax.rollout.sampling import Draws
    from zest_jax.rollout.state import RolloutSpec
    from zest_jax.rollout.stops import build_stop_table

    config, attention = choose_attention(POLICIES[case["policy"]])
    params = jax.jit(
        lambda key: jax.tree.map(lambda x: x.astype(config.dtype), init_params(config, key))
    )(jax.random.key(0))
    searching = case["case"] == "search"
    share = 1 / case["new"] if searching else 0.0
    tokens = words(config.vocab_size, share * 0.9, share * 0.1)
    table = jax.tree.map(
        jnp.asarray, build_stop_table(tokens, PLAIN_SEARCH.opening, PLAIN_SEARCH.closing)
    )
    retriever = random_retriever(config.vocab_size, case) if searching else None
    N = case["episodes"]
    rng = np.random.default_rng(0)
    prompt_NP = jnp.asarray(rng.integers(0, config.vocab_size, (N, case["prompt"])), jnp.int32)
    length_N = jnp.full(N, case["prompt"], jnp.int32)
    spec = RolloutSpec(
        slots=case["slots"],
        prompt_length=case["prompt"],
        action_length=4 * case["new"] if searching else case["new"],
        observation_length=case["observation"] if searching else 0,
        searches=case["turns"] if searching else 0,
        wait_fraction=case["wait"],
        block_tokens=case["block_tokens"],
        block_slots=case["block_slots"],
        narrowings=case["narrowings"],
        packed_tokens=case["packed_tokens"],
    )

    def program(spec: Any) -> Any:
        engine = Engine(config, spec, PLAIN_SEARCH, ())
        run = jax.jit(
            functools.partial(engine.rollout, draws=_draws(Draws)),
            compiler_options=compiler_options(),
        )
        return lambda: jax.block_until_ready(run(params, table, retriever, prompt_NP, length_N))

    run = program(spec)
    start = time.perf_counter()
    out, counters = run()
    first = time.perf_counter() - start
    timed = harness.seconds(run, case["steps"], warm_up=1)
    if case.get("trace"):
        with jax.profiler.trace(case["trace"]):
            run()
        timed["copies"] = harness.copies(case["trace"])
    sampled = int(np.asarray(out.mask_NL).sum())
    steps = int(counters["decode_steps"])
    result = timed | {
        "first_s": first,
        "sampled": sampled,
        "decode_steps": steps,
        "utilisation": float(counters["slot_utilisation"]),
        "searches": int(np.asarray(out.searches_N).sum()),
        "attention": attention,
        "tokens_per_s": sampled / timed["median_s"],
        **harness.machine(),
    }
    if searching:
        engine = Engine(config, spec, PLAIN_SEARCH, ())
        result |= _split(engine, params, table, retriever, prompt_NP, length_N, _draws(Draws))
        result["waiting"] = float(counters["slot_waiting"])
        result["prefilled"] = int(counters["prefilled"])
    else:
        one = harness.seconds(
            program(dataclasses.replace(spec, action_length=1)), case["steps"], warm_up=1
        )
        rounds = -(-N // case["slots"])
        writing = timed["median_s"] - one["median_s"]
        result["step_ms"] = 1e3 * writing / (steps - rounds)
        result["tokens_per_s"] = (sampled - N) / writing
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return result | {"peak_gib": peak / 2**30 if peak else None}


def _split(
    engine: Any,
    params: Any,
    table: Any,
    retriever: Any,
    prompt_NP: Any,
    length_N: Any,
    draws: Any,
) -> dict[str, Any]:
    """Seconds of each piece of a rollout, driven from the host."""
    import jax
    import jax.numpy as jnp

    from zest_jax.models import bind
    from zest_jax.rollout.engine import compiler_options
    from zest_jax.rollout.observing import Observed

    def prepare(params: Any) -> Any:
        return bind(engine.config, params).unstack()

    def extend(params: Any, layers: Any, state: Any, rows: Any, scores: Any, asked: Any) -> Any:
        observed = Observed(rows, scores, *retriever.observe(rows, asked))
        policy = bind(engine.config, params)
        return engine.extend(policy, layers, state, prompt_NP, length_N, observed)

    def decode(params: Any, layers: Any, table: Any, state: Any) -> Any:
        step = functools.partial(engine.decode, bind(engine.config, params), layers, table, draws)
        return engine.cut(table, jax.lax.while_loop(engine.should_write, step, state))

    def embed(encoder: Any, ids_SUQ: Any, length_SU: Any) -> Any:
        return encoder.encode_queries(ids_SUQ[:, 0], length_SU[:, 0])

    def search(index: Any, vector_BE: Any, asked_S: Any) -> Any:
        row_BR, score_BR = index.search_in_jit(vector_BE, retriever.retrieved)
        there_S11 = asked_S[:, None, None] > 0
        return jnp.where(there_S11, row_BR[:, None], -1), score_BR[:, None]

    taken = dict.fromkeys(("decode_s", "prefill_s", "embed_s", "search_s"), 0.0)

    def timed(name: str, run: Any, *args: Any) -> Any:
        start = time.perf_counter()
        out = jax.block_until_ready(run(*args))
        taken[name] += time.perf_counter() - start
        return out

    options = compiler_options()
    run_extend = jax.jit(extend, donate_argnums=2, compiler_options=options)
    run_decode = jax.jit(decode, donate_argnums=3, compiler_options=options)
    run_embed, run_search, queries, has_work = map(
        jax.jit, (embed, search, engine.queries, engine.has_work)
    )
    layers = jax.jit(prepare)(params)
    passes = 0
    for measured in (False, True):
        state = engine.start(len(length_N), retriever.retrieved, len(length_N))
        while bool(has_work(state)) and (measured or passes < 2):
            ids, length, asked = queries(state)
            vector = timed("embed_s", run_embed, retriever.encoder, ids, length)
            rows, scores = timed("search_s", run_search, retriever.index, vector, asked)
            state = timed("prefill_s", run_extend, params, layers, state, rows, scores, asked)
            state = timed("decode_s", run_decode, params, layers, table, state)
            passes += 1
        if not measured:  # that was compilation
            passes = 0
            taken.update(dict.fromkeys(taken, 0.0))
    return taken | {"passes": passes}


def _draws(kind: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return kind(jax.random.key(0), jnp.float32(1.0))


def random_retriever(vocab_size: int, case: dict[str, Any]) -> Any:
    """A random index of the asked size: no corpus is needed to time a search."""
    import jax
    import jax.numpy as jnp

    from zest_jax.retrieval import Retriever
    from zest_jax.retrieval.encoders import BagEncoder
    from zest_jax.retrieval.exact import ExactIndex
    from zest_jax.retrieval.layout import Frame
    from zest_jax.retrieval.store import FramePieces, PassageStore

    N, E, C = case["passages"], case["dimension"], case["observation"]
    shown = 3
    table_VE = jax.random.normal(jax.random.key(1), (vocab_size, E // 2), jnp.float32)
    index_NE = jax.jit(lambda key: jax.random.normal(key, (N, E), jnp.bfloat16))(jax.random.key(2))
    ids_NP = jax.random.randint(jax.random.key(3), (N, C // shown), 0, vocab_size)
    frame = FramePieces.build(Frame([[]], [[]] * shown, [], []))
    store = PassageStore(ids_NP, jnp.full(N, C // shown, jnp.int32), frame, size=C)
    return Retriever(BagEncoder(table_VE), ExactIndex(index_NE), store, shown)


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
    p.add_argument("--wait", type=float, default=0.06, help="wait_fraction of the search case")
    p.add_argument("--block_slots", type=int, default=16)
    p.add_argument("--block_tokens", type=int, default=128)
    p.add_argument("--packed_tokens", type=int, default=2048, help="of a block, with kernels")
    p.add_argument("--narrowings", type=int, default=0, help="halvings of the slots at the end")
    p.add_argument("--trace", default="", help="folder for a profile of one call; copies told")
    p.add_argument("--peer", action=harness.argparse.BooleanOptionalAction, default=True)
    a = p.parse_args()
    if a.case:
        return harness.run_here(a.case, ours, "rollout")
    names = ("prompt", "new", "turns", "observation", "passages", "dimension")
    names = (*names, "block_tokens", "block_slots", "packed_tokens", "narrowings")
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
                    if "attention" in rows[-1]:
                        print(rows[-1]["attention"])
                    if "copies" in rows[-1]:
                        print(f"copies in one call: {json.dumps(rows[-1]['copies'])}")
                    if "passes" in rows[-1]:
                        print(harness.table(rows[-1:], SPLIT), flush=True)
    print("\n" + harness.table(rows, COLUMNS))
    harness.write(a.out, rows, {"tokens_per_s": "tokens that the policy wrote, per second"})


if __name__ == "__main__":
    main()
