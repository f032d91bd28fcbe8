"""Perplexity equals the mean of the log-probabilities that the plain model gives."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlab.data import DataConfig
from jaxlab.data.tokenizers import ByteTokenizer
from jaxlab.errors import ConfigError, DataError
from jaxlab.evaluation import perplexity, text_perplexity
from jaxlab.evaluation.perplexity import sliding_windows
from jaxlab.model import Model
from jaxlab.models import ModelConfig, Transformer, init_params

CONTEXT = 32
TEXT = "It was the best of times, it was the worst of times — naïve, perhaps."


@pytest.fixture(scope="module")
def model() -> Model:
    config = ModelConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
    )
    module = Transformer(config)
    return Model(module, init_params(module, jax.random.key(0)), ByteTokenizer())


def losses(model: Model, ids: list[int], context_of) -> list[float]:
    """-log p of each token but the first, seeing `ids[context_of(i):i]`; one model call each."""
    apply = jax.jit(model.apply)
    result = []
    for i in range(1, len(ids)):
        seen = ids[context_of(i) : i]
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(seen)] = seen
        log_probabilities = jax.nn.log_softmax(apply(model.params, padded)[0, len(seen) - 1])
        result.append(-float(log_probabilities[ids[i]]))
    return result


@pytest.mark.parametrize(("window", "stride"), [(32, 32), (32, 16), (32, 1), (20, 7), (1, 1)])
def test_sliding_window_equals_the_definition(model, window, stride):
    ids = model.tokenizer.encode(TEXT, True)
    last = len(ids) - 1

    def context_of(i: int) -> int:
        """Where the first window begins that predicts token i."""
        return next(start for start in range(0, last, stride) if i <= min(start + window, last))

    expected = losses(model, ids, context_of)
    result = text_perplexity(model, TEXT, window=window, stride=stride, batch_size=3)
    assert result["tokens"] == last
    assert result["loss"] == pytest.approx(np.mean(expected), abs=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(np.mean(expected)), rel=1e-4)
    # BOS is context only, so all of the text's bytes are predicted.
    bits = sum(expected) / math.log(2) / len(TEXT.encode())
    assert result["bits_per_byte"] == pytest.approx(bits, rel=1e-5)


@given(st.integers(2, 200), st.integers(1, 40), st.integers(1, 40), st.integers(1, 5))
def test_each_token_is_predicted_exactly_once(length, window, stride, batch_size):
    stride = min(stride, window)
    tokens = np.arange(length, dtype=np.int32)
    predicted = []
    for batch in sliding_windows(tokens, window, stride, batch_size):
        assert {array.shape[0] for array in batch.values()} == {batch_size}
        scored = batch["loss_mask"] > 0
        np.testing.assert_array_equal(batch["targets"][scored], batch["tokens"][scored] + 1)
        predicted += batch["targets"][scored].tolist()
    assert sorted(predicted) == list(range(1, length))


@pytest.fixture
def corpus(tmp_path) -> str:
    path = tmp_path / "corpus.jsonl"
    lines = [{"text": f"Document {i}: {TEXT[: 10 + i]}"} for i in range(12)]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(path)


def test_packed_batches_equal_the_model_on_each_row(model, corpus):
    from jaxlab.data import make_pipeline

    data = DataConfig(
        source=corpus, validation_source=corpus, sequence_length=24, batch_size=4, shuffle=False
    )
    result = perplexity(model, data)
    nats, tokens = 0.0, 0
    for batch in make_pipeline(data, model.tokenizer, split="validation"):
        logits = model.apply(
            model.params,
            jnp.asarray(batch["tokens"]),
            positions=jnp.asarray(batch["positions"]),
            segment_ids=jnp.asarray(batch["segment_ids"]),
        )
        chosen = np.take_along_axis(
            np.asarray(jax.nn.log_softmax(logits)), batch["targets"][..., None], axis=-1
        )[..., 0]
        nats -= float((chosen * batch["loss_mask"]).sum())
        tokens += int(batch["loss_mask"].sum())
    assert result["tokens"] == tokens > 0
    assert result["loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / tokens, rel=0.2)
    fewer = perplexity(model, data, max_batches=1)
    assert 0 < fewer["tokens"] < tokens


def test_bad_arguments_are_named(model, corpus):
    with pytest.raises(DataError, match="at least two"):
        text_perplexity(model, "")
    with pytest.raises(ConfigError, match=r"window=33.*32 tokens"):
        text_perplexity(model, TEXT, window=33)
    with pytest.raises(ConfigError, match="stride=0"):
        text_perplexity(model, TEXT, stride=0)
    with pytest.raises(ConfigError, match="batch_size=0"):
        text_perplexity(model, TEXT, batch_size=0)
    data = DataConfig(source=corpus, validation_source=corpus, sequence_length=64)
    with pytest.raises(ConfigError, match=r"sequence_length=64.*32 tokens"):
        perplexity(model, data)
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        text_perplexity(Model(model.module, model.params), TEXT)
