"""sLSTM against golden values, over packed, padded and cut rows, and its errors."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mlstm_inputs import error

from pallas_kernels.slstm import slstm, slstm_reference

GOLDEN = Path(__file__).parent.parent / "golden" / "xlstm"
run = jax.jit(slstm, static_argnames="return_state")


def golden_case(case):
    """`(x_gates, recurrent, bias)`, the state before, and the rest."""
    arrays = np.load(GOLDEN / "slstm.npz")
    golden = {k.removeprefix(f"{case}."): arrays[k] for k in arrays if k.startswith(f"{case}.")}
    x = jnp.asarray(golden["wx"]).swapaxes(0, 1)
    batch, _, _, heads, dim = x.shape
    state = tuple(jnp.asarray(s).reshape(batch, heads, dim) for s in golden["state0"])
    return (x, jnp.asarray(golden["r"]), jnp.asarray(golden["b"])), state, golden


@pytest.mark.parametrize(
    ("case", "tolerance"), [("zero_state", 1e-5), ("carry", 1e-5), ("hot", 1e-4)]
)
def test_outputs_states_and_gradients_are_golden(case, tolerance):
    arguments, state, golden = golden_case(case)

    @jax.jit
    def all_of_it(arguments, cotangent):
        (h, last), vjp = jax.vjp(lambda *a: slstm(*a, state, return_state=True), *arguments)
        return h, last, vjp((cotangent, jax.tree.map(jnp.zeros_like, last)))

    d_h = jnp.asarray(golden["dh"]).reshape(*golden["dh"].shape[:2], *state[0].shape[1:])
    h, last, gradients = all_of_it(arguments, d_h.swapaxes(0, 1))
    assert error(h.swapaxes(0, 1).reshape(golden["h"].shape), golden["h"]) < tolerance
    assert error(jnp.stack(last).reshape(golden["state_last"].shape), golden["state_last"]) < 1e-5
    d_x, d_recurrent, d_bias = gradients
    assert error(d_x.swapaxes(0, 1), golden["dwx"]) < 1e-4
    assert error(d_recurrent, golden["dr"]) < 1e-4
    assert error(d_bias, golden["db"]) < 1e-4


def test_the_reference_is_golden():
    arguments, state, golden = golden_case("carry")
    h, last = slstm_reference(*arguments, initial_state=state)
    assert error(h.swapaxes(0, 1).reshape(golden["h"].shape), golden["h"]) < 1e-5
    assert error(jnp.stack(last).reshape(golden["state_last"].shape), golden["state_last"]) < 1e-5


def test_packed_and_padded_rows_are_their_documents_alone():
    arguments, state, _ = golden_case("carry")
    arguments, state = (arguments[0][:2], *arguments[1:]), tuple(x[:2] for x in state)
    ids = jnp.array([[1] * 3 + [2] * 6, [5] * 9])
    mask = jnp.array([[1] * 7 + [0] * 2, [0] * 2 + [1] * 3 + [0] + [1] * 3], bool)
    given = dict(segment_ids=ids, previous_segment=jnp.array([1, 4]), mask=mask)
    h, last = run(*arguments, state, **given, return_state=True)
    expected, expected_last = slstm_reference(*arguments, initial_state=state, **given)
    assert error(h, expected) < 1e-6
    assert error(jnp.stack(last), jnp.stack(expected_last)) < 1e-6
    x = arguments[0]
    alone, alone_last = run(x[1:, np.array([2, 3, 4, 6, 7, 8])], *arguments[1:], return_state=True)
    assert error(h[1][mask[1]], alone[0]) < 1e-6
    assert error(jnp.stack(last)[:, 1:], jnp.stack(alone_last)) < 1e-6

    def gradients(x, **options):
        return jax.grad(lambda x: jnp.sum(slstm(x, *arguments[1:], state, **options) ** 2))(x)

    # Padding holds anything and gets no gradient; none crosses a document's beginning.
    broken = jnp.where(mask[:, :, None, None, None], x, jnp.nan)
    of_broken = gradients(broken, **given)
    np.testing.assert_array_equal(of_broken[~mask], 0)
    np.testing.assert_array_equal(of_broken, gradients(x, **given))
    later = jax.grad(
        lambda x: jnp.sum(slstm(x, *arguments[1:], state, **given)[0, 3:])  # of the second document
    )(x)
    np.testing.assert_array_equal(later[0, :3], 0)


def test_rows_are_cut_anywhere():
    arguments, state, _ = golden_case("hot")
    x, *parameters = arguments
    whole, last = run(x, *parameters, state, return_state=True)
    h, state = run(x[:, :7], *parameters, state, return_state=True)
    rest, state = run(x[:, 7:], *parameters, state, return_state=True)
    assert error(jnp.concatenate([h, rest], axis=1), whole) < 1e-6
    assert error(jnp.stack(state), jnp.stack(last)) < 1e-6


def test_a_fresh_row_beside_a_running_one():
    """Its first gates may be as small as they like: each number decides for itself."""
    arguments, state, _ = golden_case("carry")
    x = arguments[0].at[0, 0].set(-150.0)
    state = tuple(s.at[0].set(0.0) for s in state)
    h = run(x, *arguments[1:], state)
    assert np.isfinite(h).all()
    assert error(h, slstm_reference(x, *arguments[1:], initial_state=state)[0]) < 1e-6


def test_bfloat16_is_float32_of_rounded_inputs():
    arguments, state, _ = golden_case("carry")
    x, *parameters = (a.astype(jnp.bfloat16) for a in arguments)
    h, last = run(x, *parameters, state, return_state=True)
    wide, _ = run(*(a.astype(jnp.float32) for a in (x, *parameters)), state, return_state=True)
    assert h.dtype == jnp.bfloat16
    assert last[0].dtype == jnp.float32
    # The sum of input and bias is float32, so only the result is rounded.
    assert error(h, wide) < 4e-3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x_gates": jnp.ones((2, 5, 3, 2, 4))}, r"x_gates has shape .*\[batch, time, 4, heads"),
        ({"x_gates": jnp.ones((2, 0, 4, 2, 4))}, "every dimension must be at least 1"),
        ({"x_gates": jnp.ones((2, 5, 4, 2, 4), int)}, "x_gates has dtype int"),
        ({"recurrent": jnp.ones((2, 4, 16))}, r"recurrent has shape .*\(2, 4, 4, 4\)"),
        ({"bias": jnp.ones((4, 2, 4))}, r"bias has shape \(4, 2, 4\).*\(2, 4, 4\)"),
        ({"initial_state": (jnp.ones((2, 2, 4)),) * 3}, "all four of"),
        ({"initial_state": (jnp.ones((2, 8)),) * 4}, "h of initial_state has shape"),
        ({"initial_state": (jnp.ones((2, 2, 4), jnp.float16),) * 4}, "must be float32"),
        ({"segment_ids": jnp.ones((2, 4), int)}, r"segment_ids has shape \(2, 4\)"),
        ({"mask": jnp.ones((2, 5))}, "mask has dtype float32: must be bool"),
        ({"implementation": "cuda"}, "implementation='cuda'"),
    ],
)
def test_wrong_arguments_are_named(changed, message):
    right = dict(
        x_gates=jnp.ones((2, 5, 4, 2, 4)),
        recurrent=jnp.ones((2, 4, 4, 4)),
        bias=jnp.ones((2, 4, 4)),
    )
    # Past the shape checker, which tests alone run.
    unchecked = getattr(slstm, "__wrapped__", slstm)
    with pytest.raises(ValueError, match=message):
        unchecked(**{**right, **changed})
