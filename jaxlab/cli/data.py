"""`jaxlab data`: look at what a config trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxlab.cli.console import stdout
from jaxlab.cli.train import ConfigArgument, OverridesArgument, check_overrides

app = typer.Typer(help="Look at the data of a config.", no_args_is_help=True)


@app.callback()
def _data() -> None:
    """Look at the data of a config."""


@app.command("show")
def show(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    rows: Annotated[int, typer.Option("--rows", "-r", min=1, help="Rows to show.")] = 2,
    split: Annotated[str, typer.Option(help="train or validation.")] = "train",
    statistics: Annotated[
        bool, typer.Option("--stats", help="Also count all documents and the unigram entropy.")
    ] = False,
) -> None:
    """Print packed rows as the model will read them.

    Text in ⟦ ⟧ is read but not learned.

    [dim]$[/] jaxlab data show configs/quickstart.yaml
    [dim]$[/] jaxlab data show configs/smollm2_finetune.yaml data.source=chats.jsonl --rows 5
    """
    if split not in ("train", "validation"):
        raise typer.BadParameter(f"{split!r} is neither train nor validation", param_hint="--split")
    check_overrides(overrides)
    from jaxlab.config import load_config
    from jaxlab.data import make_pipeline, open_split, render_row, unigram_entropy
    from jaxlab.training.config import ExperimentConfig

    experiment = load_config(ExperimentConfig, Path(config), overrides or ())
    tokenizer = _tokenizer(experiment)
    out = stdout()
    pipeline = make_pipeline(experiment.data, tokenizer, split=split, seed=experiment.seed)
    shown = 0
    for batch in pipeline:
        for row in range(min(rows - shown, len(batch["tokens"]))):
            out.print(render_row(batch, row, tokenizer, width=out.width), markup=False)
            out.print()
            shown += 1
        if shown >= rows:
            break
    pipeline.close()
    if statistics:
        for name in ("train", "validation"):
            out.print(f"{name}: {len(open_split(experiment.data, name)):,} documents")
        entropy = unigram_entropy(experiment.data, tokenizer)
        out.print(f"unigram entropy: {entropy:.3f} nats per token (a loss to get below)")


def _tokenizer(experiment):
    """The tokenizer that training would use."""
    from jaxlab.checkpoints import resolve
    from jaxlab.data.tokenizers import load_tokenizer

    if experiment.tokenizer is not None:
        return load_tokenizer(experiment.tokenizer)
    return load_tokenizer(resolve(experiment.model.source))
