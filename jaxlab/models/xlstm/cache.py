"""The cache of an xLSTM: a state of fixed size, and the newest tokens kept apart from it.

A token that was appended is *pending* until it is folded into the state, which cannot be undone:
`rewind` drops pending tokens, `commit` allows them to be folded. The layers fold several at a time,
when their slots are full (`pallas_kernels.mlstm.lazy`).
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxlab.models.cache import check_between
from jaxlab.models.layers import group_layers
from jaxlab.models.xlstm.blocks import CacheMove
from jaxlab.models.xlstm.config import XLSTMConfig
from jaxlab.models.xlstm.slstm import CONV_TAPS

# Slots beyond `max_pending`: so many decoded tokens share one writing of the memory.
FOLDED_TOGETHER = 16


class XLSTMCache(flax.struct.PyTreeNode):
    """What every block remembers of each row's tokens; its size does not depend on how many.

    Attributes:
      lengths: int32 `[B]`, tokens in each row, pending ones included.
      committed: int32 `[B]`, tokens of each row that are permanent. What is more than `max_pending`
        tokens back commits by itself.
      folded: int32 `[B]`, tokens that are in the states; at most `committed`. The others are in
        slots.
      layers: one entry per group of alike blocks, each a tuple with one dict of arrays
        `[repeats, B, …]` per block of the group's period; or, unstacked, one dict per block of
        arrays `[B, …]`. mLSTM blocks hold a `LazyState`; sLSTM blocks the states after each of the
        last tokens, and the inputs of their convolution.
      max_pending: tokens of a row that can be pending at a time.
      made_for: the model's configuration, as far as it decides the arrays' meaning.
    """

    lengths: jax.Array
    committed: jax.Array
    folded: jax.Array
    layers: Any
    max_pending: int = flax.struct.field(pytree_node=False, default=1)
    made_for: Any = flax.struct.field(pytree_node=False, default=None)

    @property
    def unstacked(self) -> bool:
        """Whether `layers` holds one entry per block, for `unstack_layers` parameters."""
        return isinstance(self.layers[0], dict)

    @property
    def nbytes(self) -> int:
        """Bytes held by the cache's arrays."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def rewind(self, lengths: jax.Array | list[int] | int) -> XLSTMCache:
        """Drop the pending tokens of each row beyond `lengths` (int, or int32 `[B]`).

        Raises:
          ValueError: outside jit, if a length is beyond the row's or below what is committed.
        """
        lengths = self._row_lengths(lengths)
        check_between("rewind", lengths, self.committed, self.lengths)
        return self.replace(lengths=jnp.clip(lengths, self.committed, self.lengths))

    def commit(self, lengths: jax.Array | list[int] | int | None = None) -> XLSTMCache:
        """Make the first `lengths` tokens of each row permanent; None commits everything."""
        lengths = self.lengths if lengths is None else self._row_lengths(lengths)
        check_between("commit", lengths, self.committed, self.lengths)
        return self.replace(committed=jnp.clip(lengths, self.committed, self.lengths))

    def logical_axes(self) -> XLSTMCache:
        """The same cache with a tuple of logical axis names in place of each array."""
        leading = () if self.unstacked else ("layers",)
        layers = jax.tree_util.tree_map_with_path(
            lambda path, _: (*leading, *_SLOT_AXES[path[-1].key]), self.layers
        )
        rows = ("batch",)
        return self.replace(lengths=rows, committed=rows, folded=rows, layers=layers)

    def check_model(self, config: XLSTMConfig) -> None:
        """Raise `ValueError` if the cache was made for another model than that of `config`."""
        if self.made_for != _identity(config):
            raise ValueError(
                f"the cache was made for another model ({self.made_for}) than this one "
                f"({_identity(config)}): make a new one with init_cache"
            )

    def check_room(self, num_tokens: Any) -> None:
        """A state has room for any number of tokens; here so that every cache has it."""

    def move(self, block: int, num_tokens: jax.Array | None) -> CacheMove:
        """What appending a block of `block` tokens, of which `num_tokens` are real, will do."""
        used = self.lengths - self.folded
        if num_tokens is None:
            num_tokens = jnp.full_like(used, block)
        total = used + num_tokens
        must_fold = jnp.any(total > self.max_pending + FOLDED_TOGETHER)
        must_fold |= block > self.max_pending + FOLDED_TOGETHER
        fold = jnp.where(must_fold, jnp.maximum(total - self.max_pending, 0), 0)
        return CacheMove(used, num_tokens, fold, must_fold)

    def advanced(self, move: CacheMove, layers: Any) -> XLSTMCache:
        """After `move`, with `layers` that hold the block."""
        lengths = self.lengths + move.num_tokens
        return self.replace(
            lengths=lengths,
            committed=jnp.maximum(self.committed, lengths - self.max_pending),
            folded=self.folded + move.fold,
            layers=layers,
        )

    def _row_lengths(self, lengths: jax.Array | list[int] | int) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(lengths, jnp.int32), self.lengths.shape)


def init_xlstm_cache(
    config: XLSTMConfig,
    batch_size: int,
    max_length: int = 1,
    *,
    dtype: Any = None,
    unstacked: bool = False,
    max_pending: int | None = None,
) -> XLSTMCache:
    """An empty cache; its states are zero.

    Args:
      config: the model's.
      batch_size: rows.
      max_length: not looked at: rows may be of any length. (Other caches need it.)
      dtype: type of pending keys and values; default the model's compute type. The state's type is
        `config.state_dtype`.
      unstacked: one array per block, for parameters made by `unstack_layers`.
      max_pending: how many tokens `rewind` can take back; default 16.
    """
    max_pending = 16 if max_pending is None else max_pending
    if batch_size < 1 or max_length < 1 or max_pending < 1:
        raise ValueError(
            f"batch_size is {batch_size}, max_length {max_length} and max_pending {max_pending}: "
            "all must be at least 1"
        )
    dtype = jnp.dtype(dtype or config.dtype)

    def slots(kind: str, *leading: int) -> dict[str, jax.Array]:
        shapes = _slot_shapes(config, kind, batch_size, max_pending + FOLDED_TOGETHER, dtype)
        return {name: jnp.zeros((*leading, *shape), kind) for name, (shape, kind) in shapes.items()}

    layers: Any
    if unstacked:
        layers = tuple(slots(kind) for kind in config.blocks)
    else:
        layers = tuple(
            tuple(slots(kind, group.repeats) for kind in group.kinds)
            for group in group_layers(config.blocks)
        )
    # Three arrays, not one three times: a jitted step may donate the cache.
    lengths, committed, folded = (jnp.zeros((batch_size,), jnp.int32) for _ in range(3))
    return XLSTMCache(lengths, committed, folded, layers, max_pending, _identity(config))


def _identity(config: XLSTMConfig) -> tuple[Any, ...]:
    return (
        config.blocks,
        config.embedding_dim,
        config.num_heads,
        config.qk_head_dim,
        config.v_head_dim,
        config.input_gate,
        config.normalize,
    )


# Of the arrays that `_slot_shapes` describes.
_SLOT_AXES: dict[str, tuple[str | None, ...]] = {
    "c": ("batch", "heads", None, None),
    "n": ("batch", "heads", None),
    "m": ("batch", "heads"),
    "k": ("batch", None, "heads", "head_dim"),
    "v": ("batch", None, "heads", "head_dim"),
    "i": ("batch", None, "heads"),
    "f": ("batch", None, "heads"),
    "states": ("batch", None, None, "heads", "head_dim"),
    "inputs": ("batch", None, "act_embed"),
}


def _slot_shapes(
    config: XLSTMConfig, kind: str, batch: int, slots: int, dtype: Any
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and type of each array of a block."""
    heads, qk, v = config.num_heads, config.qk_head_dim, config.v_head_dim
    state = jnp.dtype(config.state_dtype)
    if kind == "m":
        return {
            "c": ((batch, heads, qk, v), state),
            "n": ((batch, heads, qk), state),
            "m": ((batch, heads), jnp.float32),
            "k": ((batch, slots, heads, qk), dtype),
            "v": ((batch, slots, heads, v), dtype),
            "i": ((batch, slots, heads), jnp.float32),
            "f": ((batch, slots, heads), jnp.float32),
        }
    width = config.embedding_dim
    return {
        # The state before the first pending token, and after each.
        "states": ((batch, slots + 1, 4, heads, width // heads), jnp.float32),
        "inputs": ((batch, CONV_TAPS - 1 + slots, width), dtype),
    }
