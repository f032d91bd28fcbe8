"""Decoder-only transformers as Flax Linen modules, their configuration and their cache."""

from jaxlab.models.cache import KVCache, init_cache
from jaxlab.models.config import AttentionConfig, ModelConfig, RopeScaling
from jaxlab.models.transformer import (
    Transformer,
    abstract_params,
    init_params,
    logical_axes,
    unstack_layers,
)

__all__ = [
    "AttentionConfig",
    "KVCache",
    "ModelConfig",
    "RopeScaling",
    "Transformer",
    "abstract_params",
    "init_cache",
    "init_params",
    "logical_axes",
    "unstack_layers",
]
