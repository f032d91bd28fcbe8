"""Dense causal attention, with an optional sliding window: the pattern `full`."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlab.models.attention.slots import Arrays, CacheSize
from jaxlab.models.attention_config import FullAttention
from jaxlab.models.config import ModelConfig
from jaxlab.models.layers import LayerKind, TextInfo
from pallas_kernels import attention, sharded_attention
from pallas_kernels.attention.cached import MAX_ROWS, cached_attention

KEEPS_LESS = False


def init_slots(config: ModelConfig, kind: LayerKind, size: CacheSize) -> Arrays:
    """`key` and `value`, a slot for every position: `[B, max_length, Hk, D]`."""
    shape = (size.batch, size.max_length, config.num_kv_heads, config.head_dim)
    return {name: jnp.zeros(shape, size.dtype) for name in ("key", "value")}


def attend(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hk D"],
    value: Float[Array, "B T Hk D"],
    *,
    config: ModelConfig,
    kind: LayerKind,
    text: TextInfo,
    data: Arrays,
) -> Float[Array, "B T H D"]:
    """Attention of a whole text to itself: `[B, T, H, D]` from `[B, T, H | Hk, D]`."""
    options: dict[str, Any] = {
        "segment_ids": text.segment_ids,
        "sliding_window": kind.window,
        "logit_softcap": config.attention_softcap,
        "scale": config.query_scale,
        "implementation": _implementation(kind),
    }
    batch_axes, sequence_axis, head_axis = mesh_axes(query.shape)
    if not (batch_axes or sequence_axis or head_axis):
        return attention(query, key, value, **options)
    return sharded_attention(
        query,
        key,
        value,
        batch_axes=batch_axes,
        sequence_axis=sequence_axis,
        head_axis=head_axis,
        **options,
    )


def attend_cached(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hk D"],
    value: Float[Array, "B T Hk D"],
    slots: Arrays,
    layer: jax.Array | int | None,
    *,
    config: ModelConfig,
    kind: LayerKind,
    text: TextInfo,
    data: Arrays,
) -> tuple[Float[Array, "B T H D"], Arrays]:
    """Append a block of T tokens to each row's slots and attend to everything the row then holds.

    Args:
      query, key, value: the block, `[B, T, H | Hk, D]`.
      slots: `{"key", "value"}`, `[B, S, Hk, D]`, or `[L, B, S, Hk, D]` of which `layer` is meant.
      layer: index into the leading axis, None if there is none.
      text: its `lengths` say how many tokens each row holds before the block. Tokens beyond its
        `num_tokens` are written too, where the next block overwrites them.

    Returns:
      The block's attention `[B, T, H, D]`, and `slots` with the block written.
    """
    new = {"key": key, "value": value}
    lengths = text.lengths
    assert lengths is not None
    implementation = _implementation(kind)
    block_length, num_heads = query.shape[1:3]
    if (
        layer is None  # one array a layer is the layout for CPU
        and implementation in (None, "xla")
        and block_length * num_heads <= MAX_ROWS
    ):
        output = cached_attention(
            query,
            key,
            value,
            slots["key"].astype(query.dtype),
            slots["value"].astype(query.dtype),
            lengths,
            sliding_window=kind.window,
            logit_softcap=config.attention_softcap,
            scale=config.query_scale,
        )
        start = _known_after(output, lengths)
        return output, slots | {n: _write_block(slots[n], layer, start, new[n]) for n in new}

    slots = write(slots, key, value, layer, lengths)
    here = {name: slots[name] for name in new}
    if layer is not None:
        here = {
            name: jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)
            for name, array in here.items()
        }
    output = attention(
        query,
        here["key"].astype(query.dtype),
        here["value"].astype(query.dtype),
        q_offset=lengths,
        kv_lengths=lengths + query.shape[1],
        sliding_window=kind.window,
        logit_softcap=config.attention_softcap,
        scale=config.query_scale,
        implementation=implementation,
    )
    return output, slots


def write(
    slots: Arrays,
    key: jax.Array,
    value: jax.Array,
    layer: jax.Array | int | None,
    lengths: jax.Array,
) -> Arrays:
    """`slots` with a block of keys and values `[B, T, Hk, D]` behind what each row holds."""
    new = {"key": key, "value": value}
    return slots | {name: _write_block(slots[name], layer, lengths, new[name]) for name in new}


def _implementation(kind: LayerKind) -> str | None:
    # Other patterns come here for their dense part, whose implementation they do not choose.
    attention = kind.attention
    return attention.implementation if isinstance(attention, FullAttention) else None


def _known_after(output: jax.Array, lengths: jax.Array) -> jax.Array:
    """`lengths`, in a form that XLA cannot know before `output`.

    A write at these positions comes after the reads that made `output`, so it can be done in place;
    without the order XLA copies the cache first. Nothing is greater than infinity.
    """
    return lengths + (output[:, 0, 0, 0] > jnp.inf).astype(lengths.dtype)


def mesh_axes(shape: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """The mesh axes that split batch, time and heads of a query, by the logical rules in force.

    An axis of one device splits nothing, nor does one that does not divide its dimension.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None, None, None
    axes = nn.logical_to_mesh_axes(("batch", "length", "heads"))

    def usable(names: str | tuple[str, ...] | None, size: int) -> Any:
        names = (names,) if isinstance(names, str) else names or ()
        names = tuple(name for name in names if mesh.shape.get(name, 1) > 1)
        parts = math.prod(mesh.shape[name] for name in names)
        return names if names and size % parts == 0 else None

    batch, length, heads = (usable(names, size) for names, size in zip(axes, shape, strict=False))
    return batch, length and length[0], heads and heads[0]


def _write_block(
    slots: jax.Array, layer: jax.Array | int | None, lengths: jax.Array, block: jax.Array
) -> jax.Array:
    """Write `block [B, T, Hk, D]` into each row of `slots` from slot `lengths[row]` on."""
    block = block.astype(slots.dtype)
    batch, block_length = block.shape[:2]
    if batch == 1:
        # One contiguous copy, where a scatter would move the rows one by one.
        start = (0, lengths[0], 0, 0)
        if layer is None:
            return jax.lax.dynamic_update_slice(slots, block, start)
        return jax.lax.dynamic_update_slice(slots, block[None], (layer, *start))
    rows = jnp.arange(batch)[:, None]
    columns = lengths[:, None] + jnp.arange(block_length)
    index = (rows, columns) if layer is None else (layer, rows, columns)
    return slots.at[index].set(block, mode="drop", unique_indices=True, indices_are_sorted=True)
