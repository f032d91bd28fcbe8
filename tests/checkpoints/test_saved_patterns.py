"""Attention patterns and shifted keys in saved directories and on loaded checkpoints."""

import json

import jax
import numpy as np
import pytest

import jaxlab
from jaxlab.checkpoints import save_pretrained
from jaxlab.data.tokenizers import ByteTokenizer
from jaxlab.errors import CheckpointError, ConfigError
from jaxlab.models import ModelConfig, Transformer, init_params, resolve_attention

CONFIG = ModelConfig(
    vocab_size=512,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
)


@pytest.fixture
def save(tmp_path):
    """Writes a model's directory; returns it with the parameters."""

    def write(config, name="model"):
        params = init_params(Transformer(config), jax.random.key(0))
        save_pretrained(tmp_path / name, params, config, ByteTokenizer())
        return tmp_path / name, params

    return write


def test_a_saved_directory_remembers_pattern_and_coefficients(save):
    config = CONFIG.replace(
        attention=[{"pattern": "sepllm", "window": 8, "separators": [1, 2]}, {"pattern": "cca"}],
        kv_shift={"window": 3, "values": False},
    )
    directory, params = save(config)
    model = jaxlab.load(directory)
    assert model.config.attention == config.attention
    assert model.config.kv_shift == config.kv_shift
    jax.tree.map(np.testing.assert_array_equal, model.params, params)
    own = json.loads((directory / "config.json").read_text())["jaxlab"]
    assert own["kv_shift"] == {"window": 3, "values": False}


def test_a_plain_model_carries_nothing_of_ours(save):
    directory, _ = save(CONFIG)
    assert "jaxlab" not in json.loads((directory / "config.json").read_text())


def test_a_checkpoint_gets_another_pattern_when_it_is_loaded(save):
    directory, params = save(CONFIG)
    model = jaxlab.load(directory, attention={"pattern": "sepllm", "window": 4})
    # The rule became ids of this tokenizer: . , ? ! ; : space, tab, newline.
    expected = sorted(ByteTokenizer().encode(".,?!;: \t\n"))
    assert sorted(model.config.attention.separators) == expected
    jax.tree.map(np.testing.assert_array_equal, model.params, params)
    assert jaxlab.load(directory, attention="cca").config.attention.group_size == 16


def test_shifting_a_checkpoint_begins_at_identity_or_not_at_all(save):
    directory, _ = save(CONFIG)
    tokens = np.arange(10)[None] + 5
    model = jaxlab.load(directory, kv_shift={"init": "identity"})
    np.testing.assert_array_equal(model(tokens), jaxlab.load(directory)(tokens))
    with pytest.raises(CheckpointError, match=r"set kv_shift\.init to 'identity'"):
        jaxlab.load(directory, kv_shift={})


def test_strings_and_ids_may_be_mixed():
    config = CONFIG.replace(attention={"pattern": "sepllm", "separators": [7, "."]})
    resolved = resolve_attention(config, ByteTokenizer())
    [dot] = ByteTokenizer().encode(".")
    assert resolved.attention.separators == tuple(sorted((7, dot)))
    for text in ("never one", ""):
        unknown = CONFIG.replace(attention={"pattern": "sepllm", "separators": [".", text]})
        with pytest.raises(ConfigError, match=f"'{text}', which is no single token"):
            resolve_attention(unknown, ByteTokenizer())
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        resolve_attention(config, None)
    assert resolve_attention(CONFIG, None) is CONFIG


def test_thresholds_come_from_a_calibration(tmp_path):
    path = tmp_path / "thresholds.json"
    path.write_text(json.dumps({"threshold": [[0.5] * 4, [0.9] * 4]}))
    config = CONFIG.replace(attention={"pattern": "xattention", "threshold": str(path)})
    resolved = resolve_attention(config, None)
    assert resolved.attention.threshold == ((0.5,) * 4, (0.9,) * 4)
    for content, words in (
        ('{"threshold": [[0.5]]}', r"\[layers\]\[heads\] = 2 rows of 4"),
        ('{"threshold": 3}', r"of the form \[layers\]\[heads\]"),
        ("[", "not a calibration"),
    ):
        path.write_text(content)
        with pytest.raises((ConfigError, ValueError), match=words):
            resolve_attention(config, None)
    missing = CONFIG.replace(attention={"pattern": "xattention", "threshold": "nowhere.json"})
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        resolve_attention(missing, None)


def test_an_unknown_key_of_ours_is_named(save):
    directory, _ = save(CONFIG)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"jaxlab": {"kv_shfit": {}}}))
    with pytest.raises(CheckpointError, match="kv_shfit"):
        jaxlab.load(directory)
