"""What an unknown key's error suggests: something that exists, near, and is no ancestor of it."""

import pytest

from jaxlab.config import parse_config
from jaxlab.errors import ConfigError
from jaxlab.models import ModelConfig
from jaxlab.training.config import ExperimentConfig

MODEL = {
    "vocab_size": 9,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_layers": 1,
    "num_heads": 2,
}


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        ({"window": 4}, "`attention.window` goes with attention.pattern=sepllm"),
        ({"pattern": "cca", "separators": "none"}, "goes with attention.pattern=sepllm"),
        (
            {"pattern": "cca", "window": 4},
            "did you mean `attention.window_size`? `attention.window` goes with "
            "attention.pattern=sepllm",
        ),
        (
            {"group_sise": 4},
            "did you mean `attention.group_size`, which goes with attention.pattern=cca?",
        ),
        (
            {"pattern": "sepllm", "windw": 4},
            "unknown key `attention.windw`; did you mean `attention.window`?",
        ),
        ({"foo": 4}, "`attention.foo`; `attention` has the keys implementation, pattern"),
        ({"attention": 4}, "`attention.attention`; `attention` has the keys implementation"),
        ([{"window": 4}], "`attention[0].window` goes with attention[0].pattern=sepllm"),
    ],
)
def test_of_attention(attention, expected):
    with pytest.raises(ConfigError) as caught:
        parse_config(ModelConfig, {**MODEL, "attention": attention})
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"training": {"step": 3}}, "did you mean `training.steps`?"),
        ({"training": {"batch_size": 3}}, "did you mean `data.batch_size`?"),
        ({"learning_rate": 3}, "did you mean `optimizer.learning_rate`?"),
        ({"trainng": {"steps": 3}}, "did you mean `training`?"),
        ({"training": {"training": 3}}, "`training` has the keys accumulate, checkpoint_every"),
        ({"mesh": {"zzz": 3}}, "`mesh` has the keys "),
        ({"training": {"only": []}}, "`training.only` is []; expected a list of at least 1"),
        ({"output_dir": ""}, "`output_dir` is ''; expected a text that is not empty"),
    ],
)
def test_of_an_experiment(tree, expected):
    with pytest.raises(ConfigError) as caught:
        parse_config(ExperimentConfig, {"name": "x", "output_dir": "y", **tree})
    assert expected in str(caught.value)
