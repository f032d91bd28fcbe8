"""A pattern's operation on a mesh: rows and heads split, each device with whole sequences.

A pattern looks at all of a text, so a sequence that is split over devices is gathered: its heads
are split in its stead (an all-to-all each way, as in DeepSpeed-Ulysses, arXiv 2309.14509) where the
axis divides them, else every device of the axis computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxlab.models.attention.full import mesh_axes
from jaxlab.models.attention.slots import Arrays

# query, key, value [B, T, H | Hk, D], per-token and per-head inputs -> [B, T, H, D]
Operation = Callable[[jax.Array, jax.Array, jax.Array, Arrays, Arrays], jax.Array]


def over_mesh(
    operation: Operation,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    per_token: Arrays | None = None,
    per_head: Arrays | None = None,
) -> jax.Array:
    """`operation` of global arrays, on the mesh in force; without one, just called.

    Args:
      operation: takes `(query, key, value, per_token, per_head)`, whole sequences of some rows and
        heads.
      query, key, value: `[B, T, H | Hk, D]`.
      per_token: arrays `[B, T]`.
      per_head: arrays `[H]`, one number a query head.
    """
    per_token, per_head = per_token or {}, per_head or {}
    batch, sequence, heads = mesh_axes(query.shape)
    if not (batch or sequence or heads):
        return operation(query, key, value, per_token, per_head)
    mesh = jax.sharding.get_abstract_mesh()
    parts = {axis: 1 if axis is None else mesh.shape[axis] for axis in (sequence, heads)}
    num_heads, kv_heads = query.shape[2], key.shape[2]
    # Ulysses: the sequence axis splits heads further while the operation runs.
    splits_heads = sequence is not None and (num_heads // parts[heads]) % parts[sequence] == 0
    wanted = parts[heads] * (parts[sequence] if splits_heads else 1)
    if kv_heads % wanted:
        # Every device needs the key heads that its query heads read.
        several = wanted % kv_heads != 0
        repeats = (num_heads if several else wanted) // kv_heads
        key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
    arrays = PartitionSpec(batch, sequence, heads, None)
    tokens = PartitionSpec(batch, sequence)

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(arrays, arrays, arrays, tokens, PartitionSpec(heads)),
        out_specs=arrays,
        check_vma=False,
    )
    def run(query, key, value, per_token, per_head):
        if sequence is None:
            return operation(query, key, value, per_token, per_head)
        per_token = jax.tree.map(
            lambda x: jax.lax.all_gather(x, sequence, axis=1, tiled=True), per_token
        )
        local = query.shape[1]
        index = jax.lax.axis_index(sequence)
        if splits_heads:
            exchange = partial(jax.lax.all_to_all, axis_name=sequence, tiled=True)
            query, key, value = (
                exchange(x, split_axis=2, concat_axis=1) for x in (query, key, value)
            )
            own = query.shape[2]
            per_head = jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, index * own, own), per_head
            )
            output = operation(query, key, value, per_token, per_head)
            return exchange(output, split_axis=1, concat_axis=2)
        query, key, value = (
            jax.lax.all_gather(x, sequence, axis=1, tiled=True) for x in (query, key, value)
        )
        output = operation(query, key, value, per_token, per_head)
        return jax.lax.dynamic_slice_in_dim(output, index * local, local, axis=1)

    return run(query, key, value, per_token, per_head)
