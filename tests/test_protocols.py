"""Prompts of base and instruct models."""

import pytest
import tiny

from zest_jax.errors import UserError
from zest_jax.rollout.protocols import (
    PLAIN_PROPOSER,
    PLAIN_SEARCH,
    SEARCH_R1,
    in_chat_template,
)

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
