"""Checks attention's arguments and chooses the implementation."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from pallas_kernels.attention import cudnn_gpu, pallas_tpu
from pallas_kernels.attention.xla import Bounds, Spec, attention_xla

IMPLEMENTATIONS = ("xla", "pallas", "cudnn")
FOR_PLATFORM = {"tpu": "pallas", "gpu": "cudnn"}

compiling_for = jax.make_user_context(default_value=None)
"""Context manager: the platform `"tpu"`, `"gpu"` or `"cpu"` that `implementation=None` picks for.

Default None: the platform of `jax.default_backend()`. Compiling ahead of time for another platform
than the one jax runs on needs it, for both tracing and lowering:

    with compiling_for("tpu"):
        compiled = jax.jit(step).lower(*shapes_on_a_tpu_topology).compile()

It is part of jit's cache key, so a function traced for one platform is retraced for another.
"""


class Call(NamedTuple):
    """Checked arguments and the implementation chosen for them."""

    implementation: str
    spec: Spec
    bounds: Bounds
    q_offset: int | None  # if known when tracing

    def run(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """The attention of these or of other queries, keys and values that suit the arguments."""
        if self.implementation == "pallas":
            assert self.q_offset is not None  # pallas_tpu.unsupported saw to it
            return pallas_tpu.attention_pallas(q, k, v, self.spec, self.bounds, self.q_offset)
        if self.implementation == "cudnn":
            return cudnn_gpu.attention_cudnn(q, k, v, self.spec, self.bounds)
        return attention_xla(q, k, v, self.spec, self.bounds)


def resolve(
    q,
    k,
    v,
    *,
    causal,
    q_offset,
    kv_lengths,
    segment_ids,
    kv_segment_ids,
    sliding_window,
    logit_softcap,
    scale,
    implementation,
    sequence_parts=None,
) -> Call:
    """Arguments and errors as `pallas_kernels.attention`.

    `sequence_parts`: within shard_map, over how many devices the queries of one row are split.
    """
    _check(q, k, v, q_offset, kv_lengths, segment_ids, kv_segment_ids)
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(
            f"sliding_window={sliding_window}: must be at least 1 (the query itself) or None"
        )
    if logit_softcap is not None and not logit_softcap > 0:
        raise ValueError(f"logit_softcap={logit_softcap}: must be positive, or None for no cap")
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r}: must be None or one of {IMPLEMENTATIONS}"
        )
    static_offset = 0 if q_offset is None else None
    if isinstance(q_offset, int | np.integer):
        static_offset = int(q_offset)
    if static_offset == 0:
        q_offset = None
    if q_offset is not None:
        q_offset = jnp.broadcast_to(jnp.asarray(q_offset, jnp.int32), q.shape[:1])
    if kv_segment_ids is None:
        kv_segment_ids = segment_ids
    spec = Spec(
        causal=bool(causal),
        sliding_window=sliding_window,
        logit_softcap=logit_softcap,
        scale=q.shape[3] ** -0.5 if scale is None else scale,
    )
    bounds = Bounds(q_offset, kv_lengths, segment_ids, kv_segment_ids)

    platform = compiling_for.value or jax.default_backend()
    chosen = implementation or FOR_PLATFORM.get(platform, "xla")
    obstacle = None
    if chosen == "pallas":
        if platform != "tpu" and not pallas_tpu.INTERPRET:
            obstacle = f"it compiles for a TPU, this is for {platform}; see compiling_for"
        elif sequence_parts is None and _partitioned():
            obstacle = (
                "a mesh is set, and the partitioner cannot split a kernel: use sharded_attention"
            )
        else:
            obstacle = pallas_tpu.unsupported(
                q, k, spec, bounds, static_offset, sequence_parts or 1
            )
    elif chosen == "cudnn":
        if platform != "gpu":
            obstacle = f"it compiles for a GPU, this is for {platform}; see compiling_for"
        elif sequence_parts is not None and sequence_parts > 1:
            obstacle = "the sequence is split over devices; cuDNN's causal mask begins at 0"
        else:
            obstacle = cudnn_gpu.unsupported(q, k, v, spec, bounds)
    if obstacle is not None:
        if implementation is not None:
            raise NotImplementedError(
                f"implementation={implementation!r} cannot run: {obstacle}; or choose 'xla' or None"
            )
        chosen = "xla"
    return Call(chosen, spec, bounds, static_offset)


def _partitioned():
    """Whether the mesh that is set has axes left to the partitioner: outside of shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(
        size > 1 and kind != AxisType.Manual
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    )


def _check(q, k, v, q_offset, kv_lengths, segment_ids, kv_segment_ids):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(
                f"{name} has shape {x.shape}: must be [batch, time, heads, head_dim], 4 dimensions"
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {x.dtype}: must be floating; cast it")
        if math.prod(x.shape) == 0:
            raise ValueError(f"{name} has shape {x.shape}: every dimension must be at least 1")
    batch, num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[1:3]
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(
            f"k has shape {k.shape}: its batch and head_dim must be those of q, {q.shape}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v has shape {v.shape}: its batch, time and heads must be those of k, {k.shape}"
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"k has {num_kv_heads} heads: they must divide the {num_heads} heads of q evenly"
        )
    if q_offset is not None and jnp.shape(q_offset) not in ((), (batch,)):
        raise ValueError(
            f"q_offset has shape {jnp.shape(q_offset)}: must be a scalar or [batch] = ({batch},)"
        )
    expected = {
        "kv_lengths": (kv_lengths, (batch,)),
        "segment_ids": (segment_ids, (batch, num_queries)),
        "kv_segment_ids": (kv_segment_ids, (batch, num_keys)),
    }
    for name, (x, shape) in expected.items():
        if x is not None and jnp.shape(x) != shape:
            raise ValueError(f"{name} has shape {jnp.shape(x)}: must be {shape}")
    for name, x in (
        ("q_offset", q_offset),
        ("kv_lengths", kv_lengths),
        ("segment_ids", segment_ids),
        ("kv_segment_ids", kv_segment_ids),
    ):
        if x is not None and not jnp.issubdtype(jnp.result_type(x), jnp.integer):
            raise ValueError(f"{name} has dtype {jnp.result_type(x)}: must be an integer type")
    if kv_segment_ids is not None and segment_ids is None:
        raise ValueError("kv_segment_ids is given without segment_ids: give both")
    if segment_ids is not None and kv_segment_ids is None and num_keys != num_queries:
        raise ValueError(
            f"segment_ids is given for {num_queries} queries and {num_keys} keys: "
            "give kv_segment_ids too"
        )
