"""Normalisation layers; statistics are float32 whatever the input type."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxlab.models.config import ModelConfig


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last axis, as `config.norm` says.

    With `config.norm_unit_offset` the stored scale `w` is applied as `1 + w` (Gemma).
    """

    config: ModelConfig
    rms: bool | None = None  # None: as the config says

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        rms = config.norm == "rmsnorm" if self.rms is None else self.rms
        offset = config.norm_unit_offset and rms
        initializer = nn.initializers.zeros if offset else nn.initializers.ones
        scale = self._parameter("scale", initializer, x.shape[-1])
        dtype, x = x.dtype, x.astype(jnp.float32)
        if rms:
            x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.norm_eps)
            return (x * (1.0 + scale if offset else scale)).astype(dtype)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.norm_eps)
        bias = self._parameter("bias", nn.initializers.zeros, x.shape[-1])
        return (x * scale + bias).astype(dtype)

    def _parameter(self, name: str, initializer: nn.initializers.Initializer, size: int):
        initializer = nn.with_logical_partitioning(initializer, ("norm",))
        value: Any = self.param(name, initializer, (size,), jnp.dtype(self.config.param_dtype))
        return value.astype(jnp.float32)
