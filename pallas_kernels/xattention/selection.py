"""Which blocks of keys to keep for each block of queries."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_kernels.arguments import known


def select_blocks(
    scores: jax.Array | np.ndarray,
    threshold: ArrayLike,
    *,
    causal: bool = True,
    offset: int = 0,
    keep_sink: bool = True,
    keep_diagonal: bool = True,
) -> jax.Array:
    """The fewest blocks of keys that hold a share `threshold` of each row's score.

    Causal rows start with the first block and their own; then the blocks before it are added in
    falling order of score, the lower index first among equals, until the scores kept reach
    `threshold` times the row's total. Rows that are not causal start with nothing. No row is ever
    left empty: where nothing was chosen, the block of the highest score is. The choice depends on
    nothing but the row: not on chunks, batch or padding.

    XAttention (arXiv:2503.16428), section 2.2, with the forced blocks of its authors' code.

    Args:
      scores: float `[B, H, Q, K]`, not negative: see `antidiagonal_block_scores`.
      threshold: in [0, 1]; a number, `[H]`, or `[B, H]`. 0 keeps what rows start with, 1 every
        block (that is not in the future).
      causal: whether row i sees only the blocks up to `i + offset`.
      offset: position of the first row among the key blocks, counted in blocks.
      keep_sink: whether causal rows start with the first block.
      keep_diagonal: whether causal rows start with their own block.

    Returns:
      bool `[B, H, Q, K]`.

    Raises:
      ValueError: an argument has the wrong shape, type or range.
    """
    scores = jnp.asarray(scores)
    if scores.ndim != 4:
        raise ValueError(
            f"scores has shape {scores.shape}: must be [batch, heads, query blocks, key blocks]"
        )
    num_rows, num_columns = scores.shape[2:]
    if causal and not 0 <= offset <= num_columns - num_rows:
        raise ValueError(
            f"offset={offset}: for {num_rows} query and {num_columns} key blocks it must be "
            f"between 0 and {num_columns - num_rows}; it is counted in blocks, not tokens"
        )
    threshold = per_head_threshold(threshold, *scores.shape[:2])
    rows, columns = jnp.arange(num_rows)[:, None], jnp.arange(num_columns)
    if not causal:
        nothing = jnp.zeros((num_rows, num_columns), bool)
        return choose(scores, threshold, allowed=~nothing, forced=nothing)
    forced = jnp.zeros((num_rows, num_columns), bool)
    if keep_sink:
        forced |= columns == 0
    if keep_diagonal:
        forced |= columns == rows + offset
    return choose(scores, threshold, allowed=columns <= rows + offset, forced=forced)


def choose(
    scores: jax.Array, threshold: jax.Array, *, allowed: jax.Array, forced: jax.Array
) -> jax.Array:
    """The rule of `select_blocks`, given which blocks may be chosen and which must be.

    `allowed` and `forced` (part of it) broadcast to `scores`, `threshold` is `[B|1, H|1]`.
    """
    scores = scores.astype(jnp.float32)
    share = threshold.astype(jnp.float32)[..., None]
    free = allowed & ~forced
    need = share * jnp.sum(scores, axis=-1, where=allowed)
    start = jnp.sum(scores, axis=-1, where=forced)

    # How many are added in falling order: each while what was gathered before it is too little.
    ranked = -jnp.sort(jnp.where(free, -scores, jnp.inf), axis=-1)
    gathered = start[..., None] + jnp.cumsum(jnp.maximum(ranked, 0.0), axis=-1)
    before = jnp.concatenate([start[..., None], gathered[..., :-1]], axis=-1)
    count = jnp.sum((before < need[..., None]) & (ranked > -jnp.inf), axis=-1, keepdims=True)

    # Those above the last one added, and from the left as many of its equals as are still missing.
    lowest = jnp.take_along_axis(ranked, jnp.maximum(count - 1, 0), axis=-1)
    above, equal = free & (scores > lowest), free & (scores == lowest)
    missing = count - jnp.sum(above, axis=-1, keepdims=True)
    added = above | (equal & (jnp.cumsum(equal, axis=-1) <= missing))
    chosen = jnp.where(share[..., None] >= 1, allowed, forced | (added & (count > 0)))

    best = jnp.argmax(jnp.where(allowed, scores, -jnp.inf), axis=-1, keepdims=True)
    best = allowed & (jnp.arange(scores.shape[-1]) == best)
    return chosen | (best & ~chosen.any(axis=-1, keepdims=True))


def per_head_threshold(threshold: ArrayLike, batch: int, num_heads: int) -> jax.Array:
    """Checks a threshold and gives it two dimensions, `[B or 1, H or 1]`, float32."""
    if known(threshold):
        values = np.asarray(threshold)
        if not (np.isfinite(values).all() and (values >= 0).all() and (values <= 1).all()):
            raise ValueError(
                f"threshold={threshold}: must be between 0 (only the blocks always kept) and 1 "
                "(dense)"
            )
    threshold = jnp.asarray(threshold, jnp.float32)
    if threshold.shape not in ((), (num_heads,), (batch, num_heads)):
        raise ValueError(
            f"threshold has shape {threshold.shape}: must be a number, one a head ({num_heads},), "
            f"or one a row and head ({batch}, {num_heads}); of a [layers, heads] table pass the "
            "layer's row"
        )
    return threshold.reshape((1,) * (2 - threshold.ndim) + threshold.shape)
