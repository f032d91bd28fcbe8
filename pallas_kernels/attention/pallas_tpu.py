"""Attention on a TPU: jax's splash attention, a Pallas kernel that skips masked blocks.

https://github.com/jax-ml/jax/tree/main/jax/experimental/pallas/ops/tpu/splash_attention
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.xla import Bounds, Spec

try:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash
except ImportError:  # an experimental module: a later jax may move it
    splash = None

# Ids no caller's segment has. A padded query sees nothing; its output is cut off.
PADDED_QUERY = -(2**31)
PADDED_KEY = -(2**31) + 1

# The largest that divides the padded length. 128 is the number of lanes: the kernel's minimum.
BLOCK_SIZES = (512, 256, 128)
INTERPRET = False  # run the kernel's steps as XLA operations, on any platform: for tests


def unsupported(
    q: jax.Array,
    k: jax.Array,
    spec: Spec,
    bounds: Bounds,
    q_offset: int | None,
    sequence_parts: int,
) -> str | None:
    """Why splash attention cannot take these arguments, or None if it can.

    `q_offset` is the offset if it is known when tracing, None if it is an array; the queries are
    split over `sequence_parts` devices.
    """
    if splash is None:
        return f"jax {jax.__version__} has no splash attention"
    if q_offset is None:
        return "q_offset is an array, and the kernel's mask is fixed when tracing: give an int"
    if bounds.kv_lengths is not None:
        return "kv_lengths is given, and the kernel's mask is fixed when tracing"
    if bounds.segment_ids is not None and (
        bounds.kv_segment_ids is not bounds.segment_ids or q_offset != 0
    ):
        return (
            "kv_segment_ids other than segment_ids, or a q_offset with segments, may leave a query "
            "with nothing to see, which the kernel does not make zero"
        )
    if sequence_parts > 1 and q.shape[1] // sequence_parts % BLOCK_SIZES[-1]:
        return (
            f"each of the {sequence_parts} parts of {q.shape[1]} queries must be a multiple of "
            f"{BLOCK_SIZES[-1]}"
        )
    # The kernel averages the values for a query that sees nothing, so every one must see something.
    num_queries, num_keys = q.shape[1], k.shape[1]
    last_position = q_offset + num_queries - 1
    if spec.causal and q_offset < 0:
        return f"q_offset={q_offset} leaves queries with nothing to see; the kernel needs it >= 0"
    if spec.sliding_window is not None and last_position - spec.sliding_window + 1 >= num_keys:
        return (
            f"the query at position {last_position} with sliding_window={spec.sliding_window} sees "
            f"none of the {num_keys} keys, which the kernel does not make zero"
        )
    return None


def attention_pallas(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S Hk D"],
    v: Float[Array, "B S Hk Dv"],
    spec: Spec,
    bounds: Bounds,
    q_offset: int,
) -> Float[Array, "B T H Dv"]:
    """`[B,T,H,D]` on `[B,S,Hk,D]`; arguments that `unsupported` has passed only."""
    kernel = make_kernel(q.shape[1], k.shape[1], q.shape[2], spec, q_offset)
    return run_kernel(kernel, q, k, v, spec, bounds.segment_ids)


def make_kernel(
    num_queries: int,
    num_keys: int,
    num_heads: int,
    spec: Spec,
    q_offset: int,
    *,
    shards: int = 1,
) -> Any:
    """The splash kernel for this mask, with lengths padded to its blocks.

    With `shards`, the queries are to be split over that many devices, in parts of whole
    blocks, and the kernel goes into shard_map as an argument, by `kernel_sharding`.
    """
    query_block, num_queries = _block(num_queries // shards)
    num_queries *= shards
    key_block, num_keys = _block(num_keys)
    shape = (num_queries, num_keys)
    if spec.causal and spec.sliding_window is None:
        mask = splash.CausalMask(shape, offset=q_offset)
    elif spec.sliding_window is not None:
        right = 0 if spec.causal else None
        mask = splash.LocalMask(shape, (spec.sliding_window - 1, right), offset=q_offset)
    else:
        mask = splash.FullMask(shape)
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * num_heads),
        block_sizes=splash.BlockSizes(
            block_q=query_block,
            block_kv=key_block,
            block_kv_compute=key_block,
            block_q_dkv=query_block,
            block_kv_dkv=key_block,
            block_kv_dkv_compute=key_block,
            block_q_dq=query_block,
            block_kv_dq=key_block,
        ),
        attn_logits_soft_cap=spec.logit_softcap,
        head_shards=1,
        q_seq_shards=shards,
        interpret=INTERPRET,
    )


def kernel_sharding(kernel: Any, mesh: Mesh | AbstractMesh, sequence_axis: str | None) -> Any:
    """The shard_map spec of a kernel made for queries split over `sequence_axis`."""
    return kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, sequence_axis)))


def run_kernel(
    kernel: Any,
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S Hk D"],
    v: Float[Array, "B S Hk Dv"],
    spec: Spec,
    segment_ids: Int[Array, "B T"] | None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
) -> Float[Array, "B T H Dv"]:
    """Apply a kernel of `make_kernel`; `kv_segment_ids` None for `segment_ids`."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    _, padded_queries = _block(num_queries)
    _, padded_keys = _block(num_keys)

    def heads_first(x, length):
        x = jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0)))
        return x.transpose(0, 2, 1, 3)

    if segment_ids is None and padded_keys != num_keys:
        # Later keys may be visible: of other segments, the padding is not.
        segment_ids = jnp.zeros((q.shape[0], num_queries), jnp.int32)
        kv_segment_ids = jnp.zeros((q.shape[0], num_keys), jnp.int32)
    segments = None
    if segment_ids is not None:
        kv_segment_ids = segment_ids if kv_segment_ids is None else kv_segment_ids
        segments = splash.SegmentIds(
            _pad_segments(segment_ids, padded_queries, PADDED_QUERY),
            _pad_segments(kv_segment_ids, padded_keys, PADDED_KEY),
        )
    q = q * jnp.asarray(spec.scale, q.dtype)
    out = jax.vmap(kernel)(
        heads_first(q, padded_queries),
        heads_first(k, padded_keys),
        heads_first(v, padded_keys),
        segments,
    )
    return out.transpose(0, 2, 1, 3)[:, :num_queries]


def _pad_segments(ids, length, value):
    return jnp.pad(
        ids.astype(jnp.int32), ((0, 0), (0, length - ids.shape[1])), constant_values=value
    )


def _block(length: int) -> tuple[int, int]:
    """The block size for a length, and the length padded to a multiple of it."""
    padded = -(-length // BLOCK_SIZES[-1]) * BLOCK_SIZES[-1]
    return next(size for size in BLOCK_SIZES if padded % size == 0), padded
