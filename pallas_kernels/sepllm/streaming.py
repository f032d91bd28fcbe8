"""The rules of SepLLM's streaming cache (arXiv 2412.12094 §3.3) on arrays of fixed shape.

Slots of a row hold, in text order, initial tokens, kept separators, past window, local window.
A token is appended; once more than `capacity` slots are filled the row is compressed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class StreamSizes(NamedTuple):
    """Sizes of the regions of a streaming cache, in tokens.

    `separators` 0 is StreamingLLM: initial tokens and the most recent ones.
    """

    initial: int
    separators: int
    local: int
    capacity: int
    accumulate: bool = True  # False: a compression keeps new separators only

    def check(self) -> None:
        """Raises ValueError, naming sizes and remedy, if they cannot work."""
        for name, size, least in (
            ("initial", self.initial, 0),
            ("separators", self.separators, 0),
            ("local", self.local, 1),
        ):
            if size < least:
                raise ValueError(f"{name}={size}: must be at least {least}")
        kept = self.initial + self.separators + self.local
        if kept > self.capacity or (self.separators and kept == self.capacity):
            raise ValueError(
                f"initial {self.initial} + separators {self.separators} + local {self.local} = "
                f"{kept} must be less than capacity {self.capacity}: raise it to {kept + 1} or "
                "more, or keep fewer tokens"
            )


class Compression(NamedTuple):
    """What stays: slot i of the result is slot `source[:, i]` of before, `[B, S]`."""

    source: Int[Array, "B S"]
    used: Int[Array, " B"]
    separators_end: Int[Array, " B"]


def compress(
    is_separator: Bool[Array, "B S"],
    used: Int[Array, " B"],
    separators_end: Int[Array, " B"],
    sizes: StreamSizes,
) -> Compression:
    """Compress the rows that hold more than `sizes.capacity` tokens; others stay as they are.

    Initial tokens and the last `local` ones stay, and of what is between, the separators kept
    before and the new ones, the last `separators` of all. Rows are independent.

    Args:
      is_separator: of the token in each slot.
      used: slots filled.
      separators_end: the slot behind the kept separators; 0 before a row's first compression.
      sizes: of the regions.
    """
    slot = jnp.arange(is_separator.shape[1], dtype=jnp.int32)
    end = jnp.where(separators_end <= 0, sizes.initial, separators_end)[:, None]
    filled = slot < used[:, None]
    initial = slot < sizes.initial
    local = (slot >= used[:, None] - sizes.local) & filled
    old = ~initial & (slot < end)
    between = (old & sizes.accumulate) | ((slot >= end) & is_separator)
    between &= ~initial & ~local & filled
    later = jnp.cumsum(between[:, ::-1], axis=1)[:, ::-1]  # itself included
    kept = between & (later <= sizes.separators)
    over = used > sizes.capacity
    stays = jnp.where(over[:, None], initial | kept | local, filled)
    count = kept.sum(1, dtype=jnp.int32)
    return Compression(
        source=jnp.argsort(~stays, axis=1, stable=True).astype(jnp.int32),
        used=jnp.where(over, stays.sum(1, dtype=jnp.int32), used),
        separators_end=jnp.where(over, sizes.initial + count, separators_end),
    )


def tokens_before_compression(used: Int[Array, " B"], sizes: StreamSizes) -> Int[Array, " B"]:
    """How many tokens a row takes as one block: the last of them is the one that is too many."""
    return sizes.capacity + 1 - used


def take_slots(x: jax.Array, source: Int[Array, "B S"], *, axis: int = 1) -> jax.Array:
    """`x` with its slots (at `axis`, rows just before it) as a `Compression` orders them."""
    leading = axis - 1
    shape = (1,) * leading + source.shape + (1,) * (x.ndim - axis - 1)
    return jnp.take_along_axis(x, source.reshape(shape), axis=axis)
