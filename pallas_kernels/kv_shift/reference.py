"""KV shifting, written to be read: what the fast way is tested on."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def kv_shift_reference(
    x: Float[Array, "B T Hk D"],
    weights: Float[Array, "Hk W"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    initial: Float[Array, "B W-1 Hk D"] | None = None,
) -> Float[Array, "B T Hk D"]:
    """A loop over tokens and taps in float32; arguments and result as `pallas_kernels.kv_shift`."""
    batch, time, heads, head_dim = x.shape
    window = weights.shape[1]
    if segment_ids is None:
        segment_ids = jnp.ones((batch, time), jnp.int32)
    if initial is None:
        initial = jnp.zeros((batch, window - 1, heads, head_dim), x.dtype)
    rows = []
    for t in range(time):
        mixed = jnp.zeros((batch, heads, head_dim), jnp.float32)
        same = jnp.ones(batch, bool)
        for back in range(window):
            if back > 0:
                after, before = max(t - back + 1, 0), max(t - back, 0)
                same &= segment_ids[:, after] == segment_ids[:, before]
            token = x[:, t - back] if t >= back else initial[:, window - 1 + t - back]
            weighted = weights[:, window - 1 - back, None] * token.astype(jnp.float32)
            mixed += jnp.where(same[:, None, None], weighted, 0.0)
        rows.append(mixed)
    return jnp.stack(rows, axis=1).astype(x.dtype)
