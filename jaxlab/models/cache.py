"""The cache of a model in use, with four moves: extend, rewind, commit, and its bytes.

`extend` (in `Transformer`) appends a block of tokens to each row, at that row's own length. The new
tokens are *pending*: `rewind` drops those beyond a length, `commit` makes a prefix permanent. Only
committed tokens may ever be evicted, pooled or folded, so whatever was appended speculatively can
be taken back exactly.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.errors import PromptError
from jaxlab.models.config import ModelConfig
from jaxlab.models.layers import layer_groups


class KVCache(flax.struct.PyTreeNode):
    """Keys and values of every layer, in slots `0 … max_length - 1` of each row.

    Attributes:
      lengths: int32 `[B]`, tokens in each row, pending ones included. Slots at or beyond it are
        stale and masked, never read.
      committed: int32 `[B]`, tokens of each row that are permanent.
      layers: one entry per group of `layer_groups(config)`, each a tuple with one
        `{"key", "value"}` of `[repeats, B, max_length, num_kv_heads, head_dim]` per layer of the
        group's period; or, unstacked, one entry per layer of `[B, max_length, num_kv_heads,
        head_dim]`.
    """

    lengths: jax.Array
    committed: jax.Array
    layers: Any

    @property
    def unstacked(self) -> bool:
        """Whether `layers` holds one entry per layer, for `unstack_layers` parameters."""
        return isinstance(self.layers[0], dict)

    @property
    def max_length(self) -> int:
        """Slots of a row."""
        return jax.tree.leaves(self.layers)[0].shape[-3]

    @property
    def nbytes(self) -> int:
        """Bytes held by the cache's arrays."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def rewind(self, lengths: jax.Array | list[int] | int) -> KVCache:
        """Drop the pending tokens of each row beyond `lengths` (int, or int32 `[B]`).

        Raises:
          ValueError: outside jit, if a length is beyond the row's or below what is committed.
        """
        lengths = self._row_lengths(lengths)
        _check_between("rewind", lengths, self.committed, self.lengths)
        return self.replace(lengths=jnp.clip(lengths, self.committed, self.lengths))

    def commit(self, lengths: jax.Array | list[int] | int | None = None) -> KVCache:
        """Make the first `lengths` tokens of each row permanent; None commits everything."""
        lengths = self.lengths if lengths is None else self._row_lengths(lengths)
        _check_between("commit", lengths, self.committed, self.lengths)
        return self.replace(committed=jnp.clip(lengths, self.committed, self.lengths))

    def check_room(self, block_length: int) -> None:
        """Raise `PromptError` if a row has no room for so many more tokens; silent under jit."""
        if isinstance(self.lengths, jax.core.Tracer):
            return
        longest = int(np.max(np.asarray(self.lengths)))
        if longest + block_length > self.max_length:
            raise PromptError(
                f"cache of max_length {self.max_length} is full: a row holds {longest} tokens and "
                f"{block_length} more were appended. Make the cache with max_length >= "
                f"{longest + block_length}, or rewind it first."
            )

    def _row_lengths(self, lengths: jax.Array | list[int] | int) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(lengths, jnp.int32), self.lengths.shape)


def init_cache(
    config: ModelConfig,
    batch_size: int,
    max_length: int,
    *,
    dtype: Any = None,
    unstacked: bool = False,
) -> KVCache:
    """An empty cache.

    Args:
      config: the model's.
      batch_size: rows.
      max_length: slots of a row: the longest prompt plus all tokens to be generated.
      dtype: type of keys and values; default the model's compute type.
      unstacked: one array per layer, for parameters made by `unstack_layers`.
    """
    if batch_size < 1 or max_length < 1:
        raise ValueError(
            f"batch_size is {batch_size} and max_length {max_length}: both must be at least 1"
        )
    dtype = jnp.dtype(dtype or config.dtype)
    shape = (batch_size, max_length, config.num_kv_heads, config.head_dim)

    def slots(*leading: int) -> dict[str, jax.Array]:
        return {name: jnp.zeros((*leading, *shape), dtype) for name in ("key", "value")}

    layers: Any
    if unstacked:
        layers = tuple(slots() for _ in range(config.num_layers))
    else:
        layers = tuple(
            tuple(slots(group.repeats) for _ in group.kinds) for group in layer_groups(config)
        )
    # Two arrays, not one twice: a jitted step may donate the cache.
    return KVCache(
        lengths=jnp.zeros((batch_size,), jnp.int32),
        committed=jnp.zeros((batch_size,), jnp.int32),
        layers=layers,
    )


def _check_between(move: str, lengths: Any, low: Any, high: Any) -> None:
    if any(isinstance(x, jax.core.Tracer) for x in (lengths, low, high)):
        return
    lengths, low, high = (np.asarray(x) for x in (lengths, low, high))
    bad = np.flatnonzero((lengths < low) | (lengths > high))
    if bad.size:
        row = int(bad[0])
        raise ValueError(
            f"{move} to length {lengths[row]} in row {row}: it must be between the committed "
            f"{low[row]} and the present {high[row]} tokens"
        )
