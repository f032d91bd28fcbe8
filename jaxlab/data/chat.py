"""Chat messages -> prompts, through the template that a model was trained with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2

from jaxlab.errors import PromptError, TokenizerError

if TYPE_CHECKING:
    from jaxlab.data.tokenizers import Tokenizer

Message = Mapping[str, Any]


def render(
    messages: Sequence[Message], tokenizer: Tokenizer, add_generation_prompt: bool = True
) -> list[int]:
    """The token ids of a conversation.

    Args:
      messages: dicts with `role` ("system", "user", "assistant", …) and `content`, oldest first.
      tokenizer: gives the template and the ids.
      add_generation_prompt: end with what opens an assistant's turn, so that the model answers.

    Raises:
      TokenizerError: the tokenizer has no chat template.
      PromptError: there are no messages, one is malformed, or the template refuses their order.

    >>> from jaxlab.data.tokenizers import ByteTokenizer
    >>> tokenizer = ByteTokenizer(chat_template="{{ messages[0].content }}{{ eos_token }}")
    >>> render([{"role": "user", "content": "Hi"}], tokenizer)
    [75, 108, 2]
    """
    return tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)


def render_text(
    messages: Sequence[Message],
    template: str | None,
    special_tokens: Mapping[str, Any],
    add_generation_prompt: bool = True,
) -> str:
    """The text of a conversation, special tokens spelled out.

    `template` is a Jinja template in Hugging Face's dialect; it runs in transformers' sandbox.
    `special_tokens` are the variables it may use, such as `bos_token`. Errors as in `render`.
    """
    if not template:
        raise TokenizerError(
            "the tokenizer has no chat template, so it belongs to a base model: give the "
            "prompt as a "
            "plain string, or use an instruction-tuned model"
        )
    _check_messages(messages)
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered: Any = render_jinja_template(
            conversations=[[dict(message) for message in messages]],
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )[0]
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(
            f"the chat template is not valid Jinja (line {error.lineno}: {error.message}): "
            "fetch the tokenizer again"
        ) from error
    except jinja2.TemplateError as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise PromptError(
            f"the model's chat template refuses these messages (roles: {roles}): {error.message}"
        ) from error
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise PromptError(
            f"the model's chat template fails on these messages: {error}; "
            "content should be a string in every message"
        ) from error
    return rendered[0]


def _check_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise PromptError(
            f"a conversation is a list of messages, not {type(messages).__name__}: "
            'write [{"role": "user", "content": "…"}]'
        )
    if not messages:
        raise PromptError("the conversation has no messages: give at least one of role user")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptError(
                f"message {number} is {message!r:.80}: "
                'each must be a dict such as {"role": "user", "content": "…"}'
            )
        # Tool calls have no content in some dialects; a template that needs it will say so.
        if "content" not in message and "tool_calls" not in message:
            raise PromptError(f"message {number} (role {message['role']}) has no content")
