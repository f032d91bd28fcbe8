"""Attention of a block of tokens to sets of slots, each with a mask of its own: caches in use.

A bounded cache is several sets (a ring of recent tokens, what is kept for good, the block itself).
One softmax runs over all of them, and none is moved to be read.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

FEW_ROWS = 64  # tokens x heads; up to here a product per head costs more than it saves


class Slots(NamedTuple):
    """Keys and values `[B, S, Hk, D]`, and which query sees which: `visible`, bool `[B, T, S]`."""

    key: jax.Array
    value: jax.Array
    visible: jax.Array


def attention_over_slots(
    query: jax.Array,
    sets: Sequence[Slots],
    *,
    scale: float | None = None,
    logit_softcap: float | None = None,
) -> jax.Array:
    """Softmax attention of each query to the visible slots of all sets together.

    Args:
      query: `[B, T, H, D]`.
      sets: each with its own number of slots and of key heads, which divides H. Every query must
        see at least one slot of the first set that it can see at all; one that sees none gives NaN.
      scale: of the logits; default `D ** -0.5`.
      logit_softcap: as in `attention`.

    Returns:
      `[B, T, H, D]` in query's dtype; logits, softmax and sums are float32. Memory is that of the
      logits, `[B, T, H, slots of all sets]`.
    """
    dim = query.shape[-1]
    scaled = query * jnp.asarray(dim**-0.5 if scale is None else scale, query.dtype)
    logits = []
    for slots in sets:
        products = _products(scaled, slots.key)
        if logit_softcap is not None:
            products = logit_softcap * jnp.tanh(products / logit_softcap)
        logits.append(jnp.where(slots.visible[:, :, None], products, -jnp.inf))
    maximum = jnp.max(jnp.stack([part.max(-1) for part in logits]), axis=0)[..., None]
    weights = [jnp.exp(part - maximum) for part in logits]
    total = sum(part.sum(-1) for part in weights)
    output = sum(_mix(part, slots.value) for part, slots in zip(weights, sets, strict=True))
    return (output / total[..., None]).astype(query.dtype)


def _products(query: jax.Array, key: jax.Array) -> jax.Array:
    """Logits, float32 `[B, T, H, S]`."""
    batch, block, heads, dim = query.shape
    slots, kv_heads = key.shape[1:3]
    key = key.astype(query.dtype)
    grouped = query.reshape(batch, block, kv_heads, heads // kv_heads, dim)
    if block * heads <= FEW_ROWS:
        # Queries stand block-diagonally, zero outside their own key head, so that the slots are
        # read by one plain product; a product per head would transpose them first.
        own = jnp.eye(kv_heads, dtype=query.dtype)[:, None, :, None]
        rows = (grouped[:, :, :, :, None] * own).reshape(batch, block * heads, kv_heads * dim)
        products = jnp.einsum(
            "brw,bsw->brs",
            rows,
            key.reshape(batch, slots, kv_heads * dim),
            preferred_element_type=jnp.float32,
        )
    else:
        products = jnp.einsum("btkgd,bskd->btkgs", grouped, key, preferred_element_type=jnp.float32)
    return products.reshape(batch, block, heads, slots)


def _mix(weights: jax.Array, value: jax.Array) -> jax.Array:
    """Sums of values, float32 `[B, T, H, D]`, by `weights [B, T, H, S]`."""
    batch, block, heads, slots = weights.shape
    kv_heads, dim = value.shape[2:]
    group = heads // kv_heads
    weights = weights.astype(value.dtype)
    if block * heads <= FEW_ROWS:
        mixed = jnp.einsum(
            "brs,bsw->brw",
            weights.reshape(batch, block * heads, slots),
            value.reshape(batch, slots, kv_heads * dim),
            preferred_element_type=jnp.float32,
        ).reshape(batch, block, kv_heads, group, kv_heads, dim)
        mixed = jnp.einsum("btkgkd->btkgd", mixed)
    else:
        mixed = jnp.einsum(
            "btkgs,bskd->btkgd",
            weights.reshape(batch, block, kv_heads, group, slots),
            value,
            preferred_element_type=jnp.float32,
        )
    return mixed.reshape(batch, block, heads, dim)
