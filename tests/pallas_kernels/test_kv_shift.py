"""KV shifting against golden values, alone and inside attention, and over its edges."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import attention
from pallas_kernels.cca import cca_attention
from pallas_kernels.kv_shift import kv_shift, kv_shift_reference

GOLDEN = Path(__file__).parent.parent / "golden" / "kv_shifting"
PLAIN = ["mha_rope", "gqa_rope_theta1e5", "mqa_norope", "t1", "negative_coefficients", "window3"]
PLAIN += ["window4_free", "d128"]
IMPLEMENTATIONS = {
    "reference": jax.jit(kv_shift_reference),
    "xla": jax.jit(kv_shift, static_argnames="return_tail"),
}


def golden_file(name):
    return dict(np.load(GOLDEN / f"{name}.npz"))


def rotated(x, positions, theta):
    """Rotate-half rotary embedding of `[B,T,H,D]`."""
    if theta == 0:
        return x
    half = x.shape[-1] // 2
    angles = positions[:, :, None, None] * theta ** (-jnp.arange(half) / half)
    x = x.astype(jnp.float32)
    turned = jnp.concatenate([-x[..., half:], x[..., :half]], -1)
    cos, sin = jnp.tile(jnp.cos(angles), 2), jnp.tile(jnp.sin(angles), 2)
    return x * cos + turned * sin


def shifted_attention(shift, golden, q, k, v, w_k, w_v):
    """The layer: shift, rotate, attend."""
    segments = golden.get("segment_ids")
    segments = None if segments is None else jnp.asarray(segments)
    positions = jnp.asarray(golden.get("positions", np.arange(q.shape[1])[None]))
    theta = float(golden["rope_theta"])
    k = rotated(shift(k, w_k, segment_ids=segments), positions, theta)
    return attention(
        rotated(q, positions, theta).astype(q.dtype),
        k.astype(q.dtype),
        shift(v, w_v, segment_ids=segments),
        segment_ids=segments,
        implementation="xla",
    )


def arguments(golden, dtype=jnp.float32):
    tokens = [jnp.asarray(golden[name], dtype) for name in ("q", "k", "v")]
    return *tokens, jnp.asarray(golden["w_k"]), jnp.asarray(golden["w_v"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", PLAIN)
def test_shifted_keys_and_values_are_golden(name, implementation):
    golden, shift = golden_file(name), IMPLEMENTATIONS[implementation]
    for x in "kv":
        for dtype, tolerance in ((jnp.float32, 1e-6), (jnp.bfloat16, 2e-2)):
            out = shift(jnp.asarray(golden[x], dtype), jnp.asarray(golden[f"w_{x}"]))
            assert out.dtype == dtype
            expected = golden[f"{x}_shifted"]
            np.testing.assert_allclose(
                np.asarray(out, np.float32), expected, rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize("name", [*PLAIN, "packed_segments"])
def test_attention_and_its_gradients_are_golden(name):
    golden = golden_file(name)
    for implementation, shift in IMPLEMENTATIONS.items():
        out, vjp = jax.vjp(
            lambda *args, shift=shift: shifted_attention(shift, golden, *args), *arguments(golden)
        )
        np.testing.assert_allclose(out, golden["out"], atol=1e-5, err_msg=implementation)
        for key, gradient in zip(
            ("dq", "dk", "dv", "dw_k", "dw_v"), vjp(golden["do"]), strict=True
        ):
            tolerance = 2e-4 if "w" in key else 5e-5
            np.testing.assert_allclose(
                gradient, golden[key], atol=tolerance, err_msg=f"{implementation} {key}"
            )


def test_attention_in_bfloat16():
    golden = golden_file("mha_rope")
    out = shifted_attention(kv_shift, golden, *arguments(golden, jnp.bfloat16))
    np.testing.assert_allclose(np.asarray(out, np.float32), golden["out"], atol=2e-2, rtol=2e-2)


def test_with_core_context_attention():
    golden = golden_file("compose_with_cca")
    q, k, v, w_k, w_v = arguments(golden)
    positions, theta = jnp.arange(q.shape[1])[None], float(golden["rope_theta"])
    out = cca_attention(
        rotated(q, positions, theta),
        rotated(kv_shift(k, w_k), positions, theta),
        kv_shift(v, w_v),
        group_size=int(golden["group_size"]),
        window_size=int(golden["window_size"]),
    )
    np.testing.assert_allclose(out, golden["out"], atol=1e-5)


def test_right_padding_leaves_outputs_and_tail_alone():
    golden = golden_file("right_padded")
    lengths = jnp.asarray(golden["lengths"])
    out = shifted_attention(kv_shift, golden, *arguments(golden))
    real = np.arange(out.shape[1]) < golden["lengths"][:, None]
    np.testing.assert_allclose(out[real], golden["out_valid"][real], atol=1e-5)
    for x in "kv":
        raw, weights = jnp.asarray(golden[x]), jnp.asarray(golden[f"w_{x}"])
        _, tail = kv_shift(raw, weights, lengths=lengths, return_tail=True)
        np.testing.assert_array_equal(tail[:, 0], golden[f"last_raw_{x}"])


def random_case(window, time=13, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(window), 3)
    x = jax.random.normal(keys[0], (2, time, 3, 8), dtype)
    weights = jax.random.normal(keys[1], (3, window))
    return x, weights, jax.random.normal(keys[2], (2, window - 1, 3, 8), dtype)


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_identity_is_exact(window):
    for dtype in (jnp.float32, jnp.bfloat16):
        x, _, past = random_case(window, dtype=dtype)
        weights = jnp.zeros((3, window)).at[:, -1].set(1)
        np.testing.assert_array_equal(kv_shift(x, weights, initial=past), x)


@pytest.mark.parametrize("window", [1, 2, 4])
def test_pieces_give_the_whole(window):
    x, weights, past = random_case(window)
    whole, tail = kv_shift(x, weights, initial=past, return_tail=True)
    np.testing.assert_allclose(
        whole, IMPLEMENTATIONS["reference"](x, weights, initial=past), rtol=1e-6, atol=1e-6
    )
    pieces, carried = [], past
    for start, stop in ((0, 1), (1, 2), (2, 9), (9, 13)):
        piece, carried = kv_shift(x[:, start:stop], weights, initial=carried, return_tail=True)
        pieces.append(piece)
    np.testing.assert_array_equal(jnp.concatenate(pieces, axis=1), whole)
    np.testing.assert_array_equal(carried, tail)


def test_tail_of_each_length():
    x, weights, past = random_case(4)
    _, tail = kv_shift(x, weights, initial=past, lengths=jnp.array([0, 2]), return_tail=True)
    np.testing.assert_array_equal(tail[0], past[0])
    np.testing.assert_array_equal(tail[1], jnp.concatenate([past[1, 2:], x[1, :2]]))


@pytest.mark.parametrize("window", [2, 4])
def test_packed_and_padded_rows_are_their_segments_alone(window):
    x, weights, _ = random_case(window)
    # The second row returns to an id it has used; the first is padded on both sides.
    segments = jnp.array([[0] * 3 + [1] * 8 + [0] * 2, [1] * 4 + [2] + [1] * 5 + [3] * 3])
    x = jnp.where(segments[:, :, None, None] == 0, jnp.nan, x)
    lengths = jnp.array([11, 13])
    out, tail = kv_shift(x, weights, segment_ids=segments, lengths=lengths, return_tail=True)
    reference = IMPLEMENTATIONS["reference"](x, weights, segment_ids=segments)
    np.testing.assert_allclose(out, reference, rtol=1e-6, atol=1e-6)
    for row, start, stop in ((0, 3, 11), (1, 0, 4), (1, 4, 5), (1, 5, 10), (1, 10, 13)):
        alone, last = kv_shift(x[row : row + 1, start:stop], weights, return_tail=True)
        np.testing.assert_array_equal(out[row, start:stop], alone[0])
        if stop in (11, 13):
            np.testing.assert_array_equal(tail[row], last[0])
    # Padding passes no gradient to its neighbours.
    ones = jnp.ones_like(x)
    padding = (segments == 0)[:, :, None, None]
    _, vjp = jax.vjp(lambda x: kv_shift(x, weights, segment_ids=segments), ones)
    (from_padding,) = vjp(jnp.where(padding, ones, 0.0))
    np.testing.assert_array_equal(jnp.where(padding, 0.0, from_padding), 0.0)


def test_coefficient_gradients_are_float32_sums():
    x, weights, _ = random_case(2, time=4096, dtype=jnp.bfloat16)
    cotangent = 1 + 0.1 * jax.random.normal(jax.random.key(9), x.shape)
    _, vjp = jax.vjp(lambda weights: kv_shift(x, weights), weights)
    (gradient,) = vjp(cotangent.astype(x.dtype))
    x64 = np.asarray(x, np.float64)
    cotangent = np.asarray(cotangent.astype(x.dtype), np.float64)
    previous = np.pad(x64, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
    expected = np.stack([(y * cotangent).sum((0, 1, 3)) for y in (previous, x64)], -1)
    # 2·4096·8 terms of size 1 in float32: 1e-2 absolute would already be a bfloat16 sum.
    np.testing.assert_allclose(gradient, expected, atol=2e-3)


def test_under_transformations():
    x, weights, past = random_case(3)
    whole = kv_shift(x, weights, initial=past)
    mapped = jax.jit(jax.vmap(lambda x, past: kv_shift(x[None], weights, initial=past[None])[0]))
    np.testing.assert_allclose(mapped(x, past), whole, rtol=1e-6, atol=1e-6)

    def step(carried, token):
        out, carried = kv_shift(token[:, None], weights, initial=carried, return_tail=True)
        return carried, out[:, 0]

    def scanned(x):
        return jax.lax.scan(jax.checkpoint(step), past, x.swapaxes(0, 1))[1].swapaxes(0, 1)

    np.testing.assert_allclose(scanned(x), whole, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        jax.grad(lambda x: jnp.sum(scanned(x) ** 2))(x),
        jax.grad(lambda x: jnp.sum(kv_shift(x, weights, initial=past) ** 2))(x),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weights": jnp.ones((6, 2))}, r"weights has shape \(6, 2\).*not for each query head"),
        ({"weights": jnp.ones((3, 0))}, "window 0: must be at least 1"),
        ({"weights": jnp.ones((3, 2), int)}, "weights has dtype int32"),
        ({"initial": jnp.ones((2, 2, 3, 8))}, r"initial has shape \(2, 2, 3, 8\).*\(2, 1, 3, 8\)"),
        ({"x": jnp.ones((2, 13, 8))}, r"x has shape \(2, 13, 8\)"),
        ({"segment_ids": jnp.ones((2, 12), int)}, r"segment_ids has shape \(2, 12\)"),
        ({"lengths": jnp.ones(2)}, "lengths has dtype float32"),
    ],
)
def test_wrong_arguments_are_named(changed, message):
    x, weights, _ = random_case(2)
    # Past the shape checker, which tests alone run.
    unchecked = getattr(kv_shift, "__wrapped__", kv_shift)
    with pytest.raises(ValueError, match=message):
        unchecked(**{"x": x, "weights": weights, **changed})
