"""Protocols as data, and prompts of base and instruct models."""

import re
from pathlib import Path

import pytest
import tiny
from real_qwen import qwen3

from configs import common
from zest_jax import preflight
from zest_jax.errors import UserError
from zest_jax.models import PolicyConfig
from zest_jax.rollout.engine import Engine
from zest_jax.rollout.protocols import (
    ANSWER,
    PLAIN_PROPOSER,
    PLAIN_SEARCH,
    PROTOCOLS,
    SEARCH,
    SEARCH_R1,
    Protocol,
    find,
    in_chat_template,
    register,
)
from zest_jax.rollout.protocols import protocol as module
from zest_jax.rollout.state import RolloutSpec

TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    '{# tools write JSON: #}{"tools": {}}\n'
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def tokenizer():
    tokenizer = tiny.tokenizer(tags_as_tokens=True)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("protocol", [PLAIN_SEARCH, SEARCH_R1], ids=lambda p: p.name)
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_the_prompt_is_what_the_template_makes_of_the_turn(tokenizer, protocol, system):
    question = "Which {river} crosses «Paris»?"
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": protocol.prompt.format(question=question)})
    want = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    chat = in_chat_template(protocol, tokenizer, system)
    assert chat.prompt.format(question=question) == want
    assert want.endswith("<|im_start|>assistant\n") and '{"tools": {}}' in want
    assert (chat.actions, chat.observation) == (protocol.actions, protocol.observation)


def test_every_placeholder_is_kept(tokenizer):
    chat = in_chat_template(PLAIN_PROPOSER, tokenizer)
    text = chat.prompt.format(chain="France | capital | Paris", passages=" France: …")
    assert "Chain: France | capital | Paris\n France: …" in text


def test_a_base_model_has_no_turns(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template.*set policy.chat=False"):
        in_chat_template(PLAIN_SEARCH, tokenizer)


def test_a_template_that_refuses_is_told(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no system turn here') }}"
    with pytest.raises(UserError, match="no system turn here.*leave policy.system empty"):
        in_chat_template(PLAIN_SEARCH, tokenizer, "Be brief.")


# ------------------------------------------------------------------------------------ as data

DOCS = Path(__file__).parents[1] / "docs" / "protocols.md"


def test_a_protocol_is_found_by_its_name():
    for name, protocol in PROTOCOLS.items():
        assert find(name) is protocol and protocol.name == name
    with pytest.raises(UserError, match="no protocol 'none'; there are .*search_r1"):
        find("none")
    with pytest.raises(ValueError, match="two protocols named search_r1"):
        register(Protocol("search_r1", "", (("a", ANSWER),)))


def test_the_shipped_policy_was_trained_on_these_texts():
    assert (PLAIN_SEARCH.prompt, PLAIN_SEARCH.passage) == ("Q: {question}\n", " {title}: {text}")
    assert PLAIN_SEARCH.show([("a", "b")]) == "<information> a: b</information>"
    assert PLAIN_PROPOSER.prompt == "Write a question.\nChain: {chain}\n{passages}"
    assert PLAIN_SEARCH.correction is None and PLAIN_PROPOSER.correction is None


def test_the_table_of_the_docs_is_right():
    """Names, tags and placeholders of every protocol, in order of the table."""
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", DOCS.read_text("utf-8"), re.MULTILINE)
    table = {name: rest.split(" | ") for name, rest in rows if not name.isupper()}
    assert set(table) == set(PROTOCOLS)
    for name, protocol in PROTOCOLS.items():
        columns = table[name]
        assert columns[0].split(", ") == [tag for tag, _ in protocol.actions]
        assert columns[-1].split(", ") == protocol.placeholders
        assert ("JSON" in columns[1]) == (protocol.call is not None) or columns[1] == "as above"
        said = "ends" if protocol.correction is None else "corrected"
        assert columns[3].startswith(said)
        for number in (protocol.limits.action, protocol.limits.response):
            assert not number or f"{number:,}" in columns[4] or columns[4] == "as above"


def test_the_example_of_the_docs(monkeypatch):
    example, use = re.findall(r"```python\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    names = {}
    exec(example, names)
    monkeypatch.setattr("zest_jax.rollout.protocols.PROTOCOLS", dict(PROTOCOLS))
    register(*names["PROTOCOLS"])
    assert find("lookup") is names["LOOKUP"]
    for line in use.splitlines():
        said, want = line.split("  # ")
        assert eval(said, names) == eval(want)


ASKS = '<tool_call>{"name": "search", "arguments": {"query": "a"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (f"<reason>so</reason>{ASKS}", True),
        (f"<think> so </think>\n{ASKS}\n", True),
        ("<think>so</think><answer>a</answer>", True),
        (ASKS, False),
        (f"<think> </think>{ASKS}", False),
        (f"<think>so</reason>{ASKS}", False),
        (f"<think>so</think>well{ASKS}", False),
        (f"<think>so</think>{ASKS}.", False),
        (f"<think>so</think><reason>so</reason>{ASKS}", False),
        (f"<think>a<think>so</think>{ASKS}", False),
        (f"<think>so</think>{ASKS}<answer>a</answer>", False),
        ("<think>so</think><tool_call>a</tool_call>", False),
        ("<think>so</think><answer>a<answer>b</answer>", False),
        ("<think>so</think>", False),
        ("", False),
        ("<reason>ünï <b>so</b></reason><answer>Łódź</answer>", True),
        (f"<REASON>so</REASON>{ASKS}", False),
        (f"{ASKS}<reason>so</reason>", False),
        (f"<reason>so</reason>{ASKS}{ASKS}", False),
        (f"<reason>so</reason>{ASKS.replace('search', 'find', 1)}", False),
        (f"<reason>so</reason>{ASKS.replace('query', 'q')}", False),
        (f"<reason>so</reason>{ASKS[:-13]}</tool_call>", False),
        ("<reason>so</reason><answer>a</answer><answer>b</answer>", False),
        ("<reason>so</reason><answer>a", False),
        ("<reason>so", False),
    ],
)
def test_a_turn_of_eviback_is_one_thought_and_one_action(text, right):
    assert find("eviback").well_formed(text) is right


def test_what_an_action_asks():
    assert PLAIN_SEARCH.queries("<think>a</think><search> b c </search>") == ["b c"]
    assert PLAIN_SEARCH.queries("<search>b</answer>") is None
    assert PLAIN_SEARCH.queries("<answer>b</answer><search>c</search>") is None
    assert PLAIN_SEARCH.queries("<search>b") is None
    several = ASKS.replace('"query": "a"', '"query_list": ["a", "b\\n", "c", "d", "e"]')
    assert find("dr_zero_solver").queries(several) == ["a", "b\n", "c", "d"]
    assert find("qwen_tools").queries(several) == ["a"]
    assert find("eviback").queries(several) is None


def test_turns_are_written_as_special_tokens_of_qwen():
    """One id each, in what is shown and said; the template's own way to write a tool's turn."""
    tokenizer, protocol = qwen3(), find("qwen_tools")
    spec = RolloutSpec(1, 8, 8, observation_length=200, searches=1)
    config = PolicyConfig(len(tokenizer), 4, 1, 1, 1, 2, 2)
    engine = Engine.build(config, spec, protocol, tokenizer)
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert engine.correction_ids[0] == end and engine.eos_ids == (end,)
    assert engine.correction_ids.count(start) == 2

    def encode(texts):
        return tokenizer(texts, add_special_tokens=False)["input_ids"]

    frame = protocol.layout.frame(encode, 1, 1)
    tool, close = tokenizer.convert_tokens_to_ids(["<tool_response>", "</tool_response>"])
    assert (frame.starts[0][0], frame.starts[0][2]) == (end, start) and tool in frame.starts[0]
    assert frame.ending[0] == close and frame.ending[1] == end and start in frame.ending
    with pytest.raises(UserError, match="qwen_tools writes <.im_start.>, which the policy's"):
        Engine.build(tiny.shape(300), spec, protocol, tiny.tokenizer())


def test_tools_are_handed_to_the_template(tokenizer):
    tokenizer.chat_template = (
        "{% for t in tools %}{{ t.function.name }}{% endfor %}|{{ messages[0].content }}|"
    )
    chat = in_chat_template(find("eviback"), tokenizer)
    filled = chat.prompt.format(question="Who?")
    assert filled.startswith("search|") and filled.endswith("Question: Who?|")
    assert '{"name": "search", "arguments": {"query": "..."}}' in filled


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"solver.protocol": "none"}, "there is no protocol 'none'"),
        ({"solver.protocol": "qwen_tools"}, "written in the turns of a chat; set policy.chat=True"),
        ({"proposer.protocol": "ssp_proposer"}, "asks for answer, searches, and a proposer of"),
        ({"solver.protocol": "search_r1", "solver.action_length": 501}, "more than the 500 of"),
        ({"solver.protocol": "dr_zero_solver", "policy.chat": True, "solver.searches": 5}, "the 4"),
    ],
)
def test_what_does_not_fit_a_protocol_is_refused(overrides, said):
    config = common.get_config()
    for field, value in overrides.items():
        group, name = field.split(".")
        config[group][name] = value
    with pytest.raises(UserError, match=said):
        preflight.check_protocols(config)


def test_several_queries_need_a_call():
    with pytest.raises(ValueError, match="one query, or several in a JSON call"):
        module.Protocol("p", "", (("a", SEARCH), ("b", ANSWER)), most_queries=2)
