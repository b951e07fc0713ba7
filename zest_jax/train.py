"""Trains a search agent by self-evolution, read top to bottom.

    python -m zest_jax.train --config=configs/smoke.py --workdir=runs/smoke

A run is a row of phases: an optional warm start, then, as the config's schedule says: per iteration
a proposer phase, the generation of questions and a solver phase (iterated); both roles in every
step (online); or the solver alone on labelled questions. Everything drawn is a function of the seed
and the step, and a checkpoint holds the rest, so that a killed run, started again, ends with the
same numbers.

On several devices, of one process or many, the same steps run over a mesh (`placing.py`).
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zest_jax import (
    assembly,
    behaviour,
    cli,
    evaluation,
    memory_plan,
    placing,
    preflight,
    records,
    resume,
)
from zest_jax import workdir as workdir_lib
from zest_jax.config import config_hash
from zest_jax.errors import UserError
from zest_jax.fallback import build_fallback
from zest_jax.guards import Guards
from zest_jax.learning import updates
from zest_jax.learning.packing import pack, placed
from zest_jax.metrics import MetricsWriter, Stopwatch, read_metrics
from zest_jax.models.policy import Params
from zest_jax.not_finite import Tried, keep_tried
from zest_jax.offload import Idle
from zest_jax.parallel import Placement, hosts
from zest_jax.progress import Progress
from zest_jax.proposing import Probe, Proposing
from zest_jax.report import write_report
from zest_jax.rewards.terms import NEEDS_DIFFICULTY, needs, proposer_reward
from zest_jax.solving import Attempts, Solving
from zest_jax.stopping import Stopper
from zest_jax.tasks import cloning, proposals
from zest_jax.tasks.question_quality import Oracle
from zest_jax.tasks.refill import REFILLS, Pool, Shelf
from zest_jax.tasks.seeds import Proposal
from zest_jax.tasks.sources import TaskSource
from zest_jax.tasks.types import Task, read_tasks, task_to_line
from zest_jax.timing import StepTimes
from zest_jax.traces import for_report
from zest_jax.tracing import TraceCounter
from zest_jax.workdir import Workdir


def main(config: Any, workdir_path: str) -> None:
    """One run, from its config to its report, in a workdir that is its own."""
    hosts.initialize()  # before signals are listened to, which it would take over
    with Stopper() as stop, placing.workdir_of(workdir_path, config) as workdir:
        with Progress(log=workdir.log, stream=hosts.stream()) as progress:
            placement, device = placing.place(config)
            progress.say(f"{device}, config {config_hash(config)}")
            with placement.active():
                run(config, workdir, progress, stop, placement, device)


def run(
    c: Any, workdir: Workdir, progress: Progress, stop: Stopper, place: Placement, device: str
) -> None:
    """The run itself."""
    begun, traces, say = time.perf_counter(), TraceCounter(), progress.say
    # ------------------------------------------------------------------------------------------
    # World, policy, retriever, samplers
    # ------------------------------------------------------------------------------------------
    parts = assembly.build(c, traces, place)
    labelled = assembly.refill_tasks(c, parts.world)
    preflight.check_world(c, parts, labelled)
    asking = parts.proposer.policy if parts.apart else None
    plan = memory_plan.check_run(
        c, parts.solver.policy, parts.retrieval.on_device, asking, place.mesh
    )
    workdir.write("memory.txt", plan.table() + "\n")
    world, policy, frozen = parts.world, parts.solver.policy, parts.solver.frozen
    solver_sampler = parts.solver_sampler
    for sentence in assembly.introduction(c, parts):
        say(sentence)
    say(f"{parts.solver.attention}; {plan.summary()}")

    # ------------------------------------------------------------------------------------------
    # Compiled updates
    # ------------------------------------------------------------------------------------------
    specs = assembly.update_specs(c)
    packs = assembly.pack_specs(c, place.shards)
    on_devices = functools.partial(placed, placement=place)
    fallback = build_fallback(c, parts, workdir.path, say) if c.fallback.enabled else None
    solving = Solving(c, parts, packs, fallback)
    proposing = Proposing(c, parts, packs) if parts.proposer_sampler is not None else None
    proposer = assembly.proposer_state(c)
    oracle = None if world.atlas is None else Oracle(world.atlas)
    imitated = cloning.recorded(c.warm_start, parts.solver.encode, packs["warm_start"].length)

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
    paid = (
        assembly.advantage_of(c, "proposer"),
        functools.partial(proposer_reward, options=c.reward),
    )
    proposer_update = traces.jit(
        "proposer_update",
        functools.partial(
            updates.proposer_update, parts.proposer.policy, policy, specs["proposer"], *paid
        ),
        donate_argnums=0,
    )
    proposer_score = traces.jit(
        "proposer_score", functools.partial(updates.proposer_score, policy, *paid)
    )
    advantages = traces.jit("advantages", assembly.advantage_of(c, "solver"))

    # ------------------------------------------------------------------------------------------
    # Where the run stands: phases, state, restore
    # ------------------------------------------------------------------------------------------
    phases = assembly.phases(c)
    state = place.params(assembly.initial_state(c, parts))
    with stop.held():
        checkpoints = resume.checkpoints_of(c, workdir, say)
        state, host, resumed = resume.begin(checkpoints, state, parts, say)
    idle = Idle([role for role in ("solver", "proposer") if role in state], c.training.offload_idle)
    state = idle.bind(state)
    pool = Pool.from_json(host["pool"])
    retraces_before = host["retraces"]
    watch = Stopwatch(host["seconds"])
    watch.add("start", time.perf_counter() - begun)
    metrics = MetricsWriter(workdir, host["step"] if resumed else None, host["records"])
    resume.cut_back(workdir, host, phases)
    guards = Guards(c.guards, read_metrics(workdir.metrics_jsonl))
    times = StepTimes(watch)
    attempt = times.part("rollout", solving.attempt)
    propose: Any = proposing and times.part("rollout", proposing.propose)
    cloning_step, solver_update, proposer_update = (
        times.part("update", step) for step in (cloning_step, solver_update, proposer_update)
    )

    def rng(word: str) -> np.random.Generator:
        return np.random.default_rng([c.seed, *word.encode(), host["step"]])

    def key(word: str) -> jax.Array:
        return assembly.random_key(c.seed, word, host["step"])

    def save(score: float | None = None) -> None:
        with watch("checkpoint"), stop.held():
            # Numbered by save, not by step: the end of a phase changes the state without a step.
            host.update(saves=host["saves"] + 1, records=metrics.count, pool=pool.to_json())
            host.update(seconds=watch.seconds, retraces=retraces_before + traces.retraces)
            metrics.sync()
            workdir.publish()
            checkpoints.save(host["saves"], state, host, score)

    def advance(
        bar: Any, record: dict[str, float], phase: str, ends: bool = False, **shown: float
    ) -> None:
        """Counts an update as done: metrics, progress, and now and then a checkpoint.

        None where the update `ends` its phase early: a run resumed from it would not know.
        """
        host["step"] += 1
        host["phase_step"] += 1
        warned = guards.see(host["step"], record)
        record |= times.lap() | {"guards/warnings": len(warned)}
        metrics.write(host["step"], phase, record)
        bar.advance(**shown)
        for warning in warned:
            say(warning.text)
        asked = not ends and stop.due()
        if asked or (host["phase_step"] % c.checkpoint.every == 0 and not ends):
            save()
        if asked:
            stop.end(host["step"])

    def stop_if_not_finite(record: dict[str, float], batch: Any, advantage_N: Any = None) -> None:
        """Ends the run at an update that was not finite, and so not made; keeps what replays it."""
        kind = phases[host["phase"]].kind
        if (tried := Tried(host["step"] + 1, kind, record, batch, advantage_N)).bad:
            keep_tried(workdir, c, tried, state, host, say)
            metrics.write(tried.step, kind, record)  # raises

    # ------------------------------------------------------------------------------------------
    # Held-out questions
    # ------------------------------------------------------------------------------------------
    def evaluate(
        name: str, params: Params | None
    ) -> tuple[dict[str, Any], list[evaluation.Answered]]:
        """Greedy and sampled answers to the held-out questions. They are kept in a file, so that a
        resumed run reads what an earlier start has done; without params they are only read."""

        def answer(mode: str, temperature: float) -> list[evaluation.Answered]:
            with watch("evaluation"):
                return evaluation.answer_tasks(
                    solver_sampler, parts.solver.whole(params or {}), world.heldout_tasks,
                    key(f"eval {mode}"), temperature,
                )  # fmt: skip

        answered = evaluation.both_ways(
            workdir.path / "evaluation" / f"{name}.jsonl",
            len(world.heldout_tasks),
            None if params is None else answer,
        )
        summary = evaluation.summarise(answered["greedy"], c.evaluation.draws)
        summary["em_sampled"] = float(np.mean([a.em for a in answered["sampled"]]))
        if params is None or host["evaluated"] == name:
            return summary, answered["greedy"]
        flat = evaluation.flat_metrics(summary) | {"eval/em_sampled": summary["em_sampled"]}
        metrics.write(host["step"], "eval", flat)
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
                scripted = cloning.scripted_episodes(
                    parts.atlas, mix, w.sequences, rng("warm start")
                )
                items = cloning.episode_items(scripted, parts.solver.encode)
            batch = pack(items, packs["warm_start"])
            idle.wake(state, "solver")
            state["solver"], values = cloning_step(state["solver"], on_devices(batch), frozen)
            record = records.update_metrics("warm_start", hosts.fetch(values))
            stop_if_not_finite(record, batch)
            stop = False
            if (step + 1) % w.stop_every == 0:
                solver = parts.solver.whole(state["solver"].params)
                answered = evaluation.answer_tasks(
                    solver_sampler, solver, world.validation_tasks, key("stop"), 0.0
                )
                em = float(np.mean([a.em for a in answered]))
                record["warm_start/validation_em"] = em
                stop = em >= w.stop_at_em
                say(f"warm start, step {step + 1}: validation EM {em:.3f}")
            advance(bar, record, "warm_start", ends=stop, loss=record["warm_start/loss"])
            if stop:
                break

    # ------------------------------------------------------------------------------------------
    # What the phases are made of: proposals, probes, and an update of either role
    # ------------------------------------------------------------------------------------------
    def whole(name: str) -> Params:
        """The parameters of a role, the anchor or the base."""
        held = state[name]
        params = held.params if isinstance(held, updates.TrainState) else held
        return parts.player(name).whole(params)

    def reference(role: str) -> Params | None:
        """The policy that a role's KL penalty looks back at."""
        if not c[role].kl_weight:
            return None
        return state["proposer_base" if parts.apart and role == "proposer" else "base"]

    def write_rollouts(log: str, iteration: int, lines: list[dict[str, Any]]) -> None:
        at = {"step": host["step"] + 1, "iteration": iteration}
        workdir_lib.append_jsonl(workdir.rollouts / log, [at | line for line in lines])

    def probe(proposed: list[Proposal], iteration: int) -> Probe | None:
        """A frozen solver's answers to the proposals that passed, where a reward asks for them."""
        if not needs(c.reward, NEEDS_DIFFICULTY):
            return None
        asked = [i for i, p in enumerate(proposed) if p.passed]
        if not asked:
            return Probe((), np.zeros(0), c.probe.rollouts)
        tasks = [proposals.task_of(proposed[i], f"probe-{i}", iteration) for i in asked]
        with watch("probe"):
            attempts = attempt(
                whole(c.probe.model), tasks, c.probe.rollouts, key("probe"), c.probe.temperature
            )
        return Probe(asked, attempts.right, c.probe.rollouts)

    def update_proposer(
        episodes: Any, proposed: list[Proposal], probed: Probe | None, phase: assembly.Phase
    ) -> dict[str, float]:
        """One update from judged proposals, unless the proposer is frozen: its metrics."""
        assert proposing is not None and proposer is not None
        order = np.arange(len(proposed))
        if c.control.shuffle_rewards:
            order = rng("shuffle").permutation(len(proposed))
        done = host["phase_step"] / max(phase.steps, 1)
        progress = (phase.iteration + done) / max(c.schedule.iterations, 1)
        batch = proposing.batch(episodes, proposed, probed, progress, order)
        values: dict[str, Any] = {}
        if c.proposer.frozen:
            per_row = proposer_score(state["anchor"], on_devices(batch), frozen)
        else:
            idle.wake(state, proposer)
            state[proposer], values, per_row = proposer_update(
                state[proposer], state["anchor"], on_devices(batch), parts.proposer.frozen,
                reference("proposer"), frozen,
            )  # fmt: skip
        values, per_row = hosts.fetch((values, per_row))
        per_row, signals = jax.tree.map(lambda x: x[: len(proposed)], (per_row, batch.signals))
        record = records.proposer_metrics(proposed, episodes, values, per_row, signals)
        stop_if_not_finite(record, batch)
        record |= records.rollout_metrics("proposer", proposing.sampler.counters)
        record |= proposing.stage_metrics()
        if oracle is not None:
            record |= records.truth_metrics(proposed, oracle, probed.shares if probed else {})
        if host["phase_step"] % c.log.rollouts_every == 0:
            lines = proposing.lines(episodes, proposed, per_row, signals.valid_BC)
            write_rollouts("proposals.jsonl", phase.iteration, lines)
        return record

    def update_solver(attempts: Attempts, iteration: int) -> dict[str, float]:
        """One step from a solver's rollouts: its metrics."""
        with watch("teacher"):
            attempts = solving.paid(attempts)
        reward_N = attempts.reward_N
        if c.control.shuffle_rewards:
            reward_N = rng("shuffle").permutation(reward_N)
        # Padded to one shape, whatever the number of questions.
        size, count = c.solver.tasks_per_step * c.solver.group_size, len(reward_N)
        padded, keys = np.zeros(size, np.float32), np.zeros(size, np.int32)
        padded[:count] = reward_N
        keys[:count] = solving.group_keys(attempts)
        scale = np.ones(size, np.float32)
        if attempts.scale_N is not None:
            scale[:count] = attempts.scale_N
        advantage_N = hosts.fetch(
            advantages(*place.whole((padded, keys, scale, np.arange(size) < count)))
        )
        record = records.solver_metrics(
            attempts.tasks, attempts.episodes, attempts.outcomes, attempts.reward_N
        )
        idle.wake(state, "solver")
        for batch in solving.batches(attempts, advantage_N):
            state["solver"], values = solver_update(
                state["solver"],
                on_devices(batch),
                place.whole(advantage_N),
                frozen,
                reference("solver"),
            )
            record |= records.update_metrics("solver", hosts.fetch(values))
            stop_if_not_finite(record, batch, advantage_N)
        record |= records.rollout_metrics("solver", solver_sampler.counters)
        record |= attempts.notes
        if attempts.lines:
            write_rollouts("rewards.jsonl", iteration, list(attempts.lines))
        if host["phase_step"] % c.log.rollouts_every == 0:
            lines = solving.lines(attempts, advantage_N)
            write_rollouts("episodes.jsonl", iteration, lines)
        return record

    # ------------------------------------------------------------------------------------------
    # Iterated: the proposer alone, paid by its terms
    # ------------------------------------------------------------------------------------------
    def proposer_phase(phase: assembly.Phase, bar: Any) -> None:
        assert proposing is not None and proposer is not None
        while host["phase_step"] < phase.steps:
            seeds = proposing.draw(
                whole(proposer), c.proposer.seeds_per_step, rng("chains"), key("stages"),
                c.source.rounds,
            )  # fmt: skip
            episodes, proposed = propose(
                whole(proposer), seeds, key("propose"), rng("gates"), c.proposer.samples,
                whole("anchor"),
            )  # fmt: skip
            probed = probe(proposed, phase.iteration)
            record = update_proposer(episodes, proposed, probed, phase)
            advance(
                bar, record, "proposer",
                reward=record["proposer/reward"], valid=record["proposer/valid"],
            )  # fmt: skip

    # ------------------------------------------------------------------------------------------
    # Iterated: the proposer's questions become the solver's tasks
    # ------------------------------------------------------------------------------------------
    def generate(phase: assembly.Phase) -> list[Task]:
        if isinstance(parts.source, TaskSource):
            return parts.source.tasks()
        assert proposing and proposer
        path = workdir.tasks(phase.iteration)
        if host["generated"] == phase.iteration:
            return hosts.told(lambda: list(read_tasks(path)))
        g, probes = c.generation, needs(c.reward, NEEDS_DIFFICULTY)
        used = {
            str(task.meta.get("seed", ""))
            for earlier in range(phase.iteration)
            for task in hosts.told(lambda: list(read_tasks(workdir.tasks(earlier))))  # noqa: B023
        }
        seeds = proposing.draw(
            whole(proposer), c.schedule.max_seeds, rng("generation"), key("stages"), used=used
        )
        _, proposed = proposing.propose(
            whole(proposer), seeds, key("generation"), rng("gates"), g.samples, whole("anchor")
        )
        proposed = proposals.best_of(proposed, g.samples)
        tasks, duplicates = proposals.tasks_of(
            proposed,
            phase.iteration,
            c.schedule.tasks,
            probe=f"{c.probe.model if probes else 'anchor'}@{phase.iteration}",
            keep_refused=g.keep_refused,
            most_words=g.most_words,
        )
        if len(tasks) < c.solver.tasks_per_step:
            raise UserError(
                f"only {len(tasks)} of {len(seeds)} questions of iteration {phase.iteration + 1} "
                f"passed the gates, and solver.tasks_per_step is {c.solver.tasks_per_step}: start "
                "from a policy that writes questions (policy.folder, or more warm_start.steps), or "
                "raise schedule.max_seeds, in another workdir."
            )
        record = records.generation_metrics(proposed, tasks, duplicates)
        workdir_lib.write_atomically(path, "".join(task_to_line(t) + "\n" for t in tasks))
        metrics.write(host["step"], "generate", record)
        say(f"iteration {phase.iteration + 1}: {len(tasks)} questions generated")
        host["generated"] = phase.iteration
        save()
        return tasks

    # ------------------------------------------------------------------------------------------
    # Iterated and labelled: the solver alone
    # ------------------------------------------------------------------------------------------
    def solver_phase(phase: assembly.Phase, bar: Any) -> None:
        with watch("generation"), stop.saved(host["step"]):
            tasks = generate(phase)
        per_step, group = c.solver.tasks_per_step, c.solver.group_size
        order = np.random.default_rng([c.seed, 7, phase.iteration]).permutation(len(tasks))
        while host["phase_step"] < phase.steps:
            at = host["phase_step"] * per_step + np.arange(per_step)
            chosen = [tasks[i] for i in order[at % len(tasks)]]
            attempts = attempt(whole("solver"), chosen, group, key("solve"), c.solver.temperature)
            record = update_solver(attempts, phase.iteration)
            advance(bar, record, "solver", em=record["solver/em"])

    # ------------------------------------------------------------------------------------------
    # Online: both roles in every step; the solver's rollouts are the proposer's probe
    # ------------------------------------------------------------------------------------------
    def propose_tasks(
        count: int, word: str, iteration: int, beside: Sequence[Proposal] = ()
    ) -> tuple[Any, ...]:
        """Episodes, proposals, the indices of those that passed, and their tasks."""
        assert proposing and proposer
        seeds = proposing.draw(
            whole(proposer), count, rng(f"seeds to {word}"), key(f"stages to {word}"),
            c.source.rounds, some=not beside,
        )  # fmt: skip
        if not seeds:
            return None, [], [], []
        episodes, proposed = propose(
            whole(proposer), seeds, key(word), rng(f"gates to {word}"), c.proposer.samples,
            whole("solver"), beside,
        )  # fmt: skip
        asked = [i for i, p in enumerate(proposed) if p.passed]
        name = f"step{host['step']}-{word}"
        tasks = [
            proposals.task_of(proposed[i], f"{name}-{i}", iteration, f"solver@{host['step']}")
            for i in asked
        ]
        return episodes, proposed, asked, tasks

    def propose_again(at: int, beside: Sequence[Proposal], count: int, attempt: int) -> list[Task]:
        return propose_tasks(count, f"propose again {attempt}", at, beside)[3][:count]

    def online_phase(phase: assembly.Phase, bar: Any) -> None:
        assert proposing is not None
        count = c.proposer.seeds_per_step
        while host["phase_step"] < phase.steps:
            episodes, proposed, asked, tasks = propose_tasks(count, "propose", phase.iteration)
            again = functools.partial(propose_again, phase.iteration, proposed)
            staged = proposing.stage_metrics()
            if host["phase_step"] % c.refill.period == 0:
                pool.tasks.clear()
            shelf = Shelf(c.refill, again, pool, labelled, rng("refill"))
            refilled = REFILLS.find(c.refill.kind)(c.solver.tasks_per_step - len(tasks), shelf)
            attempts = None
            if tasks or refilled:
                attempts = attempt(
                    whole("solver"), [*tasks, *refilled], c.solver.group_size, key("solve"),
                    c.solver.temperature,
                )  # fmt: skip
                for task, right in zip(attempts.tasks, attempts.right, strict=True):
                    pool.add(task, right / c.solver.group_size)
            right = np.zeros(0) if attempts is None else attempts.right[: len(tasks)]
            probed = Probe(asked, right, c.solver.group_size)
            record = update_proposer(episodes, proposed, probed, phase)
            # Stages are those of the step, not of what took refused questions' place.
            record |= staged | {"proposer/refilled": len(refilled) / c.solver.tasks_per_step}
            if attempts is not None:
                record |= update_solver(attempts, phase.iteration)
            advance(
                bar, record, "online",
                valid=record["proposer/valid"], em=record.get("solver/em", 0.0),
            )  # fmt: skip

    # ------------------------------------------------------------------------------------------
    # The run
    # ------------------------------------------------------------------------------------------
    with checkpoints, metrics:
        run_phase = {
            "warm_start": warm_start,
            "proposer": proposer_phase,
            "solver": solver_phase,
            "online": online_phase,
        }
        evaluated: dict[str, Any] = {}
        if not resumed:
            save()
        for number in range(host["phase"], len(phases) + 1):
            # Held-out questions are asked where an iteration begins, and at the end.
            evolved = [p for p in phases[:number] if p.kind in resume.EVOLVING]
            ends = number == len(phases)
            begins = not ends and host["phase_step"] == 0 and assembly.begins(phases, number)
            if ends or (begins and (not evolved or c.evaluation.every_iteration)):
                name = f"iteration_{len(evolved)}"
                with stop.saved(host["step"]):
                    evaluated[name] = evaluate(name, state["solver"].params)
                if c.checkpoint.keep_best and host["evaluated"] != name:
                    host["evaluated"] = name
                    save(evaluated[name][0]["em"])
            if ends:
                break
            phase = phases[number]
            done = host["phase_step"]
            with watch(phase.kind), progress.phase(phase.title, phase.steps, done) as bar:
                run_phase[phase.kind](phase, bar)
            if phase.kind == "warm_start":
                state |= place.params(assembly.state_from(c, parts, state["solver"].params))
            elif phase.kind in ("solver", "online"):
                # The new solver is the next iteration's anchor.
                solved = state["solver"]
                state["anchor"] = jax.tree.map(jnp.copy, solved.params)
                if c.solver.fresh_optimizer:
                    fresh = place.params(specs["solver"].init(solved.params))
                    state["solver"] = dataclasses.replace(fresh, step=solved.step)
            host |= {"phase": number + 1, "phase_step": 0}
            save()

        # --------------------------------------------------------------------------------------
        # The report
        # --------------------------------------------------------------------------------------
        checkpoints.wait()
        if c.schedule.iterations:
            before = evaluated.get("iteration_0") or evaluate("iteration_0", None)
            after = evaluated[f"iteration_{c.schedule.iterations}"]
            heldout = evaluation.heldout(before, after, c.evaluation.draws)
            summary = {
                "title": f"{c.method} on {world.name}",
                "notes": assembly.notes(c, world),
                "heldout": heldout,
                "behaviour": behaviour.compare(before[1], after[1], c.evaluation.draws),
                "wall_seconds": watch.seconds,
                "seconds_of_this_start": time.perf_counter() - begun,
                "device": device,
                "retraces": retraces_before + traces.retraces,
                "traces": traces.traces,
                "config_hash": config_hash(c),
                "parameters": parts.solver.size,
                "proposer_parameters": parts.proposer.size,
                "seed": c.seed,
                "warnings": [dataclasses.asdict(each) for each in guards.told],
            }
            shown = for_report(workdir.rollouts)
            metrics.sync()
            write_report(workdir, summary, read_metrics(workdir.metrics_jsonl), shown)
            say(f"{evaluation.gain_sentence(heldout)}; see {workdir.shared}/report.html")


entry = cli.program(main)

if __name__ == "__main__":
    sys.exit(entry())
