"""The text of one row as its tokens come: UTF-8 safe pieces, ended before a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from jaxlab.data.tokenizers import StreamDecoder, Tokenizer

FinishReason = Literal["stop", "length"]


class RowText:
    """Collects a row's tokens and text until an end-of-sequence token, a stop string, or the limit.

    Args:
      tokenizer: None for token ids without text; stop strings then cannot be used.
      eos_token_ids: tokens that end the row; kept in `token_ids`, not in the text.
      stop: strings that end the row; the text ends before the earliest.
      max_new_tokens: at most so many tokens.

    Attributes:
      token_ids: tokens so far, the one that ended the row included.
      text: their text so far, without what is held back.
      finish_reason: None while the row is open.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        eos_token_ids: Sequence[int],
        stop: Sequence[str],
        max_new_tokens: int,
    ):
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer)
        self._eos = frozenset(eos_token_ids)
        self._stop = tuple(stop)
        self._max_new_tokens = max_new_tokens
        self._held = ""  # decoded text that may be the beginning of a stop string

    def push(self, token: int) -> str:
        """Add a token; returns the text that is now certain. Ignored once the row is finished."""
        if self.finish_reason is not None:
            return ""
        self.token_ids.append(int(token))
        if token in self._eos:
            return self._end("stop")
        piece = self._emit("" if self._decoder is None else self._decoder.push(token))
        if self.finish_reason is None and len(self.token_ids) >= self._max_new_tokens:
            piece += self._end("length")
        return piece

    def _end(self, reason: FinishReason) -> str:
        """Close the row: what the decoder and the stop strings held back is out, or cut."""
        piece = self._emit("" if self._decoder is None else self._decoder.finish())
        if self.finish_reason is None:
            self.finish_reason = reason
            piece += self._held
            self.text += self._held
            self._held = ""
        return piece

    def _emit(self, new: str) -> str:
        if not new:
            return ""
        pending = self._held + new
        cut = min((at for at in map(pending.find, self._stop) if at >= 0), default=None)
        if cut is not None:
            self.finish_reason = "stop"
            piece, self._held = pending[:cut], ""
        else:
            keep = _longest_stop_prefix(pending, self._stop)
            piece, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        self.text += piece
        return piece


def _longest_stop_prefix(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string, without being all of it."""
    longest = max((len(s) for s in stop), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(s.startswith(text[-length:]) for s in stop):
            return length
    return 0
