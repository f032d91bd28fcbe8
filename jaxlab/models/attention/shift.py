"""The shift of keys and values before attention (`kv_shift`), with its part of the cache."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxlab.models.attention.ring import read_ring, write_ring
from jaxlab.models.attention.slots import Arrays, CacheSize, on_layer, real_tokens
from jaxlab.models.attention_config import KVShiftConfig
from jaxlab.models.config import ModelConfig
from jaxlab.models.layers import TextInfo
from pallas_kernels.kv_shift import kv_shift


def init_taps(key: jax.Array, config: ModelConfig) -> nn.LogicallyPartitioned:
    """Fresh coefficients `[Hk, window]`, float32, oldest first (paper §3: `(a, 1 - a)`).

    For the constraint `gate` the one number `[Hk, 1]` whose sigmoid weighs the present token.
    """
    shift = config.kv_shift
    assert shift is not None
    heads, window = config.num_kv_heads, shift.window
    if shift.init == "identity":
        taps = jnp.zeros((heads, window)).at[:, -1].set(1.0)
    else:
        past = jax.random.uniform(key, (heads, window - 1))
        taps = jnp.concatenate([past, 1.0 - past.sum(1, keepdims=True)], axis=1)
    if shift.constraint == "gate":
        present = jnp.clip(taps[:, -1:], 1e-3, 1.0 - 1e-3)
        taps = jnp.log(present) - jnp.log1p(-present)
    return nn.LogicallyPartitioned(taps.astype(jnp.float32), ("kv_heads", "taps"))


def effective_taps(taps: jax.Array, config: KVShiftConfig) -> jax.Array:
    """The coefficients `[…, Hk, window]` that parameters stand for under the constraint."""
    taps = taps.astype(jnp.float32)
    if config.constraint == "gate":
        present = jax.nn.sigmoid(taps)
        return jnp.concatenate([1.0 - present, present], axis=-1)
    return jnp.clip(taps, 0.0, 1.0) if config.constraint == "clip" else taps


def init_slots(config: ModelConfig, size: CacheSize) -> Arrays:
    """Raw keys and values of the last tokens, as many as a `rewind` may need."""
    assert config.kv_shift is not None
    slots = config.kv_shift.window - 1 + size.max_pending
    shape = (size.batch, slots, config.num_kv_heads, config.head_dim)
    return {f"raw_{name}": jnp.zeros(shape, size.dtype) for name in config.kv_shift.shifted}


def shift(
    key: jax.Array,
    value: jax.Array,
    taps: Arrays,
    slots: Arrays | None,
    layer: jax.Array | int | None,
    *,
    config: KVShiftConfig,
    text: TextInfo,
) -> tuple[jax.Array, jax.Array, Arrays | None]:
    """Shifted `key` and `value`, `[B, T, Hk, D]`, and the slots with the raw ones written."""
    raw = {"key": key, "value": value}
    weights = {name: effective_taps(taps[name], config) for name in taps}
    if slots is None:
        shifted = {
            name: kv_shift(raw[name], weights[name], segment_ids=text.segment_ids) for name in taps
        }
        return shifted.get("key", key), shifted.get("value", value), None

    lengths = text.lengths
    assert lengths is not None
    num_tokens = real_tokens(text.num_tokens, key)
    before = lengths[:, None] - jnp.arange(config.window - 1, 0, -1, dtype=jnp.int32)

    def one_layer(slots: Arrays) -> tuple[Arrays, Arrays]:
        shifted, new = {}, {}
        for name in taps:
            ring = slots[f"raw_{name}"]
            initial = read_ring(ring, raw[name], lengths, before)
            shifted[name] = kv_shift(raw[name], weights[name], initial=initial)
            new[f"raw_{name}"] = write_ring(ring, raw[name], lengths, num_tokens)
        return shifted, new

    rings = {name: array for name, array in slots.items() if name.startswith("raw_")}
    shifted, rings = on_layer(rings, layer, one_layer)
    return shifted.get("key", key), shifted.get("value", value), {**slots, **rings}
