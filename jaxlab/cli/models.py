"""`jaxlab models`: the models that have a name."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxlab.cli.console import stdout, table


def models(
    fetch: Annotated[
        str | None, typer.Option("--fetch", metavar="NAME", help="Download a model now.")
    ] = None,
) -> None:
    """List the models that have a name, and whether they are on this machine.

    Wherever a command takes a model, a Hugging Face directory, a .gguf file, a training run or a
    hub id do as well.

    [dim]$[/] jaxlab models
    [dim]$[/] jaxlab models --fetch smollm2-135m-instruct
    """
    from jaxlab.checkpoints import NAMED_MODELS, resolve

    if fetch is not None:
        print(resolve(fetch))
        return
    rows = table("name", "on this machine", "description")
    for name, named in sorted(NAMED_MODELS.items()):
        path = _on_this_machine(name, named)
        rows.add_row(name, str(path) if path else "no (fetched when used)", named.description)
    stdout().print(rows)


def _on_this_machine(name: str, named: Any) -> Path | None:
    """Its file in the cache or in the installed package; unlike `resolve`, not verified."""
    from jaxlab.data.model_source import cache_directory

    spec = importlib.util.find_spec(named.module)
    folders = [
        cache_directory() / "models" / name,
        *map(Path, (spec.submodule_search_locations or ()) if spec else ()),
    ]
    return next((f / named.filename for f in folders if (f / named.filename).is_file()), None)
