"""The benchmark runs, on a tiny model, and reports every workload of both sides."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parity
def test_quick_run_reports_every_workload(repo_root, tmp_path):
    pytest.importorskip("torch")
    output = tmp_path / "bench.json"
    script = repo_root / "scripts" / "bench_core.py"
    done = subprocess.run(
        [sys.executable, script, "--quick", "--output", output],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = {row["workload"]: row for row in json.loads(output.read_text())["results"]}
    assert list(results) == ["decode", "prefill", "train", "attention"]
    for name, row in results.items():
        assert f"| {name} " in done.stdout
        for side in ("jaxlab", "torch"):
            assert len(row["seconds"][side]) == 2
            assert row["median_seconds"][side] > 0
            assert row["peak_mib"][side] > 50
