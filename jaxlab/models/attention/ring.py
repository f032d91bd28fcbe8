"""A ring of the most recent tokens: slot `position % size` of each row."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def ring_positions(lengths: jax.Array, size: int) -> jax.Array:
    """The position in each slot, int32 `[B, size]`, of rows that hold `lengths [B]` tokens.

    Negative where nothing was written. After tokens were taken back, slots that those had
    overwritten are wrong: they are the oldest, so a ring with `p` slots to spare can go back `p`.
    """
    last = lengths[:, None] - 1
    return last - (last - jnp.arange(size, dtype=jnp.int32)) % size


def write_ring(
    ring: jax.Array, block: jax.Array, lengths: jax.Array, num_tokens: jax.Array
) -> jax.Array:
    """Write a block's first `num_tokens [B]` tokens behind the `lengths [B]` that each row holds.

    `ring [B, size, …]`, `block [B, T, …]`. Of a block longer than the ring its last tokens stay.
    """
    block = block.astype(ring.dtype)
    size = ring.shape[1]
    token = jnp.arange(block.shape[1], dtype=jnp.int32)
    stays = (token < num_tokens[:, None]) & (token >= num_tokens[:, None] - size)
    slot = jnp.where(stays, (lengths[:, None] + token) % size, size)  # size: out of bounds, dropped
    rows = jnp.arange(ring.shape[0])[:, None]
    return ring.at[rows, slot].set(block, mode="drop", unique_indices=False)


def read_ring(
    ring: jax.Array, block: jax.Array, lengths: jax.Array, positions: jax.Array
) -> jax.Array:
    """`[B, N, …]` at `positions [B, N]`, from the block or, of what came before it, the ring.

    The ring, `[B, size, …]`, holds what came before the block `[B, T, …]`, which stands at
    `lengths [B]`; zeros at negative positions.
    """
    rows = jnp.arange(ring.shape[0])[:, None]
    size, block_length = ring.shape[1], block.shape[1]
    old = ring[rows, positions % size].astype(block.dtype)
    new = block[rows, jnp.clip(positions - lengths[:, None], 0, block_length - 1)]

    def spread(mask: jax.Array) -> jax.Array:
        return mask.reshape(*mask.shape, *(1,) * (block.ndim - 2))

    value = jnp.where(spread(positions >= lengths[:, None]), new, old)
    return jnp.where(spread(positions >= 0), value, 0)
