"""The search for better teacher prompts, with a scripted teacher and a scripted controller."""

import dataclasses
import json

import pytest
from test_teachers_endpoint import api, completion

from zest_jax import cli
from zest_jax.errors import UserError
from zest_jax.retrieval.interface import Passage
from zest_jax.teachers import ape, optimize_prompt
from zest_jax.teachers.ape import Labelled, gain_interval, label, measure, outcomes, partition
from zest_jax.teachers.evidence import Case, EvidenceSettings, Round, Rule, Stage, Status, Verdict
from zest_jax.teachers.interface import Failure, Message, Reply
from zest_jax.teachers.opening import open_teacher
from zest_jax.teachers.optimize_prompt import Search, search
from zest_jax.teachers.prompts import DEFAULT, PLACEHOLDER, read_prompts
from zest_jax.teachers.recorded import ScriptedTeacher

S, N, A = Status.SUPPORTED, Status.INSUFFICIENT, Status.AMBIGUOUS


def case(id, status, question="", layer=""):
    """A case that tells in its document what it is."""
    text = {S: f"The answer is gold{id}.", N: "Nothing of it.", A: "Some say x, some y."}[status]
    passage = Passage("1", "t", text)
    return Case(question or f"q{id}?", (f"gold{id}",), (Round("q", (passage,)),), id), layer


def labelled(id, status, question="", layer="", known=True):
    return Labelled(*case(id, status, question, layer), status if known else None)


CASES = [labelled(str(n), (S, N, S, N, A)[n % 5], layer=str(n % 2)) for n in range(20)]


def says(case_, status, f1=0.0, failure=None):
    return Verdict(case_.case.id, status, "", f1, Rule.B, stage_a=Stage(status, failure=failure))


def blocks(status, answer):
    return f"<reason>r</reason><status>{status}</status><answer>{answer}</answer>"


def teach(conversation):
    """Calls everything supported, unless it is told to be STRICT."""
    system, text = conversation[0].content, conversation[-1].content
    strict = "STRICT" in system
    if strict and "Nothing of it" in text:
        return blocks(N, PLACEHOLDER)
    if strict and "Some say" in text:
        return blocks(A, PLACEHOLDER)
    gold = text.partition("The answer is ")[2].partition(".")[0]
    return blocks(S, gold or "a guess")


def control(conversation):
    """Labels by the documents; improves the instructions alone."""
    text = conversation[-1].content
    if "Accepted answers" in text:
        found = "S" if "The answer is" in text else "I" if "Nothing" in text else "A"
        return f"Because.<label>{found}</label>"
    prompts = dataclasses.replace(DEFAULT, name="x")
    if ape.AXES["instruction"] in text:
        prompts = dataclasses.replace(prompts, system=DEFAULT.system + " Be STRICT.")
    if ape.AXES["layout"] in text:
        prompts = dataclasses.replace(prompts, system=DEFAULT.system + " (1)")
    told = f"<system>{prompts.system}</system>\n<stage_a>{prompts.stage_a}</stage_a>\n"
    if ape.AXES["references"] in text:
        return told + "<stage_b>without its fields</stage_b>"
    if ape.AXES["thinking"] in text:
        return Failure.TIMEOUT
    return told + f"<stage_b>{prompts.stage_b}</stage_b>"


# --------------------------------------------------------------------------------- the parts


def test_the_objective_by_hand():
    cases = [labelled(str(n), status) for n, status in enumerate([N, N, N, S, S, A, S])]
    verdicts = [
        says(cases[0], N), says(cases[1], S, 0.0), says(cases[2], N), says(cases[3], S, 0.5),
        says(cases[4], N), says(cases[5], None), says(cases[6], None, failure=Failure.BUSY),
    ]  # fmt: skip
    got = measure(cases, verdicts)
    assert (got.cases, got.unanswered, got.breaches) == (6, 1, 1)
    # Said insufficient: 3, of these 2 rightly; 3 are so. Covered: (0.5 + 0) / 2.
    assert got.precision == pytest.approx(2 / 3) and got.recall == pytest.approx(2 / 3)
    assert got.insufficient_f1 == pytest.approx(2 / 3) and got.coverage == 0.25
    assert got.objective == pytest.approx(0.5 * 2 / 3 + 0.125) and not got.reached
    doubtful = [dataclasses.replace(c, label=None) for c in cases]
    assert measure(doubtful, verdicts).objective == 0 and measure([], []).cases == 0
    perfect = [says(c, c.label, float(c.label == S)) for c in cases]
    assert measure(cases, perfect).objective == 1 and measure(cases, perfect).reached
    before, after = (outcomes(zip(cases, v, strict=True)) for v in (verdicts, perfect))
    low, high = gain_interval(before, after, draws=300)
    assert 0 < low < 1 - got.objective < high <= 1
    assert gain_interval(after, after, draws=9) == (0, 0)


def test_the_partition():
    development, held = partition(CASES, 3, 7)
    assert [c.layer for c in held].count("0") == 3 and len(held) == 6 and len(development) == 14
    assert partition(CASES, 3, 7) == (development, held) != partition(CASES, 3, 8)
    # The same question in other letters stays on one side, though its layers differ.
    twins = [labelled(f"{n}{side}", S, f"Ｗho is {n}?" if side else f"  who  IS {n}?", str(side))
             for n in range(12) for side in (0, 1)]  # fmt: skip
    development, held = partition(twins, 4, 0)
    assert {c.case.id[:-1] for c in development}.isdisjoint(c.case.id[:-1] for c in held)
    assert len(held) == 8
    for per_layer, side in ((99, "development"), (0, "hold-out")):
        with pytest.raises(UserError, match=side):
            partition(CASES, per_layer, 0)


def test_labels_need_two_looks_that_agree():
    bare = [dataclasses.replace(c, label=None) for c in CASES]
    assert label(bare, ScriptedTeacher(control)) == CASES
    kept = [dataclasses.replace(CASES[0], label=A), *bare[1:]]
    assert label(kept, ScriptedTeacher(control))[0].label == A, "a given label stays"
    two = Case("q?", ("x",), (Round("a", (Passage("1", "", "one"),)),
                             Round("b", (Passage("2", "", "two"),))), "two")  # fmt: skip

    def by_order(conversation):
        text = conversation[-1].content
        return f"<label>{'S' if text.index('one') < text.index('two') else 'I'}</label>"

    assert label([Labelled(two)], ScriptedTeacher(by_order))[0].label is None
    for reply in ("no label", "<label>X</label>", Failure.BUSY):
        assert label(bare[:1], ScriptedTeacher(lambda c, r=reply: r))[0].label is None


def test_candidates_are_read_or_refused():
    told = "".join(f"<{f}>{getattr(DEFAULT, f)}</{f}>" for f in ("system", "stage_a", "stage_b"))
    assert ape.read_candidate(Reply(f"Here:\n{told}"), "x").version == DEFAULT.version
    for reply, why in [
        (Reply(told.replace("<stage_b>", "")), "no <stage_b>"),
        (Reply(told.replace("{references}", "")), "lacks {references}"),
        (Reply(told.replace("Do these", "{references} Do these")), "without them"),
        (Reply(None, Failure.TIMEOUT), "timeout"),
    ]:
        assert why in ape.read_candidate(reply, "x")
    (message,) = ape.asks_for("layout", DEFAULT, measure([], []), [{"question": "{axis} é"}])
    assert ape.AXES["layout"] in message.content and DEFAULT.stage_b in message.content
    assert '{"question": "{axis} é"}' in message.content and PLACEHOLDER in message.content


def test_mistakes_that_are_shown():
    verdicts = [says(c, S, float(c.label == S)) for c in CASES]
    verdicts[0] = says(CASES[0], S, 0.4)
    verdicts[1] = dataclasses.replace(
        verdicts[1], status=None, stage_a=Stage(failure=Failure.BUSY), stage_b=None
    )
    shown = ape.mistakes(CASES, verdicts, 99, 0)
    assert len(shown) == 1 + 7 + 4, "a poor answer, insufficient ones that were heard, ambiguous"
    assert len(ape.mistakes(CASES, verdicts, 3, 0)) == 3
    one = next(m for m in shown if m["question"] == "q3?")
    assert one["right_status"] == N and one["given_status"] == S and "Nothing" in one["evidence"]


# -------------------------------------------------------------------------------- the search


class Quiet:
    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)


def run_search(teach=teach, control=control, rounds=3, cases=CASES):
    controller = ScriptedTeacher(control)
    return search(DEFAULT, cases, ScriptedTeacher(teach), controller, EvidenceSettings(),
                  Search(rounds=rounds), Quiet())  # fmt: skip


def test_the_better_axis_wins():
    best, tried, why = run_search()
    assert "STRICT" in best.system and best.name == "zest-1+1.instruction"
    assert "above 0.98" in why and [t.axis for t in tried] == ["start", *ape.AXES]
    by = {t.axis: t for t in tried}
    assert by["start"].scores.objective == pytest.approx(0.5), "all covered, none insufficient"
    assert by["instruction"].scores.objective == 1 and by["examples"].scores.objective == 0.5
    assert "lacks" in by["references"].problem and "timeout" in by["thinking"].problem
    assert by["calls"].problem == "no <notes>"
    assert json.loads(json.dumps([t.to_json() for t in tried]))[1]["scores"]["recall"] == 1


def test_several_calls_are_an_axis():
    """A teacher that judges well only after notes; the next round keeps them."""
    note = "Say what is there. {question} {evidence}"

    def teach_by_notes(conversation):
        text = conversation[-1].content
        if text.startswith("Say what"):
            return "lacking" if "Nothing of it" in text else "there"
        if "Notes: lacking" in text:
            return blocks(N, PLACEHOLDER)
        return teach(conversation)

    asked = []

    def split(conversation):
        text = conversation[-1].content
        asked.append(text)
        if ape.AXES["calls"] not in text:
            return control(conversation).replace(" Be STRICT.", "")
        told = f"<system>{DEFAULT.system}</system><stage_b>{DEFAULT.stage_b}</stage_b>"
        return told + f"<stage_a>{DEFAULT.stage_a} Notes: {{notes}}</stage_a><notes>{note}</notes>"

    axes = ("instruction", "calls")
    plan = Search(rounds=2, axes=axes)
    cases = [c for c in CASES if c.label != A]
    who = ScriptedTeacher(teach_by_notes), ScriptedTeacher(split)
    best, tried, why = search(DEFAULT, cases, *who, EvidenceSettings(), plan, Quiet())
    assert best.notes == note and best.calls == 3 and best.name == "zest-1+1.calls"
    assert "above 0.98" in why and tried[-1].scores.objective == 1
    assert [t.to_json()["calls"] for t in tried] == [2, 2, 3]
    assert not any("<notes>Say" in text for text in asked)
    (message,) = ape.asks_for("layout", best, measure([], []), [])
    assert f"<notes>{note}</notes>" in message.content, "the call is shown once it is there"
    whole = "".join(f"<{f}>{getattr(best, f)}</{f}>" for f in ("system", "stage_a", "stage_b"))
    assert "both or neither" in ape.read_candidate(Reply(whole), "x"), "it is not lost by accident"
    assert ape.read_candidate(Reply(whole + f"<notes>{note}</notes>"), "x") == (
        dataclasses.replace(best, name="x")
    )


def test_the_search_ends_where_nothing_helps():
    def no_better(conversation):
        said = control(conversation)
        return said if isinstance(said, Failure) else said.replace(" Be STRICT.", "")

    best, tried, why = run_search(control=no_better)
    assert best is DEFAULT and "no candidate of round 1" in why and len(tried) == 7
    mute = ScriptedTeacher(lambda c: Failure.TIMEOUT)
    with pytest.raises(UserError, match="cannot be measured"):
        search(DEFAULT, CASES, mute, mute, EvidenceSettings(), Search(), Quiet())

    def falters(conversation):
        return Failure.BUSY if "STRICT" in conversation[0].content else teach(conversation)

    best, tried, _ = run_search(teach=falters)
    assert best is DEFAULT, "what cannot be measured is not taken"
    assert "silent" in next(t for t in tried if t.axis == "instruction").problem


@pytest.fixture
def cases_file(tmp_path):
    lines = []
    for each in CASES:
        (one,) = each.case.rounds
        passages = [{"title": p.title, "text": p.text} for p in one.passages]
        lines.append(
            {
                "id": each.case.id,
                "question": each.case.question,
                "golden_answers": list(each.case.references),
                "rounds": [{"query": one.query, "passages": passages}],
                "layer": each.layer,
            }
        )
    lines[0]["label"] = "S"
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_program(cases_file, tmp_path, capsys):
    def respond(request):
        messages = [Message(**m) for m in request["body"]["messages"]]
        said = {"judge": teach, "boss": control}[request["body"]["model"]](messages)
        return (400, b"", {}) if isinstance(said, Failure) else completion(said)

    work = tmp_path / "work"
    with api(respond) as (url, requests):
        arguments = ["ape", f"--cases={cases_file}", f"--workdir={work}", f"--teacher={url}",
                     "--teacher_model=judge", f"--controller={url}", "--controller_model=boss",
                     "--holdout_per_layer=3", "--seed=3"]  # fmt: skip
        assert optimize_prompt.entry(arguments) == cli.EXIT_OK
        told = json.loads(capsys.readouterr().out)
        report = json.loads((work / "report.json").read_text())
        asked = len(requests)
        # Again from the cache; only the refused controller's answer is asked anew.
        assert optimize_prompt.entry(arguments) == cli.EXIT_OK
        assert len(requests) == asked + 1
        assert json.loads(capsys.readouterr().out) == told
    best = read_prompts(work / "prompts.json")
    assert "STRICT" in best.system and best.version == told["prompts"]["version"]
    assert told["hold_out"]["after"]["objective"] == 1 and len(report["tried"]) == 7
    assert told["hold_out"]["before"]["objective"] == 0.5
    low, high = told["hold_out"]["gain_ci95"]
    assert 0 <= low < high <= 1 and told["hold_out"]["lacks"] == []
    cases = report["cases"]
    assert cases["hold_out"]["count"] == 6 and cases["development"]["count"] == 14
    assert sum(cases["development"]["labels"].values()) == 14 and len(cases["sha256"]) == 64
    assert report["teacher"]["model"] == "judge" and report["controller"]["counts"]["asked"] > 40
    # Nothing of the hold-out was shown to whoever wrote the prompts.
    held = {c.case.question for c in partition(CASES, 3, 3)[1]}
    written = [r["text"] for r in requests if "Change one thing" in r["text"]]
    assert written and not [q for q in held for text in written if f'"{q}"' in text]


def test_mistakes_of_users(cases_file, tmp_path, capsys):
    def run(**flags):
        given = {"cases": cases_file, "workdir": tmp_path / "w", "teacher": cases_file,
                 "controller": cases_file} | flags  # fmt: skip
        return optimize_prompt.entry(["ape", *(f"--{k}={v}" for k, v in given.items() if v != "")])

    recording = tmp_path / "recording.jsonl"
    recording.write_text("")
    for flags, said in [
        ({"cases": ""}, "no --cases"),
        ({"cases": tmp_path / "none"}, "no such file of cases"),
        ({"axes": "layout,magic"}, "--axes"),
        ({"axes": ","}, "--axes"),
        ({"rounds": 0}, "--rounds"),
        ({"teacher": ""}, "no --teacher"),
        ({"teacher": cases_file}, "expected a recorded answer"),
        ({"teacher": recording, "teacher_model": "m"}, "no address"),
        ({"teacher": "http://h"}, "no model"),
        ({"prompts": tmp_path / "none"}, "no such file of teacher prompts"),
        ({"teacher": recording, "controller": recording, "holdout_per_layer": 3},
         "is labelled insufficient_evidence"),
    ]:  # fmt: skip
        assert run(**flags) == cli.EXIT_USER, flags
        assert said in capsys.readouterr().err, flags
    good = json.loads(cases_file.read_text().splitlines()[0])
    for change, said in [
        ({"label": "Z"}, "label"), ({"golden_answers": []}, "accepted answer"),
        ({"rounds": []}, "a passage"), ({"rounds": [1]}, "TypeError"), ({"id": "1"}, "twice"),
    ]:  # fmt: skip
        path = tmp_path / "bad.jsonl"
        path.write_text(json.dumps(good | {"id": "1"}) + "\n" + json.dumps(good | change) + "\n")
        with pytest.raises(UserError, match=f"line 2.*{said}"):
            ape.read_cases(path)
    (tmp_path / "bad.jsonl").write_text("\n")
    with pytest.raises(UserError, match="no case"):
        ape.read_cases(tmp_path / "bad.jsonl")
    with pytest.raises(UserError, match="no teacher is named"):
        open_teacher("")
