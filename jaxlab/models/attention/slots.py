"""What the caches of all patterns share: sizes, and arrays with or without a layer axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Arrays = dict[str, jax.Array]


class CacheSize(NamedTuple):
    """How large a layer's slots are; see `init_cache`."""

    batch: int
    max_length: int
    max_pending: int
    dtype: Any


def on_layer(
    slots: Arrays, layer: jax.Array | int | None, function: Callable[[Arrays], tuple[Any, Arrays]]
) -> tuple[Any, Arrays]:
    """`function` of one layer's slots, where those of several are stacked; updates may be partial.

    For slots that are small: it copies them out of the stack and back.
    """
    if layer is None:
        result, new = function(slots)
        return result, {**slots, **new}
    here = {
        name: jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)
        for name, array in slots.items()
    }
    result, new = function(here)
    return result, {
        **slots,
        **{
            name: jax.lax.dynamic_update_index_in_dim(slots[name], array, layer, 0)
            for name, array in new.items()
        },
    }


def real_tokens(num_tokens: jax.Array | None, block: jax.Array) -> jax.Array:
    """int32 `[B]`: how many tokens of `block [B, T, …]` are real; None stands for all."""
    if num_tokens is None:
        return jnp.full((block.shape[0],), block.shape[1], jnp.int32)
    return num_tokens
