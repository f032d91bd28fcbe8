"""Core context aware attention, dense and in float32: what the fast way is tested on."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cca.pooling import pool_groups


def cca_attention_reference(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hk D"],
    value: Float[Array, "B T Hk Dv"],
    *,
    group_size: int,
    window_size: int,
    pooling: str = "cca",
    sink_tokens: int = 0,
    core_heads: str = "query",
    scale: float | None = None,
    logit_softcap: float | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    starts: Int[Array, " B"] | None = None,
) -> Float[Array, "B T H Dv"]:
    """Arguments and result as `pallas_kernels.cca_attention`; memory O(T²) per head.

    The g tokens up to *every* column are pooled, so a core is named by its last token, and the mask
    alone picks the columns at which groups end.
    """
    batch, time, heads, head_dim = query.shape
    scale = head_dim**-0.5 if scale is None else scale
    column = jnp.arange(time)
    real = jnp.ones((batch, time), bool)
    if starts is not None:
        real &= column >= starts[:, None]
    if lengths is not None:
        real &= column < lengths[:, None]
    if segment_ids is None:
        segment_ids = jnp.zeros((batch, time), jnp.int32)
    border = (segment_ids != jnp.roll(segment_ids, 1, axis=1)) | (real != jnp.roll(real, 1, axis=1))
    segment = jnp.cumsum(border.at[:, 0].set(True), axis=1)
    same = (segment[:, :, None] == segment[:, None, :]) & real[:, :, None] & real[:, None, :]
    number = jnp.sum(same & (column <= column[:, None]), axis=-1)  # of the token in its segment

    members = jnp.maximum(column[:, None] + jnp.arange(1 - group_size, 1), 0)
    core_key, core_value, _ = pool_groups(
        query,
        key[:, members],
        value[:, members],
        pooling=pooling,
        core_heads=core_heads,
        scale=scale,
    )
    folded = group_size * jnp.maximum(0, (number - window_size) // group_size)
    ends_group = number % group_size == 0
    sees_core = same & ends_group[:, None, :] & (number[:, None, :] <= folded[:, :, None])
    sees_raw = (
        same
        & (column <= column[:, None])
        & ((number[:, None, :] > folded[:, :, None]) | (number[:, None, :] <= sink_tokens))
    )
    seen = jnp.concatenate([sees_core, sees_raw], axis=-1)[:, None]

    def per_head(x):
        return jnp.repeat(x.astype(jnp.float32), heads // x.shape[2], axis=2)

    keys = jnp.concatenate([per_head(core_key), per_head(key)], axis=1)
    values = jnp.concatenate([per_head(core_value), per_head(value)], axis=1)
    logits = scale * jnp.einsum(
        "bthd,bshd->bhts", query.astype(jnp.float32), keys, precision=jax.lax.Precision.HIGHEST
    )
    if logit_softcap is not None:
        logits = logit_softcap * jnp.tanh(logits / logit_softcap)
    weights = jax.nn.softmax(jnp.where(seen, logits, jnp.finfo(jnp.float32).min), axis=-1)
    weights = jnp.where(seen, weights, 0.0)
    out = jnp.einsum("bhts,bshd->bthd", weights, values, precision=jax.lax.Precision.HIGHEST)
    return out.astype(query.dtype)
