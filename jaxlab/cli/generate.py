"""`jaxlab generate`: continue prompts with a model."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxlab.cli.console import stderr
from jaxlab.errors import PromptError

DEFAULT_MODEL = "smollm2-135m-instruct"

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="A name (`jaxlab models`), a Hugging Face directory, a .gguf file, a training run's "
        "output directory, or a hub id.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change the model's config, e.g. dtype=bfloat16 or "
        "attention.pattern=sepllm. May be repeated.",
    ),
]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", "-n", min=1, help="Stop after so many tokens.")
]
Temperature = Annotated[
    float, typer.Option("--temperature", "-t", min=0.0, help="0: always the likeliest token.")
]
TopK = Annotated[int | None, typer.Option("--top-k", min=1, help="Sample from the k likeliest.")]
TopP = Annotated[
    float, typer.Option("--top-p", min=0.0, max=1.0, help="Sample from the likeliest p of mass.")
]
MinP = Annotated[
    float,
    typer.Option("--min-p", min=0.0, max=1.0, help="Drop tokens below p times the likeliest."),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option("--repetition-penalty", min=1.0, help="Divide the odds of tokens already used."),
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="End before this text. May be repeated.")
]
Seed = Annotated[int, typer.Option("--seed", help="The same seed gives the same text.")]


def generate(
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt. May be repeated: a batch.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="Read the prompt from a file; from a .jsonl file one prompt a line "
            '({"prompt": …} or {"messages": […]}).',
        ),
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Put prompts through the chat template, or continue them as they stand. "
            "Default: chat if the model has a template.",
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="A system message before each prompt.")
    ] = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    stop: Stop = None,
    seed: Seed = 0,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Show text as it is made. Default: when there is one prompt and no --json.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a prompt, on its own line.")
    ] = False,
    settings: SetOption = None,
) -> None:
    """Continue prompts, or answer them if the model is a chat model.

    Without --prompt or --file the prompt is read from standard input.

    [dim]$[/] jaxlab generate -p "What is the capital of France?"
    [dim]$[/] jaxlab generate -m runs/quickstart --raw -p "The with statement" -t 0.8 --seed 1
    [dim]$[/] git diff | jaxlab generate --system "Summarise this change in one line." -n 40
    [dim]$[/] jaxlab generate -f prompts.jsonl --json > answers.jsonl
    """
    prompts = read_prompts(prompt or [], file)
    if stream and as_json:
        raise typer.BadParameter("--stream and --json exclude each other", param_hint="--stream")
    if stream and len(prompts) > 1:
        raise typer.BadParameter("only one prompt can be streamed", param_hint="--stream")
    loaded = load_model(model, settings)
    prompts = [_as_messages(p, loaded, chat, system, model) for p in prompts]

    from jaxlab.inference import SamplingParams

    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=tuple(stop or ()),
        seed=seed,
    )
    if stream or (stream is None and len(prompts) == 1 and not as_json):
        for piece in loaded.generator.stream(prompts[0], sampling):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        return
    for given, generation in zip(
        prompts, loaded.generator.generate(prompts, sampling), strict=True
    ):
        if as_json:
            key = "prompt" if isinstance(given, str) else "messages"
            record = {
                key: given,
                "text": generation.text,
                "tokens": len(generation.token_ids),
                "finish_reason": generation.finish_reason,
            }
            print(json.dumps(record, ensure_ascii=False))
            continue
        if len(prompts) > 1:
            shown = given if isinstance(given, str) else given[-1]["content"]
            print(f"### {shown}")
        print(generation.text)


def load_model(source: str, settings: list[str] | None) -> Any:
    """`jaxlab.load` with the `KEY=VALUE` settings of a command line."""
    import yaml

    import jaxlab

    overrides: dict[str, Any] = {}
    for setting in settings or []:
        key, separator, value = setting.partition("=")
        if not separator or not all(key.split(".")):
            lacks = "" if key else ": no key stands before the ="
            raise typer.BadParameter(f"{setting!r} is not KEY=VALUE{lacks}", param_hint="--set")
        *sections, name = key.split(".")
        node = overrides
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise typer.BadParameter(
                    f"{setting!r}: {section} was given as a value before", param_hint="--set"
                )
        try:
            node[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise typer.BadParameter(
                f"{setting!r}: the value is not YAML", param_hint="--set"
            ) from error
    # A finished run keeps its model below its output directory.
    trained = Path(source) / "model"
    if (trained / "config.json").is_file():
        source = str(trained)
    console = stderr()
    with console.status(f"loading {source}") if console.is_terminal else nullcontext():
        return jaxlab.load(source, **overrides)


def read_prompts(prompts: list[str], file: Path | None) -> list[Any]:
    if prompts and file:
        raise typer.BadParameter("give --prompt or --file, not both", param_hint="--file")
    if prompts:
        return list(prompts)
    if file is None:
        if sys.stdin.isatty():
            raise typer.BadParameter("no prompt: give --prompt, --file, or pipe one in")
        return [_not_empty(sys.stdin.read(), "standard input")]
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read prompts from {file}: {error}") from error
    if file.suffix != ".jsonl":
        return [_not_empty(text, str(file))]
    records = [
        _read_record(line, f"{file}:{number}")
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip()
    ]
    if not records:
        raise PromptError(f"{file} holds no prompt")
    return records


def _read_record(line: str, where: str) -> Any:
    try:
        record = json.loads(line)
        return record["prompt"] if "prompt" in record else record["messages"]
    except (ValueError, KeyError, TypeError):
        raise PromptError(
            f'{where} is not a JSON object with "prompt" or "messages": {line[:80]!r}'
        ) from None


def _not_empty(text: str, where: str) -> str:
    text = text.rstrip("\n")
    if not text.strip():
        raise PromptError(f"the prompt from {where} is empty; give it some text")
    return text


def _as_messages(
    prompt: Any, model: Any, chat: bool | None, system: str | None, source: str
) -> Any:
    """The prompt as chat messages if it is to go through the template, else as it stands."""
    has_template = bool(model.tokenizer.chat_template)
    if chat is None:
        chat = has_template
    if not chat:
        if system is not None or not isinstance(prompt, str):
            raise PromptError(
                f"{'--system' if system else 'a prompt of messages'} needs a chat template, which "
                f"{source} {'has; leave out --raw' if has_template else 'does not have'}"
            )
        return prompt
    if not has_template:
        raise PromptError(f"{source} has no chat template; use --raw, or a model made for chat")
    messages = prompt if not isinstance(prompt, str) else [{"role": "user", "content": prompt}]
    return ([{"role": "system", "content": system}] if system else []) + list(messages)
