"""Rollouts written down: tokens as bytes, gold passages, groups kept, what a report shows."""

import json
from types import SimpleNamespace

import tiny

from zest_jax import traces
from zest_jax.rollout import trajectories
from zest_jax.rollout.protocols import PLAIN_SEARCH
from zest_jax.rollout.trajectories import Finish, Role
from zest_jax.tasks.types import Passage

CORPUS = [Passage("a", "Seine", "x y"), Passage("b", "Oise", "the Loire")]


def written(corpus=CORPUS):
    """A search, what it brought, and an answer that ends in half a character."""
    words = tiny.tokenizer()
    euro = tiny.encode(["€"])[0]
    assert len(euro) == 3  # one token for each of its bytes
    parts = [
        (Role.PROMPT, 0, tiny.encode(["q"])[0]),
        (Role.POLICY, 0, [*tiny.encode(["<search> "])[0], *euro, *tiny.encode(["</search>"])[0]]),
        (Role.TOOL, 1, tiny.encode(["<information> Seine: x y Oise: cut</information>"])[0]),
        (Role.POLICY, 1, [*tiny.encode(["<answer>Loire</answer>"])[0], euro[0]]),
    ]
    length = sum(len(ids) for *_, ids in parts)
    out = trajectories.empty(1, length + 5, 1, 3)
    at = 0
    for role, turn, ids in parts:
        of = slice(at, at + len(ids))
        out.ids_NL[0, of], out.role_NL[0, of], out.turn_NL[0, of] = ids, role, turn
        out.mask_NL[0, of] = role == Role.POLICY
        out.logp_NL[0, of] = -0.25 * (role == Role.POLICY)
        at += len(ids)
    out.length_N[0], out.prompt_length_N[0], out.searches_N[0] = length, len(parts[0][2]), 1
    out.asked_NT[0, 0], out.finish_N[0] = 1, Finish.ANSWERED
    out.rows_NTUR[0, 0, 0], out.scores_NTUR[0, 0, 0] = [1, 0, -1], [2.0, 1.0, 0.0]
    sampler = SimpleNamespace(tokenizer=words, protocol=PLAIN_SEARCH)
    recorder = traces.Recorder(sampler, corpus)
    line = recorder.record(out, 0, ["Loire"], ["b"], role="solver", id="t/0")
    return json.loads(json.dumps(line, allow_nan=False))


def test_a_rollout_is_written_down():
    line = written()
    assert (line["version"], line["id"], line["finish"]) == (1, "t/0", "answered")
    assert (line["searches"], line["queries"], line["evidence"]) == (1, 1, ["b"])
    search, found, answer = line["turns"]
    assert search["action"] == "search" and search["queries"] == ["€"]
    assert search["text"] == "<search> €</search>" and "hex" not in search
    assert sum(search["sizes"]) == len(search["text"].encode())
    assert search["sizes"][-4:] == [1, 1, 1, 9] and set(search["logps"]) == {-0.25}
    assert answer["action"] == "answer" and answer["text"] == "<answer>Loire</answer>\ufffd"
    raw = b"<answer>Loire</answer>\xe2"
    assert bytes.fromhex(answer["hex"]) == raw and sum(answer["sizes"]) == len(raw)
    marks = [(p["id"], p["score"], p["gold"], p["holds_answer"]) for p in found["passages"]]
    assert marks == [("b", 2.0, True, True), ("a", 1.0, False, False)]
    # The second passage was cut, so what the policy read stands there as well.
    assert found["text"] == "<information> Seine: x y Oise: cut</information>"


def test_of_a_server_there_is_the_text_alone():
    found = written(corpus=())["turns"][1]
    assert found["passages"] == [] and "Oise: cut" in found["text"]


def test_whole_groups_of_every_hop_count():
    assert traces.chosen([1, 1, 1, 2, 3], 8, 32) == [0, 1, 3, 4]
    assert traces.chosen([2, 1], 8, 8) == [1]
    assert traces.chosen([2, 1], 100, 64) == [1]
    assert traces.chosen([], 8) == []


def test_what_a_report_shows(tmp_path):
    solver = written() | {"step": 1, "hops": 2, "em": 1.0}
    lines = [
        {"kind": "solver", "text": "old"},
        *({**solver, "group": g, "em": em} for g, em in ((0, 1.0), (0, 0.0), (1, 1.0))),
    ]
    (tmp_path / "episodes.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    proposal = written() | {"role": "proposer", "step": 1, "reason": "leak"}
    (tmp_path / "proposals.jsonl").write_text((json.dumps(proposal) + "\n") * 8)
    shown = traces.for_report(tmp_path)
    assert [each.get("label") for each in shown] == ["leak"] * 6 + [None, "1 of 2 rollouts right"]
    assert "<answer>Loire</answer>" in shown[-1]["text"] and shown[-1]["kind"] == "solver"
