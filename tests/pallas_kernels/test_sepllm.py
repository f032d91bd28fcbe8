"""SepLLM: masks, attention with gradients, streaming rules."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import attention
from pallas_kernels.sepllm import (
    kv_retention,
    sepllm_attention,
    sepllm_attention_reference,
    sepllm_mask,
)
from pallas_kernels.sepllm.streaming import (
    StreamSizes,
    compress,
    take_slots,
    tokens_before_compression,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "sepllm"
# Float32 sums of a few hundred terms of size one; gradients are relative to their largest value.
# Inputs and weights rounded to bfloat16 are off by 2^-9 each.
FORWARD, GRADIENT = 2e-5, 1e-4
FORWARD_BF16, GRADIENT_BF16 = 2e-2, 2e-2
OPERATIONS = {"xla": sepllm_attention, "reference": sepllm_attention_reference}


def load(name):
    with np.load(GOLDEN / f"{name}.npz") as data:
        return {key: data[key] for key in data.files}


def separators(ids, data):
    return jnp.asarray(np.isin(ids, data["separator_ids"]))


def test_masks_are_the_authors():
    data = load("masks")
    n, a = (int(x) for x in data["basic_na"])
    is_separator = separators(data["basic_ids"], data)
    none = jnp.zeros_like(is_separator)
    for name, flags, window, initial in (
        ("basic_mask", is_separator, n, a),
        ("n1_mask", is_separator, 1, a),
        ("a0_mask", is_separator, n, 0),
        ("streamingllm_mask", none, n, a),
        ("decode_rows", is_separator, n, a),
    ):
        mask = sepllm_mask(flags, window=window, initial_tokens=initial)
        np.testing.assert_array_equal(mask, data[name], err_msg=name)
    for window, expected in zip(data["ht_windows"], data["ht_masks"], strict=True):
        mask = sepllm_mask(is_separator, window=int(window), initial_tokens=a)
        np.testing.assert_array_equal(mask, expected)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_masks_are_the_definition(data):
    time, rows = 12, 3
    numbers = lambda low, high, n: data.draw(  # noqa: E731
        st.lists(st.integers(low, high), min_size=n, max_size=n)
    )
    is_separator = np.array(numbers(0, 3, rows * time)).reshape(rows, time) == 0
    segment_ids = np.array(numbers(0, 2, rows * time)).reshape(rows, time)
    segment_ids[0] = np.sort(segment_ids[0])[::-1]
    starts, lengths = np.array(numbers(0, time, rows)), np.array(numbers(0, time, rows))
    window, initial = data.draw(st.integers(1, time + 1)), data.draw(st.integers(0, 4))
    expected = np.zeros((rows, time, time), bool)
    for row in range(rows):
        first = 0
        for i in range(time):
            if i == starts[row] or (i and segment_ids[row, i] != segment_ids[row, i - 1]):
                first = i
            if starts[row] <= i < lengths[row] and segment_ids[row, i]:
                for j in range(first, i + 1):
                    near, sink = i - j < window, j - first < initial
                    expected[row, i, j] = near or sink or is_separator[row, j]
    mask = sepllm_mask(
        is_separator,
        window=window,
        initial_tokens=initial,
        **{
            name: jnp.asarray(x)
            for name, x in (("segment_ids", segment_ids), ("starts", starts), ("lengths", lengths))
        },
    )
    np.testing.assert_array_equal(mask, expected)


def test_left_padding_moves_the_initial_tokens():
    data = load("masks")
    n, a = (int(x) for x in data["basic_na"])
    ids, lengths = data["leftpad_ids"], data["leftpad_lengths"]
    starts = ids.shape[1] - lengths
    flags = separators(ids, data)
    mask = sepllm_mask(flags, window=n, initial_tokens=a, starts=jnp.asarray(starts))
    for row, start in enumerate(starts):
        np.testing.assert_array_equal(mask[row, start:], data["leftpad_mask"][row, start:])
        assert not mask[row, :start].any()


def test_retention_is_the_authors_counters():
    data = load("masks")
    n, a = (int(x) for x in data["basic_na"])
    is_separator = separators(data["basic_ids"], data)
    for name, flags, window in (
        ("basic", is_separator, n),
        ("n1", is_separator, 1),
        ("streamingllm", jnp.zeros_like(is_separator), n),
    ):
        kept = kv_retention(flags, window=window, initial_tokens=a)
        for got, counter in ((kept.final, "kept_kv"), (kept.mean, "kept_attn")):
            count, total = data[f"{name}_{counter}"]
            np.testing.assert_allclose(float(got.mean()), count / total, rtol=1e-6)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", ["attention_small", "attention_blocks"])
def test_attention_and_gradients(name, operation):
    data = load(name)
    flags = separators(data["ids"], data)
    options = dict(window=int(data["n"]), initial_tokens=int(data["a"]))

    @jax.jit
    def run(q, k, v, do):
        out, vjp = jax.vjp(
            lambda q, k, v: OPERATIONS[operation](q, k, v, flags, **options), q, k, v
        )
        return out, vjp(do)

    arrays = [data[x] for x in ("q", "k", "v", "do")]
    out, gradients = run(*arrays)
    np.testing.assert_allclose(out, data["out"], atol=FORWARD)
    for got, expected in zip(gradients, (data["dq"], data["dk"], data["dv"]), strict=True):
        np.testing.assert_allclose(got, expected, atol=GRADIENT * np.abs(expected).max())
    half = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
    out, gradients = run(*half)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), data["out"], atol=FORWARD_BF16)
    for got, expected in zip(gradients, (data["dq"], data["dk"], data["dv"]), strict=True):
        got = np.asarray(got, np.float32)
        np.testing.assert_allclose(got, expected, atol=GRADIENT_BF16 * np.abs(expected).max())


def random_inputs(batch=2, time=70, heads=4, kv_heads=2, dim=16, seed=0, share=0.15):
    keys = jax.random.split(jax.random.key(seed), 4)
    q = jax.random.normal(keys[0], (batch, time, heads, dim))
    k, v = (jax.random.normal(key, (batch, time, kv_heads, dim)) for key in keys[1:3])
    return q, k, v, jax.random.uniform(keys[3], (batch, time)) < share


@jax.jit
def both(q, k, v, flags, segment_ids, lengths, starts):
    """Output and gradients by either implementation."""
    options = dict(
        window=9, initial_tokens=3, segment_ids=segment_ids, lengths=lengths, starts=starts
    )

    def one(operation):
        def loss(q, k, v):
            out = operation(q, k, v, flags, logit_softcap=20.0, **options)
            return jnp.sum(jnp.sin(out)), out

        (_, out), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return out, gradients

    return one(sepllm_attention), one(sepllm_attention_reference)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6),
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.integers(0, 70),
    st.integers(0, 70),
)
def test_equals_the_reference_whatever_the_padding(seed, documents, start, end):
    q, k, v, flags = random_inputs(seed=seed, share=(seed % 5) / 4)
    ids = np.repeat(np.arange(1, len(documents) + 1), documents)
    segment_ids = np.zeros((2, 70), np.int32)
    segment_ids[0, : min(70, len(ids))] = ids[:70]
    segment_ids[1] = 1
    starts, lengths = np.array([0, min(start, end)]), np.array([70, max(start, end)])
    (out, gradients), (expected, expected_gradients) = both(
        q, k, v, flags, jnp.asarray(segment_ids), jnp.asarray(lengths), jnp.asarray(starts)
    )
    np.testing.assert_allclose(out, expected, atol=FORWARD)
    for got, wanted in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5)
    padding = (np.arange(70) >= lengths[1]) | (np.arange(70) < starts[1])
    assert not np.asarray(out)[1, padding].any()
    assert not np.asarray(gradients[0])[1, padding].any()


def test_limits_are_dense_causal_attention():
    q, k, v, flags = random_inputs()
    dense = attention(q, k, v)
    everything = jnp.ones_like(flags)
    for options, shown in (
        (dict(window=None), flags),
        (dict(window=70), flags),
        (dict(window=1000), flags),
        (dict(window=1), everything),
    ):
        out = sepllm_attention(q, k, v, shown, initial_tokens=0, **options)
        np.testing.assert_allclose(out, dense, atol=FORWARD)


def test_future_tokens_change_nothing():
    q, k, v, flags = random_inputs()
    before = sepllm_attention(q, k, v, flags, window=9, initial_tokens=3)
    changed = [x.at[:, 40:].set(7.0) for x in (q, k, v)]
    after = sepllm_attention(*changed, flags.at[:, 40:].set(True), window=9, initial_tokens=3)
    np.testing.assert_allclose(before[:, :40], after[:, :40], atol=1e-6)


def test_a_small_capacity_drops_nothing():
    options = dict(window=9, initial_tokens=3)

    @jax.jit
    def both(q, k, v, flags):
        def one(operation, **capacity):
            def loss(q, k, v):
                out = operation(q, k, v, flags, **options, **capacity)
                return jnp.sum(jnp.sin(out)), out

            (_, out), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
            return out, gradients

        return one(sepllm_attention, separator_capacity=12), one(sepllm_attention_reference)

    for share in (0.0, 0.1, 1.0):  # 1.0 has 61 entries for 12 places
        (out, gradients), (expected, wanted) = both(*random_inputs(share=share))
        np.testing.assert_allclose(out, expected, atol=FORWARD)
        for got, right in zip(gradients, wanted, strict=True):
            np.testing.assert_allclose(got, right, atol=GRADIENT * np.abs(right).max())


def test_scanned_and_rematerialised_it_compiles_once():
    def gradient(operation):
        def loss(x, flags):
            def layer(x, _):
                k, v = x[:, :, :2], x[:, :, 2:]
                return x + operation(x, k, v, flags, window=9, initial_tokens=3), None

            return jnp.sum(jnp.sin(jax.lax.scan(jax.checkpoint(layer), x, None, length=2)[0]))

        return jax.jit(jax.grad(loss))

    fast, exact = gradient(sepllm_attention), gradient(sepllm_attention_reference)
    for seed, share in enumerate((0.0, 0.2, 1.0)):
        x, _, _, flags = random_inputs(seed=seed, share=share)
        expected = exact(x, flags)
        np.testing.assert_allclose(fast(x, flags), expected, atol=GRADIENT * np.abs(expected).max())
    assert fast._cache_size() == 1


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_head_dims_and_odd_lengths(dim):
    q, k, v, flags = random_inputs(batch=1, time=301, heads=2, kv_heads=1, dim=dim)
    out = sepllm_attention(q, k, v, flags, window=33, initial_tokens=4)
    expected = sepllm_attention_reference(q, k, v, flags, window=33, initial_tokens=4)
    np.testing.assert_allclose(out, expected, atol=FORWARD)


def test_vmap_and_one_token():
    q, k, v, flags = random_inputs(time=1)
    one = jax.jit(lambda *x: sepllm_attention(*x, window=4, initial_tokens=0))
    np.testing.assert_allclose(one(q, k, v, flags), jnp.repeat(v, 2, axis=2), atol=1e-6)
    q, k, v, flags = (jnp.stack([x, x[::-1]]) for x in random_inputs(time=40))
    run = jax.jit(lambda *x: sepllm_attention(*x, window=9, initial_tokens=3))
    mapped = jax.jit(jax.vmap(run))(q, k, v, flags)
    np.testing.assert_allclose(mapped[1], run(q[1], k[1], v[1], flags[1]), atol=FORWARD)


def test_memory_is_linear():
    def temporaries(time):
        q = jax.ShapeDtypeStruct((1, time, 2, 16), jnp.float32)
        flags = jax.ShapeDtypeStruct((1, time), jnp.bool_)

        def loss(q, k, v, flags):
            return sepllm_attention(q, k, v, flags, window=64, initial_tokens=4).sum()

        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, q, q, flags).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(16384) < 5 * temporaries(4096)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(window=0), "window=0: a query must see itself"),
        (dict(initial_tokens=-1), "initial_tokens=-1"),
        (dict(separator_capacity=0), "separator_capacity=0"),
        (dict(is_separator=jnp.zeros((2, 5), bool)), "is_separator is bool"),
        (dict(is_separator=jnp.zeros((2, 70))), "must be bool"),
        (dict(lengths=jnp.array([1, 71])), "between 0 and 70"),
        (dict(logit_softcap=0.0), "logit_softcap=0.0"),
        (dict(key=jnp.zeros((2, 70, 3, 16)), value=jnp.zeros((2, 70, 3, 16))), "must divide"),
        (dict(implementation="cuda"), "implementation='cuda'"),
    ],
)
def test_refusals_name_the_value_and_the_remedy(change, words):
    q, k, v, flags = random_inputs()
    arguments = dict(query=q, key=k, value=v, is_separator=flags, window=9, initial_tokens=3)
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=words):
        sepllm_attention(**arguments | change)
    if "implementation" in change:
        with pytest.raises(NotImplementedError):
            sepllm_attention(**arguments | dict(implementation="pallas"))


STREAMS = ("figure4", "medium", "no_initial", "no_separators", "streamingllm", "no_accumulation")


def sizes_of(name, data):
    a, s, w, c = (int(x) for x in data[f"{name}_cfg"])
    if name == "streamingllm":
        return StreamSizes(a, 0, w, c)
    return StreamSizes(a, s, w, c, accumulate=name != "no_accumulation")


@pytest.mark.parametrize("name", STREAMS)
def test_streaming_keeps_what_the_authors_keep(name):
    data = load("streaming")
    sizes = sizes_of(name, data)
    sizes.check()
    ids = data[f"{name}_ids"]
    # Two rows, one a few tokens behind: rows do not touch each other.
    rows, slots, lag = 2, sizes.capacity + 1, 3
    step = jax.jit(lambda flags, used, end: compress(flags, used, end, sizes))
    held = np.full((rows, slots), -1)
    flags = np.zeros((rows, slots), bool)
    used, end = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    for t in range(ids.shape[1] + lag):
        for row, text in ((0, t), (1, t - lag)):
            if 0 <= text < ids.shape[1]:
                assert tokens_before_compression(jnp.asarray(used), sizes)[row] >= 1
                held[row, used[row]] = text
                flags[row, used[row]] = np.isin(ids[0, text], data["separator_ids"])
                used[row] += 1
                attended = data[f"{name}_attended"][text, 0]
                np.testing.assert_array_equal(held[row, : used[row]], attended[attended >= 0])
        plan = step(*map(jnp.asarray, (flags, used, end)))
        held, flags = (np.array(take_slots(jnp.asarray(x), plan.source)) for x in (held, flags))
        used, end = np.array(plan.used), np.array(plan.separators_end)
        for row, text in ((0, t), (1, t - lag)):
            if 0 <= text < ids.shape[1]:
                kept = data[f"{name}_kept"][text, 0]
                np.testing.assert_array_equal(held[row, : used[row]], kept[kept >= 0])
                if name != "streamingllm":
                    assert max(end[row], 0) == max(data[f"{name}_meta"][text, 0], 0)


def test_stream_sizes_that_cannot_work():
    with pytest.raises(ValueError, match=r"= 12 must be less than capacity 12.* 13 or more"):
        StreamSizes(2, 4, 6, 12).check()
    with pytest.raises(ValueError, match="local=0"):
        StreamSizes(2, 4, 0, 12).check()
    with pytest.raises(ValueError, match="initial=-1"):
        StreamSizes(-1, 4, 2, 12).check()
    StreamSizes(4, 0, 8, 12).check()
