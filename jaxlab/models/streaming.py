"""Text without end through a cache of fixed size: SepLLM's streaming (arXiv 2412.12094 §3.3).

The cache keeps keys as they are, before the rotary embedding; a token's position is its place in
the cache, so positions never grow beyond the capacity. Once a row holds more than that, it is
compressed: initial tokens, the last separators and the local window stay. Between two compressions
nothing moves, so the tokens up to the next one are read as one block, and the result is that of
reading them one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxlab.models.attention_config import SepLLMAttention
from jaxlab.models.cache import KVCache, StreamState
from jaxlab.models.config import ModelConfig
from jaxlab.models.layers import TextInfo
from jaxlab.models.rope import rope_table
from pallas_kernels.sepllm.streaming import compress, take_slots, tokens_before_compression

_MOVED = ("key", "value")  # what of a layer lies in the stream's slots
RunLayers = Callable[[jax.Array, TextInfo, KVCache], tuple[jax.Array, Any]]


def run_streaming(
    config: ModelConfig,
    run_layers: RunLayers,
    x: jax.Array,
    is_separator: jax.Array,
    cache: KVCache,
    num_tokens: jax.Array,
) -> tuple[jax.Array, KVCache]:
    """The residual stream `[B, T, D]` of a block after all layers, and the cache with it appended.

    Args:
      config: the model's, with a streaming attention.
      run_layers: all layers, of a part of the block that no compression divides.
      x: `[B, T, D]`, embedded tokens.
      is_separator: bool `[B, T]`.
      cache: with a `stream`.
      num_tokens: int32 `[B]`, tokens of each row that are real.
    """
    attention = config.streaming
    assert attention is not None
    block = x.shape[1]
    slots = attention.capacity + 1
    slot_rope = rope_table(config, jnp.arange(slots, dtype=jnp.int32)[None])
    sizes = attention.stream_sizes
    kept = sizes.initial + sizes.separators + sizes.local
    width = min(block, slots - kept)  # what fits between two compressions of a full cache

    def part(x: jax.Array, is_separator: jax.Array, counts: jax.Array, cache: KVCache):
        """Append the first `counts [B]` of the given tokens, for which there is room."""
        stream = _stream(cache)
        used = stream.used
        places = used[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)
        text = TextInfo(
            rope=rope_table(config, jnp.minimum(places, slots - 1)),
            lengths=cache.lengths,
            num_tokens=counts,
            used=used,
            slot_rope=slot_rope,
        )
        x, layers = run_layers(x, text, cache)
        stream = stream.append(is_separator, counts)
        cache = cache.advanced(counts, layers).replace(stream=stream)
        return x, jax.lax.cond(
            jnp.any(stream.used > attention.capacity),
            lambda cache: _compressed(cache, attention),
            lambda cache: cache,
            cache,
        )

    if width == block == 1:
        return part(x, is_separator, num_tokens, cache)

    rows = jnp.arange(x.shape[0])[:, None]

    def unfinished(state: tuple[jax.Array, jax.Array, KVCache]) -> jax.Array:
        return jnp.any(state[0] < num_tokens)

    def advance(state: tuple[jax.Array, jax.Array, KVCache]):
        done, output, cache = state
        room = tokens_before_compression(_stream(cache).used, attention.stream_sizes)
        counts = jnp.minimum(jnp.minimum(num_tokens - done, room), width)
        token = jnp.arange(width, dtype=jnp.int32)
        index = jnp.minimum(done[:, None] + token, block - 1)
        hidden, cache = part(x[rows, index], is_separator[rows, index], counts, cache)
        index = jnp.where(token < counts[:, None], done[:, None] + token, block)
        output = output.at[rows, index].set(hidden, mode="drop")
        return done + counts, output, cache

    state = (jnp.zeros_like(num_tokens), jnp.zeros_like(x), cache)
    _, output, cache = jax.lax.while_loop(unfinished, advance, state)
    return output, cache


def _stream(cache: KVCache) -> StreamState:
    assert cache.stream is not None
    return cache.stream


def _compressed(cache: KVCache, attention: SepLLMAttention) -> KVCache:
    """Rows over capacity give up what is neither initial, separator nor recent, for good."""
    stream = _stream(cache)
    over = stream.used > attention.capacity
    plan = compress(stream.is_separator, stream.used, stream.separators_end, attention.stream_sizes)
    stream = stream.replace(
        used=plan.used,
        separators_end=plan.separators_end,
        is_separator=take_slots(stream.is_separator, plan.source),
    )

    def kept(slots: dict[str, jax.Array]) -> dict[str, jax.Array]:
        axis = slots["key"].ndim - 3  # [B, S, Hk, D], or with a layer axis before
        return slots | {name: take_slots(slots[name], plan.source, axis=axis) for name in _MOVED}

    layers = jax.tree.map(kept, cache.layers, is_leaf=lambda x: isinstance(x, dict))
    committed = jnp.where(over, cache.lengths, cache.committed)
    return cache.replace(stream=stream, layers=layers, committed=committed)
