"""Attention of a few new tokens to a cache and to each other: decoding.

`attention` needs the new keys in the cache already. Under XLA on CPU that costs more than the
attention: the write is fused once into the cache and once into its reader, and the whole cache is
copied for each. Here the cache is only read, in the layout that it has; write the block afterwards.
"""

import jax
import jax.numpy as jnp

MAX_ROWS = 64  # new tokens x heads; more of them make `attention` the faster way


def cached_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cached_k: jax.Array,
    cached_v: jax.Array,
    lengths: jax.Array,
    *,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Causal attention of a block of tokens that stands at `lengths[b]` of row b.

    Equals `attention` with the block written into the cache from slot `lengths[b]` on, and
    `q_offset` and `kv_lengths` accordingly.

    Args:
      q: `[B, T, H, D]`, the block's queries.
      k, v: `[B, T, Hk, D]`, the block's keys and values; Hk divides H.
      cached_k, cached_v: `[B, S, Hk, D]`, of which row b's first `lengths[b]` slots are read.
      lengths: int32 `[B]`.
      sliding_window, logit_softcap, scale: as in `attention`.

    Returns:
      `[B, T, H, D]` in q's dtype.
    """
    batch, block, heads, dim = q.shape
    slots, kv_heads = cached_k.shape[1:3]
    group = heads // kv_heads
    width = kv_heads * dim

    def logits_of(products: jax.Array) -> jax.Array:
        products = products.reshape(batch, block, heads, -1)
        if logit_softcap is None:
            return products
        return logit_softcap * jnp.tanh(products * (1.0 / logit_softcap))

    # Queries stand block-diagonally, zero outside their own key head, so that the cache is read by
    # one plain matrix product; a product per head would transpose it first.
    scaled = q * jnp.asarray(dim**-0.5 if scale is None else scale, q.dtype)
    own = jnp.eye(kv_heads, dtype=q.dtype)[:, None, :, None]
    rows = scaled.reshape(batch, block, kv_heads, group, 1, dim) * own
    rows = rows.reshape(batch, block * heads, width)

    past = logits_of(
        jnp.einsum(
            "brw,bsw->brs",
            rows,
            cached_k.reshape(batch, slots, width),
            preferred_element_type=jnp.float32,
        )
    )
    new = logits_of(
        jnp.sum(rows[:, :, None] * k.reshape(batch, 1, block, width), axis=-1, dtype=jnp.float32)
    )
    slot, token = jnp.arange(slots), jnp.arange(block)
    seen = slot < lengths[:, None, None]
    causal = token <= token[:, None]
    if sliding_window is not None:
        seen &= slot > lengths[:, None, None] + token[:, None] - sliding_window
        causal &= token > token[:, None] - sliding_window
    past = jnp.where(seen[:, :, None], past, -jnp.inf)
    new = jnp.where(causal[:, None], new, -jnp.inf)

    # Every token sees itself, so the maximum is finite.
    maximum = jnp.maximum(past.max(-1, keepdims=True), new.max(-1, keepdims=True))
    past, new = jnp.exp(past - maximum), jnp.exp(new - maximum)
    total = past.sum(-1) + new.sum(-1)
    mixed = jnp.einsum(
        "brs,bsw->brw",
        past.reshape(batch, -1, slots).astype(cached_v.dtype),
        cached_v.reshape(batch, slots, width),
        preferred_element_type=jnp.float32,
    ).reshape(batch, block, kv_heads, group, kv_heads, dim)
    from_past = jnp.einsum("btkgkd->btkgd", mixed).reshape(batch, block, heads, dim)
    weights = new.reshape(batch, block, kv_heads, group, block, 1)
    values = v.astype(jnp.float32).transpose(0, 2, 1, 3)[:, None, :, None]
    from_new = jnp.sum(weights * values, axis=-2).reshape(batch, block, heads, dim)
    return ((from_past + from_new) / total[..., None]).astype(q.dtype)
