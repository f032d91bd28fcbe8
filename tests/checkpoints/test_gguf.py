"""GGUF files: every quantisation, llama.cpp's layout undone, metadata understood."""

import gguf
import jax
import numpy as np
import pytest
from tiny_models import assert_same_trees, random_params, tiny_config, write_gguf

from jaxlab.checkpoints import load_gguf, load_params, read_config, resolve
from jaxlab.data.gguf_file import GGUFFile
from jaxlab.errors import ArchitectureError, CheckpointError, TokenizerError

GGUF_FAMILIES = ["llama", "llama-tied-biased", "llama-wide-heads", "qwen2", "qwen3", "gemma2"]
Q = gguf.GGMLQuantizationType
# Types that package gguf can write, and how far a weight of 0.1 · N(0, 1) moves.
WRITABLE = {
    Q.F16: 1e-3,
    Q.BF16: 4e-3,
    Q.Q8_0: 5e-3,
    Q.Q5_1: 2e-2,
    Q.Q5_0: 4e-2,
    Q.Q4_1: 4e-2,
    Q.Q4_0: 6e-2,
}


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_a_model_comes_back_exactly(family, tmp_path):
    config = tiny_config(family, vocab_size=96)
    if family == "qwen2":  # the format does not record windows for Qwen
        config = config.replace(sliding_window=None, layer_types=None)
    if family == "gemma2":  # nor the query scale, which follows from the head size
        config = config.replace(query_scale=None)
    params = random_params(config)
    path = tmp_path / "model.gguf"
    write_gguf(path, config, params)
    got = read_config(path)
    ignored = {"initializer_range"}
    assert got.model_dump(exclude=ignored) == config.model_dump(exclude=ignored)
    loaded = load_params(path, got)
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    if family == "gemma2":  # one was added to the norms, and taken away again
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-7), loaded, params)
    else:
        assert_same_trees(loaded, params)


@pytest.mark.parametrize("kind", WRITABLE, ids=lambda kind: kind.name)
def test_quantisations(kind, tmp_path):
    config = tiny_config("llama")
    params = random_params(config)
    path = tmp_path / "model.gguf"
    write_gguf(path, config, params, kind)
    loaded = load_params(path, config)
    errors = jax.tree.map(lambda a, b: float(abs(a - b).max()), loaded, params)
    assert 0 < max(jax.tree.leaves(errors)) < WRITABLE[kind]
    assert errors["final_norm"]["scale"] == 0


@pytest.mark.parametrize("kind", [Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K], ids=lambda k: k.name)
def test_k_quantisations(kind, tmp_path):
    """Blocks of random bytes: package gguf has no encoder for these, only the decoder used here."""
    config = tiny_config("llama", hidden_size=256, intermediate_size=256, num_layers=1)
    params = random_params(config)
    path = tmp_path / "model.gguf"
    write_gguf(path, config, params)
    block, width = gguf.GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(0).integers(0, 255, (256, 256 // block * width), np.uint8)
    if kind in (Q.Q2_K, Q.Q4_K, Q.Q5_K):
        scales = slice(-4, None) if kind == Q.Q2_K else slice(0, 4)
        rows[:, scales] = np.frombuffer(np.array([0.01, 0.02], np.float16).tobytes(), np.uint8)
    else:
        rows[:, -2:] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    file = GGUFFile(path)
    raw = bytearray(path.read_bytes())
    entry = file.tensors["blk.0.ffn_down.weight"]
    encoded = rows.tobytes()
    raw[entry.begin : entry.begin + len(encoded)] = encoded  # shorter than the float32 it replaces
    name = b"blk.0.ffn_down.weight"
    position = raw.index(name) + len(name) + 4 + 16  # number of dimensions, dimensions
    raw[position : position + 4] = int(kind).to_bytes(4, "little")
    path.write_bytes(raw)
    loaded = load_params(path, config)
    expected = gguf.dequantize(rows, kind)
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(
        np.asarray(loaded["layers"]["mlp"]["down_proj"]["kernel"][0]), expected.T
    )


def test_shards_are_cut_from_the_dequantised_values(tmp_path):
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    config = tiny_config("llama")
    path = tmp_path / "model.gguf"
    write_gguf(path, config, random_params(config), Q.Q8_0)
    plain = load_params(path, config)
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    shardings = jax.tree.map(
        lambda x: NamedSharding(mesh, PartitionSpec(*[None] * (x.ndim - 1), "tensor")), plain
    )
    sharded = load_params(path, config, shardings=shardings)
    assert_same_trees(sharded, plain)
    assert jax.tree.map(lambda x: x.sharding, sharded) == shardings


def llama3_divisors(theta, dim, factor, trained, low, high):
    frequencies = 1.0 / theta ** (np.arange(0, dim, 2) / dim)
    wavelengths = 2 * np.pi / frequencies
    smooth = np.clip((trained / wavelengths - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


@pytest.mark.parametrize(
    ("factor", "trained", "low", "high"),
    [(8.0, 8192, 1.0, 4.0), (32.0, 8192, 1.0, 4.0), (4.0, 4096, 1.0, 8.0)],
)
def test_llama3_scaling_is_recovered_from_the_frequency_factors(
    factor, trained, low, high, tmp_path
):
    config = tiny_config(
        "llama", hidden_size=64, num_heads=1, num_kv_heads=1, head_dim=64, rope_theta=500000.0
    )
    path = tmp_path / "model.gguf"
    divisors = llama3_divisors(500000.0, 64, factor, trained, low, high)
    write_gguf(path, config, random_params(config), extra={"rope_freqs.weight": divisors})
    scaling = read_config(path).rope_scaling
    assert (scaling.type, scaling.factor) == ("llama3", factor)
    assert scaling.original_max_position_embeddings == pytest.approx(trained, rel=1e-3)
    assert scaling.low_freq_factor == pytest.approx(low, rel=1e-3)
    assert scaling.high_freq_factor == pytest.approx(high, rel=1e-3)
    load_params(path, config)  # the factors are no unexpected tensor


def test_other_frequency_factors_are_refused(tmp_path):
    config = tiny_config("llama")
    path = tmp_path / "model.gguf"
    factors = np.array([1, 3, 2, 5], np.float32)
    write_gguf(path, config, random_params(config), extra={"rope_freqs.weight": factors})
    with pytest.raises(ArchitectureError, match="not Llama 3's"):
        read_config(path)


def test_linear_and_yarn_scaling(tmp_path):
    config = tiny_config("llama")
    path = tmp_path / "model.gguf"

    def linear(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    def yarn(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)

    write_gguf(path, config, random_params(config), metadata=linear)
    scaling = read_config(path).rope_scaling
    assert (scaling.type, scaling.factor) == ("linear", 2.0)
    write_gguf(path, config, random_params(config), metadata=yarn)
    scaling = read_config(path).rope_scaling
    assert (scaling.type, scaling.factor) == ("yarn", 4.0)
    assert scaling.original_max_position_embeddings == 16


def test_end_of_turn_ends_a_text_too(tmp_path):
    config = tiny_config("llama")
    path = tmp_path / "model.gguf"
    write_gguf(path, config, random_params(config), metadata=lambda w: w.add_eot_token_id(9))
    assert read_config(path).eos_token_id == (2, 9)


def test_a_tensor_of_another_shape_is_named(tmp_path):
    config = tiny_config("llama")
    path = tmp_path / "model.gguf"
    write_gguf(path, config, random_params(config))
    with pytest.raises(CheckpointError, match=r"blk.0.ffn_gate.weight is \[64, 32\]"):
        load_params(path, config.replace(intermediate_size=48))


def test_a_file_without_tokenizer_says_so(tmp_path):
    config = tiny_config("llama")
    path = tmp_path / "model.gguf"
    write_gguf(path, config, random_params(config))
    with pytest.raises(TokenizerError, match="holds no tokenizer"):
        load_gguf(path)


def test_smollm2():
    """The real file: sizes, and that its values are where the model looks for them."""
    path = resolve("smollm2-135m-instruct")
    config = read_config(path)
    assert (config.num_layers, config.hidden_size, config.num_heads) == (30, 576, 9)
    assert (config.num_kv_heads, config.head_dim, config.intermediate_size) == (3, 64, 1536)
    assert (config.rope_theta, config.norm_eps) == (100000.0, 1e-5)
    assert config.tie_word_embeddings
    file = GGUFFile(path)
    reader = gguf.GGUFReader(path)
    assert [tensor.name for tensor in reader.tensors] == list(file.tensors)
    for tensor in reader.tensors[:12]:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(file.tensor(tensor.name), values)
