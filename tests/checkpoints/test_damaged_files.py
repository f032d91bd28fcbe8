"""Damaged and hostile files end in an error that names the file and the remedy, never a crash."""

import contextlib
import json
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import random_params, tiny_config, write_gguf

from jaxlab.checkpoints import load_gguf, load_params, read_config, save_pretrained
from jaxlab.checkpoints.safetensors_file import SafetensorsFile
from jaxlab.data.gguf_file import GGUFFile
from jaxlab.errors import ArchitectureError, CheckpointError, JaxlabError

CONFIG = tiny_config("llama")


@pytest.fixture
def model(tmp_path):
    save_pretrained(tmp_path, random_params(CONFIG), CONFIG)
    return tmp_path


def rewritten(model, change):
    """The model's file, header changed by `change(header)`, data as it was."""
    path = model / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def refused(model, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        load_params(model, CONFIG)
    assert str(model) in str(caught.value)


def test_an_empty_file(model):
    (model / "model.safetensors").write_bytes(b"")
    refused(model, r"has 0 bytes.*fetch the file again")


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 10**9])
def test_an_impossible_header_length(model, length):
    path = model / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    refused(model, rf"header is said to be {length} bytes")


def test_every_truncation(model):
    path = model / "model.safetensors"
    raw = path.read_bytes()
    for size in [1, 7, 8, 9, 100, 1000, len(raw) // 2, len(raw) - 1]:
        path.write_bytes(raw[:size])
        refused(model, "fetch")


def test_trailing_bytes(model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    refused(model, "1 bytes follow tensor")


def test_a_header_that_is_not_json(model):
    path = model / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[8] = ord("[")
    path.write_bytes(raw)
    refused(model, "not valid JSON")
    deep = b"[" * 100_000
    path.write_bytes(struct.pack("<Q", len(deep)) + deep)
    refused(model, "not valid JSON")


NAME = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_offsets": [0, 2**62]}, "but the file holds"),
        ({"data_offsets": [12288, 0]}, "lies at bytes"),
        ({"data_offsets": [-4, 12284]}, "impossible offsets"),
        ({"data_offsets": [0, True]}, "impossible offsets"),
        ({"data_offsets": [4, 12292]}, "overlaps with|leaves a gap"),
        ({"shape": [96, 33]}, "cannot be 12288 bytes long"),
        ({"shape": [2**40, 2**40]}, "cannot be 12288 bytes long"),
        ({"shape": [-96, -32]}, "impossible shape"),
        ({"shape": "96"}, "impossible shape"),
        ({"dtype": "F33"}, "unknown type 'F33'"),
        ({"dtype": None}, "unknown type None"),
    ],
)
def test_impossible_entries(model, change, message):
    rewritten(model, lambda header: header[NAME].update(change))
    refused(model, message)


def test_overlapping_tensors(model):
    def overlap(header):
        header["model.norm.weight"] = header["model.layers.0.input_layernorm.weight"]

    rewritten(model, overlap)
    refused(model, "overlaps with")


def test_a_name_that_appears_twice(model):
    path = model / "model.safetensors"
    text = b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{}}'
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    refused(model, "appears twice")


def test_random_damage_to_the_header_never_escapes(model):
    path = model / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    generator = np.random.default_rng(0)
    for _ in range(150):
        damaged = bytearray(raw)
        for position in generator.integers(0, 8 + length, 3):
            damaged[position] = generator.integers(256)
        path.write_bytes(damaged)
        with contextlib.suppress(JaxlabError):
            load_params(model, CONFIG)


def test_missing_unexpected_and_misshapen_tensors_are_listed(model):
    path = model / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((8, 32), np.float32)
    tensors["model.vision.weight"] = np.zeros(3, np.float32)
    save_file(tensors, path)
    refused(
        model,
        r"k_proj.weight is \[8, 32\], expected \[16, 32\].*"
        r"missing tensors: model.layers.1.mlp.up_proj.weight \[64, 32\].*"
        r"unexpected tensors: model.vision.weight.*Check that config and weights belong together",
    )


def test_long_lists_are_cut_short(model):
    with pytest.raises(CheckpointError, match=r"unexpected tensors.*… \(18 in all\)"):
        load_params(model, CONFIG.replace(num_layers=1))
    with pytest.raises(CheckpointError, match=r"missing tensors.*… \(9 in all\)"):
        load_params(model, CONFIG.replace(num_layers=4))


def test_a_missing_output_matrix_hints_at_tying(model):
    path = model / "model.safetensors"
    tensors = load_file(path)
    del tensors["lm_head.weight"]
    save_file(tensors, path)
    refused(model, "set tie_word_embeddings: true")


def test_a_quantised_checkpoint_is_refused(model):
    path = model / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    save_file(tensors, path)
    refused(model, "stored as I8, a quantised checkpoint")


def test_pickles_are_not_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    refused(tmp_path, r"pytorch_model.bin.*not read.*save_pretrained\('converted'\)")


def test_a_directory_without_weights(tmp_path):
    refused(tmp_path, "has neither model.safetensors nor")
    with pytest.raises(CheckpointError, match=r"has no config.json.*holds nothing"):
        read_config(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"")
    refused(tmp_path, r"GGUF files \(m.gguf\): give the path of one")
    with pytest.raises(CheckpointError, match="does not exist"):
        read_config(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", "[" * 100_000])
def test_a_damaged_config(model, text):
    (model / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config.json"):
        read_config(model)


def test_damaged_shards(tmp_path):
    save_pretrained(tmp_path, random_params(CONFIG), CONFIG, max_shard_bytes=30_000)
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    first = sorted(tmp_path.glob("model-*.safetensors"))[0]

    index.write_text(json.dumps({"weight_map": {**good["weight_map"], NAME: "../../etc/passwd"}}))
    refused(tmp_path, "not a file name")
    index.write_text(json.dumps({"weight_map": {**good["weight_map"], "extra": first.name}}))
    refused(tmp_path, "lacks tensors that .* places in it: extra")
    index.write_text("{}")
    refused(tmp_path, "has no weight_map")
    index.write_text(json.dumps(good))
    first.unlink()
    refused(tmp_path, f"lacks shards .*{first.name}")


@pytest.fixture
def gguf_path(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, CONFIG, random_params(CONFIG))
    return path


def test_truncated_gguf(gguf_path):
    raw = gguf_path.read_bytes()
    sizes = [0, 3, 4, 8, 23, 24, 40, 100, 500, 1000, 2000, len(raw) // 2, len(raw) - 40_000]
    for size in [*sizes, len(raw) - 1]:
        gguf_path.write_bytes(raw[:size])
        with pytest.raises(CheckpointError, match=r"model.gguf.*fetch the file again"):
            GGUFFile(gguf_path)


def test_gguf_with_impossible_counts(gguf_path):
    raw = gguf_path.read_bytes()
    for position in (8, 16):  # tensors, metadata keys
        damaged = bytearray(raw)
        damaged[position : position + 8] = struct.pack("<Q", 2**60)
        gguf_path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="a table of"):
            GGUFFile(gguf_path)


def test_files_that_are_not_gguf(gguf_path):
    raw = gguf_path.read_bytes()
    for head, message in (
        (b"PK\3\4", "not a GGUF file"),
        (b"GGUF\1\0\0\0", "GGUF version 1"),
        (b"GGUF\0\0\0\3", "big-endian"),
    ):
        gguf_path.write_bytes(head + raw[len(head) :])
        with pytest.raises(CheckpointError, match=message):
            read_config(gguf_path)


def test_random_damage_to_a_gguf_never_escapes(gguf_path):
    raw = gguf_path.read_bytes()
    table = len(raw) - sum(
        tensor.end - tensor.begin for tensor in GGUFFile(gguf_path).tensors.values()
    )
    generator = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(raw)
        for position in generator.integers(0, table, 3):
            damaged[position] = generator.integers(256)
        gguf_path.write_bytes(damaged)
        with contextlib.suppress(JaxlabError):
            load_gguf(gguf_path)


def test_gguf_of_another_architecture(gguf_path):
    raw = gguf_path.read_bytes().replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0mamba", 1)
    gguf_path.write_bytes(raw)
    with pytest.raises(ArchitectureError, match=r"'mamba'.*supported: llama, qwen2"):
        read_config(gguf_path)


def test_a_part_of_a_split_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(
        path, CONFIG, random_params(CONFIG), metadata=lambda w: w.add_uint16("split.count", 3)
    )
    with pytest.raises(CheckpointError, match=r"split over 3 files.*--merge"):
        GGUFFile(path)


def test_a_safetensors_file_without_tensors(tmp_path):
    path = tmp_path / "empty.safetensors"
    path.write_bytes(struct.pack("<Q", 2) + b"{}")
    assert SafetensorsFile(path).entries == {}
