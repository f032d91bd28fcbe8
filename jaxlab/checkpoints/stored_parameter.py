"""How one parameter of the tree lies in a checkpoint file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxlab.models.families import AnyModelConfig

Path = tuple[str, ...]
View = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class StoredParameter:
    """One parameter of the tree: its shape here, and how to find it in a checkpoint.

    Attributes:
      path: where it is in the tree, for example `("layers", "attention", "q_proj", "kernel")`.
      shape: of one layer's share, without the leading layer axis.
      names: names of the stored tensor, the preferred one first; `{}` stands for the layer.
      stored_shape: shape of the stored tensor.
      view: stored tensor -> this parameter, a numpy view, so that slicing reads only the slice.
      unview: this parameter (or one slice of the stored tensor, see `fused`) -> as stored.
      fused: `(position, of)` if the stored tensor holds several parameters.
      interleaved: whether fused parameters alternate head by head; else they follow each other.
      layers: the layers that have it, where not all do.
    """

    path: Path
    shape: tuple[int, ...]
    names: tuple[str, ...]
    stored_shape: tuple[int, ...]
    view: View
    unview: View
    fused: tuple[int, int] | None = None
    interleaved: bool = True
    layers: tuple[int, ...] | None = None

    @property
    def stacked(self) -> bool:
        return self.path[0] == "layers"

    def layers_of(self, config: AnyModelConfig) -> tuple[int, ...]:
        """The layers of the model that have the parameter, if it is `stacked`."""
        return tuple(range(config.num_layers)) if self.layers is None else self.layers


def stored_parameter(path: Path, shape: tuple[int, ...], names: tuple[str, ...]) -> StoredParameter:
    """Linear weights are stored `[out, in]` with heads flattened; everything else as it is here."""

    if path[-1] in ("bias", "scale") and len(shape) == 2:  # [H, Dh]
        stored: tuple[int, ...] = (shape[0] * shape[1],)
        return StoredParameter(
            path, shape, names, stored, lambda x: x.reshape(shape), lambda x: x.reshape(stored)
        )
    if path[-1] != "kernel":
        return StoredParameter(path, shape, names, shape, _same, _same)
    if len(shape) == 2:  # [in, out]
        return StoredParameter(path, shape, names, shape[::-1], np.transpose, np.transpose)
    if path[-2] == "o_proj":  # [H, Dh, D]
        heads, head_dim, hidden = shape
        stored = (hidden, heads * head_dim)
        return StoredParameter(
            path,
            shape,
            names,
            stored,
            lambda x: x.reshape(hidden, heads, head_dim).transpose(1, 2, 0),
            lambda x: x.transpose(2, 0, 1).reshape(stored),
        )
    hidden, heads, head_dim = shape  # [D, H, Dh]
    stored = (heads * head_dim, hidden)
    return StoredParameter(
        path,
        shape,
        names,
        stored,
        lambda x: x.reshape(heads, head_dim, hidden).transpose(2, 0, 1),
        lambda x: x.transpose(1, 2, 0).reshape(stored),
    )


def _same(x: np.ndarray) -> np.ndarray:
    return x
