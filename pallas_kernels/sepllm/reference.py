"""SepLLM attention with a dense mask, written to be read: what is fast is tested on this."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.sepllm.visibility import sepllm_mask


def sepllm_attention_reference(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hk D"],
    value: Float[Array, "B T Hk Dv"],
    is_separator: Bool[Array, "B T"],
    *,
    window: int | None,
    initial_tokens: int,
    lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    starts: Int[Array, " B"] | None = None,
    scale: float | None = None,
    logit_softcap: float | None = None,
) -> Float[Array, "B T H Dv"]:
    """`sepllm_attention` in float32, memory O(T²) per head; output in the dtype of `query`."""
    group = query.shape[2] // key.shape[2]
    scale = query.shape[3] ** -0.5 if scale is None else scale
    exact = jax.lax.Precision.HIGHEST
    k = jnp.repeat(key, group, axis=2).astype(jnp.float32)
    v = jnp.repeat(value, group, axis=2).astype(jnp.float32)
    logits = scale * jnp.einsum("bthd,bshd->bhts", query.astype(jnp.float32), k, precision=exact)
    if logit_softcap is not None:
        logits = logit_softcap * jnp.tanh(logits / logit_softcap)
    seen = sepllm_mask(
        is_separator,
        window=window,
        initial_tokens=initial_tokens,
        lengths=lengths,
        segment_ids=segment_ids,
        starts=starts,
    )[:, None]
    # A finite stand-in for -inf keeps an empty row, and its gradient, free of NaN.
    logits = jnp.where(seen, logits, jnp.finfo(jnp.float32).min)
    weights = jnp.where(seen, jax.nn.softmax(logits, axis=-1), 0.0)
    return jnp.einsum("bhts,bshd->bthd", weights, v, precision=exact).astype(query.dtype)
