"""KV shifting as one fused pass over the tokens."""

import functools

import jax
import jax.numpy as jnp


# Only the tokens and the weights are kept for the backward pass, not a float32 copy for each tap.
@jax.checkpoint
def shifted(tokens: jax.Array, weights: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """`[B, T, Hk, D]` out of `[B, W - 1 + T, Hk, D]`, whose first W - 1 tokens are the past.

    `segment_ids [B, W - 1 + T]` or None; see `kv_shift`.
    """
    window = weights.shape[1]
    time = tokens.shape[1] - (window - 1)
    accumulate = jnp.promote_types(jnp.float32, tokens.dtype)
    part = functools.partial(jax.lax.slice_in_dim, axis=1)
    out = weights[:, -1, None].astype(accumulate) * part(tokens, window - 1, None).astype(
        accumulate
    )
    if segment_ids is not None:
        connected = jnp.ones((tokens.shape[0], time), bool)
    for tap in reversed(range(window - 1)):
        earlier = part(tokens, tap, tap + time).astype(accumulate)
        if segment_ids is not None:
            ids, later = (
                part(segment_ids, tap, tap + time),
                part(segment_ids, tap + 1, tap + 1 + time),
            )
            connected &= ids == later
            earlier = jnp.where(connected[:, :, None, None], earlier, 0)
        out += weights[:, tap, None].astype(accumulate) * earlier
    return out.astype(tokens.dtype)


def raw_tail(
    tokens: jax.Array, past: int, segment_ids: jax.Array | None, lengths: jax.Array | None
) -> jax.Array:
    """The `past` tokens that end each row, `[B, past, Hk, D]`; arguments as for `shifted`.

    `lengths [B]` counts a row's tokens without the first `past`; None for all.
    """
    if lengths is None:
        lengths = jnp.full(tokens.shape[0], tokens.shape[1] - past)
    index = lengths[:, None] + jnp.arange(past)
    tail = jnp.take_along_axis(tokens, index[:, :, None, None], axis=1)
    if segment_ids is None or past == 0:
        return tail
    ids = jnp.take_along_axis(segment_ids, index, axis=1)
    unbroken = jnp.cumprod((ids == ids[:, -1:])[:, ::-1], axis=1)[:, ::-1] != 0
    return jnp.where(unbroken[:, :, None, None], tail, 0)
