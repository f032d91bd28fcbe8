"""The kinds of language models there are, and what other code asks of any of them.

A family is a frozen configuration and a Linen module with the methods `hidden_states` and `unembed`
of `Transformer`, over a cache with the moves of `KVCache`.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxlab.models.cache import KVCache, init_kv_cache
from jaxlab.models.config import ModelConfig
from jaxlab.models.transformer import Transformer
from jaxlab.models.xlstm.cache import XLSTMCache, init_xlstm_cache
from jaxlab.models.xlstm.config import XLSTMConfig
from jaxlab.models.xlstm.module import BLOCK_NAMES, XLSTM, unstack_blocks

AnyModelConfig = ModelConfig | XLSTMConfig
LanguageModule = Transformer | XLSTM
Cache = KVCache | XLSTMCache


def config_class(architecture: str | None) -> type[ModelConfig] | type[XLSTMConfig]:
    """The configuration class of a model whose `architecture` is this; None: a transformer."""
    return XLSTMConfig if architecture == "xlstm" else ModelConfig


def module_for(config: AnyModelConfig) -> LanguageModule:
    """The Linen module that `config` describes."""
    return XLSTM(config) if isinstance(config, XLSTMConfig) else Transformer(config)


def init_cache(
    config: AnyModelConfig,
    batch_size: int,
    max_length: int,
    *,
    dtype: Any = None,
    unstacked: bool = False,
    max_pending: int | None = None,
) -> Cache:
    """An empty cache; see `init_kv_cache` and `init_xlstm_cache`.

    Args:
      config: the model's.
      batch_size: rows.
      max_length: tokens that a row has room for; an xLSTM does not look at it.
      dtype: type of keys and values; default the model's compute type.
      unstacked: one array per layer, for parameters made by `unstack_layers`.
      max_pending: how many tokens `rewind` can take back, where that costs memory. Default: 64; 16
        for an xLSTM.
    """
    options = dict(dtype=dtype, unstacked=unstacked)
    if max_pending is not None:
        options["max_pending"] = max_pending
    if isinstance(config, XLSTMConfig):
        return init_xlstm_cache(config, batch_size, max_length, **options)
    return init_kv_cache(config, batch_size, max_length, **options)


def unstack_layers(params: Any, config: AnyModelConfig | None = None) -> Any:
    """The same parameters with `layers` a tuple of one tree per layer, which runs unrolled.

    Decoding a token reads every weight once; on CPU a scan copies each layer's slice first, the
    unrolled form does not. The arrays are copies: drop `params` if memory matters.

    Args:
      params: the tree of a model, layers stacked.
      config: the model's; needed where its layers have different parameters.

    Raises:
      ValueError: layers differ and `config` is not given.
    """
    stacked = params["layers"]
    if isinstance(stacked, tuple):
        return params
    if isinstance(config, XLSTMConfig):
        return unstack_blocks(params, config)
    if set(BLOCK_NAMES.values()) <= set(stacked):
        raise ValueError(
            "the model mixes kinds of blocks, and their order is not in the parameters: call "
            "unstack_layers(params, config)"
        )
    depth = jax.tree.leaves(stacked)[0].shape[0]
    layers = tuple(jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(depth))
    return {**params, "layers": layers}
