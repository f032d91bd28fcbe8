"""Entry point: collects the commands and turns errors into messages and exit codes.

Exit codes: 0 success, 1 an error the message explains, 2 wrong usage, 130 interrupted (Ctrl-C).
Command modules import jax and the rest inside their functions, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import typer

from jaxlab.cli import (
    calibrate,
    chat,
    convert,
    data,
    doctor,
    evaluate,
    generate,
    inspect,
    models,
    preflight,
    state,
    train,
)
from jaxlab.errors import JaxlabError

app = typer.Typer(
    name="jaxlab",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start here:  [bold]jaxlab doctor[/]  ·  [bold]jaxlab generate -p 'What is JAX?'[/]  ·  "
    "[bold]jaxlab train configs/quickstart.yaml[/]",
)


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    debug: bool = typer.Option(
        False, "--debug", help="Show the traceback of an error. May stand anywhere in the line."
    ),
) -> None:
    """Train, sample and study language models in JAX: on one CPU, a GPU, or a TPU pod."""
    del version, debug  # handled in `run`, before any command is looked at


app.command("train")(train.train)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("convert")(convert.convert)
app.command("models")(models.models)
app.command("preflight")(preflight.preflight)
app.command("doctor")(doctor.doctor)
app.add_typer(data.app, name="data")
app.add_typer(evaluate.app, name="eval")
app.add_typer(inspect.app, name="inspect")
app.add_typer(state.app, name="state")
app.add_typer(calibrate.app, name="calibrate")


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one command line (default: this process's) and exits with its code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = _take_flag(arguments, "--debug")
    if arguments[:1] == ["--version"]:
        from importlib.metadata import version

        print(f"jaxlab {version('jaxlab')}")
        sys.exit(0)
    _quiet_environment()
    try:
        app(args=arguments, prog_name="jaxlab")
    except JaxlabError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        if getattr(error, "exit_at_once", False):
            # Nothing can be wound up in order: threads wait for a process that is gone.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
    except BrokenPipeError:
        # The reader of a pipe (`| head`) left; nothing more can or need be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if debug:
            raise
        print(
            f"error: unexpected {type(error).__name__}: {error}\n"
            "This should have had a better message; run again with --debug for the traceback.",
            file=sys.stderr,
        )
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    sys.exit(1)


def _take_flag(arguments: list[str], flag: str) -> bool:
    """Removes `flag` from the arguments before any `--`; says whether it was there."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    found = flag in arguments[:end]
    arguments[:end] = [argument for argument in arguments[:end] if argument != flag]
    return found


def _quiet_environment() -> None:
    """Settings libraries read when imported: no chatter on a machine without their hardware."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault(
        "TRANSFORMERS_VERBOSITY", "error"
    )  # "PyTorch was not found": it need not be
    os.environ.setdefault("MPLBACKEND", "Agg")
    if not _has_tpu():
        # libtpu, installed for `preflight`, would look for a TPU and complain at length.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
        os.environ.setdefault("TPU_LIBRARY_LOG_LEVEL", "3")
        os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
        os.environ.setdefault("TPU_LOG_DIR", "disabled")


def _has_tpu() -> bool:
    """Whether a device of Google's PCI vendor id is attached."""
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    return any(vendor.read_text().strip() == "0x1ae0" for vendor in vendors)


if __name__ == "__main__":
    run()
