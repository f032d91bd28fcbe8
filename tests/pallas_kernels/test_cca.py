"""Core context aware attention against golden values, and over its edges."""

import functools
import itertools
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import attention_reference, intervals
from pallas_kernels.cca import (
    cca_attention,
    cca_attention_reference,
    cca_mask,
    core_tokens,
    pool_groups,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "cca"
PLAIN = ["mha_s16_g4", "gqa_s8_g8_t50", "short_no_core_t19", "one_core_t20"]
PLAIN += ["g1_is_full_attention", "s_not_multiple_of_g", "mean_pool", "max_pool"]
PLAIN += ["mqa_s16_g16_d32", "t1", "window_eq_group_t33", "large_logits", "window_lt_group"]
PLAIN += ["gqa_d64_t96"]
STATIC = ("group_size", "window_size", "pooling", "sink_tokens", "core_heads", "logit_softcap")
IMPLEMENTATIONS = {
    "reference": jax.jit(cca_attention_reference, static_argnames=STATIC),
    "xla": jax.jit(cca_attention, static_argnames=STATIC),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks small enough that these rows are cut into several, of both kinds."""
    monkeypatch.setattr(intervals, "BLOCK_SIZES", (8,))


def golden_file(name):
    return dict(np.load(GOLDEN / f"{name}.npz"))


def settings(golden):
    pooling = str(golden.get("pooling", "cca"))
    sizes = {name: int(golden[name]) for name in ("group_size", "window_size")}
    return sizes | {"pooling": pooling}


@functools.cache
def with_gradients(implementation, **static):
    """Jitted `(query, key, value, cotangent, rows) -> out, (dq, dk, dv)`."""

    def run(query, key, value, cotangent, rows):
        out, vjp = jax.vjp(
            lambda *args: IMPLEMENTATIONS[implementation](*args, **rows, **static),
            query,
            key,
            value,
        )
        return out, vjp(cotangent)

    return jax.jit(run)


def inputs(seed, time, heads=4, kv_heads=2, head_dim=8, batch=2, dtype=jnp.float32):
    """Queries, keys, values and a cotangent."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = [(batch, time, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", [*PLAIN, "packed_segments"])
def test_golden(name, implementation):
    golden = golden_file(name)
    rows = {}
    if "segment_ids" in golden:
        rows["segment_ids"] = jnp.asarray(golden["segment_ids"])
    run = with_gradients(implementation, **settings(golden))
    out, gradients = run(*(jnp.asarray(golden[x]) for x in ("q", "k", "v", "do")), rows)
    large = name == "large_logits"
    np.testing.assert_allclose(out, golden["out"], atol=1e-4 if large else 1e-5)
    for key, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        np.testing.assert_allclose(gradient, golden[key], atol=5e-4 if large else 5e-5, err_msg=key)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["mha_s16_g4", "gqa_d64_t96", "mean_pool"])
def test_golden_in_bfloat16(name, implementation):
    golden = golden_file(name)
    arrays = (jnp.asarray(golden[x], jnp.bfloat16) for x in ("q", "k", "v", "do"))
    out, gradients = with_gradients(implementation, **settings(golden))(*arrays, {})
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), golden["out"], atol=2e-2, rtol=2e-2)
    for key, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        assert gradient.dtype == jnp.bfloat16
        error = np.linalg.norm(np.asarray(gradient, np.float32) - golden[key])
        assert error < 2e-2 * np.linalg.norm(golden[key]), key


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_right_padding_is_golden(implementation):
    golden = golden_file("right_padded")
    out = IMPLEMENTATIONS[implementation](
        *(jnp.asarray(golden[x]) for x in "qkv"),
        lengths=jnp.asarray(golden["lengths"]),
        **settings(golden),
    )
    real = np.arange(out.shape[1]) < golden["lengths"][:, None]
    np.testing.assert_allclose(out[real], golden["out_valid"][real], atol=1e-5)
    np.testing.assert_array_equal(np.asarray(out)[~real], 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["decode_gqa_p20_n40", "decode_from_empty_window"])
def test_prefill_of_what_was_decoded_is_golden(name, implementation):
    golden = golden_file(name)
    query, key, value = (jnp.asarray(golden[x]) for x in ("q_rope", "k_rope", "v"))
    out = IMPLEMENTATIONS[implementation](query, key, value, **settings(golden))
    np.testing.assert_allclose(out, golden["out"], atol=1e-5)
    core_key, core_value, _ = core_tokens(query, key, value, group_size=int(golden["group_size"]))
    count = golden["core_k_final"].shape[1]
    np.testing.assert_allclose(core_key[:, :count], golden["core_k_final"], atol=1e-5)
    np.testing.assert_allclose(core_value[:, :count], golden["core_v_final"], atol=1e-5)


@pytest.mark.parametrize("name", PLAIN)
def test_cores_and_mask_are_golden(name):
    golden = golden_file(name)
    size, window = int(golden["group_size"]), int(golden["window_size"])
    time = golden["q"].shape[1]
    causal = np.tri(time, dtype=bool)  # files without a core have no mask
    np.testing.assert_array_equal(cca_mask(time, size, window), golden.get("mask", causal))
    if "core_k" not in golden:
        return
    count = golden["core_k"].shape[1]
    query, key, value = (jnp.asarray(golden[x]) for x in "qkv")
    cores = core_tokens(query, key, value, group_size=size)
    for x, expected in zip(cores, ("core_k", "core_v", "pool_weights"), strict=True):
        np.testing.assert_allclose(x[:, :count], golden[expected], atol=1e-5, err_msg=expected)
    # One group by itself, as a cache pools it.
    core_key, _, _ = pool_groups(
        query[:, size - 1 : size], key[:, None, :size], value[:, None, :size]
    )
    np.testing.assert_allclose(core_key, cores[0][:, :1], atol=1e-6)


@pytest.mark.parametrize(
    ("time", "static"),
    [
        (41, {"group_size": 3, "window_size": 5}),
        (41, {"group_size": 8, "window_size": 2, "sink_tokens": 3}),
        (41, {"group_size": 4, "window_size": 16, "sink_tokens": 11, "core_heads": "kv"}),
        (41, {"group_size": 4, "window_size": 8, "logit_softcap": 2.0, "pooling": "max"}),
        (5, {"group_size": 1, "window_size": 1, "sink_tokens": 1}),
    ],
)
def test_padded_and_packed_rows_equal_the_reference(time, static):
    query, key, value, cotangent = inputs(0, time)
    half = time // 2
    unpadded = {
        "segment_ids": jnp.zeros((2, time), int),
        "lengths": jnp.array([time, time]),
        "starts": jnp.array([0, 0]),
    }
    cases = [
        {"lengths": jnp.array([half, time])},
        {"starts": jnp.array([half - 1, 1]), "lengths": jnp.array([time, time - 1])},
        {"starts": jnp.array([0, time])},
        {"lengths": jnp.array([0, 1])},
        {"segment_ids": jnp.array([[2] * half + [0] * (time - half), [1] * time])},
        {"segment_ids": jnp.stack([jnp.arange(time) // 2, jnp.arange(time) // (half + 1) % 2])},
        {
            "segment_ids": jnp.array([[0] * half + [1] * (time - half)] * 2),
            "lengths": jnp.array([time - 1, half + 1]),
            "starts": jnp.array([0, 1]),
        },
    ]
    # One compiled program for all of them, and one for rows known to be whole.
    for rows in ({}, *(unpadded | case for case in cases)):
        expected = with_gradients("reference", **static)(query, key, value, cotangent, rows)
        found = with_gradients("xla", **static)(query, key, value, cotangent, rows)
        np.testing.assert_allclose(found[0], expected[0], atol=1e-5, err_msg=str(rows))
        for a, b in zip(found[1], expected[1], strict=True):
            np.testing.assert_allclose(a, b, atol=5e-5, err_msg=str(rows))


TIME = 37


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(
    st.integers(0, 2**31), st.integers(1, TIME - 1), st.sampled_from([(3, 7), (8, 4)])
)
def test_later_tokens_change_nothing_and_length_changes_nothing(seed, cut, sizes):
    group_size, window_size = sizes
    query, key, value, _ = inputs(seed, TIME)
    other = inputs(seed + 1, TIME)
    static = {"group_size": group_size, "window_size": window_size}
    whole = IMPLEMENTATIONS["xla"](query, key, value, **static)
    later = jnp.arange(TIME)[:, None, None] >= cut
    replaced = (jnp.where(later, b, a) for a, b in zip((query, key, value), other[:3], strict=True))
    out = IMPLEMENTATIONS["xla"](*replaced, **static)
    np.testing.assert_allclose(out[:, :cut], whole[:, :cut], atol=1e-6)
    # A prefix by its length, and the same tokens after left padding.
    prefix = IMPLEMENTATIONS["xla"](query, key, value, lengths=jnp.array([cut, cut]), **static)
    np.testing.assert_allclose(prefix[:, :cut], whole[:, :cut], atol=1e-6)
    moved = (jnp.roll(x, cut, axis=1) for x in (query, key, value))
    out = IMPLEMENTATIONS["xla"](*moved, starts=jnp.array([cut, cut]), **static)
    np.testing.assert_allclose(out[:, cut:], whole[:, : TIME - cut], atol=1e-6)


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(
    st.integers(0, 2**31), st.lists(st.integers(1, TIME - 1), max_size=4, unique=True)
)
def test_packed_is_separate(seed, borders):
    query, key, value, _ = inputs(seed, TIME)
    static = {"group_size": 3, "window_size": 5}
    edges = [0, *sorted(borders), TIME]
    ids = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    packed = IMPLEMENTATIONS["xla"](
        query, key, value, segment_ids=jnp.asarray(np.stack([ids, ids])), **static
    )
    for first, last in itertools.pairwise(edges):
        # Each segment moved to the front of a row of the same shape.
        alone = (jnp.roll(x, -first, axis=1) for x in (query, key, value))
        length = jnp.full(2, last - first)
        alone = IMPLEMENTATIONS["xla"](*alone, lengths=length, **static)
        np.testing.assert_allclose(packed[:, first:last], alone[:, : last - first], atol=1e-6)


@pytest.mark.parametrize(
    ("head_dim", "sizes"),
    [(64, (1, 4)), (80, (4, 16)), (96, (1, 4)), (128, (4, 16)), (256, (1, 4))],
)
def test_full_attention_where_no_core_matters(head_dim, sizes):
    group_size, window_size = sizes
    query, key, value, cotangent = inputs(1, 19, head_dim=head_dim)
    run = with_gradients("xla", group_size=group_size, window_size=window_size)
    out, gradients = run(query, key, value, cotangent, {})
    expected, vjp = jax.vjp(attention_reference, query, key, value)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    for a, b in zip(gradients, vjp(cotangent), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5)


def test_under_transformations():
    query, key, value, _ = inputs(2, TIME)
    static = {"group_size": 3, "window_size": 5}
    lengths = jnp.array([TIME, 20])

    def loss(query, key, value, lengths):
        return jnp.sum(cca_attention(query, key, value, lengths=lengths, **static) ** 2)

    expected = jax.jit(jax.grad(loss, (0, 1, 2)))(query, key, value, lengths)
    row = jax.grad(lambda *x: loss(*(y[None] for y in x)), (0, 1, 2))
    mapped = jax.jit(jax.vmap(row))(query, key, value, lengths)

    @jax.checkpoint
    def step(total, x):
        return total + loss(*(y[None] for y in x)), None

    def scanned(*x):
        return jax.lax.scan(step, 0.0, (*x, lengths))[0]

    for other in (mapped, jax.jit(jax.grad(scanned, (0, 1, 2)))(query, key, value)):
        for a, b in zip(other, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)


def test_nothing_quadratic_is_made():
    """No intermediate of forward and backward has T·T/g elements or more."""
    time = 4096
    shapes = [jax.ShapeDtypeStruct((1, time, n, 8), jnp.float32) for n in (2, 1, 1)]

    def loss(*args):
        return cca_attention(*args, group_size=16, window_size=64).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*shapes)
    pending, largest = [jaxpr.jaxpr], 0
    while pending:
        current = pending.pop()
        for equation in current.eqns:
            largest = max([largest, *(v.aval.size for v in equation.outvars)])
            pending += jax.core.jaxprs_in_params(equation.params)
    assert 0 < largest < time * time // 16


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"group_size": 0}, ValueError, "group_size=0: must be at least 1"),
        ({"window_size": 0}, ValueError, "window_size=0: must be at least 1"),
        ({"sink_tokens": -1}, ValueError, "sink_tokens=-1"),
        ({"pooling": "sum"}, ValueError, "pooling='sum': must be one of"),
        ({"core_heads": "all"}, ValueError, "core_heads='all'"),
        ({"logit_softcap": 0.0}, ValueError, "logit_softcap=0.0"),
        ({"query": jnp.ones((2, 9, 3, 8))}, ValueError, "key has 2 heads"),
        ({"query": jnp.ones((2, 8, 4, 8))}, ValueError, "key has 9 tokens, query 8"),
        ({"value": jnp.ones((2, 8, 2, 8))}, ValueError, "value has shape"),
        ({"lengths": jnp.ones(3, int)}, ValueError, r"lengths has shape \(3,\)"),
        ({"starts": jnp.ones(2)}, ValueError, "starts has dtype float32"),
        ({"segment_ids": jnp.ones((2, 8), int)}, ValueError, r"segment_ids has shape \(2, 8\)"),
        ({"implementation": "fast"}, ValueError, "implementation='fast'"),
        ({"implementation": "pallas"}, NotImplementedError, "implementation='pallas' cannot run"),
    ],
)
def test_wrong_arguments_are_named(changed, error, message):
    query, key, value, _ = inputs(0, 9)
    given = {"query": query, "key": key, "value": value, "group_size": 2, "window_size": 4}
    # Past the shape checker, which tests alone run.
    unchecked = getattr(cca_attention, "__wrapped__", cca_attention)
    with pytest.raises(error, match=message):
        unchecked(**(given | changed))
