"""What a GGUF file says about its model: metadata -> `ModelConfig`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from pydantic import ValidationError

from jaxlab.checkpoints.hf_config import MAX_LAYERS
from jaxlab.config import reasons
from jaxlab.data.gguf_file import GGUFFile
from jaxlab.errors import ArchitectureError, CheckpointError
from jaxlab.models.config import ModelConfig

# GGUF's `general.architecture` -> ours. Mistral files say "llama"; their window is not recorded.
_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2"}
# Tensors that hold no parameter.
IGNORED_TENSORS = ("rope_freqs.weight",)


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The model that a GGUF file holds.

    Raises:
      ArchitectureError: the architecture or its RoPE variant is not implemented.
      CheckpointError: metadata is missing or impossible.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise ArchitectureError(
            f"architecture {name!r} of {file.path} is not implemented for GGUF; "
            f"supported: {', '.join(_ARCHITECTURES)}. A Hugging Face directory of the "
            "model may load"
        )
    keys = _Metadata(file, name)
    heads = keys.count("attention.head_count")
    hidden = keys.count("embedding_length")
    embedding = _tensor_shape(file, "token_embd.weight")
    head_dim = keys.number("attention.key_length", 0) or keys.number("rope.dimension_count", 0)
    layers = keys.count("block_count")
    fields: dict[str, Any] = {
        "architecture": _ARCHITECTURES[name],
        "vocab_size": embedding[0],
        "hidden_size": hidden,
        "intermediate_size": keys.number("feed_forward_length"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": keys.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.number("context_length"),
        "rope_theta": _short_decimal(keys.number("rope.freq_base", 10000.0)),
        "norm_eps": _short_decimal(keys.number("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_ids(file.metadata),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if name == "gemma2":
        fields |= _gemma2_fields(keys, layers, hidden, heads)
    try:
        fields["rope_scaling"] = _rope_scaling(file, keys, fields)
        return ModelConfig.model_validate(fields)
    except ValidationError as error:
        raise CheckpointError(
            f"the metadata of {file.path} do not describe a possible {name} model: {reasons(error)}"
        ) from error


class _Metadata:
    """The numbers under `<architecture>.`."""

    def __init__(self, file: GGUFFile, architecture: str):
        self._file, self._prefix = file, architecture

    def get(self, key: str) -> Any:
        return self._file.metadata.get(f"{self._prefix}.{key}")

    def count(self, key: str) -> int:
        """A whole number from 1."""
        value = self.number(key)
        limit = MAX_LAYERS if key == "block_count" else 2**31
        if not isinstance(value, int) or not 1 <= value <= limit:
            raise CheckpointError(
                f"{self._file.path}: metadata {self._prefix}.{key} is {value!r}, which no model "
                "has: the file is damaged, fetch it again"
            )
        return value

    def number(self, key: str, default: float | None = None) -> Any:
        value = self.get(key)
        if isinstance(value, list):
            if not value or any(entry != value[0] for entry in value):
                raise ArchitectureError(
                    f"{self._file.path}: {self._prefix}.{key} differs between layers, "
                    "which is not implemented"
                )
            value = value[0]
        if value is None:
            value = default
        if not isinstance(value, int | float):
            raise CheckpointError(
                f"{self._file.path}: metadata {self._prefix}.{key} is {value!r}, expected "
                "a number: "
                "convert the model again with a current llama.cpp"
            )
        return value


def _tensor_shape(file: GGUFFile, name: str) -> tuple[int, ...]:
    if name not in file.tensors or len(file.tensors[name].shape) != 2:
        raise CheckpointError(
            f"{file.path} has no matrix {name!r}: it is not a complete language model"
        )
    return file.tensors[name].shape


def _short_decimal(value: float) -> float:
    """1e-5, where the file has its float32 neighbour 9.999999747378752e-06."""
    return float(np.format_float_positional(np.float32(value), unique=True, trim="0"))


def _end_ids(metadata: dict[str, Any]) -> int | tuple[int, ...] | None:
    """End of text, and end of turn where the file has one of its own."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = tuple(dict.fromkeys(metadata[key] for key in keys if isinstance(metadata.get(key), int)))
    return ids[0] if len(ids) == 1 else ids or None


def _gemma2_fields(keys: _Metadata, layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {
        "activation": "gelu_tanh",
        "norm_unit_offset": True,
        "post_norms": True,
        "embedding_scale": math.sqrt(hidden),
        "attention_softcap": keys.number("attn_logit_softcapping", 50.0),
        "final_softcap": keys.number("final_logit_softcapping", 30.0),
        "sliding_window": keys.number("attention.sliding_window", 4096),
        "layer_types": tuple("full" if layer % 2 else "sliding" for layer in range(layers)),
        # The file does not say; llama.cpp too knows the 27B, the exception, by its depth.
        "query_scale": (hidden / heads) ** -0.5 if layers == 46 else None,
    }


def _rope_scaling(file: GGUFFile, keys: _Metadata, fields: dict[str, Any]) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, fields)
    kind = keys.get("rope.scaling.type")
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear")
    if kind in (None, "none") and not (keys.get("rope.scale_linear") or 0) > 1:
        return None
    if kind in (None, "none", "linear"):
        return {"type": "linear", "factor": factor}
    if kind != "yarn":
        raise ArchitectureError(
            f"{file.path}: RoPE scaling {kind!r} is not implemented for GGUF; supported: "
            "linear, yarn, "
            "and Llama 3's frequency factors"
        )
    scaling = {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length")
        or fields["max_position_embeddings"],
    }
    for ours, theirs in (
        ("beta_fast", "rope.scaling.yarn_beta_fast"),
        ("beta_slow", "rope.scaling.yarn_beta_slow"),
    ):
        if keys.get(theirs) is not None:
            scaling[ours] = keys.get(theirs)
    return scaling


def _llama3_scaling(file: GGUFFile, fields: dict[str, Any]) -> dict[str, Any]:
    """Recover Llama 3's RoPE parameters from the divisors that the converter wrote.

    The divisor of frequency f is 1 for short wavelengths, `factor` for long ones, and between them
    `1 / ((1 - s) / factor + s)` with `s = (n * f / 2π - low) / (high - low)`, n the trained length.
    So s is linear in f, and the line through the values between gives `n / (high - low)` and
    `low / (high - low)`; only these ratios matter. Llama 3.1, 3.2 and 3.3 have n = 8192, low = 1
    and high = 4: that is tried first.
    """
    divisors = np.asarray(file.tensor("rope_freqs.weight"), np.float64).reshape(-1)
    dim = 2 * divisors.size
    with np.errstate(all="ignore"):
        turns = fields["rope_theta"] ** -(np.arange(0, dim, 2) / dim) / (2 * np.pi)
    factor = float(divisors.max(initial=1.0))
    if not np.isfinite([*divisors, *turns]).all() or factor <= 1.0:
        raise CheckpointError(f"{file.path}: tensor 'rope_freqs.weight' has impossible values")
    candidates = [(8192.0, 1.0, 4.0)]
    with np.errstate(all="ignore"):
        smooth = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    between = (smooth > 1e-4) & (smooth < 1 - 1e-4)
    if between.sum() >= 2:
        slope, intercept = np.polyfit(turns[between], smooth[between], 1)
        low = candidates[0][1]
        if intercept < 0:
            # Any multiple of (n, low, high) is the same line; low = 1 is the convention.
            candidates.append((low * slope / -intercept, low, low - low / intercept))
    for trained, low, high in candidates:
        s = np.clip((trained * turns - low) / (high - low), 0, 1)
        if np.allclose(1 / ((1 - s) / factor + s), divisors, rtol=2e-3):
            return {
                "type": "llama3",
                "factor": _short_decimal(factor),
                "original_max_position_embeddings": round(trained),
                "low_freq_factor": _short_decimal(low),
                "high_freq_factor": _short_decimal(high),
            }
    raise ArchitectureError(
        f"{file.path}: the frequency factors in 'rope_freqs.weight' are not Llama 3's, "
        "and others are not implemented"
    )
