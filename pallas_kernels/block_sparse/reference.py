"""Block-sparse attention with a dense mask, written to be read: what is fast is tested on this."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def visible_tokens(
    block_mask: Bool[Array, "B H NQ NK"],
    num_queries: int,
    num_keys: int,
    *,
    block_size: int,
    causal: bool = True,
    lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
) -> Bool[Array, "B H T S"]:
    """Which keys each query sees; arguments as `pallas_kernels.block_sparse_attention`."""
    seen = jnp.repeat(jnp.repeat(block_mask, block_size, axis=2), block_size, axis=3)
    seen = seen[:, :, :num_queries, :num_keys]
    offset = num_keys - num_queries
    query, key = offset + jnp.arange(num_queries), jnp.arange(num_keys)
    if causal:
        seen &= key <= query[:, None]
    if lengths is not None:
        row = lengths[:, None, None, None]
        seen &= (key < row) & (query[:, None] < row)
    if segment_ids is not None:
        seen &= (segment_ids[:, offset:, None] == segment_ids[:, None, :])[:, None]
    return seen


def block_sparse_attention_reference(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hk D"],
    value: Float[Array, "B S Hk Dv"],
    block_mask: Bool[Array, "B H NQ NK"],
    *,
    block_size: int,
    causal: bool = True,
    lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    logit_softcap: float | None = None,
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
    """`block_sparse_attention`, and the log-sum-exp of the seen logits, +inf where none is.

    All in float32, memory O(T·S) per head; the output has the dtype of `query`.
    """
    group = query.shape[2] // key.shape[2]
    scale = query.shape[3] ** -0.5 if scale is None else scale
    exact = jax.lax.Precision.HIGHEST
    k = jnp.repeat(key, group, axis=2).astype(jnp.float32)
    v = jnp.repeat(value, group, axis=2).astype(jnp.float32)
    logits = scale * jnp.einsum("bthd,bshd->bhts", query.astype(jnp.float32), k, precision=exact)
    if logit_softcap is not None:
        logits = logit_softcap * jnp.tanh(logits / logit_softcap)
    seen = visible_tokens(
        block_mask,
        query.shape[1],
        key.shape[1],
        block_size=block_size,
        causal=causal,
        lengths=lengths,
        segment_ids=segment_ids,
    )
    # A finite stand-in for -inf keeps an empty row, and its gradient, free of NaN.
    logits = jnp.where(seen, logits, jnp.finfo(jnp.float32).min)
    weights = jnp.where(seen, jax.nn.softmax(logits, axis=-1), 0.0)
    out = jnp.einsum("bhts,bshd->bthd", weights, v, precision=exact)
    log_sum_exp = jnp.where(seen.any(-1), jax.nn.logsumexp(logits, axis=-1), jnp.inf)
    return out.astype(query.dtype), log_sum_exp
