"""What the claim scripts share: a table on the screen, JSON and a picture in a folder."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table; numbers to four digits."""

    def cell(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    lines = [columns, ["---"] * len(columns)]
    lines += [[cell(row.get(column, "")) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_report(
    name: str,
    columns: Sequence[str],
    rows: Sequence[dict[str, Any]],
    figure: Callable[[Any], None] | None,
    notes: Sequence[str],
    output_dir: str | Path,
) -> None:
    """Prints the table and notes; writes `name.json` and, by `figure(axes)`, `name.png`."""
    directory = Path(output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    report = {
        "claim": name,
        "command": " ".join(sys.argv),
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in ("jax", "jaxlab")},
        },
        "rows": list(rows),
        "notes": list(notes),
    }
    (directory / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if figure is not None:
        canvas, axes = plt.subplots(figsize=(7, 4.5))
        figure(axes)
        axes.spines[["top", "right"]].set_visible(False)
        canvas.tight_layout()
        canvas.savefig(directory / f"{name}.png", dpi=120)
        plt.close(canvas)
    print(table(columns, rows))
    print()
    for note in notes:
        print(note)
    print(
        f"\n{report['machine']}; {report['versions']}; written to {directory}/{name}.json and .png"
    )


def processor() -> str:
    """The model's name where Linux tells it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
