"""Runs the command in this process, and makes the small things it works on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Outcome:
    """What a command line came to."""

    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture
def jaxlab_command(capsys: pytest.CaptureFixture[str]) -> Command:
    """`jaxlab_command("generate", "-p", "x")`: exit code, stdout and stderr."""
    from jaxlab.cli.main import run

    def call(*arguments: str) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level Llama with 64 tokens of context and random weights, in a directory."""
    import jax

    from jaxlab.data.tokenizers import load_tokenizer
    from jaxlab.model import Model
    from jaxlab.models import ModelConfig, Transformer, init_params

    config = ModelConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    module = Transformer(config)
    params = init_params(module, jax.random.key(0))
    directory = tmp_path_factory.mktemp("models") / "tiny"
    return Model(module, params, load_tokenizer("byte")).save(directory)


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """A config that trains a tiny model for four steps on a text beside it."""
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 200)
    path = tmp_path / "tiny.yaml"
    path.write_text(f"""\
name: tiny
output_dir: {tmp_path}/run
model: {{hidden_size: 32, intermediate_size: 64, num_layers: 2, num_heads: 4}}
tokenizer: byte
data: {{source: {text}, sequence_length: 32, batch_size: 8}}
optimizer: {{learning_rate: 1.0e-2}}
training: {{steps: 4, log_every: 1, checkpoint_every: 2}}
sample: {{prompts: ["The "], max_new_tokens: 8}}
""")
    return path
