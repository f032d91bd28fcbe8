"""A row of a batch made readable, to see what a model is really trained on."""

import itertools

import numpy as np


def render_row(batch: dict[str, np.ndarray], row: int, tokenizer, *, width: int = 100) -> str:
    """One row as text, a paragraph a segment.

    What is learned (the token is the target of the position before it) stands plain; what is only
    read stands between ⟦ and ⟧. Special tokens are shown, a newline as ⏎.

    Args:
      batch: a pipeline's batch.
      row: which row of it.
      tokenizer: decodes the tokens.
      width: columns to wrap at.

    Returns:
      Lines joined by newlines: first `row 3: 2 segments, 250 of 256 tokens, 240 learned`, then for
      each segment a head line with its columns and its wrapped text.
    """
    tokens, segments = batch["tokens"][row], batch["segment_ids"][row]
    learned = np.zeros(len(tokens), bool)
    learned[1:] = batch["loss_mask"][row, :-1] > 0
    numbers = [int(number) for number in np.unique(segments) if number > 0]
    lines = [
        f"row {row}: {len(numbers)} segments, {int((segments > 0).sum())} of {len(tokens)} "
        f"tokens, {int(learned.sum())} learned"
    ]
    for number in numbers:
        columns = np.flatnonzero(segments == number)
        first, last = int(columns[0]), int(columns[-1])
        lines.append(
            f"segment {number}: columns {first}-{last}, positions "
            f"{batch['positions'][row, first]}-{batch['positions'][row, last]}"
        )
        text = _marked(tokens[columns], learned[columns], tokenizer)
        lines += [text[start : start + width] for start in range(0, len(text), width)]
    return "\n".join(lines)


def _marked(tokens: np.ndarray, learned: np.ndarray, tokenizer) -> str:
    """The text of a segment, runs of tokens that are not learned in ⟦⟧."""
    parts = []
    edges = [0, *(np.flatnonzero(np.diff(learned)) + 1).tolist(), len(tokens)]
    for start, end in itertools.pairwise(edges):
        text = tokenizer.decode(tokens[start:end].tolist(), skip_special_tokens=False)
        text = text.replace("\n", "⏎")
        parts.append(text if learned[start] else f"⟦{text}⟧")
    return "".join(parts)
