"""Passkey retrieval: the prompts, the scores, the refusals."""

import json

import jax
import numpy as np
import pytest

import jaxlab
from jaxlab.data.tokenizers import ByteTokenizer
from jaxlab.errors import ConfigError
from jaxlab.evaluation.needle import NeedleCell, _trial, needle, write_needle
from jaxlab.models import ModelConfig, Transformer, init_params


@pytest.fixture(scope="module")
def model():
    config = ModelConfig(
        vocab_size=259,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        max_position_embeddings=256,
    )
    params = init_params(Transformer(config), jax.random.key(0))
    return jaxlab.Model(Transformer(config), params, ByteTokenizer())


@pytest.mark.parametrize("depth", [0, 50, 100])
def test_the_needle_stands_where_it_should(depth):
    tokenizer = ByteTokenizer()
    straw, question = tokenizer.encode("abc " * 50), tokenizer.encode("?")
    prompt, key, decoys = _trial(
        np.random.default_rng(0), tokenizer, straw, question, length=160, depth=depth
    )
    assert len(prompt) == 160
    assert {len(key)} == {len(decoy) for decoy in decoys}
    text, number = tokenizer.decode(prompt), tokenizer.decode(key)
    assert text.count(f"The pass key is{number}. Remember it.") == 1
    hay = 160 - len(question) - len(f"\nThe pass key is{number}. Remember it.\n")
    assert text.index("\nThe pass key is") == round(hay * depth / 100)
    assert not any(tokenizer.decode(decoy) in text for decoy in decoys)


def test_cells_and_files(model, tmp_path):
    seen = []
    cells = needle(
        model, "Some prose. " * 40, lengths=[120], depths=[0, 100], trials=2, progress=seen.append
    )
    assert seen == cells
    assert [(cell.length, cell.depth) for cell in cells] == [(120, 0.0), (120, 100.0)]
    assert all(cell.accuracy in (0.0, 0.5, 1.0) for cell in cells)
    # An untrained model knows nothing: the key is not far from the decoys.
    assert all(abs(cell.log_odds) < 1 for cell in cells)
    again = needle(model, "Some prose. " * 40, lengths=[120], depths=[0, 100], trials=2)
    assert again == cells
    write_needle(cells, tmp_path / "map.png")
    records = json.loads((tmp_path / "map.json").read_text())
    assert [NeedleCell(**record) for record in records] == cells
    assert (tmp_path / "map.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(lengths=[20]), "lengths holds 20, too few for needle and question: give at least"),
        (dict(lengths=[250]), "the model's context is 256"),
        (dict(depths=[101]), "depths holds 101"),
        (dict(trials=0), "trials=0"),
        (dict(hay=""), "hay is empty"),
    ],
)
def test_refusals(model, change, words):
    with pytest.raises(ConfigError, match=words):
        needle(model, **dict(hay="Some prose.", lengths=[120]) | change)
