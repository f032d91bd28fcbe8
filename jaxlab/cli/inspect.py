"""`jaxlab inspect`: what a model does inside, as pictures and tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from jaxlab.cli.console import check_picture, human_bytes, stderr, stdout, table
from jaxlab.cli.generate import DEFAULT_MODEL, ModelOption, SetOption, load_model
from jaxlab.errors import DataError, StorageError

app = typer.Typer(help="Look inside a model.", no_args_is_help=True)


@app.callback()
def _inspect() -> None:
    """Look inside a model."""


@app.command("attention")
def attention(
    model: ModelOption = DEFAULT_MODEL,
    pattern: Annotated[
        str | None,
        typer.Option(help="full, sepllm, cca or xattention. Default: the model's own."),
    ] = None,
    text: Annotated[
        str, typer.Option("--text", help="A text file, or - for standard input.")
    ] = "python-docs",
    length: Annotated[int, typer.Option(min=1, help="Tokens of the text to look at.")] = 512,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The picture to write (.png, .pdf, .svg).")
    ] = Path("attention.png"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    settings: SetOption = None,
) -> None:
    """Draw which keys each query sees, and count what a cache weighs.

    [dim]$[/] jaxlab inspect attention --pattern sepllm --set attention.window=64
    [dim]$[/] jaxlab inspect attention --pattern xattention --length 2048 --text book.txt
    [dim]$[/] jaxlab inspect attention --pattern cca --json
    """
    settings = [*([f"attention.pattern={pattern}"] if pattern else []), *(settings or [])]
    content = read_text(text)
    check_picture(output)
    loaded = load_model(model, settings)
    if loaded.tokenizer is None:
        raise DataError(f"{model} has no tokenizer to read the text with: choose another model")
    tokens = loaded.tokenizer.encode(content)[:length]
    from jaxlab.evaluation.attention_inspection import attention_maps, cache_table, draw_maps

    maps = attention_maps(loaded, tokens)
    try:
        draw_maps(maps, output)
    except OSError as error:
        raise StorageError(f"cannot write {output}: {error.strerror or error}") from error
    caches = cache_table(loaded.config, tokens)
    if as_json:
        layers = [{"layer": m.layer, "pattern": m.pattern, "density": m.density} for m in maps]
        print(json.dumps({"tokens": len(tokens), "layers": layers, "cache": caches}))
        return
    rows = table("layer", "pattern", "density", right=("layer", "density"))
    for layer in maps:
        rows.add_row(str(layer.layer), layer.pattern, f"{layer.density:.1%}")
    stdout().print(rows)
    stdout().print()
    columns = ("tokens", "cache", "needed", "full attention", "needed of full")
    rows = table(*columns, right=columns)
    for row in caches:
        sizes = (human_bytes(row[key]) for key in ("bytes", "needed_bytes", "full_bytes"))
        rows.add_row(f"{row['tokens']:,}", *sizes, f"{row['needed_bytes'] / row['full_bytes']:.1%}")
    stdout().print(rows)
    stderr().print(
        f"density: products computed, over full causal attention's, on {len(tokens)} tokens"
    )
    if any(row["needed_bytes"] < row["bytes"] for row in caches):
        stderr().print(
            "cache: room for a text of separators alone; needed: for as many as this text has. "
            "attention.separator_capacity bounds it"
        )
    stderr().print(f"wrote {output}")


def read_text(source: str) -> str:
    """A text file, standard input for `-`, or the topics of the Python documentation."""
    if source == "-":
        return sys.stdin.read()
    if source == "python-docs":
        import pydoc_data.topics

        return "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    try:
        return Path(source).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(
            f"cannot read the text {source!r}: {error.strerror}; give a text file, or - for "
            "standard input"
        ) from error
