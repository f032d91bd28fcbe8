"""Documents to tokens, and rows of packed tokens to training batches.

A document becomes an int64 array `[n, 4]`, one line a token: the token, whether it is learned (1 or
0), the document's index in its split, and the token's offset in the document. Rows of these are
what grain's concat-then-split packs; `finish_rows` turns them into the arrays a model is given.

Special tokens: a text is `[bos] text [eos]`, each where the tokenizer has one. A chat is exactly
what the chat template makes of it.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

from jaxlab.data.documents import Document
from jaxlab.errors import DataError, JaxlabError

TOKEN, LEARNED, DOCUMENT, OFFSET = range(4)


def encode_document(
    document: Document, tokenizer, *, index: int = 0, loss_on: str = "assistant", where: str = ""
) -> Int[np.ndarray, "n 4"]:
    """Tokens of a text or a chat with what training needs to know of each.

    Args:
      document: a text, or a chat as a list of `{"role", "content"}`.
      tokenizer: a `jaxlab.data.Tokenizer`.
      index: the document's number, kept with every token.
      loss_on: "assistant" or "all": which tokens of a chat are learned. A text is learned whole.
      where: where the document lies, for messages.

    Returns:
      int64 `[n, 4]`: token, learned, index, offset. n = 0 for an empty text.

    Raises:
      DataError: the chat can't be rendered, or where its assistant turns lie can't be told.
    """
    if isinstance(document, str):
        tokens = encode_text(document, tokenizer)
        learned = np.ones(len(tokens), bool)
    else:
        tokens = _template(document, tokenizer, where)
        if loss_on == "assistant":
            learned = assistant_mask(document, tokenizer, tokens, where=where)
        else:
            learned = np.ones(len(tokens), bool)
    rows = np.empty((len(tokens), 4), np.int64)
    rows[:, TOKEN] = tokens
    rows[:, LEARNED] = learned
    rows[:, DOCUMENT] = index
    rows[:, OFFSET] = np.arange(len(tokens))
    return rows


def encode_text(text: str, tokenizer) -> list[int]:
    """`[bos] text [eos]`; nothing at all for an empty text."""
    tokens = tokenizer.encode(text, add_special_tokens=False) if text else []
    if not len(tokens):
        return []
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return [*([] if bos is None else [bos]), *tokens, *([] if eos is None else [eos])]


def assistant_mask(
    messages: list[dict], tokenizer, tokens: list[int], *, where: str = ""
) -> np.ndarray:
    """Which tokens of a rendered chat the assistant has to produce: bool `[len(tokens)]`.

    A turn begins right after its generation prompt and ends with its end-of-turn token; white space
    that a template puts behind that token is not the assistant's. Most templates render a longer
    chat as a continuation of a shorter one, and the turn is the difference. Some rewrite earlier
    turns (Qwen 3 drops their reasoning); there the turn is found as what changes when its content
    is replaced.

    Raises:
      DataError: the turn calls tools in a template that rewrites it, so that its end is unknown.
    """
    learned = np.zeros(len(tokens), bool)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _template(messages[:turn], tokenizer, where, generation=True) if turn else []
        through = _template(messages[: turn + 1], tokenizer, where)
        starts_here = bool(prompt) and tokens[: len(prompt)] == prompt
        ends_here = tokens[: len(through)] == through
        if starts_here and ends_here:
            start, end = len(prompt), _without_trailing_space(through, len(prompt), tokenizer)
        else:
            if message.get("tool_calls"):
                raise DataError(
                    f"{where or 'chat'}: the chat template rewrites the assistant's turn "
                    f"{turn + 1}, which calls tools, so its end can't be told; set "
                    "data.loss_on: all, or split the chat so that this turn is the last"
                )
            start, end = _replaced_span(messages, turn, tokenizer, tokens, where)
            if starts_here:
                start = len(prompt)
            if ends_here:
                end = _without_trailing_space(through, start, tokenizer)
            elif end < len(tokens) and _is_special(tokens[end], tokenizer):
                end += 1
        learned[start:end] = True
    return learned


def _template(messages: list[dict], tokenizer, where: str, generation: bool = False) -> list[int]:
    if not tokenizer.chat_template:
        raise DataError(
            f"{where or 'chat'} is a chat, but the tokenizer has no chat template: use the "
            "tokenizer of an instruction-tuned model, or data of texts"
        )
    try:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=generation))
    except JaxlabError as error:
        raise DataError(f"{where or 'chat'}: {error}") from error


def _replaced_span(messages, turn, tokenizer, tokens, where) -> tuple[int, int]:
    """The tokens that differ when the turn's content is another."""
    start, end = len(tokens), 0
    # Two stand-ins: the content may share its first or last token with one, not with both.
    for stand_in in ("§", "0"):
        other = [*messages]
        other[turn] = {**messages[turn], "content": stand_in}
        changed = _template(other, tokenizer, where)
        if changed == tokens:  # the content is the stand-in
            continue
        limit = min(len(tokens), len(changed))
        same = 0
        while same < limit and tokens[same] == changed[same]:
            same += 1
        tail = 0
        while tail < limit - same and tokens[-1 - tail] == changed[-1 - tail]:
            tail += 1
        start, end = min(start, same), max(end, len(tokens) - tail)
    return start, max(start, end)


def _without_trailing_space(tokens: list[int], start: int, tokenizer) -> int:
    """The end of `tokens` without the white space behind its last end-of-turn token."""
    end = len(tokens)
    while end > start and tokenizer.decode([tokens[end - 1]], skip_special_tokens=False).isspace():
        end -= 1
    return end if end > start and _is_special(tokens[end - 1], tokenizer) else len(tokens)


def _is_special(token: int, tokenizer) -> bool:
    if token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        return True
    return (
        tokenizer.decode([token], skip_special_tokens=True) == ""
        and tokenizer.decode([token], skip_special_tokens=False) != ""
    )


def split_document(document: Int[np.ndarray, "n 4"], length: int) -> Iterator[np.ndarray]:
    """Consecutive pieces of at most `length` tokens, for rows of one document each."""
    for start in range(0, len(document), length):
        yield document[start : start + length]


def finish_rows(
    packed: Int[np.ndarray, "b t 4"],
    segment_ids: Int[np.ndarray, "b t"],
    positions: Int[np.ndarray, "b t"],
    *,
    pad_token_id: int,
) -> dict[str, np.ndarray]:
    """A batch from packed rows.

    Returns a dictionary of, with B rows of T tokens:
      tokens [B, T] int32: `pad_token_id` where the segment is 0.
      targets [B, T] int32: the next token of the same document in the same row, else the padding.
      loss_mask [B, T] float32: 1 where the target exists and is learned. A document's last token in
        a row has no target there, also where the document goes on in another row.
      segment_ids [B, T] int32: 1, 2, ... for the documents of a row, 0 for padding.
      positions [B, T] int32: from 0 in each segment.
      row_ids [B] int64: `document index << 32 | token offset` of the row's first token, -1 for a
        row of padding. For reports on the host: it does not survive JAX's 32-bit default.
    """
    filled = segment_ids > 0
    tokens = np.where(filled, packed[..., TOKEN], pad_token_id)
    continues = filled[:, 1:] & (segment_ids[:, 1:] == segment_ids[:, :-1])
    targets = np.full_like(tokens, pad_token_id)
    targets[:, :-1][continues] = tokens[:, 1:][continues]
    loss_mask = np.zeros(tokens.shape, np.float32)
    loss_mask[:, :-1] = continues & (packed[:, 1:, LEARNED] == 1)
    row_ids = packed[:, 0, DOCUMENT] << 32 | packed[:, 0, OFFSET]
    return {
        "tokens": tokens.astype(np.int32),
        "targets": targets.astype(np.int32),
        "loss_mask": loss_mask,
        "segment_ids": segment_ids.astype(np.int32),
        "positions": positions.astype(np.int32),
        "row_ids": np.where(filled[:, 0], row_ids, -1),
    }


def row_origin(row_id: int | np.integer) -> tuple[int, int]:
    """`(document index, token offset)` of a row's first token, from its `row_ids` entry."""
    return int(row_id) >> 32, int(row_id) & 0xFFFFFFFF
