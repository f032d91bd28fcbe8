"""Tiny models of every family, and GGUF files of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np

from jaxlab.checkpoints.layout import parameter_shapes
from jaxlab.models import ModelConfig

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 3,
    "num_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_kv_heads": 2},
    "llama-tied-biased": {
        "num_kv_heads": 1,
        "tie_word_embeddings": True,
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
    "llama-wide-heads": {"num_kv_heads": 2, "head_dim": 24},
    "mistral": {"architecture": "mistral", "num_kv_heads": 2, "sliding_window": 16},
    "qwen2": {
        "architecture": "qwen2",
        "num_kv_heads": 2,
        "qkv_bias": True,
        "tie_word_embeddings": True,
        "sliding_window": 16,
        "layer_types": ("full", "sliding", "sliding"),
    },
    "qwen3": {"architecture": "qwen3", "num_kv_heads": 2, "head_dim": 16, "qk_norm": True},
    "gemma2": {
        "architecture": "gemma2",
        "num_kv_heads": 2,
        "head_dim": 16,
        "activation": "gelu_tanh",
        "norm_unit_offset": True,
        "post_norms": True,
        "query_scale": 144**-0.5,
        "attention_softcap": 50.0,
        "final_softcap": 30.0,
        "embedding_scale": 32**0.5,
        "sliding_window": 16,
        "layer_types": ("sliding", "full", "sliding"),
        "tie_word_embeddings": True,
    },
    "gpt_neox": {
        "architecture": "gpt_neox",
        "rotary_fraction": 0.25,
        "norm": "layernorm",
        "parallel_residual": True,
        "activation": "gelu",
        "gated_mlp": False,
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
    "gpt_neox-sequential": {
        "architecture": "gpt_neox",
        "rotary_fraction": 0.5,
        "norm": "layernorm",
        "activation": "gelu",
        "gated_mlp": False,
        "mlp_bias": True,
    },
}
FAMILIES = tuple(_FAMILIES)


def tiny_config(family: str, **changes: Any) -> ModelConfig:
    return ModelConfig(**{**_SIZES, **_FAMILIES[family], **changes})


def random_params(config: ModelConfig, seed: int = 0, dtype: str = "float32") -> dict[str, Any]:
    """A parameter tree of `config` in which no two numbers are alike."""
    generator = np.random.default_rng(seed)
    params: dict[str, Any] = {}
    for path, shape in parameter_shapes(config).items():
        if path[0] == "layers":
            shape = (config.num_layers, *shape)
        node = params
        for key in path[:-1]:
            node = node.setdefault(key, {})
        value = generator.normal(size=shape) * 0.1 + (path[-1] == "scale")
        node[path[-1]] = jax.numpy.asarray(value, dtype)
    return params


def assert_same_trees(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
    ):
        assert x.dtype == y.dtype, path
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=str(path))


_GGUF_TENSORS = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "attention_norm": "attn_norm",
    "attention_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
}


def write_gguf(
    path: Path,
    config: ModelConfig,
    params: dict[str, Any],
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: dict[str, np.ndarray] | None = None,
    metadata: Any = None,
) -> None:
    """Write a model as llama.cpp's converter does. `metadata(writer)` may add keys."""
    arch = config.architecture
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if metadata is not None:
        metadata(writer)

    def add(name: str, value: np.ndarray) -> None:
        value = np.ascontiguousarray(value, np.float32)
        kind = quantisation if value.ndim == 2 else gguf.GGMLQuantizationType.F32
        if kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)

    add("token_embd.weight", np.asarray(params["embed"]["embedding"]))
    offset = 1.0 if config.norm_unit_offset else 0.0
    add("output_norm.weight", np.asarray(params["final_norm"]["scale"]) + offset)
    if "lm_head" in params:
        add("output.weight", np.asarray(params["lm_head"]["kernel"]).T)
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params["layers"]):
        names = [key.key for key in keys]
        suffix = "bias" if names[-1] == "bias" else "weight"
        for layer in range(config.num_layers):
            value = np.asarray(leaf[layer])
            if names[-1] == "scale":
                value = value + offset
            elif names[-2] in ("q_proj", "k_proj"):
                if arch == "llama":
                    # Channels i and i + Dh / 2 become neighbours.
                    *_, dim = value.shape
                    value = value.reshape(*value.shape[:-1], 2, dim // 2).swapaxes(-1, -2)
                    value = value.reshape(*value.shape[:-2], dim)
                value = value.reshape(-1) if suffix == "bias" else value.reshape(len(value), -1).T
            elif names[-2] == "v_proj":
                value = value.reshape(-1) if suffix == "bias" else value.reshape(len(value), -1).T
            elif suffix == "weight":
                value = value.reshape(-1, value.shape[-1]).T
            add(f"blk.{layer}.{_GGUF_TENSORS[names[-2]]}.{suffix}", value)
    for name, value in (extra or {}).items():
        add(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
