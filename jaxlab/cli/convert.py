"""`jaxlab convert`: any model jaxlab can read, as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxlab.cli.console import stderr
from jaxlab.cli.generate import SetOption, load_model
from jaxlab.errors import StorageError


def convert(
    source: Annotated[
        str,
        typer.Argument(help="A name, a directory, a .gguf file, a training run, or a hub id."),
    ],
    directory: Annotated[Path, typer.Argument(help="Where to write; made if it is not there.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="Store as float32, bfloat16 or float16. Default: as it is read."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a directory that is not empty.")
    ] = False,
    settings: SetOption = None,
) -> None:
    """Write a model as a Hugging Face directory that transformers and jaxlab load.

    [dim]$[/] jaxlab convert smollm2-135m-instruct ./smollm2
    [dim]$[/] jaxlab convert model.Q4_K_M.gguf ./model --dtype bfloat16
    [dim]$[/] jaxlab convert runs/quickstart ./my-model
    [dim]$[/] jaxlab convert smollm2-135m-instruct ./sepllm --set attention.pattern=sepllm
    """
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise typer.BadParameter(
            f"{dtype!r} is not float32, bfloat16 or float16", param_hint="--dtype"
        )
    if directory.suffix in (".gguf", ".safetensors"):
        raise typer.BadParameter(
            f"{str(directory)!r} is named like a file, and a Hugging Face directory is what is "
            "written: leave out its ending",
            param_hint="DIRECTORY",
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())) and not force:
        raise StorageError(f"{directory} exists and is not empty; choose another or use --force")
    types = [f"param_dtype={dtype}"] if dtype else []
    model = load_model(source, [*types, *(settings or [])])
    written = model.save(directory)
    size = sum(path.stat().st_size for path in Path(written).rglob("*") if path.is_file())
    stderr().print(f"wrote {model.num_parameters:,} parameters, {size / 1e6:.1f} MB")
    print(written)
