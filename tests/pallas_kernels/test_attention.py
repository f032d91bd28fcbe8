"""One table of cases, run over every implementation that can run here, against the reference."""

import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_inputs import S, T, arrays, output_and_gradients, packed_ids

from pallas_kernels import attention, attention_reference, compiling_for
from pallas_kernels.attention import cudnn_gpu, pallas_tpu, xla


# Op by op the reference shares compiled operations between cases, and that is the longest part.
def unjitted(function):
    return function


def check(function, inputs, expected=None, tolerance=2e-5, **arguments):
    """Output and gradients of `function` are those of the float32 reference."""
    got = output_and_gradients(functools.partial(function, **arguments), *inputs)
    if expected is None:
        exact = [x.astype(jnp.float32) for x in inputs]
        reference = functools.partial(attention_reference, **arguments)
        expected = output_and_gradients(reference, *exact, jit=unjitted)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=name)


# name -> (inputs, arguments)
CASES = {
    "causal": (dict(keys=T), {}),
    "one block": (dict(queries=7, keys=7), {}),
    "whole blocks": (dict(queries=64, keys=64), {}),
    "fewer queries than keys": ({}, {}),
    "more queries than keys": (dict(queries=70, keys=50), {}),
    "multi-head": (dict(keys=T, kv_heads=6), {}),
    "multi-query": (dict(keys=T, kv_heads=1), {}),
    "not causal": ({}, dict(causal=False)),
    "scale": (dict(keys=T), dict(scale=0.5)),
    "soft cap": (dict(keys=T), dict(logit_softcap=1.5)),
    "window": (dict(keys=T), dict(sliding_window=20)),
    "window of one": (dict(keys=T), dict(sliding_window=1)),
    "window, not causal": (dict(keys=T), dict(sliding_window=20, causal=False)),
    "known offset": ({}, dict(q_offset=20)),
    "known offset, window, cap": ({}, dict(q_offset=20, sliding_window=9, logit_softcap=2.0)),
    "packed": (dict(keys=T), dict(segment_ids=packed_ids(T))),
    "packed, not causal": (dict(keys=T), dict(segment_ids=packed_ids(T), causal=False)),
    "packed, window": (dict(keys=T), dict(segment_ids=packed_ids(T), sliding_window=5)),
    "two packings": ({}, dict(segment_ids=packed_ids(T), kv_segment_ids=packed_ids(S, seed=2))),
    "shuffled segments": (
        dict(keys=T),
        dict(segment_ids=jax.random.permutation(jax.random.key(0), packed_ids(T), axis=1)),
    ),
    "offset a row": ({}, dict(q_offset=jnp.array([0, 20]))),
    "offsets before the keys": ({}, dict(q_offset=jnp.array([-9, -100]))),
    "offset beyond the window": ({}, dict(q_offset=jnp.array([40, 90]), sliding_window=8)),
    "lengths": (dict(keys=T), dict(kv_lengths=jnp.array([0, 33]))),
    "lengths, not causal": ({}, dict(kv_lengths=jnp.array([1, 70]), causal=False)),
    "cache": ({}, dict(q_offset=jnp.array([3, 20]), kv_lengths=jnp.array([53, 70]))),
}


@functools.cache
def expected(case):
    """The reference's output and gradients, once for all implementations."""
    inputs, arguments = CASES[case]
    reference = functools.partial(attention_reference, **arguments)
    return output_and_gradients(reference, *arrays(**inputs), jit=unjitted)


def use_narrow(monkeypatch):
    monkeypatch.setattr(xla, "NARROW_ROWS", 10**6)
    return functools.partial(attention, implementation="xla")


def use_narrow_chunks(monkeypatch):
    monkeypatch.setattr(xla, "NARROW_ROWS", 10**6)
    monkeypatch.setattr(xla, "NARROW_CHUNK", 16)
    return functools.partial(attention, implementation="xla")


def use_blocked(monkeypatch):
    monkeypatch.setattr(xla, "NARROW_ROWS", 0)
    monkeypatch.setattr(xla, "BLOCK_SIZES", (16,))
    return functools.partial(attention, implementation="xla")


def use_pallas(monkeypatch):
    monkeypatch.setattr(pallas_tpu, "INTERPRET", True)
    return functools.partial(attention, implementation="pallas")


def use_cudnn(monkeypatch):
    """What cuDNN would be asked, asked of jax's own implementation; its dtype check is off."""
    monkeypatch.setattr(cudnn_gpu, "IMPLEMENTATION", "xla")
    monkeypatch.setattr(cudnn_gpu, "DTYPES", (jnp.float32,))

    def function(*arrays, **arguments):
        with compiling_for("gpu"):
            return attention(*arrays, implementation="cudnn", **arguments)

    return function


IMPLEMENTATIONS = {
    "narrow": use_narrow,
    "narrow chunks": use_narrow_chunks,
    "blocked": use_blocked,
    "pallas": use_pallas,
    "cudnn": use_cudnn,
}
NARROW_GRADIENTS = ("causal", "two packings", "cache", "offset beyond the window")
# Where an implementation has nothing of its own to get wrong, and costs seconds.
SAME = {
    "pallas": (
        "one block",
        "whole blocks",
        "multi-head",
        "scale",
        "window of one",
        "packed, window",
    ),
    "narrow chunks": (
        "one block",
        "multi-head",
        "multi-query",
        "scale",
        "soft cap",
        "window of one",
    ),
}
TAKES_ALL = ("narrow", "narrow chunks", "blocked")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_reference(implementation, case, monkeypatch):
    function = IMPLEMENTATIONS[implementation](monkeypatch)
    if case in SAME.get(implementation, ()):
        pytest.skip("it would do what it does in another case")
    inputs, arguments = CASES[case]
    inputs = arrays(**inputs)
    try:
        jax.eval_shape(functools.partial(function, **arguments), *inputs)
    except NotImplementedError as error:
        if implementation in TAKES_ALL:
            raise
        pytest.skip(str(error))
    if implementation.startswith("narrow") and case not in NARROW_GRADIENTS:
        # The backward pass is that of "blocked", and shares what it needs from the forward one.
        out = function(*inputs, **arguments)
        np.testing.assert_allclose(out, expected(case)[0], rtol=2e-5, atol=2e-5)
        return
    check(function, inputs, expected(case), **arguments)


def test_kernels_take_what_they_should(monkeypatch):
    """The skips above are the documented ones, no more."""
    refused = {}
    for name in ("pallas", "cudnn"):
        with monkeypatch.context() as patch:
            function = IMPLEMENTATIONS[name](patch)
            refused[name] = set()
            for case, (inputs, arguments) in CASES.items():
                try:
                    jax.eval_shape(functools.partial(function, **arguments), *arrays(**inputs))
                except NotImplementedError:
                    refused[name].add(case)
    assert refused["pallas"] == {
        "two packings",
        "offset a row",
        "offsets before the keys",
        "offset beyond the window",
        "lengths",
        "lengths, not causal",
        "cache",
    }
    assert set(CASES) - refused["cudnn"] == {
        "causal",
        "one block",
        "whole blocks",
        "multi-head",
        "multi-query",
        "not causal",
        "scale",
        "window",
        "window of one",
        "lengths",
        "lengths, not causal",
    }


@pytest.mark.parametrize("implementation", TAKES_ALL)
def test_bfloat16(implementation, monkeypatch):
    function = IMPLEMENTATIONS[implementation](monkeypatch)
    inputs = arrays(keys=T, dtype=jnp.bfloat16)
    assert function(*inputs).dtype == jnp.bfloat16
    # bfloat16 has 8 bits; the gradients, of size up to 10, are sums of rounded products.
    check(function, inputs, tolerance=5e-2)


def test_float32_statistics_in_bfloat16(monkeypatch):
    """4,096 equal weights: a bfloat16 sum would stop at 256."""
    q, k, _ = arrays(1, 40, 4096, 2, 2, dtype=jnp.bfloat16)
    v = jnp.ones_like(k)
    out = attention(jnp.zeros_like(q), k, v, causal=False, implementation="xla")
    np.testing.assert_allclose(out.astype(jnp.float32), 1.0, atol=4e-3)


@pytest.mark.parametrize("implementation", [*TAKES_ALL, "pallas"])
def test_values_of_another_width(implementation, monkeypatch):
    q, k, v = arrays(keys=T)
    v = jnp.concatenate([v, v], axis=-1)[..., :24]
    check(IMPLEMENTATIONS[implementation](monkeypatch), (q, k, v))


@pytest.mark.parametrize("implementation", TAKES_ALL)
def test_queries_that_see_nothing(implementation, monkeypatch):
    function = IMPLEMENTATIONS[implementation](monkeypatch)
    inputs = arrays(batch=2)
    arguments = dict(kv_lengths=jnp.array([0, S]), q_offset=jnp.array([0, -10]))
    out, dq, dk, dv = output_and_gradients(functools.partial(function, **arguments), *inputs)
    for x in (out[0], out[1, :10], dq[0], dq[1, :10], dk[0], dv[0]):
        np.testing.assert_array_equal(x, 0.0)
    assert all(np.isfinite(x).all() for x in (out, dq, dk, dv))
    assert np.abs(out[1, 10:]).min() > 0


@pytest.mark.parametrize("implementation", [*TAKES_ALL, "pallas"])
def test_packed_equals_separate(implementation, monkeypatch):
    function = IMPLEMENTATIONS[implementation](monkeypatch)
    q, k, v = arrays(batch=1, keys=T)
    half = T // 2
    ids = jnp.repeat(jnp.array([1, 2]), half)[None]
    packed = jax.jit(function)(q, k, v, segment_ids=ids)
    alone = jax.jit(function)
    for part in (slice(0, half), slice(half, T)):
        expected = alone(q[:, part], k[:, part], v[:, part])
        np.testing.assert_allclose(packed[:, part], expected, atol=1e-5)


_jitted = {}


def jitted(name, function):
    """One jitted function a name, so that examples share what is compiled."""
    return _jitted.setdefault(name, jax.jit(function))


@pytest.mark.parametrize("implementation", TAKES_ALL)
@hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
@hypothesis.given(
    queries=st.sampled_from([1, 40]),
    offset=st.integers(-5, 40),
    changed=st.integers(0, 69),
    seed=st.integers(0, 100),
)
def test_causality(implementation, queries, offset, changed, seed):
    """Changing a key and its value changes exactly the queries at or after its position."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        function = jitted(implementation, IMPLEMENTATIONS[implementation](monkeypatch))
        q, k, v = arrays(batch=1, queries=queries, seed=seed)
        before = function(q, k, v, q_offset=jnp.array([offset]))
        after = function(
            q, k.at[:, changed].add(1.0), v.at[:, changed].add(1.0), q_offset=jnp.array([offset])
        )
    differs = np.any(np.asarray(before != after), axis=(0, 2, 3))
    np.testing.assert_array_equal(differs, offset + np.arange(queries) >= changed)


def test_decoding_equals_prefill():
    """One token at a time over a cache of a fixed size, at its real block sizes."""
    q, k, v = arrays(batch=2, queries=1100, keys=1100, heads=4)
    whole = attention(q, k, v)
    step = jax.jit(
        lambda q, i: attention(q, k, v, q_offset=i, kv_lengths=i + 1, implementation="xla")
    )
    for i in (0, 5, 511, 512, 1099):
        one = step(q[:, i : i + 1], jnp.full(2, i, jnp.int32))
        np.testing.assert_allclose(one[:, 0], whole[:, i], atol=1e-5)


def compiled_gradient(time, **arguments):
    q, k, v = (jax.ShapeDtypeStruct((1, time, heads, 64), jnp.float32) for heads in (4, 2, 2))

    def loss(q, k, v):
        return attention(q, k, v, implementation="xla", **arguments).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, v).compile()


def test_memory_is_linear_in_the_sequence():
    time, _heads = 8192, 4
    temporary = compiled_gradient(time).memory_analysis().temp_size_in_bytes
    # One [T, T] matrix of one head alone would be 268 MB.
    assert temporary < time * time * 4 / 4
    assert temporary < 2.2 * compiled_gradient(time // 2).memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("arguments", "share"),
    [
        (dict(), 0.55),
        (dict(sliding_window=256), 0.1),
        (dict(kv_lengths=jnp.array([1024])), 0.23),
        (dict(q_offset=jnp.array([-3072])), 0.1),
        (dict(segment_ids=jnp.repeat(jnp.arange(8), 512)[None]), 0.1),
    ],
    ids=["causal", "window", "lengths", "offset", "segments"],
)
def test_masked_blocks_are_not_computed(arguments, share):
    """The key blocks in the loops' ranges, as a share of all of them."""
    arguments = dict(arguments)
    time = 4096
    spec = xla.Spec(True, arguments.pop("sliding_window", None), None, 1.0)
    bounds = xla.Bounds(**arguments)
    blocks = xla.Blocks(128, 128, 32, 32)
    segments = xla._segment_blocks(bounds.segment_ids, 128, 32)
    ranges = xla._key_ranges(blocks, time, bounds, spec, segments, segments)
    assert 0 < int(jnp.sum(ranges.last - ranges.first)) <= share * 32 * 32
    assert bool(jnp.all(ranges.first <= ranges.full_first))
    assert bool(jnp.all(ranges.full_first <= ranges.full_last))
    assert bool(jnp.all(ranges.full_last <= ranges.last))


BAD = {
    "q has shape": dict(q=jnp.ones((2, 8, 16))),
    "k has dtype int32": dict(k=jnp.ones((2, 8, 2, 16), jnp.int32)),
    "v has shape (2, 0, 2, 16)": dict(v=jnp.ones((2, 0, 2, 16))),
    "k has shape (1, 8, 2, 16)": dict(k=jnp.ones((1, 8, 2, 16))),
    "v has shape (2, 9, 2, 16)": dict(v=jnp.ones((2, 9, 2, 16))),
    "k has 3 heads": dict(k=jnp.ones((2, 8, 3, 16)), v=jnp.ones((2, 8, 3, 16))),
    "q_offset has shape (3,)": dict(q_offset=jnp.zeros(3, jnp.int32)),
    "q_offset has dtype float32": dict(q_offset=jnp.zeros(2)),
    "kv_lengths has shape (3,)": dict(kv_lengths=jnp.zeros(3, jnp.int32)),
    "segment_ids has shape (2, 9)": dict(segment_ids=jnp.zeros((2, 9), jnp.int32)),
    "kv_segment_ids is given without": dict(kv_segment_ids=jnp.zeros((2, 8), jnp.int32)),
    "give kv_segment_ids too": dict(
        q=jnp.ones((2, 5, 4, 16)), segment_ids=jnp.zeros((2, 5), jnp.int32)
    ),
    "sliding_window=0": dict(sliding_window=0),
    "logit_softcap=-1.0": dict(logit_softcap=-1.0),
    "implementation='triton'": dict(implementation="triton"),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    arguments = dict(
        q=jnp.ones((2, 8, 4, 16)), k=jnp.ones((2, 8, 2, 16)), v=jnp.ones((2, 8, 2, 16))
    )
    arguments |= BAD[message]
    inputs = [arguments.pop(name) for name in "qkv"]
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(*inputs, **arguments)


@pytest.mark.parametrize("implementation", ["pallas", "cudnn"])
def test_a_kernel_for_another_platform_says_so(implementation):
    with pytest.raises(NotImplementedError, match="cpu; see compiling_for"):
        attention(*arrays(keys=T), implementation=implementation)


def test_default_follows_compiling_for(monkeypatch):
    """None takes the platform's kernel where it can, xla where it cannot, also when retraced."""
    used = []

    def kernel(q, k, v, *_):
        used.append("pallas")
        return jnp.zeros_like(q)

    monkeypatch.setattr(pallas_tpu, "attention_pallas", kernel)
    function = jax.jit(attention)
    inputs = arrays(keys=T)
    function(*inputs)
    assert used == []
    with compiling_for("tpu"):
        function(*inputs)
        assert used == ["pallas"]
        attention(*inputs, kv_lengths=jnp.array([3, 4]))
        assert used == ["pallas"]
    function(*inputs)
    assert used == ["pallas"]
