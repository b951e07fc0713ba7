"""Makes the update again at which a run stopped because it was not finite, and tells where the
numbers go wrong first.

    python -m zest_jax.replay --workdir=runs/mine
    python -m zest_jax.replay --workdir=runs/mine --dump=found.json

The run has left the batch and the state before the update in its folder not_finite
(docs/guards.md). Looked at, as numbers flow: weights and moments, the log-probabilities of sampler
and policy token by token, likelihoods, rewards and advantages, ratios, the loss of every rollout,
the gradient of every parameter and layer; and the update itself, made again. --dump writes all that
was found as JSON.

Shape letters: M micro-batches, R rows, X loss tokens per row, N rollouts, B proposals, C contexts.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from zest_jax import assembly, cli, not_finite
from zest_jax.checkpoint import Checkpoints
from zest_jax.errors import UserError
from zest_jax.export import read_config
from zest_jax.learning import updates
from zest_jax.learning.likelihood import as_rows, target_log_probs
from zest_jax.learning.packing import Packed
from zest_jax.learning.updates import ProposalBatch, TrainState, UpdateSpec
from zest_jax.models import PolicyConfig, bind
from zest_jax.models.lora import join
from zest_jax.models.policy import Params
from zest_jax.parallel.sharding import STACKED
from zest_jax.rewards.information_gain import context_names
from zest_jax.rewards.terms import proposer_reward
from zest_jax.tracing import TraceCounter
from zest_jax.workdir import write_atomically

SHOWN = 8  # places of a kind that are told; the dump has MOST
MOST = 200
BEFORE = 12  # tokens shown before one that is no number
FAR = 20.0  # nats between sampler and trainer from which the loss cuts a ratio off

# A block's parameters in the order in which the backward pass comes to them.
_DOWN = ("down_", "up_", "gate_", "mlp_norm", "o_", "v_", "k_", "q_", "attention_norm")

Finding = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """An update to be made again.

    Attributes:
      config: the run's.
      what: what.json of the folder.
      tried: the update.
      parts: of the run.
      state: the run's, before the update.
    """

    config: Any
    what: Mapping[str, Any]
    tried: not_finite.Tried
    parts: assembly.Parts
    state: Mapping[str, Any]

    @property
    def role(self) -> str:
        """warm_start, proposer or solver."""
        return self.what["role"]

    @property
    def player(self) -> Any:
        return self.parts.player(self.role)

    @property
    def policy(self) -> PolicyConfig:
        return self.player.policy

    @property
    def spec(self) -> UpdateSpec:
        return assembly.update_specs(self.config)[self.role]

    @property
    def held(self) -> TrainState | Params:
        """The role's state; of a proposer that is never updated its parameters."""
        name = assembly.proposer_state(self.config) if self.role == "proposer" else "solver"
        return self.state[name or "solver"]

    @property
    def params(self) -> Params:
        return self.held.params if isinstance(self.held, TrainState) else self.held

    @property
    def reference(self) -> Params | None:
        """What the KL penalty looks back at; None without one."""
        if self.role == "warm_start" or not self.spec.kl_weight:
            return None
        own = self.parts.apart and self.role == "proposer"
        return self.state["proposer_base" if own else "base"]

    @property
    def packed(self) -> Packed:
        """The sequences that are trained on."""
        batch = self.tried.batch
        return batch.proposals if isinstance(batch, ProposalBatch) else batch


def load(workdir: str) -> Case:
    """What a run has left.

    Raises:
      UserError: the folder is no workdir, has no such update, or one of another version.
    """
    config = read_config(workdir)
    what, tried = not_finite.read(Path(workdir))
    try:
        parts = assembly.build(config, TraceCounter())
    except AttributeError as error:  # a field that runs did not have when this one began
        raise UserError(
            f"{workdir} was made by another version of zest_jax ({error}); use that one."
        ) from None
    folder = Path(workdir) / not_finite.FOLDER / "state"
    with Checkpoints(folder, keep=None) as checkpoints:
        _, state, host = checkpoints.restore(assembly.initial_state(config, parts))
    assembly.check_base(host, parts)
    return Case(config, what, tried, parts, state)


# ------------------------------------------------------------------------- the update


def again(case: Case) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """The very update once more: its metrics, and of proposals what each was given."""
    frozen, batch = case.player.frozen, case.tried.batch
    if isinstance(batch, ProposalBatch):
        return _proposer_again(case, batch)
    if case.role == "warm_start":
        step = jax.jit(functools.partial(updates.cloning_update, case.policy, case.spec))
        _, metrics = step(case.held, batch, frozen)
    else:
        step = jax.jit(functools.partial(updates.policy_update, case.policy, case.spec))
        _, metrics = step(case.held, batch, case.tried.advantage_N, frozen, case.reference)
    return _floats(metrics), {}


def _proposer_again(
    case: Case, batch: ProposalBatch
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    solver = case.parts.solver
    paid = (
        assembly.advantage_of(case.config, "proposer"),
        functools.partial(proposer_reward, options=case.config.reward),
    )
    if not isinstance(case.held, TrainState):
        score = jax.jit(functools.partial(updates.proposer_score, solver.policy, *paid))
        per_row = score(case.state["anchor"], batch, solver.frozen)
        return {}, jax.device_get(per_row)
    step = jax.jit(
        functools.partial(updates.proposer_update, case.policy, solver.policy, case.spec, *paid)
    )
    _, metrics, per_row = step(
        case.held, case.state["anchor"], batch, case.player.frozen, case.reference, solver.frozen
    )
    return _floats(metrics), jax.device_get(per_row)


def gradients(case: Case, advantage_N: np.ndarray | None) -> list[Finding]:
    """The gradient of every parameter and layer, in the order in which they are computed: from
    the head down."""
    if case.role == "warm_start":
        find = jax.jit(functools.partial(updates.cloning_gradients, case.policy, case.spec))
        _, grads = find(case.params, case.packed, case.player.frozen)
    else:
        find = jax.jit(functools.partial(updates.policy_gradients, case.policy, case.spec))
        _, grads = find(case.params, case.packed, advantage_N, case.player.frozen, case.reference)
    return sorted(_by_layer("gradient", grads), key=_backward)


def _backward(leaf: Finding) -> tuple[int, int, int]:
    if leaf["layer"] is None:
        return (2 if leaf["leaf"].startswith("embed") else 0), 0, 0
    name = leaf["leaf"].rpartition("/")[2]
    places = [n for n, start in enumerate(_DOWN) if name.startswith(start)]
    return 1, -leaf["layer"], places[0] if places else len(_DOWN)


# ------------------------------------------------------------------------- arrays


def weights(case: Case) -> list[Finding]:
    """Every layer of every parameter and moment that the update reads."""
    groups: dict[str, Any] = {f"{case.role}'s weights": case.params}
    if isinstance(case.held, TrainState):
        groups[f"{case.role}'s moments"] = case.held.opt_state
    groups["frozen base"] = case.player.frozen
    if isinstance(case.tried.batch, ProposalBatch):
        groups["anchor"] = case.state["anchor"]
        if case.parts.apart:
            groups["anchor's frozen base"] = case.parts.solver.frozen
    groups["reference"] = case.reference
    return [leaf for name, tree in groups.items() for leaf in _by_layer(name, tree)]


def _by_layer(where: str, tree: Any) -> list[Finding]:
    out = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        x = np.asarray(leaf)
        if not jax.numpy.issubdtype(x.dtype, np.inexact):
            continue
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        stacked = STACKED in name.split("/")
        for layer, part in enumerate(x) if stacked else [(None, x)]:
            part = np.asarray(part, np.float32)
            good = np.isfinite(part)
            out.append(
                {
                    "where": where,
                    "leaf": name,
                    "layer": layer,
                    "values": int(part.size),
                    "not_finite": int(part.size - good.sum()),
                    "largest": float(np.abs(part[good]).max()) if good.any() else 0.0,
                    "norm": float(np.linalg.norm(part.astype(np.float64))),
                }
            )
    return out


def log_probs(case: Case, params: Params) -> np.ndarray:
    """Log-probability of every target under a policy of the role, [M, R, X]."""
    # Behaviour cloning knows no temperature.
    temperature = 1.0 if case.role == "warm_start" else case.spec.temperature

    def scored(params: Params, frozen: Params | None, batch: Packed) -> jax.Array:
        policy = bind(case.policy, join(frozen, params))
        return jax.lax.map(
            lambda micro: target_log_probs(policy, micro, temperature=temperature)[0],
            as_rows(batch),
        )

    return np.asarray(jax.jit(scored)(params, case.player.frozen, case.packed))


def tokens(case: Case, values_MRX: np.ndarray, chosen_MRX: np.ndarray) -> list[Finding]:
    """Where chosen targets stand: rollout, place in it, token, the text before it, the value."""
    packed, tokenizer = case.packed, case.player.tokenizer
    out = []
    for m, r, x in np.argwhere(chosen_MRX & packed.mask_MRX)[:MOST]:
        ids_L, at = packed.ids_MRL[m, r], int(packed.at_MRX[m, r, x])
        own = np.flatnonzero(packed.segment_MRL[m, r] == packed.segment_MRL[m, r, at])
        begin = max(int(own[0]), at + 1 - BEFORE)
        out.append(
            {
                "rollout": int(packed.owner_MRX[m, r, x]),
                "token": at + 1 - int(own[0]),
                "id": int(packed.target_MRX[m, r, x]),
                "text": tokenizer.decode([int(packed.target_MRX[m, r, x])]),
                "after": tokenizer.decode(ids_L[begin : at + 1].tolist()),
                "value": float(values_MRX[m, r, x]),
            }
        )
    return out


def losses(
    case: Case, logp_MRX: np.ndarray, advantage_N: np.ndarray | None
) -> tuple[list[Finding], np.ndarray]:
    """The loss of every rollout (its share of the step's, without a KL penalty), and the log ratio
    of every target."""
    packed = case.packed
    mask_MRX, owner_MRX = packed.mask_MRX, packed.owner_MRX
    with np.errstate(all="ignore"):
        ratio_MRX = np.where(mask_MRX, logp_MRX - packed.logp_MRX, 0.0).astype(np.float64)
        if advantage_N is None:
            ratio_MRX = np.zeros_like(ratio_MRX)
            loss_MRX = -logp_MRX.astype(np.float64)
        else:
            rho = np.exp(np.clip(ratio_MRX, -FAR, FAR))
            kept = np.clip(rho, 1 - case.spec.clip_low, 1 + case.spec.clip_high)
            a_MRX = np.asarray(advantage_N, np.float64)[owner_MRX]
            loss_MRX = -np.minimum(rho * a_MRX, kept * a_MRX)
        loss_MRX = np.where(mask_MRX, loss_MRX, 0.0) / max(int(mask_MRX.sum()), 1)
        rows = []
        for n in np.unique(owner_MRX[mask_MRX]):
            own = mask_MRX & (owner_MRX == n)
            rows.append(
                {
                    "rollout": int(n),
                    "tokens": int(own.sum()),
                    "advantage": None if advantage_N is None else float(advantage_N[n]),
                    "loss": float(loss_MRX[own].sum()),
                }
            )
    return rows, ratio_MRX


def scores(batch: ProposalBatch, per_row: Mapping[str, np.ndarray]) -> list[Finding]:
    """Likelihoods, rewards and advantages of proposals that are no numbers."""
    valid_BC = np.asarray(batch.signals.valid_BC)
    names = context_names(valid_BC.shape[1] - 4)
    out = [
        {"proposal": int(b), "what": f"log-likelihood, context {names[c]}", "value": float(x)}
        for b, c in np.argwhere(valid_BC & ~np.isfinite(per_row["loglik_BC"]))
        for x in [per_row["loglik_BC"][b, c]]
    ]
    for name in sorted(per_row.keys() - {"loglik_BC"}):
        for b in np.flatnonzero(~np.isfinite(per_row[name])):
            out.append({"proposal": int(b), "what": name, "value": float(per_row[name][b])})
    return out


# ------------------------------------------------------------------------- all of it


def look(case: Case) -> Finding:
    """Everything that there is to find, and the verdict."""
    metrics, per_row = again(case)
    advantage_N = case.tried.advantage_N
    found: Finding = {"what": dict(case.what), "device": jax.devices()[0].device_kind}
    found["weights"] = weights(case)
    found["scores"] = []
    if isinstance(case.tried.batch, ProposalBatch):
        advantage_N = per_row["advantage"]
        found["scores"] = scores(case.tried.batch, per_row)
    elif advantage_N is not None:
        found["scores"] = [
            {"rollout": int(n), "what": "advantage", "value": float(advantage_N[n])}
            for n in np.flatnonzero(~np.isfinite(advantage_N))
        ]
    logp_MRX = log_probs(case, case.params)
    rows, ratio_MRX = losses(case, logp_MRX, advantage_N)
    sampler_MRX = case.packed.logp_MRX
    found["sampler"] = tokens(case, sampler_MRX, ~np.isfinite(sampler_MRX))
    found["policy"] = tokens(case, logp_MRX, ~np.isfinite(logp_MRX))
    found["reference"] = None
    if case.reference is not None:
        of_reference_MRX = log_probs(case, case.reference)
        found["reference"] = tokens(case, of_reference_MRX, ~np.isfinite(of_reference_MRX))
    finite_MRX = np.isfinite(ratio_MRX)
    found["far"] = tokens(case, ratio_MRX, finite_MRX & (np.abs(ratio_MRX) >= FAR))
    found["rows"] = rows
    found["gradients"] = gradients(case, advantage_N) if isinstance(case.held, TrainState) else []
    found["metrics"] = metrics
    found["verdict"] = verdict(found)
    return found


def bad(leaves: Sequence[Finding]) -> list[Finding]:
    """Those with values that are no numbers."""
    return [leaf for leaf in leaves if leaf["not_finite"]]


def verdict(found: Finding) -> str:
    """Where numbers go wrong first, and what usually causes it."""
    role = found["what"]["role"]
    rate = f"{role}.learning_rate"
    for leaf in bad(found["weights"])[:1]:
        if leaf["where"].endswith("weights"):
            return (
                f"The weights were not finite before the update, first {_named(leaf)}: usually an "
                f"earlier update was too large (lower {rate}, and go back to an earlier "
                "checkpoint), or the folder that the run started from is damaged."
            )
        if leaf["where"].endswith("moments"):
            return (
                f"The optimiser's moments were not finite before the update, first {_named(leaf)}: "
                f"usually gradients so large that their squares overflow (lower {rate}, and look "
                "at the grad_norm of the steps before)."
            )
        return (
            f"The {leaf['where']} was not finite, first {_named(leaf)}: usually the folder that "
            "the run started from is damaged, or the solver that the anchor was copied from was "
            "not finite any more."
        )
    if found["sampler"]:
        return (
            f"The sampler's log-probability was not finite, first at {_placed(found['sampler'])}, "
            "while the weights were: usually logits that overflow in the compute type "
            "(policy.dtype=float32 shows), or a truncation that leaves a token no probability."
        )
    if found["policy"]:
        return (
            f"The policy's log-probability is not finite, first at {_placed(found['policy'])}, "
            "while its weights are: usually activations that overflow in the compute type "
            f"(policy.dtype=float32 shows) after weights have grown (lower {rate}), or an "
            "attention kernel (policy.attention=xla shows)."
        )
    if found["reference"]:
        return (
            "The reference's log-probability is not finite, first at "
            f"{_placed(found['reference'])}: usually a compute type that overflows "
            "(policy.dtype=float32 shows)."
        )
    for score in found["scores"][:1]:
        who = "proposal" if "proposal" in score else "rollout"
        return (
            f"{score['what'].capitalize()} of {who} {score[who]} is {score['value']}, with finite "
            "weights: usually a reward term that divides by zero or takes the logarithm of 0, or "
            "an anchor that overflows in the compute type."
        )
    for row in found["rows"]:
        if not np.isfinite(row["loss"]):
            return (
                f"The loss of rollout {row['rollout']} is not finite, with log-probabilities and "
                "advantage that are: usually an advantage so large that its product with the ratio "
                f"overflows (solver.advantage.eps, proposer.advantage.eps); it is "
                f"{row['advantage']}."
            )
    for leaf in bad(found["gradients"])[:1]:
        return (
            f"The loss is finite and the gradient is not, first (from the head down) {_named(leaf)}"
            ": usually an overflow in the backward pass of that layer, where weights have grown "
            f"(the largest is {_largest(found['weights'])}: lower {rate}) or the compute type is "
            "small (policy.dtype=float32 or policy.attention=xla show which)."
        )
    numbers = found["metrics"]
    wrong = {
        name: x
        for name, x in numbers.items()
        if not np.isfinite(x) or (name.startswith("not_finite") and x)
    }
    if wrong:
        told = ", ".join(f"{name} = {x:g}" for name, x in wrong.items())
        return (
            f"Everything that goes into the update is finite, and the update itself is not: {told}."
            " Usually sums that overflow: look at the largest gradients and losses above."
        )
    made, here = found["what"]["device"], found["device"]
    return (
        f"The update is finite now, on {here} (it was made on {made}): what stopped the run was "
        "usually a fault of the hardware, or an order of operations that differs between runs or "
        "devices. Start the run again; if it stops at the same step, replay it on the same device."
    )


def _named(leaf: Finding) -> str:
    layer = "" if leaf["layer"] is None else f", layer {leaf['layer']}"
    return f"{leaf['leaf']}{layer} ({leaf['not_finite']} of {leaf['values']} values)"


def _largest(leaves: Sequence[Finding]) -> str:
    leaf = max(leaves, key=lambda leaf: leaf["largest"])
    layer = "" if leaf["layer"] is None else f", layer {leaf['layer']}"
    return f"{leaf['largest']:.3g} in {leaf['where']}, {leaf['leaf']}{layer}"


def _placed(places: Sequence[Finding]) -> str:
    one = places[0]
    return f"rollout {one['rollout']}, token {one['token']} ({one['text']!r})"


def told(found: Finding) -> str:
    """What was found, for people."""
    what = found["what"]
    was = ", ".join(f"{name} = {x}" for name, x in what["not_finite"].items())
    lines = [
        f"step {what['step']}, phase {what['phase']}, role {what['role']}: {was}",
        f"made on {what['device']} with JAX {what['jax']}, seed {what['seed']}; here: "
        f"{found['device']}",
    ]
    broken = bad(found["weights"])
    lines.append(f"weights and moments: {_count(broken, len(found['weights']))}")
    lines += [f"  {leaf['where']}: {_named(leaf)}" for leaf in broken[:SHOWN]]
    lines.append(f"  largest: {_largest(found['weights'])}")
    for name, title in (
        ("sampler", "sampler's log-probabilities"),
        ("policy", "policy's log-probabilities"),
        ("reference", "reference's log-probabilities"),
    ):
        if found[name] is not None:
            lines.append(f"{title}: {_count(found[name])}")
            lines += _token_lines(found[name])
    lines.append(f"likelihoods, rewards and advantages: {_count(found['scores'])}")
    for score in found["scores"][:SHOWN]:
        who = "proposal" if "proposal" in score else "rollout"
        lines.append(f"  {who} {score[who]}: {score['what']} {score['value']}")
    lines.append(
        f"tokens whose probability differs by a factor of e^{FAR:g} or more: {len(found['far'])}"
    )
    lines += _token_lines(found["far"])
    wrong = [row for row in found["rows"] if not np.isfinite(row["loss"])]
    lines.append(f"loss by rollout: {_count(wrong, len(found['rows']))}")
    finite = [row for row in found["rows"] if np.isfinite(row["loss"])]
    largest = sorted(finite, key=lambda row: -abs(row["loss"]))[:3]
    lines += [f"  {_row(row)}" for row in [*wrong[:SHOWN], *largest]]
    broken = bad(found["gradients"])
    lines.append(f"gradients, from the head down: {_count(broken, len(found['gradients']))}")
    lines += [f"  {_named(leaf)}" for leaf in broken[:SHOWN]]
    finite = [leaf for leaf in found["gradients"] if not leaf["not_finite"]]
    for leaf in sorted(finite, key=lambda leaf: -leaf["norm"])[:3]:
        layer = "" if leaf["layer"] is None else f", layer {leaf['layer']}"
        lines.append(f"  norm {leaf['norm']:.3g}: {leaf['leaf']}{layer}")
    update = ", ".join(f"{name} {x:.6g}" for name, x in found["metrics"].items())
    lines.append(f"the update, made again: {update or 'there is none, the proposer is frozen'}")
    return "\n".join([*lines, "", found["verdict"]])


def _count(broken: Sequence[Finding], of: int | None = None) -> str:
    if not broken:
        return "all finite"
    many = f"{len(broken)} or more" if len(broken) == MOST else str(len(broken))
    return f"{many}{'' if of is None else f' of {of}'} not finite"


def _token_lines(places: Sequence[Finding]) -> list[str]:
    return [
        f"  rollout {one['rollout']}, token {one['token']}: {one['value']} for {one['text']!r} "
        f"after {one['after']!r}"
        for one in places[:SHOWN]
    ]


def _row(row: Finding) -> str:
    advantage = "" if row["advantage"] is None else f", advantage {row['advantage']:.4g}"
    return f"rollout {row['rollout']}: {row['loss']:.4g} over {row['tokens']} tokens{advantage}"


def _floats(metrics: Mapping[str, jax.Array]) -> dict[str, float]:
    return {name: float(x) for name, x in jax.device_get(dict(metrics)).items()}


def plain(value: Any) -> Any:
    """The same for JSON: what is no number as its name."""
    if isinstance(value, Mapping):
        return {name: plain(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(x) for x in value]
    if isinstance(value, float) and not np.isfinite(value):
        return repr(value)
    return value


def main(config: Any, workdir: str, values: flags.FlagValues) -> None:
    if config is not None:
        raise UserError("a replay takes the run's own config; leave --config out.")
    found = look(load(workdir))
    print(told(found))
    if values.dump:
        text = json.dumps(plain(found), indent=2, ensure_ascii=False, allow_nan=False)
        write_atomically(Path(values.dump), text + "\n")


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("dump", "", "a JSON file for all that was found", flag_values=values)


entry = cli.program(main, define=define, needs_config=False)

if __name__ == "__main__":
    sys.exit(entry())
