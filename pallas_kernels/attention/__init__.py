"""Softmax attention: grouped heads, offsets, lengths, packed segments, windows, soft caps."""

import jax

from pallas_kernels.attention.dispatch import compiling_for, resolve
from pallas_kernels.attention.reference import attention_reference
from pallas_kernels.attention.sharded import sharded_attention

__all__ = ["attention", "attention_reference", "compiling_for", "sharded_attention"]


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

    Query i of row b stands at position `p = q_offset[b] + i` in key coordinates. It sees key j if
    all that apply hold: `j <= p` (causal), `j > p - sliding_window`, `j < kv_lengths[b]`, and
    `kv_segment_ids[b, j] == segment_ids[b, i]`. A query that sees nothing returns zeros and passes
    no gradient. Softmax statistics are float32 whatever the inputs.

    Under a mesh that splits the arguments use `sharded_attention`.

    Args:
      q: `[B, T, H, D]`, floating.
      k: `[B, S, Hk, D]`; Hk divides H, query head h reads key head `h // (H // Hk)`.
      v: `[B, S, Hk, Dv]`.
      causal: whether queries see only keys up to their own position.
      q_offset: int32 `[B]` or a scalar, None for 0; a Python int is known when tracing.
      kv_lengths: int32 `[B]`, None for S.
      segment_ids: int32 `[B, T]`; equal ids see each other (0, the padding of packed rows, is an id
        like any other).
      kv_segment_ids: int32 `[B, S]`, None for `segment_ids`, which then needs T = S.
      sliding_window: how many positions back a query sees, itself included; it never hides later
        keys, so without `causal` it bounds the past only.
      logit_softcap: c in `c · tanh(logits / c)`, applied after the scale and before the mask.
      scale: default `D**-0.5`.
      implementation: `"xla"` (anywhere), `"pallas"` (TPU: splash attention) or `"cudnn"` (GPU).
        None picks the platform's own if it takes these arguments, else xla, so it always works; the
        platform is that of `jax.default_backend()` unless `compiling_for` says otherwise. On a TPU
        `q_offset` must be an int and `kv_lengths` None for the kernel; cuDNN takes neither offsets,
        segments nor soft caps, and bfloat16 or float16 only.

    Returns:
      `[B, T, H, Dv]` in q's dtype.

    Raises:
      ValueError: an argument has the wrong shape, type or range.
      NotImplementedError: the named implementation cannot take these arguments here.
    """
    call = resolve(
        q,
        k,
        v,
        causal=causal,
        q_offset=q_offset,
        kv_lengths=kv_lengths,
        segment_ids=segment_ids,
        kv_segment_ids=kv_segment_ids,
        sliding_window=sliding_window,
        logit_softcap=logit_softcap,
        scale=scale,
        implementation=implementation,
    )
    return call.run(q, k, v)
