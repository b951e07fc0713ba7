"""The shortcut audit: its contexts and shares by hand, the program with both kinds of judges."""

import copy
import functools
import json

import numpy as np
import pytest
import tiny
from absl import flags
from retrieval_server import save_bm25_index
from test_teachers_endpoint import api, completion, free_address

from zest_jax import audit, auditing, cli
from zest_jax.errors import UserError
from zest_jax.models.hf import save_pretrained
from zest_jax.retrieval.interface import Passage
from zest_jax.rollout.protocols import PLAIN_SEARCH
from zest_jax.tasks.types import Task, write_tasks
from zest_jax.teachers import local
from zest_jax.teachers.endpoint import EndpointSettings
from zest_jax.teachers.interface import Failure, user
from zest_jax.teachers.local import LocalTeacher, load_local

PASSAGES = [
    Passage("emma", "Emma", "A novel by Jane Austen."),
    Passage("austen", "Jane Austen", "Born in Steventon."),
    Passage("place", "Steventon", "A village in Hampshire."),
    Passage("helium", "Helium", "A gas."),
]
CHAIN = ("emma", "austen", "place")
TASKS = [
    Task("t1", "Where was the author of Emma born?", ("Steventon",), 2, evidence=CHAIN),
    Task("t2", "In which county was the author of Emma born?", ("Hampshire",), 2, evidence=CHAIN),
    Task("t3", "Who wrote Emma?", ("Jane Austen", "Austen"), 1, evidence=CHAIN[:2]),
    Task("t4", "What is helium?", ("gas",), 1),
    Task("t5", "What is it?", ("gas",), 1, evidence=("helium", "gone")),
    Task("t6", "What is argon?", ("a gas",), 1, meta={
        "passages": [{"title": "Argon", "text": "A gas"}, {"contents": '"Gas"\nof air'}]}),
]  # fmt: skip


@pytest.fixture
def files(tmp_path):
    write_tasks(tmp_path / "tasks.jsonl", TASKS)
    lines = [json.dumps({"id": p.id, "title": p.title, "text": p.text}) for p in PASSAGES]
    (tmp_path / "passages.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def run(files, **more):
    given = {"tasks": files / "tasks.jsonl", "passages": files / "passages.jsonl",
             "answers": files / "answers.jsonl", "out": files / "audit.json"}  # fmt: skip
    given |= more
    return audit.entry(["audit", *(f"--{k}={v}" for k, v in given.items() if v is not None)])


def shares(files):
    told = json.loads((files / "audit.json").read_text())
    return told, {(r["hops"], r["context"]): (r["share"], r["tasks"]) for r in told["rows"]}


# --------------------------------------------------------------------------------- by hand


def test_the_contexts_of_a_task():
    emma, austen, place, helium = PASSAGES
    got = auditing.contexts([emma, austen, place], [helium, emma])
    assert got == {
        "closed_book": (), "one_shot": ((helium, emma),), "source": ((emma,),),
        "hop_1": ((austen,),), "hop_2": ((place,),), "full": ((emma,), (austen,), (place,)),
    }  # fmt: skip
    assert auditing.contexts(None, []) == {"closed_book": (), "one_shot": ()}
    assert auditing.contexts([emma], None).keys() == {"closed_book", "source", "full"}


def test_the_rows_of_a_task():
    asked = ["closed_book", "one_shot", "source", "hop_1", "hop_2", "full"]

    def rows(known, asked=asked):
        return auditing.rows_of(known, asked)

    nothing = dict.fromkeys(asked, 0.0)
    assert rows(nothing) == dict.fromkeys(auditing.ROWS, 0.0)
    needs_all = rows(nothing | {"full": 1.0})
    assert needs_all["needs_all"] == 1 and needs_all["any_shortcut"] == 0
    for shortcut in asked[:-1]:
        got = rows(nothing | {"full": 1.0, shortcut: 1.0})
        assert got["needs_all"] == 0 and got["any_shortcut"] == 1, shortcut
        assert got["single"] == (shortcut in ("source", "hop_1", "hop_2"))
    assert rows(nothing | {"hop_1": 1.0})["needs_all"] == 0, "never below 0"
    # Without an answer in one context, the rows that need it are left out, decided or not.
    for known in (nothing, nothing | {"source": 1.0, "full": 1.0}):
        part = {name: value for name, value in known.items() if name != "hop_2"}
        assert rows(part).keys() == {"closed_book", "source", "one_shot", "full"}
    assert rows({k: v for k, v in nothing.items() if k != "one_shot"}).keys() == {
        "closed_book", "source", "single", "full",
    }  # fmt: skip
    # Without evidence, or a retriever.
    assert rows({"closed_book": 1.0, "one_shot": 0.0}, ["closed_book", "one_shot"]) == {
        "closed_book": 1, "one_shot": 0,
    }  # fmt: skip
    assert rows(nothing, [n for n in asked if n != "one_shot"])["any_shortcut"] == 0


def test_the_words_of_both_forms():
    emma, austen = PASSAGES[:2]
    form = auditing.SolverForm(PLAIN_SEARCH)
    (message,) = form.conversation("Who?", ((emma, austen), (emma,)))
    assert message.content == (
        "Q: Who?\n<information> Emma: A novel by Jane Austen. Jane Austen: Born in Steventon."
        "</information><information> Emma: A novel by Jane Austen.</information><answer>"
    )
    assert form.conversation("Who?", ())[0].content == "Q: Who?\n<answer>"
    for reply, answer in [
        (" Jane Austen</answer>", "Jane Austen"), (" x</answer> y</answer>", "x"), ("x", None),
        ("</answer>", None), ("<answer> x </answer>", "x"), ("", None),
    ]:  # fmt: skip
        assert form.answer(reply) == answer
    form = auditing.JudgeForm()
    system, message = form.conversation("Who?", ((emma,), (austen,)))
    assert system.role == "system" and "<answer>unknown</answer>" in system.content
    assert message.content.startswith("Passages:\n\n[1] Emma\nA novel") and "[2] Jane" in (
        message.content
    )
    assert "There are no passages." in form.conversation("Who?", ())[1].content
    assert form.answer("<think><answer>a</answer></think><answer> b </answer>") == "b"
    assert form.answer("b") is None and form.answer("<answer></answer>") is None


def test_tasks_are_drawn_alike_from_every_file():
    tasks = [Task(f"{h}-{n}", "?", ("x",), hops=h) for h in (1, 2, 3) for n in range(9)]
    got = audit.choose(tasks, "2,3", 4, 0)
    assert [t.hops for t in got] == [2] * 4 + [3] * 4
    assert got == audit.choose(tasks[::-1], "2,3", 4, 0)[::-1]
    assert got != audit.choose(tasks, "2,3", 4, 1)
    assert audit.choose(tasks, "", 0, 0) == tasks and len(audit.choose(tasks, "3", 99, 0)) == 9


def test_where_evidence_is_found(files):
    save_bm25_index(files / "index", PASSAGES)
    for where in ((str(files / "passages.jsonl"), ""), ("", str(files / "index"))):
        texts = audit.find_texts(TASKS, *where, whole=False)
        assert {id: [p.title for p in ps] for id, ps in texts.evidence.items()} == {
            "t1": ["Emma", "Jane Austen", "Steventon"], "t2": ["Emma", "Jane Austen", "Steventon"],
            "t3": ["Emma", "Jane Austen"], "t6": ["Argon", "Gas"],
        }  # fmt: skip
        assert texts.missing == {"t5": ["gone"]} and texts.bare == ["t4"] and texts.corpus == []
    assert audit.find_texts(TASKS, "", "http://h", False).evidence.keys() == {"t6"}
    assert audit.find_texts(TASKS, str(files / "passages.jsonl"), "", True).corpus == PASSAGES


# ------------------------------------------------------------------------------ an endpoint


def judge(request):
    """Knows helium by heart; reads the birthplace in Austen's passage; for the county it needs all
    three, and for the author Emma's."""
    text = request["text"]
    assert "Hampshire" not in text.partition("Question:")[2]
    if "helium" in text:
        said = "it is a gas"  # not an exact match
    elif "Where" in text and "Born in" in text:
        said = "Steventon"
    elif "county" in text and all(w in text for w in ("by Jane", "Born in", "A village")):
        said = "hampshire"
    elif "Who wrote" in text and "A novel" in text:
        said = "Austen"
    else:
        said = "unknown" if "What" not in text else ""
    return completion(f"I think.\n<answer>{said}</answer>")


def test_an_endpoint_audits(files, capsys):
    with api(judge) as (url, requests):
        assert run(files, model=url, model_name="m", top_k=1) == cli.EXIT_OK
        shown = capsys.readouterr()
        told, got = shares(files)
        assert told["asked"] == 6 + 6 + 5 + 2 + 2 + 5
        # Where the one retrieval brings the source's passage, the two are one question.
        count = len(requests)
        assert count == len({r["text"] for r in requests}) and 26 - 6 <= count < 26
        # All of it is kept: nothing is asked a second time.
        assert run(files, model=url, model_name="m", top_k=1) == cli.EXIT_OK
        assert len(requests) == count and shares(files)[0] == told
        assert "26 of 26 answers are in" in capsys.readouterr().err
        # Another judge, model or question is another matter.
        assert run(files, model=url, model_name="other", top_k=1, hops=2) == cli.EXIT_OK
        assert count + 10 <= len(requests) <= count + 12
    # t1: Austen's passage alone suffices. t2: only all of them do.
    assert got[2, "closed_book"] == (0, 2) and got[2, "source"] == (0, 2)
    assert got[2, "single"] == (0.5, 2) and got[2, "full"] == (1, 2)
    assert got[2, "any_shortcut"] == (0.5, 2) and got[2, "needs_all"] == (0.5, 2)
    # t3 and t6 have evidence; t4 is known, and not in the accepted words.
    assert got[1, "closed_book"] == (0, 4) and got[1, "source"] == (0.5, 2)
    assert got["all", "full"] == (0.75, 4) and got[1, "one_shot"] == (0.25, 4)
    assert told["judge"]["model"] == "m" and told["retrieval"] == "bm25" and told["top_k"] == 1
    assert told["tasks_without_evidence"] == ["t4"]
    assert told["passages_not_found"] == {"t5": ["gone"]} and told["without_answer"] == 7
    assert "1 of 6 tasks name passages that were not found (gone)" in shown.err
    assert "1 of 6 tasks have no evidence (t4)" in shown.err
    lines = shown.out.splitlines()
    assert lines[0].split()[:2] == ["hops", "context"] and len(lines) == 1 + 3 * 7 + 1
    assert lines[-1].startswith("7 of 26 replies hold no answer")


def test_other_scores_come_from_the_same_answers(files):
    with api(judge) as (url, requests):
        assert run(files, model=url, model_name="m", hops=1, score="cover_em") == cli.EXIT_OK
        told, got = shares(files)
        count = len(requests)
        assert got["all", "closed_book"] == (0.25, 4) and told["score"] == "cover_em"
        assert run(files, model=url, model_name="m", hops=1, score="em") == cli.EXIT_OK
        assert shares(files)[1]["all", "closed_book"] == (0, 4) and len(requests) == count


def test_what_stays_unanswered_is_no_zero_and_is_asked_again(files, capsys):
    alive = [False]

    def respond(request):
        if "A village" in request["text"] and not alive[0]:
            return 400, b"too long", {}
        return judge(request)

    with api(respond) as (url, requests):
        assert run(files, model=url, model_name="m", top_k=1, hops=2) == cli.EXIT_OK
        told, got = shares(files)
        assert "UNANSWERED 4" in capsys.readouterr().err and told["unanswered"] == {"refused": 4}
        assert got["all", "full"] == (None, 0) and got["all", "single"] == (None, 0)
        assert got["all", "source"] == (0, 2) and got["all", "needs_all"] == (None, 0)
        count = len(requests)
        alive[0] = True
        with (files / "answers.jsonl").open("a") as file:
            file.write('{"key": "torn')
        assert run(files, model=url, model_name="m", top_k=1, hops=2) == cli.EXIT_OK
        assert len(requests) == count + 4 and shares(files)[1]["all", "full"] == (1, 2)
        assert shares(files)[0]["unanswered"] == {}


def test_a_dead_endpoint_ends_in_a_sentence(files, monkeypatch, capsys):
    given = {"model": free_address(), "model_name": "m", "hops": "1", "connections": 8,
             "answer_s": 0.1}  # fmt: skip
    once = functools.partial(EndpointSettings, retries=0)
    monkeypatch.setattr(audit, "EndpointSettings", once)
    assert run(files, **given) == cli.EXIT_USER
    said = capsys.readouterr().err
    assert "the judge answered nothing" in said and "unreachable" in said
    assert not (files / "audit.json").exists()


# --------------------------------------------------------------------------- a local policy

LIKES = {"</answer>": 6.0, " gas": 6.2, "<|endoftext|>": 5.0}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    words, config, params, _, _ = tiny.search_world(LIKES, (" gas",))
    save_pretrained(config, params, str(folder), words)
    return folder, words, config, params


def greedy(words, config, params, text, most):
    """What a policy writes to a text, by plain forward passes."""
    ids = words(text, add_special_tokens=False)["input_ids"]
    written = []
    while len(written) < most:
        token = int(np.argmax(tiny.log_probs(config, params, ids + written, 96)[-1]))
        if token == words.eos_token_id:
            break
        written.append(token)
        if words.decode(written).endswith("</answer>"):
            break
    return words.decode(written)


@pytest.fixture(scope="module")
def teacher(policy):
    return load_local(str(policy[0]), max_tokens=6, slots=4)


def test_a_policy_answers_as_plain_forward_passes_say(policy, teacher):
    _, words, config, params = policy
    texts = ["Q: ab?\n<answer>", "x", "half \ud800", *(f"the answer {n}" for n in range(4))]
    replies = teacher.ask([user(text) for text in texts])
    wanted = [greedy(words, config, params, t.replace("\ud800", "?"), 6) for t in texts]
    assert [r.text or "" for r in replies] == wanted and len(set(wanted)) > 2
    for reply, text in zip(replies, wanted, strict=True):
        if text:
            assert reply.finish == ("stop" if text.endswith("</answer>") else reply.finish)
        else:
            assert reply.failure == Failure.EMPTY
    long = "ab " * teacher.room
    (reply,) = teacher.ask([user(long)])
    assert reply.failure == Failure.TOO_LONG and str(teacher.room) in reply.detail
    assert teacher.card["kind"] == "local" and teacher.card["max_tokens"] == 6
    assert len(teacher._samplers) == 1, "one program for all of them"


def test_who_is_asked_in_which_words(policy, tmp_path):
    _, words, config, params = policy
    chatty = copy.deepcopy(words)
    chatty.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    )
    save_pretrained(config, params, str(tmp_path), chatty)

    def opened(*arguments):
        values = flags.FlagValues()
        audit.define(values)
        values(["audit", *arguments])
        judge, form = audit.open_judge(values)
        return judge.card["chat"], judge.card["max_tokens"], form

    assert opened(f"--model={tmp_path}") == (True, 512, auditing.JudgeForm())
    assert opened(f"--model={tmp_path}", "--max_tokens=9")[1] == 9
    chat, most, form = opened(f"--model={tmp_path}", "--nochat")
    assert (chat, most, form.protocol.name) == (False, 48, "search_r1")
    assert opened(f"--model={policy[0]}") == (False, 48, form), "no template"
    # A protocol in the chat template: the template is in the words already.
    chat, _, form = opened(f"--model={tmp_path}", "--protocol=plain_search", "--chat")
    assert not chat and form.conversation("é?", ())[0].content == "[user] Q: é?\n\n<answer>"
    assert opened("--model=smoke_policy")[2] == auditing.SolverForm(PLAIN_SEARCH)
    teacher = LocalTeacher(config, params, chatty, chat=True, max_tokens=9)
    assert teacher.text(user("Who?", "Be brief.")) == "[system] Be brief.\n[user] Who?\n"
    chatty.chat_template = "{{ raise_exception('no system') }}"
    with pytest.raises(UserError, match="no system"):
        teacher.text(user("Who?"))
    with pytest.raises(UserError, match="leaves no room"):
        LocalTeacher(config, params, words, max_tokens=config.max_length)


def test_a_policy_audits(files, policy, teacher, monkeypatch, capsys):
    opened = []

    def open_(folder, **options):
        opened.append((folder, options))
        return teacher  # which is compiled already

    monkeypatch.setattr(local, "load_local", open_)
    given = {"model": policy[0], "protocol": "plain_search", "max_tokens": 6, "slots": 4,
             "hops": 1, "score": "f1"}  # fmt: skip
    assert run(files, **given) == cli.EXIT_OK
    options = {"chat": False, "max_tokens": 6, "slots": 4, "name": str(policy[0])}
    assert opened == [(str(policy[0]), options)] and len(teacher._samplers) == 1
    told, got = shares(files)
    assert told["judge"]["kind"] == "local" and told["form"] == ["solver", "plain_search"]
    kept = [json.loads(line) for line in (files / "answers.jsonl").read_text().splitlines()]
    assert len(kept) == told["asked"] == 14
    by = {(r["task"], r["context"]): r for r in kept}
    assert by["t4", "closed_book"]["reply"] == greedy(
        *policy[1:], "Q: What is helium?\n<answer>", 6
    )
    assert got["all", "closed_book"][1] == 4
    capsys.readouterr()


def test_mistakes(files, policy, capsys):
    for given, said in [
        ({"model": None}, "no --model"),
        ({"tasks": None, "model": "x"}, "no --tasks"),
        ({"model": "http://h"}, "--model_name"),
        ({"model": "http://h", "protocol": "plain_search"}, "leave --protocol"),
        ({"model": policy[0], "protocol": "nothing"}, "no protocol"),
        ({"model": policy[0], "protocol": "plain_proposer"}, "not one in which"),
        ({"model": policy[0], "chat": True}, "no chat template"),
        ({"model": "x", "score": "bleu"}, "--score"),
        ({"model": "x", "top_k": 0}, "--top_k"),
        ({"model": "x", "max_tokens": 0}, "--max_tokens"),
        ({"model": "x", "hops": "two"}, "--hops"),
        ({"model": "x", "hops": "9"}, "there are tasks of 1, 2 hops"),
        ({"model": "x", "per_hop": -1}, "--per_hop"),
        ({"model": "x", "passages": files / "none"}, "does not exist"),
        ({"model": "x", "out": files}, "is a folder"),
        ({"model": files / "none"}, "none"),
    ]:
        assert run(files, **given) == cli.EXIT_USER, given
        assert said in capsys.readouterr().err, given
    write_tasks(files / "tasks.jsonl", [Task("a", "?", ("x",), meta={"passages": ["text"]})])
    assert run(files, model="x") == cli.EXIT_USER
    assert "must be a list of objects" in capsys.readouterr().err
    write_tasks(files / "tasks.jsonl", [Task("a", "?", ("x",), meta={"passages": [{"id": "1"}]})])
    assert run(files, model="x") == cli.EXIT_USER
    assert "task a: a passage" in capsys.readouterr().err
