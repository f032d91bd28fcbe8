"""Tiny models under each pattern against golden logits and gradients."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_llama import llama_params

from jaxlab.checkpoints.layout import hf_layout
from jaxlab.models import ModelConfig, Transformer, init_cache
from jaxlab.objectives import cross_entropy

GOLDEN = Path(__file__).parents[1] / "golden"
CONFIG = ModelConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
)
TOLERANCE = 1e-4  # float32 against float64


@pytest.fixture(scope="module")
def golden():
    data = load("sepllm/tiny_llama")
    return data, llama_params(tensors_of(data), CONFIG)


def load(name):
    with np.load(GOLDEN / f"{name}.npz") as data:
        return {key: data[key] for key in data.files}


def tensors_of(data, prefix="param:"):
    return {k.removeprefix(prefix): v for k, v in data.items() if k.startswith(prefix)}


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


def test_cca_logits_loss_and_gradients():
    data = load("cca/llama_tiny_s8_g4")
    config = ModelConfig(
        vocab_size=61,
        hidden_size=48,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        attention={"pattern": "cca", "group_size": 4, "window_size": 8},
    )
    params = llama_params(tensors_of(data), config)
    tokens = jnp.asarray(data["ids"])
    module = Transformer(config)

    @jax.jit
    def loss_and_gradients(params):
        def loss(params):
            logits = module.apply({"params": params}, tokens)
            return cross_entropy(logits[:, :-1], tokens[:, 1:])[0], logits

        return jax.value_and_grad(loss, has_aux=True)(params)

    (loss, logits), gradients = loss_and_gradients(params)
    np.testing.assert_allclose(logits, data["logits"], atol=2e-4)
    np.testing.assert_allclose(loss, data["loss"], atol=1e-5)
    stored = tensors_of(data, "grad:")
    expected = llama_params({k: stored.get(k, v) for k, v in tensors_of(data).items()}, config)
    checked = 0
    for entry in hf_layout(config):
        if entry.names[0].format(0) in stored:
            got, wanted = gradients, expected
            for key in entry.path:
                got, wanted = got[key], wanted[key]
            np.testing.assert_allclose(got, wanted, atol=1e-4, err_msg=str(entry.path))
            checked += 1
    assert checked == 5
    dense = Transformer(config.replace(attention={})).apply({"params": params}, tokens)
    np.testing.assert_allclose(dense, data["logits_full_attention"], atol=2e-4)


def test_shifted_keys_and_values_are_those_of_baichuan_m1():
    data = load("kv_shifting/baichuan_m1_tiny")
    config = ModelConfig(
        vocab_size=37,
        hidden_size=32,
        intermediate_size=40,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        rope_theta=100000.0,
        norm_eps=1e-6,
        kv_shift={},
    )
    tensors = tensors_of(data)
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn."
        packed = tensors.pop(f"{prefix}W_pack.weight")
        for name, rows in zip(("q", "k", "v"), np.split(packed, [32, 48]), strict=True):
            tensors[f"{prefix}{name}_proj.weight"] = rows
        for name, short in (("key_shift", "conv_k"), ("value_shift", "conv_v")):
            tensors[prefix + name] = tensors.pop(prefix + short).reshape(2, 2)
    head = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = head / (np.linalg.norm(head, axis=1, keepdims=True) + 1e-7)
    params = llama_params(tensors, config)
    module, tokens = Transformer(config), jnp.asarray(data["ids"])
    logits = module.apply({"params": params}, tokens)
    np.testing.assert_allclose(logits, data["logits"], atol=2e-4)
    # A prompt, then one token at a time: the raw key and value are what is remembered.
    cache, steps = init_cache(config, 2, 16), []
    extend = jax.jit(lambda c, t: module.apply({"params": params}, t, cache=c))
    prompt = int(data["prefill_length"])
    for start, stop in ((0, prompt), *((i, i + 1) for i in range(prompt, tokens.shape[1]))):
        part, cache = extend(cache, tokens[:, start:stop])
        steps.append(part)
    np.testing.assert_allclose(np.concatenate(steps, 1), data["logits"], atol=2e-4)
