"""The launchers print the right commands, and have no fault shellcheck knows of."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = {"PROJECT": "my-project", "ZONE": "us-east5-a", "TPU_TYPE": "v5p-128", "BUCKET": "b"}


def dry_run(repo_root: Path, script: str, *arguments: str, **settings: str):
    return subprocess.run(
        ["bash", repo_root / "tpu" / script, "--dry-run", *arguments],
        env={**os.environ, **SETTINGS, **settings},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_queued_resource_is_made_and_trained_on(repo_root) -> None:
    process = dry_run(
        repo_root, "queued_resource.sh", "train", "configs/llama3_8b_pretrain.yaml", "a.b=[1, 2]"
    )
    assert process.returncode == 0, process.stderr
    create, archive, copy, unpack, train = map(shlex.split, process.stdout.splitlines())
    assert create[:5] == ["gcloud", "compute", "tpus", "queued-resources", "create"]
    assert {"--spot", "v5p-128", "v2-alpha-tpuv5", "my-project"} <= set(create)
    assert archive[0] == "git"
    assert copy[:5] == ["gcloud", "compute", "tpus", "tpu-vm", "scp"]
    assert "--worker=all" in unpack
    remote = shlex.split(train[-1])
    assert remote == [
        "bash",
        "jaxlab/tpu/on_host.sh",
        "configs/llama3_8b_pretrain.yaml",
        "output_dir=gs://b/runs/llama3_8b_pretrain",
        "a.b=[1, 2]",
    ]


@pytest.mark.parametrize(
    ("tpu_type", "image"),
    [("v5litepod-16", "v2-alpha-tpuv5-lite"), ("v6e-16", "v2-alpha-tpuv6e")],
)
def test_each_chip_has_its_image(repo_root, tpu_type, image) -> None:
    arguments = ("queued_resource.sh", "train", "configs/quickstart.yaml")
    process = dry_run(repo_root, *arguments, TPU_TYPE=tpu_type, PROVISIONING="on-demand")
    assert f"--accelerator-type {tpu_type} --runtime-version {image}" in process.stdout
    assert "--spot" not in process.stdout


def test_a_workload_on_gke(repo_root) -> None:
    process = dry_run(repo_root, "gke.sh", "train", "configs/llama3_8b_pretrain.yaml", "seed=1")
    assert process.returncode == 0, process.stderr
    words = shlex.split(process.stdout)
    assert words[:3] == ["xpk", "workload", "create"]
    assert "jaxlab-llama3-8b-pretrain" in words
    assert words[words.index("--max-restarts") + 1] == "100"
    assert shlex.split(words[-1])[-1] == "seed=1"
    cluster = dry_run(repo_root, "gke.sh", "cluster")
    assert "--spot" in cluster.stdout


def test_the_bucket_is_made_in_the_region_of_the_chips(repo_root) -> None:
    process = dry_run(repo_root, "bucket.sh", "create")
    assert shlex.split(process.stdout)[:5] == ["gcloud", "storage", "buckets", "create", "gs://b"]
    assert "--location us-east5 " in process.stdout


@pytest.mark.parametrize(
    ("script", "arguments", "settings", "expected"),
    [
        ("queued_resource.sh", ["train"], {}, "train needs a CONFIG"),
        ("queued_resource.sh", ["train", "configs/none.yaml"], {}, "there is no configs/none.yaml"),
        ("queued_resource.sh", ["train", "configs/quickstart.yaml"], {"TPU_TYPE": "v9-8"}, "v9-8"),
        ("queued_resource.sh", [], {}, "queued_resource.sh"),
        ("gke.sh", ["cluster"], {"PROVISIONING": "free"}, "PROVISIONING=free"),
        ("bucket.sh", ["destroy"], {}, "bucket.sh"),
    ],
)
def test_wrong_usage_says_what_is_wrong(repo_root, script, arguments, settings, expected) -> None:
    process = dry_run(repo_root, script, *arguments, **settings)
    assert process.returncode == 2
    assert expected in process.stderr
    assert process.stdout == ""


FAKE_GCLOUD = """\
#!/usr/bin/env bash
echo "$*" >> "$CALLS"
case "$*" in
  *queued-resources\\ describe*)
    count=$(grep -c describe "$CALLS")
    states=(ACTIVE SUSPENDED "" WAITING_FOR_RESOURCES ACTIVE)
    state=${states[$((count - 1))]}
    [[ -n $state ]] || exit 1
    echo "$state" ;;
  *on_host.sh*) [[ $(grep -c on_host.sh "$CALLS") -ge 2 ]] ;; # the first training is cut short
esac
"""


def test_a_slice_that_is_taken_away_is_asked_for_again(repo_root, tmp_path) -> None:
    gcloud = tmp_path / "gcloud"
    gcloud.write_text(FAKE_GCLOUD)
    gcloud.chmod(0o755)
    calls = tmp_path / "calls"
    calls.write_text("")
    environment = {
        **os.environ,
        **SETTINGS,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "POLL": "0",
        "QUICK": "0",
    }
    process = subprocess.run(
        ["bash", repo_root / "tpu/queued_resource.sh", "train", "configs/quickstart.yaml"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 0, process.stderr
    verbs = [line.split()[3] for line in calls.read_text().splitlines() if "queued-res" in line]
    assert verbs == ["describe", "describe", "delete", "describe", "create", "describe", "describe"]
    assert "resuming from the last checkpoint" in process.stderr
    assert calls.read_text().count("on_host.sh") == 2


@pytest.mark.skipif(shutil.which("git") is None, reason="lists the scripts with git")
def test_shell_scripts_have_no_known_fault(repo_root) -> None:
    places = [str(Path(sys.executable).parent), os.environ["PATH"]]
    shellcheck = shutil.which("shellcheck", path=os.pathsep.join(places))
    if not shellcheck:
        pytest.skip("shellcheck is not installed (extra `test`)")
    scripts = subprocess.run(
        ["git", "ls-files", "*.sh", ".ci/run"], cwd=repo_root, capture_output=True, text=True
    ).stdout.split()
    assert scripts
    process = subprocess.run(
        [shellcheck, "-x", *scripts], cwd=repo_root, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout
