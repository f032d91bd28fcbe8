"""Block-sparse attention against its dense reference and against dense attention."""

import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_inputs import arrays, packed_ids, quick_jit

from pallas_kernels.attention import attention_reference
from pallas_kernels.block_sparse import block_sparse_attention, block_sparse_attention_reference
from pallas_kernels.block_sparse import xla as block_sparse_xla
from pallas_kernels.block_sparse.lists import block_lists, visible_blocks
from pallas_kernels.block_sparse.reference import visible_tokens

BLOCK, TIME = 16, 90  # six blocks, the last one short


def random_mask(batch=2, heads=6, queries=6, keys=6, density=0.4, seed=3):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.random((batch, heads, queries, keys)) < density)


def reference(q, k, v, mask, **arguments):
    return block_sparse_attention_reference(q, k, v, mask, **arguments)[0]


@functools.cache
def value_and_gradients(function, static):
    """Output and gradients of a random linear loss, compiled once for all masks and lengths."""

    def loss(q, k, v, weight, mask, rows):
        out = function(q, k, v, mask, **dict(static), **rows).astype(jnp.float32)
        return jnp.sum(out * weight), out

    return quick_jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


def output_and_gradients(function, inputs, mask, arguments):
    """`(out, dq, dk, dv)` in float32."""
    rows = {name: arguments[name] for name in ("lengths", "segment_ids") if name in arguments}
    static = tuple(sorted(x for x in arguments.items() if x[0] not in rows))
    weight = jnp.asarray(np.random.default_rng(7).normal(size=inputs[0].shape), jnp.float32)
    (_, out), gradients = value_and_gradients(function, static)(*inputs, weight, mask, rows)
    return [x.astype(jnp.float32) for x in (out, *gradients)]


def check(inputs, mask, tolerance=2e-5, **arguments):
    """Output and gradients are those of the float32 reference."""
    arguments = dict(block_size=BLOCK) | arguments
    exact = [x.astype(jnp.float32) for x in inputs]
    got = output_and_gradients(block_sparse_attention, inputs, mask, arguments)
    expected = output_and_gradients(reference, exact, mask, arguments)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=name)
    return got


# name -> (inputs, mask, arguments)
CASES = {
    "grouped heads": ({}, {}, {}),
    "one short block": (dict(queries=7, keys=7), dict(queries=1, keys=1), {}),
    "later chunk": (dict(queries=42, keys=90), dict(queries=3), {}),
    "not causal": ({}, {}, dict(causal=False)),
    "scale and soft cap": ({}, {}, dict(scale=0.5, logit_softcap=1.5)),
    "lengths": ({}, {}, dict(lengths=jnp.array([0, 53]))),
    "lengths, not causal": ({}, {}, dict(lengths=jnp.array([90, 53]), causal=False)),
    "lengths and segments, later chunk": (
        dict(queries=42, keys=90),
        dict(queries=3),
        dict(lengths=jnp.array([40, 71]), segment_ids=packed_ids(TIME)),
    ),
    "packed": ({}, {}, dict(segment_ids=packed_ids(TIME))),
    "shuffled segments, not causal": (
        {},
        {},
        dict(
            segment_ids=jax.random.permutation(jax.random.key(0), packed_ids(TIME), axis=1),
            causal=False,
        ),
    ),
    "few blocks": ({}, dict(density=0.1), {}),
    "every block": ({}, dict(density=1.1), {}),
    "no block": ({}, dict(density=0.0), {}),
    "head_dim 80": (dict(batch=1, heads=2, dim=80), dict(batch=1, heads=2), {}),
}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Groups of three blocks and of two, so that rows have whole groups and remainders."""
    groups = block_sparse_xla.GroupTokens(whole=3 * BLOCK, masked=2 * BLOCK)
    monkeypatch.setattr(block_sparse_xla, "FORWARD_GROUPS", groups)
    monkeypatch.setattr(block_sparse_xla, "BACKWARD_GROUPS", groups)


@pytest.mark.parametrize("case", CASES)
def test_equals_reference(case):
    inputs, mask, arguments = CASES[case]
    check(arrays(**dict(queries=TIME, keys=TIME) | inputs), random_mask(**mask), **arguments)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_head_dims_at_real_block_size(head_dim, monkeypatch):
    monkeypatch.undo()  # the real group sizes too
    inputs = arrays(batch=1, queries=300, keys=300, heads=1, kv_heads=1, dim=head_dim)
    check(inputs, random_mask(1, 1, 3, 3), block_size=128, tolerance=5e-5)


def test_bfloat16():
    inputs = arrays(queries=TIME, keys=TIME, dtype=jnp.bfloat16)
    mask = random_mask()
    assert block_sparse_attention(*inputs, mask, block_size=BLOCK).dtype == jnp.bfloat16
    # bfloat16 has 8 bits; the gradients, of size up to 10, are sums of rounded products.
    check(inputs, mask, tolerance=5e-2)


def test_all_true_is_dense_attention():
    inputs = arrays(queries=TIME, keys=TIME)
    everything = jnp.ones((2, 6, 6, 6), bool)
    arguments = dict(block_size=BLOCK)
    got = output_and_gradients(block_sparse_attention, inputs, everything, arguments)
    expected = output_and_gradients(dense, inputs, everything, arguments)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def dense(q, k, v, mask, block_size):
    return attention_reference(q, k, v)


def test_what_is_padding_or_sees_nothing_is_zero():
    inputs = arrays(queries=TIME, keys=TIME)
    lengths = jnp.array([37, 90])
    mask = random_mask(density=0.5).at[1, :, 3].set(False)
    arguments = dict(block_size=BLOCK, lengths=lengths)
    out, dq, dk, dv = output_and_gradients(block_sparse_attention, inputs, mask, arguments)
    for x in (out[0, 37:], dq[0, 37:], dk[0, 37:], dv[0, 37:], out[1, 48:64], dq[1, 48:64]):
        np.testing.assert_array_equal(x, 0.0)
    assert all(np.isfinite(x).all() for x in (out, dq, dk, dv))


@functools.cache
def compiled():
    """One function of data only, shared by the examples below."""
    return quick_jit(functools.partial(block_sparse_attention, block_size=BLOCK))


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(
    seed=st.integers(0, 10**6),
    density=st.floats(0, 1),
    lengths=st.tuples(st.integers(0, TIME), st.integers(0, TIME)),
)
def test_any_mask_and_lengths(seed, density, lengths):
    """Equal to the reference, each row of the batch as if it were alone, padding of no effect."""
    q, k, v = arrays(queries=TIME, keys=TIME, heads=2, kv_heads=1, seed=seed)
    mask = random_mask(heads=2, density=density, seed=seed)
    lengths = jnp.array(lengths, jnp.int32)
    out = compiled()(q, k, v, mask, lengths=lengths)
    expected = reference(q, k, v, mask, block_size=BLOCK, lengths=lengths)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    swapped = compiled()(q[::-1], k[::-1], v[::-1], mask[::-1], lengths=lengths[::-1])
    np.testing.assert_array_equal(swapped[::-1], out)
    padding = (jnp.arange(TIME) >= lengths[:, None])[:, :, None, None]
    junk = [jnp.where(padding, 1e3, x) for x in (q, k, v)]
    np.testing.assert_array_equal(compiled()(*junk, mask, lengths=lengths), out)


@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
@hypothesis.given(changed=st.integers(0, TIME - 1), seed=st.integers(0, 100))
def test_causality(changed, seed):
    """Changing a key and its value changes exactly the later queries that chose its block."""
    q, k, v = arrays(queries=TIME, keys=TIME, heads=2, kv_heads=1, seed=seed)
    mask = random_mask(heads=2, seed=seed)
    lengths = jnp.full(2, TIME)
    before = compiled()(q, k, v, mask, lengths=lengths)
    k, v = k.at[:, changed].add(1.0), v.at[:, changed].add(1.0)
    after = compiled()(q, k, v, mask, lengths=lengths)
    chose = np.repeat(np.asarray(mask)[..., changed // BLOCK], BLOCK, axis=2)[..., :TIME]
    expected = chose & (np.arange(TIME) >= changed)
    np.testing.assert_array_equal(
        np.any(np.asarray(before != after), axis=3).swapaxes(1, 2), expected
    )


def test_under_transformations():
    """jit, scan, remat, and vmap of both passes, also over the mask."""
    q, k, v = arrays(queries=TIME, keys=TIME, heads=2, kv_heads=1)
    mask = random_mask(heads=2)

    def loss(q, k, v, mask):
        return jnp.sum(jnp.sin(block_sparse_attention(q, k, v, mask, block_size=BLOCK)))

    gradients = jax.grad(loss, (0, 1, 2))
    expected = quick_jit(gradients)(q, k, v, mask)
    rows = jax.tree.map(lambda x: x[:, None], (q, k, v, mask))

    @quick_jit
    def others(rows):
        mapped = jax.vmap(gradients)(*rows)
        scanned = jax.lax.scan(
            lambda _, x: (None, jax.grad(jax.checkpoint(loss), (0, 1, 2))(*x)), None, rows
        )[1]
        return mapped, scanned

    for other in others(rows):
        for a, b in zip(expected, other, strict=True):
            np.testing.assert_allclose(a, b[:, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_lists_hold_exactly_the_chosen_visible_blocks(causal):
    lengths, ids = jnp.array([53, 90]), packed_ids(TIME)
    mask = random_mask(heads=1)
    arguments = dict(block_size=BLOCK, causal=causal, lengths=lengths, segment_ids=ids)
    visible = visible_blocks(TIME, TIME, offset=0, **arguments)
    tokens = np.asarray(visible_tokens(jnp.ones_like(mask), TIME, TIME, **arguments))
    padded = np.pad(tokens[:, 0], ((0, 0), (0, 6), (0, 6)))
    some = padded.reshape(2, 6, BLOCK, 6, BLOCK).any((2, 4))
    np.testing.assert_array_equal(visible.some, some)
    lists = block_lists(mask, visible)
    for b, i in np.ndindex(2, 6):
        chosen = np.flatnonzero(np.asarray(mask)[b, 0, i] & some[b, i])
        assert sorted(np.asarray(lists.columns)[b, 0, i, : lists.total[b, 0, i]]) == list(chosen)
        for column in lists.columns[b, 0, i, : lists.whole[b, 0, i]]:
            start = int(column) * BLOCK
            of_real = tokens[b, 0, i * BLOCK : min((i + 1) * BLOCK, int(lengths[b]))]
            assert of_real[:, start : start + BLOCK].all()


def test_memory_is_linear_in_the_sequence():
    def temporary(time):
        x = jax.ShapeDtypeStruct((1, time, 1, 64), jnp.float32)
        mask = jax.ShapeDtypeStruct((1, 1, time // 128, time // 128), bool)

        def loss(q, k, v, mask):
            return block_sparse_attention(q, k, v, mask, block_size=128).sum()

        step = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x, mask).compile()
        return step.memory_analysis().temp_size_in_bytes

    assert temporary(8192) < 8192 * 8192 * 4 / 8
    assert temporary(8192) < 2.2 * temporary(4096)


BAD = {
    "query has shape (2, 90, 16)": dict(query=jnp.ones((2, 90, 16))),
    "key has dtype int32": dict(key=jnp.ones((2, 90, 2, 16), jnp.int32)),
    "value has shape (2, 0, 2, 16)": dict(value=jnp.ones((2, 0, 2, 16))),
    "key has shape (1, 90, 2, 16)": dict(key=jnp.ones((1, 90, 2, 16))),
    "value has shape (2, 89, 2, 16)": dict(value=jnp.ones((2, 89, 2, 16))),
    "they must divide the 4 heads": dict(
        key=jnp.ones((2, 90, 3, 16)), value=jnp.ones((2, 90, 3, 16))
    ),
    "query has 91 tokens and key 90": dict(query=jnp.ones((2, 91, 4, 16))),
    "position 5, which must be a multiple of block_size=16": dict(query=jnp.ones((2, 85, 4, 16))),
    "block_size=0": dict(block_size=0),
    "block_mask has shape (2, 4, 6, 5)": dict(block_mask=jnp.ones((2, 4, 6, 5), bool)),
    "block_mask has dtype float32": dict(block_mask=jnp.ones((2, 4, 6, 6))),
    "lengths has shape (3,)": dict(lengths=jnp.ones(3, jnp.int32)),
    "lengths has dtype float32": dict(lengths=jnp.ones(2)),
    "lengths=[3, 91]": dict(lengths=jnp.array([3, 91])),
    "segment_ids has shape (2, 89)": dict(segment_ids=jnp.ones((2, 89), jnp.int32)),
    "logit_softcap=0": dict(logit_softcap=0.0),
    "implementation='cuda'": dict(implementation="cuda"),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    arguments = dict(
        query=jnp.ones((2, 90, 4, 16)),
        key=jnp.ones((2, 90, 2, 16)),
        value=jnp.ones((2, 90, 2, 16)),
        block_mask=jnp.ones((2, 4, 6, 6), bool),
        block_size=BLOCK,
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        block_sparse_attention(**arguments | BAD[message])


@pytest.mark.parametrize("implementation", ["pallas", "triton"])
def test_a_kernel_there_is_not_says_so(implementation):
    q, k, v = arrays(queries=TIME, keys=TIME)
    with pytest.raises(NotImplementedError, match="choose 'xla' or None"):
        block_sparse_attention(
            q, k, v, random_mask(), block_size=BLOCK, implementation=implementation
        )
