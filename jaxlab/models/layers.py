"""How a stack of layers is run: which layers are alike, and in what order they repeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlab.models.attention_config import FullAttention, PatternConfig, XAttention
from jaxlab.models.config import ModelConfig

# What `config.remat` keeps of a layer for its backward pass.
REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class LayerKind(NamedTuple):
    """What is static about a layer and decides the code it compiles to."""

    window: int | None
    attention: PatternConfig = FullAttention()


class TextInfo(NamedTuple):
    """What every layer needs to know of the tokens it is given.

    Attributes:
      rope: cosines and sines of the tokens' positions, from `rope_table`.
      segment_ids: int32 `[B, T]` of packed documents, 0 for padding, or None.
      is_separator: bool `[B, T]`, where a layer's pattern asks for separators.
      lengths: int32 `[B]`, tokens that each row's cache held before these; None without a cache.
      num_tokens: int32 `[B]`, how many of the T tokens are real, the first ones; None: all.
      used: int32 `[B]`, slots that a streaming cache has filled before these tokens.
      slot_rope: as `rope`, of a streaming cache's slots `0 … S - 1`, `[1, S, R]`.
    """

    rope: tuple[jax.Array, jax.Array]
    segment_ids: jax.Array | None = None
    is_separator: jax.Array | None = None
    lengths: jax.Array | None = None
    num_tokens: jax.Array | None = None
    used: jax.Array | None = None
    slot_rope: tuple[jax.Array, jax.Array] | None = None


class LayerGroup(NamedTuple):
    """A run of layers: the period `kinds`, `repeats` times over, beginning at layer `start`."""

    start: int
    kinds: tuple[Any, ...]
    repeats: int

    @property
    def num_layers(self) -> int:
        return len(self.kinds) * self.repeats


def layer_kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    """The kind of each layer, first to last."""
    return tuple(map(LayerKind, config.layer_windows, config.layer_attention))


def layer_data(config: ModelConfig) -> dict[str, Any]:
    """Arrays `[L, …]` of constants that differ between layers of one kind, by name."""
    attentions = config.attention if isinstance(config.attention, tuple) else (config.attention,)
    attentions *= config.num_layers // len(attentions)
    if not any(isinstance(attention, XAttention) for attention in attentions):
        return {}
    rows = []
    for layer, attention in enumerate(attentions):
        threshold = attention.threshold if isinstance(attention, XAttention) else 1.0
        if isinstance(threshold, str):
            raise ValueError(
                f"attention.threshold is the file {threshold!r}: `jaxlab.load` and `jaxlab train` "
                "read it; elsewhere call `resolve_attention` first"
            )
        row = threshold[layer] if isinstance(threshold, tuple) else (threshold,) * config.num_heads
        rows.append(row)
    return {"threshold": jnp.asarray(rows, jnp.float32)}


def layer_groups(config: ModelConfig) -> tuple[LayerGroup, ...]:
    """Split the layers into runs that a scan can repeat, so that compile time is flat in depth.

    Alike layers are one group with a period of one; Gemma 2's alternation is one group with a
    period of two; "first and last layer full" is three groups.
    """
    return group_layers(layer_kinds(config))


def group_layers(kinds: Sequence[Any]) -> tuple[LayerGroup, ...]:
    """`layer_groups` of any kinds of layers, one entry a layer."""
    kinds = tuple(kinds)
    groups = []
    start = 0
    while start < len(kinds):
        group = _longest_run(kinds, start)
        groups.append(group)
        start += group.num_layers
    return tuple(groups)


def _longest_run(kinds: tuple[Any, ...], start: int) -> LayerGroup:
    """The group from `start` that covers most layers; a shorter period wins a tie."""
    best = LayerGroup(start, kinds[start : start + 1], 1)
    for period in range(1, min(8, len(kinds) - start) + 1):
        pattern = kinds[start : start + period]
        repeats = 1
        while kinds[start + repeats * period : start + (repeats + 1) * period] == pattern:
            repeats += 1
        group = LayerGroup(start, pattern, repeats)
        # A period that never repeats saves nothing over single layers.
        if (repeats > 1 or period == 1) and group.num_layers > best.num_layers:
            best = group
    return best
