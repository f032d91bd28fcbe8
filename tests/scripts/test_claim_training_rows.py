"""What the claims train on is not what they are judged on."""

import sys

import numpy as np
import pytest


@pytest.fixture(scope="module")
def post_training(repo_root):
    """The module beside the scripts."""
    folder = str(repo_root / "scripts" / "claims")
    sys.path.insert(0, folder)
    try:
        import post_training

        yield post_training
    finally:
        sys.path.remove(folder)
        for name in ("post_training", "windows", "report"):
            sys.modules.pop(name, None)


def test_no_row_touches_held_out_text(post_training):
    tokens = np.arange(110_000)  # each token is its own place
    rows = post_training.training_rows(tokens, 512, 2_000, seed=0)
    assert rows.shape == (2_000, 513)
    for start in post_training.STARTS:
        held_out = (rows >= start) & (rows < start + post_training.HELD_OUT)
        assert not held_out.any()
    evaluated = post_training.windows(tokens, post_training.HELD_OUT)
    assert not np.isin(evaluated, rows).any()


def test_a_seed_draws_its_own_rows(post_training):
    draws = [
        post_training.training_rows(np.arange(110_000), 64, 8, seed)[:, 0] for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert (draws[0] != draws[2]).all()
