"""Where each parameter of an xLSTM lies in a checkpoint: NX-AI/xLSTM-7b's names.

Blocks of sLSTM have the names of NX-AI's first release, and its slip: there `fgate` feeds the input
gate and `igate` the forget gate, so they are crossed here.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxlab.checkpoints.stored_parameter import StoredParameter, stored_parameter
from jaxlab.models.xlstm.config import XLSTMConfig
from jaxlab.models.xlstm.module import BLOCK_NAMES

_BLOCK = "backbone.blocks.{}."
_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}


def xlstm_layout(config: XLSTMConfig) -> list[StoredParameter]:
    """Every parameter of `config`, in the order files keep them in."""
    width, vocab = config.embedding_dim, config.vocab_size
    layout = [
        stored_parameter(
            ("embed", "embedding"),
            (vocab, width),
            ("backbone.embeddings.weight", "embedding.weight"),
        )
    ]
    for kind, entries in (("m", _mlstm_block), ("s", _slstm_block)):
        where = tuple(i for i, letter in enumerate(config.blocks) if letter == kind)
        if where:
            layout += [replace(entry, layers=where) for entry in entries(config)]
    layout.append(
        stored_parameter(
            ("final_norm", "scale"), (width,), ("backbone.out_norm.weight", "out_norm.weight")
        )
    )
    if not config.tie_word_embeddings:
        layout.append(stored_parameter(("lm_head", "kernel"), (width, vocab), ("lm_head.weight",)))
    return layout


def _mlstm_block(config: XLSTMConfig) -> list[StoredParameter]:
    width, heads, inner = config.embedding_dim, config.num_heads, config.intermediate_size
    qk, v = config.qk_head_dim, config.v_head_dim
    layer, ffn = "mlstm_layer", "ffn"
    # (parameter, shape of its kernel or scale, always a bias, stored name, fused name)
    rows: list[tuple[tuple[str, ...], tuple[int, ...], bool, str, str | None]] = [
        (("mlstm_norm",), (width,), False, "norm_mlstm", None),
        (("mlstm", "q_proj"), (width, heads, qk), False, f"{layer}.q", "qkv_opreact"),
        (("mlstm", "k_proj"), (width, heads, qk), False, f"{layer}.k", "qkv_opreact"),
        (("mlstm", "v_proj"), (width, heads, v), False, f"{layer}.v", "qkv_opreact"),
        (
            ("mlstm", "ogate_proj"),
            (width, heads, v),
            False,
            f"{layer}.ogate_preact",
            "qkv_opreact",
        ),
        (("mlstm", "igate_proj"), (width, heads), True, f"{layer}.igate_preact", "ifgate_preact"),
        (("mlstm", "fgate_proj"), (width, heads), True, f"{layer}.fgate_preact", "ifgate_preact"),
        (("mlstm", "head_norm"), (heads, v), False, f"{layer}.multihead_norm", None),
        (("mlstm", "o_proj"), (heads, v, width), False, f"{layer}.out_proj", None),
        (("ffn_norm",), (width,), False, "norm_ffn", None),
        (("ffn", "gate_proj"), (width, inner), False, f"{ffn}.proj_up_gate", "proj_up_gate_z"),
        (("ffn", "up_proj"), (width, inner), False, f"{ffn}.proj_up", "proj_up_gate_z"),
        (("ffn", "down_proj"), (inner, width), False, f"{ffn}.proj_down", None),
    ]
    layout = []
    for where, shape, always_bias, name, fused in rows:
        norm = where[-1].endswith("norm")
        leaves = [("scale" if norm else "kernel", shape)]
        if always_bias or config.use_bias:
            bias = shape if norm else shape[1:]
            if where[-1] == "o_proj":
                bias = (width,)
            leaves.append(("bias", bias))
        for leaf, leaf_shape in leaves:
            path = ("layers", BLOCK_NAMES["m"], *where, leaf)
            stored = f"{_BLOCK}{name}.{_LEAVES[leaf]}"
            layout.append(stored_parameter(path, leaf_shape, (stored,)))
            if fused is not None and config.weight_mode == "fused":
                layer_name = name.split(".")[0]
                layout[-1] = replace(
                    layout[-1], names=(f"{_BLOCK}{layer_name}.{fused}.{_LEAVES[leaf]}",)
                )
    return _concatenated(layout) if config.weight_mode == "fused" else layout


def _concatenated(layout: list[StoredParameter]) -> list[StoredParameter]:
    """Entries with the same stored name become parts of it, one after the other."""
    result = []
    for entry in layout:
        parts = [other for other in layout if other.names == entry.names]
        if len(parts) == 1:
            result.append(entry)
            continue
        position = parts.index(entry)
        start = sum(part.stored_shape[0] for part in parts[:position])
        stop = start + entry.stored_shape[0]
        rows = sum(part.stored_shape[0] for part in parts)

        def view(
            x: np.ndarray, entry: StoredParameter = entry, start: int = start, stop: int = stop
        ) -> np.ndarray:
            return entry.view(x[start:stop])

        result.append(
            replace(
                entry,
                stored_shape=(rows, *entry.stored_shape[1:]),
                view=view,
                fused=(position, len(parts)),
                interleaved=False,
            )
        )
    return result


def _slstm_block(config: XLSTMConfig) -> list[StoredParameter]:
    width, heads, inner = config.embedding_dim, config.num_heads, config.slstm_intermediate_size
    head_dim = width // heads
    path = ("layers", BLOCK_NAMES["s"])
    layout = [
        stored_parameter((*path, "slstm_norm", "scale"), (width,), (_BLOCK + "xlstm_norm.weight",)),
        StoredParameter(
            (*path, "slstm", "conv", "kernel"),
            (4, width),
            (_BLOCK + "xlstm.conv1d.conv.weight",),
            (width, 1, 4),
            lambda x: x[:, 0].T,
            lambda x: x.T[:, None],
        ),
        stored_parameter(
            (*path, "slstm", "conv", "bias"), (width,), (_BLOCK + "xlstm.conv1d.conv.bias",)
        ),
    ]
    for gate, name in (
        ("igate", "fgate"),
        ("fgate", "igate"),
        ("zgate", "zgate"),
        ("ogate", "ogate"),
    ):
        shape = (heads, head_dim, head_dim)  # [H, out, in] in the file, [H, in, out] here
        layout.append(
            StoredParameter(
                (*path, "slstm", gate, "kernel"),
                shape,
                (f"{_BLOCK}xlstm.{name}.weight",),
                shape,
                lambda x: x.swapaxes(1, 2),
                lambda x: x.swapaxes(1, 2),
            )
        )
    layout += [
        StoredParameter(
            (*path, "slstm", "recurrent"),
            (heads, head_dim, 4, head_dim),
            (_BLOCK + "xlstm.slstm_cell._recurrent_kernel_",),
            (heads, 4 * head_dim, head_dim),
            lambda x: x.reshape(heads, 4, head_dim, head_dim).transpose(0, 3, 1, 2),
            lambda x: x.transpose(0, 2, 3, 1).reshape(heads, 4 * head_dim, head_dim),
        ),
        StoredParameter(
            (*path, "slstm", "gate_bias"),
            (heads, 4, head_dim),
            (_BLOCK + "xlstm.slstm_cell._bias_",),
            (4 * width,),
            lambda x: x.reshape(4, heads, head_dim).transpose(1, 0, 2),
            lambda x: x.transpose(1, 0, 2).reshape(4 * width),
        ),
        stored_parameter(
            (*path, "slstm", "head_norm", "scale"),
            (heads, head_dim),
            (_BLOCK + "xlstm.group_norm.weight",),
        ),
        stored_parameter((*path, "ffn_norm", "scale"), (width,), (_BLOCK + "ffn_norm.weight",)),
    ]
    up = [
        stored_parameter(
            (*path, "ffn", name, "kernel"), (width, inner), (_BLOCK + "ffn.proj_up.weight",)
        )
        for name in ("gate_proj", "up_proj")
    ]
    return [
        *layout,
        *_concatenated(up),
        stored_parameter(
            (*path, "ffn", "down_proj", "kernel"),
            (inner, width),
            (_BLOCK + "ffn.proj_down.weight",),
        ),
    ]
