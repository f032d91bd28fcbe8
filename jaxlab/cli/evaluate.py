"""`jaxlab eval`: the perplexity of a model on a text; `jaxlab eval needle`: long-range recall."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from jaxlab.cli.console import check_output, check_picture, stderr, stdout, table
from jaxlab.cli.generate import DEFAULT_MODEL, ModelOption, SetOption, load_model

app = typer.Typer(invoke_without_command=True)


@app.callback()
def evaluate(
    context: typer.Context,
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
        int | None,
        typer.Option(
            min=2,
            help="Tokens of context; the text is cut into such rows. Default: 512, or the model's "
            "context if that is less.",
        ),
    ] = None,
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
    [dim]$[/] jaxlab eval needle --lengths 512,1024
    """
    if context.invoked_subcommand is not None:
        return
    from jaxlab.data import DataConfig
    from jaxlab.evaluation.perplexity import perplexity

    loaded = load_model(model, settings)
    if sequence_length is None:
        sequence_length = min(512, loaded.config.max_position_embeddings)
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


@app.command("needle")
def needle(
    model: ModelOption = DEFAULT_MODEL,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts, with commas.")] = "512,1024",
    depths: Annotated[
        str, typer.Option(help="Where the needle stands, in percent, with commas.")
    ] = "0,25,50,75,100",
    trials: Annotated[int, typer.Option(min=1, help="Keys tried a length and depth.")] = 3,
    seed: Annotated[int, typer.Option(help="Of keys and hay.")] = 0,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The heat map to write; JSON goes beside it.")
    ] = Path("needle.png"),
    settings: SetOption = None,
) -> None:
    """Hide a pass key in prose and see whether the model finds it, by length and depth.

    The key is scored against four decoys, so chance is 20 %; and looked for in greedy text.

    [dim]$[/] jaxlab eval needle --lengths 512,1024,2048
    [dim]$[/] jaxlab eval needle --set attention.pattern=cca --set attention.window_size=256
    """
    import pydoc_data.topics

    from jaxlab.evaluation.needle import needle as evaluate_needle
    from jaxlab.evaluation.needle import write_needle

    wanted = [int(x) for x in _numbers(lengths, "--lengths")]
    found = _numbers(depths, "--depths")
    check_picture(output)
    check_output(output.with_suffix(".json"))
    loaded = load_model(model, settings)
    hay = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    rows = table(
        *("tokens", "depth %", "above decoys", "log odds", "generated"),
        right=("tokens", "depth %", "above decoys", "log odds", "generated"),
    )
    console = stderr()
    total = len(wanted) * len(found)
    cells = evaluate_needle(
        loaded,
        hay,
        lengths=wanted,
        depths=found,
        trials=trials,
        seed=seed,
        progress=lambda cell: console.print(
            f"{cell.length} tokens, depth {cell.depth:g} %: {cell.accuracy:.0%} ({total} cells)"
        ),
    )
    for cell in cells:
        rows.add_row(
            f"{cell.length:,}",
            f"{cell.depth:g}",
            f"{cell.accuracy:.0%}",
            f"{cell.log_odds:+.2f}",
            f"{cell.generated:.0%}",
        )
    write_needle(cells, output)
    stdout().print(rows)
    console.print(f"wrote {output} and {output.with_suffix('.json')}")


def _numbers(text: str, option: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not numbers with commas between", param_hint=option
        ) from None
