"""Antidiagonal block scores in plain XLA operations: blocked, the future costs nothing.

A tile of the attention map is `stride x stride`; its logit is one product of length
`stride · head_dim`. A loop over chunks of query tiles holds, inside it, a loop over the chunks of
key tiles they see. Each chunk leaves the sums of its exponentials over each block of keys,
relative to its own maximum, which the end of the row puts on one scale: the map of tiles is never
whole, and no chunk is computed twice.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Spec(NamedTuple):
    """What is known when tracing."""

    block_size: int
    stride: int
    causal: bool
    scale: float
    reverse: bool  # antidiagonals of the tiles; else their main diagonals


# Measured on a 2-core x86-64 CPU: the largest number of tiles a side whose logits, over batch and
# heads, number at most CHUNK_LOGITS.
CHUNK_LOGITS = 2**19
CHUNK_TILES = (256, 128, 64, 32)


def antidiagonal_block_scores_xla(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hk D"],
    lengths: Int[Array, " B"] | None,
    segment_ids: Int[Array, "B S"] | None,
    offset: Int[Array, ""] | int,
    spec: Spec,
) -> Float[Array, "B H NQ NK"]:
    """Checked arguments only; see `pallas_kernels.antidiagonal_block_scores`."""
    batch, num_queries, num_heads, _ = query.shape
    num_keys, num_kv_heads = key.shape[1:3]
    group = num_heads // num_kv_heads
    stride, block_size = spec.stride, spec.block_size
    per_block = block_size // stride
    lengths = jnp.full(batch, num_keys, jnp.int32) if lengths is None else lengths
    query_blocks, key_blocks = -(-num_queries // block_size), -(-num_keys // block_size)

    side = next(
        (n for n in CHUNK_TILES if batch * num_heads * n * n <= CHUNK_LOGITS), CHUNK_TILES[-1]
    )
    blocks = max(1, side // per_block)  # in a chunk, of queries and of keys
    query_chunks = -(-query_blocks // min(blocks, query_blocks))
    key_chunks = -(-key_blocks // min(blocks, key_blocks))
    rows = -(-query_blocks // query_chunks) * per_block
    columns = -(-key_blocks // key_chunks) * per_block

    q = _tiles(query, lengths - offset, stride)
    if spec.reverse:
        q = q[:, :, ::-1]
    q = _chunks(q, query_chunks, rows)
    q = q.reshape(query_chunks, batch, num_kv_heads, group * rows, -1)
    k = _chunks(_tiles(key, lengths, stride), key_chunks, columns).swapaxes(-1, -2)

    real_rows = -(-(lengths - offset) // stride)
    real_columns = -(-lengths // stride)
    segments = None
    if segment_ids is not None:
        segments = _tile_segments(segment_ids, lengths, stride, key_chunks * columns)
    last_chunk = -(-jnp.max(real_columns) // columns)

    def one_query_chunk(args):
        i, query = args
        row = i * rows + jnp.arange(rows)
        position = row + offset // stride

        def one_key_chunk(j, carry):
            sums, maxima = carry
            column = j * columns + jnp.arange(columns)
            seen = (column < real_columns[:, None])[:, None, :]
            if spec.causal:
                seen = seen & (column <= position[:, None])
            if segments is not None:
                of_rows = (x.at[:, position].get(mode="clip")[:, :, None] for x in segments)
                of_columns = (
                    jax.lax.dynamic_slice_in_dim(x, j * columns, columns, axis=1)[:, None, :]
                    for x in segments
                )
                (low_q, high_q), (low_k, high_k) = of_rows, of_columns
                seen = seen & (low_q <= high_k) & (low_k <= high_q)
            logits = jnp.einsum(
                "bkrd,bkdc->bkrc", query, k[j], preferred_element_type=jnp.float32
            ).reshape(batch, num_kv_heads, group, rows, columns)
            logits = jnp.where(seen[:, None, None], logits * (spec.scale / stride), -jnp.inf)
            maximum = logits.max(-1)
            # A row that sees nothing here has maximum -inf; subtract 0 from its logits instead.
            safe = jnp.where(maximum == -jnp.inf, 0.0, maximum)
            weights = jnp.exp(logits - safe[..., None])
            weights = weights.reshape(*weights.shape[:-1], -1, per_block).sum(-1)
            return sums.at[..., j, :].set(weights), maxima.at[..., j].set(maximum)

        shape = (batch, num_kv_heads, group, rows, key_chunks)
        start = (
            jnp.zeros((*shape, columns // per_block), jnp.float32),
            jnp.full(shape, -jnp.inf, jnp.float32),
        )
        end = last_chunk
        if spec.causal:
            end = jnp.minimum(end, position[-1] // columns + 1)
        end = jnp.where(row[0] < jnp.max(real_rows), end, 0)
        sums, maxima = jax.lax.fori_loop(0, end, one_key_chunk, start)

        maximum = maxima.max(-1, keepdims=True)
        sums = sums * jnp.exp(maxima - jnp.where(maximum == -jnp.inf, 0.0, maximum))[..., None]
        sums = sums.reshape(batch, num_heads, rows, -1)
        total = sums.sum(-1, keepdims=True)
        real = (row < real_rows[:, None])[:, None, :, None] & (total > 0)
        probabilities = jnp.where(real, sums / jnp.where(real, total, 1.0), 0.0)
        return probabilities.reshape(batch, num_heads, -1, per_block, sums.shape[-1]).sum(3)

    scores = jax.lax.map(one_query_chunk, (jnp.arange(query_chunks), q))
    scores = scores.transpose(1, 2, 0, 3, 4).reshape(batch, num_heads, -1, scores.shape[-1])
    return scores[:, :, :query_blocks, :key_blocks]


def _tiles(x, lengths, stride):
    """`[B,T,H,D]` to `[B,tiles,stride,H,D]`, zeros from each row's length on."""
    real = jnp.arange(x.shape[1]) < lengths[:, None]
    x = jnp.where(real[:, :, None, None], x, 0)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % stride), (0, 0), (0, 0)))
    return x.reshape(x.shape[0], -1, stride, *x.shape[2:])


def _chunks(x, count, size):
    """`[B,tiles,stride,H,D]` to `[count,B,H,size,stride·D]`, zero-padded."""
    batch, num_tiles, stride, heads, dim = x.shape
    x = jnp.pad(x, ((0, 0), (0, count * size - num_tiles), (0, 0), (0, 0), (0, 0)))
    x = x.reshape(batch, count, size, stride, heads, dim).transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(count, batch, heads, size, stride * dim)


def _tile_segments(segment_ids, lengths, stride, num_tiles):
    """Lowest and highest id among the real tokens of each tile, `[B, tiles]` each."""
    batch, time = segment_ids.shape
    ids = jnp.pad(segment_ids, ((0, 0), (0, num_tiles * stride - time)))
    ids = ids.reshape(batch, num_tiles, stride)
    real = (jnp.arange(num_tiles * stride) < lengths[:, None]).reshape(ids.shape)
    limits = jnp.iinfo(ids.dtype)
    return (
        jnp.where(real, ids, limits.max).min(-1),
        jnp.where(real, ids, limits.min).max(-1),
    )
