"""`jaxlab state`: what an xLSTM remembers of a prompt, as a file that other runs go on from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from jaxlab.cli.console import human_bytes, stderr
from jaxlab.cli.generate import (
    MaxNewTokens,
    ModelOption,
    Seed,
    SetOption,
    Stop,
    Temperature,
    TopP,
    load_model,
    read_prompts,
)
from jaxlab.errors import PromptError

app = typer.Typer(
    help="Keep what a model with a state of fixed size remembers of a prompt.",
    no_args_is_help=True,
)


@app.callback()
def _state() -> None:
    """Keep what a model with a state of fixed size remembers of a prompt."""


@app.command("save")
def save(
    output: Annotated[Path, typer.Argument(help="The file to write.")],
    model: ModelOption,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the prompt from a text file.")
    ] = None,
    settings: SetOption = None,
) -> None:
    """Read a prompt once, and write the state it leaves: as large for a page as for a book.

    [dim]$[/] jaxlab state save book.state -m runs/xlstm_165m -f book.txt
    [dim]$[/] jaxlab state load book.state -m runs/xlstm_165m -p "The book is about"
    """
    prompts = read_prompts([prompt] if prompt is not None else [], file)
    if len(prompts) != 1 or not isinstance(prompts[0], str):
        raise PromptError("a state is of one prompt: give a text, not a list of prompts")
    loaded = load_model(model, settings)
    state = loaded.generator.read(prompts[0])
    state.save(output)
    size = output.stat().st_size
    stderr().print(f"{state.num_tokens:,} tokens read, {human_bytes(size)} written")
    print(output)


@app.command("load")
def load(
    state_file: Annotated[Path, typer.Argument(metavar="STATE", help="A file of `state save`.")],
    model: ModelOption,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="More text to read first; may be empty.")
    ] = "",
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    stop: Stop = None,
    seed: Seed = 0,
    settings: SetOption = None,
) -> None:
    """Go on from a saved state, as if its prompt had just been read.

    [dim]$[/] jaxlab state load book.state -m runs/xlstm_165m -p "The book is about" -n 60
    """
    from jaxlab.inference import PromptState, SamplingParams

    loaded = load_model(model, settings)
    state = PromptState.load(state_file, loaded.config, loaded.params)
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        stop=tuple(stop or ()),
        seed=seed,
    )
    for piece in loaded.generator.stream(prompt, sampling, after=state):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
