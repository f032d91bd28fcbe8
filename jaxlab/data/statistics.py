"""What a model must beat: the cross-entropy of a model that knows only how often each token is."""

import itertools
import math
from collections.abc import Iterator

import numpy as np

from jaxlab.data.config import DataConfig
from jaxlab.data.packing import LEARNED, TOKEN, encode_document
from jaxlab.data.pipeline import make_pipeline
from jaxlab.data.sources import open_split
from jaxlab.errors import DataError


def unigram_entropy(
    config: DataConfig,
    tokenizer,
    *,
    max_train_tokens: int | None = 5_000_000,
    max_batches: int | None = None,
) -> float:
    """Nats per token of the validation targets under the training tokens' frequencies.

    The targets are those that the validation loss is the mean over (loss mask 1), so the two
    numbers compare. Probabilities are `(count + 1) / (total + vocab_size)`: Laplace's smoothing.

    Args:
      config: the data; training counts are over its learned tokens.
      tokenizer: gives the vocabulary's size.
      max_train_tokens: counts documents from all over the training data until they have so many
        tokens: the frequencies are settled long before. None counts everything.
      max_batches: scores only the first so many validation batches. Default: all.

    Raises:
      DataError: the data is missing or empty, or no validation token is a target.
    """
    size = int(tokenizer.vocab_size)
    counts = np.zeros(size, np.int64)
    source = open_split(config, "train")
    for index in _scattered(len(source)):
        rows = encode_document(
            source[index], tokenizer, loss_on=config.loss_on, where=source.describe(index)
        )
        counts += _histogram(rows[:, TOKEN][rows[:, LEARNED] == 1], size)
        if max_train_tokens is not None and counts.sum() >= max_train_tokens:
            break
    targets = np.zeros(size, np.int64)
    pipeline = make_pipeline(config, tokenizer, split="validation")
    for batch in itertools.islice(pipeline, max_batches):
        targets += _histogram(batch["targets"][batch["loss_mask"] > 0], size)
    pipeline.close()
    if not targets.sum():
        raise DataError("the validation data has no token to predict: its documents are too short")
    log_probabilities = np.log(counts + 1.0) - np.log(counts.sum() + size)
    return float(-(targets @ log_probabilities) / targets.sum())


def _scattered(count: int) -> Iterator[int]:
    """Every index below `count` once, any stretch of them spread evenly over the whole."""
    stride = max(1, round(count * 0.618034))  # the golden ratio: no two visits come close early
    while math.gcd(stride, count) > 1:
        stride += 1
    return (visit * stride % count for visit in range(count))


def _histogram(tokens: np.ndarray, size: int) -> np.ndarray:
    if len(tokens) and tokens.max() >= size:
        raise DataError(
            f"token {tokens.max()} is outside the tokenizer's vocabulary of {size}: its "
            "vocab_size does not count the added tokens"
        )
    return np.bincount(tokens, minlength=size)
