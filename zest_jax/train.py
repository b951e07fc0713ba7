"""Trains a search agent by self-evolution, read top to bottom.

    python -m zest_jax.train --config=configs/smoke.py --workdir=runs/smoke

A run is a row of phases: an optional warm start, then per iteration a proposer phase, the
generation of questions, and a solver phase. Everything drawn is a function of the seed and the
step, and a checkpoint holds the rest, so that a killed run, started again, ends with the same
numbers.

What is left out so far: more than one device, a KL penalty toward a reference, and more than one
optimiser step on a batch (sampler and trainer are the same policy, so the ratio is 1).
"""

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zest_jax import assembly, cli, evaluation, memory_plan, preflight, records
from zest_jax import workdir as workdir_lib
from zest_jax.checkpoint import Checkpoints
from zest_jax.config import config_hash
from zest_jax.errors import UserError
from zest_jax.learning import updates
from zest_jax.learning.advantages import GRPO, HRPO
from zest_jax.learning.packing import Item, pack
from zest_jax.learning.updates import ProposalBatch
from zest_jax.metrics import MetricsWriter, NonFiniteError, Stopwatch, read_metrics
from zest_jax.models.policy import Params
from zest_jax.progress import Progress
from zest_jax.report import write_report
from zest_jax.rewards.information_gain import context_names, dr_free_reward, information_gain
from zest_jax.rewards.outcome import outcome
from zest_jax.rollout.trajectories import Trajectories
from zest_jax.statistics import paired_bootstrap_ci
from zest_jax.tasks import cloning, proposals, scripts
from zest_jax.tasks.types import Chain, Task, read_tasks, task_to_line
from zest_jax.tracing import TraceCounter
from zest_jax.workdir import Workdir


def main(config: Any, workdir_path: str) -> None:
    """One run, from its config to its report, in a workdir that is its own."""
    with Workdir(workdir_path) as workdir:
        workdir.claim(config, may_differ=("log", "checkpoint"))
        with Progress(log=workdir.log) as progress:
            run(config, workdir, progress)


def run(c: Any, workdir: Workdir, progress: Progress) -> None:
    """The run itself."""
    # ------------------------------------------------------------------------------------------
    # What is told while it runs
    # ------------------------------------------------------------------------------------------
    begun = time.perf_counter()
    traces = TraceCounter()
    say = progress.say
    devices = jax.devices()
    device = f"{devices[0].device_kind} ({devices[0].platform})"
    say(f"{device}, config {config_hash(c)}")
    if len(devices) > 1:
        say(f"{len(devices)} devices are there; this version trains on the first alone")

    # ------------------------------------------------------------------------------------------
    # World, policy, retriever, samplers
    # ------------------------------------------------------------------------------------------
    parts = assembly.build(c, traces)
    preflight.check_world(c, parts)
    plan = memory_plan.check_run(c, parts.policy, parts.retriever)
    workdir.write("memory.txt", plan.table() + "\n")
    atlas, policy, frozen = parts.atlas, parts.policy, parts.frozen
    solver_sampler, proposer_sampler = parts.solver_sampler, parts.proposer_sampler
    trained = sum(x.size for x in jax.tree.leaves(parts.params))
    size = trained + sum(x.size for x in jax.tree.leaves(frozen))
    say(
        f"world {atlas.folder.name}: {atlas.graph.entity_count} entities, "
        f"{atlas.graph.triple_count} triples, {len(atlas.passages)} passages; "
        f"policy of {size:,} parameters from {parts.origin}"
        + (f", of which {trained:,} in adapters are trained" if frozen else "")
    )
    say(f"{parts.attention}; {plan.summary()}")

    # ------------------------------------------------------------------------------------------
    # Compiled updates
    # ------------------------------------------------------------------------------------------
    specs = assembly.update_specs(c)
    packs = assembly.pack_specs(c)
    columns = len(context_names(c.world.max_hops))
    without = tuple(c.reward.without)
    imitated: list[Item] = []
    if c.warm_start.steps and c.warm_start.file:
        imitated = cloning.episode_items(cloning.read_trajectories(c.warm_start.file), parts.encode)
        cloning.check_lengths(imitated, packs["warm_start"].length, c.warm_start.file)

    def dr_free(loglik_BC: jax.Array, batch: ProposalBatch) -> dict[str, jax.Array]:
        gain_B = information_gain(loglik_BC, batch.hops_B, batch.valid_BC, without=without)
        reward_B = dr_free_reward(
            batch.format_B,
            batch.grounded_B,
            gain_B,
            lam=c.reward.format_weight,
            tau=c.reward.tau,
            form=c.reward.squash,
        )
        return {"reward": reward_B, "gain": gain_B}

    cloning_step = traces.jit(
        "cloning_update",
        functools.partial(updates.cloning_update, policy, specs["warm_start"]),
        donate_argnums=0,
    )
    solver_update = traces.jit(
        "solver_update",
        functools.partial(updates.policy_update, policy, specs["solver"]),
        donate_argnums=0,
    )
    proposer_update = traces.jit(
        "proposer_update",
        functools.partial(
            updates.proposer_update, policy, policy, specs["proposer"], HRPO, dr_free
        ),
        donate_argnums=0,
    )
    grpo = traces.jit("grpo", GRPO)
    search = traces.jit("search", parts.retriever.search)

    # ------------------------------------------------------------------------------------------
    # Where the run stands: phases, state, restore
    # ------------------------------------------------------------------------------------------
    phases = assembly.phases(c)
    state = assembly.initial_state(c, parts.params)
    host: dict[str, Any] = {"saves": 0, "phase": 0, "phase_step": 0, "step": 0}
    host |= {"records": 0, "retraces": 0, "seconds": {}, "base": assembly.base_of(parts)}
    checkpoints = Checkpoints(workdir.checkpoints, c.checkpoint.keep)
    if checkpoints.latest is not None:
        _, state, host = checkpoints.restore(state)
        assembly.check_base(host, parts)
        say(f"resumed at step {host['step']}")
    retraces_before = host["retraces"]
    watch = Stopwatch(host["seconds"])
    watch.add("start", time.perf_counter() - begun)
    resumed = checkpoints.latest is not None
    metrics = MetricsWriter(workdir, host["step"] if resumed else None, host["records"])
    for log in ("proposals.jsonl", "episodes.jsonl"):
        workdir_lib.truncate_after(workdir.rollouts / log, host["step"])

    def rng(word: str) -> np.random.Generator:
        return np.random.default_rng([c.seed, *word.encode(), host["step"]])

    def key(word: str) -> jax.Array:
        return assembly.random_key(c.seed, word, host["step"])

    def save() -> None:
        with watch("checkpoint"):
            # Numbered by save, not by step: the end of a phase changes the state without a step.
            host["saves"] += 1
            host.update(records=metrics.count, seconds=watch.seconds)
            host["retraces"] = retraces_before + traces.retraces
            metrics.sync()
            checkpoints.save(host["saves"], state, host)

    def advance(
        bar: Any, record: dict[str, float], phase: str, ends: bool = False, **shown: float
    ) -> None:
        """Counts an update as done: metrics, progress, and now and then a checkpoint.

        None where the update `ends` its phase early: a run resumed from it would not know.
        """
        host["step"] += 1
        host["phase_step"] += 1
        metrics.write(host["step"], phase, record)
        bar.advance(**shown)
        if host["phase_step"] % c.checkpoint.every == 0 and not ends:
            save()

    # ------------------------------------------------------------------------------------------
    # Held-out questions
    # ------------------------------------------------------------------------------------------
    def evaluate(
        name: str, params: Params | None
    ) -> tuple[dict[str, Any], list[evaluation.Answered]]:
        """Greedy and sampled answers to the held-out questions. They are kept in a file, so that a
        resumed run reads what an earlier start has done; without params they are only read."""
        path = workdir.path / "evaluation" / f"{name}.jsonl"
        answered = {}
        for mode, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            done = [r for r in workdir_lib.read_jsonl(path) if r["mode"] == mode]
            if len(done) == len(atlas.heldout_tasks):
                fields = [{k: v for k, v in r.items() if k != "mode"} for r in done]
                answered[mode] = [evaluation.Answered(**f) for f in fields]
                continue
            if params is None:
                raise UserError(f"{path} is gone or cut; the run cannot be reported without it.")
            with watch("evaluation"):
                answered[mode] = evaluation.answer_tasks(
                    solver_sampler,
                    parts.whole(params),
                    atlas.heldout_tasks,
                    key(f"eval {mode}"),
                    temperature,
                )
        records = [a.to_json() | {"mode": m} for m, group in answered.items() for a in group]
        workdir_lib.write_jsonl(path, records)
        summary = evaluation.summarise(answered["greedy"], c.evaluation.draws)
        summary["em_sampled"] = float(np.mean([a.em for a in answered["sampled"]]))
        if params is None:
            return summary, answered["greedy"]
        metrics.write(
            host["step"],
            "eval",
            evaluation.flat_metrics(summary) | {"eval/em_sampled": summary["em_sampled"]},
        )
        say(
            f"held out ({name}): EM {summary['em']:.3f}, sampled {summary['em_sampled']:.3f}, "
            f"F1 {summary['f1']:.3f}, searches {summary['searches']:.2f}"
        )
        return summary, answered["greedy"]

    # ------------------------------------------------------------------------------------------
    # Warm start: behaviour cloning until the validation questions go well enough
    # ------------------------------------------------------------------------------------------
    def warm_start(phase: assembly.Phase, bar: Any) -> None:
        w = c.warm_start
        while host["phase_step"] < phase.steps:
            step = host["phase_step"]
            if imitated:
                chosen = rng("warm start").integers(len(imitated), size=w.sequences)
                items = [imitated[i] for i in chosen]
            else:
                mix = assembly.mix(c, clean=step < w.clean_steps)
                scripted = cloning.scripted_episodes(atlas, mix, w.sequences, rng("warm start"))
                items = cloning.episode_items(scripted, parts.encode)
            state["solver"], values = cloning_step(
                state["solver"], pack(items, packs["warm_start"]), frozen
            )
            record = {f"warm_start/{name}": float(value) for name, value in values.items()}
            stop = False
            if (step + 1) % w.stop_every == 0:
                solver = parts.whole(state["solver"].params)
                answered = evaluation.answer_tasks(
                    solver_sampler, solver, atlas.validation_tasks, key("stop"), 0.0
                )
                em = float(np.mean([a.em for a in answered]))
                record["warm_start/validation_em"] = em
                stop = em >= w.stop_at_em
                say(f"warm start, step {step + 1}: validation EM {em:.3f}")
            advance(bar, record, "warm_start", ends=stop, loss=record["warm_start/loss"])
            if stop:
                break

    # ------------------------------------------------------------------------------------------
    # Proposer phase: questions for chains, paid by the likelihood contrast (Dr. Free)
    # ------------------------------------------------------------------------------------------
    def fits(question: str) -> bool:
        prompt = solver_sampler.protocol.prompt.format(question=question)
        return len(parts.encode([prompt])[0]) <= c.solver.prompt_length

    def proposer_prompt(chain: Chain) -> str:
        template = proposer_sampler.protocol.prompt
        return scripts.proposer_prompt(chain, atlas, template=template)

    def chain_fits(chain: Chain) -> bool:
        return len(parts.encode([proposer_prompt(chain)])[0]) <= c.proposer.prompt_length

    def propose(
        chains: Sequence[Chain], name: str
    ) -> tuple[Trajectories, list[proposals.Proposal]]:
        prompts = parts.encode([proposer_prompt(chain) for chain in chains])
        proposer = parts.whole(state["proposer"].params)
        episodes = proposer_sampler(proposer, prompts, key(name), c.proposer.temperature)
        texts = proposer_sampler.texts(episodes)
        return episodes, [
            proposals.judge(chain, text, atlas, fits)
            for chain, text in zip(chains, texts, strict=True)
        ]

    def one_shot(proposed: Sequence[proposals.Proposal]) -> list[str]:
        """What a single retrieval with each question brings, as the solver would see it."""
        questions = parts.encode([f" {p.parsed.question or ''}" for p in proposed])
        query_BQ = np.zeros((len(questions), c.proposer.action_length), np.int32)
        length_B = np.array([min(len(q), query_BQ.shape[1]) for q in questions], np.int32)
        for row, ids, n in zip(query_BQ, questions, length_B, strict=True):
            row[:n] = ids[:n]
        rows_B1R, _ = jax.device_get(search(query_BQ[:, None], length_B[:, None]))
        shown = [[atlas.passages[r] for r in rows] for rows in rows_B1R[:, 0].tolist()]
        return [solver_sampler.protocol.show([(p.title, p.text) for p in row]) for row in shown]

    def proposer_phase(phase: assembly.Phase, bar: Any) -> None:
        while host["phase_step"] < phase.steps:
            count = c.proposer.chains_per_step
            chains = proposals.draw_chains(
                atlas, count, c.world.max_hops, rng("chains"), chain_fits
            )
            episodes, proposed = propose(chains, "propose")
            contexts, owners, valid_BC = proposals.context_items(
                proposed, one_shot(proposed), atlas, solver_sampler.protocol, parts.encode, columns
            )
            order = np.arange(count)
            if c.control.shuffle_rewards:
                order = rng("shuffle").permutation(count)
            batch = ProposalBatch(
                proposals=pack(_sampled_items(episodes), packs["proposer"]),
                contexts=pack(contexts, packs["contexts"], owners),
                valid_BC=valid_BC,
                format_B=np.array([p.gate.s_fmt for p in proposed], np.float32),
                grounded_B=np.array([p.gate.grounded for p in proposed]),
                hops_B=np.array([p.chain.hops for p in proposed], np.int32),
                reward_order_B=order,
            )
            state["proposer"], values, per_row = proposer_update(
                state["proposer"], state["anchor"], batch, frozen
            )
            values, per_row = jax.device_get((values, per_row))
            record = records.proposer_metrics(proposed, episodes, values, per_row, valid_BC, atlas)
            record |= records.rollout_metrics("proposer", proposer_sampler.counters)
            if host["phase_step"] % c.log.rollouts_every == 0:
                lines = records.proposal_traces(proposed[:6], per_row, valid_BC, atlas)
                at = {"step": host["step"] + 1, "iteration": phase.iteration}
                workdir_lib.append_jsonl(
                    workdir.rollouts / "proposals.jsonl", [at | line for line in lines]
                )
            with _kept_if_not_finite(workdir, batch):
                advance(
                    bar,
                    record,
                    "proposer",
                    reward=record["proposer/reward"],
                    valid=record["proposer/valid"],
                )

    # ------------------------------------------------------------------------------------------
    # Generation: the proposer's questions become the solver's tasks
    # ------------------------------------------------------------------------------------------
    def generate(phase: assembly.Phase) -> list[Task]:
        path = workdir.tasks(phase.iteration)
        if host["phase_step"] > 0:  # generated before the phase began
            return list(read_tasks(path))
        chains = proposals.draw_chains(
            atlas, c.schedule.max_chains, c.world.max_hops, rng("generation"), chain_fits
        )
        _, proposed = propose(chains, "generation")
        tasks, duplicates = proposals.tasks_of(proposed, atlas, phase.iteration, c.schedule.tasks)
        if len(tasks) < c.solver.tasks_per_step:
            raise UserError(
                f"only {len(tasks)} of {len(chains)} questions of iteration {phase.iteration + 1} "
                f"passed the gates, and solver.tasks_per_step is {c.solver.tasks_per_step}: start "
                "from a policy that writes questions (policy.folder, or more warm_start.steps), or "
                "raise schedule.max_chains, in another workdir."
            )
        several = [t for t in tasks if t.hops > 1]
        record = {
            "generate/accepted": float(np.mean([p.gate.passed for p in proposed])),
            "generate/duplicates": duplicates / len(proposed),
            "generate/tasks": float(len(tasks)),
            "generate/answer_in_source": float(
                np.mean([t.meta["answer_in_source"] for t in several]) if several else np.nan
            ),
        }
        workdir_lib.write_atomically(path, "".join(task_to_line(t) + "\n" for t in tasks))
        metrics.write(host["step"], "generate", record)
        say(f"iteration {phase.iteration + 1}: {len(tasks)} questions generated")
        return tasks

    # ------------------------------------------------------------------------------------------
    # Solver phase: GRPO with exact match on the generated questions
    # ------------------------------------------------------------------------------------------
    def solver_phase(phase: assembly.Phase, bar: Any) -> None:
        with watch("generation"):
            tasks = generate(phase)
        per_step, group = c.solver.tasks_per_step, c.solver.group_size
        order = np.random.default_rng([c.seed, 7, phase.iteration]).permutation(len(tasks))
        while host["phase_step"] < phase.steps:
            at = host["phase_step"] * per_step + np.arange(per_step)
            chosen = [tasks[i] for i in order[at % len(tasks)]]
            prompts = parts.encode(
                [solver_sampler.protocol.prompt.format(question=t.question) for t in chosen]
            )
            prompts = [ids for ids in prompts for _ in range(group)]
            solver = parts.whole(state["solver"].params)
            episodes = solver_sampler(solver, prompts, key("solve"), c.solver.temperature)
            answers = solver_sampler.answers(episodes)
            outcomes = [
                outcome(answers[g * group : (g + 1) * group], task.answers)
                for g, task in enumerate(chosen)
            ]
            y_B = np.concatenate([o.y_G for o in outcomes])
            reward_B = y_B
            if c.control.shuffle_rewards:
                reward_B = rng("shuffle").permutation(reward_B)
            advantage_B = np.asarray(grpo(reward_B, np.repeat(np.arange(per_step), group)))
            # A group without contrast carries no gradient.
            keep = np.flatnonzero(advantage_B).tolist()
            values = {}
            if len(keep):
                batch = pack(_sampled_items(episodes, keep), packs["solver"], keep)
                state["solver"], values = solver_update(state["solver"], batch, advantage_B, frozen)
                values = jax.device_get(values)
            record = records.solver_metrics(chosen, episodes, outcomes, reward_B, values)
            record |= records.rollout_metrics("solver", solver_sampler.counters)
            if host["phase_step"] % c.log.rollouts_every == 0:
                lines = records.episode_traces(chosen, episodes, answers, outcomes, solver_sampler)
                at_step = {"step": host["step"] + 1, "iteration": phase.iteration}
                workdir_lib.append_jsonl(
                    workdir.rollouts / "episodes.jsonl", [at_step | line for line in lines]
                )
            with _kept_if_not_finite(workdir, batch if len(keep) else None):
                advance(bar, record, "solver", em=record["solver/em"])

    # ------------------------------------------------------------------------------------------
    # The run
    # ------------------------------------------------------------------------------------------
    with checkpoints, metrics:
        run_phase = {"warm_start": warm_start, "proposer": proposer_phase, "solver": solver_phase}
        evaluated: dict[str, Any] = {}
        if checkpoints.latest is None:
            save()
        for number in range(host["phase"], len(phases) + 1):
            # Held-out questions are asked where an iteration begins, and at the end.
            evolved = [p for p in phases[:number] if p.kind == "solver"]
            ends = number == len(phases)
            begins = not ends and phases[number].kind == "proposer" and host["phase_step"] == 0
            if ends or (begins and (not evolved or c.evaluation.every_iteration)):
                name = f"iteration_{len(evolved)}"
                evaluated[name] = evaluate(name, state["solver"].params)
            if ends:
                break
            phase = phases[number]
            done = host["phase_step"]
            with watch(phase.kind), progress.phase(phase.title, phase.steps, done) as bar:
                run_phase[phase.kind](phase, bar)
            if phase.kind == "warm_start":
                params = state["solver"].params
                state["solver"] = specs["solver"].init(params)
                state["proposer"] = specs["proposer"].init(params)
                state["anchor"] = jax.tree.map(jnp.copy, params)
            elif phase.kind == "solver":
                # The new solver is the next iteration's anchor.
                solved = state["solver"]
                state["anchor"] = jax.tree.map(jnp.copy, solved.params)
                if c.solver.fresh_optimizer:
                    fresh = specs["solver"].init(solved.params)
                    state["solver"] = dataclasses.replace(fresh, step=solved.step)
            host |= {"phase": number + 1, "phase_step": 0}
            save()

        # --------------------------------------------------------------------------------------
        # The report
        # --------------------------------------------------------------------------------------
        if c.schedule.iterations:
            before, answers_before = evaluated.get("iteration_0") or evaluate("iteration_0", None)
            after, answers_after = evaluated[f"iteration_{c.schedule.iterations}"]
            em_before = np.array([a.em for a in answers_before])
            em_after = np.array([a.em for a in answers_after])
            low, high = paired_bootstrap_ci(em_before, em_after, draws=c.evaluation.draws)
            gain = float(np.mean(em_after - em_before))
            summary = {
                "title": f"{c.method} on {atlas.folder.name}",
                "notes": assembly.notes(c),
                "heldout": {
                    "before": before,
                    "after": after,
                    "gain": gain,
                    "gain_ci95": [low, high],
                },
                "wall_seconds": watch.seconds,
                "seconds_of_this_start": time.perf_counter() - begun,
                "device": device,
                "retraces": retraces_before + traces.retraces,
                "traces": traces.traces,
                "config_hash": config_hash(c),
                "parameters": size,
                "seed": c.seed,
            }
            shown = list(workdir_lib.read_jsonl(workdir.rollouts / "proposals.jsonl"))
            shown += list(workdir_lib.read_jsonl(workdir.rollouts / "episodes.jsonl"))
            metrics.sync()
            write_report(workdir, summary, read_metrics(workdir.metrics_jsonl), shown)
            say(
                f"held-out EM {before['em']:.3f} -> {after['em']:.3f} (gain {gain:+.3f}, "
                f"95 % from {low:+.3f} to {high:+.3f}); see {workdir.report_html}"
            )


def _sampled_items(episodes: Trajectories, rows: Sequence[int] | None = None) -> list[Item]:
    """Sampled sequences as they are trained on: the sampler's ids, mask and log-probabilities."""
    items = []
    for n in range(episodes.count) if rows is None else rows:
        length = int(episodes.length_N[n])
        targets = np.flatnonzero(episodes.mask_NL[n, :length])
        items.append(Item(episodes.ids_NL[n, :length], targets, episodes.logp_NL[n, targets]))
    return items


@contextlib.contextmanager
def _kept_if_not_finite(workdir: Workdir, batch: Any) -> Iterator[None]:
    """Saves the batch of an update that was not finite before the run stops."""
    try:
        yield
    except NonFiniteError:
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        named: dict[str, Any] = {jax.tree_util.keystr(p): np.asarray(x) for p, x in leaves}
        np.savez(workdir.path / "not_finite.npz", **named)
        raise


entry = cli.program(main)

if __name__ == "__main__":
    sys.exit(entry())
