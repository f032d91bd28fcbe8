"""`jaxlab chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxlab.cli.console import stderr
from jaxlab.cli.generate import (
    DEFAULT_MODEL,
    MaxNewTokens,
    ModelOption,
    RepetitionPenalty,
    Seed,
    SetOption,
    Temperature,
    TopP,
    load_model,
)
from jaxlab.errors import JaxlabError, PromptError

_COMMANDS = """\
/help              this list
/system TEXT       set the system message (and start over)
/reset             forget the conversation
/retry             answer the last message again, with another seed
/set KEY=VALUE     change sampling: temperature, top_p, top_k, max_new_tokens, seed …
/save FILE         write the conversation as JSON
/quit              leave (also Ctrl-D)"""


def chat(
    model: ModelOption = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = 0,
    settings: SetOption = None,
) -> None:
    """Talk with a chat model; the answer appears as it is made. /help lists commands.

    Ctrl-C stops an answer, Ctrl-D leaves. Lines can be piped in, too.

    [dim]$[/] jaxlab chat
    [dim]$[/] jaxlab chat -m ./my-model -t 0.7 --system "You are terse."
    """
    from jaxlab.inference import SamplingParams

    loaded = load_model(model, settings)
    if not loaded.tokenizer.chat_template:
        raise PromptError(
            f"{model} has no chat template, so it cannot chat; use `jaxlab generate --raw`"
        )
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    conversation = Conversation(loaded, sampling, system)
    console = stderr()
    console.print(f"[bold]{model}[/]  [dim]/help for commands, Ctrl-D to leave[/]")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            if sys.stdin.isatty():
                print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if not line:
            continue
        try:
            if line.startswith("/"):
                if not _command(line, conversation, console):
                    return
            else:
                _show(conversation.ask(line))
        except JaxlabError as error:
            console.print(f"[red]error:[/] {error}", markup=True)


class Conversation:
    """The messages so far, and how the next answer is sampled."""

    def __init__(self, model: Any, sampling: Any, system: str | None):
        self.model = model
        self.sampling = sampling
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str):
        """Yields the answer in pieces. A turn that fails leaves the conversation as it was."""
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            for piece in self.model.generator.stream(self.messages, self.sampling):
                answer += piece
                yield piece
        finally:  # an interrupted answer stays, as far as it got
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def retry(self):
        while self.messages and self.messages[-1]["role"] != "user":
            if self.messages[-1]["role"] == "system":
                break
            self.messages.pop()
        if not self.messages or self.messages[-1]["role"] != "user":
            raise PromptError("there is no message to answer again")
        question = self.messages.pop()["content"]
        self.sampling = replace(self.sampling, seed=self.sampling.seed + 1)
        yield from self.ask(question)


def _show(pieces) -> None:
    try:
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        pieces.close()
        sys.stdout.write(" …")
    sys.stdout.write("\n")
    sys.stdout.flush()


def _command(line: str, conversation: Conversation, console: Any) -> bool:
    """Carries out a `/command`; False to leave."""
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    if name in ("/quit", "/exit", "/q"):
        return False
    if name == "/reset":
        conversation.reset()
    elif name == "/system":
        conversation.system = argument or None
        conversation.reset()
    elif name == "/retry":
        _show(conversation.retry())
    elif name == "/set":
        conversation.sampling = _changed(conversation.sampling, argument)
    elif name == "/save":
        _save(argument, conversation.messages)
        console.print(f"saved to {argument}")
    elif name == "/help":
        console.print(_COMMANDS, markup=False)
    else:
        raise PromptError(f"unknown command {name}; /help lists them")
    return True


def _changed(sampling: Any, setting: str) -> Any:
    import dataclasses

    import yaml

    key, separator, value = setting.partition("=")
    names = [field.name for field in dataclasses.fields(sampling)]
    if not separator or key.strip() not in names:
        raise PromptError(f"/set {setting!r}: expected KEY=VALUE with a KEY of {', '.join(names)}")
    try:
        return replace(sampling, **{key.strip(): yaml.safe_load(value)})
    except (TypeError, ValueError) as error:
        raise PromptError(f"/set {setting}: {error}") from error


def _save(path: str, messages: list[dict[str, str]]) -> None:
    if not path:
        raise PromptError("/save needs a file name")
    try:
        text = json.dumps({"messages": messages}, ensure_ascii=False, indent=2)
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise PromptError(f"cannot save to {path}: {error}") from error
