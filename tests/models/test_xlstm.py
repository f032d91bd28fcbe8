"""xLSTM language models: golden values, caches, packing, mixed blocks."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlab
from jaxlab.checkpoints import config_from_hf, load_params
from jaxlab.checkpoints.layout import hf_layout
from jaxlab.inference import SamplingParams
from jaxlab.models import XLSTM, XLSTMConfig, init_cache, init_params, unstack_layers
from jaxlab.models.xlstm.blocks import TokenInfo
from jaxlab.models.xlstm.slstm import SLSTM, SLSTMBlock
from jaxlab.objectives import cross_entropy

GOLDEN = Path(__file__).parents[1] / "golden" / "xlstm"
TINY = XLSTMConfig(vocab_size=50, embedding_dim=32, num_blocks=2, num_heads=2, ffn_proj_factor=2.0)
MIXED = TINY.replace(num_blocks=4, block_pattern="ms")


def load(name):
    with np.load(GOLDEN / f"{name}.npz") as data:
        return {key: data[key] for key in data.files}


def assert_close(actual, expected, tolerance):
    """Relative to the largest value: where |q·n| is small, h has heavy tails."""
    expected = np.asarray(expected, np.float64)
    error = np.abs(np.asarray(actual, np.float64) - expected).max() / np.abs(expected).max()
    assert error <= tolerance, f"{error:.2e} > {tolerance:.0e}"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The tiny model with the names of the published one: (module, params, golden outputs)."""
    directory = tmp_path_factory.mktemp("xlstm")
    (directory / "model.safetensors").symlink_to(GOLDEN / "tiny_model.safetensors")
    config = config_from_hf(json.loads((GOLDEN / "tiny_model_config.json").read_text()))
    return XLSTM(config), load_params(directory, config), load("tiny_model_outputs")


def random_params(config, seed=0):
    """Parameters whose gates are open: the initial ones let nearly nothing through."""
    params = init_params(XLSTM(config), jax.random.key(seed))
    keys = iter(jax.random.split(jax.random.key(seed + 1), len(jax.tree.leaves(params))))

    def shaken(path, leaf):
        noise = 0.3 * jax.random.normal(next(keys), leaf.shape)
        # Input gates start at -10.
        return noise if "igate_proj" in jax.tree_util.keystr(path) else leaf + noise

    return jax.tree_util.tree_map_with_path(shaken, params)


def apply(module, params, tokens, segment_ids=None):
    run = jax.jit(lambda params, *inputs: module.apply({"params": params}, *inputs))
    return run(params, tokens, None, segment_ids)


def test_both_spellings_of_the_configuration_are_the_same_model():
    configs = [
        config_from_hf(json.loads((GOLDEN / name).read_text()))
        for name in ("tiny_model_config.json", "tiny_model_config_7b_style.json")
    ]
    assert configs[0].replace(chunk_size=None) == configs[1].replace(chunk_size=None)
    assert configs[0].embedding_dim == 128
    assert configs[0].num_blocks == 2
    assert configs[0].intermediate_size == 128


def test_published_sizes():
    config = XLSTMConfig.preset("7b")
    assert (config.intermediate_size, config.qk_head_dim, config.v_head_dim) == (10944, 256, 512)
    table = json.loads((GOLDEN / "checkpoint_7b_tensors.json").read_text())["tensors"]
    stored = {}
    for entry in hf_layout(config):
        for layer in entry.layers_of(config) if entry.stacked else (0,):
            stored[entry.names[0].format(layer)] = list(entry.stored_shape)
    assert stored == table


def test_golden_logits_states_and_loss(published):
    module, params, golden = published
    tokens = jnp.asarray(golden["ids"])
    logits = jax.jit(lambda p: module.apply({"params": p}, tokens))(params)
    assert_close(logits, golden["logits"], 5e-5)
    loss, _ = cross_entropy(logits[:, :-1], tokens[:, 1:])
    np.testing.assert_allclose(loss, golden["loss"], rtol=1e-5)


def test_golden_states(published):
    module, params, golden = published
    tokens = jnp.asarray(golden["ids"])
    cache = init_cache(module.config, 2, 64, max_pending=1)
    # The block is longer than the slots, so all but one token are in the states; that one follows.
    logits, cache = module.apply({"params": params}, tokens, cache=cache)
    assert_close(logits, golden["logits"], 5e-5)
    extra = jnp.zeros((2, 20), jnp.int32)
    num_tokens = jnp.zeros((2,), jnp.int32)
    _, cache = module.apply({"params": params}, extra, cache=cache, num_tokens=num_tokens)
    slots = cache.layers[0][0]
    assert int(cache.folded[0]) == 40
    # One more move folds the last token.
    from pallas_kernels.mlstm.lazy import fold_tokens

    for layer in range(2):
        own = {name: array[layer] for name, array in slots.items()}
        first = jnp.arange(own["k"].shape[1]) < 1
        c, n, m = fold_tokens(
            own["k"],
            own["v"],
            own["i"],
            own["f"],
            (own["c"], own["n"], own["m"]),
            jnp.broadcast_to(first, own["k"].shape[:2]),
        )
        assert_close(c, golden[f"layer{layer}.c"], 2e-5)
        assert_close(n, golden[f"layer{layer}.n"], 2e-5)
        np.testing.assert_allclose(m, golden[f"layer{layer}.m"][..., 0], atol=1e-4)


def test_golden_gradients(published):
    module, params, golden = published
    tokens = jnp.asarray(golden["ids"])

    def loss(params):
        logits = module.apply({"params": params}, tokens)
        return cross_entropy(logits[:, :-1], tokens[:, 1:])[0]

    grads = jax.jit(jax.grad(loss))(params)
    seen = 0
    for entry in hf_layout(module.config):
        leaf = grads
        for key in entry.path:
            leaf = leaf[key]
        for layer in range(2) if entry.stacked else (None,):
            name = f"grad.{entry.names[0].format(layer)}"
            if name in golden:
                own = np.asarray(leaf if layer is None else leaf[layer])
                assert_close(entry.unview(own), golden[name], 5e-5)
                seen += 1
    assert seen == sum(key.startswith("grad.") for key in golden) == 6


def test_golden_ragged_prompts_and_greedy_tokens(published):
    module, params, golden = published
    model = jaxlab.Model(module, params)
    prompts = [golden[f"ragged{i}.ids"][0].tolist() for i in range(3)]
    # All three in one right-padded batch ...
    width = max(map(len, prompts))
    tokens = np.zeros((3, width), np.int32)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)] = ids
    counts = np.asarray([len(ids) for ids in prompts])
    logits, _ = model.extend(params, model.init_cache(3, 64), tokens, counts)
    for row in range(3):
        assert_close(logits[row, counts[row] - 1], golden[f"ragged{row}.last_logits"][0], 5e-5)
    # ... and one packed row, padding before, between and behind.
    parts = [np.zeros(3, int), *[x for ids in prompts for x in (np.array(ids), np.zeros(2, int))]]
    segments = [
        np.full(len(part), index // 2 + 1 if index % 2 else 0) for index, part in enumerate(parts)
    ]
    packed = apply(
        module,
        params,
        jnp.asarray(np.concatenate(parts))[None],
        jnp.asarray(np.concatenate(segments))[None],
    )
    ends = np.cumsum([len(part) for part in parts])[1::2] - 1
    for row, end in enumerate(ends):
        assert_close(packed[0, end], golden[f"ragged{row}.last_logits"][0], 5e-5)

    endless = jaxlab.Model(XLSTM(module.config.replace(eos_token_id=None)), params)
    prompt = golden["greedy.prompt"].tolist()
    [generation] = endless.generator.generate([prompt], SamplingParams(max_new_tokens=16))
    assert generation.token_ids == golden["greedy.new_tokens"].tolist()


@pytest.mark.parametrize("config", [TINY, MIXED], ids=["mlstm", "mixed"])
def test_prefill_chunks_and_steps_agree(config):
    module = XLSTM(config)
    params = random_params(config)
    tokens = jax.random.randint(jax.random.key(7), (2, 90), 0, 50)
    whole = apply(module, params, tokens)
    extend = jax.jit(lambda cache, tokens: module.apply({"params": params}, tokens, cache=cache))
    # More tokens than slots, fewer, one by one; and from one to the other.
    for widths in ([90], [30, 30, 30], [1] * 20 + [30] + [1] * 40):
        cache, parts, start = init_cache(config, 2, 1), [], 0
        for width in widths:
            logits, cache = extend(cache, tokens[:, start : start + width])
            parts.append(logits)
            start += width
        assert_close(jnp.concatenate(parts, axis=1), whole, 5e-5)
        assert cache.lengths.tolist() == [90, 90]
    size = cache.nbytes
    assert size == init_cache(config, 2, 100_000).nbytes


@pytest.mark.parametrize("config", [TINY, MIXED], ids=["mlstm", "mixed"])
def test_unrolled_blocks_equal_scanned_ones(config):
    module = XLSTM(config)
    params = random_params(config)
    tokens = jax.random.randint(jax.random.key(3), (2, 9), 0, 50)
    unrolled = unstack_layers(params, config)
    extend = jax.jit(lambda p, cache: module.apply({"params": p}, tokens, cache=cache)[0])
    expected = extend(params, init_cache(config, 2, 1))
    actual = extend(unrolled, init_cache(config, 2, 1, unstacked=True))
    assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("config", [TINY, MIXED], ids=["mlstm", "mixed"])
def test_rows_of_different_lengths_and_going_back(config):
    module = XLSTM(config)
    params = random_params(config)
    tokens = jax.random.randint(jax.random.key(5), (3, 60), 0, 50)
    whole = apply(module, params, tokens)
    extend = jax.jit(
        lambda cache, tokens, counts: module.apply(
            {"params": params}, tokens, cache=cache, num_tokens=counts
        )
    )
    rng = np.random.default_rng(0)
    cache = init_cache(config, 3, 1, max_pending=5)
    at = np.zeros(3, int)
    wrong = jax.random.randint(jax.random.key(6), (3, 8), 0, 50)
    while at.min() < 40:
        # A draft of wrong tokens is tried and thrown away ...
        counts = rng.integers(0, 6, 3)
        cache = cache.commit()
        _, tried = extend(cache, wrong, jnp.asarray(counts))
        cache = tried.rewind(jnp.asarray(at))
        # ... then right ones go on where the row was.
        counts = rng.integers(0, 7, 3)
        block = np.zeros((3, 8), np.int32)
        for row in range(3):
            block[row, : counts[row]] = tokens[row, at[row] : at[row] + counts[row]]
        logits, cache = extend(cache, jnp.asarray(block), jnp.asarray(counts))
        for row in range(3):
            if counts[row]:
                last = at[row] + counts[row] - 1
                assert_close(logits[row, counts[row] - 1], whole[row, last], 5e-5)
        at += counts
    assert cache.lengths.tolist() == at.tolist()
    with pytest.raises(ValueError, match="rewind to length 0 in row 0"):
        cache.rewind(0)


@pytest.mark.parametrize("config", [TINY, MIXED], ids=["mlstm", "mixed"])
def test_packed_documents_equal_separate_ones(config):
    module = XLSTM(config)
    params = random_params(config)
    tokens = jax.random.randint(jax.random.key(8), (1, 40), 0, 50)
    segments = jnp.asarray([[1] * 13 + [2] * 1 + [3] * 20 + [0] * 6])
    packed = apply(module, params, tokens, segments)
    for start, end in ((0, 13), (13, 14), (14, 34)):
        alone = apply(module, params, tokens[:, start:end])
        assert_close(packed[:, start:end], alone, 2e-5)


def test_golden_slstm_block():
    golden = load("slstm_block")
    x = jnp.asarray(golden["x"])
    config = XLSTMConfig(
        vocab_size=8, embedding_dim=16, num_blocks=3, num_heads=4, block_pattern="s"
    )
    params = {}
    for entry in hf_layout(config):
        if entry.path[:2] != ("layers", "slstm_block"):
            continue
        node = params
        for key in entry.path[2:-1]:
            node = node.setdefault(key, {})
        name = entry.names[0].removeprefix("backbone.blocks.{}.")
        node[entry.path[-1]] = jnp.asarray(entry.view(golden[f"p.{name}"]))
    layer = SLSTM(config).apply({"params": params["slstm"]}, x, TokenInfo())
    assert_close(layer, golden["layer_y"], 1e-5)
    block, _ = SLSTMBlock(config).apply({"params": params}, x, TokenInfo())
    assert_close(block, golden["block_y"], 1e-5)

    fresh = init_params(XLSTM(config), jax.random.key(0))["layers"]["slstm_block"]["slstm"]
    bias = np.asarray(fresh["gate_bias"][1]).transpose(1, 0, 2).reshape(-1)
    np.testing.assert_allclose(bias, golden["init_bias_internal"], atol=1e-5)


def test_initial_values():
    config = XLSTMConfig(vocab_size=3000, embedding_dim=256, num_blocks=3, num_heads=4)
    params = init_params(XLSTM(config), jax.random.key(0))
    block = params["layers"]["mlstm_block"]
    small, residual = (2 / (5 * 256)) ** 0.5, 2 / (3 * 256**0.5)
    for leaf, std in (
        (params["embed"]["embedding"], small),
        (params["lm_head"]["kernel"], small),
        (block["mlstm"]["q_proj"]["kernel"], small),
        (block["ffn"]["gate_proj"]["kernel"], small),
        (block["mlstm"]["o_proj"]["kernel"], residual),
        (block["ffn"]["down_proj"]["kernel"], residual),
    ):
        np.testing.assert_allclose(jnp.std(leaf), std, rtol=0.03)
    for gate in ("igate_proj", "fgate_proj", "ogate_proj"):
        assert not block["mlstm"][gate]["kernel"].any()
    np.testing.assert_array_equal(block["mlstm"]["igate_proj"]["bias"], -10.0)
    np.testing.assert_array_equal(block["mlstm"]["fgate_proj"]["bias"][1], [3, 4, 5, 6])


def test_bfloat16_compute_and_state_stay_near_float32():
    config = TINY.replace(dtype="bfloat16", state_dtype="bfloat16")
    params = random_params(TINY)
    tokens = jax.random.randint(jax.random.key(7), (1, 40), 0, 50)
    exact = apply(XLSTM(TINY), params, tokens)
    logits, cache = XLSTM(config).apply({"params": params}, tokens, cache=init_cache(config, 1, 1))
    assert cache.layers[0][0]["c"].dtype == jnp.bfloat16
    assert cache.layers[0][0]["m"].dtype == jnp.float32
    assert float(jnp.std(logits - exact)) < 0.05 * float(jnp.std(exact))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "num_heads 3 does not divide"),
        ({"embedding_dim": 32, "hidden_size": 64}, "mean the same"),
        ({"block_pattern": "mx"}, "block_pattern 'mx'"),
        ({"block_pattern": "mmm"}, "do not divide num_blocks 2"),
        ({"normalize": False}, "goes with input_gate: sigmoid"),
        ({"chunk_size": 0}, "chunk_size"),
    ],
)
def test_impossible_configurations(changes, message):
    with pytest.raises(ValueError, match=message):
        XLSTMConfig(**{**TINY.model_dump(), **changes})


def test_a_cache_of_another_model_is_refused():
    cache = init_cache(TINY, 1, 1)
    with pytest.raises(ValueError, match="made for another model"):
        cache.check_model(TINY.replace(num_heads=4))
