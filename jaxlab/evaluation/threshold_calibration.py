"""XAttention's threshold of each layer and head, from a model's own queries and keys on texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from jaxlab.errors import ConfigError, DataError, StorageError
from jaxlab.evaluation.projections import check_has_attention, layer_projections
from pallas_kernels import calibrate_coverage


def calibrated_thresholds(
    model: Any,
    rows: Iterable[np.ndarray],
    *,
    block_size: int = 128,
    stride: int = 8,
    coverage: float = 0.9,
    progress: Callable[[int], None] = lambda done: None,
) -> Float[np.ndarray, "layers heads"]:
    """For each head the highest that `pallas_kernels.calibrate_coverage` says on any of the texts.

    The texts should be of the kind and about the length that the thresholds are for: the longer a
    text, the more of its blocks hold nothing. Takes what dense attention takes.

    Args:
      model: as `jaxlab.load` gives. Its dense attention is judged, whatever pattern it has.
      rows: texts, int32 `[T]`, each of two blocks at least; one length compiles once.
      block_size, stride: of the XAttention that will read the thresholds.
      coverage: share of the exact attention that the chosen blocks must hold, in (0, 1].
      progress: is told how many texts are done.

    Returns:
      float32 `[layers, heads]`, in (0, 1].

    Raises:
      ConfigError: the sizes are out of range, stride does not divide block_size, or the model has
        no attention.
      DataError: there is no text, or one is shorter than two blocks.
    """
    if not 0 < coverage <= 1:
        raise ConfigError(f"coverage is {coverage}: give a share above 0 and at most 1")
    if block_size < 1 or stride < 1 or block_size % stride:
        raise ConfigError(
            f"stride {stride} does not divide block_size {block_size}: choose 4, 8 or 16 with "
            "blocks of 128"
        )
    dense = SimpleNamespace(
        config=check_has_attention(model.config).replace(attention="full"), params=model.params
    )

    @jax.jit
    def of_a_layer(query: jax.Array, key: jax.Array) -> jax.Array:
        return calibrate_coverage(
            query,
            key,
            block_size=block_size,
            stride=stride,
            coverage=coverage,
            scale=model.config.query_scale,
        )[0]

    highest = None
    for done, row in enumerate(rows, start=1):
        if len(row) < 2 * block_size:
            raise DataError(
                f"text {done} has {len(row)} tokens: a calibration needs two blocks of "
                f"{block_size} at least, better dozens; give more text or smaller blocks"
            )
        layers = layer_projections(dense, np.asarray(row, np.int32)[None])
        found = np.stack([np.asarray(of_a_layer(q, k)) for q, k, _ in layers])
        highest = found if highest is None else np.maximum(highest, found)
        progress(done)
    if highest is None:
        raise DataError("there is no text to calibrate on: give at least one")
    return highest


def spread_rows(tokens: np.ndarray, length: int, count: int) -> list[np.ndarray]:
    """At most `count` rows of `length` tokens, evenly spread over a text; none overlaps another.

    Args:
      tokens: int32 `[N]`. A text shorter than `length` is one row, as it is.
    """
    count = max(1, min(count, len(tokens) // length))
    starts = np.linspace(0, max(0, len(tokens) - length), count).astype(int)
    return [tokens[start : start + length] for start in starts]


def write_thresholds(path: str | Path, thresholds: np.ndarray, **made_with: Any) -> None:
    """The JSON file that `attention.threshold` reads: `[layers][heads]`, and how they were made.

    Raises:
      StorageError: the file cannot be written.
    """
    # Rounded up: a threshold a little too high keeps a block more, never one less.
    rows = np.minimum(np.ceil(np.asarray(thresholds, np.float64) * 1e4) / 1e4, 1.0).tolist()
    try:
        Path(path).write_text(
            json.dumps({**made_with, "threshold": rows}, indent=2) + "\n", encoding="utf-8"
        )
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
