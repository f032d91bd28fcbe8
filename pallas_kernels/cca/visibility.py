"""Which core tokens and which raw tokens each query sees: two intervals, whatever the padding."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from pallas_kernels.attention.intervals import Intervals


def max_visible_cores(length: int, group_size: int, window_size: int) -> int:
    """How many cores any query of a row of this length can see: `max(0, (length - s) // g)`."""
    return max(0, (length - window_size) // group_size)


def visible(
    time: int,
    group_size: int,
    window_size: int,
    segment_ids: jax.Array | None,
    lengths: jax.Array | None,
    starts: jax.Array | None,
) -> tuple[Intervals, jax.Array | None]:
    """The intervals, the far list being the cores; a padding token sees nothing.

    Also `core_ends` `[B, M]`, the column of each core's last token, or None if core n ends at
    `(n + 1)·g - 1`; a core no query sees has none of its own and repeats column 0. Cores are
    counted along the row, over its segments.
    """
    cores = max_visible_cores(time, group_size, window_size)
    column = np.arange(time, dtype=np.int32)[None]
    if segment_ids is None and lengths is None and starts is None:
        seen = np.maximum(0, (column + 1 - window_size) // group_size)
        zero = np.zeros_like(column)
        return Intervals(zero, group_size * seen, column + 1, zero, seen), None

    batch = next(len(x) for x in (segment_ids, lengths, starts) if x is not None)
    first = jnp.zeros((batch, time), jnp.int32)
    real = jnp.ones((batch, time), bool)
    if segment_ids is not None:
        change = segment_ids[:, 1:] != segment_ids[:, :-1]
        change = jnp.where(change, jnp.asarray(column[:, 1:]), 0)
        first = jax.lax.cummax(jnp.pad(change, ((0, 0), (1, 0))), axis=1)
    if starts is not None:
        first = jnp.maximum(first, starts[:, None])
        real &= column >= starts[:, None]
    if lengths is not None:
        real &= column < lengths[:, None]
    count = column - first + 1  # tokens of the segment up to the query
    seen = jnp.where(real, jnp.maximum(0, (count - window_size) // group_size), 0)
    # A group's core exists if some query sees it: one that is s tokens later in the same segment.
    seer = jnp.minimum(column + window_size, time - 1)
    exists = jnp.take_along_axis(real, jnp.broadcast_to(seer, real.shape), 1) & real
    exists &= jnp.take_along_axis(first, jnp.broadcast_to(seer, first.shape), 1) == first
    exists &= (count % group_size == 0) & (column + window_size < time)
    before = jnp.cumsum(exists, axis=1) - exists
    core_first = jnp.take_along_axis(before, jnp.minimum(first, time - 1), axis=1)
    slot = jnp.where(exists, before, cores)
    core_ends = jnp.zeros((batch, cores), jnp.int32)
    core_ends = core_ends.at[jnp.arange(batch)[:, None], slot].set(column, mode="drop")
    raw_last = jnp.where(real, column + 1, 0)
    intervals = Intervals(first, first + group_size * seen, raw_last, core_first, core_first + seen)
    return intervals, core_ends


def cca_mask(time: int, group_size: int, window_size: int) -> Bool[np.ndarray, "T columns"]:
    """What each of `time` queries sees: the `m = max(0, (T - s) // g)` cores, then raw tokens.

    Query t (from 0) sees cores `0, …, j - 1` with `j = max(0, (t + 1 - s) // g)` and raw tokens
    `g·j, …, t`: every token up to t once. For inspection; no implementation builds it.

    Raises:
      ValueError: `time`, `group_size` or `window_size` is below 1.
    """
    for name, size in (("time", time), ("group_size", group_size), ("window_size", window_size)):
        if size < 1:
            raise ValueError(f"{name}={size}: must be at least 1")
    query = np.arange(time)[:, None]
    seen = np.maximum(0, (query + 1 - window_size) // group_size)
    core = np.arange(max_visible_cores(time, group_size, window_size))
    raw = np.arange(time)
    return np.concatenate([core < seen, (raw >= group_size * seen) & (raw <= query)], axis=1)
