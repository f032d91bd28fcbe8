"""A decoder-only transformer as pure functions of parameters, tokens and cache.

    module = Transformer(config)
    params = init_params(module, jax.random.key(0))
    logits = module.apply({"params": params}, tokens)
    logits, cache = module.apply({"params": params}, tokens, cache=cache)

Every layer's parameters are stacked along a leading axis, whatever its kind, so the parameter tree
of a model does not change when its attention does. The layers run under `lax.scan` (one per group
of `layer_groups`), so compile time is flat in depth; `unstack_layers` gives the unrolled form,
which decodes faster on CPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jaxlab.models.attention import Attention
from jaxlab.models.attention.sepllm import separator_mask
from jaxlab.models.attention.slots import real_tokens
from jaxlab.models.cache import KVCache
from jaxlab.models.config import ModelConfig
from jaxlab.models.layers import (
    REMAT_POLICIES,
    LayerGroup,
    LayerKind,
    TextInfo,
    layer_data,
    layer_groups,
    layer_kinds,
)
from jaxlab.models.linear import Linear
from jaxlab.models.norm import Norm
from jaxlab.models.rope import rope_table
from jaxlab.models.streaming import run_streaming

Params = Any

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


class MLP(nn.Module):
    """The feed-forward sublayer, gated (SwiGLU, GeGLU) or plain."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        config = self.config
        activation = _ACTIVATIONS[config.activation]

        def widen(name: str) -> jax.Array:
            width, axes = (config.intermediate_size,), ("embed", "mlp")
            return Linear(config, width, axes, use_bias=config.mlp_bias, name=name)(x)

        hidden = widen("up_proj")
        hidden = activation(widen("gate_proj")) * hidden if config.gated_mlp else activation(hidden)
        hidden = nn.with_logical_constraint(hidden, ("batch", "length", "mlp"))
        return Linear(
            config,
            (config.hidden_size,),
            ("mlp", "embed"),
            use_bias=config.mlp_bias,
            name="down_proj",
        )(hidden)


class Block(nn.Module):
    """One layer: attention and MLP around a residual stream."""

    config: ModelConfig
    kind: LayerKind

    @nn.compact
    def __call__(self, x: jax.Array, text: TextInfo, **attention_inputs: Any):
        """`x [B, T, D]` to `(x, slots)`; see `Attention` for the inputs."""
        config = self.config
        attended, slots = Attention(config, self.kind, name="attention")(
            Norm(config, name="attention_norm")(x), text, **attention_inputs
        )
        if config.post_norms:
            attended = Norm(config, name="attention_post_norm")(attended)
        # A parallel layer (GPT-NeoX) feeds its MLP from the layer's own input.
        residual = x if config.parallel_residual else x + attended
        hidden = MLP(config, name="mlp")(Norm(config, name="mlp_norm")(residual))
        if config.post_norms:
            hidden = Norm(config, name="mlp_post_norm")(hidden)
        x = residual + hidden + attended if config.parallel_residual else residual + hidden
        return nn.with_logical_constraint(x, ("batch", "length", "act_embed")), slots


class Transformer(nn.Module):
    """The whole model. Parameters: see `init_params`; calls: see `__call__`."""

    config: ModelConfig

    def setup(self) -> None:
        config = self.config
        self.embed = self.param("embed", _init_embedding, config)["embedding"]
        self.layers = self._declare_layers()
        self.final_norm = Norm(config)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(
                config, (config.vocab_size,), ("embed", "vocab"), use_bias=config.lm_head_bias
            )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        *,
        cache: KVCache | None = None,
        num_tokens: Int[Array, " B"] | None = None,
    ) -> Any:
        """Logits of the next token at every position.

        Args:
          tokens: int32 `[B, T]`.
          positions: int32 `[B, T]` for the rotary embedding. Default: 0, 1, … in each row,
            restarting at each segment; with a cache, continuing from each row's length.
          segment_ids: int32 `[B, T]`; tokens attend only within equal ids, 0 marks padding.
          cache: append the tokens to each row of this cache and attend to what the row then holds.
            The caller makes sure of room (`KVCache.check_room`): under jit nothing can raise.
          num_tokens: with a cache, int32 `[B]`: only so many tokens of each row are real, the first
            ones; the rest is padding, its logits mean nothing. Default: all.

        Returns:
          Logits, float32 `[B, T, vocab_size]`; with a cache, `(logits, cache)`.
        """
        hidden = self.hidden_states(
            tokens, positions, segment_ids, cache=cache, num_tokens=num_tokens
        )
        if cache is None:
            return self.unembed(hidden)
        hidden, cache = hidden
        return self.unembed(hidden), cache

    def hidden_states(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        *,
        cache: KVCache | None = None,
        num_tokens: Int[Array, " B"] | None = None,
    ) -> Any:
        """As `__call__`, but what `unembed` reads: `[B, T, hidden_size]` after the final norm."""
        config = self.config
        if cache is not None and segment_ids is not None:
            raise ValueError("segment_ids cannot be used with a cache: give each document a row")
        if cache is not None:
            cache.check_model(config)
        if cache is None and num_tokens is not None:
            raise ValueError("num_tokens goes with a cache: use segment_ids, 0 for padding")
        if positions is None:
            positions = _default_positions(tokens, segment_ids, cache)
        x = jnp.take(self.embed, tokens, axis=0).astype(jnp.dtype(config.dtype))
        if config.embedding_scale != 1.0:
            # Rounded to the compute type first, as the checkpoints were trained.
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
        x = nn.with_logical_constraint(x, ("batch", "length", "act_embed"))
        is_separator = separator_mask(config, tokens)
        text = TextInfo(
            rope=rope_table(config, positions),
            segment_ids=segment_ids,
            is_separator=is_separator,
            lengths=None if cache is None else cache.lengths,
            num_tokens=num_tokens,
        )
        if cache is not None and cache.stream is not None:
            assert is_separator is not None
            run = partial(_run_layers, config, self.layers)
            counts = real_tokens(num_tokens, x)
            x, cache = run_streaming(config, run, x, is_separator, cache, counts)
            return self.final_norm(x), cache
        if not self.is_initializing():  # layers declare their parameters themselves
            x, slots = _run_layers(config, self.layers, x, text, cache)
        hidden = self.final_norm(x)
        if self.is_initializing():
            self.unembed(hidden)
        if cache is None:
            return hidden
        added = tokens.shape[1] if num_tokens is None else num_tokens
        return hidden, cache.advanced(added, slots)

    def unembed(self, hidden: Float[Array, "*rows D"]) -> Float32[Array, "*rows V"]:
        """Logits, float32 `[..., vocab_size]`, of `hidden [..., hidden_size]`, capped if so set."""
        config = self.config
        if config.tie_word_embeddings:
            logits = jnp.einsum(
                "...d,vd->...v",
                hidden,
                self.embed.astype(hidden.dtype),
                preferred_element_type=jnp.float32,
            )
        else:
            logits = self.lm_head(hidden).astype(jnp.float32)
        if config.final_softcap is not None:
            logits = config.final_softcap * jnp.tanh(logits / config.final_softcap)
        if logits.ndim == 3:
            logits = nn.with_logical_constraint(logits, ("batch", "length", "vocab"))
        return logits

    def _declare_layers(self) -> Params:
        if not self.is_initializing():
            return self.get_variable("params", "layers")
        return self.param("layers", _init_layers, self.config)


def _init_embedding(key: jax.Array, config: ModelConfig) -> Params:
    initializer = nn.with_logical_partitioning(
        nn.initializers.normal(config.initializer_range), ("vocab", "embed")
    )
    shape = (config.vocab_size, config.hidden_size)
    return {"embedding": initializer(key, shape, jnp.dtype(config.param_dtype))}


def _init_layers(key: jax.Array, config: ModelConfig) -> Params:
    """Boxed parameters of all layers, stacked. Every kind of layer has the same tree."""
    # The pattern does not matter to the parameters, so the simplest stands for all.
    block = Block(config, LayerKind(None), parent=None)
    x = jnp.zeros((1, 1, config.hidden_size), jnp.dtype(config.dtype))
    position = jnp.zeros((1, 1), jnp.int32)
    text = TextInfo(rope_table(config, position), is_separator=position > 0)

    def init_one(layer_key: jax.Array) -> Params:
        return nn.unbox(block.init(layer_key, x, text)["params"])

    boxes = jax.eval_shape(lambda k: block.init(k, x, text)["params"], key)
    stacked = jax.vmap(init_one)(jax.random.split(key, config.num_layers))
    return jax.tree.map(
        lambda box, array: nn.LogicallyPartitioned(array, ("layers", *box.names)),
        boxes,
        stacked,
        is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned),
    )


def _default_positions(
    tokens: jax.Array, segment_ids: jax.Array | None, cache: KVCache | None
) -> jax.Array:
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    if cache is not None:
        return cache.lengths[:, None] + index
    if segment_ids is None:
        return index
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


def _run_layers(
    config: ModelConfig,
    layers: Params,
    x: jax.Array,
    text: TextInfo,
    cache: KVCache | None,
) -> tuple[jax.Array, Any]:
    """The residual stream after all layers, and the cache's layers with the block appended."""
    if isinstance(layers, tuple):
        return _run_unrolled(config, layers, x, text, cache)
    if cache is not None and cache.unstacked:
        raise ValueError("an unstacked cache needs unstacked parameters: see unstack_layers")
    all_slots = []
    for index, group in enumerate(layer_groups(config)):
        slots = None if cache is None else cache.layers[index]
        x, slots = _run_group(config, group, layers, x, text, slots)
        all_slots.append(slots)
    return x, tuple(all_slots)


def _run_group(
    config: ModelConfig,
    group: LayerGroup,
    layers: Params,
    x: jax.Array,
    text: TextInfo,
    slots: Any,
) -> tuple[jax.Array, Any]:
    """Scan over the group's periods. The cache is carried, so that it is updated in place."""
    period = len(group.kinds)

    def split_periods(array: jax.Array) -> jax.Array:
        array = array[group.start : group.start + group.num_layers]
        return array.reshape(group.repeats, period, *array.shape[1:])

    def run_period(carry: tuple[jax.Array, Any], inputs: tuple[Any, jax.Array]):
        (x, slots), (period_inputs, index) = carry, inputs
        for position, kind in enumerate(group.kinds):
            params, data = jax.tree.map(lambda a, p=position: a[p], period_inputs)
            layer_slots = None if slots is None else slots[position]
            x, layer_slots = _apply_block(config, kind, params, x, text, layer_slots, index, data)
            if slots is not None:
                slots = (*slots[:position], layer_slots, *slots[position + 1 :])
        return (x, slots), None

    if config.remat != "none" and slots is None:
        # prevent_cse is for unrolled code: inside a scan it only slows things down.
        run_period = jax.checkpoint(
            run_period, policy=REMAT_POLICIES[config.remat], prevent_cse=False
        )
    inputs = (
        jax.tree.map(split_periods, (layers, layer_data(config))),
        jnp.arange(group.repeats),
    )
    (x, slots), _ = jax.lax.scan(run_period, (x, slots), inputs)
    return x, slots


def _run_unrolled(
    config: ModelConfig,
    layers: tuple[Params, ...],
    x: jax.Array,
    text: TextInfo,
    cache: KVCache | None,
) -> tuple[jax.Array, Any]:
    if cache is not None and not cache.unstacked:
        raise ValueError("unstacked parameters need a cache made with unstacked=True")
    all_slots = []
    data = layer_data(config)
    for index, (kind, params) in enumerate(zip(layer_kinds(config), layers, strict=True)):
        slots = None if cache is None else cache.layers[index]
        here = {name: array[index] for name, array in data.items()}
        x, slots = _apply_block(config, kind, params, x, text, slots, None, here)
        all_slots.append(slots)
    return x, tuple(all_slots)


def _apply_block(
    config: ModelConfig,
    kind: LayerKind,
    params: Params,
    x: jax.Array,
    text: TextInfo,
    slots: Any,
    layer: jax.Array | None,
    data: dict[str, jax.Array],
) -> tuple[jax.Array, Any]:
    block = Block(config, kind, parent=None)
    return block.apply({"params": params}, x, text, slots=slots, layer=layer, data=data)
