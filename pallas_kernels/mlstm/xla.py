"""mLSTM in chunks: tokens of a chunk meet in one matrix product, chunks meet through the state.

One scan over the chunks does both (Beck et al., 2025, arXiv:2503.14376, section 3), so that a
chunk's matrices stay in cache. The backward pass keeps the state before each chunk, computes the
rest of a chunk again, and goes through the chunks in reverse.

Inside a chunk, token t sees token j <= t of its document with the weight
`exp(b_t - b_j + log_i_j - m_t)`, b being the sum of the log forget gates since the beginning of the
chunk or of the document. b may be far larger than the difference. It is therefore kept in two
parts, a multiple of `QUANTUM` whose sums and differences are exact, and a small rest.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.mlstm.step import Cell, State

QUANTUM = 2.0**-10  # Sums stay exact in float32 up to 2**14: 1000 gates of -15.
CHUNK_SIZE = 64  # the fastest of 32, 64, 96, 128, 256 forward, and as fast as 128 backward


class Spec(NamedTuple):
    """What is known when tracing."""

    cell: Cell
    chunk_size: int
    precision: jax.lax.Precision


class Tokens(NamedTuple):
    """A row, or a chunk of it: q, k `[B,L,H,dqk]`, v `[B,L,H,dv]`, the rest `[B,L,H]`, `[B,L]`.

    `border` is None if no document begins in the row. Padding has `log_i` -inf and `log_f` 0.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_i: jax.Array
    log_f: jax.Array
    border: jax.Array | None


def default_chunk_size(time: int) -> int:
    """The fastest measured, rather less than more so that little of the last chunk is empty."""
    count = math.ceil(time / CHUNK_SIZE)
    return min(time, 16 * math.ceil(time / count / 16))


def mlstm_xla(tokens: Tokens, state: State, spec: Spec) -> tuple[jax.Array, State]:
    """h `[B,T,H,dv]`, at least float32, and the state after the row; see `pallas_kernels.mlstm`."""
    time = tokens.q.shape[1]
    size = spec.chunk_size
    padding = -time % size

    def pad(x, value=0.0):
        widths = [(0, 0)] * x.ndim
        widths[1] = (0, padding)
        return jnp.pad(x, widths, constant_values=value)

    if padding:
        tokens = Tokens(
            pad(tokens.q),
            pad(tokens.k),
            pad(tokens.v),
            pad(tokens.log_i, -jnp.inf),
            pad(tokens.log_f),
            None if tokens.border is None else pad(tokens.border, False),
        )
    h, state = _mlstm(tokens, state, spec)
    return h[:, :time], state


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _mlstm(tokens, state, spec):
    h, last, _ = _forward(tokens, state, spec)
    return h, last


def _mlstm_fwd(tokens, state, spec):
    h, last, before = _forward(tokens, state, spec)
    return (h, last), (tokens, before, last)


def _mlstm_bwd(spec, saved, cotangents):
    tokens, before, last = saved
    d_h, (d_c, d_n, _) = cotangents
    total = jnp.sum(last[0] * d_c, (-2, -1)) + jnp.sum(last[1] * d_n, -1)

    zeros = jax.tree.map(jnp.zeros_like, tokens._replace(border=None))

    def chunk(carry, inputs):
        later, gradients = carry
        index, state = inputs
        later, d_tokens = _chunk_backward(
            _cut(tokens, index, spec), state, _cut(d_h, index, spec), later, spec
        )
        return (later, _put(gradients, d_tokens, index, spec)), None

    start = (d_c, d_n, total), zeros
    indices = jnp.arange(tokens.q.shape[1] // spec.chunk_size)
    ((d_c, d_n, _), d_tokens), _ = jax.lax.scan(chunk, start, (indices, before), reverse=True)
    return d_tokens, (d_c, d_n, jnp.zeros_like(last[2]))


_mlstm.defvjp(_mlstm_fwd, _mlstm_bwd)


def _forward(tokens, state, spec):
    """h, the state after the row, and the states before each chunk."""

    def chunk(carry, index):
        state, h = carry
        part, next_state = _chunk_forward(_cut(tokens, index, spec), state, spec)
        return (next_state, _put(h, part, index, spec)), state

    h = jnp.zeros(tokens.v.shape, state[0].dtype)
    indices = jnp.arange(tokens.q.shape[1] // spec.chunk_size)
    (last, h), before = jax.lax.scan(chunk, (state, h), indices)
    return h, last, before


# Chunks are cut from rows and put back where they lie: a scan's own inputs and outputs, with the
# chunks in front, would be copies.
def _cut(tree, index, spec):
    size = spec.chunk_size
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, index * size, size, axis=1), tree)


def _put(tree, part, index, spec):
    start = index * spec.chunk_size
    return jax.tree.map(
        lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, start, axis=1), tree, part
    )


class _Gates(NamedTuple):
    """What the gates of a chunk amount to; heads before time."""

    weights: jax.Array  # [B,H,L,L], of the token in column j for the one in row t
    inter: jax.Array  # [B,H,L], of the state before the chunk for each token
    floor: jax.Array  # [B,H,L], exp(-m) of each token
    write: jax.Array  # [B,H,L], of each token for the state after the chunk
    keep: jax.Array  # [B,H], of the state before the chunk for the one after it
    m: jax.Array  # [B,H], the next


def _gates(tokens, m, cell):
    log_i, log_f = tokens.log_i.swapaxes(1, 2), tokens.log_f.swapaxes(1, 2)
    size = log_f.shape[-1]
    seen = jnp.tril(jnp.ones((size, size), bool))  # rows see columns
    later = ~seen
    if tokens.border is None:
        total = functools.partial(jnp.einsum, "bhl,tl->bht", precision=jax.lax.Precision.HIGHEST)
        fresh = open_end = None
    else:
        document = jnp.cumsum(tokens.border, axis=1)[:, None]
        same = document[..., :, None] == document[..., None, :]
        seen, later = seen & same, later & same
        total = functools.partial(jnp.einsum, "bhl,bxtl->bht", precision=jax.lax.Precision.HIGHEST)
        fresh, open_end = document > 0, document == document[..., -1:]

    def gate_sum(which):
        coarse = jnp.round(log_f / QUANTUM) * QUANTUM
        which = which.astype(log_f.dtype)
        return total(coarse, which), total(log_f - coarse, which)

    coarse, fine = gate_sum(seen)
    b = coarse + fine
    after = sum(gate_sum(later)) + log_i
    column = log_i - fine
    exponent = (coarse[..., :, None] - coarse[..., None, :]) + column[..., None, :]
    exponent = jnp.where(seen, exponent, -jnp.inf)
    before = b + m[..., None]
    if fresh is not None:
        after = jnp.where(open_end, after, -jnp.inf)
        opened = jnp.where(fresh, b, before)  # a document begins with m = 0
    else:
        opened = before
    if cell.input_gate == "exp":
        row_m = jnp.maximum(opened, exponent.max(-1) + fine)
        next_m = jnp.maximum(opened[..., -1], after.max(-1))
        # Only memory that nothing was ever written to has m = -inf.
        base, next_base = (jnp.where(x == -jnp.inf, 0.0, x) for x in (row_m, next_m))
    else:
        base, next_m = jnp.zeros_like(b), m
        next_base = m
    inter, keep = jnp.exp(before - base), jnp.exp(before[..., -1] - next_base)
    if fresh is not None:
        inter, keep = jnp.where(fresh, 0.0, inter), jnp.where(fresh[..., -1], 0.0, keep)
    return _Gates(
        weights=jnp.exp(exponent + (fine - base)[..., None]),
        inter=inter,
        floor=jnp.exp(-base),
        write=jnp.exp(after - next_base[..., None]),
        keep=keep,
        m=next_m,
    )


def _by_head(x, dtype):
    return x.swapaxes(1, 2).astype(dtype)


def _chunk_forward(tokens, state, spec):
    c, n, m = state
    product = functools.partial(jnp.einsum, precision=spec.precision)
    q, k, v = (_by_head(x, c.dtype) for x in tokens[:3])
    gates = _gates(tokens, m, spec.cell)
    weights = product("bhtk,bhjk->bhtj", q, k) * (spec.cell.scale * gates.weights)
    read = q * (spec.cell.scale * gates.inter)[..., None]
    h = product("bhtj,bhjv->bhtv", weights, v) + product("bhtk,bhkv->bhtv", read, c)
    if spec.cell.normalize:
        normaliser = weights.sum(-1) + jnp.sum(read * n[..., None, :], -1)
        h /= (jnp.maximum(jnp.abs(normaliser), gates.floor) + spec.cell.eps)[..., None]
    written = gates.write[..., None] * k
    c = gates.keep[..., None, None] * c + product("bhjk,bhjv->bhkv", written, v)
    n = gates.keep[..., None] * n + written.sum(-2)
    return h.swapaxes(1, 2), (c, n, gates.m)


def _chunk_backward(tokens, state, d_h, later, spec):
    """`(d_c, d_n, total)` of the state before the chunk, given `later`, after it; and its tokens'.

    `total` is the sum of state times gradient, what a factor on the whole memory would change:
    with it the gradients of a chunk's forget gates are sums over the chunk alone.
    """
    c, n, m = state
    d_c, d_n, total = later
    cell = spec.cell
    product = functools.partial(jnp.einsum, precision=spec.precision)
    q, k, v, d_h = (_by_head(x, c.dtype) for x in (*tokens[:3], d_h))
    gates = _gates(tokens, m, cell)
    decay = cell.scale * gates.weights
    weights = product("bhtk,bhjk->bhtj", q, k) * decay
    inter = cell.scale * gates.inter[..., None]
    read = q * inter
    d_numerator = d_h
    if cell.normalize:
        normaliser = weights.sum(-1) + jnp.sum(read * n[..., None, :], -1)
        denominator = jnp.maximum(jnp.abs(normaliser), gates.floor) + cell.eps
        d_numerator = d_h / denominator[..., None]
    d_weights = product("bhtv,bhjv->bhtj", d_numerator, v)
    d_read = product("bhtv,bhkv->bhtk", d_numerator, c)
    d_next_c = d_c
    d_c = gates.keep[..., None, None] * d_c + product("bhtk,bhtv->bhkv", read, d_numerator)
    d_next_n = d_n
    d_n = gates.keep[..., None] * d_n
    if cell.normalize:
        change = jnp.sum(weights * d_weights, -1) + jnp.sum(read * d_read, -1)
        d_normaliser = -change / denominator * jnp.sign(normaliser)
        d_normaliser = jnp.where(jnp.abs(normaliser) > gates.floor, d_normaliser, 0.0)[..., None]
        d_weights += d_normaliser
        d_read += d_normaliser * n[..., None, :]
        d_n += jnp.sum(read * d_normaliser, -2)
    d_scores = d_weights * decay
    d_q = product("bhtj,bhjk->bhtk", d_scores, k) + inter * d_read
    d_written = product("bhjv,bhkv->bhjk", v, d_next_c) + d_next_n[..., None, :]
    write = gates.write[..., None]
    d_k = product("bhtj,bhtk->bhjk", d_scores, q) + write * d_written
    d_v = product("bhtj,bhtv->bhjv", weights, d_numerator)
    d_v += product("bhjk,bhkv->bhjv", write * k, d_next_c)
    d_log_i = jnp.sum(k * d_k, -1)
    d_log_f = _forget_gates(jnp.sum(q * d_q, -1) - d_log_i, total, tokens.border)
    total = jnp.sum(c * d_c, (-2, -1)) + jnp.sum(n * d_n, -1)
    d_tokens = Tokens(d_q, d_k, d_v, d_log_i, d_log_f, None)
    d_tokens = jax.tree.map(
        lambda x, token: x.swapaxes(1, 2).astype(token.dtype),
        d_tokens,
        tokens._replace(border=None),
    )
    return (d_c, d_n, total), d_tokens


def _forget_gates(change, total, border):
    """Sums of `change [B,H,L]` from each token to the end of its document, or of all, `total`."""
    size = change.shape[-1]
    later = jnp.triu(jnp.ones((size, size), bool))
    product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    if border is None:
        return product("bhl,tl->bht", change, later.astype(change.dtype)) + total[..., None]
    document = jnp.cumsum(border, axis=1)[:, None]
    later &= document[..., :, None] == document[..., None, :]
    sums = product("bhl,bxtl->bht", change, later.astype(change.dtype))
    sums += jnp.where(document == document[..., -1:], total[..., None], 0.0)
    return jnp.where(border[:, None], 0.0, sums)  # a document's first gate meets no memory
