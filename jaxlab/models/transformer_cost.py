"""What a transformer's arithmetic and memory come to; see `jaxlab.models.cost.Cost`."""

from __future__ import annotations

import numpy as np

from jaxlab.models.attention.cost import cache_bytes, keys_met
from jaxlab.models.config import ModelConfig
from jaxlab.models.layers import layer_kinds

__all__ = [
    "cache_bytes",
    "decode_bytes",
    "layer_activations",
    "matmul_params",
    "mixing_flops",
    "sequence_bytes",
]

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def matmul_params(config: ModelConfig) -> int:
    """All kernels and the unembedding."""
    attention = (
        config.hidden_size * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    )
    mlp = config.hidden_size * config.intermediate_size * (3 if config.gated_mlp else 2)
    return config.num_layers * (attention + mlp) + config.hidden_size * config.vocab_size


def mixing_flops(config: ModelConfig, queries: int, keys: int) -> float:
    """The two attention products of all layers, over the keys that `keys_met` counts."""
    positions = np.arange(keys - queries, keys)
    pairs = sum(float(keys_met(kind, positions).sum()) for kind in layer_kinds(config))
    return 4 * pairs * config.num_heads * config.head_dim


def decode_bytes(config: ModelConfig, context: int) -> float:
    """All keys and values are read; what is written of a token is nothing beside them."""
    return cache_bytes(config, 1, context)


def layer_activations(config: ModelConfig) -> tuple[float, float]:
    """The residual stream and norms whole; the MLP, queries, keys and values by tensor shard."""
    heads = config.num_heads + config.num_kv_heads
    return 10 * config.hidden_size, 3 * config.intermediate_size + 4 * heads * config.head_dim


def sequence_bytes(config: ModelConfig, tokens: float, rows: float) -> float:
    """Keys and values of the shard's tokens."""
    return tokens * 2 * config.num_kv_heads * config.head_dim * _BYTES[config.dtype]
