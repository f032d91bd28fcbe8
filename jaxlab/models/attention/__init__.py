"""The attention sublayer: projections here, each pattern's mathematics in a module of `PATTERNS`.

A pattern is a module with

    attend(query, key, value, *, config, kind, text, data) -> output
    attend_cached(query, key, value, slots, layer, *, config, kind, text, data) -> (output, slots)
    init_slots(config, kind, size) -> slots
    KEEPS_LESS: whether its cache holds less than every token

Keys arrive shifted, where a model shifts them, and rotated; `data` holds the layer's `layer_data`.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxlab.models.attention import cca, full, sepllm, shift, xattention
from jaxlab.models.attention.slots import CacheSize
from jaxlab.models.config import ModelConfig
from jaxlab.models.layers import LayerKind, TextInfo
from jaxlab.models.linear import Linear
from jaxlab.models.norm import Norm
from jaxlab.models.rope import apply_rope

__all__ = ["PATTERNS", "Attention", "CacheSize", "init_slots", "keeps_less"]

PATTERNS: dict[str, Any] = {
    "full": full,
    "sepllm": sepllm,
    "cca": cca,
    "xattention": xattention,
}


class Attention(nn.Module):
    """Grouped-query self-attention: project, shift, normalise, rotate, attend, project back."""

    config: ModelConfig
    kind: LayerKind

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        text: TextInfo,
        *,
        slots: Any = None,
        layer: jax.Array | int | None = None,
        data: dict[str, jax.Array] | None = None,
    ) -> tuple[jax.Array, Any]:
        """`x [B, T, D]` to `[B, T, D]`, and the layer's cache `slots` with the block appended.

        Without `slots` the text attends to itself; with it, to what each row already holds too.
        `layer` is an index into the leading axis of the slots, None if they have none; `data` holds
        the layer's part of `layer_data`.
        """
        config = self.config
        heads, kv_heads = (
            (config.num_heads, config.head_dim),
            (config.num_kv_heads, config.head_dim),
        )

        def project(name: str, shape: tuple[int, int], axis: str) -> jax.Array:
            axes = ("embed", axis, "head_dim")
            return Linear(config, shape, axes, use_bias=config.qkv_bias, name=name)(x)

        query = project("q_proj", heads, "heads")
        key = project("k_proj", kv_heads, "kv_heads")
        value = project("v_proj", kv_heads, "kv_heads")
        if config.kv_shift is not None:
            taps = {
                name: self.param(f"{name}_shift", shift.init_taps, config)
                for name in config.kv_shift.shifted
            }
            key, value, slots = shift.shift(
                key, value, taps, slots, layer, config=config.kv_shift, text=text
            )
        if config.qk_norm:
            query = Norm(config, rms=True, name="q_norm")(query)
            key = Norm(config, rms=True, name="k_norm")(key)
        pattern = PATTERNS[self.kind.attention.pattern]
        rotated = slots is None or config.streaming is None
        if rotated:  # a streaming cache holds keys as they are: their places in it still change
            query, key = apply_rope(query, *text.rope), apply_rope(key, *text.rope)
        query = nn.with_logical_constraint(query, ("batch", "length", "heads", "head_dim"))
        key = nn.with_logical_constraint(key, ("batch", "kv_length", "kv_heads", "head_dim"))
        value = nn.with_logical_constraint(value, ("batch", "kv_length", "kv_heads", "head_dim"))

        # Kept where a caller asks for the collection (`mutable=["intermediates"]`), else nothing.
        for name, array in (("query", query), ("key", key), ("value", value)):
            self.sow("intermediates", name, array)

        options = {"config": config, "kind": self.kind, "text": text, "data": data or {}}
        if slots is None:
            output = pattern.attend(query, key, value, **options)
        else:
            output, slots = pattern.attend_cached(query, key, value, slots, layer, **options)
        output = Linear(
            config,
            (config.hidden_size,),
            ("heads", "head_dim", "embed"),
            contract=2,
            use_bias=config.attention_out_bias,
            name="o_proj",
        )(output.astype(jnp.dtype(config.dtype)))
        return output, slots


def init_slots(config: ModelConfig, kind: LayerKind, size: CacheSize) -> dict[str, jax.Array]:
    """What one layer of this kind remembers, empty: arrays `[B, …]` by name."""
    slots = PATTERNS[kind.attention.pattern].init_slots(config, kind, size)
    if config.kv_shift is not None:
        slots |= shift.init_slots(config, size)
    return slots


def keeps_less(kind: LayerKind) -> bool:
    """Whether a layer of this kind holds less than every token, so that it cannot go back far."""
    return PATTERNS[kind.attention.pattern].KEEPS_LESS
