"""Attention in plain XLA operations: blocked, fast on CPU, correct everywhere.

Two ways through, chosen by shape alone:

* *narrow*: few queries (decoding). One product with the whole cache, read in the layout it has.
* *blocked*: the rest. Flash attention (Dao et al., 2022, arXiv:2205.14135): a loop over blocks of
  queries, inside it a loop over the blocks of keys they see, with running float32 softmax
  statistics. Blocks outside the causal triangle, the window, the lengths, or the segments are not
  in the loop's range, so they cost nothing, whether the offsets are known when tracing or not.

The backward pass is blocked and recomputes the probabilities from the saved log-sum-exp.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.attention.blocked import (
    BLOCK_LOGITS,
    BLOCK_SIZES,
    Blocks,
    cap_logits,
    cut_keys,
    cut_queries,
    dot,
    join_keys,
    join_queries,
    log_sum_exp,
    logit_gradient,
    pad_axis,
    reciprocal,
    row_delta,
    safe_maximum,
)


class Spec(NamedTuple):
    """What is known when tracing."""

    causal: bool
    sliding_window: int | None
    logit_softcap: float | None
    scale: float


class Bounds(NamedTuple):
    """What may be an array: see `pallas_kernels.attention`. `q_offset` is `[B]` or None for 0."""

    q_offset: jax.Array | None = None
    kv_lengths: jax.Array | None = None
    segment_ids: jax.Array | None = None
    kv_segment_ids: jax.Array | None = None


NARROW_ROWS = 64  # queries x heads up to which the narrow way is taken
NARROW_CHUNK = 512  # keys it reads at a time


def attention_xla(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S Hk D"],
    v: Float[Array, "B S Hk Dv"],
    spec: Spec,
    bounds: Bounds,
) -> Float[Array, "B T H Dv"]:
    """`[B,T,H,D]` queries on `[B,S,Hk,D]` keys and values; checked arguments only."""
    return _attention(q, k, v, bounds, spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q, k, v, bounds, spec):
    return _forward(q, k, v, bounds, spec)[0]


def _attention_fwd(q, k, v, bounds, spec):
    out, logsumexp = _forward(q, k, v, bounds, spec)
    return out, (q, k, v, bounds, out, logsumexp)


def _attention_bwd(spec, saved, d_out):
    q, k, v, bounds, out, logsumexp = saved
    dq, dk, dv = _blocked_backward(q, k, v, bounds, spec, out, logsumexp, d_out)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attention.defvjp(_attention_fwd, _attention_bwd)


def _forward(q, k, v, bounds, spec):
    """Output `[B,T,H,Dv]` and the logits' log-sum-exp, float32 `[B,Hk,G,T]` (+inf: saw nothing)."""
    if q.shape[1] * q.shape[2] <= NARROW_ROWS:
        return _narrow_forward(q, k, v, bounds, spec)
    return _blocked_forward(q, k, v, bounds, spec)


def _seen(spec, bounds, query_index, key_index, q_segments, kv_segments, num_keys=None):
    """Mask, broadcastable to `[B,T,S]`, of the keys seen; None if all are.

    `query_index [T]`, `key_index [S]` count from the first query and key of the arrays;
    `q_segments [B,T]` and `kv_segments [B,S]` are those of the same queries and keys; keys from
    `num_keys` on are padding.
    """
    masks = []
    query = query_index[None, :, None]
    key = key_index[None, None, :]
    if bounds.q_offset is not None:
        query = query + bounds.q_offset[:, None, None]
    if spec.causal:
        masks.append(key <= query)
    if spec.sliding_window is not None:
        masks.append(key > query - spec.sliding_window)
    if bounds.kv_lengths is not None:
        masks.append(key < bounds.kv_lengths[:, None, None])
    if num_keys is not None:
        masks.append(key < num_keys)
    if q_segments is not None:
        masks.append(q_segments[:, :, None] == kv_segments[:, None, :])
    return functools.reduce(jnp.logical_and, masks) if masks else None


# -- narrow: decoding ------------------------------------------------------------------------------


def _narrow_forward(q, k, v, bounds, spec):
    """All query heads against the cache as `[S, Hk·D]`, without transposing or copying it.

    A batched product over key heads would make XLA reorder the cache to `[Hk,S,D]` at every step.
    Instead the queries are laid out block-diagonally, `[T·H, Hk·D]` with zeros outside each query
    head's own key head: one plain matrix product, bound by reading the cache once. The Hk-fold
    extra multiplications are free at that intensity.

    A cache longer than two chunks is read chunk by chunk, and only as far as any row sees.
    """
    batch, num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[1:3]
    group = num_heads // num_kv_heads
    own = jnp.eye(num_kv_heads, dtype=q.dtype)
    wide = (q * jnp.asarray(spec.scale, q.dtype)).reshape(
        batch, num_queries, num_kv_heads, group, 1, head_dim
    ) * own[:, None, :, None]
    wide = wide.reshape(batch, num_queries * num_heads, num_kv_heads * head_dim)
    keys, values = k.reshape(batch, num_keys, -1), v.reshape(batch, num_keys, -1)
    chunk = NARROW_CHUNK if num_keys > 2 * NARROW_CHUNK else num_keys

    def read_chunk(j, carry):
        # The last chunk may overlap the one before: what that one has seen is masked.
        start = jnp.minimum(j * chunk, num_keys - chunk)

        def part(x):
            if x is None or chunk == num_keys:
                return x
            return jax.lax.dynamic_slice_in_dim(x, start, chunk, axis=1)

        key_index = start + jnp.arange(chunk)
        logits = cap_logits(dot("brd,bsd->brs", wide, part(keys)), spec)
        seen = _seen(
            spec,
            bounds,
            jnp.arange(num_queries),
            key_index,
            bounds.segment_ids,
            part(bounds.kv_segment_ids),
        )
        if num_keys % chunk:
            new = (key_index >= j * chunk)[None, None]
            seen = new if seen is None else seen & new
        if seen is not None:
            logits = jnp.where(
                seen[:, :, None], logits.reshape(batch, num_queries, num_heads, chunk), -jnp.inf
            ).reshape(logits.shape)
        new_maximum = logits.max(-1, keepdims=True)
        if carry is not None:
            new_maximum = jnp.maximum(new_maximum, carry[1])
        safe = safe_maximum(new_maximum)
        weights = jnp.exp(logits - safe)
        total = weights.sum(-1, keepdims=True)
        mixed = dot("brs,bsd->brd", weights.astype(v.dtype), part(values))
        if carry is not None:
            shrink = jnp.exp(carry[1] - safe)
            mixed, total = mixed + carry[0] * shrink, total + carry[2] * shrink
        return mixed, new_maximum, total

    if chunk == num_keys:
        mixed, maximum, total = read_chunk(0, None)
    else:
        blocks = Blocks(num_queries, chunk, 1, -(-num_keys // chunk))
        q_segments = _segment_blocks(bounds.segment_ids, num_queries, 1)
        kv_segments = _segment_blocks(bounds.kv_segment_ids, chunk, blocks.num_keys)
        ranges = _key_ranges(blocks, num_keys, bounds, spec, q_segments, kv_segments)
        rows = wide.shape[:2]
        start = (
            jnp.zeros((*rows, values.shape[-1]), jnp.float32),
            jnp.full((*rows, 1), -jnp.inf, jnp.float32),
            jnp.zeros((*rows, 1), jnp.float32),
        )
        mixed, maximum, total = jax.lax.fori_loop(
            ranges.first[0], ranges.last[0], read_chunk, start
        )

    out = mixed * reciprocal(total)
    out = out.reshape(batch, num_queries, num_kv_heads, group, num_kv_heads, v.shape[-1])
    out = jnp.einsum("btkgkd->btkgd", out).reshape(batch, num_queries, num_heads, v.shape[-1])
    logsumexp = log_sum_exp(maximum, total).reshape(batch, num_queries, num_kv_heads, group)
    return out.astype(q.dtype), logsumexp.transpose(0, 2, 3, 1)


# -- blocked: everything longer -------------------------------------------------------------------


def _cut(q, k):
    batch, num_queries, num_heads, _ = q.shape
    size = next(
        (n for n in BLOCK_SIZES if batch * num_heads * n * n <= BLOCK_LOGITS), BLOCK_SIZES[-1]
    )
    query_size, key_size = min(size, num_queries), min(size, k.shape[1])
    return Blocks(query_size, key_size, -(-num_queries // query_size), -(-k.shape[1] // key_size))


def _segment_blocks(ids, size, count):
    """`[B,T]` to `[n,B,b]`; padding gets -1, its own segment."""
    if ids is None:
        return None
    ids = jnp.pad(ids, ((0, 0), (0, size * count - ids.shape[1])), constant_values=-1)
    return ids.reshape(ids.shape[0], count, size).transpose(1, 0, 2)


class Ranges(NamedTuple):
    """For each block of queries, four ascending bounds on key blocks, int32 `[nq]` each.

    The block sees nothing outside `[first, last)`; inside it, all in `[full_first, full_last)`.
    """

    first: jax.Array
    full_first: jax.Array
    full_last: jax.Array
    last: jax.Array


def _key_ranges(blocks, num_keys, bounds, spec, q_segments, kv_segments):
    """Over all rows of the batch: skipped if no row needs it, unmasked if no row needs a mask."""
    query_low = np.arange(blocks.num_queries)[None, :, None] * blocks.query_size
    query_high = query_low + blocks.query_size - 1
    key_low = np.arange(blocks.num_keys) * blocks.key_size
    key_high = key_low + blocks.key_size - 1
    if bounds.q_offset is not None:
        query_low = bounds.q_offset[:, None, None] + query_low
        query_high = bounds.q_offset[:, None, None] + query_high
    needed = np.ones((1, blocks.num_queries, blocks.num_keys), bool)
    full = needed & (key_high < num_keys)
    if spec.causal:
        needed = needed & (key_low <= query_high)
        full = full & (key_high <= query_low)
    if spec.sliding_window is not None:
        needed = needed & (key_high > query_low - spec.sliding_window)
        full = full & (key_low > query_high - spec.sliding_window)
    if bounds.kv_lengths is not None:
        needed = needed & (key_low < bounds.kv_lengths[:, None, None])
        full = full & (key_high < bounds.kv_lengths[:, None, None])
    if q_segments is not None:
        low_q, high_q = q_segments.min(-1).T[:, :, None], q_segments.max(-1).T[:, :, None]
        low_k, high_k = kv_segments.min(-1).T[:, None, :], kv_segments.max(-1).T[:, None, :]
        needed = needed & (low_q <= high_k) & (low_k <= high_q)
        full = full & False  # finding the blocks inside one segment is not worth the while
    needed, full = needed.any(0), full.all(0)  # type: ignore[assignment]

    def ends(table):
        first = table.argmax(-1)
        last = blocks.num_keys - table[:, ::-1].argmax(-1)
        return first * table.any(-1), last * table.any(-1)

    first, last = ends(needed)
    # Every term of `full` is an interval of key blocks, so what lies between its ends is full too.
    # Where it is empty, both ends are put at `first`, and all of the range is masked.
    full_first, full_last = ends(full)
    empty = full_first >= full_last
    full_first, full_last = full_first + first * empty, full_last + first * empty
    return Ranges(*(jnp.asarray(x, jnp.int32) for x in (first, full_first, full_last, last)))


def _over_key_blocks(step, carry, ranges, spec, bounds):
    """Runs `step(j, carry, masked)` over the key blocks one block of queries sees."""
    unmasked = functools.partial(step, masked=False)
    masked = functools.partial(step, masked=True)
    if bounds.segment_ids is not None:
        return jax.lax.fori_loop(ranges.first, ranges.last, masked, carry)
    if spec.sliding_window is not None:
        carry = jax.lax.fori_loop(ranges.first, ranges.full_first, masked, carry)
    carry = jax.lax.fori_loop(ranges.full_first, ranges.full_last, unmasked, carry)
    return jax.lax.fori_loop(ranges.full_last, ranges.last, masked, carry)


def _block_mask(i, j, blocks, num_keys, bounds, spec, q_segments, kv_segments):
    """`_seen` of query block i and key block j as `[B,1,G|1,bq,bk]`, or None."""
    return _seen(
        spec,
        bounds,
        i * blocks.query_size + jnp.arange(blocks.query_size),
        j * blocks.key_size + jnp.arange(blocks.key_size),
        None if q_segments is None else q_segments[i],
        None if kv_segments is None else kv_segments[j],
        num_keys if blocks.num_keys * blocks.key_size != num_keys else None,
    )


def _blocked_forward(q, k, v, bounds, spec):
    batch, num_queries, num_heads, _ = q.shape
    num_keys, num_kv_heads = k.shape[1:3]
    group = num_heads // num_kv_heads
    blocks = _cut(q, k)
    rows = (batch, num_kv_heads, group * blocks.query_size)
    queries = cut_queries(q * jnp.asarray(spec.scale, q.dtype), num_kv_heads, blocks)
    # Transposed once here, not once a block inside the loop.
    keys_t = cut_keys(k, blocks).swapaxes(-1, -2)
    values = cut_keys(v, blocks)
    q_segments = _segment_blocks(bounds.segment_ids, blocks.query_size, blocks.num_queries)
    kv_segments = _segment_blocks(bounds.kv_segment_ids, blocks.key_size, blocks.num_keys)
    ranges = _key_ranges(blocks, num_keys, bounds, spec, q_segments, kv_segments)

    def one_query_block(args):
        i, query, ranges = args

        def one_key_block(j, carry, masked):
            out, maximum, total = carry
            logits = cap_logits(dot("bkrd,bkds->bkrs", query, keys_t[j]), spec)
            seen = masked and _block_mask(
                i, j, blocks, num_keys, bounds, spec, q_segments, kv_segments
            )
            if masked and seen is not None:
                logits = logits.reshape(*rows[:2], group, blocks.query_size, blocks.key_size)
                logits = jnp.where(seen[:, None, None], logits, -jnp.inf)
                logits = logits.reshape(*rows, blocks.key_size)
            new_maximum = jnp.maximum(maximum, logits.max(-1))
            safe = safe_maximum(new_maximum) if masked else new_maximum
            weights = jnp.exp(logits - safe[..., None])
            shrink = jnp.exp(maximum - safe)
            total = total * shrink + weights.sum(-1)
            mixed = dot("bkrs,bksd->bkrd", weights.astype(v.dtype), values[j])
            return out * shrink[..., None] + mixed, new_maximum, total

        start = (
            jnp.zeros((*rows, v.shape[-1]), jnp.float32),
            jnp.full(rows, -jnp.inf, jnp.float32),
            jnp.zeros(rows, jnp.float32),
        )
        out, maximum, total = _over_key_blocks(one_key_block, start, ranges, spec, bounds)
        out = (out * reciprocal(total)[..., None]).astype(q.dtype)
        return out, log_sum_exp(maximum, total)

    out, logsumexp = jax.lax.map(one_query_block, (jnp.arange(blocks.num_queries), queries, ranges))
    logsumexp = logsumexp.reshape(-1, batch, num_kv_heads, group, blocks.query_size)
    logsumexp = jnp.moveaxis(logsumexp, 0, 3).reshape(batch, num_kv_heads, group, -1)
    return join_queries(out, num_queries, group), logsumexp[..., :num_queries]


def _blocked_backward(q, k, v, bounds, spec, out, logsumexp, d_out):
    """One pass over the blocks, five products each, all on transposed logits `[bk, G·bq]`.

    In that layout every product is `[m,k] x [k,n]` of arrays as they lie in memory, given that
    queries, keys and output gradients are also kept transposed: no block of logits is transposed.
    """
    batch, num_queries, num_heads, _ = q.shape
    num_keys, num_kv_heads = k.shape[1:3]
    group = num_heads // num_kv_heads
    blocks = _cut(q, k)
    queries = cut_queries(q * jnp.asarray(spec.scale, q.dtype), num_kv_heads, blocks)
    keys, values = cut_keys(k, blocks), cut_keys(v, blocks)
    keys_t = keys.swapaxes(-1, -2)
    d_outs = cut_queries(d_out, num_kv_heads, blocks)
    q_segments = _segment_blocks(bounds.segment_ids, blocks.query_size, blocks.num_queries)
    kv_segments = _segment_blocks(bounds.kv_segment_ids, blocks.key_size, blocks.num_keys)
    ranges = _key_ranges(blocks, num_keys, bounds, spec, q_segments, kv_segments)
    tile = (batch, num_kv_heads, blocks.key_size, group, blocks.query_size)

    def row_blocks(x):
        """`[B,Hk,G,T]` to `[nq,B,Hk,1,G·bq]`."""
        x = pad_axis(x, 3, blocks.num_queries * blocks.query_size)
        x = jnp.moveaxis(x.reshape(*x.shape[:3], blocks.num_queries, blocks.query_size), 3, 0)
        return x.reshape(blocks.num_queries, batch, num_kv_heads, 1, group * blocks.query_size)

    def one_query_block(carry, args):
        i, query, d_out, logsumexp, delta, ranges = args
        query_t, d_out_t = query.swapaxes(-1, -2), d_out.swapaxes(-1, -2)

        def one_key_block(j, carry, masked):
            dq_t, dk, dv = carry
            logits = cap_logits(dot("bksd,bkdr->bksr", keys[j], query_t), spec)
            seen = masked and _block_mask(
                i, j, blocks, num_keys, bounds, spec, q_segments, kv_segments
            )
            if masked and seen is not None:
                logits = jnp.where(
                    seen.swapaxes(1, 2)[:, None, :, None], logits.reshape(tile), -jnp.inf
                ).reshape(logits.shape)
            weights = jnp.exp(logits - logsumexp)
            d_weights = dot("bksd,bkdr->bksr", values[j], d_out_t)
            d_logits = logit_gradient(weights, d_weights, delta, logits, spec).astype(q.dtype)
            dv = dv.at[j].add(dot("bksr,bkrd->bksd", weights.astype(v.dtype), d_out))
            dk = dk.at[j].add(dot("bksr,bkrd->bksd", d_logits, query))
            return dq_t + dot("bkds,bksr->bkdr", keys_t[j], d_logits), dk, dv

        dq_t = jnp.zeros(query_t.shape, jnp.float32)
        dq_t, dk, dv = _over_key_blocks(one_key_block, (dq_t, *carry), ranges, spec, bounds)
        return (dk, dv), (dq_t * spec.scale).astype(q.dtype).swapaxes(-1, -2)

    start = (jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32))
    (dk, dv), dq = jax.lax.scan(
        one_query_block,
        start,
        (
            jnp.arange(blocks.num_queries),
            queries,
            d_outs,
            row_blocks(logsumexp),
            row_blocks(row_delta(out, d_out, num_kv_heads)),
            ranges,
        ),
    )
    return (
        join_queries(dq, num_queries, group),
        join_keys(dk, num_keys),
        join_keys(dv, num_keys),
    )
