"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and its context-stretching variants.

Channels are paired as Hugging Face pairs them: channel i with channel i + rotary_dim / 2.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from jaxlab.models.config import ModelConfig, RopeScaling


def rope_table(
    config: ModelConfig, positions: Int[Array, "B T"]
) -> tuple[Float32[Array, "B T R"], Float32[Array, "B T R"]]:
    """Cosines and sines of the rotation angles at `positions`.

    Args:
      config: gives `rope_theta`, `rotary_dim` and `rope_scaling`.
      positions: int32 `[B, T]`.

    Returns:
      `(cos, sin)`, float32 `[B, T, rotary_dim / 2]`, YaRN's attention factor included.
    """
    scaling = config.rope_scaling
    if scaling is not None and scaling.type == "dynamic":
        inverse_frequencies = _dynamic_frequencies(config, scaling, positions)
        attention_factor = 1.0
    else:
        frequencies, attention_factor = _static_frequencies(config)
        inverse_frequencies = jnp.asarray(frequencies, jnp.float32)
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor


def apply_rope(
    x: Float[Array, "B T H D"], cos: Float32[Array, "B T R"], sin: Float32[Array, "B T R"]
) -> Float[Array, "B T H D"]:
    """Rotate the first `2 * cos.shape[-1]` channels of `x [B, T, H, D]`; the rest pass through.

    `cos`, `sin` are float32 `[B, T, R / 2]` from `rope_table`. The result has the type of `x`.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    first = x[..., :half].astype(jnp.float32)
    second = x[..., half : 2 * half].astype(jnp.float32)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    rotated = rotated.astype(x.dtype)
    if 2 * half == x.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x[..., 2 * half :]], axis=-1)


def _base_frequencies(theta: float, dim: int) -> np.ndarray:
    return 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)


def _static_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Inverse frequencies `[rotary_dim / 2]` of any text, and a factor on cos and sin."""
    dim, theta, scaling = config.rotary_dim, config.rope_theta, config.rope_scaling
    frequencies = _base_frequencies(theta, dim)
    if scaling is None:
        return frequencies, 1.0
    if scaling.type == "linear":
        return frequencies / scaling.factor, 1.0
    trained_length = scaling.original_max_position_embeddings
    assert trained_length is not None  # RopeScaling refuses llama3 and yarn without it
    if scaling.type == "llama3":
        return _llama3_frequencies(frequencies, scaling, trained_length), 1.0
    return _yarn_frequencies(frequencies, config, scaling, trained_length)


def _llama3_frequencies(
    frequencies: np.ndarray, scaling: RopeScaling, trained_length: int
) -> np.ndarray:
    """Llama 3.1: divide long wavelengths by `factor`, keep short ones, blend linearly between."""
    wavelengths = 2 * np.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = np.clip((trained_length / wavelengths - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _yarn_frequencies(
    frequencies: np.ndarray, config: ModelConfig, scaling: RopeScaling, trained_length: int
) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): blend by the number of turns in the context."""
    dim, theta = config.rotary_dim, config.rope_theta

    def channel_turning(turns: float) -> float:
        """The (fractional) channel pair that makes `turns` turns within the trained context."""
        return dim * math.log(trained_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel_turning(scaling.beta_fast), channel_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / (high - low), 0, 1)
    blended = frequencies / scaling.factor * ramp + frequencies * (1 - ramp)
    return blended, _yarn_attention_factor(scaling)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)


def _dynamic_frequencies(
    config: ModelConfig, scaling: RopeScaling, positions: jax.Array
) -> jax.Array:
    """Dynamic NTK: each row's base grows with the row's length beyond the trained context.

    Returns float32 `[B, 1, rotary_dim / 2]`. Keys already in a cache keep the rotation of the
    length they were written at, as in Hugging Face transformers.
    """
    dim = config.rotary_dim
    trained_length = config.max_position_embeddings
    length = jnp.maximum(jnp.max(positions, axis=-1) + 1, trained_length).astype(jnp.float32)
    growth = scaling.factor * length / trained_length - (scaling.factor - 1)
    theta = config.rope_theta * growth ** (dim / (dim - 2))
    exponents = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
    return 1.0 / theta[:, None, None] ** exponents
