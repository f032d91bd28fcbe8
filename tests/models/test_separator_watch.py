"""SepLLM on texts without a separator: said once, wherever tokens come in."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.data.tokenizers import ByteTokenizer
from jaxlab.model import Model
from jaxlab.models import ModelConfig, Transformer, init_params
from jaxlab.models.attention.separator_watch import SeparatorWatch

TINY = {
    "vocab_size": 259,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "max_position_embeddings": 64,
}
SEPLLM = {"pattern": "sepllm", "window": 4, "separators": [46, 44]}
WARNED = r"attention\.pattern=sepllm found no separator among {} tokens.*2 token ids.*_only"
CALLS = {
    "model": lambda model: model(list(b"abc")),
    "extend": lambda model: model.extend(model.params, model.init_cache(1, 8), [list(b"abc")]),
    "generate": lambda model: model.generate("abc", max_new_tokens=1),  # with a BOS
}


def watch(**attention) -> SeparatorWatch:
    return SeparatorWatch(ModelConfig(**TINY, attention=SEPLLM | attention))


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_it_warns_once(recwarn):
    separators = watch()
    for _ in range(2):
        separators.look(np.full((2, 5), 7))
    assert len(recwarn) == 1
    with pytest.warns(UserWarning, match=WARNED.format(10)):
        watch().look(np.full((2, 5), 7))


def test_tokens_that_are_not_real_do_not_count():
    tokens = [[7, 7, 46], [7, 46, 46]]
    with pytest.warns(UserWarning, match=WARNED.format(3)):
        watch().look(tokens, [2, 1])


@pytest.mark.parametrize("tokens", [[[7, 46, 8]], [44], np.zeros((1, 0), np.int32)])
def test_texts_with_separators_are_fine(quiet, tokens):
    watch().look(tokens)


@pytest.mark.parametrize("attention", ["full", SEPLLM | {"separators": "none"}])
def test_models_that_want_no_separators_are_fine(quiet, attention):
    SeparatorWatch(ModelConfig(**TINY, attention=attention)).look([7, 7])


def test_it_is_silent_under_jit(quiet):
    def traced(tokens):
        watch().look(tokens)
        return tokens

    jax.jit(traced)(jnp.ones((1, 3), jnp.int32))


@pytest.fixture(scope="module")
def module():
    return Transformer(ModelConfig(**TINY, attention=SEPLLM))


@pytest.fixture(scope="module")
def params(module):
    return init_params(module, jax.random.key(0))


@pytest.mark.parametrize("call", CALLS)
def test_each_way_into_a_model_warns(module, params, call):
    model = Model(module, params, ByteTokenizer())
    with pytest.warns(UserWarning, match=WARNED.format("[34]")):
        CALLS[call](model)


def test_going_on_without_separators_is_fine(quiet, module, params):
    model = Model(module, params)
    _, cache = model.extend(params, model.init_cache(1, 8), [list(b"ab.")])
    model.extend(params, cache, [list(b"abc")])
