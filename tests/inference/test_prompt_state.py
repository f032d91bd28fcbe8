"""States of prompts: kept, found again, refused where they do not belong."""

import jax
import numpy as np
import pytest

import jaxlab
from jaxlab.data.tokenizers import ByteTokenizer
from jaxlab.errors import CheckpointError, ConfigError, StorageError
from jaxlab.inference import PromptState, SamplingParams
from jaxlab.models import XLSTM, ModelConfig, Transformer, XLSTMConfig, init_params

CONFIG = XLSTMConfig(
    vocab_size=259,
    embedding_dim=32,
    num_blocks=3,
    num_heads=2,
    block_pattern="mms",
    igate_bias_init=0.0,
)
PROMPT = "It was the best of times, it was the worst of times, " * 3
GREEDY = SamplingParams(max_new_tokens=12)


def make(config=CONFIG, seed=0):
    return jaxlab.Model(
        XLSTM(config), init_params(XLSTM(config), jax.random.key(seed)), ByteTokenizer()
    )


@pytest.fixture(scope="module")
def model():
    return make()


@pytest.fixture
def saved(model, tmp_path):
    path = tmp_path / "prompt.state"
    model.generator.read(PROMPT).save(path)
    return path


def test_going_on_is_as_if_the_prompt_had_been_read(model, saved):
    state = PromptState.load(saved, model.config, model.params)
    assert state.num_tokens == len(PROMPT) + 1
    for text in ("", "it was the age"):
        [whole] = model.generator.generate(PROMPT + text, GREEDY)
        [continued] = model.generator.generate(text, GREEDY, after=state)
        assert continued.token_ids == whole.token_ids
    # Several questions about one prompt, together.
    together = model.generator.generate(["", "it was the age"], GREEDY, after=state)
    assert together[1].token_ids == continued.token_ids
    assert "".join(model.generator.stream("", GREEDY, after=state)) == together[0].text


def test_the_file_is_as_large_for_a_longer_prompt(model, saved, tmp_path):
    model.generator.read(PROMPT * 5).save(tmp_path / "longer.state")
    assert abs((tmp_path / "longer.state").stat().st_size - saved.stat().st_size) <= 8


def test_stacked_layers_go_on_from_it_too(model, saved):
    from jaxlab.inference import Generator

    stacked = Generator(model.module, model.params, model.tokenizer, unstack=False)
    state = PromptState.load(saved, model.config, model.params)
    [expected] = model.generator.generate("it", GREEDY, after=state)
    [actual] = stacked.generate("it", GREEDY, after=state)
    assert actual.token_ids == expected.token_ids


def test_another_model_is_refused(saved, tmp_path):
    other = make(CONFIG.replace(embedding_dim=64))
    with pytest.raises(CheckpointError, match="embedding_dim is 32 there and 64 here"):
        PromptState.load(saved, other.config, other.params)
    twin = make(seed=1)
    with pytest.raises(CheckpointError, match="other parameters"):
        PromptState.load(saved, twin.config, twin.params)
    config = ModelConfig(
        vocab_size=259, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2
    )
    transformer = jaxlab.Model(
        Transformer(config), init_params(Transformer(config), jax.random.key(0)), ByteTokenizer()
    )
    with pytest.raises(ConfigError, match="use an xLSTM"):
        transformer.generator.read(PROMPT)


def test_damaged_files_are_refused(model, saved, tmp_path):
    data = saved.read_bytes()
    for name, content in (
        ("empty", b""),
        ("cut", data[: len(data) // 2]),
        ("other", data.replace(b"jaxlab prompt state 1", b"jaxlab prompt state 9")),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=name):
            PromptState.load(path, model.config, model.params)
    with pytest.raises(CheckpointError, match="does not exist"):
        PromptState.load(tmp_path / "missing", model.config, model.params)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        model.generator.read("a").save(tmp_path / "file" / "x.state")


def test_a_prompt_without_bos():
    model = make(CONFIG.replace(bos_token_id=1))
    assert model.generator.encode("ab")[0] == 1
    assert model.generator.encode("ab") == [1, *ByteTokenizer().encode("ab")]
    with pytest.warns(UserWarning, match="begins with token 70"):
        model.generator.encode([70, 71])
    np.testing.assert_array_equal(model.generator.encode([1, 70]), [1, 70])
