"""Blocks of keys chosen by antidiagonal scores: `xattention` (arXiv 2503.16428).

The cache is that of full attention; decoding is dense.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxlab.models.attention import full
from jaxlab.models.attention.sharded import over_mesh
from jaxlab.models.attention.slots import Arrays, CacheSize, on_layer, real_tokens
from jaxlab.models.attention_config import XAttention
from jaxlab.models.config import ModelConfig
from jaxlab.models.layers import LayerKind, TextInfo
from pallas_kernels.xattention import xattention

KEEPS_LESS = False


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
    if query.shape[1] < max(attention.min_length, 2 * attention.block_size):
        # Of two blocks a query sees both anyway.
        return full.attend(query, key, value, config=config, kind=kind, text=text, data=data)

    def operation(query, key, value, per_token, per_head):
        return xattention(
            query,
            key,
            value,
            threshold=per_head["threshold"],
            stride=attention.stride,
            block_size=attention.block_size,
            dense_tail_tokens=attention.dense_tail_tokens,
            segment_ids=per_token.get("segment_ids"),
            scale=config.query_scale,
            logit_softcap=config.attention_softcap,
            implementation=attention.implementation,
        )

    per_token = {} if text.segment_ids is None else {"segment_ids": text.segment_ids}
    per_head = {"threshold": data["threshold"]}
    return over_mesh(operation, query, key, value, per_token=per_token, per_head=per_head)


def init_slots(config: ModelConfig, kind: LayerKind, size: CacheSize) -> Arrays:
    """As full attention's."""
    return full.init_slots(config, kind, size)


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
    """As full attention's; blocks are chosen where the tokens begin at a block's beginning.

    Whether they do is known when running only: all rows that have tokens must hold the same number,
    a multiple of `block_size`, as in a prompt that is read in blocks of such a length.
    """
    attention, lengths = _config(kind), text.lengths
    assert lengths is not None
    options: dict[str, Any] = {"config": config, "kind": kind, "text": text, "data": data}
    room = slots["key"].shape[-3]
    if query.shape[1] < attention.block_size or room < attention.min_length:
        return full.attend_cached(query, key, value, slots, layer, **options)
    num_tokens = real_tokens(text.num_tokens, query)
    offset = jnp.max(jnp.where(num_tokens > 0, lengths, 0))
    aligned = jnp.all((num_tokens == 0) | (lengths == offset))
    aligned &= (offset % attention.block_size == 0) & (offset + query.shape[1] <= room)
    if attention.min_length:
        aligned &= offset + query.shape[1] >= attention.min_length

    def sparse(slots: Arrays) -> tuple[jax.Array, Arrays]:
        slots = full.write(slots, key, value, layer, lengths)

        def one_layer(here: Arrays) -> tuple[jax.Array, Arrays]:
            output = xattention(
                query,
                here["key"].astype(query.dtype),
                here["value"].astype(query.dtype),
                threshold=data["threshold"],
                stride=attention.stride,
                block_size=attention.block_size,
                dense_tail_tokens=attention.dense_tail_tokens,
                lengths=jnp.minimum(lengths + num_tokens, room),
                query_offset=offset,
                scale=config.query_scale,
                logit_softcap=config.attention_softcap,
                implementation=attention.implementation,
            )
            return output, {}

        return on_layer(slots, layer, one_layer)

    return jax.lax.cond(
        aligned,
        sparse,
        lambda slots: full.attend_cached(query, key, value, slots, layer, **options),
        slots,
    )


def _config(kind: LayerKind) -> XAttention:
    assert isinstance(kind.attention, XAttention)
    return kind.attention
