"""What a proposer's reward costs: Dr. Free's likelihoods against the solver rollouts of difficulty.

    python -m benchmarks.proposer_reward                    on a GPU
    python -m benchmarks.proposer_reward --policies=tiny --scale=0.1 --slots=4    a trial

The same policy, random weights, and the same number of proposals, a third each of 1, 2 and 3 hops:

- **likelihood**: all contexts of every proposal (2 for one hop, h + 4 for h), packed and scored by
  the trainer's `sequence_log_likelihood`. Passages have 150 tokens, a question with its prompt 100,
  an answer 8.
- **rollouts**: G solver episodes for every proposal, with up to three searches in an index of a
  million passages on the device, actions of 128 tokens on average, 450 tokens an observation, by
  the trainer's compiled rollout. It is the fastest form of the other reward: there is no server.
- **write**: one reply of 200 tokens to a prompt of 600, which every proposer of either kind needs
  at least (Dr. Zero's searches as well, and takes longer).
- **update**: the proposer's policy-gradient step on those replies.

`ratio` is rollouts / likelihood; `whole` is that of whole steps, write and update added to either.
"""

import functools
import json
import time
from typing import Any

from benchmarks import harness
from benchmarks.shapes import POLICIES

COLUMNS = ("policy", "part", "proposals", "median_s", "first_s", "sequences", "tokens", "failed")
PARTS = ("likelihood", "write", "update", "rollouts")
QUESTION, PASSAGE, ANSWER, PROMPT, REPLY = 100, 150, 8, 600, 200


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """One part, in this process."""
    import jax

    part = {"likelihood": likelihood, "write": write, "update": update, "rollouts": rollouts}
    result = part[case["part"]](case)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return result | {"peak_gib": peak / 2**30 if peak else None, **harness.machine()}


def contexts(case: dict[str, Any]) -> list[int]:
    """Tokens before the answer of every context of every proposal."""
    lengths = []
    for b in range(case["proposals"]):
        hops = 1 + b % 3
        passages = [3, 0]  # one retrieval brings three; nothing
        if hops > 1:
            passages += [hops + 1, 1, *[1] * hops]  # the chain, the source, each hop
        lengths += [_scaled(case, QUESTION + PASSAGE * n) for n in passages]
    return lengths


def likelihood(case: dict[str, Any]) -> dict[str, Any]:
    import jax
    import numpy as np

    from zest_jax.learning.likelihood import sequence_log_likelihood
    from zest_jax.learning.packing import Item, PackSpec, pack

    config, params = _policy(case)
    rng, lengths = np.random.default_rng(0), contexts(case)
    items = [
        Item(rng.integers(0, config.vocab_size, n + ANSWER), np.arange(n, n + ANSWER), np.zeros(8))
        for n in lengths
    ]
    row = 2 * (max(lengths) + ANSWER)
    rows = case["rows"]
    total = sum(lengths) + ANSWER * len(lengths)
    most = -(-int(1.3 * total) // (rows * row)) + 1
    packed = pack(items, PackSpec(rows, row, 16 * ANSWER, most, segments=16))
    packed = jax.device_put(packed)
    score = jax.jit(functools.partial(sequence_log_likelihood, config, sequences=len(items)))
    timed = _timed(lambda: score(params, packed), case)
    return timed | {"sequences": len(items), "tokens": total}


def write(case: dict[str, Any]) -> dict[str, Any]:
    return _rollout(case, _scaled(case, PROMPT), _scaled(case, REPLY), case["proposals"], turns=0)


def rollouts(case: dict[str, Any]) -> dict[str, Any]:
    episodes = case["proposals"] * case["group"]
    return _rollout(case, _scaled(case, QUESTION), _scaled(case, 128), episodes, turns=3)


def _rollout(
    case: dict[str, Any], prompt: int, new: int, episodes: int, turns: int
) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks.rollout import random_retriever, words
    from zest_jax.rollout.engine import Engine, compiler_options
    from zest_jax.rollout.protocols import PLAIN_SEARCH
    from zest_jax.rollout.sampling import Draws
    from zest_jax.rollout.state import RolloutSpec
    from zest_jax.rollout.stops import build_stop_table

    config, params = _policy(case)
    share = 1 / new if turns else 0.0
    tokens = words(config.vocab_size, share * 0.9, share * 0.1)
    table = build_stop_table(tokens, PLAIN_SEARCH.opening, PLAIN_SEARCH.closing)
    table = jax.tree.map(jnp.asarray, table)
    observation = _scaled(case, 3 * PASSAGE)
    sizes = {"passages": case["passages"], "dimension": 768, "observation": observation}
    retriever = random_retriever(config.vocab_size, sizes) if turns else None
    spec = RolloutSpec(
        slots=min(case["slots"], episodes),
        prompt_length=prompt,
        action_length=4 * new if turns else new,
        observation_length=observation if turns else 0,
        searches=turns,
        wait_fraction=0.06,
        block_tokens=128,
        block_slots=16,
    )
    rng = np.random.default_rng(0)
    prompt_NP = jnp.asarray(rng.integers(0, config.vocab_size, (episodes, prompt)), jnp.int32)
    length_N = jnp.full(episodes, prompt, jnp.int32)
    engine = Engine(config, spec, PLAIN_SEARCH, ())
    draws = Draws(jax.random.key(0), jnp.float32(1.0))
    run = jax.jit(
        functools.partial(engine.rollout, draws=draws), compiler_options=compiler_options()
    )
    last: list[Any] = []

    def once() -> Any:
        last[:] = [run(params, table, retriever, prompt_NP, length_N)]
        return last[0]

    timed = _timed(once, case)
    return timed | {"sequences": episodes, "tokens": int(np.asarray(last[0][0].mask_NL).sum())}


def update(case: dict[str, Any]) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from zest_jax.learning.packing import Item, PackSpec, pack
    from zest_jax.learning.updates import UpdateSpec, policy_update

    config, params = _policy(case, "float32")
    spec = UpdateSpec(learning_rate=1e-6, remat="full")
    state = jax.jit(lambda p: spec.init(p), donate_argnums=0)(params)
    rng, B = np.random.default_rng(0), case["proposals"]
    prompt, reply = _scaled(case, PROMPT), _scaled(case, REPLY)
    length, targets = prompt + reply, np.arange(prompt, prompt + reply)
    items = [
        Item(rng.integers(0, config.vocab_size, length), targets, np.full(reply, -12.0))
        for _ in range(B)
    ]
    rows = case["rows"]
    packed = pack(items, PackSpec(rows, 2 * length, 2 * reply, -(-B // (2 * rows)), segments=2))
    advantage_B = jnp.asarray(rng.normal(size=B).astype(np.float32))
    packed = jax.device_put(packed)
    step = jax.jit(functools.partial(policy_update, config, spec), donate_argnums=0)
    held = [state]
    del state, params

    def once() -> Any:
        held[0], metrics = step(held[0], packed, advantage_B)
        return metrics

    return _timed(once, case) | {"sequences": B, "tokens": B * length}


def _policy(case: dict[str, Any], dtype: str = "") -> tuple[Any, Any]:
    """Shape and random weights, in the compute type unless another is asked for."""
    import jax

    from zest_jax.models import init_params
    from zest_jax.models.backends import choose_attention

    config, _ = choose_attention(POLICIES[case["policy"]])
    kept = dtype or config.dtype
    make = jax.jit(lambda key: jax.tree.map(lambda x: x.astype(kept), init_params(config, key)))
    return config, make(jax.random.key(0))


def _timed(run: Any, case: dict[str, Any]) -> dict[str, float]:
    import jax

    start = time.perf_counter()
    jax.block_until_ready(run())
    first = time.perf_counter() - start
    timed = harness.seconds(lambda: jax.block_until_ready(run()), case["steps"], warm_up=0)
    return timed | {"first_s": first}


def _scaled(case: dict[str, Any], tokens: int) -> int:
    return max(4, round(case["scale"] * tokens))


def main() -> None:
    p = harness.parser(__doc__, "runs/benchmarks/proposer_reward.json")
    p.set_defaults(steps=2)
    p.add_argument("--policies", default="qwen2.5-1.5b")
    p.add_argument("--parts", default=",".join(PARTS))
    p.add_argument("--proposals", type=int, default=256)
    p.add_argument("--group", type=int, default=5, help="solver episodes of a proposal")
    p.add_argument("--slots", type=int, default=256, help="episodes sampled at once")
    p.add_argument("--rows", type=int, default=16, help="rows of a micro-batch")
    p.add_argument("--passages", type=int, default=1_000_000)
    p.add_argument("--scale", type=float, default=1.0, help="of all lengths, for trials")
    a = p.parse_args()
    if a.case:
        print(json.dumps(measure(json.loads(a.case))))
        return
    names = ("proposals", "group", "slots", "rows", "passages", "scale", "steps")
    shape = {name: getattr(a, name) for name in names}
    rows: list[dict[str, Any]] = []
    for policy in a.policies.split(","):
        taken = {}
        for part in a.parts.split(","):
            case = {"policy": policy, "part": part} | shape
            row = harness.run_case("benchmarks.proposer_reward", case)
            rows.append(row)
            taken[part] = row.get("median_s")
            print(harness.table([row], COLUMNS), flush=True)
        if all(taken.get(part) for part in PARTS):
            shared = taken["write"] + taken["update"]
            rows.append(
                {
                    "policy": policy,
                    "part": "ratios",
                    "ratio": taken["rollouts"] / taken["likelihood"],
                    "whole": (shared + taken["rollouts"]) / (shared + taken["likelihood"]),
                }
            )
            print(harness.table(rows[-1:], ("policy", "ratio", "whole")), flush=True)
    harness.write(a.out, rows, {"ratio": "seconds of rollouts over seconds of likelihoods"})


if __name__ == "__main__":
    main()
