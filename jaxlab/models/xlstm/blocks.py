"""One layer of an xLSTM: mLSTM and gated feed-forward around a residual stream."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxlab.models.linear import Linear
from jaxlab.models.xlstm.cell import run_cell
from jaxlab.models.xlstm.config import XLSTMConfig
from jaxlab.models.xlstm.norm import HeadNorm, RMSNorm


class CacheMove(NamedTuple):
    """What a block of new tokens does to a cache, the same in every layer.

    Attributes:
      used: int32 `[B]`, pending tokens in the slots of each row.
      num_tokens: int32 `[B]`, real tokens among the new ones, the first ones.
      fold: int32 `[B]`, tokens to be folded into each row's state, the oldest pending ones.
      must_fold: bool `[]`, whether a row has no room without.
    """

    used: jax.Array
    num_tokens: jax.Array
    fold: jax.Array
    must_fold: jax.Array


class TokenInfo(NamedTuple):
    """What every block needs to know of the tokens it is given.

    Attributes:
      segment_ids: int32 `[B, T]` of packed documents, 0 for padding, or None.
      move: with a cache, what happens to it.
    """

    segment_ids: jax.Array | None = None
    move: CacheMove | None = None


def small_init(config: XLSTMConfig) -> nn.initializers.Initializer:
    """Of everything that reads the residual stream, and of the embedding."""
    return nn.initializers.normal(math.sqrt(2 / (5 * config.embedding_dim)))


def residual_init(config: XLSTMConfig) -> nn.initializers.Initializer:
    """Of what writes to the residual stream; by the model's width, whatever the layer's."""
    return nn.initializers.normal(2 / (config.num_blocks * math.sqrt(config.embedding_dim)))


def _linear_ramp(bounds: tuple[float, float]) -> nn.initializers.Initializer:
    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        del key
        return jnp.linspace(*bounds, shape[0], dtype=dtype)

    return init


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """`cap · tanh(x / cap)`; None leaves x alone."""
    return x if cap is None else cap * jnp.tanh(x / cap)


class MLSTM(nn.Module):
    """The mLSTM layer: projections, cell, norm over each head, output gate (7B paper, section 2).

    Gates of input and forgetting are computed in float32: they are exponents.
    """

    config: XLSTMConfig

    @nn.compact
    def __call__(self, x: jax.Array, info: TokenInfo, slots: Any = None, layer: Any = None):
        """`x [B, T, D]` to `(y [B, T, D], slots)`."""
        config, bias = self.config, self.config.use_bias
        heads = config.num_heads

        def heads_of(name: str, width: int) -> jax.Array:
            return Linear(
                config,
                (heads, width),
                ("embed", "heads", "head_dim"),
                use_bias=bias,
                kernel_init=small_init(config),
                name=name,
            )(x)

        def gate(name: str, bias_init: nn.initializers.Initializer) -> jax.Array:
            preactivation = Linear(
                config,
                (heads,),
                ("embed", "heads"),
                use_bias=True,
                kernel_init=nn.initializers.zeros,
                bias_init=bias_init,
                dtype="float32",
                name=name,
            )(x)
            return soft_cap(preactivation, config.gate_soft_cap)

        q = heads_of("q_proj", config.qk_head_dim)
        k = heads_of("k_proj", config.qk_head_dim)
        v = heads_of("v_proj", config.v_head_dim)
        i = gate("igate_proj", nn.initializers.constant(config.igate_bias_init))
        f = gate("fgate_proj", _linear_ramp(config.fgate_bias_init))
        h, slots = run_cell(config, q, (k, v, i, f), info, slots, layer)
        h = HeadNorm(config, config.cell_norm_eps, use_bias=bias, name="head_norm")(h)
        ogate = Linear(
            config,
            (heads, config.v_head_dim),
            ("embed", "heads", "head_dim"),
            use_bias=bias,
            kernel_init=nn.initializers.zeros,
            name="ogate_proj",
        )(x)
        h = jax.nn.sigmoid(ogate) * h
        y = Linear(
            config,
            (config.embedding_dim,),
            ("heads", "head_dim", "embed"),
            contract=2,
            use_bias=bias,
            kernel_init=residual_init(config),
            name="o_proj",
        )(h)
        return y, slots


class FeedForward(nn.Module):
    """SwiGLU: `down(silu(gate x) · up x)`."""

    config: XLSTMConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config

        def widen(name: str) -> jax.Array:
            return Linear(
                config,
                (config.intermediate_size,),
                ("embed", "mlp"),
                use_bias=config.use_bias,
                kernel_init=small_init(config),
                name=name,
            )(x)

        hidden = jax.nn.silu(widen("gate_proj")) * widen("up_proj")
        hidden = nn.with_logical_constraint(hidden, ("batch", "length", "mlp"))
        return Linear(
            config,
            (config.embedding_dim,),
            ("mlp", "embed"),
            use_bias=config.use_bias,
            kernel_init=residual_init(config),
            name="down_proj",
        )(hidden)


class MLSTMBlock(nn.Module):
    """mLSTM, then a feed-forward layer, each on the normed residual stream."""

    config: XLSTMConfig

    @nn.compact
    def __call__(self, x: jax.Array, info: TokenInfo, slots: Any = None, layer: Any = None):
        """`x [B, T, D]` to `(x, slots)`."""
        config = self.config
        normed = RMSNorm(config, config.use_bias, name="mlstm_norm")(x)
        y, slots = MLSTM(config, name="mlstm")(normed, info, slots, layer)
        x = x + y
        normed = RMSNorm(config, config.use_bias, name="ffn_norm")(x)
        x = x + FeedForward(config, name="ffn")(normed)
        return nn.with_logical_constraint(x, ("batch", "length", "act_embed")), slots
