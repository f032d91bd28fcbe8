"""The toy sequences of the claim of KV shifting are right, and its experiments run."""

import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention, kv_shift


@pytest.fixture(scope="module")
def sequences(repo_root):
    """The module beside the scripts."""
    folder = str(repo_root / "scripts" / "claims")
    sys.path.insert(0, folder)
    try:
        import sequences

        yield sequences
    finally:
        sys.path.remove(folder)
        sys.modules.pop("sequences", None)


@pytest.fixture(scope="module")
def golden(repo_root):
    return lambda name: json.loads(
        (repo_root / "tests" / "golden" / "kv_shifting" / f"{name}.json").read_text()
    )


def test_hops_lead_where_the_public_generator_says(sequences, golden):
    for case in golden("hop_k_cases"):
        characters = np.array([["abcd".index(x) for x in case["sequence"]]])
        hops = np.array([case["hops"]])
        assert sequences.hop_positions(characters, hops)[0].tolist() == case["hop_positions"]
        answers = sequences.hop_answers(characters, hops)[0]
        assert "".join("abcd~"[i] for i in answers) == case["hop_characters"]


def test_hop_rows_say_their_hops_and_ask_at_each_character(sequences):
    batch = sequences.hop_rows(np.random.default_rng(0), 50, length=20, max_hops=3)
    hops, characters = batch.tokens[:, 0] - sequences.UNDEFINED - 1, batch.tokens[:, 1:]
    assert set(hops.tolist()) == {0, 1, 2, 3}
    assert (characters[:, 1:] != characters[:, :-1]).all()
    assert (batch.answers[:, 0] == sequences.NOT_ASKED).all()
    np.testing.assert_array_equal(batch.answers[hops == 0, 1:], characters[hops == 0])


def test_induction_rows_repeat_what_followed(sequences):
    rows = sequences.induction_rows(
        np.random.default_rng(0), 50, length=32, vocabulary=256, candidates=32
    )
    first = sequences.first_repeats(rows)
    assert ((first.answers != sequences.NOT_ASKED).sum(1) == 1).all()
    for tokens, answers in zip(rows.tokens.tolist(), rows.answers.tolist(), strict=True):
        for at, answer in enumerate(answers):
            if answer != sequences.NOT_ASKED:
                before = tokens.index(tokens[at])
                assert before < at
                assert answer == tokens[before + 1] == tokens[at + 1]
    for tokens, answers in zip(first.tokens, first.answers, strict=True):
        at = int((answers != sequences.NOT_ASKED).argmax())
        assert len(set(tokens[:at].tolist())) == at  # nothing was repeated before


@pytest.mark.parametrize(("previous", "present"), [(1.0, 0.0), (0.0, 1.0)])
def test_one_head_with_identity_weights_is_an_induction_head(golden, previous, present):
    """Theorem 2 of arXiv:2411.19574; with unshifted keys the head finds the token itself."""
    for case in golden("induction_construction_cases")["cases"]:
        x = jnp.eye(32)[jnp.asarray(case["tokens"])][None, :, None, :]
        keys = kv_shift(x, jnp.array([[previous, present]]))
        out = attention(x, keys, x, scale=50.0)[0, case["query_position"], 0]
        assert int(out.argmax()) == (case["answer"] if previous else case["tokens"][-1])


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["coefficients", "ablations", "width8", "hops"])
def test_experiments_write_their_reports(repo_root, tmp_path, experiment):
    script = repo_root / "scripts" / "claims" / "kv_shifting.py"
    options = ["--quick", "--steps", "2", "--experiment", experiment, "--output", tmp_path]
    subprocess.run([sys.executable, script, *options], check=True, timeout=400)
    report = json.loads((tmp_path / f"kv_shifting_{experiment}.json").read_text())
    assert report["rows"]
    assert (tmp_path / f"kv_shifting_{experiment}.png").stat().st_size > 1000
