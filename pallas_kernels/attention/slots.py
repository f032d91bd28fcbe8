"""Attention of a block of tokens to sets of slots, each with a mask of its own: caches in use.

A bounded cache is several sets (a ring of recent tokens, what is kept for good, the block itself).
One softmax runs over all of them, and none is moved to be read.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention.blocked import safe_maximum

FEW_ROWS = 64  # tokens x heads; up to here a product per head costs more than it saves
CHUNK = 512  # slots read at a time of a set that may be far from full


class Slots(NamedTuple):
    """Keys and values `[B, S, Hk, D]`, and which query sees which: `visible`, bool `[B, T, S]`.

    `filled`, an int32 scalar or None: no query sees a slot at or beyond it. Of a set much larger
    than that, the rest is not read.
    """

    key: jax.Array
    value: jax.Array
    visible: jax.Array
    filled: jax.Array | None = None


class _Sums(NamedTuple):
    """A softmax under way: float32 `[B, T, H, D]`, and `[B, T, H]` twice."""

    output: jax.Array
    maximum: jax.Array
    total: jax.Array


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
        see some slot; one that sees none gives NaN.
      scale: of the logits; default `D ** -0.5`.
      logit_softcap: as in `attention`.

    Returns:
      `[B, T, H, D]` in query's dtype; logits, softmax and sums are float32. Memory is that of the
      logits, `[B, T, H, slots]`, of the largest set, of which `CHUNK` at a time where it says what
      is filled.
    """
    batch, block, heads, dim = query.shape
    scaled = query * jnp.asarray(dim**-0.5 if scale is None else scale, query.dtype)

    def add(sums: _Sums, slots: Slots) -> _Sums:
        logits = _products(scaled, slots.key)
        if logit_softcap is not None:
            logits = logit_softcap * jnp.tanh(logits / logit_softcap)
        logits = jnp.where(slots.visible[:, :, None], logits, -jnp.inf)
        maximum = jnp.maximum(sums.maximum, logits.max(-1))
        safe = safe_maximum(maximum)
        shrink = jnp.exp(sums.maximum - safe)
        weights = jnp.exp(logits - safe[..., None])
        return _Sums(
            sums.output * shrink[..., None] + _mix(weights, slots.value),
            maximum,
            sums.total * shrink + weights.sum(-1),
        )

    sums = _Sums(
        jnp.zeros((batch, block, heads, sets[0].value.shape[-1]), jnp.float32),
        jnp.full((batch, block, heads), -jnp.inf, jnp.float32),
        jnp.zeros((batch, block, heads), jnp.float32),
    )
    for slots in sets:
        if slots.filled is None or slots.key.shape[1] <= CHUNK:
            sums = add(sums, slots)
            continue
        chunks = -(-slots.filled // CHUNK)
        sums = jax.lax.fori_loop(0, chunks, lambda i, x, s=slots: add(x, _chunk(s, i)), sums)
    return (sums.output / sums.total[..., None]).astype(query.dtype)


def _chunk(slots: Slots, index: jax.Array) -> Slots:
    """Slots `index * CHUNK …` of a set; the last chunk does not show those before it again."""
    start = index * CHUNK
    first = jnp.minimum(start, slots.key.shape[1] - CHUNK)
    key, value = (
        jax.lax.dynamic_slice_in_dim(x, first, CHUNK, axis=1) for x in (slots.key, slots.value)
    )
    visible = jax.lax.dynamic_slice_in_dim(slots.visible, first, CHUNK, axis=2)
    return Slots(key, value, visible & (first + jnp.arange(CHUNK) >= start))


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
