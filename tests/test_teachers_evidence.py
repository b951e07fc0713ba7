"""EviBack's teacher: its grammar, every branch of its merge, and the rewards that come of it."""

import dataclasses
import json

import numpy as np
import pytest

from zest_jax.errors import UserError
from zest_jax.retrieval.interface import Passage
from zest_jax.rewards.fallback import fallback_scores
from zest_jax.teachers import prompts as prompts_lib
from zest_jax.teachers.evidence import (
    Breach,
    Case,
    EvidenceSettings,
    EvidenceTeacher,
    Round,
    Rule,
    Skip,
    Stage,
    Status,
    arrays,
    literal_reference,
    merge,
    parse_reply,
    show_evidence,
    skipped,
    summary,
)
from zest_jax.teachers.interface import (
    Counts,
    Failure,
    Message,
    Reply,
    check_answered,
    conversation_key,
    digest,
    failed,
    user,
)
from zest_jax.teachers.prompts import DEFAULT, PLACEHOLDER, Prompts, read_prompts
from zest_jax.teachers.recorded import (
    RecordedTeacher,
    RecordingTeacher,
    ScriptedTeacher,
    read_recording,
)

S, N, A = "supported_answer", "insufficient_evidence", "ambiguous_evidence"
EMMA = Passage("1", "Emma", "A novel of 1815 by Jane Austen. {references}")
CASE = Case("Who wrote Emma?", ("Jane Austen", "J. Austen"), (Round("emma author", (EMMA,)),), "r0")


def blocks(status, answer, reason="It says so."):
    return f"<reason>{reason}</reason><status>{status}</status><answer>{answer}</answer>"


def stage(text):
    return parse_reply(Reply(text))


def judge(a, b=None, case=CASE, settings=None):
    """The verdict on a case where the stages reply with these texts or failures."""
    seen = []

    def script(conversation):
        seen.append(conversation)
        return b if "Candidate answers" in conversation[-1].content else a

    teacher = EvidenceTeacher(ScriptedTeacher(script), settings=settings)
    return teacher.judge([case])[0], seen


# ------------------------------------------------------------------------------- the grammar


@pytest.mark.parametrize("space", ["", "\n", " \n\t"])
def test_a_reply_to_the_letter(space):
    text = space + space.join([
        "<reason>x < y, <b>bold</b> & ünï</reason>", f"<status> {S}\n</status>",
        "<answer> Jané Austen </answer>",
    ]) + space  # fmt: skip
    got = stage(text)
    assert got.valid and got.status == Status.SUPPORTED and got.answer == "Jané Austen"
    assert got.reason == "x < y, <b>bold</b> & ünï" and got.breach is None
    for status in (N, A):
        got = stage(blocks(status, PLACEHOLDER))
        assert got.valid and got.status == status and got.answer == ""


@pytest.mark.parametrize(
    "text, breach",
    [
        ("", Breach.BLOCKS),
        ("Jane Austen", Breach.BLOCKS),
        ("Well: " + blocks(S, "x"), Breach.BLOCKS),
        (blocks(S, "x") + ".", Breach.BLOCKS),
        (f"<status>{S}</status><reason>r</reason><answer>x</answer>", Breach.BLOCKS),
        (f"<reason>r</reason>, <status>{S}</status><answer>x</answer>", Breach.BLOCKS),
        (f"<reason>r</reason><status>{S}</status>", Breach.BLOCKS),
        (f"<reason>r</reason><status>{S}</status><answer>x", Breach.BLOCKS),
        (f"<Reason>r</Reason><status>{S}</status><answer>x</answer>", Breach.BLOCKS),
        (blocks(S, "x") + blocks(S, "x"), Breach.BLOCKS),
        (blocks(S, "x") + "<answer>y</answer>", Breach.BLOCKS),
        (blocks(S, "<answer>x"), Breach.BLOCKS),
        (blocks(S, "x", reason=f"<status>{N}</status>"), Breach.BLOCKS),
        ("<think>hm</think>" + blocks(S, "x"), Breach.BLOCKS),
        (blocks(S, "x", reason=" \n"), Breach.REASON),
        (blocks("supported", "x"), Breach.STATUS),
        (blocks("Supported_Answer", "x"), Breach.STATUS),
        (blocks(f"{S} {N}", "x"), Breach.STATUS),
        (blocks("", "x"), Breach.STATUS),
        (blocks(S, ""), Breach.NO_ANSWER),
        (blocks(S, f" {PLACEHOLDER} "), Breach.NO_ANSWER),
        (blocks(N, "Jane Austen"), Breach.ANSWER),
        (blocks(N, ""), Breach.ANSWER),
        (blocks(A, PLACEHOLDER.lower()), Breach.ANSWER),
        (blocks(A, f"{PLACEHOLDER}."), Breach.ANSWER),
    ],
)
def test_a_breach_is_worth_nothing(text, breach):
    got = stage(text)
    assert not got.valid and got.breach == breach and got.failure is None and got.answer == ""
    verdict, seen = judge(text)
    assert verdict.status is None and not verdict.supported and verdict.f1 == 0
    assert verdict.rule == Rule.A_INVALID and not verdict.unanswered and len(seen) == 1


def test_the_length_of_a_reason_counts_where_it_is_asked_for():
    long = Reply(blocks(S, "x", reason="word " * 61))
    assert parse_reply(long).valid and not parse_reply(long, 60).valid
    assert parse_reply(long, 60).breach == Breach.LONG_REASON and parse_reply(long, 61).valid


# --------------------------------------------------------------------------------- the merge

INVALID, FAILED = Stage(breach=Breach.BLOCKS), Stage(failure=Failure.TIMEOUT)
INSUFFICIENT, AMBIGUOUS = Stage(Status.INSUFFICIENT), Stage(Status.AMBIGUOUS)


def says(answer):
    return Stage(Status.SUPPORTED, answer)


@pytest.mark.parametrize("b", [None, INVALID, FAILED, INSUFFICIENT, AMBIGUOUS, says("Jane Austen")])
def test_nothing_overturns_an_invalid_or_insufficient_stage_a(b):
    for a, rule in [
        (INVALID, Rule.A_INVALID), (FAILED, Rule.A_INVALID), (INSUFFICIENT, Rule.A_INSUFFICIENT),
    ]:  # fmt: skip
        assert merge(a, b, CASE.references) == (rule, a)


@pytest.mark.parametrize("a", [AMBIGUOUS, says("Austen")])
def test_an_unusable_stage_b_leaves_stage_a(a):
    for b in (None, INVALID, FAILED, INSUFFICIENT):
        assert merge(a, b, CASE.references) == (Rule.B_UNUSABLE, a)


def test_two_usable_stages():
    for a, b, rule, chosen in [
        (says("x"), AMBIGUOUS, Rule.B_WITHDREW, "a"),
        (AMBIGUOUS, AMBIGUOUS, Rule.B, "b"),
        (AMBIGUOUS, says("x"), Rule.B, "b"),
        (says("Jane Austen"), says("Jane"), Rule.A_CLOSER, "a"),
        (says("Jane"), says("Jane Austen"), Rule.B, "b"),
        # Equal F1, 2/3 each, and 0 each: a tie is B's.
        (says("Jane"), says("Austen"), Rule.B, "b"),
        (says("x"), says("y"), Rule.B, "b"),
        (says("The Jane Austen."), says("Jane Austen"), Rule.B, "b"),
    ]:
        assert merge(a, b, ("Jane Austen",)) == (rule, a if chosen == "a" else b)


def test_the_hard_boundary_is_not_even_asked_about():
    verdict, seen = judge(blocks(N, PLACEHOLDER), blocks(S, "Jane Austen"))
    assert len(seen) == 1 and verdict.stage_b is None
    assert verdict.status == Status.INSUFFICIENT and not verdict.supported and verdict.f1 == 0
    assert not verdict.literal, "a reference in the evidence changes nothing here"


def test_a_reference_that_stands_in_the_evidence_takes_the_answer_s_place():
    verdict, _ = judge(blocks(S, "Miss Austen"), blocks(S, "the author Austen"))
    assert verdict.rule == Rule.B and verdict.literal
    assert verdict.answer == "Jane Austen" and verdict.f1 == 1
    plain, _ = judge(
        blocks(S, "Miss Austen"), blocks(S, "Austen"), settings=EvidenceSettings(literal=False)
    )
    assert plain.answer == "Austen" and not plain.literal
    assert plain.f1 == pytest.approx(2 / 3)
    # A perfect answer stays as it was written.
    kept, _ = judge(blocks(S, "J. Austen"), blocks(S, "jane austen!"))
    assert kept.answer == "jane austen!" and not kept.literal and kept.f1 == 1
    ambiguous, _ = judge(blocks(A, PLACEHOLDER), blocks(A, PLACEHOLDER))
    assert ambiguous.supported and ambiguous.answer == "" and ambiguous.f1 == 0
    assert not ambiguous.literal


@pytest.mark.parametrize(
    ("a", "b", "rule", "answer", "f1"),
    [
        # whichever stage counts, a supported result takes the reference that stands there
        (blocks(S, "Jane"), None, Rule.B_UNUSABLE, "Jane Austen", 1),
        (blocks(S, "Jane"), blocks(A, PLACEHOLDER), Rule.B_WITHDREW, "Jane Austen", 1),
        (blocks(S, "Jane"), blocks(S, "Walter"), Rule.A_CLOSER, "Jane Austen", 1),
        (blocks(A, PLACEHOLDER), blocks(S, "Walter"), Rule.B, "Jane Austen", 1),
        # and what is not supported has no answer to replace
        (blocks(A, PLACEHOLDER), blocks(N, PLACEHOLDER), Rule.B_UNUSABLE, "", 0),
        (blocks(A, PLACEHOLDER), blocks(A, PLACEHOLDER), Rule.B, "", 0),
        (blocks(A, PLACEHOLDER), "broken", Rule.B_UNUSABLE, "", 0),
    ],
)
def test_the_literal_rule_after_each_merge(a, b, rule, answer, f1):
    verdict, _ = judge(a, Failure.TIMEOUT if b is None else b)
    assert (verdict.rule, verdict.answer, verdict.f1) == (rule, answer, f1)
    assert verdict.literal == bool(answer) and verdict.supported


def test_a_title_counts_as_evidence_and_a_worse_reference_does_not():
    titled = Passage("1", "Jane Austen", "She wrote six novels.")
    case = dataclasses.replace(CASE, rounds=(Round("q", (titled,)),))
    assert judge(blocks(S, "Austen"), blocks(S, "Austen"), case)[0].answer == "Jane Austen"
    # the answer's F1 is 1 by its other name, which the reference that stands there cannot beat
    equal, _ = judge(blocks(S, "J. Austen"), blocks(S, "J Austen"), case)
    assert equal.answer == "J Austen" and not equal.literal and equal.f1 == 1


def test_only_stage_b_is_asked_for_a_short_reason():
    long = blocks(S, "Jane", reason="word " * 61)
    settings = EvidenceSettings(reason_words=60, literal=False)
    verdict, _ = judge(long, long.replace("Jane", "Jane Austen"), settings=settings)
    assert verdict.stage_a.valid and verdict.stage_b.breach == Breach.LONG_REASON
    assert verdict.rule == Rule.B_UNUSABLE and verdict.answer == "Jane"


def test_a_literal_reference_is_whole_words_of_what_was_shown():
    shown = [Passage("1", "Åland", "In Finland."), Passage("2", "", "It is U.S.A. land")]
    for reference, found in [
        ("in", True), ("Fin", False), ("åland", True), ("USA", True), ("the", False), ("é", False),
        ("Finland It", False), ("Åland In Finland", True),
    ]:  # fmt: skip
        assert (literal_reference("zzz", (reference,), shown) is not None) == found, reference
    many = tuple(Passage(str(n), "t", f"number{n}") for n in range(7))
    case = dataclasses.replace(CASE, rounds=(Round("q", many),), references=("number5",))
    hidden, seen = judge(blocks(S, "x"), blocks(S, "x"), case)
    assert not hidden.literal and "number4" in seen[0][-1].content
    assert "number5" not in seen[0][-1].content, "five documents a round are shown"
    wide, _ = judge(blocks(S, "x"), blocks(S, "x"), case, EvidenceSettings(documents=6))
    assert wide.literal and wide.answer == "number5"


# -------------------------------------------------------------------------- what is asked of whom


def test_what_each_stage_sees():
    verdict, (first, second) = judge(blocks(S, "Jane"), blocks(S, "Jane Austen"))
    assert [m.role for m in first] == ["system", "user"] and first[0] == second[0]
    a, b = first[-1].content, second[-1].content
    assert "emma author" in a and "J. Austen" not in a and "Candidate" not in a
    assert "emma author" not in b and '["Jane Austen", "J. Austen"]' in b
    for text in (a, b):
        assert CASE.question in text and "A novel of 1815" in text
        assert "by Jane Austen. {references}" in text, "evidence is not filled in a second time"
    record = json.loads(json.dumps(verdict.to_json()))
    assert record["status"] == S and record["rule"] == "b" and record["id"] == "r0"
    assert record["stage_a"]["answer"] == "Jane" and record["stage_b"]["answer"] == "Jane Austen"
    assert record["versions"]["prompts_sha256"] == DEFAULT.version
    assert record["versions"]["teacher"] == {"kind": "scripted", "name": "scripted"}


NOTED = dataclasses.replace(
    DEFAULT,
    stage_a=DEFAULT.stage_a + "\nNotes: {notes}",
    notes="What of {question} is in {evidence}?",
)


def test_notes_are_taken_before_stage_a_and_shown_to_it_alone():
    seen = []

    def script(conversation):
        seen.append(conversation)
        if conversation[-1].content.startswith("What of"):
            return " All {evidence} of it. \n"
        b = "Candidate answers" in conversation[-1].content
        return blocks(S, "Jane Austen" if b else "Jane")

    verdict = EvidenceTeacher(ScriptedTeacher(script), NOTED).judge([CASE])[0]
    notes, a, b = (conversation[-1].content for conversation in seen)
    assert [m.role for m in seen[0]] == ["user"] and [m.role for m in seen[1]] == ["system", "user"]
    assert CASE.question in notes and "emma author" in notes and "J. Austen" not in notes
    assert a.endswith("Notes: All {evidence} of it.") and "All {evidence}" not in b
    assert verdict.supported and verdict.rule == Rule.B and verdict.notes == "All {evidence} of it."
    assert NOTED.calls == 3 and DEFAULT.calls == 2 and NOTED.version != DEFAULT.version


def test_a_failure_to_take_notes_is_no_verdict():
    def script(conversation):
        text = conversation[-1].content
        if text.startswith("What of") and "q1" in text:
            return Failure.TIMEOUT
        return blocks(N, PLACEHOLDER)

    cases = [dataclasses.replace(CASE, question=f"q{n}", id=str(n)) for n in range(3)]
    got = EvidenceTeacher(ScriptedTeacher(script), NOTED).judge(cases)
    assert [v.unanswered for v in got] == [False, True, False]
    assert got[1].rule == Rule.A_INVALID and got[1].stage_a.failure == Failure.TIMEOUT
    assert got[0].rule == Rule.A_INSUFFICIENT and got[1].status is None


def test_evidence_is_cut_where_that_is_asked_for():
    text = show_evidence(CASE, EvidenceSettings(document_characters=7), queries=False)
    assert json.loads(text) == {"documents": [{"title": "Emma", "contents": "A novel"}]}


def test_a_batch_with_skips_failures_and_faults():
    empty = dataclasses.replace(CASE, rounds=(), id="none")
    hollow = dataclasses.replace(CASE, rounds=(Round("q", ()),), id="hollow")
    cases = [empty, *(dataclasses.replace(CASE, question=f"q{n}", id=f"r{n}") for n in range(5)),
             hollow]  # fmt: skip
    replies = {
        ("q0", "a"): blocks(S, "Jane Austen"), ("q0", "b"): Failure.TIMEOUT,
        ("q1", "a"): Failure.UNREACHABLE,
        ("q2", "a"): "nonsense",
        ("q3", "a"): blocks(A, PLACEHOLDER), ("q3", "b"): blocks(S, "J Austen"),
        ("q4", "a"): blocks(N, PLACEHOLDER),
    }  # fmt: skip

    def script(conversation):
        text = conversation[-1].content
        return replies[text.split()[1], "b" if "Candidate" in text else "a"]

    teacher = EvidenceTeacher(ScriptedTeacher(script))
    got = teacher.judge(cases)
    assert [v.id for v in got] == [case.id for case in cases]
    assert [v.skip for v in got] == [Skip.NO_EVIDENCE, "", "", "", "", "", Skip.NO_EVIDENCE]
    assert [v.rule for v in got] == [
        Rule.NOT_ASKED, Rule.B_UNUSABLE, Rule.A_INVALID, Rule.A_INVALID, Rule.B,
        Rule.A_INSUFFICIENT,
        Rule.NOT_ASKED,
    ]  # fmt: skip
    assert [v.unanswered for v in got] == [False, True, True, False, False, False, False]
    supported_G, f1_G = arrays(got)
    assert supported_G.tolist() == [False, True, False, False, True, False, False]
    assert f1_G.tolist() == [0, 1, 0, 0, 1, 0, 0]
    assert teacher.teacher.counts.asked == 7 and teacher.teacher.counts.failed.total() == 2
    told = summary(got)
    assert told["rollouts"] == 7 and told["asked"] == 5 and told["unanswered"] == 2
    assert told["unanswered_share"] == 0.4 and told["skip"] == {"no_evidence": 2}
    assert told["status"] == {"insufficient_evidence": 1, "none": 2, "supported_answer": 2}
    assert told["failure_a"] == {"unreachable": 1} and told["failure_b"] == {"timeout": 1}
    assert told["breach_a"] == {"not_three_blocks": 1} and told["breach_b"] == {}
    assert summary([skipped("x", Skip.GROUP_SCORED)])["unanswered_share"] == 0


def test_the_rewards_of_an_all_wrong_group_are_the_published_check_values():
    """[.2, .1, .1, 0, …] is normalised to 1.9843, .6614, .6614, -.6614 …, and times lambda."""
    texts = [
        (blocks(S, "Austen"), blocks(S, "Jane Austen")),
        (blocks(A, PLACEHOLDER), blocks(A, PLACEHOLDER)),
        (blocks(S, "Walter Scott"), blocks(S, "Walter Scott")),
        (blocks(N, PLACEHOLDER), None), ("broken", None), (Failure.SERVER_ERROR, None),
    ]  # fmt: skip
    far = dataclasses.replace(CASE, rounds=(Round("q", (Passage("2", "Ivanhoe", "A novel."),)),))
    verdicts = [judge(a, b, far)[0] for a, b in texts]
    verdicts += [skipped("", Skip.NO_EVIDENCE)] * 2
    supported_G, f1_G = arrays(verdicts)
    got = fallback_scores(np.zeros(8), supported_G, f1_G, np.ones(8, bool))
    np.testing.assert_allclose(got.score_G, [0.2, 0.1, 0.1, 0, 0, 0, 0, 0], atol=1e-12)
    normal_G = (got.score_G - got.score_G.mean()) / (got.score_G.std(ddof=1) + 1e-6)
    want = [1.9843, 0.6614, 0.6614, *[-0.6614] * 5]
    np.testing.assert_allclose(normal_G, want, atol=1e-4)
    np.testing.assert_allclose(got.scale * normal_G, np.array(want) / 10, atol=1e-5)


# ------------------------------------------------------------------------ prompts and recordings


def test_prompts_are_frozen_with_their_digest(tmp_path):
    path = tmp_path / "prompts.json"
    DEFAULT.write(path)
    assert read_prompts(path) == DEFAULT
    assert dataclasses.replace(DEFAULT, name="other").version == DEFAULT.version
    path.write_text(path.read_text().replace("Candidate", "Possible"))
    with pytest.raises(UserError, match="digest"):
        read_prompts(path)
    for content, said in [("{}", "no file of teacher prompts"), ('{"format": 9}', "version")]:
        path.write_text(content)
        with pytest.raises(UserError, match=said):
            read_prompts(path)
    with pytest.raises(UserError, match="no such file"):
        read_prompts(tmp_path / "none")
    with pytest.raises(UserError, match="lacks {evidence}"):
        Prompts("x", "", "{question}", DEFAULT.stage_b)
    with pytest.raises(UserError, match="without them"):
        Prompts("x", "", "{question}{evidence}{references}", DEFAULT.stage_b)
    for change, said in [
        ({"stage_a": "{question}{evidence}"}, "both or neither"),
        ({"notes": ""}, "both or neither"),
        ({"notes": "{question}"}, "lacks {evidence} in its notes"),
        ({"notes": "{question}{evidence}{references}"}, "in its notes, which"),
        ({"stage_b": NOTED.stage_b + "{notes}"}, "in its stage_b"),
    ]:
        with pytest.raises(UserError, match=said):
            dataclasses.replace(NOTED, **change)
    NOTED.write(path)
    assert read_prompts(path) == NOTED
    # Files from before there were notes are read, and their digest stays.
    DEFAULT.write(path)
    told = json.loads(path.read_text())
    del told["notes"]
    path.write_text(json.dumps(told))
    assert read_prompts(path) == DEFAULT
    assert DEFAULT.version == digest([DEFAULT.system, DEFAULT.stage_a, DEFAULT.stage_b])
    assert prompts_lib.fill("{a}{b}{c}", {"a": "{b}", "b": "{a}"}) == "{b}{a}{c}"


def test_a_recording_answers_as_the_teacher_did(tmp_path):
    path = tmp_path / "answers.jsonl"
    script = ScriptedTeacher(lambda c: "ünï" if c[-1].content == "a" else Failure.BUSY)
    with RecordingTeacher(script, path) as teacher:
        assert [r.text for r in teacher.ask([user("a"), user("b")])] == ["ünï", None]
    again = read_recording(path)
    replies = again.ask([user("b"), user("a"), user("a", "system")])
    assert [r.text for r in replies] == [None, "ünï", None]
    assert replies[0].failure == Failure.NOT_RECORDED and again.counts.failed.total() == 2
    for line in ("{}", '{"key": 1, "text": "x"}', "no"):
        path.write_text(line + "\n")
        with pytest.raises(UserError, match="line 1"):
            read_recording(path)
    with pytest.raises(UserError, match="no such file"):
        read_recording(tmp_path / "none")


def test_counts_add_up_and_equal_conversations_are_asked_once():
    asked = []

    def script(conversation):
        asked.append(conversation)
        return Failure.TIMEOUT if conversation[-1].content == "bad" else "fine"

    teacher = ScriptedTeacher(script)
    replies = teacher.ask([user(t) for t in ("a", "bad", "a", "bad", "b", "a")])
    assert [r.text for r in replies] == ["fine", None, "fine", None, "fine", "fine"]
    assert len(asked) == 3 and teacher.ask([]) == []
    counts = teacher.counts
    assert (counts.asked, counts.answered, counts.repeated) == (6, 2, 2)
    assert counts.failed == {"timeout": 2} and counts.unanswered == pytest.approx(1 / 3)
    assert counts.asked == counts.answered + counts.repeated + counts.cached + 2
    metrics = counts.to_metrics()
    assert metrics["teacher/failed_timeout"] == 2 and metrics["teacher/asked"] == 6
    assert "UNANSWERED 2 (33.3%: timeout 2)" in counts.sentence()
    check_answered(counts, 0.5)
    check_answered(counts, 0.1, asked=7)
    check_answered(Counts(), 0.0)
    with pytest.raises(UserError, match="timeout 2"):
        check_answered(counts, 0.1)
    earlier = counts.copy()
    teacher.ask([user("bad"), user("c")])
    step = teacher.counts.since(earlier)
    assert (step.asked, step.answered, step.failed) == (2, 1, {"timeout": 1})
    assert earlier.asked == 6 and earlier.failed == {"timeout": 2} and step.unanswered == 0.5
    with pytest.raises(TypeError):
        teacher.ask(["a text"])
    with pytest.raises(TypeError):
        teacher.ask([()])
    with pytest.raises(ValueError):
        Reply(None)
    with pytest.raises(ValueError):
        Reply("x", Failure.BUSY)
    assert failed(Failure.BUSY).detail == ""
    key = conversation_key([Message("user", "half \ud800")])
    assert len(key) == 64 and key != conversation_key([Message("user", "half ?")])
    card = RecordedTeacher({key: "x"}).card
    assert card["kind"] == "recorded" and card != RecordedTeacher({key: "y"}).card
