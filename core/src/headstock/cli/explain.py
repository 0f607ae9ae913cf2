"""`headstock explain`: which backends a model would run on, and why not on others. Nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from headstock.cli.options import AssumeGPU, BackendOptions, Choices, takes
from headstock.cli.question import asked_hardware, model_config, question
from headstock.cli.settings import Settings
from headstock.cli.tables import paragraphs
from headstock.decision import Decision
from headstock.errors import HeadstockError
from headstock.models.embedded import embedded_model
from headstock.negotiate import negotiate
from headstock.offer import Candidate, own_names
from headstock.plugins import discover
from headstock.render import explain as account

All = Annotated[bool, typer.Option("--all", help="every refusal, not only the nearest")]
AsJSON = Annotated[bool, typer.Option("--json", help="print the decision, which --decision pins")]


Verbose = Annotated[
    bool, typer.Option("--verbose", help="load the chosen backends too, and let them tell which kernels they would run")
]


@takes(Choices, BackendOptions)
def explain(
    settings: Settings, assume_gpu: AssumeGPU = None, all: All = False, verbose: Verbose = False, json: AsJSON = False
) -> None:
    """Tells which backends a model would run on, and why.

    Only the config of the model is read, and nothing loaded but with --verbose. Exits with 2 where no combination of
    backends can serve it.
    """
    if verbose and assume_gpu is not None:
        raise HeadstockError("kernels are told by a backend that runs", given=assume_gpu, works="no --assume-gpu")
    if verbose and json:
        raise HeadstockError("--json prints the decision, which has no kernels", given="--verbose", works="one of them")
    needs, policy = question(settings, asked_hardware(settings, assume_gpu))
    candidates = discover()
    decision = negotiate(needs, candidates, policy)
    if decision.solved:
        unused = decision.unused(own_names(settings.limits.backend_option, candidates))
        decision = decision.model_copy(update={"notices": (*decision.notices, *unused)})
    if json:
        print(decision.model_dump_json(indent=2))
    else:
        asked = [f"  {choice}" for choice in settings.asked()]
        paragraphs([*(["Asked for", *asked] if asked else []), *account(decision, all)])
        if verbose and decision.solved:
            paragraphs(["Kernels", *(f"  {line}" for line in _kernels(settings, decision, candidates))])
    if not decision.solved:
        raise typer.Exit(2)


def _kernels(settings: Settings, decision: Decision, candidates: Sequence[Candidate]) -> Iterator[str]:
    from headstock.bench.kernels import kernels
    from headstock.device import Device

    options = own_names(settings.limits.backend_option, candidates)
    config = model_config(settings.choices.model or embedded_model())
    return kernels(decision, config, candidates, Device.open(settings.choices.device), options)
