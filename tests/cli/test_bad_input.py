"""Whatever a user gets wrong ends in a message that names it: exit code 1, or 2 for wrong usage."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def refused(outcome, *expected: str, code: int = 1) -> None:
    assert outcome.code == code, outcome
    assert "Traceback" not in outcome.err + outcome.out
    for words in expected:
        assert words in outcome.err, outcome.err


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainig.steps=3", "unknown key `trainig`; did you mean `training`?"),
        ("training.step=3", "unknown key `training.step`; did you mean `training.steps`?"),
        ("training.steps=many", "`training.steps` is 'many'; expected a valid integer"),
        ("data.batch_size=[8]", "`data.batch_size` is [8]; expected a valid integer"),
        ("optimizer.name=sgd", "`optimizer.name` is 'sgd'; expected 'adamw'"),
        ("mesh.data=3", "mesh {data: 3"),
        ("data.batch_size=6", "data.batch_size 6"),
        ("model.num_heads=5", "hidden_size 32 is not divisible by num_heads 5"),
        ("model.vocab_size=100", "vocab"),
        ("model.source=./nowhere", "nowhere"),
        ("data.source=nowhere.txt", "nowhere.txt"),
        ("data.sequence_length=4096", "sequence_length 4096"),
        ("optimizer.warmup_steps=50", "warmup_steps 50"),
        ("optimizer.learning_rate=.inf", "`optimizer.learning_rate` is inf; expected a finite"),
        ("data={validation_fraction: 0}", "training.eval_every 4 asks for validations"),
    ],
)
def test_a_faulty_config_is_named(jaxlab_command, experiment, override, expected) -> None:
    refused(jaxlab_command("train", experiment, "training.eval_every=4", override), expected)


def test_a_missing_config_names_its_neighbour(jaxlab_command, experiment) -> None:
    outcome = jaxlab_command("train", experiment.with_name("tinny.yaml"))
    refused(outcome, "tinny.yaml", "did you mean", "tiny.yaml")


@pytest.mark.parametrize(("name", "content"), [("empty.txt", ""), ("empty.jsonl", "\n")])
def test_empty_data_is_named(jaxlab_command, experiment, tmp_path, name, content) -> None:
    (tmp_path / name).write_text(content)
    refused(jaxlab_command("train", experiment, f"data.source={tmp_path / name}"), name)


def test_a_loss_that_explodes_ends_the_run(jaxlab_command, experiment) -> None:
    outcome = jaxlab_command("train", experiment, "optimizer.learning_rate=1e30")
    refused(outcome, "at step", "checkpoint", "rows", "learning_rate")


def test_a_run_that_cannot_be_written(jaxlab_command, experiment, tmp_path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    refused(jaxlab_command("train", experiment, f"output_dir={blocked}/run"), str(blocked))


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to be damaged."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_missing_weights(jaxlab_command, model) -> None:
    (model / "model.safetensors").unlink()
    refused(jaxlab_command("generate", "-m", model, "-p", "x"), str(model), "safetensors")


@pytest.mark.parametrize("size", [0, 4, 200, 20_000])
def test_truncated_weights(jaxlab_command, model, size) -> None:
    os.truncate(model / "model.safetensors", size)
    refused(jaxlab_command("generate", "-m", model, "-p", "x"), "model.safetensors")


def test_a_header_of_2_to_the_60_bytes(jaxlab_command, model) -> None:
    path = model / "model.safetensors"
    path.write_bytes((1 << 60).to_bytes(8, "little") + path.read_bytes()[8:])
    refused(jaxlab_command("generate", "-m", model, "-p", "x"), str(1 << 60))


def test_weights_of_another_shape(jaxlab_command, model) -> None:
    _change_json(model / "config.json", intermediate_size=96)
    refused(jaxlab_command("generate", "-m", model, "-p", "x"), "96", "64")


def test_an_unknown_architecture(jaxlab_command, model) -> None:
    _change_json(model / "config.json", model_type="mamba", architectures=["MambaForCausalLM"])
    refused(jaxlab_command("generate", "-m", model, "-p", "x"), "mamba", "llama")


def test_a_tokenizer_with_more_tokens_than_the_model(jaxlab_command, experiment, model) -> None:
    outcome = jaxlab_command("train", experiment, "model.vocab_size=200", "tokenizer=byte")
    refused(outcome, "259", "200")


def test_a_truncated_gguf(jaxlab_command, tmp_path) -> None:
    from jaxlab.checkpoints import resolve

    whole = resolve("smollm2-135m-instruct")
    path = tmp_path / "cut.gguf"
    with whole.open("rb") as file:
        path.write_bytes(file.read(3_000_000))
    refused(jaxlab_command("generate", "-m", path, "-p", "x"), "cut.gguf")
    path.write_bytes(b"")
    refused(jaxlab_command("generate", "-m", path, "-p", "x"), "cut.gguf")


def test_a_model_without_a_name(jaxlab_command) -> None:
    refused(jaxlab_command("generate", "-m", "", "-p", "x"), "the model source is ''", "directory")


@pytest.mark.parametrize("setting", ["=1", "a..b=1", "a"])
def test_a_setting_without_a_key(jaxlab_command, setting) -> None:
    outcome = jaxlab_command("generate", "-m", "nowhere", "-p", "x", "--set", setting)
    refused(outcome, f"'{setting}' is not KEY=VALUE", code=2)


@pytest.mark.parametrize("picture", ["no/x.png", "x.gif"])
def test_a_needle_picture_that_cannot_be_written(jaxlab_command, tmp_path, picture) -> None:
    outcome = jaxlab_command("eval", "needle", "-m", "nowhere", "-o", tmp_path / picture)
    assert outcome.code in (1, 2)
    assert picture[-5:] in "".join(c for c in outcome.err if c not in "│ \n")  # out of its box


def test_evaluation_is_within_the_context(jaxlab_command, tiny_model, tmp_path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox. " * 20)
    outcome = jaxlab_command("eval", "-m", tiny_model, "-d", text, "--max-batches", "1", "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["tokens"] > 0


def test_an_unknown_model_name(jaxlab_command) -> None:
    outcome = jaxlab_command("generate", "-m", "smollm-135m-instruct", "-p", "x")
    refused(outcome, "did you mean 'smollm2-135m-instruct'?")


def test_a_prompt_longer_than_the_context(jaxlab_command, tiny_model) -> None:
    outcome = jaxlab_command("generate", "-m", tiny_model, "--raw", "-p", "x" * 100)
    refused(outcome, "64", "shorten")


def test_an_empty_prompt_file(jaxlab_command, tiny_model, tmp_path) -> None:
    empty = tmp_path / "prompt.txt"
    empty.write_text("")
    refused(jaxlab_command("generate", "-m", tiny_model, "-f", empty), "prompt.txt is empty")
    refused(jaxlab_command("generate", "-m", tiny_model, "-f", tmp_path / "none"), "none")
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "a"}\n{"question": "b"}\n')
    refused(jaxlab_command("generate", "-m", tiny_model, "-f", lines), "prompts.jsonl:2")


def test_chat_with_a_model_that_has_no_template(jaxlab_command, tiny_model) -> None:
    refused(jaxlab_command("chat", "-m", tiny_model), "no chat template")
    refused(jaxlab_command("generate", "-m", tiny_model, "--chat", "-p", "x"), "no chat template")


def test_a_full_disk_leaves_what_was_there(tiny_model, tmp_path) -> None:
    """A limit on the size of files stands in for a full disk: writing fails part of the way."""
    target = Path(shutil.copytree(tiny_model, tmp_path / "saved"))
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    process = subprocess.run(
        [sys.executable, "-m", "jaxlab.cli.main", "convert", tiny_model, target, "--force"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
        env={**os.environ, "JAX_COMPILATION_CACHE_DIR": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 1, process.stderr
    assert "Traceback" not in process.stderr
    assert str(target) in process.stderr
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


def test_a_folder_that_is_not_empty_is_not_overwritten(jaxlab_command, tiny_model, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    refused(jaxlab_command("convert", tiny_model, tmp_path), "not empty", "--force")


def test_debug_shows_the_traceback(jaxlab_command, experiment) -> None:
    from jaxlab.cli.main import run
    from jaxlab.errors import ConfigError

    with pytest.raises(ConfigError, match=r"training\.steps"):
        run(["train", str(experiment), "training.step=3", "--debug"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tarin", "x.yaml"], "train"),
        (["train"], "CONFIG"),
        (["train", "x.yaml", "steps"], "'steps' is not KEY=VALUE"),
        (["train", "x.yaml", "--fast"], "--fast"),
        (["generate", "-p", "x", "-n", "0"], "greater than or equal to 1"),
        (["generate", "-p", "x", "-t", "warm"], "unable to parse string as a number"),
        (["generate", "-p", "x", "-p", "y", "--stream"], "only one prompt"),
        (["generate", "-p", "x", "-f", "y"], "not both"),
        (["generate", "-p", "x", "--set", "dtype"], "not KEY=VALUE"),
        (["preflight", "x.yaml", "--mode", "sing"], "neither train nor decode"),
        (["data", "show", "x.yaml", "--split", "test"], "neither train nor validation"),
        (["convert", "a", "b", "--dtype", "int8"], "int8"),
        (["convert", "a", "b.gguf"], "named like a file"),
    ],
)
def test_wrong_usage_exits_with_2(jaxlab_command, arguments, expected) -> None:
    outcome = jaxlab_command(*arguments)
    assert outcome.code == 2, outcome
    assert expected in " ".join(outcome.err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        ("v5p", "not of the form KIND:AxB"),
        ("v9:4x4", "there are v4, v5e, v5p, v6e"),
        ("v5e:4x4x4", "v5e slices have 2 dimensions"),
        ("v5p:3x3x3", "does not exist"),
    ],
)
def test_a_topology_that_does_not_exist(jaxlab_command, experiment, topology, expected) -> None:
    refused(jaxlab_command("preflight", experiment, "--topology", topology), expected)


def _change_json(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
