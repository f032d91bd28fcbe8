"""The mLSTM on a mesh: rows, heads and stretches of the sequence on different devices.

A device that holds a stretch of a row needs to know only what the stretches before it leave in
memory. Each device summarises its own stretch, the summaries go round, and each device composes
those before its own into its initial state. The traffic is one state a head and device, however
long the row.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxlab.models.attention.full import mesh_axes
from jaxlab.models.xlstm.config import XLSTMConfig
from pallas_kernels.mlstm import MLSTMSummary, mlstm, mlstm_compose, mlstm_summary

Tokens = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def mlstm_over_mesh(
    config: XLSTMConfig, q: jax.Array, tokens: Tokens, segment_ids: jax.Array | None
) -> jax.Array:
    """`mlstm` of whole rows, on the mesh in force; without one, just called.

    Args:
      q: `[B, T, H, Dqk]`.
      tokens: `(k, v, i, f)`, `[B, T, H, …]`.
      segment_ids: int32 `[B, T]`, 0 for padding, or None.
    """
    batch, sequence, heads = mesh_axes(q.shape)
    if not (batch or sequence or heads):
        return _mlstm(config, q, tokens, segment_ids)
    mesh = jax.sharding.get_abstract_mesh()
    arrays = PartitionSpec(batch, sequence, heads, None)
    gates = PartitionSpec(batch, sequence, heads)
    rows = PartitionSpec(batch, sequence)

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(arrays, (arrays, arrays, gates, gates), rows),
        out_specs=arrays,
        check_vma=False,
    )
    def run(q: jax.Array, tokens: Tokens, segment_ids: jax.Array | None) -> jax.Array:
        if sequence is None:
            return _mlstm(config, q, tokens, segment_ids)
        before = None if segment_ids is None else _segment_before(segment_ids, sequence)
        of_rows = dict(
            segment_ids=segment_ids,
            previous_segment=before,
            mask=None if segment_ids is None else segment_ids != 0,
        )
        summary = mlstm_summary(*tokens, **of_rows, input_gate=config.input_gate)
        state = _state_before(summary, sequence, mesh.shape[sequence])
        return _mlstm(config, q, tokens, segment_ids, initial_state=state, previous_segment=before)

    return run(q, tokens, segment_ids)


def _mlstm(
    config: XLSTMConfig,
    q: jax.Array,
    tokens: Tokens,
    segment_ids: jax.Array | None,
    **more: Any,
) -> jax.Array:
    return mlstm(
        q,
        *tokens,
        segment_ids=segment_ids,
        mask=None if segment_ids is None else segment_ids != 0,
        chunk_size=config.chunk_size,
        eps=config.cell_eps,
        input_gate=config.input_gate,
        normalize=config.normalize,
        **more,
    )


def _state_before(
    summary: MLSTMSummary, axis: str, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The state that the devices before this one on `axis` leave."""
    everyone = jax.tree.map(lambda x: jax.lax.all_gather(x, axis), summary)
    index = jax.lax.axis_index(axis)
    before = MLSTMSummary.of_state(jax.tree.map(jnp.zeros_like, summary.state))
    for device in range(size - 1):
        following = mlstm_compose(before, jax.tree.map(lambda x, d=device: x[d], everyone))
        before = jax.tree.map(
            lambda new, old, d=device: jnp.where(d < index, new, old), following, before
        )
    return before.state


def _segment_before(segment_ids: jax.Array, axis: str) -> jax.Array:
    """int32 `[B]`: the segment of the last real token before this device's stretch.

    Where there is none, the stretch's own first segment: then nothing begins with its first token.
    """
    everyone = jax.lax.all_gather(segment_ids, axis, axis=1, tiled=True)
    length = segment_ids.shape[1]
    start = jax.lax.axis_index(axis) * length
    column = jnp.arange(everyone.shape[1])
    real = everyone != 0
    last = jnp.max(jnp.where(real & (column < start), column, -1), axis=1)
    first = jnp.argmax(segment_ids != 0, axis=1)
    own = jnp.take_along_axis(segment_ids, first[:, None], axis=1)
    found = jnp.take_along_axis(everyone, jnp.maximum(last, 0)[:, None], axis=1)
    return jnp.where(last[:, None] >= 0, found, own)[:, 0]
