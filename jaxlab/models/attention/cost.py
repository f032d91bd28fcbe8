"""How many keys a query meets, for estimates of work; what a cache weighs."""

from __future__ import annotations

import jax
import numpy as np

from jaxlab.models.attention_config import CCAAttention, SepLLMAttention
from jaxlab.models.cache import init_kv_cache
from jaxlab.models.config import ModelConfig
from jaxlab.models.layers import LayerKind

# Share of separators in running text; 0.07 to 0.17 by tokenizer and layout.
SEPARATOR_SHARE = 0.13


def keys_met(kind: LayerKind, positions: np.ndarray) -> np.ndarray:
    """Keys that queries at `positions` are multiplied with, core tokens counted as keys.

    SepLLM's separators are counted by their usual share. XAttention's blocks depend on the text:
    it is counted as dense, which it never exceeds by more than the scoring.
    """
    before = np.asarray(positions, np.float64) + 1
    attention = kind.attention
    if isinstance(attention, CCAAttention):
        cores = np.floor(np.maximum(before - attention.window_size, 0) / attention.group_size)
        return before - cores * (attention.group_size - 1)
    if isinstance(attention, SepLLMAttention) and isinstance(attention.window, int):
        outside = np.maximum(before - attention.window, 0)
        initial = np.minimum(outside, attention.initial_tokens)
        return before - outside + initial + (outside - initial) * SEPARATOR_SHARE
    return before if kind.window is None else np.minimum(before, kind.window)


def cache_bytes(config: ModelConfig, batch_size: int, max_length: int) -> int:
    """Bytes of `init_cache` with these arguments, without making it."""
    return jax.eval_shape(lambda: init_kv_cache(config, batch_size, max_length)).nbytes
