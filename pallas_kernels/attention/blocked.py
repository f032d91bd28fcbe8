"""What blocked attention is made of: products, softmax statistics, cutting into blocks.

Logits are masked with -inf; a softmax's statistics are float32 whatever the input type.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

# Measured on a 2-core x86-64 CPU with 1 MiB of L2 cache a core by scripts/bench_dense_attention.py:
# the largest block whose logits, over batch and heads, number at most this; not above or below.
BLOCK_LOGITS = 2**20
BLOCK_SIZES = (512, 256, 128)


def dot(equation, a, b):
    """`einsum` with a float32 result."""
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def cap_logits(logits, spec: Any):
    """`c · tanh(logits / c)` with c the spec's `logit_softcap`; None leaves them as they are."""
    if spec.logit_softcap is None:
        return logits
    return spec.logit_softcap * jnp.tanh(logits * (1.0 / spec.logit_softcap))


def safe_maximum(maximum):
    """A row that has seen nothing has maximum -inf; subtract 0 from its logits instead."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)


def log_sum_exp(maximum, total):
    """Of logits with this maximum and sum of exponentials; +inf where nothing was seen."""
    return jnp.where(total > 0, maximum + jnp.log(jnp.where(total > 0, total, 1.0)), jnp.inf)


def reciprocal(total):
    """`1 / total`, 0 where nothing was seen."""
    return jnp.where(total > 0, 1.0 / jnp.where(total > 0, total, 1.0), 0.0)


def row_delta(out, d_out, num_kv_heads):
    """`sum_d out·d_out`, float32 `[B,Hk,G,T]`: what the softmax's normaliser takes back."""
    batch, time, heads, _ = out.shape
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    return delta.reshape(batch, time, num_kv_heads, heads // num_kv_heads).transpose(0, 2, 3, 1)


def logit_gradient(weights, d_weights, delta, logits, spec):
    """Gradient of the uncapped logits; `delta` broadcasts against `weights`."""
    d_logits = weights * (d_weights - delta)
    if spec.logit_softcap is not None:
        # d/dx c·tanh(x/c) = 1 - tanh², from the capped value; masked logits are -inf with weight 0.
        tanh = jnp.where(weights > 0, logits, 0.0) * (1.0 / spec.logit_softcap)
        d_logits = d_logits * (1.0 - tanh * tanh)
    return d_logits


class Blocks(NamedTuple):
    """How `[T, S]` is cut: `num_queries x num_keys` blocks of `query_size x key_size`."""

    query_size: int
    key_size: int
    num_queries: int
    num_keys: int


def pad_axis(x, axis, length):
    """`x` (or None) with zeros at the end of an axis, up to a length."""
    if x is None or x.shape[axis] == length:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths)


def cut_queries(x, num_kv_heads, blocks):
    """`[B,T,H,D]` to `[nq,B,Hk,G·bq,D]`, zero-padded: the rows of one key head in one matrix."""
    batch, _, heads, dim = x.shape
    x = pad_axis(x, 1, blocks.num_queries * blocks.query_size)
    x = x.reshape(
        batch, blocks.num_queries, blocks.query_size, num_kv_heads, heads // num_kv_heads, dim
    )
    x = x.transpose(1, 0, 3, 4, 2, 5)
    return x.reshape(blocks.num_queries, batch, num_kv_heads, -1, dim)


def join_queries(x, num_queries, group):
    """Inverse of `cut_queries`."""
    count, batch, kv_heads, rows, dim = x.shape
    x = x.reshape(count, batch, kv_heads, group, rows // group, dim).transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(batch, -1, kv_heads * group, dim)[:, :num_queries]


def cut_keys(x, blocks):
    """`[B,S,Hk,D]` to `[nk,B,Hk,bk,D]`, zero-padded."""
    batch, _, heads, dim = x.shape
    x = pad_axis(x, 1, blocks.num_keys * blocks.key_size)
    return x.reshape(batch, blocks.num_keys, blocks.key_size, heads, dim).transpose(1, 0, 3, 2, 4)


def join_keys(x, num_keys):
    """Inverse of `cut_keys`."""
    count, batch, heads, size, dim = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(batch, count * size, heads, dim)[:, :num_keys]
