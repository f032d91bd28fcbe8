"""The sLSTM block of the first xLSTM paper (arXiv:2405.04517): a scalar memory that mixes.

Its hidden state feeds back into its gates, so it runs token by token. It goes between mLSTM blocks
where a task needs a state to be tracked.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxlab.models.attention.slots import on_layer
from jaxlab.models.linear import Linear
from jaxlab.models.xlstm.config import XLSTMConfig
from jaxlab.models.xlstm.norm import HeadNorm, LayerNorm
from pallas_kernels.slstm import slstm

if TYPE_CHECKING:
    from jaxlab.models.xlstm.blocks import CacheMove, TokenInfo

CONV_TAPS = 4
_EPS = 1e-5  # of this block's norms, which the configuration of the 7B does not concern
Slots = dict[str, jax.Array]


class SLSTMBlock(nn.Module):
    """sLSTM, then a gated feed-forward layer with GELU, each on the normed residual stream.

    `index` is the block's place in the model, on which its initial forget bias depends.
    """

    config: XLSTMConfig
    index: Any = 0

    @nn.compact
    def __call__(
        self, x: jax.Array, info: TokenInfo, slots: Slots | None = None, layer: Any = None
    ):
        """`x [B, T, D]` to `(x, slots)`."""
        config = self.config
        layer_module = SLSTM(config, self.index, name="slstm")
        normed = LayerNorm(config, _EPS, name="slstm_norm")(x)
        if slots is None:
            y = layer_module(normed, info)
        else:
            y, slots = on_layer(slots, layer, lambda slots: layer_module(normed, info, slots))
        x = x + y
        normed = LayerNorm(config, _EPS, name="ffn_norm")(x)
        x = x + _GELUFeedForward(config, name="ffn")(normed)
        return nn.with_logical_constraint(x, ("batch", "length", "act_embed")), slots


class SLSTM(nn.Module):
    """The sLSTM layer: a causal convolution for two of the gates, the cell, a norm over each head.

    Input and forget gate see the convolved tokens, the other two the tokens themselves.
    """

    config: XLSTMConfig
    index: Any = 0

    @nn.compact
    def __call__(self, x: jax.Array, info: TokenInfo, slots: Slots | None = None) -> Any:
        """`x [B, T, D]` to `y [B, T, D]`; with a layer's slots, `(y, slots)`."""
        config = self.config
        heads, width = config.num_heads, config.embedding_dim
        head_dim = width // heads
        mask = None if info.segment_ids is None else info.segment_ids != 0
        initial, past = None, None
        if slots is not None:
            assert info.move is not None
            mask = jnp.arange(x.shape[1]) < info.move.num_tokens[:, None]
            initial, past = _at(slots, info.move.used)

        convolved = _Convolution(config, name="conv")(x, info.segment_ids, past)
        convolved = jax.nn.silu(convolved)
        sources = {"igate": convolved, "fgate": convolved, "zgate": x, "ogate": x}
        gates = [_HeadwiseLinear(config, name=name)(source) for name, source in sources.items()]
        recurrent = self._parameter(
            "recurrent",
            nn.initializers.zeros,
            ("heads", "head_dim", None, None),
            (heads, head_dim, 4, head_dim),
        )
        bias = self._parameter(
            "gate_bias",
            _power_law_bias(self.index, config.num_blocks),
            ("heads", None, "head_dim"),
            (heads, 4, head_dim),
        )
        h = slstm(
            jnp.stack(gates, axis=2),
            recurrent,
            bias,
            initial_state=initial,
            segment_ids=info.segment_ids,
            mask=mask,
            return_states=slots is not None,
        )
        if slots is not None:
            h, states = h
        h = HeadNorm(config, _EPS, unit_offset=True, name="head_norm")(h.astype(x.dtype))
        y = h.reshape(x.shape)
        if slots is None:
            return y
        assert info.move is not None
        return y, _append(slots, jnp.stack(states, axis=2), x, info.move)

    def _parameter(
        self, name: str, init: nn.initializers.Initializer, axes: tuple[Any, ...], shape: Any
    ) -> jax.Array:
        initializer = nn.with_logical_partitioning(init, axes)
        value: Any = self.param(name, initializer, shape, jnp.dtype(self.config.param_dtype))
        return value.astype(jnp.float32)


class _Convolution(nn.Module):
    """Depthwise, causal, over four tokens of the same document."""

    config: XLSTMConfig

    @nn.compact
    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None, past: jax.Array | None
    ) -> jax.Array:
        """`past [B, 3, D]`: the tokens before x; None: zeros."""
        config, width = self.config, x.shape[-1]
        dtype = jnp.dtype(config.param_dtype)
        kernel: Any = self.param(
            "kernel",
            nn.with_logical_partitioning(
                # As a linear map of its four inputs.
                nn.initializers.uniform(2 / math.sqrt(CONV_TAPS)),
                (None, "embed"),
            ),
            (CONV_TAPS, width),
            dtype,
        )
        bias: Any = self.param(
            "bias", nn.with_logical_partitioning(nn.initializers.zeros, ("embed",)), (width,), dtype
        )
        kernel = kernel.astype(x.dtype)
        time, reach = x.shape[1], CONV_TAPS - 1
        if past is None:
            past = jnp.zeros((x.shape[0], reach, width), x.dtype)
        padded = jnp.concatenate([past.astype(x.dtype), x], axis=1)
        y = jnp.broadcast_to(bias.astype(x.dtype), x.shape)
        for tap in range(CONV_TAPS):
            seen = padded[:, tap : tap + time]
            back = reach - tap
            if segment_ids is not None and back:
                before = jnp.pad(segment_ids, ((0, 0), (back, 0)))[:, :time]
                seen = jnp.where((before == segment_ids)[..., None], seen, 0)
            y = y + kernel[tap] * seen
        return y


class _HeadwiseLinear(nn.Module):
    """A linear map of each head's features, `[B, T, D]` to `[B, T, H, D / H]`, without bias."""

    config: XLSTMConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        heads, width = config.num_heads, x.shape[-1]
        head_dim = width // heads
        kernel: Any = self.param(
            "kernel",
            nn.with_logical_partitioning(
                nn.initializers.normal(math.sqrt(2 / (5 * head_dim))), ("heads", "head_dim", None)
            ),
            (heads, head_dim, head_dim),
            jnp.dtype(config.param_dtype),
        )
        x = x.reshape(*x.shape[:-1], heads, head_dim)
        return jnp.einsum("...hi,hij->...hj", x, kernel.astype(x.dtype))


class _GELUFeedForward(nn.Module):
    """`down(gelu(gate x) · up x)` with the exact GELU."""

    config: XLSTMConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config

        def linear(
            name: str, x: jax.Array, width: int, axes: tuple[str, ...], std: float
        ) -> jax.Array:
            init = nn.initializers.normal(std)
            return Linear(config, (width,), axes, kernel_init=init, name=name)(x)

        width, inner = config.embedding_dim, config.slstm_intermediate_size
        small = math.sqrt(2 / (5 * width))
        gate = linear("gate_proj", x, inner, ("embed", "mlp"), small)
        up = linear("up_proj", x, inner, ("embed", "mlp"), small)
        hidden = jax.nn.gelu(gate, approximate=False) * up
        hidden = nn.with_logical_constraint(hidden, ("batch", "length", "mlp"))
        std = 2 / (config.num_blocks * math.sqrt(width))
        return linear("down_proj", hidden, width, ("mlp", "embed"), std)


def _power_law_bias(index: Any, num_blocks: int) -> nn.initializers.Initializer:
    """Forget biases from 5 down to -7 over a head's features, steeper in later blocks; others 0."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        del key
        heads, gates, head_dim = shape
        place = jnp.arange(head_dim) / max(head_dim - 1, 1)
        exponent = 0.3 + 1.3 * jnp.asarray(index, jnp.float32) / max(num_blocks - 1, 1)
        forget = 5.0 - 12.0 * place**exponent
        bias = jnp.zeros((heads, gates, head_dim), dtype)
        return bias.at[:, 1].set(forget.astype(dtype))

    return init


def _at(slots: Slots, used: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """The state `(h, c, n, m)` after each row's pending tokens, and the last inputs before."""
    rows = jnp.arange(used.shape[0])
    state = slots["states"][rows, used]  # [B, 4, H, Dh]
    columns = used[:, None] + jnp.arange(CONV_TAPS - 1)
    return tuple(jnp.moveaxis(state, 1, 0)), slots["inputs"][rows[:, None], columns]


def _append(slots: Slots, states: jax.Array, x: jax.Array, move: CacheMove) -> Slots:
    """Drop the oldest `move.fold` tokens of each row from its slots, and put the new ones in."""

    def moved(old: jax.Array, new: jax.Array, before: int) -> jax.Array:
        # Entry `before + p` of `old` is of the pending token p; what is in front is older.
        length = old.shape[1]
        entries = jnp.concatenate([old, new.astype(old.dtype)], axis=1)
        wanted = move.fold[:, None] + jnp.arange(length)
        end = before + move.used[:, None]
        source = jnp.where(wanted < end, wanted, length + wanted - end)
        source = jnp.clip(source, 0, entries.shape[1] - 1)
        return jnp.take_along_axis(entries, source[:, :, *[None] * (old.ndim - 2)], axis=1)

    return {
        "states": moved(slots["states"], states, before=1),
        "inputs": moved(slots["inputs"], x, before=CONV_TAPS - 1),
    }
