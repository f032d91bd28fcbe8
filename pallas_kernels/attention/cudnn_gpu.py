"""Attention on an NVIDIA GPU: cuDNN's flash attention, through `jax.nn.dot_product_attention`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention.xla import Bounds, Spec

IMPLEMENTATION = "cudnn"  # what jax.nn.dot_product_attention calls it
DTYPES = (jnp.bfloat16, jnp.float16)


def unsupported(q: jax.Array, k: jax.Array, v: jax.Array, spec: Spec, bounds: Bounds):
    """Why cuDNN cannot take these arguments, or None if it can."""
    if q.dtype not in DTYPES:
        return f"q has dtype {q.dtype}; cuDNN takes bfloat16 and float16"
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; cuDNN takes one for all"
    if q.shape[3] % 8 or q.shape[3] > 128 or v.shape[3] != q.shape[3]:
        return (
            f"head_dim is {q.shape[3]} for q and k, {v.shape[3]} for v; cuDNN takes one multiple "
            "of 8 up to 128"
        )
    if spec.logit_softcap is not None:
        return "logit_softcap is given, which cuDNN cannot apply"
    if bounds.q_offset is not None:
        return "q_offset is given; cuDNN's causal mask begins at 0"
    if bounds.segment_ids is not None:
        return "segment_ids are given; cuDNN would need the whole [T, S] mask"
    if spec.causal and q.shape[1] != k.shape[1]:
        return f"causal with {q.shape[1]} queries and {k.shape[1]} keys; cuDNN needs equal numbers"
    if spec.sliding_window is not None and not spec.causal:
        return "sliding_window without causal; cuDNN's window is causal"
    if spec.sliding_window is not None and bounds.kv_lengths is not None:
        return "sliding_window with kv_lengths may leave a query nothing to see"
    return None


def attention_cudnn(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S Hk D"],
    v: Float[Array, "B S Hk D"],
    spec: Spec,
    bounds: Bounds,
) -> Float[Array, "B T H D"]:
    """`[B,T,H,D]` on `[B,S,Hk,D]`; arguments that `unsupported` has passed only."""
    lengths = bounds.kv_lengths
    batch, num_queries = q.shape[:2]
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=spec.scale,
        is_causal=spec.causal,
        query_seq_lengths=None if lengths is None else jnp.full(batch, num_queries, jnp.int32),
        # A row of length 0 would be NaN: let it see one key, and drop what it saw.
        key_value_seq_lengths=None
        if lengths is None
        else jnp.maximum(lengths, 1).astype(jnp.int32),
        local_window_size=None if spec.sliding_window is None else (spec.sliding_window - 1, 0),
        implementation=IMPLEMENTATION,
    )
    return out if lengths is None else jnp.where(lengths[:, None, None, None] > 0, out, 0)
