"""Attention over a mesh of four virtual devices equals attention on one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_inputs import arrays, output_and_gradients, packed_ids
from jax.sharding import AxisType

from pallas_kernels import attention, sharded_attention
from pallas_kernels.attention import pallas_tpu

T = 256


def mesh(**sizes):
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


CASES = {
    "causal": {},
    "packed": dict(segment_ids=packed_ids(T)),
    "window": dict(sliding_window=20),
    "not causal": dict(causal=False),
    "offset a row": dict(q_offset=jnp.array([-3, 5])),
    "lengths": dict(kv_lengths=jnp.array([0, 200])),
}


def check(sharded, inputs, arguments):
    got = output_and_gradients(functools.partial(sharded, **arguments), *inputs)
    arguments = arguments | {"implementation": "xla"}
    expected = output_and_gradients(functools.partial(attention, **arguments), *inputs)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("sizes", "case"),
    [
        ({"batch": 2, "heads": 2}, "packed"),
        ({"heads": 2, "sequence": 2}, "packed"),
        ({"heads": 2, "sequence": 2}, "not causal"),
        ({"batch": 2, "sequence": 2}, "offset a row"),
        ({"sequence": 4}, "causal"),
        ({"sequence": 4}, "window"),
    ],
)
def test_equals_unsharded(sizes, case):
    sharded = functools.partial(
        sharded_attention,
        mesh=mesh(**sizes),
        batch_axes="batch" if "batch" in sizes else None,
        head_axis="heads" if "heads" in sizes else None,
        sequence_axis="sequence" if "sequence" in sizes else None,
    )
    check(sharded, arrays(2, T, T, 4, 2), CASES[case])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (12, 3)])
def test_fewer_key_heads_than_devices(heads, kv_heads):
    sharded = functools.partial(sharded_attention, mesh=mesh(heads=4), head_axis="heads")
    check(sharded, arrays(2, 40, 40, heads, kv_heads), {})


@pytest.mark.parametrize("case", ["packed", "window"])
def test_splash_attention_with_a_split_sequence(case, monkeypatch):
    """Each device runs the kernel with its own part of the mask (interpreted)."""
    monkeypatch.setattr(pallas_tpu, "INTERPRET", True)
    sharded = functools.partial(
        sharded_attention,
        mesh=mesh(heads=2, sequence=2),
        head_axis="heads",
        sequence_axis="sequence",
    )
    inputs = arrays(2, T, T, 4, 2, 64)
    check(functools.partial(sharded, implementation="pallas"), inputs, CASES[case])
    with pytest.raises(NotImplementedError, match="multiple of 128"):
        sharded(*arrays(2, 100, 100, 4, 2), implementation="pallas")


def test_the_mesh_that_is_set_is_the_default():
    inputs = arrays(2, 40, 40, 4, 2)
    with jax.set_mesh(mesh(batch=2, heads=2)):
        out = jax.jit(
            functools.partial(sharded_attention, batch_axes=("batch",), head_axis="heads")
        )(*inputs)
    assert out.sharding.spec[:3:2] == ("batch", "heads")
    np.testing.assert_allclose(out, attention(*inputs), atol=1e-5)


def test_no_kernel_is_left_to_the_partitioner(monkeypatch):
    monkeypatch.setattr(pallas_tpu, "INTERPRET", True)
    with (
        jax.set_mesh(mesh(batch=4)),
        pytest.raises(NotImplementedError, match="use sharded_attention"),
    ):
        attention(*arrays(4, 8, 8), implementation="pallas")


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (dict(batch_axes="rows"), "batch_axes 'rows' is not an axis of the mesh"),
        (dict(batch_axes="batch"), r"splits q's batch, 3, into 4 parts"),
        (dict(head_axis="batch"), r"splits q's heads, 6, into 4 parts"),
        (dict(sequence_axis="batch"), r"splits q's time, 50, into 4 parts"),
    ],
)
def test_axes_that_do_not_fit(axes, message):
    with pytest.raises(ValueError, match=message):
        sharded_attention(*arrays(batch=3), mesh=mesh(batch=4), **axes)
