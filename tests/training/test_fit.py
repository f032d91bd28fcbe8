"""The whole run, in this process: what it writes, how it stops, what stops it."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxlab
from jaxlab.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NonFiniteLossError,
    StorageError,
    TokenizerError,
)
from jaxlab.training import Reporter, fit
from jaxlab.training import loop as training_loop
from jaxlab.training.checkpoint import Checkpointer
from jaxlab.training.metrics import read_metrics


class Recorder(Reporter):
    """Remembers the hooks in the order they are called."""

    def __init__(self):
        self.calls, self.messages, self.info = [], [], {}

    def on_start(self, info):
        self.calls.append("start")
        self.info = info

    def on_compile(self, seconds):
        self.calls.append("compile")

    def on_step(self, metrics):
        self.calls.append(int(metrics["step"]))

    def on_eval(self, metrics):
        self.calls.append("eval")

    def on_checkpoint(self, step, path):
        self.calls.append("checkpoint")

    def on_message(self, text):
        self.messages.append(text)

    def on_end(self, result):
        self.calls.append("end")


def parameters(result):
    return jax.device_get(result.state.params)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_run_writes_everything(experiment):
    config = experiment(
        sample={"prompts": ["the "], "max_new_tokens": 4},
        training={"tensorboard": True, "ema_decay": 0.5},
    )
    reporter = Recorder()
    result = fit(config, reporter=reporter)
    assert reporter.calls == [
        "start",
        "compile",
        *(1, 2, 3, "eval", "checkpoint"),
        *(4, 5, 6, "eval", "checkpoint"),
        "end",
    ]
    assert reporter.info["optimizer_bytes"] > 2 * reporter.info["params_bytes"]
    assert not reporter.info["resumed"]

    directory = Path(result.output_dir)
    records = read_metrics(result.output_dir)
    trained = [record for record in records if "loss" in record]
    assert [record["step"] for record in trained] == [1, 2, 3, 4, 5, 6]
    assert trained[-1]["loss"] < trained[0]["loss"]
    for name in ("perplexity", "grad_norm", "learning_rate", "tokens_per_second", "step_seconds"):
        assert np.isfinite(trained[-1][name])
    assert "mfu" not in trained[-1]  # the peak of a CPU is not known
    validated = [record for record in records if "validation_loss" in record]
    assert [record["step"] for record in validated] == [3, 6]
    assert result.validation_loss == validated[-1]["validation_loss"]
    assert result.best_step == 6
    assert (directory / "loss_curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert (directory / "sample.txt").read_text().startswith("the ")
    assert result.samples[0][0] == "the "
    record = json.loads((directory / "config.json").read_text())
    assert type(config).model_validate(record) == config
    assert list((directory / "tensorboard").iterdir())

    # The model saved is the moving average, which is what was validated.
    from jaxlab.checkpoints import load_params, read_config

    model = load_params(result.model_dir, read_config(result.model_dir))
    assert_same(model, jax.device_get(result.state.ema_params))


def test_a_finished_run_is_not_trained_again(experiment):
    first = fit(experiment())
    reporter = Recorder()
    second = fit(experiment(), reporter=reporter)
    assert reporter.calls == ["start", "end"]
    assert second.validation_loss == first.validation_loss
    assert_same(parameters(second), parameters(first))
    assert len(read_metrics(first.output_dir)) == 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_next_run_goes_on(experiment, tmp_path, number):
    whole = fit(experiment(output_dir=str(tmp_path / "whole")))

    class Interrupt(Reporter):
        def on_step(self, metrics):
            if metrics["step"] == 3:
                os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    config = experiment(training={"eval_every": 4})
    stopped = fit(config, reporter=Interrupt())
    assert signal.getsignal(number) is before
    assert stopped.stopped_by == number
    assert stopped.interrupted
    assert 3 <= stopped.step < 6
    reporter = Recorder()
    resumed = fit(config, reporter=reporter)
    assert reporter.info["start_step"] == stopped.step
    assert_same(parameters(resumed), parameters(whole))
    steps = [record["step"] for record in read_metrics(config.output_dir) if "loss" in record]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_ramp_trains_each_size_and_resumes_within_it(experiment, tmp_path):
    ramp = {"batch_size": 12, "batch_ramp": [[4, 2], [8, 3]]}
    training = {"checkpoint_every": 4, "eval_every": None}
    reporter = Recorder()
    whole = fit(
        experiment(data=ramp, training=training, output_dir=str(tmp_path / "whole")),
        reporter=reporter,
    )
    # A step is told of when the next one has begun, or before the next size is compiled.
    compiles = [("start", "compile"), (1, 2, "compile"), (3, 4, "checkpoint"), (5, "compile")]
    assert reporter.calls[:10] == [call for calls in compiles for call in calls]
    assert reporter.info["batch_size"] == 4
    records = [r for r in read_metrics(whole.output_dir) if "loss" in r]
    tokens = [r["tokens_per_second"] * r["step_seconds"] for r in records]
    np.testing.assert_allclose(tokens, 32 * np.array([4, 4, 8, 8, 8, 12]))

    # As after a kill: what is left is the checkpoint of step 4, in the middle of the size 8.
    shutil.copytree(tmp_path / "whole" / "checkpoints", tmp_path / "run" / "checkpoints")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    reporter = Recorder()
    resumed = fit(experiment(data=ramp, training=training), reporter=reporter)
    assert (reporter.info["start_step"], reporter.info["batch_size"]) == (4, 8)
    assert_same(parameters(resumed), parameters(whole))
    again = [r for r in read_metrics(resumed.output_dir) if "loss" in r]
    assert [r["loss"] for r in again] == [r["loss"] for r in records[4:]]


def test_resuming_on_another_mesh(experiment, tmp_path):
    def make(**sections):
        # Plain rates: Adam's first updates would turn rounding errors into whole steps.
        return experiment(optimizer={"learning_rate": 1e-3, "eps": 1e-3}, sample=None, **sections)

    whole = fit(make(output_dir=str(tmp_path / "whole"), mesh={"data": 2, "fsdp": 2}))
    shutil.copytree(tmp_path / "whole" / "checkpoints", tmp_path / "run" / "checkpoints")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    reporter = Recorder()
    moved = fit(make(mesh={"data": 1, "tensor": 2, "sequence": 2}), reporter=reporter)
    assert reporter.info["start_step"] == 3
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        parameters(moved),
        parameters(whole),
    )


def test_frozen_parameters_need_no_optimizer_state(experiment):
    reporter = Recorder()
    config = experiment(training={"only": ["layers/mlp"], "steps": 3, "eval_every": None})
    result = fit(config, reporter=reporter)
    mlp = result.state.params["layers"]["mlp"]
    count = sum(leaf.size for leaf in jax.tree.leaves(mlp))
    assert reporter.info["num_trainable"] == count
    assert reporter.info["optimizer_bytes"] < 2 * 4 * count + 100
    assert reporter.info["params_bytes"] > 4 * 4 * count


def test_a_trained_pattern_is_in_the_saved_model(experiment):
    """From a configuration's rule to token ids, through packed rows, into the directory."""
    config = experiment(
        model={
            "attention": {"pattern": "sepllm", "window": 4, "initial_tokens": 1},
            "kv_shift": {"init": "identity"},
        },
        training={"only": ["attention"]},
    )
    result = fit(config, reporter=Recorder())
    model = jaxlab.load(result.model_dir)
    [space] = model.tokenizer.encode(" ")
    assert space in model.config.attention.separators
    assert model.config.kv_shift.init == "identity"
    taps = model.params["layers"]["attention"]["key_shift"]
    assert float(np.abs(np.asarray(taps)[..., 0]).max()) > 0  # learned
    records = [r for r in read_metrics(result.output_dir) if "loss" in r]
    assert records[-1]["loss"] < records[0]["loss"]


def test_blocks_chosen_in_training_must_be_asked_for(experiment):
    pattern = {"pattern": "xattention"}
    with pytest.raises(ConfigError, match="constant_mask: true"):
        fit(experiment(model={"attention": pattern}), reporter=Recorder())


def test_a_loss_that_is_not_a_number_stops_the_run(experiment, monkeypatch):
    real = training_loop.make_train_step

    def poisoned(*args, **kwargs):
        step = real(*args, **kwargs)

        def run(state, batch):
            new, metrics = step(state, batch)
            metrics["loss"] = jax.numpy.where(state.step == 4, jax.numpy.nan, metrics["loss"])
            return new, metrics

        return run

    monkeypatch.setattr(training_loop, "make_train_step", poisoned)
    config = experiment()
    with pytest.raises(NonFiniteLossError) as error:
        fit(config)
    message = str(error.value)
    assert "loss is nan at step 5" in message
    assert f"the last good checkpoint is {config.output_dir}/checkpoints/3" in message
    assert "The batch had the rows" in message
    assert "text.txt" in message  # where the first row came from
    assert Checkpointer(Path(config.output_dir) / "checkpoints").steps == [3]


def test_a_huge_learning_rate_is_caught_before_it_is_saved(experiment):
    config = experiment(
        optimizer={"learning_rate": 1e30, "clip_norm": None, "warmup_steps": 0},
        training={"checkpoint_every": 1, "eval_every": None},
    )
    with pytest.raises(NonFiniteLossError, match="Lower optimizer"):
        fit(config)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB, or a skip where one cannot be mounted."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system needs root")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_leaves_the_last_checkpoint_intact(experiment, small_disk):
    config = experiment(output_dir=str(small_disk / "run"), training={"steps": 3})
    fit(config)
    ballast = small_disk / "ballast"
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    ballast.write_bytes(b"\xff" * (free - 8 * 4096))
    longer = experiment(output_dir=str(small_disk / "run"))
    with pytest.raises(StorageError, match=r"(?i)no space left on device"):
        fit(longer)
    ballast.unlink()
    checkpoints = small_disk / "run" / "checkpoints"
    assert Checkpointer(checkpoints).steps == [3]
    assert not list(checkpoints.glob("*tmp*"))
    reporter = Recorder()
    fit(longer, reporter=reporter)
    assert reporter.info["start_step"] == 3


def test_an_output_directory_that_cannot_be_made(experiment, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot make output_dir"):
        fit(experiment(output_dir=str(tmp_path / "file" / "run")))


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        ({"data": {"sequence_length": 128}}, ConfigError, "128 is longer than the model's context"),
        ({"model": {"vocab_size": 100}}, TokenizerError, "100"),
        ({"data": {"source": "/nowhere.txt"}}, DataError, "nowhere"),
        ({"training": {"only": ["decoder"]}}, ConfigError, "'decoder' matches no parameter"),
        ({"model": {"num_kv_heads": 3}}, ConfigError, "num_kv_heads 3"),
    ],
)
def test_contradictions_are_found_before_training(experiment, sections, error, message):
    with pytest.raises(error, match=message):
        fit(experiment(**sections))


def test_a_run_of_another_model_is_not_resumed(experiment):
    fit(experiment(training={"steps": 3}))
    wider = experiment(model={"intermediate_size": 48})
    with pytest.raises(CheckpointError, match="intermediate_size 32, now 48"):
        fit(wider)
    with pytest.raises(CheckpointError, match=r"opt_state.*another .*optimizer"):
        fit(experiment(optimizer={"name": "lion"}))
    with pytest.raises(DataError, match="seed 0, now 1"):
        fit(experiment(seed=1))
    with pytest.raises(ConfigError, match=r"training.steps is 1 but .* is at step 3"):
        fit(experiment(training={"steps": 1}, optimizer={"warmup_steps": 0}))


def test_texts_without_separators_are_told_of(experiment, tmp_path):
    source = tmp_path / "letters.txt"
    source.write_text("abcdefgh" * 200)
    config = experiment(
        model={"attention": {"pattern": "sepllm", "window": 4}},
        data={"source": str(source)},
        training={"steps": 3},
    )
    with pytest.warns(UserWarning, match="found no separator among 256 tokens"):
        fit(config)
