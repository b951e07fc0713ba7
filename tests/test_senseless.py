"""Senseless protocols, sizes and prompts are refused with a reason, not sampled with."""

import dataclasses

import jax
import pytest
import tiny

from configs import common
from zest_jax import preflight
from zest_jax.errors import UserError
from zest_jax.players import end_ids
from zest_jax.rollout.host_driver import HostSampler
from zest_jax.rollout.protocols import ANSWER, PLAIN_PROPOSER, PLAIN_SEARCH, SEARCH
from zest_jax.rollout.sampler import Sampler
from zest_jax.rollout.state import RolloutSpec
from zest_jax.tracing import TraceCounter


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"actions": ()}, "exactly one action ends"),
        ({"actions": (("search", SEARCH),)}, "exactly one action ends"),
        ({"actions": (("a", ANSWER), ("b", ANSWER))}, "exactly one action ends"),
        ({"actions": (("a", SEARCH), ("b", SEARCH), ("c", ANSWER))}, "one action at the most"),
        ({"actions": (("a", "browse"), ("c", ANSWER))}, "searches or answers"),
        ({"actions": (("a", SEARCH), ("a", ANSWER))}, "the same tag"),
        ({"actions": (("a b", ANSWER),)}, "no name of a tag"),
        ({"actions": (("<a>", ANSWER),)}, "no name of a tag"),
        ({"thought": ("re ason",)}, "no name of a tag"),
        ({"prompt": 'Write {"name": 1} {question}'}, "no name; write {{"),
        ({"prompt": "{question"}, "opens no name"),
        ({"prompt": "{} {question}"}, "no name"),
        ({"passage": "{titel}: {text}"}, "there is only rank, text, title"),
        ({"observation": "{passage}"}, "there is only passages"),
    ],
)
def test_a_protocol(changes, words):
    with pytest.raises(ValueError, match=f"protocol plain_search: .*{words}"):
        dataclasses.replace(PLAIN_SEARCH, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": 0},
        {"prompt_length": 0},
        {"action_length": 0},
        {"searches": -1},
        {"queries": 0},
        {"block_tokens": 0},
        {"packed_tokens": 0},
        {"cache_stages": 0},
        {"wait_fraction": 1.5},
    ],
)
def test_sizes(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=name):
        RolloutSpec(**({"slots": 2, "prompt_length": 8, "action_length": 4} | changes))


def sampler(kind=Sampler, protocol=PLAIN_PROPOSER, retriever=None, **more):
    config, _ = tiny.policy(len(tiny.tokenizer()))
    spec = RolloutSpec(slots=2, prompt_length=8, action_length=4, **more)
    return kind("rollout", config, spec, protocol, tiny.tokenizer(), retriever, 4, TraceCounter())


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([], "no prompt"),
        ([[1], []], "no token"),
        ([[1, -1]], "outside the policy's"),
        ([[10**6]], "outside the policy's"),
    ],
)
def test_prompts(prompts, words):
    with pytest.raises(ValueError, match=words):
        sampler()({}, prompts, jax.random.key(0), 1.0)


def test_a_prompt_that_is_too_long_is_the_users_to_mend():
    with pytest.raises(UserError, match="prompt_length=8; raise it"):
        sampler()({}, [[1] * 9], jax.random.key(0), 1.0)


@pytest.mark.parametrize("kind", [Sampler, HostSampler])
def test_a_protocol_that_searches_needs_somebody_to_ask(kind):
    with pytest.raises(ValueError, match="plain_search searches, and there is no retriever"):
        sampler(kind, PLAIN_SEARCH, searches=1, observation_length=4)
    sampler(kind, PLAIN_SEARCH)  # no search is allowed, so nobody is asked


def test_end_tokens_of_a_broken_generation_config():
    assert end_ids({}) == [] and end_ids({"eos_token_id": 3}) == [3]
    assert end_ids({"eos_token_id": [3, 4]}) == [3, 4]
    for broken in ("</s>", ["</s>"], [True], -1):
        with pytest.raises(UserError, match="eos_token_id"):
            end_ids({"eos_token_id": broken})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"solver.learning_rate": -0.001}, "solver.learning_rate=-0.001 must be above 0"),
        ({"solver.temperature": float("nan")}, "must be a finite number"),
        ({"reward.weights.format": float("nan")}, "must be a finite number"),
        ({"solver.max_grad_norm": 0.0}, "must be above 0"),
        ({"training.b2": 2.0}, "training.b2=2.0 must be below 1"),
        ({"solver.wait_fraction": 0.0}, "must be above 0"),
        ({"solver.advantage.eps": 0.0}, "must be above 0"),
        ({"solver.advantage.ddof": 99}, "must be from 0 to 1"),
        ({"solver.advantage.baseline": "none"}, "solver.advantage.std=False as well"),
        ({"reward.invalid": 5.0}, "must be 0 or less"),
        ({"reward.weights.information_gain": -1.0}, "must be 0 or more"),
        ({"gates.min_words": 60}, "gates.min_words is more than gates.max_words"),
        ({"proposer.clip_low": -0.2}, "must be above 0"),
        ({"warm_start.renamed": 1.5}, "must be from 0 to 1"),
        ({"teacher.documents": 0}, "must be at least 1"),
        ({"source.file": "typo.jsonl"}, "reads no file"),
        ({"source.path": "made"}, "source.path is one of linked, written, none"),
        ({"proposer.chat": True}, "set proposer.folder"),
        (
            {"policy.shared": True, "proposer.folder": "path_proposer", "schedule.kind": "online"},
            "names another",
        ),
        (
            {"policy.shared": True, "proposer.frozen": True, "schedule.kind": "online"},
            "cannot have proposer.frozen",
        ),
        (
            {"source.kind": "references", "source.target_protocol": "plain_search"},
            "without searches",
        ),
        ({"source.kind": "references", "source.support": 9}, "asks for more documents"),
        (
            {
                "source.kind": "documents",
                "proposer.gates": ("start_named",),
                "proposer.protocol": "plain_document",
                "proposer.searches": 2,
                "source.hop_weights": (1, 1, 1),
            },
            "which need a path",
        ),
        (
            {
                "reward.without": ("hop",),
                "reward.weights.information_gain": 0.0,
                "reward.weights.difficulty": 1.0,
            },
            "leave one of them out",
        ),
    ],
)
def test_numbers_and_parts_that_mean_nothing(fields, words):
    config = common.get_config()
    config.schedule.max_seeds, config.solver.tasks_per_step = 48, 48
    config.update_from_flattened_dict(fields)
    with pytest.raises(UserError, match=words):
        preflight.check_fields(config)
