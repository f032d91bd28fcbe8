"""Dense softmax attention, written to be read: what the other implementations are tested on."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def visibility(
    batch: int,
    num_queries: int,
    num_keys: int,
    *,
    causal: bool = True,
    q_offset: jax.Array | int | None = None,
    kv_lengths: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    sliding_window: int | None = None,
) -> jax.Array:
    """Which keys each query sees, bool `[batch, num_queries, num_keys]`; see `attention`."""
    first = jnp.zeros(batch, jnp.int32) if q_offset is None else jnp.asarray(q_offset, jnp.int32)
    query = jnp.broadcast_to(first, (batch,))[:, None, None] + jnp.arange(num_queries)[:, None]
    key = jnp.arange(num_keys)
    seen = jnp.ones((batch, num_queries, num_keys), bool)
    if causal:
        seen &= key <= query
    if sliding_window is not None:
        seen &= key > query - sliding_window
    if kv_lengths is not None:
        seen &= key < kv_lengths[:, None, None]
    if segment_ids is not None:
        kv_segment_ids = segment_ids if kv_segment_ids is None else kv_segment_ids
        seen &= segment_ids[:, :, None] == kv_segment_ids[:, None, :]
    return seen


def attention_reference(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S Hk D"],
    v: Float[Array, "B S Hk Dv"],
    *,
    causal: bool = True,
    q_offset: Int[Array, "*B"] | int | None = None,
    kv_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    scale: float | None = None,
) -> Float[Array, "B T H Dv"]:
    """`softmax(scale · q kᵀ) v` over the visible keys, all in float32, memory O(T·S) per head.

    Arguments, shapes and meaning are those of `pallas_kernels.attention`; the result has q's dtype.
    """
    batch, num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale

    k = jnp.repeat(k, num_heads // num_kv_heads, axis=2).astype(jnp.float32)
    v = jnp.repeat(v, num_heads // num_kv_heads, axis=2).astype(jnp.float32)
    logits = scale * jnp.einsum(
        "bthd,bshd->bhts", q.astype(jnp.float32), k, precision=jax.lax.Precision.HIGHEST
    )
    if logit_softcap is not None:
        logits = logit_softcap * jnp.tanh(logits / logit_softcap)

    seen = visibility(
        batch,
        num_queries,
        num_keys,
        causal=causal,
        q_offset=q_offset,
        kv_lengths=kv_lengths,
        segment_ids=segment_ids,
        kv_segment_ids=kv_segment_ids,
        sliding_window=sliding_window,
    )[:, None]
    # A finite stand-in for -inf keeps the softmax, and its gradient, of an empty row free of NaN;
    # the second `where` then makes that row's weights zero.
    weights = jax.nn.softmax(jnp.where(seen, logits, jnp.finfo(jnp.float32).min), axis=-1)
    weights = jnp.where(seen, weights, 0.0)
    out = jnp.einsum("bhts,bshd->bthd", weights, v, precision=jax.lax.Precision.HIGHEST)
    return out.astype(q.dtype)
