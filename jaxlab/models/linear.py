"""A linear map whose kernel carries logical axis names."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxlab.models.config import ModelConfig


class Linear(nn.Module):
    """`x @ kernel + bias` over the last `contract` axes of `x`, in the model's compute type.

    The kernel is `[*contracted sizes, *features]` with logical `axes`; initialised from a normal of
    standard deviation `config.initializer_range`.
    """

    config: ModelConfig
    features: tuple[int, ...]
    axes: tuple[str, ...]
    contract: int = 1
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        dtype, param_dtype = jnp.dtype(config.dtype), jnp.dtype(config.param_dtype)
        contracted = x.shape[x.ndim - self.contract :]
        kernel: Any = self.param(
            "kernel",
            nn.with_logical_partitioning(
                nn.initializers.normal(config.initializer_range), self.axes
            ),
            (*contracted, *self.features),
            param_dtype,
        )
        # One plain matrix product: XLA's fast path on every platform.
        matrix = kernel.astype(dtype).reshape(math.prod(contracted), math.prod(self.features))
        leading = x.shape[: x.ndim - self.contract]
        # Rows as one axis too: XLA:CPU is half again as fast at the kernel's gradient, which sums
        # over them. On a mesh they stay apart, since each may be split.
        rows = (-1,) if jax.sharding.get_abstract_mesh().empty else leading
        y = x.astype(dtype).reshape(*rows, math.prod(contracted)) @ matrix
        y = y.reshape(*leading, *self.features)
        if self.use_bias:
            bias: Any = self.param(
                "bias",
                nn.with_logical_partitioning(nn.initializers.zeros, self.axes[self.contract :]),
                self.features,
                param_dtype,
            )
            y = y + bias.astype(dtype)
        return y
