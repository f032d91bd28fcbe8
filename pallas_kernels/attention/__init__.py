"""Softmax attention: causal or not, grouped heads, offsets, lengths, packed segments, windows, soft caps."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import xla
from pallas_kernels.attention.reference import attention_reference

__all__ = ["attention", "attention_reference", "compiling_for"]

IMPLEMENTATIONS = ("xla",)

compiling_for = jax.make_user_context(default_value=None)
"""Context manager: the platform (`"tpu"`, `"gpu"`, `"cpu"`) that `implementation=None` is to pick for.

Default None: the platform of `jax.default_backend()`. Compiling ahead of time for another platform
than the one jax runs on needs it, for both tracing and lowering:

    with compiling_for("tpu"):
        compiled = jax.jit(step).lower(*shapes_on_a_tpu_topology).compile()

It is part of jit's cache key, so a function traced for one platform is retraced for another.
"""


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    q_offset: jax.Array | int | None = None,
    kv_lengths: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """`softmax(scale · q kᵀ) v` over the keys each query sees.

    Query i of row b stands at position `p = q_offset[b] + i` in key coordinates. It sees key j if all
    that apply hold: `j <= p` (causal), `j > p - sliding_window`, `j < kv_lengths[b]`, and
    `kv_segment_ids[b, j] == segment_ids[b, i]`. A query that sees nothing returns zeros and passes no
    gradient. Softmax statistics are float32 whatever the inputs.

    Args:
      q: `[B, T, H, D]`, floating.
      k: `[B, S, Hk, D]`; Hk divides H, query head h reads key head `h // (H // Hk)`.
      v: `[B, S, Hk, Dv]`.
      causal: whether queries see only keys up to their own position.
      q_offset: int32 `[B]` or a scalar, None for 0.
      kv_lengths: int32 `[B]`, None for S.
      segment_ids: int32 `[B, T]`; equal ids see each other (0, the padding of packed rows, is an id
        like any other).
      kv_segment_ids: int32 `[B, S]`, None for `segment_ids`, which then needs T = S.
      sliding_window: how many positions back a query sees, itself included; it never hides later
        keys, so without `causal` it bounds the past only.
      logit_softcap: c in `c · tanh(logits / c)`, applied after the scale and before the mask.
      scale: default `D**-0.5`.
      implementation: `"xla"` or None.

    Returns:
      `[B, T, H, Dv]` in q's dtype.

    Raises:
      ValueError: an argument has the wrong shape, type or range.
      NotImplementedError: the named implementation cannot take these arguments here.
    """
    _check(q, k, v, q_offset, kv_lengths, segment_ids, kv_segment_ids)
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(
            f"sliding_window={sliding_window}: must be at least 1 (the query itself) or None"
        )
    if logit_softcap is not None and not logit_softcap > 0:
        raise ValueError(f"logit_softcap={logit_softcap}: must be positive, or None for no cap")
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r}: must be None or one of {IMPLEMENTATIONS}"
        )
    batch, _, _, head_dim = q.shape
    if isinstance(q_offset, int | np.integer) and q_offset == 0:
        q_offset = None
    if q_offset is not None:
        q_offset = jnp.broadcast_to(jnp.asarray(q_offset, jnp.int32), (batch,))
    if segment_ids is not None and kv_segment_ids is None:
        kv_segment_ids = segment_ids
    spec = xla.Spec(
        causal=bool(causal),
        sliding_window=sliding_window,
        logit_softcap=logit_softcap,
        scale=head_dim**-0.5 if scale is None else scale,
    )
    bounds = xla.Bounds(q_offset, kv_lengths, segment_ids, kv_segment_ids)
    return xla.attention_xla(q, k, v, spec, bounds)


def _check(q, k, v, q_offset, kv_lengths, segment_ids, kv_segment_ids):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(
                f"{name} has shape {x.shape}: must be [batch, time, heads, head_dim], 4 dimensions"
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {x.dtype}: must be floating; cast it")
        if math.prod(x.shape) == 0:
            raise ValueError(f"{name} has shape {x.shape}: every dimension must be at least 1")
    batch, num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[1:3]
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(
            f"k has shape {k.shape}: its batch and head_dim must be those of q, {q.shape}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v has shape {v.shape}: its batch, time and heads must be those of k, {k.shape}"
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"k has {num_kv_heads} heads: they must divide the {num_heads} heads of q evenly"
        )
    if q_offset is not None and jnp.shape(q_offset) not in ((), (batch,)):
        raise ValueError(
            f"q_offset has shape {jnp.shape(q_offset)}: must be a scalar or [batch] = ({batch},)"
        )
    expected = {
        "kv_lengths": (kv_lengths, (batch,)),
        "segment_ids": (segment_ids, (batch, num_queries)),
        "kv_segment_ids": (kv_segment_ids, (batch, num_keys)),
    }
    for name, (x, shape) in expected.items():
        if x is not None and jnp.shape(x) != shape:
            raise ValueError(f"{name} has shape {jnp.shape(x)}: must be {shape}")
    for name, x in (
        ("q_offset", q_offset),
        ("kv_lengths", kv_lengths),
        ("segment_ids", segment_ids),
        ("kv_segment_ids", kv_segment_ids),
    ):
        if x is not None and not jnp.issubdtype(jnp.result_type(x), jnp.integer):
            raise ValueError(f"{name} has dtype {jnp.result_type(x)}: must be an integer type")
    if kv_segment_ids is not None and segment_ids is None:
        raise ValueError("kv_segment_ids is given without segment_ids: give both")
    if segment_ids is not None and kv_segment_ids is None and num_keys != num_queries:
        raise ValueError(
            f"segment_ids is given for {num_queries} queries and {num_keys} keys: "
            "give kv_segment_ids too"
        )
