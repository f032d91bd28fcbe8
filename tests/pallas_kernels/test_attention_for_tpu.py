"""Splash attention compiles for real TPUs, forward and backward: what interpreting cannot show."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels import attention, compiling_for, sharded_attention

pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu")
KERNELS = 3  # forward, gradient of q, gradient of k and v


def tpu_mesh(topology, **sizes):
    from jax.experimental import topologies

    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
    devices = topologies.get_topology_desc(topology, "tpu").devices
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices, axis_types=kinds)


def compile_gradient(function, mesh, split, time, head_dim, segments=False, heads=(8, 4)):
    """The compiled gradient of `function(q, k, v, segment_ids)`, bfloat16, batch 2."""
    sharding = NamedSharding(mesh, split)
    q, k, v = (
        jax.ShapeDtypeStruct((2, time, h, head_dim), jnp.bfloat16, sharding=sharding)
        for h in (heads[0], heads[1], heads[1])
    )
    rows = NamedSharding(mesh, PartitionSpec(*split[:2]))
    ids = jax.ShapeDtypeStruct((2, time), jnp.int32, sharding=rows) if segments else None

    def loss(q, k, v, ids):
        return function(q, k, v, segment_ids=ids).astype(jnp.float32).sum()

    with compiling_for("tpu"), jax.set_mesh(mesh):
        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, v, ids).compile()


@pytest.mark.parametrize(
    ("topology", "time", "head_dim", "segments", "arguments"),
    [
        ("v5e:2x2", 32768, 64, False, {}),
        ("v5e:2x2", 4096, 128, True, {"sliding_window": 1024, "logit_softcap": 50.0}),
        ("v5p:2x2x1", 32768, 128, True, {}),
        ("v6e:2x2", 32768, 64, True, {}),
        pytest.param("v6e:2x2", 1000, 128, False, {"causal": False}, marks=pytest.mark.slow),
    ],
)
def test_heads_and_batch_split(topology, time, head_dim, segments, arguments):
    mesh = tpu_mesh(topology, batch=2, heads=2)

    def function(q, k, v, segment_ids):
        return sharded_attention(
            q,
            k,
            v,
            batch_axes="batch",
            head_axis="heads",
            segment_ids=segment_ids,
            **arguments,
        )

    split = PartitionSpec("batch", None, "heads")
    compiled = compile_gradient(function, mesh, split, time, head_dim, segments)
    assert compiled.as_text().count("tpu_custom_call") == KERNELS
    logits = 4 * time * time  # bytes of one head's [T, T]
    assert compiled.memory_analysis().temp_size_in_bytes < max(2**22, logits / 16)


@pytest.mark.parametrize("topology", ["v5e:2x2", pytest.param("v6e:2x2", marks=pytest.mark.slow)])
def test_sequence_split(topology):
    mesh = tpu_mesh(topology, batch=2, sequence=2)

    def function(q, k, v, segment_ids):
        return sharded_attention(
            q, k, v, batch_axes="batch", sequence_axis="sequence", segment_ids=segment_ids
        )

    split = PartitionSpec("batch", "sequence")
    compiled = compile_gradient(function, mesh, split, 8192, 128, segments=True)
    assert compiled.as_text().count("tpu_custom_call") == KERNELS


def test_without_shard_map_xla_is_partitioned():
    """A model that calls `attention` itself under a mesh still compiles, without kernels."""
    mesh = tpu_mesh("v5e:2x2", batch=2, heads=2)
    split = PartitionSpec("batch", None, "heads")
    compiled = compile_gradient(attention, mesh, split, 1024, 128)
    assert compiled.as_text().count("tpu_custom_call") == 0
