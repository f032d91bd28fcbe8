"""`jaxlab inspect attention`: densities, cache sizes and the picture, of each pattern."""

import json

import jax
import numpy as np
import pytest

import jaxlab
from jaxlab.data.tokenizers import ByteTokenizer
from jaxlab.evaluation.attention_inspection import attention_maps
from jaxlab.models import XLSTM, XLSTMConfig, init_params

SMALL = {
    "sepllm": ["attention.window=8", "attention.initial_tokens=2"],
    "cca": ["attention.group_size=4", "attention.window_size=8"],
    "xattention": ["attention.block_size=8", "attention.stride=4", "attention.threshold=0.5"],
    "full": [],
}


@pytest.mark.parametrize("pattern", SMALL)
def test_a_picture_and_numbers(jaxlab_command, tiny_model, tmp_path, pattern):
    text = tmp_path / "text.txt"
    text.write_text("One, two. Three; four: five! Six? " * 3)
    settings = [part for setting in SMALL[pattern] for part in ("--set", setting)]
    picture = tmp_path / "map.png"
    outcome = jaxlab_command(
        *["inspect", "attention", "-m", tiny_model, "--pattern", pattern, "--text", text],
        *["--length", 48, "-o", picture, "--json", *settings],
    )
    assert outcome.code == 0, outcome.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    report = json.loads(outcome.out)
    assert report["tokens"] == 48
    assert [layer["pattern"] for layer in report["layers"]] == [pattern] * 2
    densities = [layer["density"] for layer in report["layers"]]
    assert all(0 < x < 1 for x in densities) if pattern != "full" else densities == [1.0, 1.0]
    for row in report["cache"]:
        assert 0 < row["needed_bytes"] <= row["bytes"]
        assert row["full_bytes"] == row["tokens"] * 2 * 2 * 2 * 8 * 4 + 8


def test_maps_are_what_the_model_sees(tiny_model):
    """Every query sees itself, and nothing later."""
    for pattern, settings in SMALL.items():
        options = dict(setting.removeprefix("attention.").split("=") for setting in settings)
        options = {key: float(v) if "." in v else int(v) for key, v in options.items()}
        model = jaxlab.load(tiny_model, attention={"pattern": pattern, **options})
        for layer in attention_maps(model, np.arange(30) + 40):
            assert layer.map.shape == (30, 30)
            np.testing.assert_array_equal(np.diag(layer.map), 1)
            assert not np.triu(layer.map, 1).any()


def test_bad_input(jaxlab_command, tiny_model, tmp_path):
    picture = ["-o", tmp_path / "x.png"]
    (tmp_path / "dir.png").mkdir()
    for arguments, code, words in (
        (["--pattern", "seplm", *picture], 1, "did you mean 'sepllm'"),
        (["--text", tmp_path / "missing.txt", *picture], 1, "missing.txt"),
        (["-o", tmp_path / "x.gif"], 2, "x.gif"),
        (["-o", tmp_path / "no" / "x.png", "-m", "nowhere"], 1, f"no folder {tmp_path / 'no'}"),
        (["-o", tmp_path / "dir.png", "-m", "nowhere"], 1, "Is a directory"),
    ):
        outcome = jaxlab_command("inspect", "attention", "-m", tiny_model, *arguments)
        assert outcome.code == code, outcome.err
        assert words in outcome.err.replace("\n", " ")


def test_settings_of_a_section(jaxlab_command, tiny_model, tmp_path):
    """A converted model remembers its pattern; a part of the section can be changed later."""
    directory = tmp_path / "model"
    settings = ["--set", "attention.pattern=cca", "--set", "attention.group_size=4"]
    assert jaxlab_command("convert", tiny_model, directory, *settings).code == 0
    model = jaxlab.load(directory, attention={"window_size": 8})
    assert (model.config.attention.group_size, model.config.attention.window_size) == (4, 8)
    outcome = jaxlab_command("generate", "-m", directory, "-p", "a", "-n", 2, "--raw")
    assert outcome.code == 0, outcome.err


def test_a_model_without_attention(jaxlab_command, tmp_path):
    config = XLSTMConfig(vocab_size=259, embedding_dim=32, num_blocks=1, num_heads=2)
    params = init_params(XLSTM(config), jax.random.key(0))
    jaxlab.Model(XLSTM(config), params, ByteTokenizer()).save(tmp_path / "xlstm")
    for command in ("inspect attention", "calibrate xattention"):
        outcome = jaxlab_command(
            *command.split(), "-m", tmp_path / "xlstm", "-o", tmp_path / "x.png"
        )
        assert outcome.code == 1
        assert "an xlstm has no attention" in outcome.err
