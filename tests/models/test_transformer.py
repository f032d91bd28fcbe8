"""The transformer: forms that must agree, masks that must hold, caches that undo."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlab.errors import PromptError
from jaxlab.models import (
    ModelConfig,
    Transformer,
    abstract_params,
    init_cache,
    init_params,
    logical_axes,
    unstack_layers,
)

TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "initializer_range": 0.15,  # large enough that a wrong mask shows
}
# Every feature a family turns on, in combinations no single family has.
CONFIGS = {
    "llama": ModelConfig(**TINY),
    "sliding": ModelConfig(**TINY, sliding_window=5, qkv_bias=True),
    "gemma2": ModelConfig(
        **TINY,
        sliding_window=4,
        layer_types=("sliding", "full") * 2,
        post_norms=True,
        norm_unit_offset=True,
        activation="gelu_tanh",
        attention_softcap=5.0,
        final_softcap=3.0,
        embedding_scale=32**0.5,
        query_scale=0.2,
        tie_word_embeddings=True,
    ),
    "neox": ModelConfig(
        **{**TINY, "num_kv_heads": 4},
        norm="layernorm",
        parallel_residual=True,
        rotary_fraction=0.25,
        activation="gelu",
        gated_mlp=False,
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
    ),
    "three_groups": ModelConfig(
        **TINY, sliding_window=3, layer_types=("full", "sliding", "sliding", "full"), qk_norm=True
    ),
}
TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=CONFIGS)
def model(request):
    """Module, parameters with non-trivial scales and biases, and its jitted functions."""
    module = Transformer(CONFIGS[request.param])
    params = init_params(module, jax.random.key(0))
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [p + 0.05 * jax.random.normal(k, p.shape) for p, k in zip(leaves, keys, strict=True)]
    apply = jax.jit(lambda p, t, **kw: module.apply({"params": p}, t, **kw))
    return module, jax.tree.unflatten(treedef, noisy), apply


def random_tokens(shape, seed=2):
    return jax.random.randint(jax.random.key(seed), shape, 0, TINY["vocab_size"])


def test_logits_are_float32_and_every_parameter_matters(model):
    module, params, apply = model
    tokens = random_tokens((2, 13))
    logits = apply(params, tokens)
    assert logits.shape == (2, 13, module.config.vocab_size)
    assert logits.dtype == jnp.float32
    grads = jax.grad(lambda p: jnp.sum(jnp.sin(apply(p, tokens))))(params)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert float(jnp.max(jnp.abs(grad))) > 0, f"{jax.tree_util.keystr(path)} has no influence"


def test_unrolled_equals_scanned(model):
    _, params, apply = model
    tokens = random_tokens((2, 13))
    np.testing.assert_allclose(
        apply(unstack_layers(params), tokens), apply(params, tokens), atol=TOLERANCE
    )


def test_future_tokens_change_nothing(model):
    _, params, apply = model
    tokens = random_tokens((1, 12))
    changed = tokens.at[0, 7:].set((tokens[0, 7:] + 1) % TINY["vocab_size"])
    before, after = apply(params, tokens), apply(params, changed)
    np.testing.assert_allclose(before[0, :7], after[0, :7], atol=TOLERANCE)
    assert float(jnp.max(jnp.abs(before[0, 7:] - after[0, 7:]))) > 1e-2


def test_packed_documents_equal_separate_ones(model):
    _, params, apply = model
    lengths = (5, 1, 9)
    tokens = random_tokens((1, 18))  # three documents and three columns of padding
    segment_ids = jnp.array([[1] * 5 + [2] + [3] * 9 + [0] * 3])
    packed = apply(params, tokens, segment_ids=segment_ids)
    start = 0
    for length in lengths:
        alone = apply(params, tokens[:, start : start + length])
        np.testing.assert_allclose(packed[:, start : start + length], alone, atol=TOLERANCE)
        start += length


@pytest.mark.parametrize("unstacked", [False, True])
@pytest.mark.parametrize("blocks", [(13,), (6, 1, 6), (1,) * 13])
def test_prefill_equals_chunks_equals_steps(model, blocks, unstacked):
    module, params, apply = model
    tokens = random_tokens((2, 13))
    whole = apply(params, tokens)
    if unstacked:
        params = unstack_layers(params)
    cache = init_cache(module.config, 2, 16, unstacked=unstacked)
    pieces, start = [], 0
    for block in blocks:
        logits, cache = apply(params, tokens[:, start : start + block], cache=cache)
        pieces.append(logits)
        start += block
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, atol=TOLERANCE)
    assert cache.lengths.tolist() == [13, 13]


def test_rows_of_different_lengths_equal_each_row_alone(model):
    """Right-padded prefill, rewound to the true lengths, then three steps."""
    module, params, apply = model
    tokens = random_tokens((3, 12))
    lengths = [3, 9, 6]
    cache = init_cache(module.config, 3, 16)
    _, cache = apply(params, tokens[:, :9], cache=cache)
    cache = cache.rewind(lengths)
    steps = []
    for step in range(3):
        column = jnp.stack([tokens[row, n + step] for row, n in enumerate(lengths)])[:, None]
        logits, cache = apply(params, column, cache=cache)
        steps.append(logits[:, 0])
    for row, n in enumerate(lengths):
        alone = apply(params, tokens[row : row + 1, : n + 3])[0, n:]
        np.testing.assert_allclose(jnp.stack([step[row] for step in steps]), alone, atol=TOLERANCE)


REWIND_MODULE = Transformer(CONFIGS["three_groups"])
REWIND_PARAMS = init_params(REWIND_MODULE, jax.random.key(0))
EXTEND = jax.jit(lambda c, t: REWIND_MODULE.apply({"params": REWIND_PARAMS}, t, cache=c))
APPLY = jax.jit(lambda t: REWIND_MODULE.apply({"params": REWIND_PARAMS}, t))


@settings(max_examples=20, deadline=None)
@given(keep=st.lists(st.integers(2, 8), min_size=2, max_size=2), seed=st.integers(0, 99))
def test_rewinding_is_as_if_never_extended(keep, seed):
    tokens = random_tokens((2, 4), seed)
    history = random_tokens((2, 8), seed + 100)
    _, cache = EXTEND(init_cache(REWIND_MODULE.config, 2, 16), history[:, :5])
    cache = cache.commit(2)
    _, cache = EXTEND(cache, history[:, 5:])
    tried, cache = EXTEND(cache.rewind(keep), tokens)

    for row, n in enumerate(keep):
        kept = jnp.concatenate([history[row, :n], tokens[row], history[row, n:]])  # 12 in all
        np.testing.assert_allclose(tried[row], APPLY(kept[None])[0, n : n + 4], atol=TOLERANCE)
    assert cache.lengths.tolist() == [n + 4 for n in keep]
    assert cache.committed.tolist() == [2, 2]


def test_cache_moves_refuse_what_they_cannot_do():
    config = CONFIGS["llama"]
    module = Transformer(config)
    params = init_params(module, jax.random.key(0))
    cache = init_cache(config, 2, 8)
    _, cache = module.apply({"params": params}, random_tokens((2, 5)), cache=cache)
    cache = cache.commit([3, 2])
    with pytest.raises(ValueError, match="rewind to length 2 in row 0"):
        cache.rewind(2)
    with pytest.raises(ValueError, match="commit to length 6 in row 0"):
        cache.commit(6)
    with pytest.raises(PromptError, match="max_length >= 9"):
        cache.check_room(4)
    with pytest.raises(ValueError, match="give each document a row"):
        module.apply(
            {"params": params},
            random_tokens((2, 1)),
            segment_ids=jnp.ones((2, 1), jnp.int32),
            cache=cache,
        )


def test_cache_reports_its_bytes():
    config = CONFIGS["gemma2"]
    expected = 2 * config.num_layers * 3 * 10 * config.num_kv_heads * config.head_dim * 2
    for unstacked in (False, True):
        cache = init_cache(config, 3, 10, dtype="bfloat16", unstacked=unstacked)
        assert cache.nbytes == expected + 2 * 3 * 4
        assert cache.max_length == 10


@pytest.mark.parametrize("policy", ["full", "dots", "dots_no_batch"])
def test_rematerialisation_changes_memory_not_gradients(policy):
    tokens = random_tokens((2, 64))

    def gradients(remat):
        module = Transformer(CONFIGS["gemma2"].replace(remat=remat))
        params = init_params(module, jax.random.key(0))
        loss = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(module.apply({"params": p}, tokens)))))
        memory = loss.lower(params).compile().memory_analysis().temp_size_in_bytes
        return loss(params), memory

    plain, plain_memory = gradients("none")
    saved, saved_memory = gradients(policy)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), plain, saved)
    assert saved_memory < plain_memory


def test_compute_and_parameter_types_are_separate():
    config = CONFIGS["llama"].replace(dtype="bfloat16", param_dtype="float32")
    module = Transformer(config)
    params = init_params(module, jax.random.key(0))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    tokens = random_tokens((1, 8))
    hidden = module.apply({"params": params}, tokens, method="hidden_states")
    assert hidden.dtype == jnp.bfloat16
    exact = Transformer(CONFIGS["llama"]).apply({"params": params}, tokens)
    rounded = module.apply({"params": params}, tokens)
    assert rounded.dtype == jnp.float32
    # bfloat16 keeps 8 bits; logits here are of order 10 and pass through 4 layers.
    assert float(jnp.max(jnp.abs(rounded - exact))) < 0.05 * float(jnp.max(jnp.abs(exact)))


def test_every_parameter_has_logical_axes_of_its_rank():
    for config in CONFIGS.values():
        module = Transformer(config)
        shapes, axes = abstract_params(module), logical_axes(module)
        jax.tree.map(lambda s, a: _same_rank(s, a), shapes, axes)
        assert axes["layers"]["attention"]["o_proj"]["kernel"] == (
            "layers",
            "heads",
            "head_dim",
            "embed",
        )


def _same_rank(shape, axes):
    assert len(shape.shape) == len(axes), (shape, axes)


def test_compile_time_text_is_flat_in_depth():
    """Thirty layers lower to the same program as three, but for the sizes."""

    def lowered_lines(depth):
        module = Transformer(CONFIGS["llama"].replace(num_layers=depth))
        params = abstract_params(module)
        tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
        text = jax.jit(lambda p, t: module.apply({"params": p}, t)).lower(params, tokens).as_text()
        return len(text.splitlines())

    assert lowered_lines(30) == lowered_lines(3)
