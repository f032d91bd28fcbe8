"""The claim scripts and the bench of the patterns run and write what they promise."""

import json
import subprocess
import sys

import pytest

REPORTS = {
    "kv_shifting": ["kv_shifting"],
    "sepllm": ["sepllm_loss", "sepllm_tune", "sepllm_stream", "sepllm_million"],
    "cca": ["cca_loss", "cca_tune", "cca_cost"],
    "xlstm": ["xlstm_decoding", "xlstm_bias", "xlstm_chunks", "xlstm_borders"],
    "xattention": ["xattention_selection", "xattention_loss", "xattention_speed"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REPORTS)
def test_a_claim_is_measured(name, repo_root, tmp_path):
    script = repo_root / "scripts" / "claims" / f"{name}.py"
    subprocess.run(
        [sys.executable, script, "--quick", "--output", tmp_path], check=True, timeout=400
    )
    for report in REPORTS[name]:
        content = json.loads((tmp_path / f"{report}.json").read_text())
        assert content["rows"]
        assert content["versions"]["jax"]


@pytest.mark.slow
def test_the_cell_is_timed(repo_root, tmp_path):
    output = tmp_path / "bench.json"
    script = repo_root / "scripts" / "bench_xlstm.py"
    arguments = ["--length", "256", "--repeats", "1", "--no-torch", "--output", output]
    subprocess.run([sys.executable, script, *arguments], check=True, timeout=400)
    assert json.loads(output.read_text())["mlstm"]


@pytest.mark.slow
def test_the_patterns_are_timed(repo_root, tmp_path):
    output = tmp_path / "bench.json"
    script = repo_root / "scripts" / "bench_attention.py"
    arguments = ["--length", "512", "--context", "1024", "--repeats", "1", "--output", output]
    subprocess.run([sys.executable, script, *arguments], check=True, timeout=400)
    report = json.loads(output.read_text())
    assert {row["attention"].split(",")[0] for row in report["attention"]} >= {"dense", "SepLLM"}
    assert report["decode"][0]["cache MiB"] > report["decode"][-1]["cache MiB"]
