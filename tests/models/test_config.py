"""The model configuration: defaults, refusals, hashing."""

import pytest
from pydantic import ValidationError

from jaxlab.models import ModelConfig, RopeScaling

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
}


def test_defaults_follow_the_heads():
    config = ModelConfig(**TINY)
    assert (config.num_kv_heads, config.head_dim, config.rotary_dim) == (4, 8, 8)
    assert config.layer_windows == (None, None)
    assert config.eos_token_ids == ()


def test_sliding_window_applies_to_every_layer_unless_types_say_otherwise():
    assert ModelConfig(**TINY, sliding_window=7).layer_windows == (7, 7)
    mixed = ModelConfig(**TINY, sliding_window=7, layer_types=("sliding", "full"))
    assert mixed.layer_windows == (7, None)


def test_hashable_and_replaceable():
    config = ModelConfig(**TINY, rope_scaling=RopeScaling(type="linear", factor=2.0))
    assert hash(config) == hash(config.replace())
    changed = config.replace(num_kv_heads=2, rope_scaling=None)
    assert (changed.num_kv_heads, changed.rope_scaling) == (2, None)
    assert config.num_kv_heads == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads that divides 4"),
        ({"hidden_size": 33}, "hidden_size 33 is not divisible by num_heads 4"),
        ({"layer_types": ("full",)}, "1 entries for num_layers 2"),
        ({"layer_types": ("full", "sliding")}, "set sliding_window"),
        ({"rotary_fraction": 0.4}, "3 of 8 channels"),
        ({"vocab_size": 0}, "greater than 0"),
        ({"num_experts": 4}, "num_experts"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "original_max_position_embeddings"),
    ],
)
def test_refusals_name_the_value_and_the_remedy(change, words):
    with pytest.raises(ValidationError, match=words):
        ModelConfig(**{**TINY, **change})
