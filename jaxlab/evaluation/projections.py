"""The queries, keys and values that a model's layers attend with, on a text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlab.errors import ConfigError
from jaxlab.models import AnyModelConfig, ModelConfig, unstack_layers
from jaxlab.models.attention.sepllm import separator_mask
from jaxlab.models.layers import LayerKind, TextInfo, layer_data, layer_kinds
from jaxlab.models.rope import rope_table
from jaxlab.models.transformer import Block


class Projections(NamedTuple):
    """Of one layer, as its attention gets them: shifted, normalised, rotated."""

    query: Float[Array, "B T H D"]
    key: Float[Array, "B T Hk D"]
    value: Float[Array, "B T Hk D"]


def check_has_attention(config: AnyModelConfig) -> ModelConfig:
    """`config`, if its model has attention to look at.

    Raises:
      ConfigError: it has none.
    """
    if not isinstance(config, ModelConfig):
        raise ConfigError(
            f"an {config.architecture} has no attention, so no queries meet keys to be looked at: "
            "choose a transformer"
        )
    return config


def layer_projections(model: Any, tokens: Any) -> Iterator[Projections]:
    """Yields the projections of each layer, first to last; one layer's are in memory at a time.

    Args:
      model: as `jaxlab.load` gives.
      tokens: int32 `[B, T]`.

    Raises:
      ConfigError: the model has no attention.
    """
    config, params = check_has_attention(model.config), unstack_layers(model.params)
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    text = TextInfo(rope_table(config, positions), is_separator=separator_mask(config, tokens))
    x = jnp.take(params["embed"]["embedding"], tokens, axis=0).astype(jnp.dtype(config.dtype))
    if config.embedding_scale != 1.0:
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
    data = layer_data(config)
    for index, (kind, layer) in enumerate(zip(layer_kinds(config), params["layers"], strict=True)):
        here = {name: array[index] for name, array in data.items()}
        x, projections = _run_layer(config, kind, layer, x, text, here)
        yield projections


@partial(jax.jit, static_argnums=(0, 1))
def _run_layer(
    config: ModelConfig,
    kind: LayerKind,
    params: Any,
    x: jax.Array,
    text: TextInfo,
    data: dict[str, jax.Array],
) -> tuple[jax.Array, Projections]:
    block = Block(config, kind, parent=None)
    (x, _), state = block.apply({"params": params}, x, text, data=data, mutable=["intermediates"])
    sown = state["intermediates"]["attention"]
    return x, Projections(*(sown[name][0] for name in Projections._fields))
