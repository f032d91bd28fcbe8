"""`jaxlab calibrate xattention`: the file it writes is the one that `attention.threshold` reads."""

import json

import numpy as np
import pytest

import jaxlab
from jaxlab.evaluation.projections import layer_projections
from jaxlab.evaluation.threshold_calibration import calibrated_thresholds, spread_rows
from pallas_kernels import antidiagonal_block_scores, calibrate_coverage, select_blocks

SIZES = ["--block-size", 8, "--stride", 4]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("One, two. Three; four: five! Six? " * 8)
    return path


def test_the_file_is_what_the_setting_reads(jaxlab_command, tiny_model, tmp_path, text):
    path = tmp_path / "threshold.json"
    arguments = ["-m", tiny_model, "--text", text, "--length", 64, "--rows", 3, *SIZES]
    outcome = jaxlab_command("calibrate", "xattention", *arguments, "-o", path, "--json")
    assert outcome.code == 0, outcome.err
    content = json.loads(path.read_text())
    assert (content["rows"], content["length"], content["stride"]) == (3, 64, 4)
    assert np.shape(content["threshold"]) == (2, 4)
    sparse = {"pattern": "xattention", "block_size": 8, "stride": 4, "threshold": str(path)}
    model = jaxlab.load(tiny_model, attention=sparse)
    assert model.config.attention.threshold == tuple(map(tuple, content["threshold"]))
    # The same again with the settings of the report that a person reads.
    outcome = jaxlab_command("calibrate", "xattention", *arguments, "-o", path)
    assert f"attention.threshold={path}" in outcome.err
    assert len(outcome.out.splitlines()) == 1 + 2


def test_thresholds_are_the_highest_of_the_rows_and_cover(tiny_model):
    model = jaxlab.load(tiny_model)
    rows = [np.random.default_rng(i).integers(3, 259, 64) for i in range(2)]
    found = calibrated_thresholds(model, rows, block_size=8, stride=4, coverage=0.8)
    for row in rows:
        for layer, (q, k, _) in enumerate(layer_projections(model, row[None])):
            one = calibrate_coverage(q, k, block_size=8, stride=4, coverage=0.8)[0]
            assert (found[layer] >= one - 1e-6).all()
            scores = antidiagonal_block_scores(q, k, block_size=8, stride=4)
            higher = select_blocks(scores, found[layer]).sum((0, 2, 3))
            assert (higher >= select_blocks(scores, one).sum((0, 2, 3))).all()
    assert (found <= 1).all()


def test_rows_are_spread_and_do_not_overlap():
    tokens = np.arange(100)
    assert [row[0] for row in spread_rows(tokens, 30, 3)] == [0, 35, 70]
    assert len(spread_rows(tokens, 60, 9)) == 1
    assert len(spread_rows(tokens, 200, 9)[0]) == 100


def test_bad_input(jaxlab_command, tiny_model, tmp_path, text):
    good = ["--length", 64, *SIZES, "-o", tmp_path / "x.json", "--text", text]
    for arguments, words in (
        (["--text", tmp_path / "missing.txt"], "missing.txt"),
        (["--length", 65], "context of 64 tokens"),
        (["--coverage", 1.5], "coverage is 1.5"),
        (["--stride", 3], "stride 3 does not divide block_size 8"),
        (["--block-size", 64, "--stride", 8], "two blocks of 64"),
        (["-o", tmp_path / "no" / "x.json"], "there is no folder"),
    ):
        outcome = jaxlab_command("calibrate", "xattention", "-m", tiny_model, *good, *arguments)
        assert outcome.code == 1, outcome.err
        assert words in outcome.err.replace("\n", " ")
        assert not (tmp_path / "x.json").exists()
