"""Directories that transformers wrote load here, and the other way round, with the same logits."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import FAMILIES, random_params, tiny_config

from jaxlab.checkpoints import config_to_hf, load_params, read_config, save_pretrained
from jaxlab.models import Transformer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
}


def tokens(config, length):
    return np.random.default_rng(1).integers(3, config.vocab_size, (2, length))


def our_logits(directory, ids):
    config = read_config(directory)
    params = load_params(directory, config)
    return np.asarray(Transformer(config).apply({"params": params}, jnp.asarray(ids, jnp.int32)))


def their_logits(model, ids):
    with torch.no_grad():
        return model.eval()(torch.tensor(ids)).logits.float().numpy()


def randomised(model):
    """Every parameter off its initial value: biases are not zero, norms not one."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def hf_model(family, **changes):
    config = config_to_hf(tiny_config(family))
    config.pop("rope_scaling")
    kind = config.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **{**config, **changes})
    return randomised(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers_load_here(family, tmp_path):
    model = hf_model(family)
    model.save_pretrained(tmp_path)
    ids = tokens(model.config, 48)
    np.testing.assert_allclose(our_logits(tmp_path, ids), their_logits(model, ids), atol=1e-4)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_rope_scaling(family, scaling, tmp_path):
    rope = {"rope_theta": 500.0, **SCALINGS[scaling]}
    if family == "gpt_neox":
        rope["partial_rotary_factor"] = 0.5
    model = hf_model(family, rope_parameters=rope)
    model.save_pretrained(tmp_path)
    length = 100 if scaling == "dynamic" else 60  # 100 is beyond the context of 64
    ids = tokens(model.config, length)
    np.testing.assert_allclose(our_logits(tmp_path, ids), their_logits(model, ids), atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_saved_here_load_in_transformers(family, tmp_path):
    config = tiny_config(family)
    params = random_params(config)
    save_pretrained(tmp_path, params, config, max_shard_bytes=30_000)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = tokens(config, 48)
    ours = Transformer(config).apply({"params": params}, jnp.asarray(ids, jnp.int32))
    np.testing.assert_allclose(np.asarray(ours), their_logits(model, ids), atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_shards_of_transformers_load(dtype, tmp_path):
    model = hf_model("llama").to(getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    # Read again: casting the model has also rounded its rotary frequencies.
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = tokens(model.config, 32)
    np.testing.assert_allclose(our_logits(tmp_path, ids), their_logits(model, ids), atol=1e-4)


def test_a_saved_directory_generates_in_transformers(tmp_path):
    config = tiny_config("llama", eos_token_id=(2, 5))
    save_pretrained(tmp_path, random_params(config), config)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.generation_config.eos_token_id == [2, 5]
    out = model.generate(torch.tensor([[3, 4]]), max_new_tokens=4, do_sample=False)
    assert out.shape[1] <= 6
