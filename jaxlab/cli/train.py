"""`jaxlab train`: run an experiment, showing how it goes."""

from __future__ import annotations

import datetime
import math
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from jaxlab.cli.console import human_bytes, human_count, stderr, stdout

ConfigArgument = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A YAML file, such as configs/quickstart.yaml.")
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Changes to the config, e.g. training.steps=100."
    ),
]


def train(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    distributed: Annotated[
        bool,
        typer.Option(
            "--distributed",
            help="One of several processes: find the others through the cluster (TPU pod, Slurm, "
            "MPI). To say who is who, set distributed.coordinator_address and the like.",
        ),
    ] = False,
) -> None:
    """Train a model, or resume a run: the last checkpoint in output_dir is where it goes on.

    Ctrl-C saves and stops; run the same command to go on. At the end there are a loss curve, a
    sample, metrics.jsonl, and the model as a Hugging Face directory.

    [dim]$[/] jaxlab train configs/quickstart.yaml
    [dim]$[/] jaxlab train configs/quickstart.yaml training.steps=50 output_dir=/tmp/try
    [dim]$[/] jaxlab train configs/smollm2_finetune.yaml data.source=chats.jsonl mesh.fsdp=4
    """
    check_overrides(overrides)
    changes = [*(overrides or []), *(["distributed.auto=true"] if distributed else [])]
    from jaxlab.config import load_config
    from jaxlab.training.config import ExperimentConfig

    experiment = load_config(ExperimentConfig, Path(config), changes)

    from jaxlab.training import fit

    reporter = _reporter(stderr())
    try:
        result = fit(experiment, reporter=reporter)
    finally:
        reporter.close()
    if result.stopped_by is not None:
        raise typer.Exit(128 + result.stopped_by)  # as a shell reports a signal
    _show_result(experiment, result)


def check_overrides(overrides: list[str] | None) -> None:
    """A word without `=` after the config is wrong usage, not a wrong config."""
    for override in overrides or []:
        if "=" not in override:
            raise typer.BadParameter(f"{override!r} is not KEY=VALUE", param_hint="[KEY=VALUE]...")


def _show_result(experiment: Any, result: Any) -> None:
    out = stdout()
    if result.validation_loss is not None:
        perplexity = math.exp(min(result.validation_loss, 700))
        out.print(
            f"validation loss  {result.validation_loss:.3f} nats per token (perplexity "
            f"{perplexity:.2f})"
        )
        entropy = result.unigram_entropy
        if entropy is not None:
            verdict = "below" if result.validation_loss < entropy else "NOT below"
            out.print(f"unigram model    {entropy:.3f} nats per token: the model is {verdict} it")
    for prompt, text in result.samples:
        out.print(f"\nsample after {prompt!r}:", markup=False)
        out.print(f"{prompt}{text}\n", markup=False)
    for name, path in result.paths.items():
        out.print(f"{name:<16} {path}", markup=False)


def _reporter(console: Console) -> Any:
    from jaxlab.training.reporter import Reporter

    class Progressing(Reporter):
        """A progress bar on a terminal, a line now and then elsewhere."""

        def __init__(self) -> None:
            self.bar: Progress | None = None
            self.task: Any = None
            self.last_line = 0.0
            self.steps = 0
            self.first: tuple[int, float] | None = None

        def on_start(self, info: dict[str, Any]) -> None:
            self.steps = info["steps"]
            trainable = info["num_trainable"]
            part = (
                ""
                if trainable == info["num_parameters"]
                else (f" ({human_count(trainable)} trained)")
            )
            console.print(
                f"[bold]{info['name']}[/]  {human_count(info['num_parameters'])} parameters{part} "
                f"on {info['devices']}, {info['batch_size']} × {info['sequence_length']} tokens a "
                f"step; parameters {human_bytes(info['params_bytes'])}, optimizer "
                f"{human_bytes(info['optimizer_bytes'])}"
            )
            if info["resumed"]:
                console.print(f"resuming after step {info['start_step']}")
            if console.is_terminal:
                self.bar = Progress(
                    TextColumn("{task.description}"),
                    BarColumn(),
                    TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                    _Rates(),
                    TimeRemainingColumn(),
                    console=console,
                )
                self.bar.start()
                self.task = self.bar.add_task(
                    "compiling", total=info["steps"], completed=info["start_step"]
                )

        def on_compile(self, seconds: float) -> None:
            if self.bar:
                self.bar.update(self.task, description="training")
            console.print(f"compiled in {seconds:.1f} s", style="dim")

        def on_step(self, metrics: dict[str, float]) -> None:
            step = int(metrics["step"])
            self.first = self.first or (step, time.monotonic())
            if self.bar:
                self.bar.update(self.task, completed=step, metrics=metrics)
            elif self._line_is_due(step):
                console.print(
                    f"step {step}/{self.steps}  loss {metrics['loss']:.3f}  "
                    f"{metrics['tokens_per_second']:,.0f} tokens/s{self._remaining(step)}"
                )

        def _line_is_due(self, step: int) -> bool:
            """The first step, the last, and one every ten seconds."""
            now = time.monotonic()
            if step not in (1, self.steps) and now - self.last_line < 10:
                return False
            self.last_line = now
            return True

        def _remaining(self, step: int) -> str:
            """At the mean pace so far, validations and checkpoints included."""
            assert self.first is not None
            begun, then = self.first
            if step == begun:
                return ""
            left = (self.steps - step) * (time.monotonic() - then) / (step - begun)
            return f"  {datetime.timedelta(seconds=round(left))} left"

        def on_eval(self, metrics: dict[str, float]) -> None:
            console.print(
                f"step {int(metrics['step'])}  validation loss {metrics['validation_loss']:.3f}  "
                f"perplexity {metrics['validation_perplexity']:.2f}"
            )

        def on_checkpoint(self, step: int, path: str) -> None:
            console.print(f"step {step}  saving {path}", style="dim", markup=False)

        def on_message(self, text: str) -> None:
            console.print(text, markup=False)

        def close(self) -> None:
            if self.bar:
                self.bar.stop()

    return Progressing()


class _Rates(ProgressColumn):
    """Loss and speed of the last step."""

    def render(self, task: Task) -> Text:
        metrics = task.fields.get("metrics")
        if not metrics:
            return Text("")
        text = f"loss {metrics['loss']:.3f}  {metrics['tokens_per_second']:,.0f} tokens/s"
        if metrics.get("mfu"):
            text += f"  {metrics['mfu']:.0%} MFU"
        return Text(text)
