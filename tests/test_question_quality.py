"""Questions of the atlas read back by its facts."""

import numpy as np
import pytest
from written import judge_one, output, written

from zest_jax.records import truth_metrics
from zest_jax.tasks.atlas import load_atlas
from zest_jax.tasks.question_quality import Oracle, quality
from zest_jax.tasks.sources.chains import chain_seed
from zest_jax.tasks.templates import nested_question


@pytest.fixture(scope="module")
def atlas():
    return load_atlas()


@pytest.mark.parametrize(
    ("question", "answers", "hops"),
    [
        ("What is the currency of Germany?", ("Euro",), 1),
        ("What is the money of Germany?", ("euro",), 1),
        ("What is the currency of Germany?", ("Yen",), 0),
        ("What is the capital of the country of Lagos?", ("Abuja",), 2),
        ("What is the capital city of the home country of Lagos?", ("Abuja",), 2),
        ("What is Euro?", ("Euro",), 0),
        ("What is the currency of Germany, Euro?", ("Euro",), 0),
        ("Which currency has Germany?", ("Euro",), 0),
        ("What is the currency of ?", ("Euro",), 0),
    ],
)
def test_reading_a_question_back(atlas, question, answers, hops):
    assert Oracle(atlas).hops(question, answers) == hops


def test_every_question_by_template_is_valid(atlas):
    oracle, rng = Oracle(atlas), np.random.default_rng(0)
    for hops in (1, 2, 3):
        for chain in atlas.sample_chains(hops, 50, rng):
            question = nested_question(chain, atlas, rng)
            # another way to the same answer may be shorter
            assert 1 <= oracle.hops(question, atlas.graph.names(chain.entities[-1])) <= hops


def test_quality(atlas):
    rng = np.random.default_rng(1)
    proposed = []
    for hops, count in ((1, 3), (2, 1)):
        for chain in atlas.sample_chains(hops, count, rng):
            answer = atlas.graph.labels[chain.entities[-1]]
            question = nested_question(chain, atlas, rng)
            proposed.append(judge_one(written(chain_seed(chain, atlas), output(question, answer))))
    leak = f"{question[:-1]}, {answer}?"
    proposed.append(judge_one(written(chain_seed(chain, atlas), output(leak, answer))))
    proposed.append(judge_one(written(chain_seed(chain, atlas), "nothing")))
    found = quality(proposed, Oracle(atlas))
    assert found.to_json() == {
        "questions": 5, "answer_leakage": 20.0, "valid": 80.0,
        "1_hop": 75.0, "2_hop": 25.0, "3_hop": 0.0,
    }  # fmt: skip
    assert "answer leakage  20.0 %" in found.table() and "2-hop" in found.table()
    assert quality(proposed, None).to_json() == {"questions": 5, "answer_leakage": 20.0}
    assert quality([], Oracle(atlas)).to_json()["valid"] is None


def test_truth_beside_a_probe(atlas):
    """Two true labels and a wrong one; the solver is right on the first and on the wrong one."""
    rng = np.random.default_rng(1)
    one, two, three = atlas.sample_chains(1, 3, rng)

    def proposal(chain, label):
        question = nested_question(chain, atlas, rng)
        return judge_one(written(chain_seed(chain, atlas), output(question, label)), "pair", ())

    labels = atlas.graph.labels
    good = [proposal(c, labels[c.entities[-1]]) for c in (one, two)]
    other = chain_seed(three, atlas)
    wrong = judge_one(written(other, output(nested_question(two, atlas, rng), "x")), "pair", ())
    refused = judge_one(written(other, "nothing"), "pair", ())
    found = truth_metrics([*good, wrong, refused], Oracle(atlas), {0: 0.8, 1: 0.2, 2: 1.0})
    assert found["proposer/true_label"] == pytest.approx(2 / 3)
    assert found["proposer/probe_agreement"] == pytest.approx(1 / 3)
