"""Block-sparse attention in plain XLA operations: cost follows the number of chosen blocks.

Each block of queries of each head has its own list of chosen blocks. Inside a loop over these rows
runs a loop, as long as the list, over groups of its blocks: their keys are gathered into one matrix
and met in one product, with running float32 softmax statistics as in flash attention (Dao et al.,
2022, arXiv:2205.14135). Blocks of which every key is seen come first and take no mask.

The backward pass goes through the same lists, recomputes the probabilities from the saved
log-sum-exp, and adds each block's share to the gradients of its keys and values in place.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.block_sparse.lists import block_lists, visible_blocks


class Spec(NamedTuple):
    """What is known when tracing."""

    block_size: int
    causal: bool
    scale: float
    logit_softcap: float | None


class GroupTokens(NamedTuple):
    """Tokens of keys met in one product: where no mask is needed, and where one may be."""

    whole: int
    masked: int


# Measured on a 2-core x86-64 CPU with 1 MiB of L2 cache a core.
FORWARD_GROUPS = GroupTokens(whole=1024, masked=128)
BACKWARD_GROUPS = GroupTokens(whole=256, masked=128)


def block_sparse_attention_xla(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hk D"],
    value: Float[Array, "B S Hk Dv"],
    block_mask: Bool[Array, "B H NQ NK"],
    lengths: Int[Array, " B"] | None,
    segment_ids: Int[Array, "B S"] | None,
    offset: Int[Array, ""] | int,
    spec: Spec,
) -> Float[Array, "B T H Dv"]:
    """Checked arguments only; see `pallas_kernels.block_sparse_attention`."""
    return _attention(
        query, key, value, block_mask, lengths, segment_ids, jnp.asarray(offset, jnp.int32), spec
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _attention(query, key, value, block_mask, lengths, segment_ids, offset, spec):
    return forward(query, key, value, block_mask, lengths, segment_ids, offset, spec)[0]


def _attention_fwd(query, key, value, block_mask, lengths, segment_ids, offset, spec):
    out, log_sum_exp = forward(query, key, value, block_mask, lengths, segment_ids, offset, spec)
    return out, (query, key, value, block_mask, lengths, segment_ids, offset, out, log_sum_exp)


def _attention_bwd(spec, saved, d_out):
    query, key, value, block_mask, lengths, segment_ids, offset, out, log_sum_exp = saved

    @jax.custom_batching.sequential_vmap
    def backward(
        query, key, value, block_mask, lengths, segment_ids, offset, out, log_sum_exp, d_out
    ):
        rows = _Rows(
            query, key, value, block_mask, lengths, segment_ids, offset, spec, BACKWARD_GROUPS
        )
        return _backward(rows, out, log_sum_exp, d_out)

    gradients = backward(
        query, key, value, block_mask, lengths, segment_ids, offset, out, log_sum_exp, d_out
    )
    dtypes = (query.dtype, key.dtype, value.dtype)
    gradients = [x.astype(dtype) for x, dtype in zip(gradients, dtypes, strict=True)]
    return (*gradients, None, None, None, None)


_attention.defvjp(_attention_fwd, _attention_bwd)


def forward(query, key, value, block_mask, lengths, segment_ids, offset, spec):
    """Output `[B,T,H,Dv]` and the logits' log-sum-exp, float32 `[B,H,T]` (+inf: saw nothing)."""

    # A batched loop bound would run every row as long as the longest, and copy what it carries.
    @jax.custom_batching.sequential_vmap
    def one(query, key, value, block_mask, lengths, segment_ids, offset):
        return _forward(
            _Rows(query, key, value, block_mask, lengths, segment_ids, offset, spec, FORWARD_GROUPS)
        )

    return one(query, key, value, block_mask, lengths, segment_ids, offset)


class _Rows:
    """The arguments cut in blocks, and what both passes do with them.

    A row is one block of queries of one head of one batch row: `B·H·NQ` of them, in that order.
    """

    def __init__(self, query, key, value, block_mask, lengths, segment_ids, offset, spec, tokens):
        self.spec, self.dtypes = spec, (query.dtype, key.dtype, value.dtype)
        self.batch, self.num_queries, self.num_heads, _ = query.shape
        self.num_keys, self.num_kv_heads = key.shape[1:3]
        self.query_blocks, self.key_blocks = block_mask.shape[2:]
        self.offset = offset
        self.lengths = lengths
        # Blocks of keys in a group, without a mask and with one.
        self.group_sizes = tuple(
            max(1, min(count // spec.block_size, self.key_blocks)) for count in tokens
        )
        visible = visible_blocks(
            self.num_queries,
            self.num_keys,
            offset=offset,
            block_size=spec.block_size,
            causal=spec.causal,
            lengths=lengths,
            segment_ids=segment_ids,
        )
        self.lists = block_lists(block_mask, visible)
        self.queries = self.cut(query * jnp.asarray(spec.scale, query.dtype), self.query_blocks)
        self.keys = self.cut(key, self.key_blocks)
        self.values = self.cut(value, self.key_blocks)
        self.segments = None
        if segment_ids is not None:
            size = self.key_blocks * spec.block_size
            ids = jnp.pad(segment_ids, ((0, 0), (0, size - self.num_keys)))
            self.segments = ids.reshape(-1, spec.block_size)

    def cut(self, x, count):
        """`[B,T,H,D]` to `[B·H·count, block_size, D]`, zero-padded."""
        batch, time, heads, dim = x.shape
        size = self.spec.block_size
        x = jnp.pad(x, ((0, 0), (0, count * size - time), (0, 0), (0, 0)))
        x = x.reshape(batch, count, size, heads, dim).transpose(0, 3, 1, 2, 4)
        return x.reshape(-1, size, dim)

    def join(self, x, time):
        """Inverse of `cut`."""
        count = -(-time // self.spec.block_size)
        x = x.reshape(self.batch, -1, count, *x.shape[1:]).transpose(0, 2, 3, 1, 4)
        return x.reshape(self.batch, -1, *x.shape[3:])[:, :time]

    def row_arguments(self):
        """What a row reads of its own: its number, its list, its counts."""
        count = self.batch * self.num_heads * self.query_blocks
        largest = max(self.group_sizes)
        columns = self.lists.columns.reshape(count, -1)
        columns = jnp.pad(columns, ((0, 0), (0, largest)))  # a slice at the end stays inside
        return (
            jnp.arange(count),
            columns,
            self.lists.whole.reshape(-1),
            self.lists.total.reshape(-1),
        )

    def place(self, row):
        """Batch row, block of queries, and the first block of the key head in `keys`."""
        b, rest = jnp.divmod(row, self.num_heads * self.query_blocks)
        head, i = jnp.divmod(rest, self.query_blocks)
        kv_head = head // (self.num_heads // self.num_kv_heads)
        return b, i, (b * self.num_kv_heads + kv_head) * self.key_blocks

    def real_queries(self, row):
        """Which queries of the row are not padding, bool `[block_size]`."""
        b, i, _ = self.place(row)
        position = self.offset + i * self.spec.block_size + jnp.arange(self.spec.block_size)
        return position < (self.num_keys if self.lengths is None else self.lengths[b])

    def over_groups(self, row, columns, whole, total, step, carry):
        """Runs `step(carry, blocks, seen)` over the row's list, a group at a time.

        `blocks` are the indices of the group's blocks in `keys`; `seen`, None or bool
        `[block_size, len(blocks)·block_size]`, is what of them the queries see.
        """
        _, _, base = self.place(row)
        large, small = self.group_sizes

        def unmasked(g, carry):
            group = jax.lax.dynamic_slice_in_dim(columns, g * large, large)
            return step(carry, base + group, None)

        full_groups = whole // large
        carry = jax.lax.fori_loop(0, full_groups, unmasked, carry)
        done = full_groups * large

        def masked(g, carry):
            start = done + g * small
            group = jax.lax.dynamic_slice_in_dim(columns, start, small)
            seen = self.seen(row, group, start + jnp.arange(small) < total)
            return step(carry, base + group, seen)

        return jax.lax.fori_loop(0, -(-(total - done) // small), masked, carry)

    def seen(self, row, group, chosen):
        """What the row's queries see of a group of blocks, those that are chosen."""
        size = self.spec.block_size
        b, i, _ = self.place(row)
        position = group[:, None] * size + jnp.arange(size)
        end = self.num_keys if self.lengths is None else self.lengths[b]
        seen = (chosen[:, None] & (position < end)).reshape(1, -1)
        if self.spec.causal:
            query_position = self.offset + i * size + jnp.arange(size)
            seen = seen & (position.reshape(1, -1) <= query_position[:, None])
        if self.segments is not None:
            first = b * self.key_blocks
            of_queries = self.segments[first + self.offset // size + i]
            seen = seen & (self.segments[first + group].reshape(1, -1) == of_queries[:, None])
        return seen

    def capped(self, logits):
        cap = self.spec.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits * (1.0 / cap))


def _dot(equation, a, b):
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _gather(x, blocks, axis=0):
    """Some blocks of `[blocks, …]` after each other, joined along an axis of a block.

    Copied slice by slice: a gather would compute an index for every number.
    """
    parts = [jax.lax.dynamic_index_in_dim(x, block, keepdims=False) for block in blocks]
    return jnp.concatenate(parts, axis)


def _scatter_add(x, blocks, parts):
    """Adds `[len(blocks)·size, D]` to the blocks of x it belongs to."""
    parts = parts.reshape(len(blocks), 1, *x.shape[1:])
    for block, part in zip(blocks, parts, strict=True):
        old = jax.lax.dynamic_slice_in_dim(x, block, 1)
        x = jax.lax.dynamic_update_slice_in_dim(x, old + part, block, axis=0)
    return x


def _forward(rows):
    size = rows.spec.block_size
    width = rows.values.shape[-1]

    def one_row(args):
        query, row, columns, whole, total = args

        def step(carry, blocks, seen):
            out, maximum, normaliser = carry
            logits = rows.capped(_dot("qd,kd->qk", query, _gather(rows.keys, blocks)))
            if seen is not None:
                logits = jnp.where(seen, logits, -jnp.inf)
            new_maximum = jnp.maximum(maximum, logits.max(-1))
            # A query that has seen nothing has maximum -inf; subtract 0 from its logits instead.
            safe = jnp.where(new_maximum == -jnp.inf, 0.0, new_maximum)
            weights = jnp.exp(logits - safe[:, None])
            shrink = jnp.exp(maximum - safe)
            values = _gather(rows.values, blocks)
            mixed = _dot("qk,kd->qd", weights.astype(values.dtype), values)
            return (
                out * shrink[:, None] + mixed,
                new_maximum,
                normaliser * shrink + weights.sum(-1),
            )

        start = (
            jnp.zeros((size, width), jnp.float32),
            jnp.full(size, -jnp.inf, jnp.float32),
            jnp.zeros(size, jnp.float32),
        )
        out, maximum, normaliser = rows.over_groups(row, columns, whole, total, step, start)
        saw = (normaliser > 0) & rows.real_queries(row)
        normaliser = jnp.where(saw, normaliser, 1.0)
        out = jnp.where(saw[:, None], out / normaliser[:, None], 0.0)
        return out.astype(rows.dtypes[0]), jnp.where(saw, maximum + jnp.log(normaliser), jnp.inf)

    out, log_sum_exp = jax.lax.map(one_row, (rows.queries, *rows.row_arguments()))
    log_sum_exp = log_sum_exp.reshape(rows.batch, rows.num_heads, -1)[..., : rows.num_queries]
    return rows.join(out, rows.num_queries), log_sum_exp


def _backward(rows, out, log_sum_exp, d_out):
    """Gradients of query, key and value, five products a group, all on transposed logits.

    With those, `[keys, queries]`, and with queries, keys and output gradients also kept transposed,
    every product is one of arrays as they lie in memory.
    """
    size, cap = rows.spec.block_size, rows.spec.logit_softcap
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    padding = ((0, 0), (0, 0), (0, rows.query_blocks * size - rows.num_queries))
    delta = jnp.pad(delta.transpose(0, 2, 1), padding).reshape(-1, size)
    log_sum_exp = jnp.pad(log_sum_exp, padding, constant_values=jnp.inf).reshape(-1, size)
    d_outs = rows.cut(d_out, rows.query_blocks)
    keys_t = rows.keys.swapaxes(1, 2)

    def one_row(carry, args):
        query, d_out, log_sum_exp, delta, row, columns, whole, total = args
        query_t, d_out_t = query.T, d_out.T

        def step(carry, blocks, seen):
            dq_t, dk, dv = carry
            logits = rows.capped(_dot("kd,dq->kq", _gather(rows.keys, blocks), query_t))
            weights = jnp.exp(logits - log_sum_exp)
            if seen is not None:
                weights = jnp.where(seen.T, weights, 0.0)
            d_weights = _dot("kd,dq->kq", _gather(rows.values, blocks), d_out_t)
            d_logits = weights * (d_weights - delta)
            if cap is not None:
                # d/dx c·tanh(x/c) = 1 - tanh², from the capped value.
                d_logits = d_logits * (1.0 - jnp.square(logits * (1.0 / cap)))
            d_logits = d_logits.astype(query.dtype)
            dk = _scatter_add(dk, blocks, _dot("kq,qd->kd", d_logits, query))
            dv = _scatter_add(dv, blocks, _dot("kq,qd->kd", weights.astype(d_out.dtype), d_out))
            return dq_t + _dot("dk,kq->dq", _gather(keys_t, blocks, axis=1), d_logits), dk, dv

        start = (jnp.zeros(query_t.shape, jnp.float32), *carry)
        dq_t, dk, dv = rows.over_groups(row, columns, whole, total, step, start)
        return (dk, dv), dq_t.T * rows.spec.scale

    start = (
        jnp.zeros(rows.keys.shape, jnp.float32),
        jnp.zeros(rows.values.shape, jnp.float32),
    )
    (dk, dv), dq = jax.lax.scan(
        one_row, start, (rows.queries, d_outs, log_sum_exp, delta, *rows.row_arguments())
    )
    return (
        rows.join(dq, rows.num_queries),
        rows.join(dk, rows.num_keys),
        rows.join(dv, rows.num_keys),
    )
