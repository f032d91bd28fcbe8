"""`jaxlab calibrate`: settings of an attention pattern, found on a model's own texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from jaxlab.cli.console import check_output, stderr, stdout, table
from jaxlab.cli.generate import DEFAULT_MODEL, ModelOption, SetOption, load_model
from jaxlab.cli.inspect import read_text
from jaxlab.errors import DataError, PromptError

app = typer.Typer(help="Fit an attention pattern to a model.", no_args_is_help=True)


@app.callback()
def _calibrate() -> None:
    """Fit an attention pattern to a model."""


@app.command("xattention")
def xattention(
    model: ModelOption = DEFAULT_MODEL,
    text: Annotated[
        str,
        typer.Option("--text", help="A text file, - for standard input, or python-docs."),
    ] = "python-docs",
    output: Annotated[Path, typer.Option("--output", "-o", help="The JSON file to write.")] = Path(
        "threshold.json"
    ),
    length: Annotated[
        int, typer.Option(min=2, help="Tokens a row; about as many as you will use.")
    ] = 2048,
    rows: Annotated[int, typer.Option(min=1, help="Rows, spread over the text.")] = 4,
    coverage: Annotated[
        float, typer.Option(help="Share of the exact attention to be kept, above 0, at most 1.")
    ] = 0.9,
    stride: Annotated[int, typer.Option(min=1, help="As attention.stride will be.")] = 8,
    block_size: Annotated[int, typer.Option(min=1, help="As attention.block_size will be.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    settings: SetOption = None,
) -> None:
    """Find XAttention's threshold of each layer and head on texts like those you will use.

    [dim]$[/] jaxlab calibrate xattention --text book.txt --output threshold.json
    [dim]$[/] jaxlab generate -f long.txt --set attention.pattern=xattention \\
        --set attention.threshold=threshold.json
    """
    content = read_text(text)
    check_output(output)
    loaded = load_model(model, settings)
    if loaded.tokenizer is None:
        raise DataError(f"{model} has no tokenizer to read the text with: choose another model")
    if length > loaded.config.max_position_embeddings:
        raise PromptError(
            f"--length {length} is beyond the model's context of "
            f"{loaded.config.max_position_embeddings} tokens: give a smaller one"
        )
    import numpy as np

    from jaxlab.evaluation.threshold_calibration import (
        calibrated_thresholds,
        spread_rows,
        write_thresholds,
    )

    tokens = np.asarray(loaded.tokenizer.encode(content), np.int32)
    chosen = spread_rows(tokens, length, rows)
    console = stderr()
    found = calibrated_thresholds(
        loaded,
        chosen,
        block_size=block_size,
        stride=stride,
        coverage=coverage,
        progress=lambda done: console.print(f"row {done} of {len(chosen)}"),
    )
    made_with = {
        "model": model,
        "text": text,
        "rows": len(chosen),
        "length": len(chosen[0]),
        "coverage": coverage,
        "stride": stride,
        "block_size": block_size,
    }
    write_thresholds(output, found, **made_with)
    if as_json:
        print(json.dumps({**made_with, "output": str(output), "mean": float(found.mean())}))
        return
    lines = table("layer", "least", "mean", "most", right=("layer", "least", "mean", "most"))
    for layer, heads in enumerate(found):
        lines.add_row(str(layer), *(f"{x:.3f}" for x in (heads.min(), heads.mean(), heads.max())))
    stdout().print(lines)
    console.print(
        f"wrote {output}: set attention.threshold={output} with attention.stride={stride} and "
        f"attention.block_size={block_size}"
    )
