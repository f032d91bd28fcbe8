"""Chat templates, and what is wrong with a conversation."""

import pytest

from jaxlab.data import chat
from jaxlab.data.tokenizers import ByteTokenizer
from jaxlab.errors import PromptError, TokenizerError

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "{{ message.role }}: {{ message.content | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
USER = {"role": "user", "content": " Hi "}


def test_render():
    tokenizer = ByteTokenizer(TEMPLATE)
    ids = chat.render([USER], tokenizer)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos>user: Hi<eos>assistant: "
    assert ids[0] == 1
    assert 2 in ids
    without = chat.render([USER], tokenizer, add_generation_prompt=False)
    assert tokenizer.decode(without) == "user: Hi"


def test_no_template():
    with pytest.raises(TokenizerError, match=r"no chat template.*plain string"):
        chat.render([USER], ByteTokenizer())


def test_roles_in_the_wrong_order():
    with pytest.raises(
        PromptError, match=r"refuses these messages \(roles: user, user\): Roles must alternate"
    ):
        chat.render([USER, USER], ByteTokenizer(TEMPLATE))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no messages"),
        ("Hi", "list of messages, not str"),
        (["Hi"], "message 0 is 'Hi'"),
        ([USER, {"content": "x"}], "message 1 is"),
        ([{"role": "user"}], r"message 0 \(role user\) has no content"),
        ([{"role": "user", "content": None}], "fails on these messages|refuses"),
    ],
)
def test_malformed_conversations(messages, message):
    with pytest.raises(PromptError, match=message):
        chat.render(messages, ByteTokenizer(TEMPLATE.replace("| trim", "+ ''")))


def test_a_broken_template():
    with pytest.raises(TokenizerError, match=r"not valid Jinja \(line 1"):
        chat.render([USER], ByteTokenizer("{% for %}"))


def test_templates_run_in_a_sandbox():
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(PromptError, match="refuses"):
        chat.render([USER], ByteTokenizer(escape))
