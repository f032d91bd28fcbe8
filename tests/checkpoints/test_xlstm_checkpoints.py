"""xLSTM directories: to and from transformers, sharded, mixed, damaged."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlab
from jaxlab.checkpoints import (
    config_from_hf,
    config_to_hf,
    load_params,
    read_config,
    save_pretrained,
)
from jaxlab.errors import ArchitectureError, CheckpointError
from jaxlab.models import XLSTM, XLSTMConfig, init_params

CONFIG = XLSTMConfig(
    vocab_size=96,
    embedding_dim=128,  # transformers rounds the sizes of its states up to 64
    num_blocks=2,
    num_heads=4,
    ffn_proj_factor=1.5,
    bos_token_id=0,
    eos_token_id=2,
    pad_token_id=1,
)


@pytest.fixture(scope="module")
def params():
    fresh = init_params(XLSTM(CONFIG), jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(fresh))))
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), fresh)


def logits_of(config, params, ids):
    run = jax.jit(lambda params, ids: XLSTM(config).apply({"params": params}, ids))
    return np.asarray(run(params, jnp.asarray(ids, jnp.int32)))


@pytest.mark.parity
@pytest.mark.parametrize("changes", [{}, {"use_bias": True}], ids=["plain", "biases"])
def test_transformers_models_load_here_and_ours_there(changes, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    hf = config_to_hf(CONFIG.replace(**changes))
    hf.pop("model_type")
    theirs = transformers.xLSTMForCausalLM(transformers.xLSTMConfig(**hf)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    ids = np.random.default_rng(1).integers(0, 96, (2, 70))
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    tolerance = 5e-5 * np.abs(expected).max()

    config = read_config(tmp_path / "theirs")
    loaded = load_params(tmp_path / "theirs", config)
    np.testing.assert_allclose(logits_of(config, loaded, ids), expected, atol=tolerance)

    save_pretrained(tmp_path / "ours", loaded, config)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        np.testing.assert_array_equal(again(torch.tensor(ids)).logits.numpy(), expected)


@pytest.mark.parity
def test_transformers_reads_our_fused_projections(params, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    # Its initialisation of fused projections raises, and nothing needs it: all values are loaded.
    kind = transformers.models.xlstm.modeling_xlstm.xLSTMPreTrainedModel
    monkeypatch.setattr(kind, "_init_weights", lambda self, module: None)
    config = CONFIG.replace(weight_mode="fused")
    save_pretrained(tmp_path, params, config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = np.random.default_rng(1).integers(0, 96, (2, 30))
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    tolerance = 5e-5 * np.abs(expected).max()
    np.testing.assert_allclose(logits_of(config, params, ids), expected, atol=tolerance)


@pytest.mark.parametrize(
    "changes",
    [{"weight_mode": "fused"}, {"num_blocks": 4, "block_pattern": "ms"}],
    ids=["fused", "mixed"],
)
def test_what_is_saved_is_what_loads(changes, tmp_path):
    config = CONFIG.replace(**changes)
    params = init_params(XLSTM(config), jax.random.key(3))
    jaxlab.Model(XLSTM(config), params).save(tmp_path / "model")
    loaded = read_config(tmp_path / "model")
    assert loaded == config
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path / "model", loaded), params)


def test_shards_are_read_onto_a_mesh(params, tmp_path):
    from jaxlab.training.sharding import MeshConfig, make_mesh, param_shardings

    save_pretrained(tmp_path, params, CONFIG, max_shard_bytes=200_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2))
    shardings = param_shardings(XLSTM(CONFIG), mesh)
    loaded = load_params(tmp_path, CONFIG, shardings=shardings, param_dtype="bfloat16")
    kernel = loaded["layers"]["mlstm_block"]["mlstm"]["q_proj"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 64, 2, 16)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), loaded, params
    )


def test_damage_is_listed_by_name(params, tmp_path):
    from safetensors.numpy import load_file, save_file

    save_pretrained(tmp_path, params, CONFIG)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["backbone.blocks.1.mlstm_layer.q.weight"]
    tensors["backbone.blocks.0.norm_ffn.weight"] = np.ones(3, np.float32)
    tensors["backbone.blocks.2.norm_ffn.weight"] = np.ones(128, np.float32)
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as caught:
        load_params(tmp_path, CONFIG)
    message = str(caught.value)
    assert "missing tensors: backbone.blocks.1.mlstm_layer.q.weight [64, 128]" in message
    assert "backbone.blocks.0.norm_ffn.weight is [3], expected [128]" in message
    assert "unexpected tensors: backbone.blocks.2.norm_ffn.weight" in message


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"embedding_dim": 64, "hidden_size": 128}, CheckpointError, "mean the same"),
        ({"num_blocks": 2, "num_hidden_layers": 3}, CheckpointError, "num_hidden_layers 3"),
        ({"num_heads": 3}, CheckpointError, "num_heads 3 does not divide"),
        ({"add_qk_norm": True}, ArchitectureError, "add_qk_norm is True"),
        ({"jaxlab": {"blocks": "ms"}}, CheckpointError, "update jaxlab"),
        ({"vocab_size": "many"}, CheckpointError, "vocab_size"),
    ],
)
def test_contradictory_configurations_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        config_from_hf({**config_to_hf(CONFIG), **changes})


def test_no_cap_and_null_ids():
    hf = config_to_hf(CONFIG) | {"gate_soft_cap": -1, "pad_token_id": None}
    config = config_from_hf(hf)
    assert config.gate_soft_cap is None
    assert config.pad_token_id is None
    with pytest.raises(ArchitectureError, match="gate_soft_cap is null"):
        config_to_hf(config)
    json.dumps(config_to_hf(CONFIG))
