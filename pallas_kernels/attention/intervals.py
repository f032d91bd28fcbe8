"""Attention where each query sees two intervals: of raw tokens, and of a shorter far list.

What is far is a list of other keys and values in text order: pooled core tokens (CCA), or gathered
separators (SepLLM). A block of queries runs over the blocks of raw tokens its band touches and over
the blocks of the far list it sees, under one softmax. The loops' ranges are the ends of the
intervals over the block, so what no query of the block sees costs nothing, and one program serves
all texts. The backward pass recomputes the probabilities from the saved log-sum-exp, on transposed
logits, as attention does.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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


class Intervals(NamedTuple):
    """Half-open intervals for each query, int32 `[B, T]` (`[1, T]` if all rows are alike).

    Raw tokens are columns of the row; the far list has columns of its own. A query with empty
    intervals, padding, gives zeros.
    """

    segment_first: jax.Array | np.ndarray  # column of the first token of the query's segment
    raw_first: jax.Array | np.ndarray
    raw_last: jax.Array | np.ndarray
    far_first: jax.Array | np.ndarray
    far_last: jax.Array | np.ndarray


class Spec(NamedTuple):
    """What is known when tracing. The first `sink_tokens` of a segment stay visible raw."""

    sink_tokens: int
    logit_softcap: float | None
    scale: float


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    far_key: jax.Array | None,
    far_value: jax.Array | None,
    visible: Intervals,
    spec: Spec,
) -> jax.Array:
    """`[B,T,H,D]` queries on raw `[B,T,Hk,D]` and a far list `[B,M,H|Hk,D]` or None."""
    return _forward(query, key, value, far_key, far_value, visible, spec)[0]


def _attend_fwd(query, key, value, far_key, far_value, visible, spec):
    out, logsumexp = _forward(query, key, value, far_key, far_value, visible, spec)
    return out, (query, key, value, far_key, far_value, visible, out, logsumexp)


def _attend_bwd(spec, saved, d_out):
    query, key, value, far_key, far_value, visible, out, logsumexp = saved
    grads = _backward(query, key, value, far_key, far_value, visible, out, logsumexp, d_out, spec)
    return *grads, None


attend.defvjp(_attend_fwd, _attend_bwd)


class Source(NamedTuple):
    """One kind of key: raw tokens or the far list."""

    keys: jax.Array  # [n, B, heads, b, D]
    values: jax.Array
    size: int  # b

    @property
    def heads(self):
        return self.keys.shape[2]

    def columns(self, j):
        return j * self.size + jnp.arange(self.size)


def _source(key, value, size):
    size = min(size, key.shape[1])
    blocks = Blocks(0, size, 0, -(-key.shape[1] // size))
    return Source(cut_keys(key, blocks), cut_keys(value, blocks), size)


def _block_size(query):
    batch, _, heads, _ = query.shape
    return next((n for n in BLOCK_SIZES if batch * heads * n * n <= BLOCK_LOGITS), BLOCK_SIZES[-1])


def _visible_blocks(visible, size, count):
    """The intervals cut into `[count, B|1, size]`; queries that pad the last block see nothing."""

    def cut(x):
        x = pad_axis(jnp.asarray(x), 1, size * count)
        return x.reshape(x.shape[0], count, size).transpose(1, 0, 2)

    return Intervals(*map(cut, visible))


def _ends(first, last, size):
    """Block ranges `(lo, full_lo, full_hi, hi)` of columns `[first, last)`; int32 `[B, bq]` each.

    Some query sees something in each of `[lo, hi)`, all see all of `[full_lo, full_hi)`.
    """
    sees = first < last
    lo = jnp.min(jnp.where(sees, first, jnp.iinfo(jnp.int32).max)) // size
    hi = -(-jnp.max(jnp.where(sees, last, 0)) // size)
    lo = jnp.minimum(lo, hi)
    full_lo = jnp.clip(-(-jnp.max(first) // size), lo, hi)
    full_hi = jnp.clip(jnp.min(last) // size, full_lo, hi)
    return lo, full_lo, full_hi, hi


def _over_blocks(step, carry, seen, spec, raw_size, far_size):
    """Runs `step(source, j, carry, mask)` over what one block of queries sees.

    `source` is 0 for raw tokens and 1 for the far list; `mask(columns)` is bool `[B|1, bq, b]`, or
    None where all is seen.
    """

    def raw_mask(columns):
        column = columns[None, None]
        mask = (column >= seen.raw_first[..., None]) & (column < seen.raw_last[..., None])
        if spec.sink_tokens:
            sink_first, sink_last = seen.segment_first, _sink_last(seen, spec)
            mask |= (column >= sink_first[..., None]) & (column < sink_last[..., None])
        return mask

    def far_mask(columns):
        column = columns[None, None]
        return (column >= seen.far_first[..., None]) & (column < seen.far_last[..., None])

    def run(source, mask, lo, hi, carry):
        return jax.lax.fori_loop(lo, hi, functools.partial(step, source=source, mask=mask), carry)

    if far_size is not None:
        lo, full_lo, full_hi, hi = _ends(seen.far_first, seen.far_last, far_size)
        carry = run(1, far_mask, lo, full_lo, carry)
        carry = run(1, None, full_lo, full_hi, carry)
        carry = run(1, far_mask, full_hi, hi, carry)
    lo, full_lo, full_hi, hi = _ends(seen.raw_first, seen.raw_last, raw_size)
    if spec.sink_tokens:
        # Sinks inside the band are part of its mask already; the rest lies in earlier blocks.
        sink_lo, _, _, sink_hi = _ends(seen.segment_first, _sink_last(seen, spec), raw_size)
        carry = run(0, raw_mask, sink_lo, jnp.minimum(sink_hi, lo), carry)
    carry = run(0, raw_mask, lo, full_lo, carry)
    carry = run(0, None, full_lo, full_hi, carry)
    return run(0, raw_mask, full_hi, hi, carry)


def _sink_last(seen, spec):
    return jnp.minimum(
        jnp.minimum(seen.segment_first + spec.sink_tokens, seen.raw_first), seen.raw_last
    )


def _prepared(query, key, value, far_key, far_value, visible, spec):
    """Query blocks, both sources (the far list may be None) and the intervals of each block."""
    size = _block_size(query)
    query_size = min(size, query.shape[1])
    count = -(-query.shape[1] // query_size)
    blocks = Blocks(query_size, 0, count, 0)
    queries = cut_queries(query * jnp.asarray(spec.scale, query.dtype), key.shape[2], blocks)
    sources = [_source(key, value, size)]
    if far_key is not None:
        sources.append(_source(far_key, far_value, size))
    return blocks, queries, sources, _visible_blocks(visible, query_size, count)


def _sizes(sources):
    return sources[0].size, sources[1].size if len(sources) > 1 else None


def _forward(query, key, value, far_key, far_value, visible, spec):
    """Output `[B,T,H,Dv]` and the log-sum-exp of the logits, float32 `[B,Hk,G,T]`."""
    batch, time, heads, _ = query.shape
    kv_heads, group = key.shape[2], heads // key.shape[2]
    blocks, queries, sources, seen_blocks = _prepared(
        query, key, value, far_key, far_value, visible, spec
    )
    bq = blocks.query_size
    keys_t = [source.keys.swapaxes(-1, -2) for source in sources]

    def one_query_block(args):
        query, seen = args

        def one_key_block(j, carry, source, mask):
            out, maximum, total = carry  # [B, H, bq, …]
            kind = sources[source]
            rows = (batch, kind.heads, heads // kind.heads * bq)
            logits = dot("bkrd,bkds->bkrs", query.reshape(*rows, -1), keys_t[source][j])
            logits = cap_logits(logits, spec).reshape(batch, heads, bq, kind.size)
            if mask is not None:
                logits = jnp.where(mask(kind.columns(j))[:, None], logits, -jnp.inf)
            new_maximum = jnp.maximum(maximum, logits.max(-1))
            safe = safe_maximum(new_maximum)
            weights = jnp.exp(logits - safe[..., None])
            shrink = jnp.exp(maximum - safe)
            total = total * shrink + weights.sum(-1)
            weights = weights.astype(value.dtype).reshape(*rows, kind.size)
            mixed = dot("bkrs,bksd->bkrd", weights, kind.values[j])
            return out * shrink[..., None] + mixed.reshape(out.shape), new_maximum, total

        start = (
            jnp.zeros((batch, heads, bq, value.shape[-1]), jnp.float32),
            jnp.full((batch, heads, bq), -jnp.inf, jnp.float32),
            jnp.zeros((batch, heads, bq), jnp.float32),
        )
        out, maximum, total = _over_blocks(one_key_block, start, seen, spec, *_sizes(sources))
        out = (out * reciprocal(total)[..., None]).astype(query.dtype)
        return out.reshape(batch, kv_heads, group * bq, -1), log_sum_exp(maximum, total)

    out, logsumexp = jax.lax.map(one_query_block, (queries, seen_blocks))
    logsumexp = jnp.moveaxis(logsumexp, 0, 2).reshape(batch, kv_heads, group, -1)
    return join_queries(out, time, group), logsumexp[..., :time]


def _backward(query, key, value, far_key, far_value, visible, out, logsumexp, d_out, spec):
    batch, time, heads, _ = query.shape
    kv_heads, group = key.shape[2], heads // key.shape[2]
    blocks, queries, sources, seen_blocks = _prepared(
        query, key, value, far_key, far_value, visible, spec
    )
    bq = blocks.query_size
    keys_t = [source.keys.swapaxes(-1, -2) for source in sources]
    d_outs = cut_queries(d_out, kv_heads, blocks)

    def row_blocks(x):
        """`[B,Hk,G,T]` to `[nq,B,H,bq]`."""
        x = pad_axis(x.reshape(batch, heads, time), 2, blocks.num_queries * bq)
        return jnp.moveaxis(x.reshape(batch, heads, blocks.num_queries, bq), 2, 0)

    def one_query_block(carry, args):
        query, d_out, logsumexp, delta, seen = args

        def folded(x, kind):
            """The rows of the heads that share a key head, as one axis."""
            return x.reshape(batch, kind.heads, heads // kind.heads * bq, -1)

        def transposed(x, kind):
            return folded(x, kind).swapaxes(-1, -2)

        turned = [
            [transposed(x, kind) for x in (query, d_out, logsumexp, delta)] for kind in sources
        ]

        def one_key_block(j, carry, source, mask):
            dq, grads = carry
            kind = sources[source]
            query_t, d_out_t, logsumexp, delta = turned[source]
            logits = cap_logits(dot("bksd,bkdr->bksr", kind.keys[j], query_t), spec)
            if mask is not None:
                tile = logits.reshape(*logits.shape[:3], heads // kind.heads, bq)
                visible = mask(kind.columns(j)).swapaxes(1, 2)[:, None, :, None]
                logits = jnp.where(visible, tile, -jnp.inf).reshape(logits.shape)
            weights = jnp.exp(logits - logsumexp)
            d_weights = dot("bksd,bkdr->bksr", kind.values[j], d_out_t)
            d_logits = logit_gradient(weights, d_weights, delta, logits, spec).astype(key.dtype)
            weights = weights.astype(value.dtype)
            dk, dv = grads[source]
            dv = dv.at[j].add(dot("bksr,bkrd->bksd", weights, folded(d_out, kind)))
            dk = dk.at[j].add(dot("bksr,bkrd->bksd", d_logits, folded(query, kind)))
            grads = [*grads[:source], (dk, dv), *grads[source + 1 :]]
            part = dot("bkds,bksr->bkdr", keys_t[source][j], d_logits)
            dq = [*dq[:source], dq[source] + part, *dq[source + 1 :]]
            return dq, grads

        dq = [jnp.zeros(query_t.shape, jnp.float32) for query_t, *_ in turned]
        dq, grads = _over_blocks(one_key_block, (dq, carry), seen, spec, *_sizes(sources))
        dq = sum(x.swapaxes(-1, -2).reshape(query.shape) for x in dq)
        return grads, (dq * spec.scale).astype(query.dtype)

    start = [
        (jnp.zeros(s.keys.shape, jnp.float32), jnp.zeros(s.values.shape, jnp.float32))
        for s in sources
    ]
    rows = (row_blocks(logsumexp), row_blocks(row_delta(out, d_out, kv_heads)))
    grads, dq = jax.lax.scan(one_query_block, start, (queries, d_outs, *rows, seen_blocks))
    arrays = [(key, value), (far_key, far_value)][: len(sources)]
    flat = [
        join_keys(d, x.shape[1]).astype(x.dtype)
        for pair, originals in zip(grads, arrays, strict=True)
        for d, x in zip(pair, originals, strict=True)
    ]
    flat += [None] * (4 - len(flat))
    return join_queries(dq, time, group), *flat
