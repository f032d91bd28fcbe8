"""Initial tokens, separators and a window (SepLLM, arXiv 2412.12094): the pattern `sepllm`.

The cache holds a ring of the window's tokens and a store of the initial tokens and separators, each
written once, when the token comes. A query reads a token from the ring while it is in its window,
from the store after; so nothing moves when a token leaves the window, and `rewind` only masks.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.errors import ConfigError
from jaxlab.models.attention import full
from jaxlab.models.attention.ring import ring_positions, write_ring
from jaxlab.models.attention.sharded import over_mesh
from jaxlab.models.attention.slots import (
    Arrays,
    CacheSize,
    in_blocks,
    on_layer,
    real_tokens,
)
from jaxlab.models.attention_config import SepLLMAttention
from jaxlab.models.config import ModelConfig
from jaxlab.models.layers import LayerKind, TextInfo
from jaxlab.models.rope import apply_rope
from pallas_kernels.attention.slots import Slots, attention_over_slots
from pallas_kernels.sepllm import sepllm_attention

KEEPS_LESS = True
_NOWHERE = np.int32(2**30)  # the position of a slot that holds nothing
# Tokens that read a cache at a time: bounds the logits' memory.
_BLOCK = 256


def separator_mask(config: ModelConfig, tokens: jax.Array) -> jax.Array | None:
    """Where `tokens [B, T]` are separators, bool; None if no layer asks for them.

    Raises:
      ConfigError: the separators are still a rule's name or strings, not token ids.
    """
    patterns = [a for a in config.layer_attention if isinstance(a, SepLLMAttention)]
    if not patterns:
        return None
    separators = patterns[0].separators
    if separators == "none":
        return jnp.zeros(tokens.shape, bool)
    if not isinstance(separators, tuple) or not all(isinstance(i, int) for i in separators):
        raise ConfigError(
            f"attention.separators is {separators!r}, which only a tokenizer can turn into token "
            "ids: load the model with its tokenizer (`jaxlab.load`, `jaxlab train`), call "
            "`resolve_attention(config, tokenizer)`, or list the ids"
        )
    table = np.zeros(config.vocab_size, bool)
    table[[int(i) for i in separators]] = True
    return jnp.asarray(table)[tokens]


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
    if attention.window == "full":
        return full.attend(query, key, value, config=config, kind=kind, text=text, data=data)
    window = attention.window
    assert isinstance(window, int)
    assert text.is_separator is not None

    def operation(query, key, value, per_token, per_head):
        return sepllm_attention(
            query,
            key,
            value,
            per_token["is_separator"],
            window=window,
            initial_tokens=attention.initial_tokens,
            segment_ids=per_token.get("segment_ids"),
            scale=config.query_scale,
            logit_softcap=config.attention_softcap,
            implementation=attention.implementation,
        )

    per_token = {"is_separator": text.is_separator}
    if text.segment_ids is not None:
        per_token["segment_ids"] = text.segment_ids
    return over_mesh(operation, query, key, value, per_token=per_token)


def init_slots(config: ModelConfig, kind: LayerKind, size: CacheSize) -> Arrays:
    """The ring of the window, and the store: `kept_key`, `kept_value`, `kept_position`."""
    attention = _config(kind)
    if attention.streaming:
        return _stream_slots(config, attention, size)
    if attention.window == "full":
        return full.init_slots(config, kind, size)
    heads = (config.num_kv_heads, config.head_dim)
    separators = attention.separator_capacity
    room = size.max_length
    if separators is not None:
        room = min(room, attention.initial_tokens + separators)
    window = attention.window
    assert isinstance(window, int)
    ring = (size.batch, min(window - 1 + size.max_pending, size.max_length), *heads)
    kept = (size.batch, room, *heads)
    return {
        "key": jnp.zeros(ring, size.dtype),
        "value": jnp.zeros(ring, size.dtype),
        "kept_key": jnp.zeros(kept, size.dtype),
        "kept_value": jnp.zeros(kept, size.dtype),
        "kept_position": jnp.full(kept[:2], _NOWHERE),
        "overflow": jnp.zeros((size.batch,), bool),
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
    """Append a block to each row's slots and attend to what the pattern shows of the row.

    A row whose store overflows (`separator_capacity`) gives NaN from there on, never an answer
    without some of its separators; `KVCache.check_room` names it.
    """
    attention = _config(kind)
    if attention.streaming:
        return _attend_streaming(query, key, value, slots, layer, config=config, text=text)
    if attention.window == "full":
        return full.attend_cached(
            query, key, value, slots, layer, config=config, kind=kind, text=text, data=data
        )
    lengths = text.lengths
    assert lengths is not None
    assert text.is_separator is not None
    num_tokens = real_tokens(text.num_tokens, query)
    is_separator = text.is_separator

    one_block = partial(_one_block, config=config, attention=attention)
    arrays = (query, key, value, is_separator)
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
    attention: SepLLMAttention,
) -> tuple[jax.Array, Arrays]:
    query, key, value, is_separator = arrays
    window = attention.window
    assert isinstance(window, int)
    block = query.shape[1]
    token = jnp.arange(block, dtype=jnp.int32)
    position = lengths[:, None] + token
    keeps = is_separator | (position < attention.initial_tokens)

    # What was taken back is forgotten before new tokens come to stand at its positions.
    kept = jnp.where(slots["kept_position"] < lengths[:, None], slots["kept_position"], _NOWHERE)
    count = jnp.sum(kept < _NOWHERE, axis=1, dtype=jnp.int32)
    ring = ring_positions(lengths, slots["key"].shape[1])
    oldest = position[:, :, None] - window  # the newest position outside a query's window
    in_ring = (ring[:, None] > oldest) & (ring[:, None] >= 0)
    distance = token[:, None] - token
    in_block = (distance >= 0) & ((distance < window) | keeps[:, None])
    output = attention_over_slots(
        query,
        [
            Slots(slots["kept_key"], slots["kept_value"], kept[:, None] <= oldest, count.max()),
            Slots(slots["key"], slots["value"], in_ring),
            Slots(key, value, jnp.broadcast_to(in_block, (query.shape[0], block, block))),
        ],
        scale=config.query_scale,
        logit_softcap=config.attention_softcap,
    )

    writes = keeps & (token < num_tokens[:, None])
    slot = count[:, None] + jnp.cumsum(writes, axis=1, dtype=jnp.int32) - 1
    room = kept.shape[1]
    slot = jnp.where(writes, slot, room)  # beyond the end: dropped
    rows = jnp.arange(query.shape[0])[:, None]
    overflow = count + jnp.sum(writes, axis=1, dtype=jnp.int32) > room
    overflow |= slots["overflow"]
    output = jnp.where(overflow[:, None, None, None], jnp.nan, output)

    def keep(array: jax.Array, new: jax.Array) -> jax.Array:
        return array.at[rows, slot].set(new.astype(array.dtype), mode="drop")

    return output, {
        "key": write_ring(slots["key"], key, lengths, num_tokens),
        "value": write_ring(slots["value"], value, lengths, num_tokens),
        "kept_key": keep(slots["kept_key"], key),
        "kept_value": keep(slots["kept_value"], value),
        "kept_position": keep(kept, position),
        "overflow": overflow,
    }


def _config(kind: LayerKind) -> SepLLMAttention:
    assert isinstance(kind.attention, SepLLMAttention)
    return kind.attention


def _stream_slots(config: ModelConfig, attention: SepLLMAttention, size: CacheSize) -> Arrays:
    """Unrotated keys, and values, of at most `capacity` tokens and the one that is too many."""
    shape = (size.batch, attention.capacity + 1, config.num_kv_heads, config.head_dim)
    return {name: jnp.zeros(shape, size.dtype) for name in ("key", "value")}


def _attend_streaming(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slots: Arrays,
    layer: jax.Array | int | None,
    *,
    config: ModelConfig,
    text: TextInfo,
) -> tuple[jax.Array, Arrays]:
    """Everything cached and the block itself, rotated by their places in the cache."""
    assert text.used is not None
    assert text.slot_rope is not None
    used, slot_rope = text.used, text.slot_rope
    block = query.shape[1]
    token = jnp.arange(block, dtype=jnp.int32)
    num_tokens = real_tokens(text.num_tokens, query)

    def one_layer(slots: Arrays) -> tuple[jax.Array, Arrays]:
        room = slots["key"].shape[1]
        cached = jnp.broadcast_to(
            jnp.arange(room) < used[:, None, None], (query.shape[0], block, room)
        )
        causal = jnp.broadcast_to(token <= token[:, None], (query.shape[0], block, block))
        output = attention_over_slots(
            apply_rope(query, *text.rope),
            [
                Slots(
                    apply_rope(slots["key"].astype(key.dtype), *slot_rope), slots["value"], cached
                ),
                Slots(apply_rope(key, *text.rope), value, causal),
            ],
            scale=config.query_scale,
            logit_softcap=config.attention_softcap,
        )
        place = jnp.where(token < num_tokens[:, None], used[:, None] + token, room)
        rows = jnp.arange(query.shape[0])[:, None]
        return output, {
            name: slots[name].at[rows, place].set(new.astype(slots[name].dtype), mode="drop")
            for name, new in (("key", key), ("value", value))
        }

    return on_layer(slots, layer, one_layer)
