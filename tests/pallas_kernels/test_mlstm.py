"""mLSTM against golden values, against its definition in float64, and over its edges."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mlstm_inputs import error, memory, reference, row, rows, xla

from pallas_kernels.mlstm import mlstm, mlstm_step

GOLDEN = Path(__file__).parent.parent / "golden" / "xlstm"
CASES = ["basic", "ragged_init", "extreme", "init7b", "short", "one", "reset"]
IMPLEMENTATIONS = {
    "reference": reference,
    # Several chunks, the last not always full.
    "xla": functools.partial(xla, return_state=True, chunk_size=16),
}
TOLERANCES = dict(h=2e-5, c=2e-5, n=2e-5, m=2e-5, q=1e-4, k=1e-4, v=1e-4, i=3e-4, f=3e-4)


def golden_case(file, case):
    arrays = np.load(GOLDEN / f"{file}.npz")
    return {k.removeprefix(f"{case}."): arrays[k] for k in arrays if k.startswith(f"{case}.")}


def ours(x):
    """Heads behind time."""
    return jnp.asarray(x).swapaxes(1, 2)


def golden_state(golden, suffix):
    if f"c{suffix}" in golden:
        return golden[f"c{suffix}"], golden[f"n{suffix}"], golden[f"m{suffix}"][..., 0]
    batch, heads, _, dqk = golden["q"].shape
    shape = (batch, heads, dqk, golden["v"].shape[-1])
    return tuple(np.zeros(shape[:length], np.float32) for length in (4, 3, 2))


@pytest.mark.parametrize("case", CASES)
def test_outputs_states_and_gradients_are_golden(case):
    golden = golden_case("mlstm_op", case)
    arguments = [ours(golden[x]) for x in "qkvif"]
    state = golden_state(golden, "0")
    for name, call in IMPLEMENTATIONS.items():

        @jax.jit
        def run(arguments, state, d_h, d_last, call=call):
            out, vjp = jax.vjp(lambda a, state: call(*a, initial_state=state), arguments, state)
            return *out, *vjp((d_h, d_last))

        zeros = (0 * golden["c_last"], 0 * golden["n_last"], 0 * state[2])
        h, last, *d = run(arguments, state, ours(golden["dh"]), zeros)
        assert error(ours(h), golden["h"]) < TOLERANCES["h"], name
        for x, expected, key in zip(last, golden_state(golden, "_last"), "cnm", strict=True):
            assert error(x, expected) < TOLERANCES[key], (name, key)
        d_last = (golden["dc_last"], golden["dn_last"], zeros[2])
        ds = run(arguments, state, ours(golden["dh"]), d_last)[2:]
        for prefix, (d_arguments, d_state) in (("d", d), ("ds_", ds)):
            for key, gradient in zip("qkvif", d_arguments, strict=True):
                wrong = error(ours(gradient), golden[prefix + key])
                assert wrong < TOLERANCES[key], (name, prefix + key)
            if "c0" in golden:
                assert error(d_state[0], golden[f"{prefix}c0"]) < 1e-4, name
                assert error(d_state[1], golden[f"{prefix}n0"]) < 1e-4, name
            np.testing.assert_array_equal(d_state[2], 0)


def test_golden_in_float64():
    golden = golden_case("mlstm_op", "ragged_init")
    with jax.enable_x64(True):
        arguments = [ours(golden[x].astype(np.float64)) for x in "qkvif"]
        state = tuple(x.astype(np.float64) for x in golden_state(golden, "0"))
        run = IMPLEMENTATIONS["xla"]
        (h, last), vjp = jax.vjp(lambda a: run(*a, initial_state=state), arguments)
        assert h.dtype == last[0].dtype == jnp.float64
        assert error(ours(h), golden["h"]) < 1e-6
        for x, expected in zip(last, golden_state(golden, "_last"), strict=True):
            assert error(x, expected) < 1e-6
        (gradients,) = vjp(
            (ours(golden["dh"].astype(np.float64)), jax.tree.map(jnp.zeros_like, last))
        )
        for key, gradient in zip("qkvif", gradients, strict=True):
            # eps is added in units of exp(m), whose gradient is left out.
            assert error(ours(gradient), golden[f"d{key}"]) < (3e-5 if key in "if" else 1e-6)


def test_steps_are_golden():
    golden = dict(np.load(GOLDEN / "mlstm_step.npz"))
    state = (golden["c0"], golden["n0"], golden["m0"][..., 0])
    step = jax.jit(mlstm_step)
    for t in range(len(golden["q"])):
        h, state = step(*(golden[x][t] for x in "qkvif"), state)
        assert error(h, golden["h"][t]) < 1e-5
        for x, key in zip(state, "cnm", strict=True):
            assert error(x, golden[key][t].reshape(x.shape)) < 1e-5


@pytest.mark.parametrize(("case", "normalize"), [("a", True), ("b", False)])
def test_sigmoid_input_gate_is_golden(case, normalize):
    golden = golden_case("mlstm_sig", case)
    arguments = [ours(golden[x]) for x in "qkvif"]
    prefix = "norm." if normalize else "nonorm."
    options = dict(input_gate="sigmoid", normalize=normalize)
    for name, call in IMPLEMENTATIONS.items():
        (h, last), vjp = jax.vjp(lambda *a, call=call: call(*a, **options), *arguments)
        assert error(ours(h), golden[f"{prefix}h"]) < 2e-5, name
        assert error(last[0], golden["c_last"]) < 2e-5
        assert error(last[1], golden["n_last"]) < 2e-5
        np.testing.assert_array_equal(last[2], 0)
        gradients = vjp((ours(golden["dh"]), jax.tree.map(jnp.zeros_like, last)))
        for key, gradient in zip("qkvif", gradients, strict=True):
            assert error(ours(gradient), golden[f"{prefix}d{key}"]) < 1e-4, (name, key)


SEGMENTS = jnp.array([[3] * 11 + [0] * 2 + [3] * 16, [1] * 5 + [2] + [4] * 23])
MASK = jnp.array([[0] * 2 + [1] * 20 + [0] * 3 + [1] * 4, [1] * 26 + [0] * 3], bool)


@pytest.mark.parametrize("options", [{}, {"input_gate": "sigmoid"}])
def test_gradients_are_those_of_the_definition_in_float64(options):
    """With documents, padding, a state before and gradients of the state after."""
    arguments, state = row(3, 29), memory(3)
    given = dict(segment_ids=SEGMENTS, mask=MASK, previous_segment=jnp.array([3, 7]), **options)
    if options:
        state = (*state[:2], jnp.zeros_like(state[2]))
    d_h = np.random.default_rng(4).normal(size=arguments[2].shape)
    d_state = memory(5)

    def gradients(call, dtype, **more):
        def run(arguments, c, n):
            return call(*arguments, initial_state=(c, n, state[2].astype(dtype)), **given, **more)

        @jax.jit
        def all_of_it(arguments, cotangents):
            out, vjp = jax.vjp(run, *arguments)
            return out, vjp(cotangents)

        d_last = (*d_state[:2], jnp.zeros_like(d_state[2]))
        return all_of_it(
            *jax.tree.map(lambda x: jnp.asarray(x, dtype), ((arguments, *state[:2]), (d_h, d_last)))
        )

    with jax.enable_x64(True):
        expected = gradients(reference, jnp.float64)
    actual = gradients(functools.partial(xla, return_state=True), jnp.float32, chunk_size=8)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert error(x, y) < 1e-5


def test_long_rows_stay_exact():
    """Over 20 chunks, gates such as training meets and extreme ones."""
    for gates, tolerance in ((3.0, 2e-5), (15.0, 5e-4)):
        arguments = row(5, 1300, batch=1, gates=gates)

        def loss(arguments, call, chunk=None):
            h = call(*arguments) if chunk is None else call(*arguments, chunk_size=chunk)
            h = h[0] if isinstance(h, tuple) else h
            return jnp.sum(jnp.tanh(h)), h

        with jax.enable_x64(True):
            wide = tuple(x.astype(jnp.float64) for x in arguments)
            expected, d_expected = jax.grad(loss, has_aux=True)(wide, reference)[::-1]
        h, gradients = jax.grad(loss, has_aux=True)(arguments, xla, 64)[::-1]
        assert error(h, expected) < tolerance
        for x, y in zip(gradients, d_expected, strict=True):
            assert error(x, y) < tolerance


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_extreme_gates_stay_finite(dtype):
    rng = np.random.default_rng(6)
    q, k, v, _, _ = row(6, 100, dtype=dtype)
    i, f = jnp.asarray(rng.choice([-15.0, 15.0], size=(2, 2, 100, 2)), dtype)
    i, f = i.at[0].set(-15), f.at[0, :50].set(-15).at[0, 50:].set(15)
    h, vjp = jax.vjp(functools.partial(xla, chunk_size=32), q, k, v, i, f)
    for x in (h, *vjp(jnp.ones_like(h))):
        assert np.isfinite(np.asarray(x, np.float32)).all()
    wide = [x.astype(jnp.float32) for x in (q, k, v, i, f)]
    # bfloat16 has 8 bits; q·n may cancel.
    assert error(h, reference(*wide)[0]) < (5e-4 if dtype == jnp.float32 else 1e-2)


def test_bfloat16_is_float32_of_rounded_inputs():
    arguments, state = row(7, 100, dtype=jnp.bfloat16), memory(7)
    wide = [x.astype(jnp.float32) for x in arguments]

    def run(*arguments):
        return xla(*arguments, initial_state=state, chunk_size=32, return_state=True)

    (h, last), vjp = jax.vjp(run, *arguments)
    (expected, expected_last), wide_vjp = jax.vjp(run, *wide)
    assert h.dtype == jnp.bfloat16
    assert last[0].dtype == last[1].dtype == last[2].dtype == jnp.float32
    assert error(h, expected) < 4e-3  # rounding of the result
    for x, y in zip(last, expected_last, strict=True):
        assert error(x, y) < 1e-6
    for x, y in zip(
        vjp((jnp.ones_like(h), last)), wide_vjp((jnp.ones_like(expected), last)), strict=True
    ):
        assert x.dtype == jnp.bfloat16
        assert error(x, y) < 4e-3


def test_bfloat16_states_cost_their_rounding():
    c, n, m = memory(8)
    narrow = (c.astype(jnp.bfloat16), n.astype(jnp.bfloat16), m)
    arguments = row(8, 1)
    h, last = mlstm_step(*rows(arguments, slice(None), 0), narrow)
    assert [x.dtype for x in last] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    wide = tuple(x.astype(jnp.float32) for x in narrow)
    expected, expected_last = mlstm_step(*rows(arguments, slice(None), 0), wide)
    np.testing.assert_array_equal(h, expected)
    assert error(last[0], expected_last[0]) < 4e-3


def test_under_transformations():
    arguments = row(9, 16, batch=4)
    h = xla(*arguments, chunk_size=8)
    mapped = jax.vmap(lambda *a: mlstm(*(x[None] for x in a), chunk_size=8)[0])

    def gradients(call):
        def loss(arguments):
            h = call(*arguments)
            return jnp.sum(h**2), h

        return jax.jit(jax.grad(loss, has_aux=True))(arguments)

    whole, _ = gradients(functools.partial(xla, chunk_size=8))
    per_row, mapped_h = gradients(jax.checkpoint(mapped))
    assert error(mapped_h, h) < 1e-6
    for x, y in zip(per_row, whole, strict=True):
        assert error(x, y) < 1e-6
    before = xla._cache_size()
    xla(*row(10, 16, batch=4), chunk_size=8)
    assert xla._cache_size() == before


def test_memory_is_linear_in_time():
    def temporary(time):
        def loss(*arguments):
            return jnp.sum(mlstm(*arguments, chunk_size=64) ** 2)

        shapes = jax.eval_shape(lambda: row(0, time, batch=1))
        compiled = jax.jit(jax.grad(loss, tuple(range(5)))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporary(2048), temporary(8192)
    assert long < 4.2 * short
    # All [T, T] weights would be 512 MiB.
    assert long < 16 * 2**20
