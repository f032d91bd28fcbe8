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
from jaxlab.models.attention import CacheSize, init_slots, keeps_less
from jaxlab.models.config import ModelConfig
from jaxlab.models.layers import LayerKind, layer_groups, layer_kinds


class StreamState(flax.struct.PyTreeNode):
    """Which tokens a streaming cache holds; the same in every layer.

    Attributes:
      used: int32 `[B]`, slots filled.
      separators_end: int32 `[B]`, the first slot behind the kept separators; 0 before the first
        compression.
      is_separator: bool `[B, capacity + 1]`, of the filled slots.
    """

    used: jax.Array
    separators_end: jax.Array
    is_separator: jax.Array

    def append(self, is_separator: jax.Array, num_tokens: jax.Array) -> StreamState:
        """With the first `num_tokens [B]` of a block appended: `is_separator`, bool `[B, T]`."""
        token = jnp.arange(is_separator.shape[1], dtype=jnp.int32)
        room = self.is_separator.shape[1]
        place = jnp.where(token < num_tokens[:, None], self.used[:, None] + token, room)
        rows = jnp.arange(place.shape[0])[:, None]
        flags = self.is_separator.at[rows, place].set(is_separator, mode="drop")
        return self.replace(used=self.used + num_tokens, is_separator=flags)


class KVCache(flax.struct.PyTreeNode):
    """What every layer remembers of each row's tokens.

    What a layer holds depends on its pattern (`PATTERNS[…].init_slots`): full attention a slot for
    every position, the sparse patterns fewer. Each array is addressed by position, so `rewind` only
    moves `lengths`: what lies at or beyond a row's length is stale, masked, never read.

    Attributes:
      lengths: int32 `[B]`, tokens in each row, pending ones included.
      committed: int32 `[B]`, tokens of each row that are permanent. Patterns with less than a slot
        a position commit by themselves what is more than `max_pending` tokens back.
      layers: one entry per group of `layer_groups(config)`, each a tuple with one dict of arrays
        `[repeats, B, …]` per layer of the group's period; or, unstacked, one dict per layer of
        arrays `[B, …]`.
      stream: of a model whose cache streams (`config.streaming`), else None.
      max_length: tokens that a row has room for; a stream has no end, and does not look at it.
      max_pending: tokens of a row that can be pending at a time; None: all of them.
      made_for: the attention and shift of the model it was made for; with others it would be wrong.
    """

    lengths: jax.Array
    committed: jax.Array
    layers: Any
    stream: StreamState | None = None
    max_length: int = flax.struct.field(pytree_node=False, default=0)
    max_pending: int | None = flax.struct.field(pytree_node=False, default=None)
    made_for: Any = flax.struct.field(pytree_node=False, default=None)

    @property
    def unstacked(self) -> bool:
        """Whether `layers` holds one entry per layer, for `unstack_layers` parameters."""
        return isinstance(self.layers[0], dict)

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
        check_between("rewind", lengths, self.committed, self.lengths)
        lengths = jnp.clip(lengths, self.committed, self.lengths)
        stream = self.stream
        if stream is not None:  # a compression commits, so nothing was evicted since
            stream = stream.replace(used=stream.used - (self.lengths - lengths))
        return self.replace(lengths=lengths, stream=stream)

    def commit(self, lengths: jax.Array | list[int] | int | None = None) -> KVCache:
        """Make the first `lengths` tokens of each row permanent; None commits everything."""
        lengths = self.lengths if lengths is None else self._row_lengths(lengths)
        check_between("commit", lengths, self.committed, self.lengths)
        return self.replace(committed=jnp.clip(lengths, self.committed, self.lengths))

    def advanced(self, num_tokens: jax.Array | int, layers: Any) -> KVCache:
        """After a block of which `num_tokens` (int, or int32 `[B]`) are real: `layers` hold it."""
        lengths = self.lengths + num_tokens
        committed = self.committed
        if self.max_pending is not None:
            committed = jnp.maximum(committed, lengths - self.max_pending)
        return self.replace(lengths=lengths, committed=committed, layers=layers)

    def check_model(self, config: ModelConfig) -> None:
        """Raise `ValueError` if the cache was made for other attention than `config` has."""
        if self.made_for != _attention_of(config):
            raise ValueError(
                "the cache was made for another attention (pattern, window, group size, shift …) "
                f"than this model's, {config.attention!r}: make a new one with init_cache"
            )

    def check_room(self, num_tokens: Any) -> None:
        """Raise `PromptError` if a row has no room for so many more tokens; silent under jit.

        `num_tokens`: int, or `[B]`. Also raises if a row has had more separators than the cache
        was made for.
        """
        if isinstance(self.lengths, jax.core.Tracer):
            return
        longest = int(np.max(np.asarray(self.lengths) + np.asarray(num_tokens)))
        if self.stream is None and longest > self.max_length:
            now = int(np.max(np.asarray(self.lengths)))
            raise PromptError(
                f"cache of max_length {self.max_length} is full: a row holds {now} tokens and "
                f"{longest - now} more were appended. Make the cache with max_length >= "
                f"{longest}, or rewind it first."
            )
        if self.overflowed:
            raise PromptError(
                "a row had more separators than the cache has room for: raise "
                "attention.separator_capacity, or leave it out"
            )

    @property
    def overflowed(self) -> bool:
        """Whether a row lost what its pattern must keep; its outputs since then are NaN."""
        found = jax.tree_util.tree_leaves_with_path(self.layers)
        return any(
            bool(jnp.any(leaf))
            for path, leaf in found
            if getattr(path[-1], "key", None) == "overflow"
        )

    def _row_lengths(self, lengths: jax.Array | list[int] | int) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(lengths, jnp.int32), self.lengths.shape)


def init_kv_cache(
    config: ModelConfig,
    batch_size: int,
    max_length: int,
    *,
    dtype: Any = None,
    unstacked: bool = False,
    max_pending: int = 64,
) -> KVCache:
    """An empty cache.

    Args:
      config: the model's.
      batch_size: rows.
      max_length: tokens that a row has room for: the longest prompt plus all tokens to be
        generated. Patterns that keep less than everything need fewer slots than that.
      dtype: type of keys and values; default the model's compute type.
      unstacked: one array per layer, for parameters made by `unstack_layers`.
      max_pending: how many tokens `rewind` can take back where a layer does not keep everything;
        full attention without a shift of keys and values can always go back to what is committed.
    """
    if batch_size < 1 or max_length < 1 or max_pending < 1:
        raise ValueError(
            f"batch_size is {batch_size}, max_length {max_length} and max_pending {max_pending}: "
            "all must be at least 1"
        )
    dtype = jnp.dtype(dtype or config.dtype)
    size = CacheSize(batch_size, max_length, max_pending, dtype)

    def slots(kind: LayerKind, *leading: int) -> dict[str, jax.Array]:
        one = init_slots(config, kind, size)
        return {
            name: jnp.array(jnp.broadcast_to(array, (*leading, *array.shape)))
            for name, array in one.items()
        }

    layers: Any
    kinds = layer_kinds(config)
    if unstacked:
        layers = tuple(slots(kind) for kind in kinds)
    else:
        layers = tuple(
            tuple(slots(kind, group.repeats) for kind in group.kinds)
            for group in layer_groups(config)
        )
    bounded = config.kv_shift is not None or any(map(keeps_less, kinds))
    # Two arrays, not one twice: a jitted step may donate the cache.
    return KVCache(
        lengths=jnp.zeros((batch_size,), jnp.int32),
        committed=jnp.zeros((batch_size,), jnp.int32),
        layers=layers,
        stream=_init_stream(config, batch_size),
        max_length=max_length,
        max_pending=max_pending if bounded else None,
        made_for=_attention_of(config),
    )


def _attention_of(config: ModelConfig) -> Any:
    return config.layer_attention, config.layer_windows, config.kv_shift


def _init_stream(config: ModelConfig, batch_size: int) -> StreamState | None:
    if config.streaming is None:
        return None
    return StreamState(
        used=jnp.zeros((batch_size,), jnp.int32),
        separators_end=jnp.zeros((batch_size,), jnp.int32),
        is_separator=jnp.zeros((batch_size, config.streaming.capacity + 1), bool),
    )


def check_between(move: str, lengths: Any, low: Any, high: Any) -> None:
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
