"""How much attention each block of queries would pay each block of keys, estimated."""

import jax
import numpy as np

from pallas_kernels.arguments import (
    check_arrays,
    check_blocks,
    check_finite,
    check_implementation,
    check_rows,
)
from pallas_kernels.xattention.xla import Spec, antidiagonal_block_scores_xla

PATTERNS = ("antidiagonal", "diagonal")


def antidiagonal_block_scores(
    query: jax.Array,
    key: jax.Array,
    *,
    block_size: int = 128,
    stride: int = 8,
    causal: bool = True,
    lengths: jax.Array | np.ndarray | None = None,
    segment_ids: jax.Array | np.ndarray | None = None,
    query_offset: jax.Array | int | None = None,
    scale: float | None = None,
    pattern: str = "antidiagonal",
    implementation: str | None = None,
) -> jax.Array:
    """Estimated probability of each block of keys, summed over tiles of a block of queries.

    The attention map is cut in tiles of `stride x stride`; a tile's logit is the mean of the
    logits on its antidiagonal: with I and J counting tiles and r from 0 to `stride - 1`,
    `scale / stride · Σ_r q[stride·I + stride - 1 - r] · k[stride·J + r]`. A softmax over the tiles
    that each row of tiles sees, its own included, and sums over the `(block_size / stride)²` tiles
    of a block give the score: a full block of queries sums to `block_size / stride`. This costs
    `1 / stride` of `q kᵀ`.

    Tokens beyond a row's length are zeros in a tile that has real ones, and tiles of nothing else
    are neither rows nor columns. Tiles whose ranges of segments are apart do not see each other.
    No gradient passes.

    XAttention (arXiv:2503.16428), section 2.1 and algorithm 1; scale as in its authors' code.

    Args:
      query: `[B, T, H, D]`, the last T of the S tokens of key.
      key: `[B, S, Hk, D]`; Hk divides H, query head h reads key head `h // (H // Hk)`.
      block_size: tokens in a block; S - T is a multiple of it.
      stride: tokens on a side of a tile; divides block_size. 8 or 16 in the paper.
      causal: whether tiles see only those up to their own position.
      lengths: int32 `[B]`, tokens of key that are real, None for S.
      segment_ids: int32 `[B, S]`, by key position.
      query_offset: as `block_sparse_attention`.
      scale: of the logits, default `D**-0.5`.
      pattern: `"antidiagonal"`, or `"diagonal"` (of the tiles), the paper's ablation.
      implementation: `"xla"` (anywhere), or None for the best that can run here.

    Returns:
      float32 `[B, H, ceil(T / block_size), ceil(S / block_size)]`.

    Raises:
      ValueError: an argument has the wrong shape, type or range, or query or key hold values that
        are not finite (seen outside of `jax.jit` only).
      NotImplementedError: the named implementation cannot run here.
    """
    check_implementation(implementation)
    check_arrays(query, key)
    offset = check_blocks(query, key, block_size, query_offset)
    check_stride(block_size, stride)
    lengths, segment_ids = check_rows(key, lengths, segment_ids)
    if pattern not in PATTERNS:
        raise ValueError(f"pattern={pattern!r}: must be one of {PATTERNS}")
    check_finite(query=query, key=key)
    spec = Spec(
        block_size=int(block_size),
        stride=int(stride),
        causal=bool(causal),
        scale=query.shape[3] ** -0.5 if scale is None else scale,
        reverse=pattern == "antidiagonal",
    )
    query, key = jax.lax.stop_gradient((query, key))
    return antidiagonal_block_scores_xla(query, key, lengths, segment_ids, offset, spec)


def check_stride(block_size: int, stride: int) -> None:
    """A positive stride that divides the block size."""
    if not isinstance(stride, int | np.integer) or stride < 1 or block_size % stride:
        divisors = [n for n in (4, 8, 16, 32, 64) if block_size % n == 0]
        raise ValueError(
            f"stride={stride!r}: must be a positive int that divides block_size={block_size}, "
            f"such as {divisors or [1, block_size]}"
        )
