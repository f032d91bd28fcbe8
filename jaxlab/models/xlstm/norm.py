"""The norms of an xLSTM; statistics are float32 whatever the input type."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxlab.models.xlstm.config import XLSTMConfig


class RMSNorm(nn.Module):
    """Over the last axis; back in the input's type before the weight multiplies, as published."""

    config: XLSTMConfig
    use_bias: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype, config = x.dtype, self.config
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.norm_eps)
        return affine(self, x.astype(dtype), ("norm",), use_bias=self.use_bias)


class HeadNorm(nn.Module):
    """LayerNorm over the features of each head of `[..., H, D]`, one weight a head and feature.

    The mean is removed first: `E[x²] - E[x]²` would lose the small outputs that an untrained gate
    lets through, and with them what makes a new block begin near the identity.
    """

    config: XLSTMConfig
    eps: float
    unit_offset: bool = False
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = x.dtype
        normed = standardized(x, self.eps).astype(dtype)
        return affine(
            self,
            normed,
            ("heads", "head_dim"),
            unit_offset=self.unit_offset,
            use_bias=self.use_bias,
        )


class LayerNorm(nn.Module):
    """Over the last axis, with a weight `w` applied as `1 + w` and no bias (sLSTM blocks)."""

    config: XLSTMConfig
    eps: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        normed = standardized(x, self.eps).astype(x.dtype)
        return affine(self, normed, ("norm",), unit_offset=True)


def standardized(x: jax.Array, eps: float) -> jax.Array:
    """Mean 0 and variance 1 over the last axis, float32."""
    x = x.astype(jnp.float32)
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def affine(
    module: nn.Module,
    x: jax.Array,
    axes: tuple[str, ...],
    *,
    unit_offset: bool = False,
    use_bias: bool = False,
) -> jax.Array:
    """`x · scale (+ bias)` with parameters of `module` shaped like the last axes of x."""
    shape = x.shape[x.ndim - len(axes) :]
    dtype = jnp.dtype(module.config.param_dtype)  # type: ignore[attr-defined]
    initializer = nn.initializers.zeros if unit_offset else nn.initializers.ones
    scale = module.param(
        "scale", nn.with_logical_partitioning(initializer, axes), shape, dtype
    ).astype(x.dtype)
    x = x * (1 + scale if unit_offset else scale)
    if not use_bias:
        return x
    bias = module.param(
        "bias", nn.with_logical_partitioning(nn.initializers.zeros, axes), shape, dtype
    )
    return x + bias.astype(x.dtype)
