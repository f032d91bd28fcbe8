"""Which blocks of keys each block of queries visits, in the order it visits them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Visible(NamedTuple):
    """What the tokens' own rules leave of pairs of blocks, bool `[B or 1, NQ, NK]` each."""

    some: Bool[Array, "_ NQ NK"]  # a real query sees a key
    whole: Bool[Array, "_ NQ NK"]  # every real query sees every key


def visible_blocks(
    num_queries: int,
    num_keys: int,
    *,
    offset: jax.Array | int,
    block_size: int,
    causal: bool,
    lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
) -> Visible:
    """Arguments as `pallas_kernels.block_sparse_attention`; `offset` is the first query's position.

    Segments are told apart by their range of ids in a block: exact where ids are sorted, else some
    pairs of blocks count as visible that are not.
    """
    rows = jnp.arange(-(-num_queries // block_size))
    first = rows[:, None] * block_size + offset
    column = jnp.arange(-(-num_keys // block_size)) * block_size
    real = jnp.asarray(num_keys) if lengths is None else lengths[:, None, None]
    some = (first < real) & (column < real)
    if causal:
        # A real query sees no key beyond its own place, so no padding either.
        some = some & (column <= first)
        whole = some & (column < first)
    else:
        whole = some & (column + block_size <= real)
    some, whole = (x.reshape(-1, *x.shape[-2:]) for x in (some, whole))
    if segment_ids is not None:
        low, high = _segment_range(segment_ids, lengths, block_size)
        of_rows = jnp.minimum(rows + offset // block_size, low.shape[1] - 1)
        low_q, high_q = low[:, of_rows, None], high[:, of_rows, None]
        low_k, high_k = low[:, None, :], high[:, None, :]
        some = some & (low_q <= high_k) & (low_k <= high_q)
        whole = whole & (low_q == high_k) & (low_k == high_q)
    return Visible(some, whole)


def _segment_range(segment_ids, lengths, block_size):
    """Lowest and highest id among the real tokens of each block, `[B, NK]` each."""
    batch, time = segment_ids.shape
    count = -(-time // block_size)
    ids = jnp.pad(segment_ids, ((0, 0), (0, count * block_size - time)))
    ids = ids.reshape(batch, count, block_size)
    real = jnp.arange(count * block_size) < (time if lengths is None else lengths[:, None])
    real = jnp.broadcast_to(real, (batch, count * block_size)).reshape(ids.shape)
    limits = jnp.iinfo(ids.dtype)
    return (
        jnp.where(real, ids, limits.max).min(-1),
        jnp.where(real, ids, limits.min).max(-1),
    )


class Lists(NamedTuple):
    """For each block of queries the columns chosen: the whole ones, then the rest, both ascending.

    Beyond `total` stand the columns that are not chosen, so every entry can be read.
    """

    columns: Int[Array, "B H NQ NK"]
    whole: Int[Array, "B H NQ"]
    total: Int[Array, "B H NQ"]


def block_lists(block_mask: Bool[Array, "B H NQ NK"], visible: Visible) -> Lists:
    """The chosen blocks of which something is seen."""
    count = block_mask.shape[-1]
    chosen = block_mask & visible.some[:, None]
    whole = chosen & visible.whole[:, None]
    rank = jnp.where(whole, 0, jnp.where(chosen, 1, 2)) * count + jnp.arange(count)
    return Lists(
        columns=(jnp.sort(rank, axis=-1) % count).astype(jnp.int32),
        whole=whole.sum(-1, dtype=jnp.int32),
        total=chosen.sum(-1, dtype=jnp.int32),
    )
