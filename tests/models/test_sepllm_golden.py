"""A tiny Llama under SepLLM, masked and streaming, against golden logits."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_llama import llama_params

from jaxlab.models import ModelConfig, Transformer, init_cache

GOLDEN = Path(__file__).parents[1] / "golden" / "sepllm" / "tiny_llama.npz"
CONFIG = ModelConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    norm_eps=1e-6,
)
TOLERANCE = 1e-4  # float32 against float64


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as data:
        data = {key: data[key] for key in data.files}
    tensors = {k.removeprefix("param:"): v for k, v in data.items() if k.startswith("param:")}
    return data, llama_params(tensors, CONFIG)


def sepllm(data, **changes):
    ids = tuple(int(i) for i in data["separator_ids"])
    return {
        "pattern": "sepllm",
        "initial_tokens": int(data["a"]),
        "window": int(data["n"]),
        "separators": ids,
    } | changes


def test_masked_logits(golden):
    data, params = golden
    tokens = jnp.asarray(data["ids"][None])
    window = int(data["n"])
    for name, attention in (
        ("logits_full", {}),
        ("logits_sepllm", sepllm(data)),
        ("logits_sepllm_first_last_full", sepllm(data, window=["full", window, "full"])),
    ):
        module = Transformer(CONFIG.replace(attention=attention))
        logits = module.apply({"params": params}, tokens)
        np.testing.assert_allclose(logits[0], data[name], atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize("name", ["logits_stream_shift", "logits_streamingllm_shift"])
@pytest.mark.parametrize("width", [1, 18])
def test_streaming_logits(golden, name, width):
    data, params = golden
    a, s, w, c = (int(x) for x in data["stream_cfg"])
    stream = {"positions": "cache", "initial_tokens": a, "local_window": w, "capacity": c}
    if name == "logits_streamingllm_shift":
        stream |= {"separators": "none", "local_window": c - a}
    else:
        stream |= {"separator_capacity": s}
    config = CONFIG.replace(attention=sepllm(data, **stream))
    module = Transformer(config)
    extend = jax.jit(lambda c, t: module.apply({"params": params}, t, cache=c))
    cache, logits = init_cache(config, 1, 1), []
    for start in range(0, 90, width):
        part, cache = extend(cache, jnp.asarray(data["ids"][None, start : start + width]))
        logits.append(part[0])
    np.testing.assert_allclose(np.concatenate(logits), data[name], atol=TOLERANCE)
