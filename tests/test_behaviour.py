"""The behaviour report: two evaluations of the same questions side by side, by hand."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from zest_jax import behaviour, cli, compare, evaluation
from zest_jax.behaviour import paired, read_answers
from zest_jax.errors import UserError
from zest_jax.evaluation import Answered
from zest_jax.rollout import trajectories
from zest_jax.rollout.protocols import find
from zest_jax.rollout.trajectories import Finish
from zest_jax.tasks.types import Task


def answered(id, answer, *, em, f1=None, searches=1, duplicates=0, finish="answered", hops=1):
    return Answered(
        id=id, question=f"q{id}?", golden_answers=["gold"], hops=hops, answer=answer,
        em=float(em), f1=float(em if f1 is None else f1), searches=searches,
        valid=answer is not None, text="", queries=searches, duplicates=duplicates,
        finish=finish, well_formed=answer is not None,
    )  # fmt: skip


BEFORE = [
    answered("a", "gold", em=1),
    answered("b", None, em=0, searches=4, duplicates=2, finish="out_of_turns", hops=2),
    answered("c", "other", em=0, f1=0.5, searches=0),
    answered("d", None, em=0, finish="too_long", hops=2),
]
AFTER = [
    answered("d", "gold", em=1, searches=3, hops=2),
    answered("c", "ünï", em=0, searches=2, duplicates=1),
    answered("b", "gold", em=1, searches=2, duplicates=1, hops=2),
    answered("a", None, em=0, finish="invalid"),
]


def test_the_figures_by_hand():
    told = behaviour.compare(BEFORE, AFTER, draws=2000)
    assert told["count"] == 4
    got = {name: (f["before"], f["after"], f["difference"]) for name, f in told["figures"].items()}
    assert got == {
        "em": (0.25, 0.5, 0.25),
        "f1": (0.375, 0.5, 0.125),
        "cover_em": (0.25, 0.5, 0.25),
        "valid": (0.5, 0.75, 0.25),
        "well_formed": (0.5, 0.75, 0.25),
        "searches": (1.5, 2.0, 0.5),
        "zero_search": (0.25, 0.0, -0.25),
        "duplicate_queries": (0.5, 0.5, 0.0),
        "repeating": (0.25, 0.5, 0.25),
        "forced_stops": (0.5, 0.0, -0.5),
        "tokens": (None, None, None),
        "written": (None, None, None),
    }
    # differences of the exact match: -1, 1, 0, 1; of four draws all may be the least or the most
    assert told["figures"]["em"]["ci95"] == [-0.5, 1.0]
    assert told["by_hop"]["2"] == {
        "count": 2, "em": [0, 1], "f1": [0, 1], "cover_em": [0, 1],
        "valid": [0, 1], "well_formed": [0, 1],
        "searches": [2.5, 2.5], "zero_search": [0, 0], "duplicate_queries": [1, 0.5],
        "repeating": [0.5, 0.5], "forced_stops": [1, 0],
        "tokens": [None] * 2, "written": [None] * 2,
    }  # fmt: skip
    assert told["finish"]["before"] == {"answered": 2, "out_of_turns": 1, "too_long": 1}
    assert told["rescued"]["count"] == 2 and told["regressed"]["count"] == 1
    assert [q["id"] for q in told["rescued"]["questions"]] == ["b", "d"]
    assert told["regressed"]["questions"] == [
        {"id": "a", "question": "qa?", "golden_answers": ["gold"], "before": "gold", "after": None}
    ]


def test_what_is_the_same_on_both_sides_has_no_spread():
    """Pairing cancels what makes a question hard: an equal gain everywhere is certain."""
    after = [dataclasses.replace(a, f1=a.f1 + 0.25) for a in BEFORE]
    figure = behaviour.compare(BEFORE, after, draws=300)["figures"]["f1"]
    assert figure["difference"] == 0.25 and figure["ci95"] == [0.25, 0.25]


def test_older_answers_tell_less_and_are_read():
    older = [
        dataclasses.replace(a, queries=None, duplicates=None, finish=None, well_formed=None)
        for a in BEFORE
    ]
    told = behaviour.compare(older, AFTER, draws=50)
    for name in ("duplicate_queries", "repeating", "forced_stops", "well_formed"):
        figure = told["figures"][name]
        assert figure["before"] is figure["difference"] is figure["ci95"] is None
        assert figure["after"] is not None
    assert told["figures"]["searches"]["difference"] == 0.5
    assert told["finish"]["before"] == {"not told": 4} and "–" in compare.table(told)


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (AFTER[1:], "different questions: 4 and 3, of which 3 are the same"),
        ([*AFTER[1:], dataclasses.replace(AFTER[0], question="q?")], "4 and 4, of which 3"),
        ([*AFTER, AFTER[0]], "4 and 5, of which 4"),
        ([*AFTER[1:], dataclasses.replace(AFTER[0], golden_answers=["x"])], "other accepted.*'d'"),
        ([], "no answer to compare"),
    ],
)
def test_different_questions_are_not_compared(after, words):
    with pytest.raises(UserError, match=words):
        paired(BEFORE, after)


def test_ids_may_repeat_over_data_sets():
    def two(first, second):
        one = answered("test_0", first, em=1)
        return [dataclasses.replace(one, question=q, answer=a)
                for q, a in (("x?", first), ("y?", second))]  # fmt: skip

    pairs = paired(two("x1", "y1"), two("x2", "y2")[::-1])
    assert [(a.answer, b.answer) for (a,), (b,) in pairs] == [("x1", "x2"), ("y1", "y2")]


def test_several_answers_to_a_question_are_one_unit():
    """Means over the samples, right by their majority, and one draw of the bootstrap."""

    def sampled(id, *ems):
        return [
            dataclasses.replace(answered(id, "gold" if em else f"x{n}", em=em), sample=n)
            for n, em in enumerate(ems)
        ]

    before = [*sampled("a", 1, 0, 1), *sampled("b", 0, 0, 1), *sampled("c", 1, 1, 1)]
    after = [*sampled("b", 1, 1), *sampled("a", 1, 0), *sampled("c", 0, 0)]
    told = behaviour.compare(before, after, draws=50)
    assert told["count"] == 3
    em = told["figures"]["em"]
    assert em["before"] == pytest.approx((2 / 3 + 1 / 3 + 1) / 3) and em["after"] == 0.5
    assert [q["id"] for q in told["rescued"]["questions"]] == ["b"]
    # of a tie the earliest wins: "a" is still right
    assert [(q["id"], q["before"], q["after"]) for q in told["regressed"]["questions"]] == [
        ("c", "gold", "x0"),
    ]


def test_a_side_with_unequal_counts_is_refused():
    once = [answered("a", "gold", em=1), answered("b", "gold", em=1)]
    twice = [*once, dataclasses.replace(once[0], sample=1)]
    with pytest.raises(UserError, match="some questions have 1 answers and some 2"):
        paired(once, twice)


def test_hops_and_benchmarks_where_they_are_told():
    def of(answers, name):
        return [dataclasses.replace(a, benchmark=name, hops=0 if a.id == "c" else a.hops)
                for a in answers]  # fmt: skip

    told = behaviour.compare(of(BEFORE, ""), of(AFTER, "nq"), draws=20)
    assert {hops: each["count"] for hops, each in told["by_hop"].items()} == {"1": 1, "2": 2}
    assert {name: each["em"] for name, each in told["by_benchmark"].items()} == {"nq": [0.25, 0.5]}
    assert behaviour.compare(BEFORE, AFTER, draws=20)["by_benchmark"] == {}


def write(path, answers, mode=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    more = {} if mode is None else {"mode": mode}
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(a.to_json() | more) + "\n" for a in answers)
    return path


def test_a_run_s_latest_evaluation_counts(tmp_path):
    folder = tmp_path / "run" / "evaluation"
    for number in (0, 2, 10):
        mine = [dataclasses.replace(a, searches=number) for a in BEFORE]
        write(folder / f"iteration_{number}.jsonl", mine, "greedy")
        write(folder / f"iteration_{number}.jsonl", AFTER, "sampled")
    (folder / "iteration_x.jsonl").write_text("")
    assert [a.searches for a in read_answers(tmp_path / "run")] == [10] * 4
    assert read_answers(tmp_path / "run", "sampled") == AFTER
    assert [a.searches for a in read_answers(folder / "iteration_2.jsonl")] == [2] * 4


def test_the_program(tmp_path, capsys):
    before = write(tmp_path / "before.jsonl", BEFORE)
    # written before there were queries, finish and the rest
    old = [{k: v for k, v in a.to_json().items() if k != "well_formed"} for a in BEFORE]
    before.write_text("".join(json.dumps(r) + "\n" for r in old))
    after = write(tmp_path / "run" / "evaluation" / "iteration_1.jsonl", AFTER, "greedy")
    out = tmp_path / "told.json"
    assert compare.entry(["compare", str(before), str(tmp_path / "run"), f"--out={out}",
                          "--draws=200", "--shown=1"]) == cli.EXIT_OK  # fmt: skip
    shown = capsys.readouterr().out
    lines = {line.split("  ")[0]: line for line in shown.splitlines()}
    assert (
        lines["4 questions"].split() == "4 questions before after difference 95 % interval".split()
    )
    assert lines["ended by a limit"].split()[4:7] == ["0.500", "0.000", "-0.500"]
    assert "–" in lines["well-formed episodes"]
    assert "rescued: 2" in shown and "qb?  None -> 'gold', right: gold" in shown
    assert "… and 1 more" in shown and "qd?" not in shown and "regressed: 1" in shown
    told = json.loads(out.read_text("utf-8"))
    assert told["rescued"]["count"] == 2 and len(told["rescued"]["questions"]) == 2
    assert told["from"]["before"] == str(before) and told["mode"] == "greedy"

    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "x"}\n')
    for arguments, words in [
        ([before], "name both"),
        ([before, after, after], "3 arguments are given, and there are 2: before, after"),
        ([before, tmp_path / "none"], "no such file"),
        ([before, tmp_path], "holds no evaluation of a run"),
        ([before, bad], "line 1 is no answer"),
        ([before, after, "--mode=sampled"], "holds no sampled answer"),
        ([before, after, "--mode=best"], "--mode is greedy or sampled"),
        ([before, after, "--draws=0"], "--draws"),
        ([before, after, f"--out={tmp_path}"], "is a folder"),
        ([before, after, "--workdir=x"], "BEFORE AFTER"),
        ([before, write(tmp_path / "less.jsonl", AFTER[:2])], "different questions"),
    ]:
        assert compare.entry(["compare", *map(str, arguments)]) == cli.EXIT_USER, arguments
        assert words in capsys.readouterr().err, arguments


def test_what_an_evaluation_keeps_of_an_episode():
    """Two episodes of EviBack's grammar: a right one, and one cut off in its second turn."""
    words = [
        ["<think>a</think><tool_call>…</tool_call>", "<reason>b</reason><answer>x</answer><end>"],
        ["<think>a</think><answer>x</answer>.", "<think>cut"],
        ["<answer>x</answer>"],
    ]
    call = '<tool_call>{"name": "search", "arguments": {"query": "s"}}</tool_call>'
    words[0][0] = f"<think>a</think>{call}<|im_end|>"
    ids = {text: n + 1 for n, text in enumerate(t for turns in words for t in turns)}
    texts = {n: text for text, n in ids.items()}
    got = trajectories.empty(3, 2, 4, 1)
    for n, turns in enumerate(words):
        for turn, text in enumerate(turns):
            got.ids_NL[n, turn], got.turn_NL[n, turn] = ids[text], turn
            got.mask_NL[n, turn] = True
    got.asked_NT[0, :2], got.duplicates_N[0] = (1, 2), 1
    got.searches_N[:] = (2, 0, 0)
    got.finish_N[:] = (Finish.ANSWERED, Finish.TOO_LONG, Finish.ANSWERED)

    class Words:
        eos_token = "<end>"

        def __call__(self, prompts, **_):
            return {"input_ids": [[1] for _ in prompts]}

        def batch_decode(self, rows, **_):
            return ["".join(texts[i] for i in row) for row in rows]

    sampler = SimpleNamespace(
        tokenizer=Words(),
        protocol=find("eviback"),
        answers=lambda _: ["x", None, "x"],
        texts=lambda _: ["", "", ""],
    )
    assert evaluation.words_of(got, sampler)[0] == (
        f"<think>a</think>{call}", "<reason>b</reason><answer>x</answer>",
    )  # fmt: skip

    class Asked(SimpleNamespace):
        def __call__(self, *_):
            return got

    tasks = [Task(str(n), "q?", ("x",)) for n in range(3)]
    out = evaluation.answer_tasks(Asked(**vars(sampler)), {}, tasks, None, 0.0)
    assert [a.queries for a in out] == [3, 0, 0] and [a.duplicates for a in out] == [1, 0, 0]
    assert [a.finish for a in out] == ["answered", "too_long", "answered"]
    assert [a.valid for a in out] == [True, False, True]
    assert [a.well_formed for a in out] == [True, False, False], "an answer without a thought"
    np.testing.assert_array_equal([a.em for a in out], [1, 0, 1])
