"""Exact softmax attention over chosen blocks of keys, in time proportional to their number."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arguments import (
    check_arrays,
    check_blocks,
    check_implementation,
    check_rows,
)
from pallas_kernels.block_sparse.reference import block_sparse_attention_reference
from pallas_kernels.block_sparse.xla import Spec, block_sparse_attention_xla

__all__ = ["block_sparse_attention", "block_sparse_attention_reference"]


def block_sparse_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    block_mask: jax.Array | np.ndarray,
    *,
    block_size: int,
    causal: bool = True,
    lengths: jax.Array | np.ndarray | None = None,
    segment_ids: jax.Array | np.ndarray | None = None,
    query_offset: jax.Array | int | None = None,
    scale: float | None = None,
    logit_softcap: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Softmax attention of each block of queries over the blocks of keys chosen for it.

    Queries are the last T of the S tokens of the keys' sequence, or stand where `query_offset`
    says: query i at position `p = S - T + i`. It sees key j if
    `block_mask[b, h, i // block_size, j // block_size]` and, of what applies, `j <= p` (causal),
    `p < lengths[b]` and `j < lengths[b]`, `segment_ids[b, p] == segment_ids[b, j]`. A query that
    sees nothing returns zeros and passes no gradient. Blocks that are not chosen, or of which
    nothing is seen, cost nothing, forward or backward; none that is chosen is ever dropped. The
    mask is a constant: no gradient to it.

    Under `jax.vmap` the mapped rows run one after another; prefer the batch dimension.

    Args:
      query: `[B, T, H, D]`, floating.
      key: `[B, S, Hk, D]`, S at least T; Hk divides H, query head h reads key head
        `h // (H // Hk)`.
      value: `[B, S, Hk, Dv]`.
      block_mask: bool `[B, H, ceil(T / block_size), ceil(S / block_size)]`, each query head's own.
      block_size: tokens in a block, of queries and of keys; S - T is a multiple of it.
      causal: whether queries see only keys up to their own position.
      lengths: int32 `[B]`, tokens of key that are real, None for S; the rest is padding.
      segment_ids: int32 `[B, S]`, by key position; equal ids see each other.
      query_offset: position of the first query among the keys, in place of S - T: an integer, which
        may be traced, a multiple of block_size. For a cache of S slots that is not full.
      scale: of the logits, default `D**-0.5`.
      logit_softcap: c in `c · tanh(logits / c)`, applied after the scale.
      implementation: `"xla"` (anywhere), or None for the best that can run here.

    Returns:
      `[B, T, H, Dv]` in query's dtype. Softmax statistics are float32.

    Raises:
      ValueError: an argument has the wrong shape, type or range.
      NotImplementedError: the named implementation cannot run here.
    """
    check_implementation(implementation)
    check_arrays(query, key, value)
    offset = check_blocks(query, key, block_size, query_offset)
    lengths, segment_ids = check_rows(key, lengths, segment_ids)
    blocks = (-(-query.shape[1] // block_size), -(-key.shape[1] // block_size))
    expected = (query.shape[0], query.shape[2], *blocks)
    if jnp.shape(block_mask) != expected:
        raise ValueError(
            f"block_mask has shape {jnp.shape(block_mask)}: must be {expected}, "
            "[batch, query heads, query blocks, key blocks]"
        )
    if jnp.result_type(block_mask) != jnp.bool_:
        raise ValueError(f"block_mask has dtype {jnp.result_type(block_mask)}: must be bool")
    if logit_softcap is not None and not logit_softcap > 0:
        raise ValueError(f"logit_softcap={logit_softcap}: must be positive, or None for no cap")
    spec = Spec(
        block_size=int(block_size),
        causal=bool(causal),
        scale=query.shape[3] ** -0.5 if scale is None else scale,
        logit_softcap=logit_softcap,
    )
    block_mask = jnp.asarray(block_mask)
    return block_sparse_attention_xla(
        query, key, value, block_mask, lengths, segment_ids, offset, spec
    )
