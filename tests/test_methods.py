"""Every method's atlas config takes a step or two and ends with a report."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_run

from zest_jax import preflight
from zest_jax.config import load
from zest_jax.errors import UserError
from zest_jax.export import export
from zest_jax.models.hf import load_pretrained, read_tokenizer
from zest_jax.tasks.atlas import load_atlas
from zest_jax.tasks.chain_pool import ChainRecord, EntityRecord, RelationRecord, write_pool
from zest_jax.workdir import read_jsonl

pytestmark = pytest.mark.slow

# Sizes of `tiny_config`, so that what it has compiled serves here as well.
SMALL = (
    "--config.solver.slots=8",
    "--config.solver.tasks_per_step=4",
    "--config.solver.group_size=4",
    "--config.solver.decay=False",
    "--config.solver.advantage.singleton=zero",
    "--config.proposer.decay=False",
    "--config.proposer.slots=4",
    "--config.proposer.seeds_per_step=4",
    "--config.schedule.solver_steps=2",
    "--config.schedule.tasks=8",
    "--config.training.rows=4",
    "--config.evaluation.draws=200",
    "--config.log.rollouts_every=1",
)
ITERATED = ("--config.schedule.proposer_steps=1", "--config.schedule.max_seeds=24")
PROBED = ("--config.probe.rollouts=4",)


def run(place, workdir, config, *more):
    policy = load(config).policy.folder
    done = place.run(
        place.arguments(workdir, f"--config.policy.folder={policy}", *SMALL, *more, config=config)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((workdir / "report.json").read_text("utf-8"))
    assert report["heldout"]["after"]["count"] == tiny_run.HELDOUT and report["retraces"] == 0
    return report, list(read_jsonl(workdir / "metrics.jsonl"))


def of(records, phase):
    return [r for r in records if r["phase"] == phase]


def test_search_r1(place, tmp_path):
    report, records = run(place, tmp_path / "run", "configs/search_r1.py:atlas,format")
    assert report["title"] == "search_r1_format on world"
    steps = of(records, "solver")
    assert len(steps) == 2 and not of(records, "proposer") and not of(records, "generate")
    # a well-formed episode earns something though it is wrong
    assert any(s["solver/reward"] > s["solver/em"] for s in steps)
    assert all(s["solver/kl_to_reference"] >= 0 for s in steps if "solver/loss" in s)


def test_eviback(place, tmp_path):
    report, records = run(place, tmp_path / "run", "configs/eviback.py:atlas")
    steps = of(records, "solver")
    assert len(steps) == 2
    zero = [s["solver/groups_all_wrong"] for s in steps]
    assert [s["teacher/all_zero_groups"] for s in steps] == zero and max(zero) > 0
    lines = list(read_jsonl(tmp_path / "run" / "rollouts" / "rewards.jsonl"))
    assert len(lines) == 2 * 16, "every rollout's reward has its provenance"
    asked = [line for line in lines if line["all_zero"]]
    assert len(asked) == 16 * sum(zero) and {v["skip"] for v in asked} <= {"", "no_evidence"}
    for number, step in enumerate(steps, 1):
        own = [line["reward"] for line in lines if line["step"] == number]
        assert np.mean(own) == pytest.approx(step["solver/reward"])
    em = report["behaviour"]["figures"]["em"]
    assert em["difference"] == pytest.approx(report["heldout"]["gain"])
    assert em["ci95"] == pytest.approx(report["heldout"]["gain_ci95"])
    assert report["behaviour"]["figures"]["forced_stops"]["before"] is not None
    assert report["teacher"]["asked"] > 0 and report["teacher"]["unanswered_share"] == 0


def test_dr_zero(place, tmp_path):
    _, records = run(
        place, tmp_path / "run", "configs/dr_zero.py:atlas", *ITERATED, *PROBED,
        "--config.generation.samples=2",
    )  # fmt: skip
    (step,) = of(records, "proposer")
    assert step["proposer/searches"] > 0 and "proposer/difficulty" in step
    assert step["proposer/term_difficulty"] >= 0 and step["proposer/format"] > 0
    (made,) = of(records, "generate")
    assert made["generate/tasks"] >= 4
    task = json.loads((tmp_path / "run" / "tasks" / "iteration_0.jsonl").read_text().split("\n")[0])
    assert task["probe"] == "anchor@0" and task["source_id"] and task["iteration"] == 0


def test_ssp_and_its_replay_pool_outlive_a_kill(place, tmp_path):
    keeps = ("--config.checkpoint.every=1", "--config.checkpoint.keep=9")
    _, records = run(place, tmp_path / "run", "configs/ssp.py:atlas", *keeps)
    steps = of(records, "online")
    assert len(steps) == 2 and not of(records, "proposer")
    for step in steps:
        refused = sum(v for k, v in step.items() if k.startswith("proposer/refused_"))
        assert refused + step["proposer/valid"] == pytest.approx(1)
        assert step["proposer/kl_to_reference"] >= 0
    # As if killed after the first step: what came later is gone.
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "run", killed)
    for checkpoint in (killed / "checkpoints").iterdir():
        if checkpoint.name.isdigit() and int(checkpoint.name) > 3:
            shutil.rmtree(checkpoint)
    _, again = run(place, killed, "configs/ssp.py:atlas", *keeps)
    assert tiny_run.untimed(of(again, "online")[1]) == tiny_run.untimed(steps[1])


def test_zest_search_with_two_policies_that_are_not_alike(place, tmp_path):
    keeps = ("--config.checkpoint.every=1", "--config.checkpoint.keep=9")
    config = "configs/zest_search.py:atlas"
    _, records = run(place, tmp_path / "run", config, *keeps)
    steps = of(records, "online")
    assert len(steps) == 2 and all(0 < s["proposer/passed_target"] <= 1 for s in steps)
    assert steps[0]["solver/reward"] <= steps[0]["solver/em"]
    assert all(s["proposer/kl_to_reference"] >= 0 for s in steps)
    made = place.run(
        [f"--workdir={tmp_path / 'run'}", "--seeds=12", f"--out={tmp_path / 'tasks.jsonl'}"],
        program="generate",
    )
    assert made.returncode == 0, made.stderr
    told = json.loads((tmp_path / "tasks.jsonl.report.json").read_text())
    assert told["funnel"]["stages"]["target"]["entered"] == 12
    assert told["tasks"] == len(list(read_jsonl(tmp_path / "tasks.jsonl")))
    assert told["quality"].keys() >= {"answer_leakage", "valid", "2_hop"}
    shapes = []
    for role in ("proposer", "solver"):
        exported = tmp_path / role
        assert export(str(tmp_path / "run"), role, str(exported)) == 2
        policy, _ = load_pretrained(exported)
        shapes.append((policy.family, policy.width, len(read_tokenizer(exported))))
    assert shapes == [("qwen2", 96, 768), ("qwen3", 128, 1024)]
    # As if killed after the first step.
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "run", killed)
    for checkpoint in (killed / "checkpoints").iterdir():
        if checkpoint.name.isdigit() and int(checkpoint.name) > 3:
            shutil.rmtree(checkpoint)
    _, again = run(place, killed, config, *keeps)
    assert tiny_run.untimed(of(again, "online")[1]) == tiny_run.untimed(steps[1])


def test_an_index_and_a_pool_in_place_of_the_world(place, tmp_path):
    """The papers' way: chains of a pool, an index asked from the host, questions of a file."""
    atlas, rng = load_atlas(), np.random.default_rng(0)
    graph = atlas.graph

    def record(chain):
        entities = tuple(
            EntityRecord(
                graph.entity_ids[e], graph.labels[e], graph.names(e)[1:], atlas.passage_of(e)
            )
            for e in chain.entities
        )
        relations = (RelationRecord(graph.relation_ids[r], graph.relation_labels[r])
                     for r in chain.relations)  # fmt: skip
        return ChainRecord(entities, tuple(relations))

    chains = [c for hops in (1, 2, 3) for c in atlas.sample_chains(hops, 60, rng)]
    write_pool(tmp_path / "pool", map(record, chains), {"seed": 0, "corpus": {"name": "atlas"}})
    passages = atlas.folder / "passages.jsonl"
    built = place.run(
        [f"--corpus={passages}", "--encoder=bm25", f"--index={tmp_path / 'index'}"],
        program="build_index",
    )
    assert built.returncode == 0, built.stderr
    report, records = run(
        place, tmp_path / "run", "configs/dr_free.py:atlas", *ITERATED,
        "--config.world.folder=",
        f"--config.retrieval.index={tmp_path / 'index'}",
        f"--config.evaluation.tasks={place.world / 'heldout.jsonl'}",
        "--config.source.kind=chain_pool",
        f"--config.source.file={tmp_path / 'pool'}",
        "--config.solver.observation_length=80",
    )  # fmt: skip
    assert report["title"] == "dr_free on index"
    (step,) = of(records, "proposer")
    assert step["proposer/valid"] > 0 and step["proposer/loglik_full"] < 0
    assert any(solved["solver/searches"] > 0 for solved in of(records, "solver"))


def test_the_worked_example_of_the_docs(place, tmp_path, monkeypatch):
    """docs/extending.md, run as it stands: parts of one's own over Dr. Free."""
    text = (tiny_run.ROOT / "docs" / "extending.md").read_text("utf-8")
    blocks = dict(re.findall(r"```python (\w+\.py)\n(.*?)```", text, re.DOTALL))
    assert blocks.keys() == {"my_parts.py", "my_method.py"}
    for name, block in blocks.items():
        (tmp_path / name).write_text(block)
    monkeypatch.setenv("PYTHONPATH", f"{tiny_run.ROOT}:{tmp_path}")
    monkeypatch.syspath_prepend(str(tmp_path))
    _, records = run(place, tmp_path / "run", str(tmp_path / "my_method.py"), *ITERATED)
    (step,) = of(records, "proposer")
    assert step["proposer/term_brevity"] >= 0 and "proposer/term_information_gain" in step
    for solved in of(records, "solver"):
        assert solved["solver/reward"] <= solved["solver/em"]


SCALES = ("qwen2.5-3b", "qwen2.5-7b-base", "atlas")
VARIANTS = {
    "search_r1": ("", "format"),
    "dr_zero": ("", "strict"),
    "ssp": ("", "published", "intermediate"),
    "zest_search": ("", "written", "no_path", "failure", "frozen", "no_tool_cost"),
    "dr_free": ("", "difficulty", "both", "no_opt", "no_kg", "both,no_kg", "without=closed_book"),
}


@pytest.mark.parametrize("method", VARIANTS)
def test_every_variant_names_parts_that_there_are(method):
    seen = set()
    for scale in SCALES:
        for variant in VARIANTS[method]:
            if scale.endswith("base") and (method == "dr_zero" or "no_kg" in variant):
                continue
            c = load(f"configs/{method}.py:{','.join(filter(None, (scale, variant)))}")
            preflight.check_fields(c)
            seen.add(c.method)
    assert len(seen) == len(VARIANTS[method])


def test_a_base_model_has_no_turns_for_tool_calls():
    c = load("configs/dr_free.py:qwen2.5-3b-base,no_kg")
    with pytest.raises(UserError, match=r"turns of a chat; set policy.chat=True"):
        preflight.check_fields(c)


def test_the_ablations_of_dr_free():
    c = load("configs/dr_free.py:without=source")
    assert c.reward.without == ("source",) and c.source.kind == "chain_pool"
    assert load("configs/dr_free.py:without=closed_book").reward.without == ("none",)
    weights = load("configs/dr_free.py:difficulty").reward.weights
    assert (weights.information_gain, weights.difficulty) == (0.0, 1.0)
    both = load("configs/dr_free.py:both").reward.weights
    assert (both.information_gain, both.difficulty) == (1.0, 1.0)
    assert load("configs/dr_free.py:no_opt").proposer.frozen
    no_kg = load("configs/dr_free.py:no_kg")
    assert no_kg.source.kind == "documents" and no_kg.reward.weights.information_gain == 1.0
    assert Path(no_kg.policy.folder).name == "Qwen2.5-3B-Instruct"
