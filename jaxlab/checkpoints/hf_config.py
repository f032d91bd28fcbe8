"""Hugging Face's `config.json` <-> `ModelConfig`.

Reads the spellings of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5
(`rope_parameters`, `dtype`); writes both, so that old and new versions load the result. A key that
a file leaves out takes the default of the family's configuration class in transformers 5.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError

from jaxlab.checkpoints.hf_xlstm import xlstm_from_hf, xlstm_to_hf
from jaxlab.config import reasons
from jaxlab.errors import ArchitectureError, CheckpointError
from jaxlab.models.config import ModelConfig
from jaxlab.models.families import AnyModelConfig
from jaxlab.models.xlstm.config import XLSTMConfig

# What transformers 5.24 assumes where config.json says nothing (models/*/configuration_*.py).
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {"max_position_embeddings": 32768, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": 128},
    "gemma2": {
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    "gpt_neox": {
        "max_position_embeddings": 2048,
        "hidden_act": "gelu",
        "attention_bias": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
}
SUPPORTED_ARCHITECTURES = (*_FAMILY_DEFAULTS, "xlstm")
# Far beyond any real model: a damaged file must not make us build lists of billions.
MAX_LAYERS = 10_000

_CLASS_NAMES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
}
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
_HF_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
}
_LAYER_TYPES = {"full_attention": "full", "sliding_attention": "sliding"}
# Fields that say how to run a model, not which model it is: config.json does not carry them.
_RUN_FIELDS = {"dtype", "param_dtype", "remat"}
# Fields that transformers has no word for: under the key "jaxlab", which it ignores.
_OWN_KEY = "jaxlab"
_OWN_FIELDS = ("attention", "kv_shift")


def config_from_hf(hf: dict[str, Any]) -> AnyModelConfig:
    """Translate the contents of a Hugging Face `config.json`.

    Args:
      hf: the parsed JSON object. `model_type` must be one of `SUPPORTED_ARCHITECTURES`.

    Returns:
      The model's description. `dtype` and `param_dtype` stay at their default, float32, whatever
      the weights are stored in: they say how to run, which is the caller's choice.

    Raises:
      ArchitectureError: the architecture, its activation or its RoPE variant is not implemented.
      CheckpointError: a required key is missing, or a value is impossible.
    """
    architecture = hf.get("model_type")
    if not isinstance(architecture, str) or architecture not in SUPPORTED_ARCHITECTURES:
        raise ArchitectureError(
            f"architecture {architecture!r} (model_type in config.json) is not implemented; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if architecture == "xlstm":
        return xlstm_from_hf(hf)
    values = {**_FAMILY_DEFAULTS[architecture], **hf}
    required = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    ]
    missing = [key for key in required if not isinstance(values.get(key), int)]
    if missing:
        raise CheckpointError(
            f"config.json of a {architecture} model lacks {', '.join(missing)} (whole numbers): "
            "download config.json again, or add them"
        )
    if values["num_hidden_layers"] > MAX_LAYERS:
        raise CheckpointError(
            f"config.json asks for {values['num_hidden_layers']} layers (at most {MAX_LAYERS}): "
            "the file is damaged, fetch it again"
        )
    try:
        return ModelConfig.model_validate(_fields(architecture, values))
    except ValidationError as error:
        raise CheckpointError(
            f"config.json does not describe a possible {architecture} model: {reasons(error)}"
        ) from error
    except (TypeError, ValueError, ArithmeticError, AttributeError, KeyError) as error:
        # Arithmetic on values of the wrong type or zero, before the model could check them.
        raise CheckpointError(
            f"config.json holds a value that no {architecture} model can have ({error}): "
            "fetch the file again"
        ) from error


def _fields(architecture: str, values: dict[str, Any]) -> dict[str, Any]:
    rope = _rope_parameters(values)
    return (
        {
            "architecture": architecture,
            "vocab_size": values["vocab_size"],
            "hidden_size": values["hidden_size"],
            "intermediate_size": values["intermediate_size"],
            "num_layers": values["num_hidden_layers"],
            "num_heads": values["num_attention_heads"],
            "num_kv_heads": values.get("num_key_value_heads") or 0,
            "head_dim": values.get("head_dim") or 0,
            "max_position_embeddings": values["max_position_embeddings"],
            "rope_theta": _rope_theta(values, rope),
            "rope_scaling": _rope_scaling(values, rope),
            "norm_eps": values.get("rms_norm_eps", 1e-6),
            "activation": _activation(values),
            "tie_word_embeddings": values.get("tie_word_embeddings", False),
            "initializer_range": values.get("initializer_range", 0.02),
            "bos_token_id": _single_id(values.get("bos_token_id")),
            "eos_token_id": _ids(values.get("eos_token_id")),
            "pad_token_id": _single_id(values.get("pad_token_id")),
        }
        | _family_fields(architecture, values, rope)
        | _own_fields(values)
    )


def _own_fields(values: dict[str, Any]) -> dict[str, Any]:
    own = values.get(_OWN_KEY, {})
    if not isinstance(own, dict):
        raise CheckpointError(f"{_OWN_KEY!r} in config.json is {own!r}, not an object: remove it")
    unknown = [key for key in own if key not in _OWN_FIELDS]
    if unknown:
        raise CheckpointError(
            f"config.json has the key {_OWN_KEY}.{unknown[0]}, which this version does not know "
            f"(known: {', '.join(_OWN_FIELDS)}): update jaxlab, or remove it"
        )
    return own


def _family_fields(
    architecture: str, values: dict[str, Any], rope: dict[str, Any]
) -> dict[str, Any]:
    """The fields in which the families differ."""
    bias = bool(values.get("attention_bias", False))
    fraction = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if architecture == "gpt_neox":
        if fraction is None:
            fraction = values.get("rotary_pct", 0.25)
        return {
            "num_kv_heads": 0,
            "head_dim": 0,
            "rotary_fraction": fraction,
            "norm": "layernorm",
            "norm_eps": values.get("layer_norm_eps", 1e-5),
            "parallel_residual": values.get("use_parallel_residual", True),
            "gated_mlp": False,
            "qkv_bias": bias,
            "attention_out_bias": bias,
            "mlp_bias": True,
        }
    if fraction not in (None, 1, 1.0):
        raise ArchitectureError(
            f"partial_rotary_factor {fraction} in config.json: transformers' "
            f"{architecture} rotates "
            "whole heads, so this is another architecture saved under that name"
        )
    if architecture == "llama":
        return {
            "qkv_bias": bias,
            "attention_out_bias": bias,
            "mlp_bias": bool(values.get("mlp_bias", False)),
        }
    if architecture == "mistral":
        return {"sliding_window": values["sliding_window"] or None}
    if architecture == "qwen2":
        return dict(qkv_bias=True, **_qwen_windows(values))
    if architecture == "qwen3":
        return dict(qkv_bias=bias, attention_out_bias=bias, qk_norm=True, **_qwen_windows(values))
    return _gemma2_fields(values, bias)


def _gemma2_fields(values: dict[str, Any], bias: bool) -> dict[str, Any]:
    if values.get("use_bidirectional_attention"):
        raise ArchitectureError(
            "use_bidirectional_attention is true in config.json: jaxlab implements the "
            "causal Gemma 2 "
            "only; set it to false if the model is a decoder"
        )
    layers = values["num_hidden_layers"]
    default_types = ["sliding_attention", "full_attention"] * ((layers + 1) // 2)
    types = values.get("layer_types") or default_types[:layers]
    head_dim = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
    scalar = values["query_pre_attn_scalar"]
    return dict(
        qkv_bias=bias,
        attention_out_bias=bias,
        norm_unit_offset=True,
        post_norms=True,
        query_scale=None if scalar == head_dim else scalar**-0.5,
        attention_softcap=values["attn_logit_softcapping"],
        final_softcap=values["final_logit_softcapping"],
        embedding_scale=math.sqrt(values["hidden_size"]),
        **_windows(types, values["sliding_window"]),
    )


def _qwen_windows(values: dict[str, Any]) -> dict[str, Any]:
    """Qwen: a window only with `use_sliding_window`, then from layer `max_window_layers` on."""
    window = values.get("sliding_window") if values.get("use_sliding_window") else None
    types = values.get("layer_types")
    if types is None:
        first = values.get("max_window_layers", 28)
        types = [
            "sliding_attention" if window and layer >= first else "full_attention"
            for layer in range(values["num_hidden_layers"])
        ]
    return _windows(types, window)


def _windows(types: list[str], window: int | None) -> dict[str, Any]:
    """`sliding_window` and `layer_types`, the latter left out where all layers are alike."""
    unknown = sorted({str(kind) for kind in types} - set(_LAYER_TYPES))
    if unknown:
        raise ArchitectureError(
            f"layer_types {unknown} in config.json are not implemented; "
            f"supported: {', '.join(_LAYER_TYPES)}"
        )
    kinds = tuple(_LAYER_TYPES[kind] for kind in types)
    if "sliding" not in kinds or not window:
        return {"sliding_window": None, "layer_types": None}
    if "full" not in kinds:
        return {"sliding_window": window, "layer_types": None}
    return {"sliding_window": window, "layer_types": kinds}


def _activation(values: dict[str, Any]) -> str:
    name = values.get("hidden_activation") or values.get("hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        raise ArchitectureError(
            f"activation {name!r} in config.json is not implemented; "
            f"supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _rope_parameters(values: dict[str, Any]) -> dict[str, Any]:
    """The one RoPE dictionary, whichever of its two names and nestings the file uses."""
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"rope_scaling in config.json is {rope!r}, expected an object")
    nested = [rope[key] for key in _LAYER_TYPES if isinstance(rope.get(key), dict)]
    if not nested:
        return rope
    if any(entry != nested[0] for entry in nested):
        raise ArchitectureError(
            "rope_parameters in config.json differ between layer types, which is not implemented: "
            "supported is one RoPE for all layers"
        )
    return nested[0]


def _rope_theta(values: dict[str, Any], rope: dict[str, Any]) -> float:
    found = {
        "rope_parameters.rope_theta": rope.get("rope_theta"),
        "rope_theta": values.get("rope_theta"),
        "rotary_emb_base": values.get("rotary_emb_base"),
    }
    given = {name: float(value) for name, value in found.items() if value is not None}
    for name, theta in given.items():  # also one that another takes the place of
        if not 0 < theta < math.inf:
            raise CheckpointError(
                f"{name} in config.json is {theta:g}, and the base of RoPE must be a number above "
                "0: set it as the model was trained, or fetch the file again"
            )
    return next(iter(given.values()), 10000.0)


def _rope_scaling(values: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        raise ArchitectureError(
            f"RoPE scaling {kind!r} in config.json is not implemented; "
            "supported: linear, dynamic, llama3, yarn"
        )
    # transformers takes the trained length of these two from the top level first, then from here.
    trained = values.get("original_max_position_embeddings") or rope.get(
        "original_max_position_embeddings"
    )
    scaling = {"type": kind, "factor": rope.get("factor")}
    if kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = trained or values["max_position_embeddings"]
    if kind == "llama3":
        scaling |= {
            key: rope[key] for key in ("low_freq_factor", "high_freq_factor") if key in rope
        }
    if kind == "yarn":
        if scaling["factor"] is None:
            scaling["factor"] = (
                values["max_position_embeddings"] / scaling["original_max_position_embeddings"]
            )
        # A null or zero here means the default, as in transformers.
        scaling |= {key: rope[key] for key in ("beta_fast", "beta_slow") if rope.get(key)}
        optional = ("attention_factor", "mscale", "mscale_all_dim", "truncate")
        scaling |= {key: rope[key] for key in optional if rope.get(key) is not None}
    return scaling


def _single_id(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


def _ids(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return value[0] if len(value) == 1 else tuple(value) or None


def config_to_hf(config: AnyModelConfig, *, dtype: str | None = None) -> dict[str, Any]:
    """The `config.json` that transformers loads as the same model.

    Args:
      config: the model.
      dtype: name of the type that the weights are stored in, `config.param_dtype` by default.

    Raises:
      ArchitectureError: `config` has features that transformers' class for its `architecture` lacks
        (a sliding window in a Llama, say); the message lists them.
    """
    if isinstance(config, XLSTMConfig):
        return xlstm_to_hf(config, dtype=dtype)
    hf = _common_keys(config, dtype or config.param_dtype) | _family_keys(config)
    own = config.model_dump(mode="json", include=set(_OWN_FIELDS), exclude_defaults=True)
    if own:
        hf[_OWN_KEY] = own
    _check_faithful(config, hf)
    return hf


def _common_keys(config: ModelConfig, dtype: str) -> dict[str, Any]:
    eos = config.eos_token_id
    return dict(
        architectures=[_CLASS_NAMES[config.architecture]],
        model_type=config.architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        max_position_embeddings=config.max_position_embeddings,
        initializer_range=config.initializer_range,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=config.bos_token_id,
        eos_token_id=list(eos) if isinstance(eos, tuple) else eos,
        pad_token_id=config.pad_token_id,
        use_cache=True,
        dtype=dtype,
        torch_dtype=dtype,
        hidden_act=_HF_ACTIVATIONS[config.activation],
        **_rope_keys(config),
    )


def _rope_keys(config: ModelConfig) -> dict[str, Any]:
    scaling: dict[str, Any] | None = None
    if config.rope_scaling is not None:
        kept = {
            "linear": {"factor"},
            "dynamic": {"factor"},
            "llama3": {
                "factor",
                "original_max_position_embeddings",
                "low_freq_factor",
                "high_freq_factor",
            },
            "yarn": {
                "factor",
                "original_max_position_embeddings",
                "beta_fast",
                "beta_slow",
                "attention_factor",
                "mscale",
                "mscale_all_dim",
                "truncate",
            },
        }[config.rope_scaling.type]
        scaling = {"rope_type": config.rope_scaling.type}
        scaling |= config.rope_scaling.model_dump(include=kept, exclude_none=True)
        if config.rope_scaling.type in ("llama3", "yarn"):
            scaling.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    parameters = {"rope_theta": config.rope_theta, "rope_type": "default", **(scaling or {})}
    if config.architecture == "gpt_neox":
        parameters["partial_rotary_factor"] = config.rotary_fraction
    return {"rope_theta": config.rope_theta, "rope_scaling": scaling, "rope_parameters": parameters}


def _family_keys(config: ModelConfig) -> dict[str, Any]:
    if config.architecture == "gpt_neox":
        return {
            "layer_norm_eps": config.norm_eps,
            "use_parallel_residual": config.parallel_residual,
            "attention_bias": config.qkv_bias,
            "rotary_pct": config.rotary_fraction,
            "rotary_emb_base": config.rope_theta,
        }
    keys: dict[str, Any] = {
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
    }
    if config.architecture in ("llama", "qwen3", "gemma2"):
        keys["attention_bias"] = config.qkv_bias
    if config.architecture == "llama":
        keys["mlp_bias"] = config.mlp_bias
    elif config.architecture == "mistral":
        keys["sliding_window"] = config.sliding_window
    else:
        keys["layer_types"] = [
            "sliding_attention" if window else "full_attention" for window in config.layer_windows
        ]
        keys["sliding_window"] = config.sliding_window
    if config.architecture in ("qwen2", "qwen3"):
        keys["use_sliding_window"] = config.sliding_window is not None
        # For versions that know no layer_types: windowed layers come after the others there.
        keys["max_window_layers"] = sum(window is None for window in config.layer_windows)
    if config.architecture == "gemma2":
        scalar = config.head_dim if config.query_scale is None else config.query_scale**-2
        keys |= {
            "hidden_activation": _HF_ACTIVATIONS[config.activation],
            "query_pre_attn_scalar": round(scalar)
            if math.isclose(scalar, round(scalar))
            else scalar,
            "attn_logit_softcapping": config.attention_softcap,
            "final_logit_softcapping": config.final_softcap,
        }
    return keys


def _check_faithful(config: ModelConfig, hf: dict[str, Any]) -> None:
    """Read the result back: what differs is what this architecture cannot say."""
    loaded = config_from_hf(hf)
    assert isinstance(loaded, ModelConfig)
    wanted, got = _comparable(config), _comparable(loaded)
    differing = [key for key in wanted if not _close(wanted[key], got[key])]
    if differing:
        details = ", ".join(
            f"{key}={wanted[key]!r} (would load as {got[key]!r})" for key in differing
        )
        raise ArchitectureError(
            f"a {config.architecture} in Hugging Face's format cannot express {details}: "
            f"set architecture to one that can ({', '.join(SUPPORTED_ARCHITECTURES)}) or "
            "change these fields"
        )


def _comparable(config: ModelConfig) -> dict[str, Any]:
    fields = config.model_dump(
        exclude=_RUN_FIELDS | {"layer_types", "sliding_window", "query_scale"}
    )
    fields["layer_windows"] = config.layer_windows
    fields["query_scale"] = config.query_scale or config.head_dim**-0.5
    scaling = fields["rope_scaling"]
    if scaling is not None:
        # The trained length is read by these two only, and defaults to the context.
        trained = scaling["original_max_position_embeddings"] or config.max_position_embeddings
        scaling["original_max_position_embeddings"] = (
            trained if scaling["type"] in ("llama3", "yarn") else None
        )
    return fields


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9)
    return a == b
