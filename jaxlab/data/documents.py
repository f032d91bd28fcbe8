"""What a document is, and what a source of documents promises."""

from typing import Literal, Protocol, runtime_checkable

from jaxlab.errors import DataError

Document = str | list[dict]
Split = Literal["train", "validation"]


@runtime_checkable
class Source(Protocol):
    """Random access to documents."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Document: ...

    def describe(self, index: int) -> str:
        """Where document `index` lies, for messages: 'notes.jsonl line 12'."""
        ...


def document_of(record: dict, text_field: str, messages_field: str, where: str) -> Document:
    """The text or the chat of a record, checked."""
    if record.get(text_field) is not None:
        text = record[text_field]
        if not isinstance(text, str):
            raise DataError(
                f"{where}: field {text_field!r} is a {type(text).__name__}, not a string"
            )
        return text
    messages = record.get(messages_field)
    if messages is None:
        if text_field in record:
            raise DataError(
                f"{where}: field {text_field!r} is null, not a string: remove the record"
            )
        raise DataError(no_field_message(where, text_field, messages_field, list(record)))
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: field {messages_field!r} is not a list of messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(
                f"{where}: each message needs a 'role' and a 'content', but one is {message!r:.80}"
            )
    # Arrow gives every message every field any message has; a template may ask if one is there.
    return [
        {key: value for key, value in message.items() if value is not None or key == "content"}
        for message in messages
    ]


def no_field_message(where: str, text_field: str, messages_field: str, found: list[str]) -> str:
    return (
        f"{where} has neither a field {text_field!r} nor {messages_field!r}; it has "
        f"{', '.join(map(repr, found)) or 'none'}. Set data.text_field to the one with the text"
    )
