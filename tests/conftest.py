"""Settings every test shares. They must be in the environment before jax is imported.

Tests run on the CPU, seen as four virtual devices so that meshes are real (measured: a product on
one device is no slower for it). They compile far more than they compute, so XLA's code generator is
told not to optimise: a train step compiles in two fifths of the time. Shapes are checked at run
time: pyproject.toml names the packages for jaxtyping's import hook, beartype does the checking.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        *(
            flag
            for flag in os.environ.get("XLA_FLAGS", "").split()
            if "xla_force_host_platform_device_count" not in flag
        ),
        "--xla_force_host_platform_device_count=4",
    ]
)
# Without these libtpu asks a metadata server that is not there, and says so at length.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# Several test processes compile for a TPU at the same time.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_LIBRARY_LOG_LEVEL", "3")
os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TPU_LOG_DIR", "disabled")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# No test may depend on a model hub; what a test downloads comes from a package index, pinned.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_DATASETS_CACHE", str(Path(tempfile.gettempdir()) / "jaxlab-hf-datasets"))
os.environ.setdefault("MPLBACKEND", "Agg")
# Compiled programs are kept between runs, and shared with the processes that tests start.
_cache = Path(__file__).parent.parent / ".cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_cache))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout: the folder with pyproject.toml, configs/ and scripts/."""
    return Path(__file__).parent.parent


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs() -> Iterator[None]:
    """The programs of a file serve no other one; kept, they would come to 8 GB a process."""
    yield
    import jax

    jax.clear_caches()
