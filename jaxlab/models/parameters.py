"""The parameters of a model of any family: made, described, named, laid out."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

Params = Any


@partial(jax.jit, static_argnums=0)
def init_params(module: nn.Module, key: jax.Array) -> Params:
    """Fresh parameters, a tree of arrays of `config.param_dtype`; `jax.jit` it to shard them."""
    return nn.unbox(_init_boxed(module, key))


def abstract_params(module: nn.Module) -> Params:
    """The parameters' shapes and types, as `jax.ShapeDtypeStruct`s, without making them."""
    return nn.unbox(jax.eval_shape(lambda key: _init_boxed(module, key), jax.random.key(0)))


def logical_axes(module: nn.Module) -> Params:
    """A tree like the parameters', with a tuple of logical axis names in place of each array."""
    boxed = jax.eval_shape(lambda key: _init_boxed(module, key), jax.random.key(0))
    return jax.tree.map(
        lambda box: box.names, boxed, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned)
    )


def _init_boxed(module: nn.Module, key: jax.Array) -> Params:
    return module.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
