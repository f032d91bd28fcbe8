"""Perplexity: how surprised a model is by a text, per token.

`text_perplexity` slides a window over one text, so that each token is predicted from at least
`window - stride` tokens before it (as the Hugging Face guide to perplexity does); `perplexity`
takes packed batches of a data set. Neither ever holds the logits of a whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypedDict

import jax
import numpy as np

from jaxlab.errors import ConfigError, DataError
from jaxlab.models.attention.separator_watch import SeparatorWatch
from jaxlab.objectives import language_modeling

if TYPE_CHECKING:
    from jaxlab.data import DataConfig
    from jaxlab.data.tokenizers import Tokenizer
    from jaxlab.model import Model
    from jaxlab.models import LanguageModule

Batch = dict[str, np.ndarray]


class PerplexityResult(TypedDict):
    """What was measured.

    `loss` is in nats per token, `perplexity` its exponential, `tokens` the number of tokens
    predicted. `bits_per_byte` is the loss per byte of UTF-8 text, which can be compared between
    tokenizers.
    """

    loss: float
    perplexity: float
    tokens: int
    bits_per_byte: float


def perplexity(
    model: Model, data: DataConfig, *, max_batches: int | None = None
) -> PerplexityResult:
    """Perplexity on the validation split of a data set, packed into rows of its sequence_length.

    Args:
      model: as `jaxlab.load` gives, with a tokenizer.
      data: what to read; `sequence_length` is the context and `batch_size` the rows at a time.
      max_batches: read only so many batches; None reads all.

    Raises:
      DataError: the data is missing, malformed, or holds no token to predict.
      ConfigError: a row is longer than the model's context.
    """
    from jaxlab.data import make_pipeline

    tokenizer = _tokenizer_of(model)
    _check_window("sequence_length", data.sequence_length, model.module)
    batches: Iterator[Batch] = iter(make_pipeline(data, tokenizer, split="validation"))
    total = _Total(model.module, model.params)
    num_bytes = 0
    for index, batch in enumerate(batches):
        if max_batches is not None and index >= max_batches:
            break
        total.add(batch)
        num_bytes += _target_bytes(batch, tokenizer)
    return total.result(num_bytes)


def text_perplexity(
    model: Model,
    text: str,
    *,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 4,
) -> PerplexityResult:
    """Perplexity on one text, by a sliding window.

    Every token but the first is predicted exactly once, by the first window that reaches it.

    Args:
      model: as `jaxlab.load` gives, with a tokenizer (whose BOS, if it adds one, is context only).
      text: at least two tokens long.
      window: tokens a prediction may look back on; default the model's context, at most 2,048.
      stride: how far the window moves; default half of it. Smaller gives more context and costs
        more; `window` cuts the text into pieces that know nothing of each other.
      batch_size: windows at a time.

    Raises:
      DataError: the text has fewer than two tokens.
      ConfigError: window, stride or batch_size is out of range.
    """
    tokenizer = _tokenizer_of(model)
    if window is None:
        window = min(model.module.config.max_position_embeddings, 2048)
    _check_window("window", window, model.module)
    stride = max(1, window // 2) if stride is None else stride
    if not 1 <= stride <= window:
        raise ConfigError(
            f"stride={stride}: it must be between 1 and the window of {window} tokens"
        )
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}: it must be at least 1")
    ids = tokenizer.encode(text, add_special_tokens=True)
    if len(ids) < 2:
        raise DataError(
            f"the text has {len(ids)} token(s): perplexity needs at least two, one to predict from "
            "and one to predict"
        )
    # What the first token stands for is not predicted; a BOS stands for no text.
    num_bytes = len(text.encode("utf-8", errors="replace")) - _num_bytes(ids[:1], tokenizer)
    total = _Total(model.module, model.params)
    for batch in sliding_windows(np.asarray(ids, np.int32), window, stride, batch_size):
        total.add(batch)
    return total.result(num_bytes)


def sliding_windows(
    tokens: np.ndarray, window: int, stride: int, batch_size: int
) -> Iterator[Batch]:
    """Batches of overlapping windows that predict each of `tokens[1:]` exactly once.

    Args:
      tokens: int32 `[N]`, N at least 2.

    Yields:
      `tokens`, `targets` int32 and `loss_mask` float32, all `[batch_size, W]`, where W is `window`,
      or less for a text that fits in less. All batches have one shape; what is missing is masked.
    """
    last = len(tokens) - 1
    width = min(window, 1 << (last - 1).bit_length())
    spans = []
    reached = 0  # targets before this index (of tokens[1:]) are predicted
    for start in range(0, last, stride):
        end = min(start + window, last)
        spans.append((start, reached, end))
        reached = end
        if end == last:
            break
    for first in range(0, len(spans), batch_size):
        shape = (batch_size, width)
        batch = {
            "tokens": np.zeros(shape, np.int32),
            "targets": np.zeros(shape, np.int32),
            "loss_mask": np.zeros(shape, np.float32),
        }
        for row, (start, reached, end) in enumerate(spans[first : first + batch_size]):
            batch["tokens"][row, : end - start] = tokens[start:end]
            batch["targets"][row, : end - start] = tokens[start + 1 : end + 1]
            batch["loss_mask"][row, reached - start : end - start] = 1.0
        yield batch


class _Total:
    """Sums of losses over batches, in float64."""

    def __init__(self, module: LanguageModule, params: Any):
        objective = language_modeling(module)
        key = jax.random.key(0)
        self._evaluate = jax.jit(lambda params, batch: objective(params, batch, key)[1])
        self._params = params
        self._separators = SeparatorWatch(module.config)
        self._nats = 0.0
        self._tokens = 0.0

    def add(self, batch: Batch) -> None:
        self._separators.look(batch["tokens"])
        names = ("tokens", "targets", "loss_mask", "segment_ids", "positions")
        metrics = self._evaluate(self._params, {n: batch[n] for n in names if n in batch})
        weight = float(metrics["weight"])
        self._nats += float(metrics["cross_entropy"]) * weight
        self._tokens += weight

    def result(self, num_bytes: int) -> PerplexityResult:
        if not self._tokens:
            raise DataError("the data holds no token to predict: give a longer text")
        loss = self._nats / self._tokens
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),  # beyond it a float overflows
            "tokens": round(self._tokens),
            "bits_per_byte": self._nats / math.log(2) / max(num_bytes, 1),
        }


def _tokenizer_of(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise ConfigError("perplexity on text needs a tokenizer: this model came without one")
    return model.tokenizer


def _check_window(name: str, length: int, module: LanguageModule) -> None:
    context = module.config.max_position_embeddings
    if not 1 <= length <= context:
        raise ConfigError(
            f"{name}={length}: it must be between 1 and the model's context of {context} tokens"
        )


def _target_bytes(batch: Batch, tokenizer: Tokenizer) -> int:
    """Bytes of text that the batch's targets stand for, row by row and document by document."""
    count = 0
    for targets, mask, segments in zip(
        batch["targets"], batch["loss_mask"], batch["segment_ids"], strict=True
    ):
        for segment in np.unique(segments[mask > 0]):
            ids = targets[(segments == segment) & (mask > 0)]
            count += _num_bytes(ids.tolist(), tokenizer)
    return count


def _num_bytes(ids: list[int], tokenizer: Tokenizer) -> int:
    return len(tokenizer.decode(ids).encode("utf-8", errors="replace"))
