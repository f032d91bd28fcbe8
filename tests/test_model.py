"""The facade: `jaxlab.load`, and what a model in hand can do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlab
from jaxlab.data.tokenizers import load_tokenizer
from jaxlab.errors import CheckpointError, ConfigError, PromptError, TokenizerError
from jaxlab.models import ModelConfig, Transformer, init_params


def tiny_config(**changes) -> ModelConfig:
    fields = {
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "max_position_embeddings": 64,
    }
    return ModelConfig(**{**fields, **changes})


def make_model(**changes) -> jaxlab.Model:
    module = Transformer(tiny_config(**changes))
    return jaxlab.Model(module, init_params(module, jax.random.key(0)), load_tokenizer("byte"))


@pytest.fixture(scope="module")
def model() -> jaxlab.Model:
    return make_model()


@pytest.fixture(scope="module")
def directory(model, tmp_path_factory):
    return model.save(tmp_path_factory.mktemp("saved") / "model")


def test_saved_and_loaded_again_it_is_the_same_model(model, directory):
    loaded = jaxlab.load(directory)
    tokens = jnp.arange(12)[None]
    np.testing.assert_array_equal(loaded(tokens), model(tokens))
    assert loaded.config == model.config.replace(
        **{name: getattr(loaded.config, name) for name in ("bos_token_id", "eos_token_id")},
        pad_token_id=loaded.config.pad_token_id,
    )
    assert loaded.tokenizer.encode("é") == model.tokenizer.encode("é")


def test_apply_is_pure_and_goes_through_jit_grad_and_vmap(model):
    tokens = jnp.arange(10).reshape(2, 5)
    logits = jax.jit(model.apply)(model.params, tokens)
    np.testing.assert_allclose(logits, model(tokens), atol=1e-6)
    each = jax.vmap(lambda row: model.apply(model.params, row[None])[0])(tokens)
    np.testing.assert_allclose(each, logits, atol=1e-5)
    grads = jax.grad(lambda p: model.apply(p, tokens).sum())(model.params)
    assert jax.tree.structure(grads) == jax.tree.structure(model.params)


def test_one_row_of_tokens_is_a_batch_of_one(model):
    np.testing.assert_array_equal(model([5, 6, 7]), model([[5, 6, 7]]))


def test_extend_leaves_the_cache_it_was_given(model):
    tokens = jnp.arange(8)[None]
    cache = model.init_cache(batch_size=1, max_length=8)
    first, held = model.extend(model.params, cache, tokens[:, :5])
    tried, _ = model.extend(model.params, held, [[9, 9]])
    again, full = model.extend(model.params, held, tokens[:, 5:])
    np.testing.assert_allclose(jnp.concatenate([first, again], axis=1), model(tokens), atol=1e-5)
    assert held.lengths.tolist() == [5]
    assert tried.shape == (1, 2, 259)
    with pytest.raises(PromptError, match="full"):
        model.extend(model.params, full, [[1]])


def test_generate_takes_every_kind_of_prompt(model):
    text = model.generate("abc", max_new_tokens=5)
    assert len(text) == 1
    both = model.generate(["abc", "a longer prompt"], max_new_tokens=5)
    assert both[0] == text[0]
    assert "".join(model.stream("abc", max_new_tokens=5)) == text[0]
    with pytest.raises(TokenizerError, match="chat template"):
        model.generate([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (None, "prompts is None, a NoneType"),
        (3, "prompts is 3, a int"),
        (b"text", "prompts is b'text', a bytes"),
        ([["a", "b"]], "is not one prompt"),
        ([[1.5]], "is not one prompt"),
    ],
)
def test_what_is_no_prompt_is_named(model, prompts, expected):
    with pytest.raises(PromptError, match=expected):
        model.generate(prompts, max_new_tokens=1)


def test_an_empty_stop_string_is_refused(model):
    with pytest.raises(ConfigError, match="stop contains ''"):
        model.generate("a", stop="")


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([[259]], "tokens holds 259, which is not within 0 … 258"),
        ([[-1]], "tokens holds -1, which"),
        ([], "at least one token"),
        ([[[1]]], "the shape"),
        ([[1.5]], "not integers"),
    ],
)
def test_tokens_no_text_can_have_are_refused(model, tokens, expected):
    with pytest.raises(PromptError, match=expected):
        model(tokens)
    with pytest.raises(PromptError, match=expected):
        model.extend(model.params, model.init_cache(1, 8), tokens)


def test_extend_checks_rows_and_their_lengths(model):
    cache = model.init_cache(2, 8)
    with pytest.raises(PromptError, match="3 rows and the cache 2"):
        model.extend(model.params, cache, [[1]] * 3)
    for num_tokens in (-1, [1, 3]):
        with pytest.raises(PromptError, match="num_tokens holds"):
            model.extend(model.params, cache, [[1, 2]] * 2, num_tokens)


def test_sampling_is_reproducible_by_seed(model):
    def sample(seed):
        return model.generate("abc", max_new_tokens=20, temperature=1.0, seed=seed)

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_overrides_are_checked_by_name(directory):
    half = jaxlab.load(directory, dtype="bfloat16", param_dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(half.params)} == {jnp.dtype("bfloat16")}
    with pytest.raises(ConfigError, match="did you mean `rope_theta`"):
        jaxlab.load(directory, rope_thetta=1e6)
    with pytest.raises(ConfigError, match="pattern"):
        jaxlab.load(directory, attention={"pattern": "fulll"})


def test_loading_onto_a_mesh_gives_the_same_logits(model, directory):
    from jaxlab.training import MeshConfig, make_mesh

    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2))
    sharded = jaxlab.load(directory, mesh=mesh)
    kernel = sharded.params["layers"]["mlp"]["up_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 4
    tokens = jnp.arange(12)[None]
    np.testing.assert_allclose(sharded(tokens), model(tokens), atol=1e-5)
    assert sharded.generate("abc", max_new_tokens=8) == model.generate("abc", max_new_tokens=8)


def test_a_tokenizer_must_fit_the_model():
    with pytest.raises(TokenizerError, match="259"):
        make_model(vocab_size=200)


def test_an_unknown_source_is_named():
    with pytest.raises(CheckpointError, match="smollm2-135m-instruct"):
        jaxlab.load("smollm2-135m-instrukt")


def test_importing_jaxlab_does_not_import_jax():
    import subprocess
    import sys

    code = "import jaxlab, sys; assert 'jax' not in sys.modules; jaxlab.__version__"
    subprocess.run([sys.executable, "-c", code], check=True)
