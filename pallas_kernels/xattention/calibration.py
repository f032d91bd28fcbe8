"""Thresholds a head, found on calibration texts."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.xattention.scores import antidiagonal_block_scores


def calibrate_coverage(
    query: jax.Array,
    key: jax.Array,
    *,
    block_size: int = 128,
    stride: int = 8,
    coverage: float = 0.9,
    scale: float | None = None,
) -> jax.Array:
    """The share of the score that must be kept so that a share of the exact probability is.

    For each block of queries, the blocks of keys that hold `coverage` of the exact (dense, causal)
    attention; the lowest score among them; the score of all blocks that reach it. The threshold is
    the sum of those scores over the sum of all. Take the maximum over calibration texts, that is
    over the batch and over calls, for a head's threshold.

    As in the XAttention authors' profiling code. Costs what dense attention costs, in memory linear
    in T.

    Args:
      query: `[B, T, H, D]`, of whole rows: T tokens each.
      key: `[B, T, Hk, D]`.
      block_size, stride, scale: as `antidiagonal_block_scores`.
      coverage: share of the exact probability, in (0, 1].

    Returns:
      float32 `[B, H]`, in (0, 1].

    Raises:
      ValueError: an argument has the wrong shape, type or range.
    """
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage={coverage}: must be a share above 0 and at most 1")
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} tokens and key {key.shape[1]}: calibration needs whole "
            "rows, as many queries as keys"
        )
    estimated = antidiagonal_block_scores(
        query, key, block_size=block_size, stride=stride, scale=scale
    )
    exact = _exact_block_sums(query, key, block_size, scale)
    order = jnp.argsort(-exact, axis=-1, stable=True)
    gathered = jnp.cumsum(jnp.take_along_axis(exact, order, axis=-1), axis=-1)
    need = coverage * exact.sum(-1, keepdims=True)
    count = 1 + jnp.sum(gathered < need, axis=-1, keepdims=True)
    kept = jnp.arange(exact.shape[-1]) < count
    ranked = jnp.take_along_axis(estimated, order, axis=-1)
    lowest = jnp.min(ranked, axis=-1, keepdims=True, where=kept, initial=jnp.inf)
    covered = jnp.sum(estimated, axis=(2, 3), where=estimated >= lowest)
    return covered / estimated.sum((2, 3))


def _exact_block_sums(query, key, block_size, scale):
    """Causal softmax probabilities summed over blocks, `[B,H,NQ,NK]`, a block of queries a time."""
    batch, time, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    count = -(-time // block_size)
    padding = ((0, 0), (0, count * block_size - time), (0, 0), (0, 0))
    queries = jnp.pad(query, padding).reshape(
        batch, count, block_size, num_kv_heads, num_heads // num_kv_heads, head_dim
    )
    keys = jnp.pad(key, padding)
    columns = jnp.arange(count * block_size)

    def one_block(args):
        i, queries = args
        rows = i * block_size + jnp.arange(block_size)
        logits = scale * jnp.einsum(
            "btkgd,bskd->bkgts", queries, keys, preferred_element_type=jnp.float32
        )
        logits = jnp.where(columns <= rows[:, None], logits, -jnp.inf)
        weights = jax.nn.softmax(logits, axis=-1) * (rows < time)[:, None]
        weights = weights.sum(-2).reshape(batch, num_heads, count, block_size)
        return weights.sum(-1)

    sums = jax.lax.map(one_block, (jnp.arange(count), queries.swapaxes(0, 1)))
    return sums.transpose(1, 2, 0, 3)


class ThresholdTable(NamedTuple):
    """What `calibrate_dp` found: row m is the best of exactly m reductions over all heads."""

    performance: np.ndarray
    """float64 `[M + 1]`; -inf where m reductions cannot be made."""
    thresholds: np.ndarray
    """float64 `[M + 1, H]`; the start where m reductions cannot be made."""


def calibrate_dp(
    objective: Callable[[np.ndarray], float],
    start: np.ndarray,
    *,
    reductions: int,
    factor: float = 0.9,
) -> ThresholdTable:
    """Which heads can do with a lower threshold, by dynamic programming over heads.

    `D[h, m]`, the best performance of exactly m reductions among the first h heads, is the larger
    of `D[h-1, m]` and what is measured after head h's threshold is multiplied by `factor` in the
    state of `D[h-1, m-1]`. So a head is reduced once at most; call again from what was found to go
    on. It measures up to `H · reductions` times.

    XAttention (arXiv:2503.16428), section 2.3, minimum threshold prediction, where the start is 0.9
    and 1000 reductions are made.

    Args:
      objective: from float64 thresholds `[H]` to a performance, the higher the better.
      start: `[H]`, thresholds in [0, 1] to start from; the heads of all layers in one row.
      reductions: M, at least 1.
      factor: of one reduction, in (0, 1).

    Returns:
      Performance and thresholds for each number of reductions from 0 to M.

    Raises:
      ValueError: an argument has the wrong shape, type or range, or the objective returned NaN.
    """
    start = np.asarray(start, np.float64)
    if start.ndim != 1 or not start.size:
        raise ValueError(
            f"start has shape {start.shape}: must be [heads]; flatten a [layers, heads] table"
        )
    if not ((start >= 0) & (start <= 1)).all():
        raise ValueError(f"start={start.tolist()}: thresholds must be between 0 and 1")
    if reductions < 1:
        raise ValueError(f"reductions={reductions}: must be at least 1")
    if not 0 < factor < 1:
        raise ValueError(f"factor={factor}: must be between 0 and 1, both excluded")

    def measure(thresholds):
        performance = float(objective(thresholds.copy()))
        if np.isnan(performance):
            raise ValueError(
                f"objective returned NaN for thresholds {thresholds.tolist()}: return -inf for "
                "what must not be chosen"
            )
        return performance

    performance = np.full(reductions + 1, -np.inf)
    thresholds = np.tile(start, (reductions + 1, 1))
    performance[0] = measure(start)
    for head in range(start.size):
        # From the highest m down, so that row m - 1 is still that of the heads before this one.
        for m in range(min(head + 1, reductions), 0, -1):
            reduced = thresholds[m - 1].copy()
            reduced[head] *= factor
            measured = measure(reduced)
            # Exactly m reductions need m heads: until then any of them is better than none.
            if m == head + 1 or measured > performance[m]:
                performance[m], thresholds[m] = measured, reduced
    return ThresholdTable(performance, thresholds)
