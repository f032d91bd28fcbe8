"""`jaxlab eval`: the perplexity of a model on a text."""

from __future__ import annotations

import json
import math
from typing import Annotated

import typer

from jaxlab.cli.console import stdout, table
from jaxlab.cli.generate import DEFAULT_MODEL, ModelOption, SetOption, load_model


def evaluate(
    source: Annotated[
        str,
        typer.Option(
            "--data",
            "-d",
            help="What to read: a .txt, .jsonl or .parquet file, a folder, hf:ID, or python-docs.",
        ),
    ] = "python-docs",
    model: ModelOption = DEFAULT_MODEL,
    sequence_length: Annotated[
        int, typer.Option(min=2, help="Tokens of context; the text is cut into such rows.")
    ] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 4,
    max_batches: Annotated[
        int | None, typer.Option(min=1, help="Read only so many batches. Default: all.")
    ] = None,
    text_field: Annotated[str, typer.Option(help="Field of a table that holds the text.")] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    settings: SetOption = None,
) -> None:
    """Perplexity: how surprised a model is by a text (lower is better).

    [dim]$[/] jaxlab eval --data book.txt
    [dim]$[/] jaxlab eval --data python-docs -m runs/quickstart --max-batches 20 --json
    """
    from jaxlab.data import DataConfig
    from jaxlab.evaluation.perplexity import perplexity

    loaded = load_model(model, settings)
    data = DataConfig(
        source=source,
        validation_source=None if source == "python-docs" else source,
        sequence_length=sequence_length,
        batch_size=batch_size,
        text_field=text_field,
        shuffle=False,
    )
    result = perplexity(loaded, data, max_batches=max_batches)
    if as_json:
        print(json.dumps({"model": model, "source": source, **result}))
        return
    rows = table("measure", "value", right=("value",))
    rows.add_row("perplexity", f"{result['perplexity']:.3f}")
    rows.add_row("loss (nats per token)", f"{result['loss']:.4f}")
    rows.add_row("bits per token", f"{result['loss'] / math.log(2):.4f}")
    rows.add_row("tokens", f"{result['tokens']:,}")
    stdout().print(rows)
