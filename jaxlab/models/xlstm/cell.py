"""The mLSTM cell of a model: over whole sequences, over a mesh, or continuing from a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxlab.models.xlstm.config import XLSTMConfig
from jaxlab.models.xlstm.sharded import mlstm_over_mesh
from pallas_kernels.mlstm import mlstm
from pallas_kernels.mlstm.lazy import (
    LazyState,
    all_tokens,
    append_lazily,
    put_lazily,
    read_lazily,
)

if TYPE_CHECKING:
    from jaxlab.models.xlstm.blocks import CacheMove, TokenInfo

Tokens = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
# Blocks of at most so many tokens read the memory once, longer ones go chunk by chunk.
_SHORT = 64


def run_cell(
    config: XLSTMConfig,
    q: jax.Array,
    tokens: Tokens,
    info: TokenInfo,
    slots: dict[str, jax.Array] | None,
    layer: jax.Array | None,
) -> tuple[jax.Array, dict[str, jax.Array] | None]:
    """Outputs `[B, T, H, Dv]` for queries `[B, T, H, Dqk]`, and the cache's slots after the tokens.

    Args:
      tokens: `(k, v, i, f)`, `[B, T, H, …]`; gates after their cap.
      slots: of this layer, or of all layers alike, stacked; None without a cache.
      layer: which layer of the stack.
    """
    if slots is None:
        return mlstm_over_mesh(config, q, tokens, info.segment_ids), None
    assert info.move is not None
    here = slots
    if layer is not None:
        here = {
            name: jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)
            for name, array in slots.items()
        }
    state = LazyState(**here)
    h = _read(config, q, tokens, state, info.move)
    return h, _append(config, tokens, slots, info.move, layer)


def cell_options(config: XLSTMConfig) -> dict[str, Any]:
    """Keyword arguments of the operations that say which cell it is."""
    return dict(eps=config.cell_eps, input_gate=config.input_gate, normalize=config.normalize)


def _read(
    config: XLSTMConfig, q: jax.Array, tokens: Tokens, state: LazyState, move: CacheMove
) -> jax.Array:
    batch, block = q.shape[:2]
    real = jnp.arange(block) < move.num_tokens[:, None]
    if block <= _SHORT:
        return read_lazily(q, tokens, state, move.used, real, **cell_options(config))
    pending = state.k.shape[1]
    valid = jnp.concatenate([jnp.arange(pending) < move.used[:, None], real], axis=1)
    # Nobody asks what the pending tokens would have given: any query will do.
    q = jnp.concatenate([jnp.zeros((batch, pending, *q.shape[2:]), q.dtype), q], axis=1)
    k, v, i, f = all_tokens(state, tokens)
    initial = (state.c.astype(jnp.float32), state.n.astype(jnp.float32), state.m)
    h = mlstm(
        q,
        k,
        v,
        i,
        f,
        initial_state=initial,
        mask=valid,
        chunk_size=config.chunk_size,
        **cell_options(config),
    )
    assert isinstance(h, jax.Array)
    return h[:, pending:]


def _append(
    config: XLSTMConfig,
    tokens: Tokens,
    slots: dict[str, jax.Array],
    move: CacheMove,
    layer: jax.Array | None,
) -> dict[str, jax.Array]:
    """The slots with the tokens appended; the memory is written only if a row must fold."""

    def updated(slots: dict[str, jax.Array], fold: bool) -> dict[str, jax.Array]:
        names = LazyState._fields if fold else LazyState._fields[3:]
        here = slots
        if layer is not None:
            here = {
                name: jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)
                for name, array in slots.items()
            }
        old = LazyState(**here)
        if fold:
            new = append_lazily(
                tokens, old, move.used, move.num_tokens, move.fold, input_gate=config.input_gate
            )
        else:
            new = put_lazily(tokens, old, move.used, move.num_tokens)
        arrays = {name: getattr(new, name) for name in names}
        if layer is not None:
            arrays = {
                name: jax.lax.dynamic_update_index_in_dim(slots[name], array, layer, 0)
                for name, array in arrays.items()
            }
        return {**slots, **arrays}

    if tokens[0].shape[1] > slots["k"].shape[-3]:  # more than there are slots: they must fold
        return updated(slots, fold=True)
    return jax.lax.cond(
        move.must_fold,
        lambda slots: updated(slots, fold=True),
        lambda slots: updated(slots, fold=False),
        slots,
    )
