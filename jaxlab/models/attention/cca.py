"""Core tokens for what is far, every token for what is near (CCA, arXiv 2412.12465): pattern `cca`.

The cache holds a ring of recent tokens and a core token for every complete group. A group is pooled
when its last token comes, whose query weighs it, and read when it has left every window; so nothing
moves, and a core that tokens taken back had made is made again with the tokens that replace them.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxlab.models.attention.ring import read_ring, ring_positions, write_ring
from jaxlab.models.attention.sharded import over_mesh
from jaxlab.models.attention.slots import (
    Arrays,
    CacheSize,
    in_blocks,
    on_layer,
    real_tokens,
)
from jaxlab.models.attention_config import CCAAttention
from jaxlab.models.config import ModelConfig
from jaxlab.models.layers import LayerKind, TextInfo
from pallas_kernels.attention.slots import Slots, attention_over_slots
from pallas_kernels.cca import cca_attention, pool_groups

KEEPS_LESS = True
# Tokens that read a cache at a time: bounds the logits' memory.
_BLOCK = 256


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    config: ModelConfig,
    kind: LayerKind,
    text: TextInfo,
    data: Arrays,
) -> jax.Array:
    """Attention of a whole text to itself: `[B, T, H, D]` from `[B, T, H | Hk, D]`."""
    attention = _config(kind)

    def operation(query, key, value, per_token, per_head):
        return cca_attention(
            query,
            key,
            value,
            group_size=attention.group_size,
            window_size=attention.window_size,
            pooling=attention.pooling,
            core_heads=attention.core_heads,
            sink_tokens=attention.sink_tokens,
            segment_ids=per_token.get("segment_ids"),
            scale=config.query_scale,
            logit_softcap=config.attention_softcap,
            implementation=attention.implementation,
        )

    per_token = {} if text.segment_ids is None else {"segment_ids": text.segment_ids}
    return over_mesh(operation, query, key, value, per_token=per_token)


def init_slots(config: ModelConfig, kind: LayerKind, size: CacheSize) -> Arrays:
    """`key`, `value`: the ring; `core_…`: a core a group; `sink_…`: the first tokens."""
    attention = _config(kind)
    group, window = attention.group_size, attention.window_size
    # Between window and window + group - 1 tokens are seen one by one; a group that completes
    # reaches back group - 1 more.
    ring = min(window + group + size.max_pending, size.max_length)
    # The cores of the last window tokens are never seen.
    cores = max(1, size.max_length // group)
    core_heads = config.num_heads if attention.core_heads == "query" else config.num_kv_heads
    sizes = {
        "": (ring, config.num_kv_heads),
        "core_": (cores, core_heads),
        "sink_": (attention.sink_tokens, config.num_kv_heads),
    }
    return {
        f"{prefix}{name}": jnp.zeros((size.batch, count, heads, config.head_dim), size.dtype)
        for prefix, (count, heads) in sizes.items()
        if count
        for name in ("key", "value")
    }


def attend_cached(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slots: Arrays,
    layer: jax.Array | int | None,
    *,
    config: ModelConfig,
    kind: LayerKind,
    text: TextInfo,
    data: Arrays,
) -> tuple[jax.Array, Arrays]:
    """Append a block to each row's slots and attend to its cores and recent tokens."""
    attention = _config(kind)
    lengths = text.lengths
    assert lengths is not None
    num_tokens = real_tokens(text.num_tokens, query)

    one_block = partial(_one_block, config=config, attention=attention)
    arrays = (query, key, value)
    return on_layer(
        slots,
        layer,
        lambda slots: in_blocks(one_block, arrays, slots, lengths, num_tokens, _BLOCK),
    )


def _one_block(
    arrays: tuple[jax.Array, ...],
    slots: Arrays,
    lengths: jax.Array,
    num_tokens: jax.Array,
    *,
    config: ModelConfig,
    attention: CCAAttention,
) -> tuple[jax.Array, Arrays]:
    query, key, value = arrays
    slots = slots | _pool(query, key, value, slots, lengths, num_tokens, config, attention)
    group, window = attention.group_size, attention.window_size
    block = query.shape[1]
    token = jnp.arange(block, dtype=jnp.int32)
    position = lengths[:, None] + token
    # Groups that a query sees as cores: those whose last token is `window` or more behind it.
    far = jnp.maximum(position + 1 - window, 0) // group
    near = far * group  # the first position that it sees as it is
    core = jnp.arange(slots["core_key"].shape[1], dtype=jnp.int32)
    ring = ring_positions(lengths, slots["key"].shape[1])
    in_block = (token <= token[:, None]) & (position[:, None] >= near[:, :, None])
    sets = [
        Slots(slots["core_key"], slots["core_value"], core < far[:, :, None], far.max()),
        Slots(slots["key"], slots["value"], (ring[:, None] >= near[:, :, None])),
        Slots(key, value, in_block),
    ]
    new = {name: write_ring(slots[name], x, lengths, num_tokens) for name, x in _pair(key, value)}
    if attention.sink_tokens:
        new |= _write_sinks(key, value, slots, lengths, num_tokens)
        sink = jnp.arange(attention.sink_tokens, dtype=jnp.int32)
        sets.append(Slots(new["sink_key"], new["sink_value"], sink < near[:, :, None]))
    output = attention_over_slots(
        query, sets, scale=config.query_scale, logit_softcap=config.attention_softcap
    )
    return output, slots | new


def _pool(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slots: Arrays,
    lengths: jax.Array,
    num_tokens: jax.Array,
    config: ModelConfig,
    attention: CCAAttention,
) -> Arrays:
    """The cores, with those of the groups that the block completes."""
    group = attention.group_size
    if slots["key"].shape[1] < group + attention.window_size:
        return {}  # no row gets long enough to see a core
    batch, block = query.shape[:2]
    count = (block - 1) // group + 1  # so many groups can end within a block
    # The group that the block's first token is in, and the next ones.
    groups = (lengths // group)[:, None] + jnp.arange(count, dtype=jnp.int32)
    last = groups * group + group - 1
    complete = last < (lengths + num_tokens)[:, None]
    members = (groups[:, :, None] * group + jnp.arange(group, dtype=jnp.int32)).reshape(batch, -1)
    grouped = {
        name: read_ring(slots[name], x, lengths, members).reshape(batch, count, group, *x.shape[2:])
        for name, x in _pair(key, value)
    }
    rows = jnp.arange(batch)[:, None]
    weighing = query[rows, jnp.clip(last - lengths[:, None], 0, block - 1)]
    core_key, core_value, _ = pool_groups(
        weighing,
        grouped["key"],
        grouped["value"],
        pooling=attention.pooling,
        core_heads=attention.core_heads,
        scale=config.query_scale,
    )
    room = slots["core_key"].shape[1]
    slot = jnp.where(complete, groups, room)  # beyond the end: dropped

    def write(array: jax.Array, new: jax.Array) -> jax.Array:
        return array.at[rows, slot].set(new.astype(array.dtype), mode="drop")

    return {
        "core_key": write(slots["core_key"], core_key),
        "core_value": write(slots["core_value"], core_value),
    }


def _write_sinks(
    key: jax.Array, value: jax.Array, slots: Arrays, lengths: jax.Array, num_tokens: jax.Array
) -> Arrays:
    token = jnp.arange(key.shape[1], dtype=jnp.int32)
    room = slots["sink_key"].shape[1]
    slot = jnp.where(token < num_tokens[:, None], lengths[:, None] + token, room)
    rows = jnp.arange(key.shape[0])[:, None]
    return {
        f"sink_{name}": slots[f"sink_{name}"]
        .at[rows, slot]
        .set(x.astype(slots[f"sink_{name}"].dtype), mode="drop")
        for name, x in _pair(key, value)
    }


def _pair(key: jax.Array, value: jax.Array) -> tuple[tuple[str, jax.Array], ...]:
    return (("key", key), ("value", value))


def _config(kind: LayerKind) -> CCAAttention:
    assert isinstance(kind.attention, CCAAttention)
    return kind.attention
