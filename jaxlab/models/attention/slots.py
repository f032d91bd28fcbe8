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


def in_blocks(
    one_block: Callable[..., tuple[jax.Array, Arrays]],
    arrays: tuple[jax.Array, ...],
    slots: Arrays,
    lengths: jax.Array,
    num_tokens: jax.Array,
    size: int,
) -> tuple[jax.Array, Arrays]:
    """A long block as several of at most `size` tokens, one after another.

    Args:
      one_block: `(arrays, slots, lengths, num_tokens) -> (output, slots)`.
      arrays: `[B, T, …]` each.
      slots: of one layer.
      lengths: int32 `[B]`, tokens of each row before the block.
      num_tokens: int32 `[B]`, how many of the T tokens are real.
      size: bounds the memory of the logits.
    """
    length = arrays[0].shape[1]
    if length <= size:
        return one_block(arrays, slots, lengths, num_tokens)
    count = -(-length // size)

    def cut(x: jax.Array) -> jax.Array:
        padding = [(0, 0), (0, count * size - length), *[(0, 0)] * (x.ndim - 2)]
        return jnp.pad(x, padding).reshape(x.shape[0], count, size, *x.shape[2:]).swapaxes(0, 1)

    def step(slots: Arrays, inputs: tuple[jax.Array, tuple[jax.Array, ...]]):
        start, parts = inputs
        here = jnp.clip(num_tokens - start, 0, size)
        output, slots = one_block(parts, slots, lengths + jnp.minimum(start, num_tokens), here)
        return slots, output

    starts = jnp.arange(count, dtype=jnp.int32) * size
    slots, output = jax.lax.scan(step, slots, (starts, tuple(map(cut, arrays))))
    output = output.swapaxes(0, 1).reshape(output.shape[1], count * size, *output.shape[3:])
    return output[:, :length], slots


def real_tokens(num_tokens: jax.Array | None, block: jax.Array) -> jax.Array:
    """int32 `[B]`: how many tokens of `block [B, T, …]` are real; None stands for all."""
    if num_tokens is None:
        return jnp.full((block.shape[0],), block.shape[1], jnp.int32)
    return num_tokens
