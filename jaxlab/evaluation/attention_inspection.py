"""What attention patterns let through on a text: maps, densities, bytes of caches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxlab.errors import DataError
from jaxlab.evaluation.projections import Projections, check_has_attention, layer_projections
from jaxlab.models import CCAAttention, SepLLMAttention, XAttention
from jaxlab.models.attention.cost import cache_bytes
from jaxlab.models.attention.sepllm import separator_mask
from jaxlab.models.layers import layer_data, layer_kinds
from pallas_kernels import antidiagonal_block_scores, cca_mask, select_blocks, sepllm_mask

CACHE_LENGTHS = (4096, 32768, 131072, 1048576)


class LayerMap(NamedTuple):
    """What one layer uses of its causal map.

    Attributes:
      layer: its index.
      pattern: its pattern's name.
      density: products computed, over those of full causal attention; mean over heads.
      map: `[T, T]`, in [0, 1]: how many of the heads see each key of each query. Keys that a query
        sees through a core token only, which stands for its group, count a half.
    """

    layer: int
    pattern: str
    density: float
    map: Float[np.ndarray, "T T"]


def attention_maps(model: Any, tokens: np.ndarray) -> list[LayerMap]:
    """The map of each layer on one text.

    Layers that look alike whatever the text share one array. For `xattention` the model is run, and
    the blocks are those chosen from its queries and keys.

    Args:
      model: as `jaxlab.load` gives.
      tokens: int32 `[T]`, at least one.

    Raises:
      DataError: the text is empty.
      ConfigError: the model has no attention.
    """
    config = check_has_attention(model.config)
    tokens = np.asarray(tokens, np.int32)
    if tokens.ndim != 1 or not tokens.size:
        raise DataError(f"the text has {tokens.size} tokens: give at least one")
    length = tokens.size
    kinds = layer_kinds(config)
    flags = separator_mask(config, jnp.asarray(tokens[None]))
    causal = np.tri(length)
    total = length * (length + 1) / 2
    known: dict[Any, tuple[float, np.ndarray]] = {}
    chosen: dict[int, tuple[float, np.ndarray]] = {}
    if any(isinstance(kind.attention, XAttention) for kind in kinds):
        thresholds = layer_data(config)["threshold"]
        for index, projections in enumerate(layer_projections(model, tokens[None])):
            attention = kinds[index].attention
            if isinstance(attention, XAttention):
                chosen[index] = _chosen(attention, projections, thresholds[index])
    maps = []
    for index, kind in enumerate(kinds):
        attention = kind.attention
        if index in chosen:
            density, used = chosen[index]
        elif kind in known:
            density, used = known[kind]
        else:
            if isinstance(attention, SepLLMAttention) and isinstance(attention.window, int):
                used = np.asarray(
                    sepllm_mask(
                        flags, window=attention.window, initial_tokens=attention.initial_tokens
                    )[0],
                    np.float64,
                )
                density = used.sum() / total
            elif isinstance(attention, CCAAttention):
                density, used = _cores(attention, length)
            else:
                used = causal
                if kind.window is not None:
                    used = causal - np.tri(length, k=-kind.window)
                density = used.sum() / total
            known[kind] = (float(density), used)
        maps.append(LayerMap(index, attention.pattern, float(density), used))
    return maps


def _cores(attention: CCAAttention, length: int) -> tuple[float, np.ndarray]:
    group = attention.group_size
    mask = cca_mask(length, group, attention.window_size)
    cores = mask.shape[1] - length
    raw = mask[:, cores:].astype(np.float64)
    if attention.sink_tokens:
        sinks = np.tri(length, dtype=bool) & (np.arange(length) < attention.sink_tokens)
        raw = np.maximum(raw, sinks)
    density = (raw.sum() + mask[:, :cores].sum()) / (length * (length + 1) / 2)
    pooled = np.zeros_like(raw)
    pooled[:, : cores * group] = np.repeat(mask[:, :cores], group, axis=1)
    return float(density), np.maximum(raw, 0.5 * pooled)


def _chosen(
    attention: XAttention, projections: Projections, threshold: Any
) -> tuple[float, np.ndarray]:
    block, length = attention.block_size, projections.query.shape[1]
    scores = antidiagonal_block_scores(
        projections.query, projections.key, block_size=block, stride=attention.stride
    )
    blocks = np.asarray(select_blocks(scores, threshold))[0]
    heads = blocks.mean(0)
    used = np.repeat(np.repeat(heads, block, 0), block, 1)[:length, :length] * np.tri(length)
    return float(used.sum() / (length * (length + 1) / 2)), used


def cache_table(
    config: Any, tokens: np.ndarray, lengths: tuple[int, ...] = CACHE_LENGTHS
) -> list[dict[str, int]]:
    """Bytes of one row's cache at each length, under the model's attention and under full.

    `bytes` is what `init_cache` takes. SepLLM's takes room for a text of nothing but separators
    unless `separator_capacity` bounds it; `needed_bytes` is with room for the share of separators
    that `tokens` has, and equal to `bytes` elsewhere.
    """
    full = config.replace(attention="full", kv_shift=None)
    flags = separator_mask(config, jnp.asarray(tokens, jnp.int32)[None])
    share = 0.0 if flags is None else float(flags.mean())

    def bounded(attention: Any, length: int) -> Any:
        if not isinstance(attention, SepLLMAttention) or attention.separator_capacity is not None:
            return attention
        capacity = max(1, math.ceil(share * length))
        return attention.model_copy(update={"separator_capacity": capacity})

    rows = []
    for length in lengths:
        attention = config.attention
        if isinstance(attention, tuple):
            needed = config.replace(attention=tuple(bounded(a, length) for a in attention))
        else:
            needed = config.replace(attention=bounded(attention, length))
        if config.streaming is not None:
            needed = config
        rows.append(
            {
                "tokens": length,
                "bytes": cache_bytes(config, 1, length),
                "needed_bytes": cache_bytes(needed, 1, length),
                "full_bytes": cache_bytes(full, 1, length),
            }
        )
    return rows


def draw_maps(maps: list[LayerMap], path: str | Path, *, columns: int = 6) -> None:
    """Writes a picture: one panel for each layer that differs from those before it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels: list[tuple[list[int], LayerMap]] = []
    for layer in maps:
        same = next((p for p in panels if p[1].map is layer.map), None)
        if same is None:
            panels.append(([layer.layer], layer))
        else:
            same[0].append(layer.layer)
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(2.6 * columns, 2.9 * rows), squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, (layers, panel) in zip(axes.flat, panels, strict=False):
        axis.axis("on")
        axis.imshow(panel.map, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        span = f"{layers[0]}" if len(layers) == 1 else f"{layers[0]} … {layers[-1]}"
        axis.set_title(f"layer {span}: {panel.pattern}, {panel.density:.0%}", fontsize=8)
        axis.tick_params(labelsize=6)
    axes[0][0].set(xlabel="key", ylabel="query")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
