"""Decoder-only transformers as Flax Linen modules, their configuration and their cache."""

from jaxlab.models.attention.resolution import resolve_attention
from jaxlab.models.attention_config import (
    AttentionConfig,
    CCAAttention,
    FullAttention,
    KVShiftConfig,
    SepLLMAttention,
    XAttention,
)
from jaxlab.models.cache import KVCache, init_cache
from jaxlab.models.config import ModelConfig, RopeScaling
from jaxlab.models.transformer import (
    Transformer,
    abstract_params,
    init_params,
    logical_axes,
    unstack_layers,
)

__all__ = [
    "AttentionConfig",
    "CCAAttention",
    "FullAttention",
    "KVCache",
    "KVShiftConfig",
    "ModelConfig",
    "RopeScaling",
    "SepLLMAttention",
    "Transformer",
    "XAttention",
    "abstract_params",
    "init_cache",
    "init_params",
    "logical_axes",
    "resolve_attention",
    "unstack_layers",
]
