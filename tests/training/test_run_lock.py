"""Two runs do not share an output directory."""

import os
import subprocess
import sys

import pytest

from jaxlab.errors import StorageError
from jaxlab.training import fit
from jaxlab.training.run_lock import run_lock


def test_a_second_run_is_refused_and_a_later_one_not(tmp_path):
    used = rf"in use by another run \(process {os.getpid()}\)"
    with run_lock(tmp_path), pytest.raises(StorageError, match=used), run_lock(tmp_path):
        pass
    with run_lock(tmp_path):
        pass


def test_a_run_that_was_killed_holds_nothing(tmp_path):
    code = (
        "import os, sys; from jaxlab.training.run_lock import run_lock\n"
        "with run_lock(sys.argv[1]): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    with run_lock(tmp_path):
        pass


def test_fit_leaves_a_running_run_alone(experiment, tmp_path):
    config = experiment()
    directory = tmp_path / "run"
    directory.mkdir()
    with (
        run_lock(directory),
        pytest.raises(StorageError, match=f"output_dir {directory} is in use"),
    ):
        fit(config)
    assert [path.name for path in directory.iterdir()] == [".lock"]


def test_object_stores_are_not_locked():
    with run_lock("gs://bucket/run"):
        pass
