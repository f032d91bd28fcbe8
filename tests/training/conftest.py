"""A run small enough to train in a second."""

import pytest

from jaxlab.training.config import ExperimentConfig

SENTENCES = (
    "the quick brown fox jumps over the lazy dog. ",
    "a stitch in time saves nine; a penny saved is a penny earned. ",
    "all that glitters is not gold, and not all who wander are lost. ",
)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A text file of a hundred documents."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    documents = [SENTENCES[i % 3] * (3 + i % 5) for i in range(100)]
    path.write_text("\n\n".join(documents))
    return path


@pytest.fixture
def experiment(corpus, tmp_path):
    """Makes an `ExperimentConfig`; keywords replace entries of its sections."""

    def make(**sections):
        tree = {
            "name": "tiny",
            "output_dir": str(tmp_path / "run"),
            "model": {
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_layers": 1,
                "num_heads": 4,
                "num_kv_heads": 2,
                "max_position_embeddings": 64,
            },
            "data": {
                "source": str(corpus),
                "document_separator": "\n\n",
                "validation_fraction": 0.1,
                "sequence_length": 32,
                "batch_size": 8,
                "prefetch": 0,
            },
            "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2},
            "training": {"steps": 6, "eval_every": 3, "eval_batches": 2, "log_every": 1},
            "sample": None,
        }
        for name, value in sections.items():
            both = isinstance(value, dict) and isinstance(tree.get(name), dict)
            tree[name] = {**tree[name], **value} if both else value
        return ExperimentConfig.model_validate(tree)

    return make
