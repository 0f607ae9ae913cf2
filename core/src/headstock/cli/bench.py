"""`headstock bench`: installed backends on the same workloads, checked, timed by turns, and drawn."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstock.bench.recorded import read_trace, representatives
from headstock.bench.shapes import preset
from headstock.bench.workload import Workload, parse
from headstock.cli.hardware import Hardware
from headstock.cli.options import JSON, BackendOptions, Choices, takes
from headstock.cli.question import machine_of, model_config, question
from headstock.cli.settings import Settings
from headstock.cli.tables import document, measuring, note, paragraphs, progress, table
from headstock.errors import HeadstockError
from headstock.models.embedded import embedded_model
from headstock.offer import Candidate, own_names
from headstock.plugins import discover
from headstock.prints import stdout_to_stderr

if TYPE_CHECKING:
    from headstock.models.config import ModelConfig

Workloads = Annotated[
    list[str] | None, typer.Argument(metavar="WORKLOAD", help="decode:64x4096, extend:4x512+8192, cascade:64x8192+256")
]
Recorded = Annotated[
    Path | None, typer.Option("--from-trace", metavar="FILE", help="the workloads that a running engine recorded")
]
Shape = Annotated[str | None, typer.Option(metavar="NAME", help="a known model's shape in place of --model: llama-8b")]
Backends = Annotated[list[str] | None, typer.Option("--backend", metavar="NAME", help="only this one; may be repeated")]
Eager = Annotated[bool, typer.Option("--eager", help="launch decode steps one by one, where graphs would be replayed")]
Rounds = Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="times that each backend takes its turn")]
Plots = Annotated[Path | None, typer.Option(metavar="FOLDER", help="draw the figures, as PNG and as one HTML page")]

UNUSED = {"expand_from": "bench measures both forms of latent attention", "profile_file": "bench chooses no backend"}
"""Choices that decide nothing here, and why."""


@takes(Choices, BackendOptions)
def bench(
    settings: Settings,
    workloads: Workloads = None,
    from_trace: Recorded = None,
    shape: Shape = None,
    backend: Backends = None,
    eager: Eager = False,
    rounds: Rounds = 9,
    plots: Plots = None,
    json: JSON = False,
) -> None:
    """Times attention backends on the same workloads.

    A workload is decode:64x4096 (64 requests of 4096 keys each), extend:4x512+8192 (4 requests of 512 new tokens after
    8192 cached ones) or cascade:64x8192+256 (64 requests that share 8192 keys and have 256 of their own); {1,8,64} in
    place of a number makes several. Outputs are compared with a float64 reference first; what is wrong is not timed.
    """
    loads = loads_of(workloads, from_trace)
    if shape is not None and settings.choices.model is not None:
        raise HeadstockError("--shape contradicts --model", given=shape, works="one of them")
    config = preset(shape) if shape is not None else model_config(settings.choices.model or embedded_model())
    candidates = _named(discover(), backend)
    if plots is not None:
        from headstock.bench.plots import check_installed, make_folder

        check_installed()
        make_folder(plots)
    check_lengths(loads, settings)
    for unused, why in UNUSED.items():
        if unused in settings.origins:
            note(f"notice: {settings.origins[unused]} is not used: {why}")
    hardware = Hardware.here(settings.choices.device)
    needs, policy = question(settings, hardware, config)

    from headstock.bench.compare import Comparison
    from headstock.bench.report import COLUMNS, as_dict, failures, kernels, ordered, row, summary
    from headstock.bench.timing import measure_limits
    from headstock.device import Device

    device, options = Device.open(settings.choices.device), own_names(settings.limits.backend_option, discover())
    graph = False if eager else None
    comparison = Comparison(config, needs, candidates, policy, device, options=options, graph=graph, rounds=rounds)
    with stdout_to_stderr(), progress(not json and sys.stderr.isatty()) as report:
        measured = comparison.run(loads, measuring(report))
    limits = measure_limits(device, needs[0].dtype)
    where = _where(settings, shape, config, hardware, needs[0].dtype)
    if json:
        document(**as_dict(measured, limits, where))
    else:
        if timed := ordered(measured):
            table(COLUMNS, [row(each, limits) for each in timed])
        paragraphs(["", summary(limits, needs[0].dtype)])
        for title, lines in (("Kernels", kernels(measured)), ("Not timed", failures(measured))):
            paragraphs(["", title, *(f"  {line}" for line in lines)] if lines else [])
    if plots is not None:
        from headstock.bench.plots import save

        note(f"drawn: {', '.join(str(file) for file in save(plots, measured, limits, where))}")
    if not any(each.device for each in measured):
        raise typer.Exit(1)


def loads_of(workloads: Sequence[str] | None, from_trace: Path | None) -> list[Workload]:
    """The workloads of a command: those written, or those of a trace."""
    if from_trace is not None and workloads:
        raise HeadstockError("--from-trace brings its own workloads", given=" ".join(workloads), works="one of them")
    return representatives(read_trace(from_trace)) if from_trace is not None else parse(workloads or ())


def check_lengths(loads: Sequence[Workload], settings: Settings) -> None:
    """Raises HeadstockError for a workload beyond the context that was asked for."""
    most = settings.choices.max_context
    for load in loads:
        if most and load.context > most:
            origin = settings.origins.get("max_context", "--max-context")
            raise HeadstockError(f"{load.name} is longer than {origin}", given=load.context, works=f"at most {most}")


def _named(candidates: list[Candidate], names: Sequence[str] | None) -> list[Candidate]:
    """The candidates that `names` mean, all where there are none; HeadstockError where nobody is meant."""
    if not candidates:
        raise HeadstockError("there is no backend to time", type="headstock plugins")
    for name in names or ():
        if not any(each.answers_to(name) for each in candidates):
            known = [each.name for each in candidates]
            near = get_close_matches(name, known, 1)
            works = f"{near[0]}, perhaps" if near else ", ".join(known)
            raise HeadstockError("--backend names an unknown backend", given=name, works=works)
    return [each for each in candidates if not names or any(each.answers_to(name) for name in names)]


def _where(
    settings: Settings, shape: str | None, config: ModelConfig, hardware: Hardware, dtype: str
) -> dict[str, Any]:
    """What the figures are of."""
    from headstock.bench.machine import packages

    machine, one = machine_of(hardware, settings.choices.device), config.layers[0]
    model = shape or (str(settings.choices.model) if settings.choices.model else "the embedded model")
    return {
        "device": machine.device,
        "driver": machine.driver,
        "packages": packages(discover()),
        "model": f"{model}: {config.num_layers} layers, {one.num_heads}/{one.num_kv_heads} heads × {one.head_dim}",
        "dtype": dtype,
        "command": " ".join(["headstock", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
    }
