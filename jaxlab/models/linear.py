"""A linear map whose kernel carries logical axis names."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxlab.models.config import ModelConfig

if TYPE_CHECKING:
    from jaxlab.models.xlstm.config import XLSTMConfig


class Linear(nn.Module):
    """`x @ kernel + bias` over the last `contract` axes of `x`, in the model's compute type.

    The kernel is `[*contracted sizes, *features]` with logical `axes`; initialised from a normal of
    standard deviation `config.initializer_range`, if not otherwise said; the bias from zeros.
    `dtype` replaces the model's compute type.
    """

    config: ModelConfig | XLSTMConfig
    features: tuple[int, ...]
    axes: tuple[str, ...]
    contract: int = 1
    use_bias: bool = False
    kernel_init: nn.initializers.Initializer | None = None
    bias_init: nn.initializers.Initializer = nn.initializers.zeros
    dtype: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        dtype = jnp.dtype(self.dtype or config.dtype)
        param_dtype = jnp.dtype(config.param_dtype)
        contracted = x.shape[x.ndim - self.contract :]
        kernel: Any = self.param(
            "kernel",
            nn.with_logical_partitioning(self._kernel_init(), self.axes),
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
                nn.with_logical_partitioning(self.bias_init, self.axes[self.contract :]),
                self.features,
                param_dtype,
            )
            y = y + bias.astype(dtype)
        return y

    def _kernel_init(self) -> nn.initializers.Initializer:
        if self.kernel_init is not None:
            return self.kernel_init
        assert isinstance(self.config, ModelConfig)
        return nn.initializers.normal(self.config.initializer_range)
