"""How a stack of layers is run: which layers are alike, and in what order they repeat."""

from __future__ import annotations

from typing import NamedTuple

from jaxlab.models.config import ModelConfig


class LayerKind(NamedTuple):
    """What is static about a layer and decides the code it compiles to."""

    window: int | None


class LayerGroup(NamedTuple):
    """A run of layers: the period `kinds`, `repeats` times over, beginning at layer `start`."""

    start: int
    kinds: tuple[LayerKind, ...]
    repeats: int

    @property
    def num_layers(self) -> int:
        return len(self.kinds) * self.repeats


def layer_kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    """The kind of each layer, first to last."""
    return tuple(LayerKind(window) for window in config.layer_windows)


def layer_groups(config: ModelConfig) -> tuple[LayerGroup, ...]:
    """Split the layers into runs that a scan can repeat, so that compile time is flat in depth.

    Alike layers are one group with a period of one; Gemma 2's alternation is one group with a
    period of two; "first and last layer full" is three groups.
    """
    kinds = layer_kinds(config)
    groups = []
    start = 0
    while start < len(kinds):
        group = _longest_run(kinds, start)
        groups.append(group)
        start += group.num_layers
    return tuple(groups)


def _longest_run(kinds: tuple[LayerKind, ...], start: int) -> LayerGroup:
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
