"""Scores, selection, calibration and the whole of XAttention: golden values, then properties."""

import functools
import json
import re
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_inputs import arrays, quick_jit

from pallas_kernels.attention import attention_reference
from pallas_kernels.block_sparse import block_sparse_attention, block_sparse_attention_reference
from pallas_kernels.block_sparse.xla import Spec, forward
from pallas_kernels.xattention import (
    antidiagonal_block_scores,
    calibrate_coverage,
    calibrate_dp,
    select_blocks,
    xattention,
)
from pallas_kernels.xattention import xla as scores_xla
from pallas_kernels.xattention.reference import (
    antidiagonal_block_scores_reference,
    select_blocks_reference,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "xattention"
FILES = {name: dict(np.load(GOLDEN / f"{name}.npz")) for name in ("long", "odd_length")} | {
    name: dict(np.load(GOLDEN / f"{name}.npz")) for name in ("chunked_prefill", "gqa_batch")
}
SCORES = {"reference": antidiagonal_block_scores_reference, "xla": antidiagonal_block_scores}
SUMS = [(name, key[: -len("_sums")]) for name in FILES for key in FILES[name] if "_sums" in key]
MASKS = [(name, key) for name in FILES for key in FILES[name] if key.endswith("_clean")]
MASKS = [(name, key) for name, key in MASKS if not key.startswith(("out_", "lse_"))]
OUTPUTS = [(name, key) for name in FILES for key in FILES[name] if key.startswith("out_")]


def ours(x, dtype=jnp.float32):
    """`[batch, heads, time, dim]` to `[batch, time, heads, dim]`."""
    return jnp.asarray(np.asarray(x, np.float32).swapaxes(1, 2), dtype)


def settings(key):
    """Block size, stride and the kind of a golden key, `B32_S8_C1024_causal…`."""
    block, stride, kind = re.match(r"B(\d+)_S(\d+)_C\d+_([a-z]+)", key).groups()
    return int(block), int(stride), kind


def threshold_of(name, key):
    if "per_head" in key:
        return FILES[name]["per_head_threshold"]
    return float(re.search(r"_t([\d.]+)_", key).group(1))


def offset_blocks(golden, block_size):
    return (golden["k"].shape[2] - golden["q"].shape[2]) // block_size


@pytest.mark.parametrize("implementation", SCORES)
@pytest.mark.parametrize(("name", "key"), SUMS, ids=["-".join(x) for x in SUMS])
def test_scores_are_golden(implementation, name, key):
    golden = FILES[name]
    block_size, stride, kind = settings(key)
    function = functools.partial(
        SCORES[implementation],
        block_size=block_size,
        stride=stride,
        causal=kind != "noncausal",
        pattern="diagonal" if kind == "slash" else "antidiagonal",
    )
    scores = quick_jit(function)(ours(golden["q"]), ours(golden["k"]))
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, golden[f"{key}_sums"], rtol=0, atol=2e-5)


@pytest.mark.parametrize(("name", "key"), MASKS, ids=["-".join(x) for x in MASKS])
def test_selection_from_golden_scores_is_exact(name, key):
    golden = FILES[name]
    block_size, _, kind = settings(key)
    stem = re.match(r"B\d+_S\d+_C\d+_[a-z]+", key).group(0)
    scores, threshold = golden[f"{stem}_sums"], threshold_of(name, key)
    arguments = dict(causal=kind != "noncausal", offset=offset_blocks(golden, block_size))
    chosen = quick_jit(functools.partial(select_blocks, **arguments))(scores, threshold)
    np.testing.assert_array_equal(chosen, golden[key])
    np.testing.assert_array_equal(
        select_blocks_reference(scores, threshold, **arguments), golden[key]
    )


def test_tiny_case_in_every_step():
    tiny = json.loads((GOLDEN / "tiny.json").read_text())
    q, k = (jnp.asarray(tiny[name], jnp.float32)[None, :, None] for name in "qk")
    arguments = dict(block_size=tiny["block_size"], stride=tiny["stride"])
    for function in SCORES.values():
        scores = function(q, k, **arguments)
        np.testing.assert_allclose(scores[0, 0], tiny["block_sums"], atol=2e-5)
    sums = jnp.asarray(tiny["block_sums"], jnp.float32)[None, None]
    for threshold, masks in tiny["masks"].items():
        chosen = select_blocks(sums, float(threshold))
        np.testing.assert_array_equal(chosen[0, 0], np.asarray(masks["clean"], bool))


def golden_mask(name, key):
    """The mask, settings and arguments that an `out_` entry was made with."""
    golden = FILES[name]
    block, stride, rest = re.match(r"out_B(\d+)_S(\d+)_(.*)", key).groups()
    causal = "noncausal" not in rest
    rest = rest.replace("_noncausal", "")
    kind = "causal" if causal else "noncausal"
    [mask] = (
        golden[other]
        for other in golden
        if re.fullmatch(rf"B{block}_S{stride}_C\d+_{kind}_{rest}", other)
    )
    return jnp.asarray(mask), dict(block_size=int(block), causal=causal)


@pytest.mark.parametrize(("name", "key"), OUTPUTS, ids=["-".join(x) for x in OUTPUTS])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_sparse_attention_is_golden(implementation, name, key):
    golden = FILES[name]
    q, k, v = (ours(golden[x]) for x in "qkv")
    mask, arguments = golden_mask(name, key)
    if implementation == "reference":
        out, log_sum_exp = block_sparse_attention_reference(q, k, v, mask, **arguments)
    else:
        spec = Spec(**arguments, scale=q.shape[3] ** -0.5, logit_softcap=None)
        offset = k.shape[1] - q.shape[1]
        function = functools.partial(
            forward, lengths=None, segment_ids=None, offset=offset, spec=spec
        )
        out, log_sum_exp = quick_jit(function)(q, k, v, mask)
    np.testing.assert_allclose(out, ours(golden[key]), rtol=0, atol=2e-5)
    lse = key.replace("out_", "lse_")
    if lse in golden:
        np.testing.assert_allclose(log_sum_exp, golden[lse], rtol=0, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_gradients_are_golden(implementation):
    golden = FILES["gqa_batch"]
    inputs = [ours(golden[x]) for x in "qkv"]
    [key] = (key for key in golden if key.startswith("out_"))
    mask, arguments = golden_mask("gqa_batch", key)

    def loss(q, k, v):
        if implementation == "reference":
            out = block_sparse_attention_reference(q, k, v, mask, **arguments)[0]
        else:
            out = block_sparse_attention(q, k, v, mask, **arguments)
        return jnp.sum(out * ours(golden["do"]))

    for name, got in zip("qkv", quick_jit(jax.grad(loss, (0, 1, 2)))(*inputs), strict=True):
        expected = ours(golden[f"d{name}"])
        scale = float(jnp.abs(expected).max())
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("name", "key"), OUTPUTS, ids=["-".join(x) for x in OUTPUTS])
def test_end_to_end_is_golden(name, key, dtype):
    golden = FILES[name]
    q, k, v = (ours(golden[x], dtype) for x in "qkv")
    mask, arguments = golden_mask(name, key)
    stride = int(re.search(r"_S(\d+)_", key).group(1))
    threshold = float(re.search(r"_t([\d.]+)_", key).group(1))
    function = functools.partial(xattention, stride=stride, return_density=True, **arguments)
    out, density = quick_jit(function)(q, k, v, threshold=threshold)
    assert out.dtype == dtype
    if dtype == jnp.float32:
        np.testing.assert_allclose(out, ours(golden[key]), rtol=0, atol=2e-5)
        block_size = arguments["block_size"]
        allowed = np.ones(mask.shape[2:], bool)
        if arguments["causal"]:
            allowed = np.tril(allowed, offset_blocks(golden, block_size))
        expected = np.asarray(mask).sum((2, 3)) / allowed.sum()
        np.testing.assert_allclose(density, expected, rtol=1e-6)
    else:
        # Rounding the inputs may move single blocks across the threshold, so compare on average.
        error = jnp.abs(out.astype(jnp.float32) - ours(golden[key]))
        assert float(error.mean()) < 1e-2


def test_coverage_thresholds_are_golden():
    golden = np.load(GOLDEN / "profile_threshold.npz")
    q, k = (ours(FILES["long"][x]) for x in "qk")
    for stride in (4, 8):
        got = calibrate_coverage(q, k, block_size=128, stride=stride)
        np.testing.assert_allclose(got, golden[f"B128_S{stride}"], rtol=0, atol=1e-4)


# -- properties ------------------------------------------------------------------------------------

BLOCK, STRIDE, TIME = 16, 4, 90  # six blocks, the last one short


def keys_of_few_blocks(seed=0, batch=2, time=TIME, heads=4, kv_heads=2, dim=16):
    """Inputs whose attention is uneven enough that blocks are left out."""
    q, k, v = arrays(batch, time, time, heads, kv_heads, dim, seed=seed)
    return 1.5 * q, 1.5 * k, v


@functools.cache
def sparse(**static):
    """One compiled function of data for all examples with the same static arguments."""
    arguments = dict(block_size=BLOCK, stride=STRIDE) | static
    return quick_jit(functools.partial(xattention, **arguments))


def test_threshold_one_is_dense():
    q, k, v = keys_of_few_blocks()
    out, density = sparse(return_density=True)(q, k, v, threshold=1.0)
    np.testing.assert_allclose(out, attention_reference(q, k, v), rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(density, 1.0)


def test_threshold_zero_is_sink_and_own_block():
    q, k, v = keys_of_few_blocks()
    out, density = sparse(return_density=True)(q, k, v, threshold=0.0)
    mask = np.broadcast_to(np.eye(6, dtype=bool) | (np.arange(6) == 0), (2, 4, 6, 6))
    expected, _ = block_sparse_attention_reference(q, k, v, jnp.asarray(mask), block_size=BLOCK)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(density, 11 / 21, rtol=1e-6)


def test_gradients_are_those_of_the_chosen_blocks():
    q, k, v = keys_of_few_blocks()
    scores = antidiagonal_block_scores(q, k, block_size=BLOCK, stride=STRIDE)
    mask = select_blocks(scores, 0.7)
    assert not np.asarray(mask)[..., *np.tril_indices(6)].all()

    def loss(q, k, v):
        return jnp.sum(jnp.sin(xattention(q, k, v, threshold=0.7, block_size=BLOCK, stride=STRIDE)))

    def expected(q, k, v):
        out, _ = block_sparse_attention_reference(q, k, v, mask, block_size=BLOCK)
        return jnp.sum(jnp.sin(out))

    got = quick_jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    for a, b in zip(got, quick_jit(jax.grad(expected, (0, 1, 2)))(q, k, v), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


@functools.cache
def expected_alone(length):
    """Output and chosen blocks of one row of so many tokens, by the references."""

    def scores(q, k):
        return antidiagonal_block_scores_reference(q, k, block_size=BLOCK, stride=STRIDE)

    def out(q, k, v, mask):
        return block_sparse_attention_reference(q, k, v, mask, block_size=BLOCK)[0]

    scores, out = quick_jit(scores), quick_jit(out)

    def function(q, k, v, threshold):
        mask = select_blocks_reference(np.asarray(scores(q, k)), threshold)
        return out(q, k, v, mask), mask

    return function


@hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
@hypothesis.given(
    lengths=st.tuples(*[st.sampled_from([0, 1, 53, 64, TIME])] * 2),
    threshold=st.sampled_from([0.3, 0.6, 0.9]),
    seed=st.integers(0, 100),
)
def test_each_row_of_a_batch_is_as_if_alone(lengths, threshold, seed):
    """Without padding, in a batch of other rows, and whatever the padding holds."""
    inputs = [np.array(x) for x in keys_of_few_blocks(seed)]
    for x in inputs:
        for row, length in zip(x, lengths, strict=True):
            row[length:] = 50.0
    out, density = sparse(return_density=True)(
        *(jnp.asarray(x) for x in inputs), threshold=threshold, lengths=jnp.array(lengths)
    )
    out = np.asarray(out)
    for b, length in enumerate(lengths):
        np.testing.assert_array_equal(out[b, length:], 0.0)
        if length:
            row = [jnp.asarray(x[b : b + 1, :length]) for x in inputs]
            expected, mask = expected_alone(length)(*row, threshold)
            np.testing.assert_allclose(out[b, :length], expected[0], rtol=2e-5, atol=2e-5)
            blocks = mask.shape[2]
            share = mask.sum((2, 3)) / (blocks * (blocks + 1) / 2)
            np.testing.assert_allclose(density[b], share[0], rtol=1e-6)


def test_lengths_without_a_causal_mask():
    """Padding takes no part in the softmax over tiles."""
    q, k, _ = keys_of_few_blocks()
    arguments = dict(block_size=BLOCK, stride=STRIDE, causal=False)
    padded = antidiagonal_block_scores(q, k, lengths=jnp.array([53, 90]), **arguments)
    for b, length in enumerate((53, 90)):
        alone = antidiagonal_block_scores(q[b : b + 1, :length], k[b : b + 1, :length], **arguments)
        blocks = alone.shape[2]
        np.testing.assert_allclose(padded[b, :, :blocks, :blocks], alone[0], atol=1e-5)
        np.testing.assert_array_equal(padded[b, :, blocks:], 0.0)
        np.testing.assert_array_equal(padded[b, :, :, blocks:], 0.0)


def test_scores_chunk_by_chunk(monkeypatch):
    """Chunks of two blocks, with lengths and segments: as the reference."""
    monkeypatch.setattr(scores_xla, "CHUNK_TILES", (2 * BLOCK // STRIDE,))
    q, k, _ = keys_of_few_blocks(time=234)
    arguments = dict(
        block_size=BLOCK,
        stride=STRIDE,
        lengths=jnp.array([100, 234]),
        segment_ids=jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 4, (2, 234)))),
    )
    for chunk in (q, q[:, 4 * BLOCK :]):
        got, expected = (
            quick_jit(functools.partial(function, **arguments))(chunk, k)
            for function in SCORES.values()
        )
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)


@hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
@hypothesis.given(changed=st.integers(0, TIME - 1), seed=st.integers(0, 50))
def test_the_future_changes_nothing(changed, seed):
    """Neither attention nor choice of earlier tiles depends on a later token."""
    q, k, v = keys_of_few_blocks(seed)
    before = sparse()(q, k, v, threshold=0.6)
    later = [x.at[:, changed].add(2.0) for x in (q, k, v)]
    # A tile is scored as a whole and a block chosen as one, so the block of the token may change.
    whole = changed // BLOCK * BLOCK
    after = sparse()(*later, threshold=0.6)
    np.testing.assert_array_equal(before[:, :whole], after[:, :whole])
    assert bool((before[:, changed] != after[:, changed]).all())


def test_prefill_in_chunks_is_prefill_at_once():
    q, k, v = keys_of_few_blocks()
    whole = sparse()(q, k, v, threshold=0.7)
    for start, end in ((0, 32), (32, 80), (80, 90)):
        chunk = sparse()(q[:, start:end], k[:, :end], v[:, :end], threshold=0.7)
        np.testing.assert_allclose(chunk, whole[:, start:end], rtol=2e-5, atol=2e-5)


def test_packed_rows_are_as_if_separate():
    """Segments that begin at blocks: each has its own sink."""
    q, k, v = keys_of_few_blocks()
    ids = jnp.broadcast_to(jnp.repeat(jnp.array([1, 2]), jnp.array([48, 42])), (2, TIME))
    packed = sparse()(q, k, v, threshold=0.5, segment_ids=ids)
    for part in (slice(0, 48), slice(48, TIME)):
        alone = sparse()(q[:, part], k[:, part], v[:, part], threshold=0.5)
        np.testing.assert_allclose(packed[:, part], alone, rtol=2e-5, atol=2e-5)


def test_the_tail_is_dense():
    q, k, v = keys_of_few_blocks()
    lengths = jnp.array([53, 90])
    out = sparse(dense_tail_tokens=10)(q, k, v, threshold=0.0, lengths=lengths)
    plain = sparse()(q, k, v, threshold=0.0, lengths=lengths)
    expected = attention_reference(q, k, v, kv_lengths=lengths)
    # The tail begins at 43 and 80, in the blocks that begin at 32 and 80.
    for row, start, end in ((0, 32, 53), (1, 80, 90)):
        np.testing.assert_allclose(out[row, start:end], expected[row, start:end], atol=2e-5)
        np.testing.assert_array_equal(out[row, :start], plain[row, :start])


def test_thresholds_a_head_may_be_traced():
    q, k, v = keys_of_few_blocks()
    shares = jnp.array([0.0, 0.5, 0.9, 1.0])
    together = sparse()(q, k, v, threshold=shares)
    for head, share in enumerate(shares):
        one = sparse()(q, k, v, threshold=jnp.full(4, share))
        np.testing.assert_allclose(together[:, :, head], one[:, :, head], atol=1e-6)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(
    seed=st.integers(0, 10**6),
    threshold=st.sampled_from([0.0, 0.25, 0.5, 0.9, 0.99, 1.0]),
    causal=st.booleans(),
    offset=st.integers(0, 3),
    levels=st.sampled_from([1, 2, 5, 1000]),
)
def test_selection_follows_its_definition(seed, threshold, causal, offset, levels):
    """With ties and zeros too: scores are small whole numbers, so sums are exact."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, levels + 1, (1, 2, 5, 8)).astype(np.float32)
    if causal:
        scores *= np.arange(8) <= np.arange(5)[:, None] + offset
    arguments = dict(causal=causal, offset=offset)
    chosen = np.asarray(select_blocks(scores, threshold, **arguments))
    np.testing.assert_array_equal(chosen, select_blocks_reference(scores, threshold, **arguments))
    assert chosen.any(-1).all()
    kept = np.sum(scores, axis=-1, where=chosen)
    assert (kept >= np.float32(threshold) * scores.sum(-1)).all()


def test_forced_blocks_can_be_left_out():
    scores = jnp.asarray([[1.0, 0.0, 0.0], [1.0, 3.0, 0.0], [1.0, 5.0, 2.0]])[None, None]
    free = select_blocks(scores, 0.5, keep_sink=False, keep_diagonal=False)[0, 0]
    np.testing.assert_array_equal(free, [[1, 0, 0], [0, 1, 0], [0, 1, 0]])
    empty = select_blocks(scores, 0.0, keep_sink=False, keep_diagonal=False)[0, 0]
    np.testing.assert_array_equal(empty, [[1, 0, 0], [0, 1, 0], [0, 1, 0]])
    sink = select_blocks(scores, 0.0, keep_diagonal=False)[0, 0]
    np.testing.assert_array_equal(sink, [[1, 0, 0], [1, 0, 0], [1, 0, 0]])


def test_memory_of_scoring_is_linear_in_the_sequence():
    def compiled(time):
        x = jax.ShapeDtypeStruct((1, time, 2, 64), jnp.float32)
        function = functools.partial(antidiagonal_block_scores, stride=8)
        return jax.jit(function).lower(x, x).compile()

    temporary = [compiled(time).memory_analysis().temp_size_in_bytes for time in (8192, 16384)]
    # The whole map of tiles would be 33.6 MB at 16,384 tokens, and four times that of 8,192.
    assert temporary[1] < 2.5 * temporary[0]


def test_calibration_by_dynamic_programming_is_its_recursion():
    """Against the table of section 2.3 filled in cell by cell, for an objective of three heads."""
    weights = np.array([3.0, -1.0, 2.0])

    def objective(thresholds):
        return float(-np.sum(weights * (0.9 - thresholds)))

    start = np.full(3, 0.9)
    best = {(0, 0): (objective(start), start)}
    for head in range(1, 4):
        for m in range(head + 1):
            candidates = []
            if (head - 1, m) in best:
                candidates.append(best[head - 1, m])
            if (head - 1, m - 1) in best:
                reduced = best[head - 1, m - 1][1].copy()
                reduced[head - 1] *= 0.9
                candidates.append((objective(reduced), reduced))
            best[head, m] = max(candidates, key=lambda x: x[0])
    table = calibrate_dp(objective, start, reductions=4)
    for m in range(4):
        assert table.performance[m] == best[3, m][0]
        np.testing.assert_array_equal(table.thresholds[m], best[3, m][1])
    assert table.performance[4] == -np.inf  # four reductions of three heads cannot be made
    np.testing.assert_array_equal(table.thresholds[1], [0.9, 0.81, 0.9])  # the head that gains


BAD = {
    "stride=5: must be a positive int that divides block_size=16": dict(stride=5),
    "stride=0": dict(stride=0),
    "threshold=1.5": dict(threshold=1.5),
    "threshold=-0.1": dict(threshold=-0.1),
    "threshold=nan": dict(threshold=float("nan")),
    "threshold has shape (2, 3, 4)": dict(threshold=np.full((2, 3, 4), 0.5)),
    "threshold has shape (3,)": dict(threshold=np.full(3, 0.5)),
    "query has 91 tokens and key 90": dict(query=jnp.ones((2, 91, 4, 16))),
    "position 5, which must be a multiple of block_size=16": dict(query=jnp.ones((2, 85, 4, 16))),
    "query has 1 values that are NaN or infinite": dict(
        query=jnp.ones((2, 90, 4, 16)).at[1, 2, 3, 4].set(jnp.nan)
    ),
    "key has 1 values that are NaN or infinite": dict(
        key=jnp.ones((2, 90, 2, 16)).at[1, 2, 1, 4].set(jnp.inf)
    ),
    "block_size=0": dict(block_size=0),
    "dense_tail_tokens=-1": dict(dense_tail_tokens=-1),
    "pattern='slash'": dict(pattern="slash"),
    "lengths=[91, 3]": dict(lengths=np.array([91, 3])),
    "implementation='cuda'": dict(implementation="cuda"),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    arguments = dict(
        query=jnp.ones((2, 90, 4, 16)),
        key=jnp.ones((2, 90, 2, 16)),
        value=jnp.ones((2, 90, 2, 16)),
        threshold=0.9,
        block_size=BLOCK,
        stride=STRIDE,
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        xattention(**arguments | BAD[message])


@pytest.mark.parametrize(
    ("message", "function"),
    [
        ("scores has shape (3, 3)", lambda: select_blocks(jnp.ones((3, 3)), 0.5)),
        ("counted in blocks", lambda: select_blocks(jnp.ones((1, 1, 4, 12)), 0.5, offset=1024)),
        ("coverage=0", lambda: calibrate_coverage(*arrays()[:2], coverage=0.0)),
        ("calibration needs whole rows", lambda: calibrate_coverage(*arrays()[:2])),
        ("start has shape (2, 3)", lambda: calibrate_dp(max, np.ones((2, 3)), reductions=1)),
        ("thresholds must be between", lambda: calibrate_dp(max, np.full(2, 2.0), reductions=1)),
        ("reductions=0", lambda: calibrate_dp(max, np.ones(2), reductions=0)),
        ("factor=1", lambda: calibrate_dp(max, np.ones(2), reductions=1, factor=1.0)),
        (
            "objective returned NaN",
            lambda: calibrate_dp(lambda x: float("nan"), np.ones(2), reductions=1),
        ),
    ],
)
def test_other_bad_arguments_are_named(message, function):
    with pytest.raises(ValueError, match=re.escape(message)):
        function()


def test_a_kernel_there_is_not_says_so():
    with pytest.raises(NotImplementedError, match="choose 'xla' or None"):
        xattention(*keys_of_few_blocks(), threshold=0.9, implementation="pallas")


def test_a_chunk_against_a_cache_that_is_not_full():
    """Its position may be traced, so that one program serves every chunk of a prompt."""
    keys = jax.random.split(jax.random.key(0), 3)
    q = 6 * jax.random.normal(keys[0], (2, 96, 4, 16))
    k, v = (6 * jax.random.normal(key, (2, 96, 2, 16)) for key in keys[1:])
    options = dict(threshold=0.6, block_size=16, stride=4)
    whole, density = xattention(q, k, v, return_density=True, **options)
    assert float(density.max()) < 1
    stale = [jnp.pad(x, ((0, 0), (0, 64), (0, 0), (0, 0)), constant_values=9.0) for x in (k, v)]

    @jax.jit
    def chunk(query, offset):
        lengths = jnp.full((2,), offset + 32)
        return xattention(query, *stale, lengths=lengths, query_offset=offset, **options)

    for start in (0, 32, 64):
        part = chunk(q[:, start : start + 32], jnp.int32(start))
        np.testing.assert_allclose(part, whole[:, start : start + 32], atol=2e-5)
    with pytest.raises(ValueError, match="query_offset=8: must be a multiple of block_size=16"):
        xattention(q, k, v, query_offset=8, **options)
