"""Language models as Flax Linen modules, their configurations and their caches."""

from jaxlab.models.attention.resolution import resolve_attention
from jaxlab.models.attention_config import (
    AttentionConfig,
    CCAAttention,
    FullAttention,
    KVShiftConfig,
    SepLLMAttention,
    XAttention,
)
from jaxlab.models.cache import KVCache
from jaxlab.models.config import ModelConfig, RopeScaling
from jaxlab.models.families import (
    AnyModelConfig,
    Cache,
    LanguageModule,
    config_class,
    init_cache,
    module_for,
    unstack_layers,
)
from jaxlab.models.parameters import abstract_params, init_params, logical_axes
from jaxlab.models.transformer import Transformer
from jaxlab.models.xlstm import XLSTM, XLSTMCache, XLSTMConfig

__all__ = [
    "XLSTM",
    "AnyModelConfig",
    "AttentionConfig",
    "CCAAttention",
    "Cache",
    "FullAttention",
    "KVCache",
    "KVShiftConfig",
    "LanguageModule",
    "ModelConfig",
    "RopeScaling",
    "SepLLMAttention",
    "Transformer",
    "XAttention",
    "XLSTMCache",
    "XLSTMConfig",
    "abstract_params",
    "config_class",
    "init_cache",
    "init_params",
    "logical_axes",
    "module_for",
    "resolve_attention",
    "unstack_layers",
]
