"""Attention patterns in the model: alone, with shifted keys and values, with and without caches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.errors import ConfigError, PromptError
from jaxlab.models import ModelConfig, Transformer, init_cache, init_params, unstack_layers
from jaxlab.models.attention import cca, sepllm

TINY = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
)
SEPARATORS = (1, 5, 9, 11, 30, 31, 32, 33, 60, 61)
SEPLLM = {"pattern": "sepllm", "initial_tokens": 2, "window": 4, "separators": SEPARATORS}
CCA = {"pattern": "cca", "group_size": 3, "window_size": 4}
XATTENTION = {"pattern": "xattention", "block_size": 8, "stride": 4, "threshold": 0.6}
CONFIGS = {
    "sepllm": ModelConfig(**TINY, attention=SEPLLM),
    "sepllm, windows of layers": ModelConfig(
        **TINY, attention=SEPLLM | {"window": [3, "full"]}, kv_shift={"window": 3}
    ),
    "cca": ModelConfig(**TINY, attention=CCA),
    "cca, sinks, shift": ModelConfig(
        **TINY,
        attention=CCA | {"group_size": 2, "window_size": 1, "sink_tokens": 2},
        kv_shift={"constraint": "gate"},
    ),
    "full, shift": ModelConfig(**TINY, kv_shift={}),
    "hybrid": ModelConfig(**TINY, attention=[SEPLLM, CCA], kv_shift={"values": False}),
}
PENDING = 4
TOLERANCE = 1e-5


class Case:
    """A model with its jitted functions; one compilation a shape for all tests."""

    def __init__(self, config: ModelConfig, *, unstacked: bool = True):
        self.config = config
        self.module = Transformer(config)
        self.params = init_params(self.module, jax.random.key(0))
        self.running = unstack_layers(self.params) if unstacked else self.params
        self.unstacked = unstacked
        self.apply = jax.jit(lambda p, t, **kw: self.module.apply({"params": p}, t, **kw))
        self._extend = jax.jit(
            lambda p, t, c, n: self.module.apply({"params": p}, t, cache=c, num_tokens=n)
        )

    def cache(self, rows: int, max_length: int = 32):
        return init_cache(
            self.config, rows, max_length, unstacked=self.unstacked, max_pending=PENDING
        )

    def extend(self, cache, tokens, num_tokens=None):
        if num_tokens is None:
            num_tokens = [tokens.shape[1]] * tokens.shape[0]
        return self._extend(self.running, tokens, cache, jnp.asarray(num_tokens, jnp.int32))


@functools.cache
def case(name: str) -> Case:
    return Case(CONFIGS[name])


def random_tokens(rows: int, length: int, seed: int = 2):
    return jax.random.randint(jax.random.key(seed), (rows, length), 0, TINY["vocab_size"])


@pytest.fixture(params=CONFIGS)
def model(request) -> Case:
    return case(request.param)


def test_prefill_equals_chunks_equals_steps(model):
    tokens = random_tokens(2, 23)
    whole = model.apply(model.params, tokens)
    for blocks in ((23,), (9, 9, 5), (9,) + (1,) * 14):
        cache, outputs, start = model.cache(2), [], 0
        for real in blocks:
            width = 9 if real == 5 else real  # padded, so that there is one shape fewer to compile
            block = jnp.pad(tokens, ((0, 0), (0, 9)))[:, start : start + width]
            logits, cache = model.extend(cache, block, [real] * 2)
            outputs.append(logits[:, :real])
            start += real
        np.testing.assert_allclose(jnp.concatenate(outputs, 1), whole, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["sepllm", "cca, sinks, shift"])
def test_a_long_block_is_read_in_pieces(name, monkeypatch):
    for module in (cca, sepllm):
        monkeypatch.setattr(module, "_BLOCK", 4)
    model = Case(CONFIGS[name])
    tokens = random_tokens(2, 23)
    logits, cache = model.extend(model.cache(2), tokens, [23, 14])
    whole = case(name).apply(model.params, tokens)
    np.testing.assert_allclose(logits[0], whole[0], atol=TOLERANCE)
    np.testing.assert_allclose(logits[1, :14], whole[1, :14], atol=TOLERANCE)
    logits, _ = model.extend(cache.commit(), tokens[:, 14:15], [0, 1])
    np.testing.assert_allclose(logits[1], whole[1, 14:15], atol=TOLERANCE)


def test_taken_back_tokens_leave_no_trace_and_rows_keep_their_own_lengths(model):
    tokens = random_tokens(2, 23)
    whole = model.apply(model.params, tokens)
    lengths = jnp.array([9, 5])
    _, cache = model.extend(model.cache(2), tokens[:, :9], lengths)
    cache = cache.commit(lengths)
    wrong = (tokens[:, 9:18] + 3) % TINY["vocab_size"]
    _, cache = model.extend(cache, wrong, [PENDING, 2])
    cache = cache.rewind(lengths)
    following = jnp.stack([tokens[0, 9:18], tokens[1, 5:14]])
    logits, _ = model.extend(cache, following, [9, 9])
    np.testing.assert_allclose(logits[0], whole[0, 9:18], atol=TOLERANCE)
    np.testing.assert_allclose(logits[1], whole[1, 5:14], atol=TOLERANCE)


def test_more_than_the_pending_tokens_cannot_be_taken_back(model):
    _, cache = model.extend(model.cache(2), random_tokens(2, 9))
    if cache.max_pending is None:
        pytest.skip("full attention can always go back")
    assert cache.committed.tolist() == [9 - PENDING] * 2
    with pytest.raises(ValueError, match=f"between the committed {9 - PENDING}"):
        cache.rewind(2)


def test_packed_documents_equal_separate_ones(model):
    tokens = random_tokens(1, 23)
    segment_ids = jnp.array([[1] * 8 + [2] + [3] * 11 + [0] * 3])
    packed = model.apply(model.params, tokens, segment_ids=segment_ids)
    for part in (slice(0, 8), slice(8, 9), slice(9, 20)):
        alone = model.apply(model.params, tokens[:, part])
        np.testing.assert_allclose(packed[:, part], alone, atol=TOLERANCE)


def test_future_tokens_change_nothing_and_every_parameter_matters(model):
    tokens = random_tokens(2, 23)
    changed = tokens.at[:, 15:].set((tokens[:, 15:] + 1) % TINY["vocab_size"])
    before, after = model.apply(model.params, tokens), model.apply(model.params, changed)
    np.testing.assert_allclose(before[:, :15], after[:, :15], atol=TOLERANCE)
    grads = jax.grad(lambda p: jnp.sum(jnp.sin(model.apply(p, tokens))))(model.params)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert float(jnp.max(jnp.abs(grad))) > 0, f"{jax.tree_util.keystr(path)} has no influence"


@pytest.mark.parametrize("name", ["sepllm, windows of layers", "cca, sinks, shift"])
def test_scanned_layers_equal_unrolled_ones_with_a_cache(name):
    scanned, unrolled = Case(CONFIGS[name], unstacked=False), case(name)
    tokens = random_tokens(2, 23)
    caches = [model.cache(2) for model in (scanned, unrolled)]
    for part in (slice(0, 9), slice(9, 18)):
        results = [
            model.extend(cache, tokens[:, part])
            for model, cache in zip((scanned, unrolled), caches, strict=True)
        ]
        caches = [cache for _, cache in results]
        np.testing.assert_allclose(results[0][0], results[1][0], atol=TOLERANCE)


@pytest.mark.parametrize("name", ["sepllm", "cca"])
def test_bytes_do_not_follow_the_length_where_the_pattern_forgets(name):
    model = case(name)
    config = model.config
    if name == "sepllm":
        config = config.replace(attention=SEPLLM | {"separator_capacity": 8})
    full = config.replace(attention={})
    short, long = (init_cache(config, 1, n, max_pending=4).nbytes for n in (64, 64 * 64))
    grows = init_cache(full, 1, 64 * 64).nbytes - init_cache(full, 1, 64).nbytes
    # A core for every group of 3, for twice as many heads; no more separators than asked for.
    assert long - short <= (0 if name == "sepllm" else grows * 2 / 3 * 1.01)


def test_groups_longer_than_any_text_are_never_pooled():
    model = Case(ModelConfig(**TINY, attention=CCA | {"group_size": 10**9}))
    full = Transformer(ModelConfig(**TINY))
    tokens = random_tokens(1, 10)
    expected = full.apply({"params": model.params}, tokens)
    np.testing.assert_allclose(model.apply(model.params, tokens), expected, atol=TOLERANCE)
    logits, _ = model.extend(model.cache(1), tokens)
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE)


def test_a_store_that_overflows_says_so():
    config = CONFIGS["sepllm"].replace(attention=SEPLLM | {"separator_capacity": 1})
    model = Case(config)
    tokens = jnp.full((1, 9), SEPARATORS[0])
    logits, cache = model.extend(model.cache(1), tokens)
    assert bool(jnp.isnan(logits[0, -1]).all())
    with pytest.raises(PromptError, match="separator_capacity"):
        cache.check_room(1)


def test_identity_shift_changes_nothing():
    plain = Case(CONFIGS["sepllm"])
    shifted = Transformer(CONFIGS["sepllm"].replace(kv_shift={"init": "identity"}))
    params = init_params(shifted, jax.random.key(0))
    taps = {name: params["layers"]["attention"][name] for name in ("key_shift", "value_shift")}
    rest = plain.params["layers"]["attention"] | taps
    params = plain.params | {"layers": plain.params["layers"] | {"attention": rest}}
    tokens = random_tokens(1, 23)
    np.testing.assert_array_equal(
        shifted.apply({"params": params}, tokens),
        plain.module.apply({"params": plain.params}, tokens),
    )


def test_fresh_coefficients_sum_to_one():
    for window in (2, 3):
        config = CONFIGS["full, shift"].replace(kv_shift={"window": window})
        attention = init_params(Transformer(config), jax.random.key(3))["layers"]["attention"]
        for name in ("key_shift", "value_shift"):
            taps = attention[name]
            assert taps.shape == (2, 2, window)
            assert taps.dtype == jnp.float32
            np.testing.assert_allclose(taps.sum(-1), 1.0, atol=1e-6)
        assert float(jnp.abs(attention["key_shift"] - attention["value_shift"]).min()) > 0


@pytest.mark.parametrize("threshold", [0.5, 1.0])
def test_xattention_of_a_model(threshold):
    """A threshold of 1 is dense attention; below, the first blocks see what they saw before."""
    attention = XATTENTION | {"threshold": threshold}
    config = ModelConfig(**TINY, attention=attention)
    module, dense = Transformer(config), Transformer(config.replace(attention={}))
    params = init_params(module, jax.random.key(0))
    # Sharp attention, so that there is something to choose from.
    kernel = params["layers"]["attention"]["q_proj"]["kernel"]
    params["layers"]["attention"]["q_proj"]["kernel"] = kernel * 200
    tokens = random_tokens(2, 61)
    sparse, full = (m.apply({"params": params}, tokens) for m in (module, dense))
    same = 61 if threshold == 1.0 else 16
    np.testing.assert_allclose(sparse[:, :same], full[:, :same], atol=TOLERANCE)
    if threshold < 1:
        assert float(jnp.abs(sparse[:, 16:] - full[:, 16:]).max()) > 1e-3
    with_dense_layers = config.replace(attention=attention | {"dense_layers": [0, 1]})
    np.testing.assert_allclose(
        Transformer(with_dense_layers).apply({"params": params}, tokens), full, atol=TOLERANCE
    )


def test_xattention_reads_a_prompt_in_blocks_as_in_one_piece():
    """Blocks of whole blocks choose as the whole text does; a single token sees everything."""
    model = Case(ModelConfig(**TINY, attention=XATTENTION, kv_shift={}))
    kernel = model.running["layers"][0]["attention"]["q_proj"]["kernel"]
    for layer in model.running["layers"]:
        layer["attention"]["q_proj"]["kernel"] = kernel * 200
    tokens = random_tokens(2, 41)
    whole = model.apply(model.running, tokens[:, :40])
    cache, outputs = model.cache(2, 64), []
    for start in range(0, 40, 8):
        logits, cache = model.extend(cache, tokens[:, start : start + 8])
        outputs.append(logits)
    np.testing.assert_allclose(jnp.concatenate(outputs, 1), whole, atol=TOLERANCE)
    dense = Transformer(model.config.replace(attention={}))
    everything = dense.apply({"params": model.running}, tokens[:, :8])
    np.testing.assert_allclose(outputs[0], everything, atol=TOLERANCE)
    assert (
        float(
            jnp.abs(
                outputs[-1] - dense.apply({"params": model.running}, tokens[:, :40])[:, 32:]
            ).max()
        )
        > 1e-3
    )
    # Not at a block's beginning: dense, over keys that the sparse layers made.
    _, cache = model.extend(cache, tokens[:, 40:])
    logits, _ = model.extend(cache, tokens[:, :8])
    assert bool(jnp.isfinite(logits).all())


def test_a_cache_is_of_one_attention_only():
    cache = init_cache(CONFIGS["cca"], 1, 32)
    other = Transformer(CONFIGS["cca"].replace(attention=CCA | {"group_size": 2}))
    with pytest.raises(ValueError, match="made for another attention"):
        other.apply({"params": case("cca").params}, random_tokens(1, 2), cache=cache)


STREAM = SEPLLM | {
    "positions": "cache",
    "initial_tokens": 2,
    "separator_capacity": 3,
    "local_window": 4,
    "capacity": 12,
}


def test_a_stream_in_blocks_equals_one_token_at_a_time():
    model = Case(ModelConfig(**TINY, attention=STREAM, kv_shift={}))
    tokens = random_tokens(2, 60)
    steps, outputs = model.cache(2, 1), []
    for i in range(60):
        logits, steps = model.extend(steps, tokens[:, i : i + 1])
        outputs.append(logits)
    expected = jnp.concatenate(outputs, 1)
    assert int(steps.stream.used.max()) <= 12
    blocks, cache = [], model.cache(2, 1)
    for start in range(0, 60, 20):
        logits, cache = model.extend(cache, tokens[:, start : start + 20])
        blocks.append(logits)
    np.testing.assert_allclose(jnp.concatenate(blocks, 1), expected, atol=TOLERANCE)
    # Rows alone, and of other lengths, are the same.
    _, ragged = model.extend(model.cache(2, 1), tokens[:, :20], [20, 7])
    logits, _ = model.extend(ragged, jnp.stack([tokens[0, 20:40], tokens[1, 7:27]]))
    np.testing.assert_allclose(logits[0], expected[0, 20:40], atol=TOLERANCE)
    np.testing.assert_allclose(logits[1], expected[1, 7:27], atol=TOLERANCE)


def test_a_stream_goes_back_to_its_last_compression():
    model = Case(ModelConfig(**TINY, attention=STREAM))
    tokens = random_tokens(1, 40)
    _, cache = model.extend(model.cache(1, 1), tokens[:, :20])
    expected, _ = model.extend(cache, tokens[:, 20:21])
    tried, end = cache, int(cache.lengths[0])
    while int(tried.committed[0]) <= int(cache.committed[0]):
        before = tried
        _, tried = model.extend(tried, (tokens[:, 21:22] + 1) % 97)
    again, _ = model.extend(before.rewind(end), tokens[:, 20:21])
    np.testing.assert_allclose(again, expected, atol=TOLERANCE)
    with pytest.raises(ValueError, match="committed"):
        tried.rewind(end)


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        ({"pattern": "seplm"}, "did you mean 'sepllm'"),
        (3, "pattern's name, a mapping, or a list"),
        (SEPLLM | {"window": 0}, "window 0 .* at least 1"),
        (SEPLLM | {"window": [4]}, "1 entries for num_layers 2"),
        (SEPLLM | {"initial_tokens": -1}, "initial_tokens"),
        (SEPLLM | {"separator_capacity": 0}, "separator_capacity"),
        (SEPLLM | {"separators": []}, "empty"),
        (SEPLLM | {"separators": [97]}, "token id 97, but the vocabulary is 0 … 96"),
        (STREAM | {"capacity": 9}, "= 9 must be less than capacity 9"),
        ([STREAM, "full"], "one for all layers"),
        ([SEPLLM, SEPLLM | {"separators": [1]}], "separators differs"),
        ([SEPLLM], "1 entries for num_layers 2"),
        (CCA | {"group_size": 0}, "group_size"),
        (CCA | {"window_size": 0}, "window_size"),
        (CCA | {"pooling": "median"}, "pooling"),
        (XATTENTION | {"stride": 3}, "stride 3 does not divide block_size 8"),
        (XATTENTION | {"threshold": 1.5}, "threshold"),
        (XATTENTION | {"threshold": [[0.5] * 3] * 2}, r"\[layers\]\[heads\] = 2 rows of 4"),
        (XATTENTION | {"dense_layers": [2]}, "dense_layers holds 2, but layers are 0 … 1"),
    ],
)
def test_refusals_name_the_value_and_the_remedy(attention, words):
    with pytest.raises(ValueError, match=words):
        ModelConfig(**TINY, attention=attention)


@pytest.mark.parametrize(
    ("shift", "words"),
    [
        ({"window": 0}, "window"),
        ({"keys": False, "values": False}, "leave kv_shift out"),
        ({"constraint": "gate", "window": 3}, "mixes two tokens"),
        ({"constraint": "gate", "init": "identity"}, "use constraint 'none'"),
    ],
)
def test_refused_shifts(shift, words):
    with pytest.raises(ValueError, match=words):
        ModelConfig(**TINY, kv_shift=shift)


def test_a_pattern_needs_a_layer_without_the_models_own_window():
    with pytest.raises(ValueError, match="set sliding_window to null"):
        ModelConfig(**TINY, sliding_window=8, attention=CCA)
    mixed = ModelConfig(**TINY, sliding_window=8, layer_types=("sliding", "full"), attention=CCA)
    assert [a.pattern for a in mixed.layer_attention] == ["full", "cca"]


def test_separators_by_rule_need_a_tokenizer():
    config = ModelConfig(**TINY, attention={"pattern": "sepllm"})
    module = Transformer(config)
    with pytest.raises(ConfigError, match="tokenizer"):
        module.apply({"params": init_params(module, jax.random.key(0))}, random_tokens(1, 4))
