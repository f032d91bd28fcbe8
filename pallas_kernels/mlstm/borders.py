"""Where documents begin in packed rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def document_borders(
    segment_ids: Int[Array, "B T"] | None,
    mask: Bool[Array, "B T"] | None,
    previous_segment: Int[Array, " B"] | None,
) -> Bool[Array, "B T"] | None:
    """Which real tokens have another id than the real token before them; None if none can.

    A row's first real token is compared with `previous_segment`, and is no border without it.
    """
    if segment_ids is None:
        return None
    batch, time = segment_ids.shape
    column = jnp.broadcast_to(jnp.arange(time), (batch, time))
    if mask is not None:
        column = jax.lax.cummax(jnp.where(mask, column, -1), axis=1)
    # The column of the last real token before each; -1: there is none in the row.
    last = jnp.pad(column[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    before = jnp.take_along_axis(segment_ids, jnp.maximum(last, 0), axis=1)
    border = segment_ids != before
    if previous_segment is None:
        border &= last >= 0
    else:
        border = jnp.where(last >= 0, border, segment_ids != previous_segment[:, None])
    return border if mask is None else border & mask
