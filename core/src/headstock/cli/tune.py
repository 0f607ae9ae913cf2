"""`headstock tune`: measures what could serve a model here, so that negotiation ranks by figures of this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstock.bench.profile import default_file
from headstock.bench.workload import parse
from headstock.cli.bench import check_lengths
from headstock.cli.hardware import Hardware
from headstock.cli.options import JSON, Choices, Limits, takes
from headstock.cli.question import machine_of, model_config, question
from headstock.cli.settings import Settings
from headstock.cli.tables import document, measuring, note, paragraphs, progress, table
from headstock.errors import HeadstockError
from headstock.models.embedded import embedded_model
from headstock.negotiate import negotiate
from headstock.offer import own_names
from headstock.plugins import discover
from headstock.prints import stdout_to_stderr
from headstock.render import explain as account
from headstock.render import raise_unsolved

if TYPE_CHECKING:
    from headstock.bench.profile import Point

Budget = Annotated[str, typer.Option(metavar="TIME", help="stop measuring after this long: 60s, 5m")]
Grid = Annotated[
    list[str] | None, typer.Option(metavar="WORKLOAD", help="what to measure, as for bench [default: by --max-batch]")
]


@takes(Choices, Limits)
def tune(settings: Settings, budget: Budget = "60s", grid: Grid = None, json: JSON = False) -> None:
    """Measures the backends that can serve a model on this machine, and keeps the figures as a profile.

    From then on negotiation ranks by them. The profile is of this device, this shape of model and these versions of
    packages, and is used for no others. What is fixed by flags or the configuration file is all that is measured. A
    profile that is there already is replaced whole.
    """
    from headstock.bench.tune import Tuner, default_grid, parse_budget

    seconds, choices = parse_budget(budget), settings.choices
    if not choices.profile:
        raise HeadstockError("--no-profile contradicts tune, which writes one", works="--profile-file for another")
    config = model_config(choices.model or embedded_model())
    hardware = Hardware.here(choices.device)
    settings_without = Settings(choices.model_copy(update={"profile": False, "profile_file": None}), settings.limits,
                                settings.sampling, settings.file, settings.origins)  # fmt: skip
    needs, policy = question(settings_without, hardware, config)
    loads = (
        parse(grid)
        if grid
        else default_grid(
            settings.limits.max_batch, needs[0].max_context, needs[0].device == "cpu", config.mla is not None
        )
    )
    check_lengths(loads, settings)
    if shared := [load.name for load in loads if load.shared]:
        raise HeadstockError("tune measures no shared prefixes", given=shared[0], works="decode and extend")

    from headstock.bench.profile import check_writable, save
    from headstock.device import Device

    machine, candidates = machine_of(hardware, choices.device), discover()
    options = own_names(settings.limits.backend_option, candidates)
    if not (decision := negotiate(needs, candidates, policy)).solved:
        raise_unsolved(decision)
    file = choices.profile_file or default_file(machine, needs)
    check_writable(file)
    _say_what_is_replaced(file, named=choices.profile_file is not None)
    tuner = Tuner(config, needs, candidates, policy, Device.open(choices.device), options=options)
    try:
        with stdout_to_stderr(), progress(not json and sys.stderr.isatty()) as report:
            tuned = tuner.run(loads, seconds, measuring(report))
    except KeyboardInterrupt:
        note("interrupted: no profile was written; a smaller --budget ends sooner and keeps what was measured")
        raise
    profile = tuner.profile(tuned, machine)
    save(profile, file)
    measured = {"profile": profile.measurements(), "crossovers": profile.crossovers(), "by_batch": True}
    decision = negotiate(needs, candidates, policy.model_copy(update=measured))
    if json:
        document(file=str(file), measured=tuned.measured, left=tuned.left, failures=list(tuned.failures.values()),
                 profile=profile.model_dump(mode="json"), decision=decision.model_dump(mode="json"))  # fmt: skip
        return
    table(
        ("role", "workload", "backend", "page", "a layer", "its plan", "spread"),
        [_row(p) for p in _ordered(tuned.points)],
    )
    paragraphs(["", *account(decision)])
    for each in profile.crossovers():
        forms = f"{each.absorbed} absorbed, {each.expanded} expanded"
        at = f"page size {each.page_size} {each.kv_layout}"
        print(f"latent attention is expanded from {each.tokens} new tokens on: {forms}; {at}")
    for failure in tuned.failures.values():
        note(f"notice: not measured any further: {failure}")
    if tuned.left:
        note(f"notice: {tuned.left} of {tuned.left + tuned.measured} workloads were left out; --budget gives more time")
    note(f"profile: {file}, {len(profile.points)} figures")


def _say_what_is_replaced(file: Path, named: bool) -> None:
    """Tells of a profile that is there; refuses to write over what is none and was named by somebody."""
    from headstock.bench.profile import contents

    try:
        there = contents(file)
    except HeadstockError as error:
        if named:
            works = "--profile-file with another name, or this file removed"
            raise HeadstockError(f"{error.what}, and is not written over", given=file, works=works) from None
        there = "something that is no profile"
    if there:
        note(f"notice: {file} has {there}, which this run replaces; another --profile-file keeps that")


def _ordered(points: list[Point]) -> list[Point]:
    return sorted(points, key=lambda p: (p.role, p.group, p.batch, p.tokens, p.context, p.seconds + p.plan))


def _row(point: Point) -> list[str]:
    from headstock.bench.report import duration

    where = point.role if point.group == "all" else f"{point.role} ({point.group})"
    new = point.tokens // point.batch
    lengths = f"{point.batch}x{point.context}" if new == 1 else f"{point.batch}x{new}+{point.context - new}"
    page = f"{point.page_size} {point.kv_layout}" if point.page_size else ""
    return [where, lengths, point.backend, page, duration(point.seconds), duration(point.plan), f"{point.spread:.0%}"]
