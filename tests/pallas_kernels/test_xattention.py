"""Scores, selection, calibration and the whole of XAttention, against golden values."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_sparse import block_sparse_attention, block_sparse_attention_reference
from pallas_kernels.block_sparse.xla import Spec, forward
from pallas_kernels.xattention import (
    antidiagonal_block_scores,
    calibrate_coverage,
    select_blocks,
    xattention,
)
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
    scores = SCORES[implementation](
        ours(golden["q"]),
        ours(golden["k"]),
        block_size=block_size,
        stride=stride,
        causal=kind != "noncausal",
        pattern="diagonal" if kind == "slash" else "antidiagonal",
    )
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, golden[f"{key}_sums"], rtol=0, atol=2e-5)


@pytest.mark.parametrize(("name", "key"), MASKS, ids=["-".join(x) for x in MASKS])
def test_selection_from_golden_scores_is_exact(name, key):
    golden = FILES[name]
    block_size, _, kind = settings(key)
    stem = re.match(r"B\d+_S\d+_C\d+_[a-z]+", key).group(0)
    scores, threshold = golden[f"{stem}_sums"], threshold_of(name, key)
    arguments = dict(causal=kind != "noncausal", offset=offset_blocks(golden, block_size))
    chosen = select_blocks(jnp.asarray(scores), threshold, **arguments)
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
        out, log_sum_exp = forward(q, k, v, mask, None, None, spec)
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

    for name, got in zip("qkv", jax.jit(jax.grad(loss, (0, 1, 2)))(*inputs), strict=True):
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
    out, density = xattention(
        q, k, v, threshold=threshold, stride=stride, return_density=True, **arguments
    )
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
