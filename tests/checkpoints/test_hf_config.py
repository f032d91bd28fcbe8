"""config.json in its many spellings."""

import contextlib
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES, tiny_config

from jaxlab.checkpoints import config_from_hf, config_to_hf
from jaxlab.errors import ArchitectureError, CheckpointError, JaxlabError
from jaxlab.models import ModelConfig

LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
TRAINED = {"original_max_position_embeddings": 16}
SCALINGS = [
    None,
    {"type": "linear", "factor": 2.0},
    {"type": "dynamic", "factor": 4.0},
    {"type": "llama3", **LLAMA3_SCALING},
    {"type": "yarn", "factor": 4.0, **TRAINED},
    {
        "type": "yarn",
        "factor": 4.0,
        "beta_fast": 16.0,
        "attention_factor": 1.2,
        "truncate": False,
        **TRAINED,
    },
    {"type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.5, **TRAINED},
]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_survives_the_round_trip(family):
    config = tiny_config(family)
    again = config_from_hf(config_to_hf(config))
    assert again.layer_windows == config.layer_windows
    assert math.isclose(again.query_scale or 1, config.query_scale or 1)
    ignored = {"query_scale", "layer_types"}
    assert again.model_dump(exclude=ignored) == config.model_dump(exclude=ignored)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s and s["type"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
def test_rope_scaling_survives_the_round_trip(family, scaling):
    config = tiny_config(family, rope_theta=5e5, rope_scaling=scaling)
    again = config_from_hf(config_to_hf(config))
    assert again.rope_theta == 5e5
    assert again.rope_scaling == config.rope_scaling


def test_both_spellings_of_rope_are_read_alike():
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_SCALING}}
    new = LLAMA | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3_SCALING}}
    assert config_from_hf(old) == config_from_hf(new)
    assert config_from_hf(old).rope_scaling.original_max_position_embeddings == 32
    nested = LLAMA | {"rope_parameters": {"full_attention": new["rope_parameters"]}}
    assert config_from_hf(nested) == config_from_hf(new)


def test_yarn_without_factor_takes_the_ratio_of_lengths():
    config = config_from_hf(
        LLAMA
        | {
            "max_position_embeddings": 128,
            "rope_scaling": {
                "rope_type": "yarn",
                "original_max_position_embeddings": 32,
                "factor": None,
            },
        }
    )
    assert config.rope_scaling.factor == 4.0


def test_defaults_of_the_families():
    assert config_from_hf(LLAMA).tie_word_embeddings is False
    assert config_from_hf(LLAMA).num_kv_heads == 4
    assert config_from_hf(LLAMA).head_dim == 8
    gemma = config_from_hf(LLAMA | {"model_type": "gemma2"})
    assert gemma.tie_word_embeddings
    assert gemma.layer_types == ("sliding", "full", "sliding")
    assert gemma.query_scale is None  # query_pre_attn_scalar and head_dim are both 256
    assert gemma.embedding_scale == pytest.approx(math.sqrt(32))
    assert (
        config_from_hf(LLAMA | {"model_type": "mistral", "num_key_value_heads": 2}).sliding_window
        == 4096
    )
    neox = config_from_hf(
        LLAMA | {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 500}
    )
    assert (neox.rotary_fraction, neox.rope_theta, neox.parallel_residual) == (0.5, 500.0, True)


def test_qwen_windows_need_the_switch():
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 16, "max_window_layers": 1}
    assert config_from_hf(qwen).layer_windows == (None, None, None)
    assert config_from_hf(qwen | {"use_sliding_window": True}).layer_windows == (None, 16, 16)


def test_end_of_text_ids_may_be_several():
    assert config_from_hf(LLAMA | {"eos_token_id": [2, 5]}).eos_token_id == (2, 5)
    assert config_from_hf(LLAMA | {"eos_token_id": [2]}).eos_token_id == 2
    assert config_to_hf(tiny_config("llama", eos_token_id=(2, 5)))["eos_token_id"] == [2, 5]


def test_an_unknown_architecture_is_named_with_the_supported_ones():
    with pytest.raises(ArchitectureError, match=r"'mamba'.*llama, mistral, qwen2"):
        config_from_hf(LLAMA | {"model_type": "mamba"})
    with pytest.raises(ArchitectureError, match="None"):
        config_from_hf({})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu2"}, "relu2.*supported: silu"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope.*linear, dynamic"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"model_type": "qwen2", "layer_types": ["linear_attention"] * 3}, "linear_attention"),
    ],
)
def test_what_is_not_implemented_is_refused(change, message):
    with pytest.raises(ArchitectureError, match=message):
        config_from_hf(LLAMA | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_theta": 0}, "rope_theta in config.json is 0, "),
        ({"rope_theta": 0, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta in config.json"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_parameters.rope_theta .* nan"),
        ({"rope_theta": -1}, "rope_theta in config.json is -1, .*above 0"),
        ({"num_key_value_heads": 3}, "llama model: model: num_heads"),
    ],
)
def test_impossible_numbers_are_named(change, message):
    with pytest.raises(CheckpointError, match=message):
        config_from_hf(LLAMA | change)


def test_impossible_values_are_refused():
    with pytest.raises(CheckpointError, match="lacks hidden_size"):
        config_from_hf({key: value for key, value in LLAMA.items() if key != "hidden_size"})
    with pytest.raises(CheckpointError, match="num_kv_heads"):
        config_from_hf(LLAMA | {"num_key_value_heads": 3})
    with pytest.raises(CheckpointError, match=r"rope_scaling.factor"):
        config_from_hf(LLAMA | {"rope_scaling": {"type": "linear"}})


JUNK = st.none() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=3)


@settings(deadline=None, max_examples=300)
@given(
    family=st.sampled_from(FAMILIES),
    key=st.integers(0, 40),
    nested=st.booleans(),
    junk=JUNK | st.dictionaries(st.sampled_from(["factor", "rope_type", "type"]), JUNK),
)
def test_junk_in_a_config_never_escapes(family, key, nested, junk):
    scaling = {"type": "yarn", "factor": 4.0, **TRAINED}
    hf = config_to_hf(tiny_config(family, rope_scaling=scaling))
    place = hf["rope_scaling"] if nested else hf
    place[list(place)[key % len(place)]] = junk
    with contextlib.suppress(JaxlabError):
        config_from_hf(hf)


def test_absurd_depth_is_refused():
    with pytest.raises(CheckpointError, match="2147483647 layers"):
        config_from_hf(LLAMA | {"model_type": "gemma2", "num_hidden_layers": 2**31 - 1})


def test_saving_refuses_what_the_architecture_cannot_say():
    odd = tiny_config("llama", sliding_window=16)
    with pytest.raises(
        ArchitectureError, match=r"llama.*cannot express layer_windows=\(16, 16, 16\)"
    ):
        config_to_hf(odd)
    with pytest.raises(ArchitectureError, match="qk_norm"):
        config_to_hf(tiny_config("llama", qk_norm=True))


def test_how_to_run_a_model_is_not_part_of_it():
    config = tiny_config("llama", dtype="bfloat16", param_dtype="bfloat16", remat="full")
    hf = config_to_hf(config)
    assert hf["dtype"] == hf["torch_dtype"] == "bfloat16"
    assert config_to_hf(config, dtype="float16")["dtype"] == "float16"
    assert isinstance(config_from_hf(hf), ModelConfig)
    assert config_from_hf(hf).param_dtype == "float32"
