"""Attention over a device mesh: batch, heads and queries split, keys gathered."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from pallas_kernels.attention import pallas_tpu
from pallas_kernels.attention.dispatch import resolve
from pallas_kernels.attention.xla import Bounds


def sharded_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    batch_axes: str | Sequence[str] | None = None,
    head_axis: str | None = None,
    sequence_axis: str | None = None,
    causal: bool = True,
    q_offset: jax.Array | int | None = None,
    kv_lengths: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """`attention`, each device computing its rows, heads and queries; for use under `jax.jit`.

    A kernel is opaque to the partitioner, so without this a sharded model would gather all rows and
    heads onto every device. Inside (`jax.shard_map`), queries keep their part of the sequence;
    keys and values are gathered along it, so memory for them is that of the whole sequence.

    Args:
      q, k, v and the rest: global arrays, as `attention`.
      mesh: the device mesh, None for that of `jax.set_mesh`; axes not named below hold copies.
      batch_axes: mesh axes that split B, in order.
      head_axis: mesh axis that splits H, and Hk if it divides it; else every device takes the key
        heads its query heads read.
      sequence_axis: mesh axis that splits T.
      implementation: as `attention`. `"pallas"` gives each part of the sequence its part of the
        mask; then the parts, T over the axis, must be multiples of 128.

    Returns:
      `[B, T, H, Dv]` in q's dtype, split as q.

    Raises:
      ValueError: an axis is not the mesh's or does not divide the dimension it splits, or as
        `attention`.
      NotImplementedError: as `attention`.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    batch_axes = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes or ())
    _parts(mesh, "batch_axes", batch_axes, "batch", q.shape[0])
    head_parts = _parts(mesh, "head_axis", (head_axis,), "heads", q.shape[2])
    sequence_parts = _parts(mesh, "sequence_axis", (sequence_axis,), "time", q.shape[1])
    call = resolve(
        q,
        k,
        v,
        causal=causal,
        q_offset=q_offset,
        kv_lengths=kv_lengths,
        segment_ids=segment_ids,
        kv_segment_ids=kv_segment_ids,
        sliding_window=sliding_window,
        logit_softcap=logit_softcap,
        scale=scale,
        implementation=implementation,
        sequence_parts=sequence_parts,
    )
    num_heads, num_kv_heads = q.shape[2], k.shape[2]
    if num_kv_heads % head_parts:
        # Each device gets the one key head its query heads share; where they do not share one,
        # every query head gets its own copy.
        several = head_parts % num_kv_heads != 0
        repeats = (num_heads if several else head_parts) // num_kv_heads
        k, v = jnp.repeat(k, repeats, axis=2), jnp.repeat(v, repeats, axis=2)

    rows = batch_axes or None
    queries = PartitionSpec(rows, sequence_axis, head_axis, None)
    keys = PartitionSpec(rows, None, head_axis, None)
    bounds = call.bounds
    # Each device has the segments of its own queries, and of all keys.
    segments_differ = sequence_parts > 1 or bounds.kv_segment_ids is not bounds.segment_ids
    if not segments_differ:
        bounds = bounds._replace(kv_segment_ids=None)
    bounds_specs = Bounds(
        q_offset=PartitionSpec(rows),
        kv_lengths=PartitionSpec(rows),
        segment_ids=PartitionSpec(rows, sequence_axis),
        kv_segment_ids=PartitionSpec(rows, None),
    )
    bounds_specs = Bounds(
        *(None if x is None else s for x, s in zip(bounds, bounds_specs, strict=True))
    )

    # check_vma: what varies over which axes is not tracked through the loops and kernels inside.
    over_mesh = functools.partial(jax.shard_map, mesh=mesh, out_specs=queries, check_vma=False)

    if call.implementation == "pallas" and sequence_parts > 1:
        assert call.q_offset is not None  # pallas_tpu.unsupported saw to it
        kernel = pallas_tpu.make_kernel(
            q.shape[1],
            k.shape[1],
            num_heads // head_parts,
            call.spec,
            call.q_offset,
            shards=sequence_parts,
        )
        kernel_specs = pallas_tpu.kernel_sharding(kernel, mesh, sequence_axis)

        def masked_part(kernel, q, k, v, bounds):
            return pallas_tpu.run_kernel(
                kernel, q, k, v, call.spec, bounds.segment_ids, bounds.kv_segment_ids
            )

        return over_mesh(masked_part, in_specs=(kernel_specs, queries, keys, keys, bounds_specs))(
            kernel, q, k, v, bounds
        )

    def part(q, k, v, bounds):
        if sequence_parts > 1:
            start = jax.lax.axis_index(sequence_axis) * q.shape[1]
            offset = start if bounds.q_offset is None else bounds.q_offset + start
            bounds = bounds._replace(q_offset=jnp.broadcast_to(offset, q.shape[:1]))
        if not segments_differ:
            bounds = bounds._replace(kv_segment_ids=bounds.segment_ids)
        return call._replace(bounds=bounds).run(q, k, v)

    return over_mesh(part, in_specs=(queries, keys, keys, bounds_specs))(q, k, v, bounds)


def _parts(mesh, name, axes, dimension, size):
    """Into how many parts mesh axes split a dimension of q; checks that they can."""
    parts = 1
    for axis in axes:
        if axis is None:
            continue
        if axis not in mesh.shape:
            raise ValueError(f"{name} {axis!r} is not an axis of the mesh {dict(mesh.shape)}")
        parts *= mesh.shape[axis]
    if size % parts:
        raise ValueError(
            f"{name} {axes!r} splits q's {dimension}, {size}, into {parts} parts: must divide it"
        )
    return parts
