"""XAttention: score blocks, choose the fewest that matter, attend to those exactly."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_kernels.arguments import check_arrays, check_blocks, check_rows
from pallas_kernels.block_sparse import block_sparse_attention
from pallas_kernels.block_sparse.lists import visible_blocks
from pallas_kernels.xattention.scores import antidiagonal_block_scores
from pallas_kernels.xattention.selection import choose, per_head_threshold


def xattention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    threshold: ArrayLike,
    stride: int = 8,
    block_size: int = 128,
    causal: bool = True,
    lengths: jax.Array | np.ndarray | None = None,
    segment_ids: jax.Array | np.ndarray | None = None,
    query_offset: jax.Array | int | None = None,
    dense_tail_tokens: int = 0,
    scale: float | None = None,
    logit_softcap: float | None = None,
    pattern: str = "antidiagonal",
    return_density: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention over the blocks whose estimated probabilities reach a share `threshold`.

    `antidiagonal_block_scores`, then `select_blocks`, then `block_sparse_attention`; made for the
    prefill of long prompts, of one piece or in chunks (then key and value hold all tokens so far).
    In packed rows the sink of a block of queries is the first block it shares a segment with. The
    chosen blocks are constants to the gradient, which is that of the attention over them.

    XAttention (Xu et al., ICML 2025, arXiv:2503.16428).

    Args:
      query: `[B, T, H, D]`, floating, the last T of the S tokens of key.
      key: `[B, S, Hk, D]`; Hk divides H, query head h reads key head `h // (H // Hk)`.
      value: `[B, S, Hk, Dv]`.
      threshold: in [0, 1]; a number, `[H]`, or `[B, H]`. 0.9 in the paper; 1 is dense.
      stride: tokens on a side of a scored tile, divides block_size; 8 or 16 in the paper.
      block_size: tokens in a block; S - T is a multiple of it.
      causal: whether queries see only keys up to their own position.
      lengths: int32 `[B]`, tokens of key that are real, None for S.
      segment_ids: int32 `[B, S]`, by key position; equal ids see each other.
      query_offset: position of the first query among the keys, default S - T; may be traced.
      dense_tail_tokens: so many of each row's last real tokens attend to all blocks (rounded up to
        blocks of queries).
      scale: of the logits, default `D**-0.5`.
      logit_softcap: c in `c · tanh(logits / c)`; the scores are without it.
      pattern: as `antidiagonal_block_scores`.
      return_density: whether to return the density too.
      implementation: `"xla"` (anywhere), or None for the best that can run here.

    Returns:
      `[B, T, H, Dv]` in query's dtype; with `return_density` also float32 `[B, H]`, the share of
      the visible blocks that were chosen.

    Raises:
      ValueError: an argument has the wrong shape, type or range, or query or key hold values that
        are not finite (seen outside of `jax.jit` only).
      NotImplementedError: the named implementation cannot run here.
    """
    check_arrays(query, key, value)
    offset = check_blocks(query, key, block_size, query_offset)
    lengths, segment_ids = check_rows(key, lengths, segment_ids)
    shares = per_head_threshold(threshold, query.shape[0], query.shape[2])
    if dense_tail_tokens < 0:
        raise ValueError(f"dense_tail_tokens={dense_tail_tokens}: must be 0 or more")
    scores = antidiagonal_block_scores(
        query,
        key,
        block_size=block_size,
        stride=stride,
        causal=causal,
        lengths=lengths,
        segment_ids=segment_ids,
        query_offset=query_offset,
        scale=scale,
        pattern=pattern,
        implementation=implementation,
    )
    visible = visible_blocks(
        query.shape[1],
        key.shape[1],
        offset=offset,
        block_size=block_size,
        causal=causal,
        lengths=lengths,
        segment_ids=segment_ids,
    ).some[:, None]
    first = offset // block_size
    rows, columns = jnp.arange(scores.shape[2])[:, None], jnp.arange(scores.shape[3])
    forced = jnp.zeros_like(visible)
    if causal:
        sink = visible & (columns == visible.argmax(-1, keepdims=True))
        forced = sink | (visible & (columns == rows + first))
    block_mask = choose(scores, shares, allowed=visible, forced=forced)
    if dense_tail_tokens:
        real = jnp.asarray(key.shape[1]) if lengths is None else lengths[:, None, None, None]
        block_mask |= visible & ((rows + first + 1) * block_size > real - dense_tail_tokens)
    out = block_sparse_attention(
        query,
        key,
        value,
        block_mask,
        block_size=block_size,
        causal=causal,
        lengths=lengths,
        segment_ids=segment_ids,
        query_offset=query_offset,
        scale=scale,
        logit_softcap=logit_softcap,
        implementation=implementation,
    )
    if not return_density:
        return out
    chosen = jnp.sum(block_mask & visible, axis=(2, 3), dtype=jnp.float32)
    total = jnp.sum(visible, axis=(2, 3), dtype=jnp.float32)
    return out, chosen / jnp.maximum(total, 1.0)
