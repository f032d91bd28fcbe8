"""What mLSTM refuses, and what it says then."""

import jax.numpy as jnp
import pytest
from mlstm_inputs import memory, row, rows

from pallas_kernels.mlstm import mlstm, mlstm_step, mlstm_summary

TIME = 5
# Past the shape checker, which tests alone run.
UNCHECKED = [getattr(f, "__wrapped__", f) for f in (mlstm, mlstm_step, mlstm_summary)]


def arguments():
    return dict(zip("qkvif", row(0, TIME), strict=True))


C, N, M = memory(0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": jnp.ones((2, 5, 16))}, r"q has shape \(2, 5, 16\): must be \[batch, time, heads"),
        ({"q": jnp.ones((2, 5, 2, 8), int)}, "q has dtype int32: must be floating"),
        ({"k": jnp.ones((2, 5, 2, 4))}, r"k has shape .*must be that of q, \(2, 5, 2, 8\)"),
        ({"q": jnp.ones((2, 5, 4, 8))}, "k has 2 heads and q 4: must be equal.*repeat k and v"),
        ({"v": jnp.ones((2, 5, 1, 16))}, r"v has shape \(2, 5, 1, 16\)"),
        ({"i": jnp.ones((2, 2, 5))}, r"i has shape \(2, 2, 5\): must be \(2, 5, 2\)"),
        ({"f": jnp.ones((2, 5, 2), int)}, "f has dtype int32"),
        ({"initial_state": (C, N)}, r"all three of \(c, n, m\)"),
        ({"initial_state": (C, None, M)}, r"all three of \(c, n, m\)"),
        ({"initial_state": (C, N, M[..., None])}, r"m of initial_state has shape \(2, 2, 1\)"),
        ({"initial_state": (C.swapaxes(2, 3), N, M)}, "c of initial_state has shape"),
        ({"initial_state": (C, N, M.astype(jnp.float16))}, "m of initial_state has dtype float16"),
        ({"initial_state": (C, N, M.astype(jnp.bfloat16))}, "m of initial_state has dtype bfloat"),
        ({"initial_state": (C.astype(jnp.float16), N, M)}, "c of initial_state has dtype float16"),
        ({"chunk_size": 0}, "chunk_size=0: must be a positive int"),
        ({"chunk_size": -64}, "chunk_size=-64"),
        ({"chunk_size": 2.5}, "chunk_size=2.5"),
        ({"segment_ids": jnp.ones((2, 4), int)}, r"segment_ids has shape \(2, 4\)"),
        ({"segment_ids": jnp.ones((2, 5))}, "segment_ids has dtype float32"),
        ({"previous_segment": jnp.ones(2, int)}, "without segment_ids"),
        ({"mask": jnp.ones((2, 5), int)}, "mask has dtype int32: must be bool.*mask != 0"),
        ({"mask": jnp.ones((5,), bool)}, r"mask has shape \(5,\)"),
        ({"input_gate": "tanh"}, "input_gate='tanh'"),
        ({"normalize": False}, "normalize=False.*input_gate='sigmoid'"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"implementation": "cuda"}, "implementation='cuda': must be None or one of"),
    ],
)
def test_wrong_arguments_are_named(changed, message):
    with pytest.raises(ValueError, match=message):
        UNCHECKED[0](**{**arguments(), **changed})


def test_an_empty_sequence_is_refused():
    empty = {k: x[:, :0] for k, x in arguments().items()}
    with pytest.raises(ValueError, match="an empty sequence has no output"):
        UNCHECKED[0](**empty)


@pytest.mark.parametrize("implementation", ["pallas", "triton"])
def test_kernels_that_do_not_exist(implementation):
    with pytest.raises(NotImplementedError, match="no such kernel; choose 'xla' or None"):
        mlstm(**arguments(), implementation=implementation)


def test_steps_and_summaries_check_too():
    token = rows(row(0, TIME), slice(None), 0)
    with pytest.raises(ValueError, match=r"all three of \(c, n, m\)"):
        UNCHECKED[1](*token, (C, N))
    with pytest.raises(ValueError, match=r"q has shape .*must be \[batch, heads, dim\]"):
        UNCHECKED[1](*row(0, TIME), (C, N, M))
    _, k, v, i, f = row(0, TIME)
    with pytest.raises(ValueError, match="mask has dtype int32"):
        UNCHECKED[2](k, v, i, f, mask=jnp.ones((2, TIME), int))
