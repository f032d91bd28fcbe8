"""`jaxlab preflight`: will this config fit that TPU slice, and how fast can it be?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxlab.cli.console import human_bytes, human_count, stderr, stdout, table
from jaxlab.cli.train import ConfigArgument, OverridesArgument, check_overrides


def preflight(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    topology: Annotated[
        str,
        typer.Option(
            "--topology", "-t", help="Chips of the slice, such as v5e:4x4, v5p:4x4x4 or v6e:16x16."
        ),
    ] = "v5p:4x4x4",
    mode: Annotated[
        str,
        typer.Option(help="train: one update. decode: one token for each of data.batch_size rows."),
    ] = "train",
    suggest: Annotated[
        bool, typer.Option("--suggest/--no-suggest", help="Look for a change that fits.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compile a config's real step for a TPU slice, without a TPU, and say whether it fits.

    Exit code 0 if it fits, 1 if not.

    [dim]$[/] jaxlab preflight configs/llama3_8b_pretrain.yaml --topology v5p:4x4x4
    [dim]$[/] jaxlab preflight configs/llama3_8b_pretrain.yaml -t v5e:4x4 data.sequence_length=2048
    [dim]$[/] jaxlab preflight configs/llama3_8b_pretrain.yaml -t v5e:2x4 --mode decode mesh.fsdp=8
    """
    if mode not in ("train", "decode"):
        raise typer.BadParameter(f"{mode!r} is neither train nor decode", param_hint="--mode")
    check_overrides(overrides)
    import os

    # The step is only compiled, never run: no accelerator of this machine is to be taken.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jaxlab.config import load_config
    from jaxlab.training.config import ExperimentConfig
    from jaxlab.training.preflight import preflight as run_preflight

    experiment = load_config(ExperimentConfig, Path(config), overrides or ())
    console = stderr()
    report = run_preflight(
        experiment,
        topology,
        mode,  # type: ignore[arg-type]
        suggest=suggest,
        progress=lambda message: console.print(f"{message} …", style="dim", markup=False),
    )
    if as_json:
        print(json.dumps(_as_json(report)))
    else:
        _show(report, config)
    if not report.fits:
        raise typer.Exit(1)


def _show(report: Any, config: str) -> None:
    out = stdout()
    chip = report.topology.chip
    mesh = " × ".join(f"{axis} {size}" for axis, size in report.mesh.items() if size > 1)
    out.print(
        f"[bold]{report.topology}[/]: {report.topology.chips} chips, mesh {mesh or 'of 1'}; "
        f"{human_count(report.num_params)} parameters, "
        f"{human_count(report.tokens_per_step)} tokens a step\n"
    )
    memory = table("memory of one chip", "", right=("",))
    if report.memory is not None:
        for label, size in (
            ("parameters", report.memory.parameters),
            ("optimizer", report.memory.optimizer),
            ("cache", report.memory.cache),
            ("batch", report.memory.batch),
            ("gradients, activations, workspace", report.memory.temporary),
            ("program", report.memory.program),
        ):
            if size:
                memory.add_row(label, human_bytes(size))
    memory.add_row("[bold]needed[/]", f"[bold]{human_bytes(report.total_bytes)}[/]")
    memory.add_row(f"a {chip.name} chip has", human_bytes(report.hbm_bytes))
    out.print(memory)
    spare = report.hbm_bytes - report.total_bytes
    if report.fits:
        out.print(f"[green]fits[/], {human_bytes(spare)} to spare ({spare / report.hbm_bytes:.0%})")
    else:
        out.print(f"[red]does not fit[/]: {human_bytes(-spare)} too much")
        _show_change(report, config, out)

    bound = report.roofline
    out.print()
    work = table("one step, one chip", "amount", "at full rate", right=("amount", "at full rate"))
    work.add_row("compute", f"{human_count(report.work.hardware_flops)}FLOP", _time(bound.compute))
    work.add_row("memory", human_bytes(report.work.hbm_bytes), _time(bound.memory))
    network = sum(report.work.network_bytes.values())
    work.add_row("network", human_bytes(network), _time(bound.network))
    out.print(work)
    out.print(
        f"bound by [bold]{bound.bound}[/]: at best {_time(bound.seconds)} a step, "
        f"{report.tokens_per_second:,.0f} tokens/s, MFU {bound.mfu:.0%}"
    )
    if report.compiler_flops:
        out.print(
            f"[dim]the compiler counts {human_count(report.compiler_flops)}FLOP a chip, each "
            "scanned layer once[/]"
        )


def _show_change(report: Any, config: str, out: Any) -> None:
    change = report.nearest_change
    if change is None:
        out.print("no nearby change was found that fits; try a larger slice or a smaller model")
        return
    out.print(
        f"nearest change that fits ({human_bytes(change.total_bytes)}):\n"
        f"  jaxlab preflight {config} --topology {change.topology} {change}".rstrip(),
        markup=False,
    )


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms"


def _as_json(report: Any) -> dict[str, Any]:
    import dataclasses

    change = report.nearest_change
    return {
        "topology": str(report.topology),
        "mode": report.mode,
        "mesh": report.mesh,
        "parameters": report.num_params,
        "fits": report.fits,
        "hbm_bytes": report.hbm_bytes,
        "total_bytes": report.total_bytes,
        "memory": dataclasses.asdict(report.memory) if report.memory else None,
        "work": dataclasses.asdict(report.work),
        "compiler_flops": report.compiler_flops,
        "roofline": {**dataclasses.asdict(report.roofline), "bound": report.roofline.bound},
        "tokens_per_second": report.tokens_per_second,
        "nearest_change": change
        and {"overrides": change.overrides, "topology": str(change.topology)},
    }
