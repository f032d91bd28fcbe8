"""Hugging Face directories: what is saved is what is loaded, in every type and placement."""

import errno
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file
from tiny_models import FAMILIES, assert_same_trees, random_params, tiny_config

from jaxlab.checkpoints import load_params, read_config, save_pretrained, saving
from jaxlab.checkpoints.layout import parameter_shapes
from jaxlab.data.tokenizers import ByteTokenizer, load_tokenizer
from jaxlab.errors import ArchitectureError, CheckpointError, StorageError
from jaxlab.models import Transformer, abstract_params


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_what_is_loaded(family, tmp_path):
    config = tiny_config(family)
    params = random_params(config)
    save_pretrained(tmp_path / "model", params, config)
    again = read_config(tmp_path / "model")
    assert again.layer_windows == config.layer_windows
    assert_same_trees(load_params(tmp_path / "model", again), params)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layout_is_the_transformer_s(family):
    config = tiny_config(family)
    expected = jax.tree_util.tree_leaves_with_path(abstract_params(Transformer(config)))
    shapes = {
        path: (config.num_layers, *shape) if path[0] == "layers" else shape
        for path, shape in parameter_shapes(config).items()
    }
    assert {tuple(key.key for key in path): leaf.shape for path, leaf in expected} == shapes


def test_tensors_have_hugging_face_s_names_and_orientation(tmp_path):
    config = tiny_config("llama")
    params = random_params(config)
    save_pretrained(tmp_path, params, config)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.1.mlp.down_proj.weight"].shape == (32, 64)
    q = stored["model.layers.2.self_attn.q_proj.weight"].reshape(4, 8, 32)
    np.testing.assert_array_equal(
        q[3, 5], np.asarray(params["layers"]["attention"]["q_proj"]["kernel"][2, :, 3, 5])
    )


def test_gpt_neox_interleaves_q_k_v_head_by_head(tmp_path):
    config = tiny_config("gpt_neox")
    params = random_params(config)
    save_pretrained(tmp_path, params, config)
    stored = load_file(tmp_path / "model.safetensors")
    fused = stored["gpt_neox.layers.1.attention.query_key_value.weight"].reshape(4, 3, 8, 32)
    for position, name in enumerate(("q_proj", "k_proj", "v_proj")):
        kernel = np.asarray(params["layers"]["attention"][name]["kernel"][1])
        np.testing.assert_array_equal(fused[2, position], kernel[:, 2].T)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_stored_type_loads_as_every_other(dtype, tmp_path):
    config = tiny_config("gpt_neox")
    params = random_params(config)
    save_pretrained(tmp_path, params, config, dtype=dtype)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == dtype
    stored = jax.tree.map(lambda x: x.astype(dtype), params)
    for target in ("float32", "bfloat16"):
        expected = jax.tree.map(lambda x, target=target: x.astype(target), stored)
        assert_same_trees(load_params(tmp_path, config, param_dtype=target), expected)


def test_files_of_the_reference_library_load(tmp_path):
    """And what we write is readable by it: `load_file` above."""
    config = tiny_config("llama")
    params = random_params(config)
    save_pretrained(tmp_path, params, config)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), params)
    assert_same_trees(load_params(tmp_path, config), expected)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_shards(family, tmp_path):
    config = tiny_config(family)
    params = random_params(config)
    save_pretrained(tmp_path, params, config, max_shard_bytes=30_000)
    shards = sorted(path.name for path in tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert not (tmp_path / "model.safetensors").exists()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == shards
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(params))
    assert_same_trees(load_params(tmp_path, config), params)
    # Saving again as one file leaves no shard behind.
    save_pretrained(tmp_path, params, config)
    assert not list(tmp_path.glob("model-*"))
    assert not (tmp_path / "model.safetensors.index.json").exists()
    assert_same_trees(load_params(tmp_path, config), params)


@pytest.mark.parametrize("family", ["qwen2", "gpt_neox"])
def test_parameters_load_onto_their_shards(family, tmp_path, monkeypatch):
    """Each device gets its part, replicas share one read, and saving gathers the parts again."""
    config = tiny_config(family)
    params = random_params(config)
    save_pretrained(tmp_path / "a", params, config)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tensor"))

    def sharding(leaf):
        spec = [None] * leaf.ndim
        if leaf.ndim >= 2:
            spec[-2] = "tensor" if leaf.shape[-2] % 2 == 0 else None
        return NamedSharding(mesh, PartitionSpec(*spec))

    shardings = jax.tree.map(sharding, params)
    loaded = load_params(tmp_path / "a", config, shardings=shardings)
    assert jax.tree.map(lambda x: x.sharding, loaded) == shardings
    assert_same_trees(loaded, params)
    kernel = loaded["layers"]["mlp"]["up_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (3, 16, 64)
    save_pretrained(tmp_path / "b", loaded, config)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (
        tmp_path / "b/model.safetensors"
    ).read_bytes()


def test_constants_of_old_checkpoints_are_ignored(tmp_path):
    config = tiny_config("gpt_neox")
    params = random_params(config)
    save_pretrained(tmp_path, params, config)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    tensors["gpt_neox.layers.0.attention.bias"] = np.ones((1, 1, 4, 4), np.bool_)
    tensors["gpt_neox.layers.0.attention.masked_bias"] = np.ones((), np.float32)
    tensors["lm_head.weight"] = tensors.pop("embed_out.weight")  # as transformers 5 calls it
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same_trees(load_params(tmp_path, config), params)


def test_tied_checkpoints_may_carry_the_output_matrix_too(tmp_path):
    config = tiny_config("gemma2")
    params = random_params(config)
    save_pretrained(tmp_path, params, config)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same_trees(load_params(tmp_path, config), params)


def test_end_of_text_ids_come_from_the_generation_config_too(tmp_path):
    config = tiny_config("llama")
    save_pretrained(tmp_path, random_params(config), config)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert read_config(tmp_path).eos_token_id == (7, 2)


def test_the_tokenizer_is_saved_along(tmp_path):
    config = tiny_config("llama", vocab_size=259)
    save_pretrained(tmp_path, random_params(config), config, ByteTokenizer("{{ bos_token }}"))
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.chat_template == "{{ bos_token }}"


def test_saving_replaces_the_model_and_keeps_the_rest(tmp_path):
    config = tiny_config("llama")
    target = tmp_path / "model"
    save_pretrained(target, random_params(config), config, ByteTokenizer())
    (target / "notes.txt").write_text("mine")
    (target / "logs").mkdir()
    (target / "logs" / "a").write_text("mine too")
    params = random_params(config, seed=1)
    save_pretrained(target, params, config)
    assert_same_trees(load_params(target, config), params)
    assert (target / "notes.txt").read_text() == "mine"
    assert (target / "logs" / "a").read_text() == "mine too"
    # The old model's tokenizer is not the new model's.
    assert not (target / "tokenizer.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_directory_that_cannot_be_exchanged_in_one_step(tmp_path, monkeypatch):
    config = tiny_config("llama")
    save_pretrained(tmp_path / "model", random_params(config), config)
    monkeypatch.setattr(saving.sys, "platform", "darwin")
    params = random_params(config, seed=1)
    save_pretrained(tmp_path / "model", params, config)
    assert_same_trees(load_params(tmp_path / "model", config), params)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_saving_into_the_current_directory(tmp_path, monkeypatch):
    """It stays the same directory, so that the shell that is in it is not left nowhere."""
    config = tiny_config("llama", vocab_size=259)
    target = tmp_path / "model"
    save_pretrained(target, random_params(config), config, ByteTokenizer(), max_shard_bytes=50_000)
    (target / "notes.txt").write_text("mine")
    monkeypatch.chdir(target)
    params = random_params(config, seed=1)
    save_pretrained(".", params, config)
    assert sorted(path.name for path in Path().iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "notes.txt",
    ]
    assert_same_trees(load_params(".", config), params)
    monkeypatch.setattr(saving.json, "dump", raise_full)
    with pytest.raises(StorageError):
        save_pretrained(".", random_params(config), config)
    assert_same_trees(load_params(".", config), params)
    assert len(list(Path().iterdir())) == 4


def test_a_symbolic_link_stays_one(tmp_path):
    config = tiny_config("llama")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    save_pretrained(tmp_path / "link", random_params(config), config)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "config.json").is_file()


def test_what_a_killed_save_left_behind_is_tidied_up(tmp_path):
    config = tiny_config("llama")
    target = tmp_path / "model"
    save_pretrained(target, random_params(config), config)
    stale = tmp_path / ".model.saving-killed"
    stale.mkdir()
    (stale / "model.safetensors").write_bytes(b"half")
    (stale / "notes.txt").write_text("mine")  # killed after the exchange
    save_pretrained(target, random_params(config), config)
    assert not stale.exists()
    assert (target / "notes.txt").read_text() == "mine"


SAVE_FOREVER = """
import sys
from tiny_models import random_params, tiny_config
from jaxlab.checkpoints import save_pretrained

config = tiny_config("llama", vocab_size=4096)
models = [random_params(config, seed=seed) for seed in (0, 1)]
save_pretrained(sys.argv[1], models[0], config)
print("ready", flush=True)
while True:
    for params in models:
        save_pretrained(sys.argv[1], params, config, max_shard_bytes=300_000)
"""


def test_killing_a_save_leaves_one_whole_model(tmp_path):
    config = tiny_config("llama", vocab_size=4096)
    models = [random_params(config, seed=seed) for seed in (0, 1)]
    for delay in (0.01, 0.13, 0.37):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOREVER, str(tmp_path / "model")],
            stdout=subprocess.PIPE,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        )
        assert process.stdout.readline() == b"ready\n"
        time.sleep(delay)
        process.kill()
        process.wait()
        process.stdout.close()
        loaded = load_params(tmp_path / "model", config)
        seed = 0 if (loaded["embed"]["embedding"] == models[0]["embed"]["embedding"]).all() else 1
        assert_same_trees(loaded, models[seed])


SAVE_TOGETHER = """
import sys
import numpy as np
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny_models import random_params, tiny_config
from jaxlab.checkpoints import load_params, save_pretrained
from jaxlab.errors import StorageError

address, index, source, target, unwritable = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, int(index))
config = tiny_config("gpt_neox")
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("fsdp", "tensor"))
shardings = jax.tree.map(
    lambda x: NamedSharding(mesh, PartitionSpec(*[None] * (x.ndim - 1), "fsdp")),
    random_params(config),
)
params = load_params(source, config, shardings=shardings)
assert not params["embed"]["embedding"].is_fully_addressable
save_pretrained(target, params, config)
try:
    save_pretrained(unwritable, params, config)
except StorageError as error:
    print(error)
"""


def test_two_processes_save_one_model(tmp_path):
    """Each holds half of every parameter; a failure of the one that writes reaches both."""
    config = tiny_config("gpt_neox")
    save_pretrained(tmp_path / "source", random_params(config), config)
    (tmp_path / "file").write_text("")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    paths = [str(tmp_path / name) for name in ("source", "target", "file/model")]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SAVE_TOGETHER, address, str(index), *paths],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "cannot save to" in outputs[0][0]
    assert "the first process could not save" in outputs[1][0]
    assert (tmp_path / "source/model.safetensors").read_bytes() == (
        tmp_path / "target/model.safetensors"
    ).read_bytes()


def raise_full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def raise_full_like_rust(*args, **kwargs):
    raise Exception("No space left on device (os error 28)")


@pytest.mark.parametrize("moment", ["beforehand", "weights", "config", "tokenizer"])
def test_a_full_disk_leaves_the_old_model_intact(moment, tmp_path, monkeypatch):
    config = tiny_config("llama", vocab_size=259)
    target = tmp_path / "model"
    params = random_params(config)
    save_pretrained(target, params, config, ByteTokenizer())
    before = {path.name: path.read_bytes() for path in target.iterdir()}

    tokenizer = ByteTokenizer()
    if moment == "beforehand":
        usage = saving.shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(saving.shutil, "disk_usage", lambda path: usage)
    elif moment == "weights":
        monkeypatch.setattr(saving.os, "fsync", raise_full)
    elif moment == "config":
        monkeypatch.setattr(saving.json, "dump", raise_full)
    else:
        monkeypatch.setattr(tokenizer, "save_pretrained", raise_full_like_rust)
    with pytest.raises(StorageError, match=r"cannot save to .*model.*intact.*free some space"):
        save_pretrained(target, random_params(config, seed=1), config, tokenizer)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert_same_trees(load_params(target, config), params)


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a file system")
def test_a_disk_that_is_really_full(tmp_path):
    config = tiny_config("llama", vocab_size=4096)  # 0.5 MB for each of the two matrices
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1600k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        params = random_params(config)
        save_pretrained(disk / "model", params, config)
        with pytest.raises(StorageError, match="free"):
            save_pretrained(disk / "model", random_params(config, seed=1), config)
        assert [path.name for path in disk.iterdir()] == ["model"]
        assert_same_trees(load_params(disk / "model", config), params)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_an_unwritable_place(tmp_path):
    (tmp_path / "file").write_text("")
    config = tiny_config("llama")
    with pytest.raises(StorageError, match="cannot save to"):
        save_pretrained(tmp_path / "file" / "model", random_params(config), config)


def test_parameters_must_fit_the_configuration(tmp_path):
    config = tiny_config("llama")
    params = random_params(config)
    with pytest.raises(
        CheckpointError, match=r"embed/embedding is \(96, 32\), expected \(97, 32\)"
    ):
        save_pretrained(tmp_path / "m", params, config.replace(vocab_size=97))
    del params["final_norm"]
    with pytest.raises(CheckpointError, match="final_norm/scale is missing"):
        save_pretrained(tmp_path / "m", params, config)
    assert not (tmp_path / "m").exists()


def test_a_model_hugging_face_cannot_express_is_not_saved(tmp_path):
    config = tiny_config("llama", sliding_window=8)
    with pytest.raises(ArchitectureError, match="layer_windows"):
        save_pretrained(tmp_path / "m", random_params(config), config)
    assert not (tmp_path / "m").exists()


def test_loading_holds_one_parameter_besides_the_result(tmp_path):
    """Peak allocation while loading: the result and one stacked parameter, not two models."""
    import tracemalloc

    config = tiny_config("llama", num_layers=8, vocab_size=512, hidden_size=64)
    params = random_params(config)
    save_pretrained(tmp_path, params, config, dtype="bfloat16")
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    largest = max(x.nbytes for x in jax.tree.leaves(params))
    load_params(tmp_path, config)  # what jax allocates once is not counted
    tracemalloc.start()
    loaded = load_params(tmp_path, config)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert jnp.isfinite(loaded["embed"]["embedding"]).all()
    assert peak < total + 2 * largest + 300_000
