"""Which tokens each query sees, and the compact list of those that are visible from afar."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from pallas_kernels.attention.intervals import Intervals


class Compact(NamedTuple):
    """Initial tokens and separators of each row, in order, for the queries beyond their window.

    `columns`, int32 `[B, C]`: where they are; entries at or beyond `count`, int32 `[B]`, repeat
    column 0 and no query sees them. Where `count` exceeds C the list lacks some.
    """

    columns: Int[Array, "B C"]
    count: Int[Array, " B"]


def segment_starts(
    batch: int,
    time: int,
    lengths: jax.Array | None,
    segment_ids: jax.Array | None,
    starts: jax.Array | None,
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """The column of the first token of each token's segment, and which tokens are not padding."""
    column = jnp.arange(time, dtype=jnp.int32)[None]
    first = jnp.zeros((batch, time), jnp.int32)
    real = jnp.ones((batch, time), bool)
    if segment_ids is not None:
        begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
        first = jax.lax.cummax(jnp.where(begins, column, 0), axis=1)
        real &= segment_ids != 0
    if starts is not None:
        first = jnp.maximum(first, starts[:, None])
        real &= column >= starts[:, None]
    if lengths is not None:
        real &= column < lengths[:, None]
    return first, real


def visible(
    is_separator: Bool[Array, "B T"],
    window: int,
    initial_tokens: int,
    lengths: jax.Array | None,
    segment_ids: jax.Array | None,
    starts: jax.Array | None,
    capacity: int,
) -> tuple[Intervals, Compact]:
    """Intervals of raw tokens (the window) and of the compact list, for each query."""
    batch, time = is_separator.shape
    column = jnp.arange(time, dtype=jnp.int32)[None]
    first, real = segment_starts(batch, time, lengths, segment_ids, starts)
    far = real & (is_separator | (column - first < initial_tokens))
    far &= column < time - window  # else no query has it behind its window
    through = jnp.cumsum(far, axis=1, dtype=jnp.int32)  # entries up to and with a column
    before = through - far
    slot = jnp.where(far, before, capacity)  # beyond the end: dropped
    columns = jnp.zeros((batch, capacity), jnp.int32)
    columns = columns.at[jnp.arange(batch)[:, None], slot].set(column, mode="drop")

    entry_first = jnp.take_along_axis(before, jnp.minimum(first, time - 1), axis=1)
    behind = column - window  # the newest column behind a query's window
    entry_last = jnp.take_along_axis(
        through, jnp.broadcast_to(jnp.maximum(behind, 0), (batch, time)), axis=1
    )
    entry_last = jnp.where(real & (behind >= first), entry_last, entry_first)
    raw_first = jnp.maximum(first, behind + 1)
    raw_last = jnp.where(real, column + 1, 0)
    intervals = Intervals(first, raw_first, raw_last, entry_first, entry_last)
    return intervals, Compact(columns, through[:, -1])


def sepllm_mask(
    is_separator: Bool[Array, "B T"] | Bool[np.ndarray, "B T"],
    *,
    window: int | None,
    initial_tokens: int,
    lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    starts: Int[Array, " B"] | None = None,
) -> Bool[Array, "B T T"]:
    """What each query sees, `[row, query, key]`, for inspection; arguments as `sepllm_attention`.

    Query i sees key j of its own segment if `j <= i` and j is a separator, one of the segment's
    first `initial_tokens`, or `i - j < window` (paper §3.1). Padding sees and is seen by nothing.
    """
    is_separator = jnp.asarray(is_separator)
    batch, time = is_separator.shape
    first, real = segment_starts(batch, time, lengths, segment_ids, starts)
    column = jnp.arange(time)
    shown = is_separator | (column - first < initial_tokens)
    distance = column[:, None] - column
    near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    same = (first[:, :, None] == first[:, None]) & real[:, :, None] & real[:, None]
    return same & (distance >= 0) & (near | shown[:, None])


class Retention(NamedTuple):
    """Shares of the keys of full attention that are kept, float32 `[B]`, from 0 to 1.

    `final`: by the last query of each row; `mean`: by all queries of a row together, which is also
    the share of the attention map that is computed.
    """

    final: jax.Array
    mean: jax.Array


def kv_retention(
    is_separator: Bool[Array, "B T"] | Bool[np.ndarray, "B T"],
    *,
    window: int | None,
    initial_tokens: int,
    lengths: Int[Array, " B"] | None = None,
    starts: Int[Array, " B"] | None = None,
) -> Retention:
    """How much of a cache SepLLM keeps; arguments as `sepllm_attention`. Linear in T."""
    is_separator = jnp.asarray(is_separator)
    batch, time = is_separator.shape
    first, real = segment_starts(batch, time, lengths, None, starts)
    column = jnp.arange(time, dtype=jnp.int32)[None]
    total = jnp.where(real, column - first + 1, 0)
    if window is None or window >= time:
        kept = total
    else:
        seen, _ = visible(is_separator, window, initial_tokens, lengths, None, starts, time)
        kept = (seen.raw_last - seen.raw_first) + (seen.far_last - seen.far_first)
        kept = jnp.where(real, kept, 0)
    last = jnp.max(jnp.where(real, column, 0), axis=1, keepdims=True)

    def share(kept: jax.Array, total: jax.Array) -> jax.Array:
        return kept / jnp.maximum(total, 1)

    at_end = [jnp.take_along_axis(x, last, axis=1)[:, 0] for x in (kept, total)]
    return Retention(
        share(*at_end), share(kept.sum(1, dtype=jnp.float32), total.sum(1, dtype=jnp.float32))
    )
