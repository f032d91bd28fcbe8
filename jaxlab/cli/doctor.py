"""`jaxlab doctor`: what is installed, what hardware is seen, what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.markup import escape

from jaxlab.cli.console import human_bytes, stdout, table

# package, why it is wanted, the command that brings it, whether jaxlab can work without it
_PACKAGES = (
    ("jax", "arrays and compilation", "pip install jaxlab", True),
    ("jaxlib", "arrays and compilation", "pip install jaxlab", True),
    ("flax", "models", "pip install jaxlab", True),
    ("optax", "optimizers", "pip install jaxlab", True),
    ("orbax-checkpoint", "training checkpoints", "pip install jaxlab", True),
    ("grain", "data pipelines", "pip install jaxlab", True),
    ("datasets", "Hugging Face data sets", "pip install jaxlab", True),
    ("transformers", "tokenizers and chat templates", "pip install jaxlab", True),
    ("safetensors", "Hugging Face checkpoints", "pip install jaxlab", True),
    ("gguf", "GGUF checkpoints", "pip install jaxlab", True),
    ("pydantic", "configuration", "pip install jaxlab", True),
    ("matplotlib", "loss curves", "pip install jaxlab", True),
    ("libtpu", "`jaxlab preflight`, TPUs", "pip install 'jaxlab[preflight]'", False),
    ("jax-triton", "GPU kernels", "pip install 'jaxlab[gpu]' (NVIDIA GPU)", False),
    ("tensorboardX", "training.tensorboard", "pip install 'jaxlab[tensorboard]'", False),
    ("gcsfs", "data in gs:// buckets", "pip install 'jaxlab[tpu]'", False),
    ("torch", "comparison tests", "pip install 'jaxlab[parity]'", False),
)


@dataclass(frozen=True)
class Finding:
    """Something wrong or missing, with its remedy."""

    text: str
    remedy: str
    fatal: bool


def doctor() -> None:
    """Check this machine: versions, devices, and what is missing.

    Exit code 0 if jaxlab can work here, 1 if something it needs is missing.

    [dim]$[/] jaxlab doctor
    """
    out = stdout()
    findings: list[Finding] = []
    out.print(f"Python {platform.python_version()}  {sys.executable}")
    out.print(
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores, "
        f"{human_bytes(_memory())} of memory\n"
    )
    out.print(_packages(findings))
    out.print()
    _devices(findings, out.print)
    _storage(findings, out.print)
    out.print()
    for finding in findings:
        mark = "[red]missing[/]" if finding.fatal else "[dim]optional[/]"
        out.print(f"{mark}  {escape(f'{finding.text}: {finding.remedy}')}")
    if any(finding.fatal for finding in findings):
        raise typer.Exit(1)
    out.print("[green]jaxlab can work on this machine.[/]")


def _packages(findings: list[Finding]):
    versions = table("package", "version", "for")
    for name, purpose, remedy, needed in _PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "-"
            findings.append(Finding(f"{name} ({purpose})", remedy, needed))
        versions.add_row(name, version, purpose)
    return versions


def _devices(findings: list[Finding], say) -> None:
    try:
        import jax

        devices = jax.devices()
    except Exception as error:  # whatever a broken installation raises is the finding
        remedy = (
            "reinstall with `pip install --force-reinstall jax jaxlib`, or set JAX_PLATFORMS=cpu"
        )
        findings.append(Finding(f"jax does not start ({error})", remedy, True))
        return
    kinds = {device.device_kind for device in devices}
    say(f"devices    {len(devices)} × {', '.join(sorted(kinds))} (backend {jax.default_backend()})")
    memory = devices[0].memory_stats() if hasattr(devices[0], "memory_stats") else None
    if memory and "bytes_limit" in memory:
        say(f"memory     {human_bytes(memory['bytes_limit'])} per device")
    if jax.default_backend() == "cpu" and shutil.which("nvidia-smi"):
        remedy = "pip install 'jaxlab[gpu]'"
        findings.append(Finding("an NVIDIA GPU that jax does not see", remedy, False))


def _storage(findings: list[Finding], say) -> None:
    cache = Path(os.environ.get("JAXLAB_CACHE", Path.home() / ".cache" / "jaxlab"))
    parent = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(parent).free
    say(f"cache      {cache} ({human_bytes(free)} free)")
    if not os.access(parent, os.W_OK):
        remedy = "set JAXLAB_CACHE to a folder you can write"
        findings.append(Finding(f"cache folder {cache} is not writable", remedy, False))
    if free < 1 << 30:
        findings.append(Finding(f"only {human_bytes(free)} free for models", "free some", False))


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0
