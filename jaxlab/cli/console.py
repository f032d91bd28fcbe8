"""Where commands write: results to stdout, progress and remarks to stderr.

Both are plain text when they are not a terminal, so commands can be piped.
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from jaxlab.errors import StorageError


def stdout() -> Console:
    """The console for results. Wide when piped, so that no line is wrapped or cut."""
    return _console(sys.stdout)


def stderr() -> Console:
    """The console for progress, remarks and errors."""
    return _console(sys.stderr)


def _console(stream) -> Console:
    width = None if stream.isatty() else 200
    return Console(file=stream, width=width, highlight=False, soft_wrap=not stream.isatty())


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A borderless table; columns named in `right` are aligned to the right."""
    result = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        result.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return result


def check_picture(path: Path) -> None:
    """Refuse a path that no picture can be written to, before computing what it is to show."""
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise typer.BadParameter(f"{str(path)!r} is no .png, .pdf or .svg", param_hint="--output")
    check_output(path)


def check_output(path: Path) -> None:
    """Raise `StorageError` if `path` cannot be written; leaves what is there as it is."""
    if not path.parent.is_dir():
        raise StorageError(
            f"cannot write {path}: there is no folder {path.parent}; make it, or choose another"
        )
    exists = path.exists()
    if exists and not (path.is_file() or path.is_dir()):
        return  # a pipe or device, which opening could disturb
    try:
        path.open("ab").close()
        if not exists:
            path.unlink()
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def human_bytes(count: float) -> str:
    """`1536` as `1.5 KiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def human_count(count: float) -> str:
    """`7_300_000` as `7.3M`."""
    for unit, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"
