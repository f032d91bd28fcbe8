"""Where each parameter of the tree lies in a checkpoint file, and in which orientation.

One table serves both directions and both formats: Hugging Face and GGUF store the same matrices
`[out, in]` under other names.
"""

from __future__ import annotations

import numpy as np

from jaxlab.checkpoints.stored_parameter import Path, StoredParameter, stored_parameter
from jaxlab.checkpoints.xlstm_layout import xlstm_layout
from jaxlab.models.config import ModelConfig
from jaxlab.models.families import AnyModelConfig
from jaxlab.models.xlstm.config import XLSTMConfig

SHIFT_NAMES = ("key_shift", "value_shift")


_HF_NAMES: dict[Path, str] = {
    ("embed", "embedding"): "model.embed_tokens.weight",
    ("final_norm", "scale"): "model.norm.weight",
    ("lm_head", "kernel"): "lm_head.weight",
    ("lm_head", "bias"): "lm_head.bias",
    ("layers", "attention_norm", "scale"): "model.layers.{}.input_layernorm.weight",
    ("layers", "mlp_norm", "scale"): "model.layers.{}.post_attention_layernorm.weight",
    ("layers", "attention", "q_norm", "scale"): "model.layers.{}.self_attn.q_norm.weight",
    ("layers", "attention", "k_norm", "scale"): "model.layers.{}.self_attn.k_norm.weight",
}
for _projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
    for _leaf, _suffix in (("kernel", "weight"), ("bias", "bias")):
        _HF_NAMES["layers", "attention", _projection, _leaf] = (
            f"model.layers.{{}}.self_attn.{_projection}.{_suffix}"
        )
for _name in SHIFT_NAMES:  # ours: transformers has no such model, and leaves them aside
    _HF_NAMES["layers", "attention", _name] = f"model.layers.{{}}.self_attn.{_name}"
for _projection in ("gate_proj", "up_proj", "down_proj"):
    for _leaf, _suffix in (("kernel", "weight"), ("bias", "bias")):
        _HF_NAMES["layers", "mlp", _projection, _leaf] = (
            f"model.layers.{{}}.mlp.{_projection}.{_suffix}"
        )

_GEMMA2_NAMES = _HF_NAMES | {
    ("layers", "attention_post_norm", "scale"): "model.layers.{}.post_attention_layernorm.weight",
    ("layers", "mlp_norm", "scale"): "model.layers.{}.pre_feedforward_layernorm.weight",
    ("layers", "mlp_post_norm", "scale"): "model.layers.{}.post_feedforward_layernorm.weight",
}

_GPT_NEOX_NAMES: dict[Path, str] = {
    ("embed", "embedding"): "gpt_neox.embed_in.weight",
    ("lm_head", "kernel"): "embed_out.weight",
    ("lm_head", "bias"): "embed_out.bias",
    ("final_norm", "scale"): "gpt_neox.final_layer_norm.weight",
    ("final_norm", "bias"): "gpt_neox.final_layer_norm.bias",
}
for _leaf, _suffix in (("kernel", "weight"), ("bias", "bias")):
    for _projection in ("q_proj", "k_proj", "v_proj"):
        _GPT_NEOX_NAMES["layers", "attention", _projection, _leaf] = (
            f"gpt_neox.layers.{{}}.attention.query_key_value.{_suffix}"
        )
    _GPT_NEOX_NAMES["layers", "attention", "o_proj", _leaf] = (
        f"gpt_neox.layers.{{}}.attention.dense.{_suffix}"
    )
    _GPT_NEOX_NAMES["layers", "mlp", "up_proj", _leaf] = (
        f"gpt_neox.layers.{{}}.mlp.dense_h_to_4h.{_suffix}"
    )
    _GPT_NEOX_NAMES["layers", "mlp", "down_proj", _leaf] = (
        f"gpt_neox.layers.{{}}.mlp.dense_4h_to_h.{_suffix}"
    )
for _name in SHIFT_NAMES:
    _GPT_NEOX_NAMES["layers", "attention", _name] = f"gpt_neox.layers.{{}}.attention.{_name}"
for _leaf, _suffix in (("scale", "weight"), ("bias", "bias")):
    _GPT_NEOX_NAMES["layers", "attention_norm", _leaf] = (
        f"gpt_neox.layers.{{}}.input_layernorm.{_suffix}"
    )
    _GPT_NEOX_NAMES["layers", "mlp_norm", _leaf] = (
        f"gpt_neox.layers.{{}}.post_attention_layernorm.{_suffix}"
    )

_GGUF_NAMES: dict[Path, str] = {
    ("embed", "embedding"): "token_embd.weight",
    ("final_norm", "scale"): "output_norm.weight",
    ("lm_head", "kernel"): "output.weight",
    ("layers", "attention_norm", "scale"): "blk.{}.attn_norm.weight",
    ("layers", "attention_post_norm", "scale"): "blk.{}.post_attention_norm.weight",
    ("layers", "mlp_norm", "scale"): "blk.{}.ffn_norm.weight",
    ("layers", "mlp_post_norm", "scale"): "blk.{}.post_ffw_norm.weight",
    ("layers", "attention", "q_norm", "scale"): "blk.{}.attn_q_norm.weight",
    ("layers", "attention", "k_norm", "scale"): "blk.{}.attn_k_norm.weight",
}
for _leaf, _suffix in (("kernel", "weight"), ("bias", "bias")):
    for _group, _projection, _name in (
        ("attention", "q_proj", "attn_q"),
        ("attention", "k_proj", "attn_k"),
        ("attention", "v_proj", "attn_v"),
        ("attention", "o_proj", "attn_output"),
        ("mlp", "gate_proj", "ffn_gate"),
        ("mlp", "up_proj", "ffn_up"),
        ("mlp", "down_proj", "ffn_down"),
    ):
        _GGUF_NAMES["layers", _group, _projection, _leaf] = f"blk.{{}}.{_name}.{_suffix}"


for _name in SHIFT_NAMES:
    _GGUF_NAMES["layers", "attention", _name] = f"blk.{{}}.attn_{_name}"


def parameter_shapes(config: ModelConfig) -> dict[Path, tuple[int, ...]]:
    """Shape of every parameter, without the layer axis, in the order files keep them in."""
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    layernorm = config.norm == "layernorm"
    shapes: dict[Path, tuple[int, ...]] = {("embed", "embedding"): (vocab, hidden)}

    def norm(*path: str) -> None:
        shapes[*path, "scale"] = (hidden,)
        if layernorm:
            shapes[*path, "bias"] = (hidden,)

    norm("layers", "attention_norm")
    for name, count in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
        shapes["layers", "attention", name, "kernel"] = (hidden, count, head_dim)
        if config.qkv_bias:
            shapes["layers", "attention", name, "bias"] = (count, head_dim)
    if config.qk_norm:
        shapes["layers", "attention", "q_norm", "scale"] = (head_dim,)
        shapes["layers", "attention", "k_norm", "scale"] = (head_dim,)
    if config.kv_shift is not None:
        taps = 1 if config.kv_shift.constraint == "gate" else config.kv_shift.window
        for name in config.kv_shift.shifted:
            shapes["layers", "attention", f"{name}_shift"] = (kv_heads, taps)
    shapes["layers", "attention", "o_proj", "kernel"] = (heads, head_dim, hidden)
    if config.attention_out_bias:
        shapes["layers", "attention", "o_proj", "bias"] = (hidden,)
    if config.post_norms:
        norm("layers", "attention_post_norm")
    norm("layers", "mlp_norm")
    projections = {
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }
    for name, shape in projections.items():
        if name == "gate_proj" and not config.gated_mlp:
            continue
        shapes["layers", "mlp", name, "kernel"] = shape
        if config.mlp_bias:
            shapes["layers", "mlp", name, "bias"] = shape[1:]
    if config.post_norms:
        norm("layers", "mlp_post_norm")
    norm("final_norm")
    if not config.tie_word_embeddings:
        shapes["lm_head", "kernel"] = (hidden, vocab)
        if config.lm_head_bias:
            shapes["lm_head", "bias"] = (vocab,)
    return shapes


def hf_layout(config: AnyModelConfig) -> list[StoredParameter]:
    """Every parameter of `config` as a Hugging Face checkpoint stores it."""
    if isinstance(config, XLSTMConfig):
        return xlstm_layout(config)
    names = {"gemma2": _GEMMA2_NAMES, "gpt_neox": _GPT_NEOX_NAMES}.get(
        config.architecture, _HF_NAMES
    )
    layout = []
    for path, shape in parameter_shapes(config).items():
        if config.architecture == "gpt_neox" and path[2:3] in (
            ("q_proj",),
            ("k_proj",),
            ("v_proj",),
        ):
            layout.append(_fused_qkv(path, shape, names[path]))
        else:
            alternatives = [names[path]]
            if path == ("lm_head", "kernel") and config.architecture == "gpt_neox":
                alternatives.append("lm_head.weight")
            layout.append(stored_parameter(path, shape, tuple(alternatives)))
    return layout


def gguf_layout(config: ModelConfig) -> list[StoredParameter]:
    """Every parameter of `config` as llama.cpp's converter stores it in a GGUF file."""
    layout = []
    for path, shape in parameter_shapes(config).items():
        entry = stored_parameter(path, shape, (_GGUF_NAMES[path],))
        if config.architecture == "llama" and path[2:3] in (("q_proj",), ("k_proj",)):
            entry = _unpermuted(entry)
        if config.norm_unit_offset and path[-1] == "scale":
            entry = _minus_one(entry)
        layout.append(entry)
    return layout


def _fused_qkv(path: Path, shape: tuple[int, ...], name: str) -> StoredParameter:
    """GPT-NeoX keeps one matrix whose rows are, head by head, that head's q, then k, then v."""
    position = ("q_proj", "k_proj", "v_proj").index(path[2])
    if path[-1] == "bias":
        heads, head_dim = shape
        return StoredParameter(
            path,
            shape,
            (name,),
            (3 * heads * head_dim,),
            lambda x: x.reshape(heads, 3, head_dim)[:, position],
            lambda x: x,
            fused=(position, 3),
        )
    hidden, heads, head_dim = shape
    return StoredParameter(
        path,
        shape,
        (name,),
        (3 * heads * head_dim, hidden),
        lambda x: x.reshape(heads, 3, head_dim, hidden)[:, position].transpose(2, 0, 1),
        lambda x: x.transpose(1, 2, 0),
        fused=(position, 3),
    )


def _unpermuted(entry: StoredParameter) -> StoredParameter:
    """llama.cpp pairs rotary channels (0, 1), (2, 3), …; here i is paired with i + Dh / 2."""
    heads, head_dim = entry.shape[-2:]

    def view(x: np.ndarray) -> np.ndarray:
        rest = x.shape[1:]
        halves = x.reshape(heads, head_dim // 2, 2, *rest).swapaxes(1, 2)
        return entry.view(halves.reshape(x.shape))

    return StoredParameter(
        entry.path, entry.shape, entry.names, entry.stored_shape, view, entry.unview
    )


def _minus_one(entry: StoredParameter) -> StoredParameter:
    """llama.cpp's converter adds the one of Gemma's `1 + w` to the stored scale."""
    return StoredParameter(
        entry.path, entry.shape, entry.names, entry.stored_shape, lambda x: x - 1, entry.unview
    )
