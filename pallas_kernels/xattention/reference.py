"""XAttention's scores, selection and calibration, written to be read; the rest is tested on this.

Xu, Xiao, Huang, Guo, Han, "XAttention: Block Sparse Attention with Antidiagonal Scoring", ICML
2025, arXiv:2503.16428.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


def antidiagonal_block_scores_reference(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hk D"],
    *,
    block_size: int = 128,
    stride: int = 8,
    causal: bool = True,
    lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    pattern: str = "antidiagonal",
) -> Float[Array, "B H NQ NK"]:
    """`antidiagonal_block_scores` with the whole map of tiles in memory, all in float32."""
    batch, num_queries, num_heads, head_dim = query.shape
    num_keys, num_kv_heads = key.shape[1:3]
    offset = num_keys - num_queries
    scale = head_dim**-0.5 if scale is None else scale
    lengths = jnp.full(batch, num_keys) if lengths is None else lengths

    def tiles(x, first):
        """`[B,T,H,D]` to `[B,H,tiles,stride,D]`, zeros from each row's length on."""
        real = first + jnp.arange(x.shape[1]) < lengths[:, None]
        x = jnp.where(real[:, :, None, None], x.astype(jnp.float32), 0.0)
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block_size), (0, 0), (0, 0)))
        return x.reshape(batch, -1, stride, *x.shape[2:]).transpose(0, 3, 1, 2, 4)

    q, k = tiles(query, offset), tiles(key, 0)
    k = jnp.repeat(k, num_heads // num_kv_heads, axis=1)
    if pattern == "antidiagonal":
        q = q[..., ::-1, :]
    logits = jnp.einsum("bhird,bhjrd->bhij", q, k, precision=jax.lax.Precision.HIGHEST)
    logits = logits * (scale / stride)

    rows, columns = jnp.arange(q.shape[2]), jnp.arange(k.shape[2])
    num_tiles = -(-lengths // stride)
    real_rows = rows < -(-(lengths - offset) // stride)[:, None]
    seen = (columns < num_tiles[:, None])[:, None, :] & real_rows[:, :, None]
    if causal:
        seen &= columns <= rows[:, None] + offset // stride
    if segment_ids is not None:
        low, high = _tile_segments(segment_ids, lengths, stride, k.shape[2])
        low_q, high_q = (
            jnp.pad(x[:, offset // stride :], ((0, 0), (0, q.shape[2])))[:, : q.shape[2]]
            for x in (low, high)
        )
        seen &= (low_q[:, :, None] <= high[:, None, :]) & (low[:, None, :] <= high_q[:, :, None])
    seen = seen[:, None]
    logits = jnp.where(seen, logits, jnp.finfo(jnp.float32).min)
    probabilities = jnp.where(seen, jax.nn.softmax(logits, axis=-1), 0.0)
    per_block = block_size // stride
    shape = (batch, num_heads, len(rows) // per_block, per_block, -1, per_block)
    return probabilities.reshape(shape).sum((3, 5))


def _tile_segments(segment_ids, lengths, stride, count):
    """Lowest and highest id of the real tokens of each tile, `[B, tiles]`."""
    ids = jnp.pad(segment_ids, ((0, 0), (0, count * stride - segment_ids.shape[1])))
    real = (jnp.arange(ids.shape[1]) < lengths[:, None]).reshape(ids.shape[0], count, stride)
    ids = ids.reshape(ids.shape[0], count, stride)
    big = jnp.iinfo(ids.dtype).max
    return jnp.where(real, ids, big).min(-1), jnp.where(real, ids, -big).max(-1)


def select_blocks_reference(
    scores: Float[np.ndarray, "B H NQ NK"],
    threshold: float | Float[np.ndarray, " H"],
    *,
    causal: bool = True,
    offset: int = 0,
) -> Bool[np.ndarray, "B H NQ NK"]:
    """`select_blocks` one row at a time, as it is defined, in float64."""
    scores = np.asarray(scores, np.float64)
    threshold = np.broadcast_to(threshold, scores.shape[1])
    chosen = np.zeros(scores.shape, bool)
    for b, h, i in np.ndindex(scores.shape[:3]):
        row, picked = scores[b, h, i], chosen[b, h, i]
        diagonal = min(i + offset, len(row) - 1) if causal else len(row) - 1
        if threshold[h] >= 1:
            picked[: diagonal + 1] = True
            continue
        if causal:
            picked[[0, diagonal]] = True
        gathered, need = row[picked].sum(), threshold[h] * row.sum()
        for k in np.argsort(-row[: diagonal + 1], kind="stable"):
            if gathered >= need:
                break
            if not picked[k]:
                picked[k] = True
                gathered += row[k]
        if not picked.any():
            picked[row.argmax()] = True
    return chosen
