"""Each command does its work, also when it is piped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = [
    "train", "generate", "chat", "eval", "inspect", "convert", "models", "preflight", "doctor",
    "data", "calibrate",
]  # fmt: skip


def start(*arguments: str | Path, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "jaxlab.cli.main", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # One device: what is tested here is not the mesh, and it compiles sooner.
        env={**os.environ, "XLA_FLAGS": ""},
        **options,
    )


def test_help_teaches_and_is_quick() -> None:
    out, _ = start("--help").communicate(timeout=60)
    for command in COMMANDS:
        assert command in out
    # What takes its time to import comes when it is needed.
    slow = {"jax", "flax", "numpy", "transformers", "pydantic"}
    loaded = subprocess.run(
        [sys.executable, "-c", f"import sys, jaxlab.cli.main; print({slow} & set(sys.modules))"],
        capture_output=True,
        text=True,
    )
    assert loaded.stdout.strip() == "set()"


@pytest.mark.parametrize(
    "command",
    [*COMMANDS, "data show", "inspect attention", "eval needle", "calibrate xattention"],
)
def test_each_help_has_an_example(jaxlab_command, command) -> None:
    outcome = jaxlab_command(*command.split(), "--help")
    assert outcome.code == 0
    assert "\x1b" not in outcome.out
    if command not in ("data", "inspect", "calibrate"):
        assert f"$ jaxlab {command}" in outcome.out


def test_version(jaxlab_command) -> None:
    outcome = jaxlab_command("--version")
    assert (outcome.code, outcome.out) == (0, "jaxlab 0.1.0\n")


def test_train_then_resume_then_use_the_run(jaxlab_command, experiment, tmp_path) -> None:
    outcome = jaxlab_command("train", experiment)
    assert outcome.code == 0, outcome.err
    assert "step 1/4" in outcome.err
    assert "tokens/s" in outcome.err
    assert "validation loss" in outcome.out
    assert "unigram model" in outcome.out
    assert "sample after 'The '" in outcome.out
    assert "\x1b" not in outcome.out + outcome.err
    run = tmp_path / "run"
    assert str(run / "loss_curve.png") in outcome.out
    for name in ("metrics.jsonl", "loss_curve.png", "sample.txt", "model/config.json"):
        assert (run / name).stat().st_size > 0

    outcome = jaxlab_command("train", experiment, "training.steps=6")
    assert outcome.code == 0, outcome.err
    assert "resuming after step 4" in outcome.err
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 6

    outcome = jaxlab_command("generate", "-m", run, "-p", "The ", "-n", "4", "--json")
    assert outcome.code == 0, outcome.err
    record = json.loads(outcome.out)
    assert record["prompt"] == "The "
    assert 1 <= record["tokens"] <= 4

    outcome = jaxlab_command("convert", run, tmp_path / "half", "--dtype", "bfloat16")
    assert outcome.code == 0, outcome.err
    assert outcome.out.strip() == str(tmp_path / "half")
    full = (run / "model" / "model.safetensors").stat().st_size
    assert (tmp_path / "half" / "model.safetensors").stat().st_size < 0.6 * full

    outcome = jaxlab_command(
        "eval", "-m", run, "--data", tmp_path / "text.txt", "--sequence-length", "32", "--json"
    )
    assert outcome.code == 0, outcome.err
    assert 1 < json.loads(outcome.out)["perplexity"] < 300


def test_a_relative_output_dir(jaxlab_command, experiment, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = jaxlab_command("train", experiment, "output_dir=here", "training.steps=2")
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "here" / "checkpoints" / "2").is_dir()
    assert "here/loss_curve.png" in outcome.out


def test_an_interrupted_run_saves_and_resumes(experiment) -> None:
    # Long enough to be interrupted on any machine; resumed with few steps to go.
    process = start("train", experiment, "training.steps=20000", "training.checkpoint_every=20000")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step "):
            process.send_signal(signal.SIGINT)
            break
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT, err
    assert "Traceback" not in err
    done = int(re.search(r"stopped after step (\d+); run again to go on", err)[1])
    again = start("train", experiment, f"training.steps={done + 1}", "sample=null")
    _, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert f"resuming after step {done}" in err


def test_generate_reads_standard_input_and_streams(tiny_model) -> None:
    process = start("generate", "-m", tiny_model, "-n", "5", "-t", "1", stdin=subprocess.PIPE)
    out, err = process.communicate("Hello", timeout=120)
    assert process.returncode == 0, err
    assert out.endswith("\n")


def test_a_reader_that_leaves_is_no_error(tiny_model) -> None:
    """`jaxlab … | head` ends without a complaint."""
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "jaxlab.cli.main",
            "generate",
            "-m",
            tiny_model,
            "-p",
            "x",
            "-n",
            "4",
        ],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    os.close(write)
    assert process.returncode == 1
    assert process.stderr == ""


def test_generate_a_batch_from_a_file(jaxlab_command, tiny_model, tmp_path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n\n{"prompt": "two, and longer"}\n')
    outcome = jaxlab_command("generate", "-m", tiny_model, "-f", prompts, "-n", "4", "--json")
    assert outcome.code == 0, outcome.err
    records = [json.loads(line) for line in outcome.out.splitlines()]
    assert [record["prompt"] for record in records] == ["one", "two, and longer"]
    alone = jaxlab_command("generate", "-m", tiny_model, "-p", "one", "-n", "4", "--json")
    assert json.loads(alone.out) == records[0]


def test_the_real_model_answers_through_its_chat_template(jaxlab_command) -> None:
    outcome = jaxlab_command("generate", "-p", "What is the capital of France?", "-n", "8")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("The capital of France is Paris.")


def test_chat_remembers_and_obeys_commands(tmp_path) -> None:
    saved = tmp_path / "chat.json"
    lines = [
        "/help",
        "My name is Ada.",
        "/set max_new_tokens=6",
        "What is my name?",
        "/nonsense",
        "/set tempo=3",
        f"/save {saved}",
        "/quit",
    ]
    process = start("chat", "-n", "6", stdin=subprocess.PIPE)
    out, err = process.communicate("\n".join(lines) + "\n", timeout=240)
    assert process.returncode == 0, err
    assert "/retry" in err
    assert "unknown command /nonsense" in err
    assert "expected KEY=VALUE with a KEY of max_new_tokens" in err
    messages = json.loads(saved.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert out == "".join(m["content"] + "\n" for m in messages if m["role"] == "assistant")


def test_models_lists_and_doctor_finds_nothing_missing(jaxlab_command) -> None:
    outcome = jaxlab_command("models")
    assert outcome.code == 0
    assert "smollm2-135m-instruct" in outcome.out
    outcome = jaxlab_command("doctor")
    assert outcome.code == 0, outcome.out
    assert "4 × cpu" in outcome.out
    assert "jaxlab can work on this machine" in outcome.out


def test_doctor_names_what_is_missing_and_its_remedy(jaxlab_command, monkeypatch) -> None:
    from importlib import metadata

    version = metadata.version

    def without_optax(name: str) -> str:
        if name == "optax":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without_optax)
    outcome = jaxlab_command("doctor")
    assert outcome.code == 1
    assert "optax (optimizers): pip install jaxlab" in outcome.out


def test_data_show_prints_rows_as_they_are_learned(jaxlab_command, experiment) -> None:
    outcome = jaxlab_command("data", "show", experiment, "--rows", "3", "--stats")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("segment") >= 3
    assert "quick brown fox" in outcome.out
    assert "unigram entropy: " in outcome.out
