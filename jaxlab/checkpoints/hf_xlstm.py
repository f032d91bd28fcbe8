"""`config.json` of an xLSTM <-> `XLSTMConfig`, in both spellings that are in use.

NX-AI's first files say `embedding_dim` and `num_blocks`, transformers' say `hidden_size` and
`num_hidden_layers`. transformers reads the former without complaint and then builds its default
model; here either gives the model that the file describes, and both are written.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from jaxlab.config import reasons
from jaxlab.errors import ArchitectureError, CheckpointError
from jaxlab.models.xlstm.config import XLSTMConfig

# (our name, names in config.json, what transformers 5.24 assumes without any)
_FIELDS: tuple[tuple[str, tuple[str, ...], Any], ...] = (
    ("vocab_size", ("vocab_size",), 50304),
    ("embedding_dim", ("hidden_size", "embedding_dim"), 4096),
    ("num_blocks", ("num_hidden_layers", "num_blocks"), 32),
    ("num_heads", ("num_heads",), 8),
    ("qk_dim_factor", ("qk_dim_factor",), 0.5),
    ("v_dim_factor", ("v_dim_factor",), 1.0),
    ("ffn_proj_factor", ("ffn_proj_factor",), 2.667),
    ("ffn_round_up_to_multiple_of", ("ffn_round_up_to_multiple_of",), 64),
    ("gate_soft_cap", ("gate_soft_cap",), 15.0),
    ("output_logit_soft_cap", ("output_logit_soft_cap",), 30.0),
    ("norm_eps", ("norm_eps",), 1e-6),
    ("cell_norm_eps", ("cell_norm_eps", "norm_eps"), 1e-6),
    ("cell_eps", ("eps",), 1e-6),
    ("igate_bias_init", ("igate_bias_init_range",), -10.0),
    ("use_bias", ("use_bias",), False),
    ("weight_mode", ("weight_mode",), "single"),
    ("tie_word_embeddings", ("tie_word_embeddings",), False),
    ("bos_token_id", ("bos_token_id",), 0),
    ("pad_token_id", ("pad_token_id",), 1),
)
# Names of the same thing: a file that has both must have the same value in both.
_SYNONYMS = (("hidden_size", "embedding_dim"), ("num_hidden_layers", "num_blocks"))
# What transformers has no word for.
_OWN_KEY = "jaxlab"
_OWN_FIELDS = ("block_pattern", "input_gate", "normalize", "fgate_bias_init", "cell_norm_eps")
# Parts that no released model has; what they would change is not implemented.
_REFUSED = {"add_qk_norm": False, "add_post_norm": False, "add_out_norm": True}
_NO_CAP = -1.0  # NX-AI's training code writes "no cap" so


def xlstm_from_hf(hf: dict[str, Any]) -> XLSTMConfig:
    """Translate the contents of a `config.json` with model_type xlstm; unknown keys are ignored.

    Raises:
      ArchitectureError: the file asks for a part that is not implemented.
      CheckpointError: it contradicts itself, or no model can have its values.
    """
    for first, second in _SYNONYMS:
        if hf.get(first) is not None and hf.get(second) not in (None, hf[first]):
            raise CheckpointError(
                f"config.json has {first} {hf[first]!r} and {second} {hf[second]!r}, which mean "
                "the same: correct the one that does not fit the weights"
            )
    for key, implemented in _REFUSED.items():
        if hf.get(key, implemented) != implemented:
            raise ArchitectureError(
                f"{key} is {hf[key]!r} in config.json: only xLSTMs with {implemented} are "
                "implemented, as all published ones are"
            )
    fields: dict[str, Any] = {}
    for name, keys, default in _FIELDS:
        found = [hf[key] for key in keys if key in hf]
        value = next((value for value in found if value is not None), None)
        if value is None and not (found and name.endswith(("cap", "token_id"))):
            value = default
        fields[name] = None if name.endswith("cap") and value == _NO_CAP else value
    eos = hf.get("eos_token_id", 2)
    if isinstance(eos, list):
        eos = eos[0] if len(eos) == 1 else tuple(eos) or None
    own = hf.get(_OWN_KEY, {})
    if not isinstance(own, dict) or set(own) - set(_OWN_FIELDS):
        raise CheckpointError(
            f"config.json has {_OWN_KEY!r}: {own!r}; this version knows an object with "
            f"{', '.join(_OWN_FIELDS)}: update jaxlab, or remove it"
        )
    try:
        return XLSTMConfig.model_validate({**fields, "eos_token_id": eos, **own})
    except ValidationError as error:
        raise CheckpointError(
            f"config.json does not describe a possible xlstm model: {reasons(error)}"
        ) from error


def xlstm_to_hf(config: XLSTMConfig, *, dtype: str | None = None) -> dict[str, Any]:
    """The `config.json` that transformers loads as the same model.

    Models with sLSTM blocks, a sigmoid input gate or no normaliser exist here only; the keys that
    say so are under "jaxlab".

    Args:
      config: the model.
      dtype: name of the type that the weights are stored in, `config.param_dtype` by default.
    """
    dtype = dtype or config.param_dtype
    eos = config.eos_token_id
    hf: dict[str, Any] = {
        "architectures": ["xLSTMForCausalLM"],
        "model_type": "xlstm",
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    for name, keys, _ in _FIELDS:
        value = getattr(config, name)
        if name.endswith("cap") and value is None:
            raise ArchitectureError(
                f"{name} is null: transformers' xlstm always caps. Set a cap, one so large that it "
                "does nothing (1e4) if need be"
            )
        for key in keys:
            hf.setdefault(key, value)
    hf |= {
        "head_dim": config.v_head_dim,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "add_out_norm": True,
        "norm_reduction_force_float32": True,
        "mode": "inference",
        "chunk_size": config.chunk_size or 64,
        "return_last_states": True,
        "autocast_kernel_dtype": dtype,
        "inference_state_dtype": config.state_dtype,
        "use_cache": True,
    }
    own = config.model_dump(mode="json", include=set(_OWN_FIELDS), exclude_defaults=True)
    if config.cell_norm_eps == config.norm_eps:
        own.pop("cell_norm_eps", None)
    if own:
        hf[_OWN_KEY] = own
    return hf
